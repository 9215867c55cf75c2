"""`evaluate`, `predict`, `generate` and `sample`: answers of a finished run."""
