"""Faults of rows of text: rules of published corpora and of conversations, and rows that they flag."""
