"""Know before you run: the real step on tensors without numbers, and what it takes."""
