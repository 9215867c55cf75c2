"""Labelled rows: their labels, columns, class-balanced sampling and folds."""
