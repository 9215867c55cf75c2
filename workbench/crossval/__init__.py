"""Cross-validation: the adapters of folds, rounds of pseudo-labels, views, and the stages that are kept."""
