"""Freezing: the layers that train at each step, measurements for policies, and cached outputs of frozen blocks."""
