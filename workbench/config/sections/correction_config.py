"""The section `correction`, by similarity; workbench/crossval/neighbour_correction.py carries it out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from workbench.config.sections.folds_config import FoldsConfig
from workbench.schema import MayExecute, Section, Unit

Ask = Literal["predictions", "labels"]
"""Which of the two neighbours are asked for."""
Strength = Annotated[float, Field(gt=0, le=1)]


class CorrectionConfig(Section):
    """Predictions corrected by those of similar rows, where out-of-fold rows show a gain."""

    neighbours: Annotated[PositiveInt | tuple[PositiveInt, ...] | None, Unit("rows")] = None
    """Nearest labelled rows with which a row's prediction is to agree; of a list, [5, 20], the number with the lowest
    out-of-fold loss, among those that every row has to ask; null: off.

    Rows are near by the features that the frozen backbone gives them, as `workbench features` writes them, or by the
    embeddings of `embedder`.
    """
    embedder: str | None = Field(default=None, min_length=1)
    """Run directory of recipe embed by whose embeddings texts are near, with the run's pooling and its instruction of
    queries; null: the frozen backbone's features. It is read again by `predict`."""
    trust: MayExecute = False
    """Execute the Python code that the embedder's run directory names. Only of those whom you trust."""
    ask: Literal["auto", "predictions", "labels"] = "auto"
    """Neighbours are asked for their `predictions`, by adapters that trained on neither row, or for their `labels`,
    which the row's own adapters learnt; `auto`: for what has the lower out-of-fold loss."""
    strength: Strength | None = None
    """Share of the neighbours in a corrected prediction, 1 replaces it; null: fitted on out-of-fold rows, and used only
    where they show a gain. A number is used whether they do or not."""
    temperature: PositiveFloat | None = None
    """Neighbours weigh by softmax(cosine similarity / temperature): a low one asks the nearest row alone, a high one
    all alike; null: fitted on out-of-fold rows."""
    least_gain: Annotated[NonNegativeFloat, Unit("nats a row")] = 0.0
    """Nats a row by which the correction must lower the out-of-fold loss to be used (numbers: of their variance)."""

    @model_validator(mode="after")
    def _used(self) -> CorrectionConfig:
        if self.neighbours == ():
            raise ValueError("neighbours is empty. Write neighbours: [5, 20], or null for no correction.")
        if len(set(self.candidates)) < len(self.candidates):
            raise ValueError("neighbours names a number twice. Name it once.")
        fields = type(self).model_fields.items()
        given = [name for name, field in fields if getattr(self, name) != field.default]
        if given and not self.is_on:
            raise ValueError(
                f"without neighbours nothing is corrected, and {given[0]} is given. Write neighbours: [5, 20]."
            )
        if self.trust and self.embedder is None:
            raise ValueError("trust is for the code of embedder, and none is named. Leave it out.")
        if self.is_forced and self.least_gain:
            raise ValueError("strength is used without a gain, and least_gain asks for one. Leave one of them out.")
        return self

    @property
    def is_on(self) -> bool:
        """Whether predictions are corrected."""
        return self.neighbours is not None

    @property
    def is_forced(self) -> bool:
        """Whether the correction is kept without a gain."""
        return self.is_on and self.strength is not None

    @property
    def candidates(self) -> tuple[int, ...]:
        """Numbers of neighbours to choose from, ascending; none where the correction is off."""
        if self.neighbours is None:
            return ()
        return (self.neighbours,) if isinstance(self.neighbours, int) else tuple(sorted(self.neighbours))

    @property
    def asked(self) -> tuple[Ask, ...]:
        """Answers to choose from; none where the correction is off."""
        if not self.is_on:
            return ()
        return ("predictions", "labels") if self.ask == "auto" else (self.ask,)

    def refusal(self, folds: FoldsConfig) -> str | None:
        """Why predictions over these folds cannot be corrected, and what to write; None where they can."""
        if not self.is_on or folds.repeats == 1:
            return None
        return (
            f"correction asks rows by their fold, and folds.repeats={folds.repeats} puts a row into several. "
            "Write folds.repeats=1, and folds.seeds for more adapters, or leave correction out."
        )
