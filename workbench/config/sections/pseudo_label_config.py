"""The section `pseudo_label`; workbench/crossval/pseudo_labels.py carries it out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from workbench.config.sections.classes_config import Kind
from workbench.schema import Section, Unit

Probability = Annotated[float, Field(ge=0, le=1)]

_UNABLE: dict[Kind, str] = {
    "number": "a number comes without a probability to be sure by",
    "several": "a row of several classes is several questions, and seldom are all of them sure",
}


class PseudoLabelConfig(Section):
    """Rows without labels that fold adapters label, kept where that helps."""

    unlabelled: str | None = Field(default=None, min_length=1)
    """A file, folder or hub data set whose rows are labelled by the folds' own models; null: none.

    Its rows are taken to be of the known classes. A row of no class is left out only as far as the models are unsure.
    """
    rounds: Annotated[PositiveInt, Unit("rounds")] = 1
    """Rounds of labelling rows and training all folds again. The first round without a gain is undone and ends it."""
    threshold: Probability = 0.95
    """Calibrated probability from which the likeliest class becomes a row's label. Why: labels of unsure rows are often
    wrong, and what learns from them confirms them (FixMatch takes 0.95 too, Sohn et al. 2020)."""
    adaptive: bool = False
    """Lower `threshold` for classes in which few rows reach it, rare classes among them (FlexMatch, Zhang et al.
    2021)."""
    floor: Probability = 0.5
    """For `adaptive`: the lowest threshold of any class. At 0.5 a class is likelier than all others together."""
    agreement: Probability = 1.0
    """Share of a fold's models that must name the class which their mean names. One seed is one model, which always
    agrees with itself: give several for this to tell anything."""
    align: bool = False
    """Shift probabilities towards the labelled rows' class shares first (ReMixMatch, Berthelot et al. 2020). Only where
    the unlabelled rows have those shares too: elsewhere it makes right labels wrong."""
    labels: Literal["hard", "soft"] = "hard"
    """The likeliest class, or the probabilities as they are."""
    cap: PositiveFloat | None = 5.0
    """Most pseudo-labelled rows of a class, as a multiple of its labelled rows; the most certain stay. null: all. Why:
    frequent classes would else drown the labelled rows."""
    weight: PositiveFloat = 1.0
    """Weight of a pseudo-labelled row in the loss; a labelled one has 1."""
    ramp_up: Annotated[PositiveInt, Unit("rounds")] = 1
    """Rounds over which `weight` rises: in round r of them a row counts weight * r / ramp_up."""
    least_gain: Annotated[NonNegativeFloat, Unit("nats a row")] = 0.0
    """Nats a row by which a round must lower the out-of-fold loss to be kept."""

    sure: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """How sure out-of-fold rows must be that a round helps: the whole interval of that width has to be below 0. A few
    hundred labels are rarely so sure; 0 keeps every round that looks better."""

    @model_validator(mode="after")
    def _floor_is_below(self) -> PseudoLabelConfig:
        if self.adaptive and self.floor > self.threshold:
            raise ValueError(
                f"floor {self.floor} is above threshold {self.threshold}, which adaptive only lowers. "
                f"Write floor: {self.threshold} or less."
            )
        return self

    def weight_in(self, round_number: int) -> float:
        """Weight of a pseudo-labelled row in a round, counted from 1."""
        return self.weight * min(1.0, round_number / self.ramp_up)

    def refusal(self, kind: Kind) -> str | None:
        """Why labels of this kind get no pseudo-labels, and what to write; None where they can, or none are wanted."""
        if self.unlabelled is None or kind not in _UNABLE:
            return None
        return (
            f"pseudo_label is for classes.kind one and pair, not {kind}: {_UNABLE[kind]}. "
            "Leave pseudo_label.unlabelled out."
        )
