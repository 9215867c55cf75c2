"""The section `image.prepare`: steps that every picture goes through once, before it is stored for training."""

from __future__ import annotations

from workbench.schema import Section


class PrepareConfig(Section):
    """Steps in the order of their fields; each is off by default."""
