"""Recordings: decoding, the features that a backbone hears, the store of prepared ones, augmentation."""
