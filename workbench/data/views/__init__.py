"""Other ways to write a row, for test-time augmentation."""
