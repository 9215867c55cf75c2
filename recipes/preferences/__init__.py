"""Runs that learn from judged answers, and reward models."""
