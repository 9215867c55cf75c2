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
    mixout: Rate = 0.0
    """Chance of a value to stand where it began for a step, drawn anew in each; what is left of its way is scaled up,
    so that it is the same on average (Lee et al. 2020). It holds a copy of the start; a fresh head is left alone."""
    r_drop: NonNegativeFloat = 0.0
    """Nats for each nat by which two passes over a row, with different dropout, contradict each other; usually 1 to 5
    (Liang et al. 2021). Every row is computed twice, which takes twice the time and memory. 0: off."""
    z_loss: NonNegativeFloat = 0.0
    """Nats for each squared unit of the log of the softmax's denominator, which keeps logits small; usually 1e-4
    (Chowdhery et al. 2023)."""

    @property
    def noisy(self) -> bool:
        """Whether a row gives something else each time that it is computed in training."""
        return self.neftune is not None or self.stochastic_depth > 0

    def in_words(self) -> Iterator[str]:
        """Yield a sentence on each technique that changes how rows are computed."""
        if self.neftune is not None:
            yield f"regularise.neftune: noise of up to {self.neftune:g} / sqrt(tokens * width) on the embeddings."
        if self.stochastic_depth:
            yield f"regularise.stochastic_depth: a row passes by the last block with chance {self.stochastic_depth:g}."
        if self.mixout:
            yield f"regularise.mixout: a value stands where it began with chance {self.mixout:g} in each step."
        if self.r_drop:
            yield f"regularise.r_drop: two passes over each row, and {self.r_drop:g} times what they differ by."

    def misfits(self, *, words: bool, cache: str) -> Iterator[str]:
        """Contradictions with the rest of a run, one sentence for each.

        Args:
            words: Whether rows are texts.
            cache: `freeze.cache`.
        """
        if self.noisy and cache in ("memory", "disk"):
            yield (
                f"freeze.cache={cache} keeps what frozen blocks give, and with regularise.neftune or stochastic_depth "
                "they give something else each time. Write freeze.cache=off, or leave them out."
            )
        if self.neftune is not None and not words:
            yield "regularise.neftune is noise on the embeddings of words, and these rows have none. Leave it out."
