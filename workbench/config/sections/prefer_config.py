"""Section `prefer`: the loss of judged answers, and the reference that it compares with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from workbench.schema import MayExecute, Section

BACKBONE = "backbone"
WITHOUT_REFERENCE = ("orpo", "simpo", "cpo")
"""Losses that compare with no other model."""
OF_NOISE = ("cdpo", "robust")
"""Losses that take a share of the judgements to be wrong."""
WITH_MARGIN = ("dpo", "hinge")
"""Losses that read by how much one answer is better."""
WITH_TIES = ("dpo", "cdpo", "robust", "ipo", "orpo", "cpo")
"""Losses with a target for a pair of equally good answers: cross entropies, whose target is 1/2, and ipo, which has 0.
hinge has no gradient near a tie, simpo asks for its margin, and kto judges each answer by itself."""
OWN_LENGTH = ("orpo", "simpo", "cpo")
"""Losses whose papers say how the log-probabilities of tokens become that of an answer."""
SMOOTHING = 0.1
"""`label_smoothing` of cdpo and robust where none is named."""


class PreferConfig(Section):
    """Learning from judged answers: loss, reference, start."""

    loss: Literal["dpo", "ipo", "hinge", "cdpo", "robust", "kto", "orpo", "simpo", "cpo"] = "dpo"
    """dpo, ipo, hinge (SLiC), cdpo (conservative), robust, orpo, simpo, cpo: of pairs (chosen, rejected); kto: of
    single answers (label), or of both answers of pairs, each by itself."""
    beta: PositiveFloat = 0.1
    """Scale of rewards, which are beta times a log-ratio; ipo: its tau; orpo: the factor lambda of the odds ratio. The
    higher, the closer the model stays to the reference; simpo's paper has 2 to 10."""
    beta_end: PositiveFloat | None = None
    """beta at the end of the run, to which it goes in a straight line; null: it stays. Held-out losses use the last."""
    alpha: NonNegativeFloat | None = None
    """Factor of the mean -log p of the chosen (kto: good) answer's tokens, which is added to the loss of each example.
    null: 1 for orpo and cpo, and else 0. The paper of cpo adds the sum over tokens, which grows with the answer."""
    length: Literal["sum", "mean", "desensitised"] | None = None
    """How tokens count in an answer's log-probability: all alike (sum); divided by their number (mean:
    length-normalised DPO); or, beyond the length of the shorter answer of a pair, by ld_alpha (LD-DPO). null: ipo mean,
    as its authors and TRL do, else sum. orpo and simpo always divide."""
    ld_alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With length=desensitised: 1 is sum, 0 compares as many tokens of both answers."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """cdpo and robust: share of the judgements that are taken to be wrong; null: 0.1."""
    gamma: NonNegativeFloat | None = None
    """simpo: by how much the reward of the chosen answer is to be higher; null: half of beta."""
    desirable: PositiveFloat = 1.0
    """kto: weight of good answers."""
    undesirable: PositiveFloat = 1.0
    """kto: weight of bad answers. The paper keeps (good rows x desirable) / (bad rows x undesirable) at 1 to 1.33."""
    reference: str | None = None
    """The model that log-ratios compare with: `backbone` (as it came, without the adapter), a finished run of the same
    backbone, or a model. It reads all rows once, before the first step; what it says is kept on disk, so that no second
    model is in memory while this one trains. null: `start` where it is given, else the backbone; orpo, simpo and cpo
    compare with none."""
    start: str | None = None
    """A finished run over the same backbone with an adapter like this one, from which training goes on, such as one of
    recipe sft. null: a fresh adapter. After full fine-tuning, write model.id=RUN/adapter instead."""
    trust: MayExecute = False
    """Execute the Python code that the configurations of `reference` and `start` name."""

    @property
    def compares(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss not in WITHOUT_REFERENCE

    @property
    def pairs(self) -> bool:
        """Whether the loss compares two answers to a prompt."""
        return self.loss != "kto"

    @property
    def averages(self) -> bool:
        """Whether an answer's log-probability is a mean over its tokens."""
        return self.length == "mean" or (self.length is None and self.loss in ("ipo", "orpo", "simpo"))

    @property
    def sft_factor(self) -> float:
        """Factor of the mean -log p of the chosen answer."""
        if self.alpha is not None:
            return self.alpha
        return 1.0 if self.loss in ("orpo", "cpo") else 0.0

    @property
    def smoothing(self) -> float:
        """Share of the judgements that are taken to be wrong."""
        return SMOOTHING if self.label_smoothing is None else self.label_smoothing

    def beta_at(self, share: float) -> float:
        """beta where this share of the run is done."""
        return self.beta if self.beta_end is None else self.beta + (self.beta_end - self.beta) * share

    @property
    def reference_name(self) -> str:
        """The reference where there is one."""
        return self.reference or self.start or BACKBONE

    def misfits(self, *, margin: bool) -> Iterator[str]:
        """Contradictions within the section and with the rest of the run, one sentence for each.

        Args:
            margin: Whether a column gives margins.
        """
        if self.reference is not None and not self.compares:
            yield f"prefer.loss={self.loss} compares with no reference. Leave prefer.reference out."
        if self.trust and self.start is None and self.reference in (None, BACKBONE):
            yield "prefer.trust is for the code of a run, and neither start nor reference names one. Leave it out."
        if self.length is not None and self.loss in OWN_LENGTH:
            yield f"prefer.loss={self.loss} has its own way to count tokens. Leave prefer.length out."
        if self.length == "desensitised" and not self.pairs:
            yield (
                "prefer.length=desensitised compares the lengths of a pair, and prefer.loss=kto has single answers. "
                "Leave it out."
            )
        if self.label_smoothing is not None and self.loss not in OF_NOISE:
            yield f"prefer.label_smoothing is for prefer.loss={'|'.join(OF_NOISE)}, not for {self.loss}. Leave it out."
        if self.gamma is not None and self.loss != "simpo":
            yield f"prefer.gamma is for prefer.loss=simpo, not for {self.loss}. Leave it out."
        if (self.desirable, self.undesirable) != (1.0, 1.0) and self.pairs:
            yield f"prefer.desirable and undesirable are for prefer.loss=kto, not for {self.loss}. Leave them out."
        if self.differs("ld_alpha") and self.length != "desensitised":
            yield "prefer.ld_alpha is for prefer.length=desensitised. Write that too, or leave it out."
        if margin and self.loss not in WITH_MARGIN:
            yield (
                f"data.columns.margin is for prefer.loss={'|'.join(WITH_MARGIN)}; {self.loss} has no such term. "
                "Leave it out."
            )
