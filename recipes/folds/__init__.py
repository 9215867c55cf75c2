"""Cross-validation and its verbs."""
