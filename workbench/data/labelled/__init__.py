"""Labelled rows: classes, numbers, columns, class-balanced draws, folds of them."""
