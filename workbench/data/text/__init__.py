"""Rows of text: formats, chat templates, token ids and loss masks."""
