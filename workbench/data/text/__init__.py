"""Rows of text to token ids and loss masks."""
