"""What of a backbone trains when: policies, what they are told, and the outputs of what is frozen, computed once."""
