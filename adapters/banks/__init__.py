"""Many adapters over one frozen backbone, whose rows go through it together."""
