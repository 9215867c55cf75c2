"""Methods that put small networks or whole blocks between those of the backbone."""
