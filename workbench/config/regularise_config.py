"""Section `regularise`: noise in the forward pass and smoother targets, against learning rows by heart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from workbench.schema import Section

Rate = Annotated[float, Field(ge=0, lt=1)]


class RegulariseConfig(Section):
    """Off by default, and then every bit of a run is what it is without them; evaluation and answers never see them."""

    neftune: PositiveFloat | None = None
    """Uniform noise on the embeddings of a text, of up to this / sqrt(tokens of the row * hidden width); usually 5
    (Jain et al. 2024). A row's own tokens count, not those of its padding; null: none."""
    stochastic_depth: Rate = 0.0
    """Chance of a row to pass by the last block, falling evenly to the first; what a block adds is scaled up where it
    counts, so that it is the same on average (Huang et al. 2016). It saves no time."""
    label_smoothing: Rate = 0.0
    """Share of each predicted token's target that all tokens of the vocabulary get alike (Szegedy et al. 2016).
    Labelled rows have classes.smoothing."""
    z_loss: NonNegativeFloat = 0.0
    """Nats for each squared unit of the log of the softmax's denominator, which keeps logits small; usually 1e-4
    (Chowdhery et al. 2023)."""

    @property
    def noisy(self) -> bool:
        """Whether a row gives something else each time that it is computed in training."""
        return self.neftune is not None or self.stochastic_depth > 0

    def misfits(self, *, recipe: str, pictures: bool, cache: str) -> Iterator[str]:
        """Contradictions with the rest of a run, one sentence for each.

        Args:
            pictures: Whether rows are pictures.
            cache: `freeze.cache`.
        """
        if self.noisy and cache in ("memory", "disk"):
            yield (
                f"freeze.cache={cache} keeps what frozen blocks give, and with regularise.neftune or stochastic_depth "
                "they give something else each time. Write freeze.cache=off, or leave them out."
            )
        if self.neftune is not None and pictures:
            yield "regularise.neftune is noise on the embeddings of words, and pictures have none. Leave it out."
        if recipe in ("classify", "crossval", "distill"):
            for key in ("label_smoothing", "z_loss"):
                if getattr(self, key):
                    other = "distill.alpha" if recipe == "distill" else "classes.smoothing"
                    yield f"regularise.{key} is for recipe=sft|mlm|sweep, not for recipe={recipe}. See {other}."
