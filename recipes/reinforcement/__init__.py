"""Runs that learn from rewards of their own answers."""
