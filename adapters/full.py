"""Full fine-tuning: every weight of the backbone trains; what is saved is a stock Hugging Face model."""

from __future__ import annotations

from typing import Literal

from workbench.schema import Section


class Full(Section):
    """No adapter: all weights of the backbone are trained."""

    method: Literal["full"] = "full"
