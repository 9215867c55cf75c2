"""Near-duplicates, and stratified splits without leaks."""
