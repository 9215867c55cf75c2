"""Settings that each are right and do not go together, and what to write instead."""
