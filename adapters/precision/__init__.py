"""Adapter layers over quantised and half-precision weights."""
