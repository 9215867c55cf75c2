"""A run of one adapter: what all tasks share, the rows that it chooses, and where it starts from."""
