class PictureRows:
    """Placeholder."""
