"""Know before you run: memory and time of the real step, on tensors without values and on small models."""
