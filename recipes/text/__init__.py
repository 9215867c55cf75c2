"""Runs that train language models on the next or on hidden tokens."""
