"""Views of rows: rewritten rows for test-time augmentation."""
