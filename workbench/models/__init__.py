"""Backbones, heads, quantisation, classifiers, and models that a run exported."""
