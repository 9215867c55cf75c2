"""Configuration files of other tools as recipes: what is taken over, what to look at, what has no equivalent."""
