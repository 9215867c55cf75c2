"""Search over settings: which trials go on, which settings are tried next, and which mattered."""
