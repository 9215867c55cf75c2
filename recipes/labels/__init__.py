"""Runs that classify texts and pictures, and their verbs."""
