"""The section `image.augment`: random changes of training pictures, other ones in each epoch."""

from __future__ import annotations

from workbench.schema import Section


class AugmentConfig(Section):
    """Random changes in the order of their fields; each is off by default."""
