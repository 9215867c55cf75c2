"""Pictures: where they come from, decoding, preparation, the store of prepared pixels, augmentation."""
