"""The training loop, adapters and banks of them, checkpoints."""
