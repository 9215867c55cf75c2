"""Methods that scale or rotate what frozen weights compute."""
