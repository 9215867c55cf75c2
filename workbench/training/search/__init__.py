"""Search: who goes on after each comparison, what is tried next, and which settings mattered. No model is near."""
