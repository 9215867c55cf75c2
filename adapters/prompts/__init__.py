"""Methods that put trainable tokens, keys or values before each row."""
