"""Duplicates, similarity and leak-free splits."""
