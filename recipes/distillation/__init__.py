"""Runs whose student learns from a teacher."""
