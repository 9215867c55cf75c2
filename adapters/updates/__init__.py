"""Methods that add an update to frozen weights: LoRA, its starts and its relatives."""
