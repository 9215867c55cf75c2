"""Sections of a run's configuration."""
