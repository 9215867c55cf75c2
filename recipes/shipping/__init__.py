"""`merge`, `combine` and `export`: a finished run for other programs."""
