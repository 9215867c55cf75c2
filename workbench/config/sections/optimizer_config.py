"""Section `optimizer`: what turns gradients into steps, and at which rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from workbench.config.freeze_config import FreezeConfig
from workbench.config.sections.schedule_config import ScheduleConfig
from workbench.schema import ConsistentSection, Unit

Name = Literal[
    "adamw",
    "adamw8bit",
    "paged_adamw",
    "paged_adamw8bit",
    "adafactor",
    "lion",
    "sgd",
    "muon",
    "lamb",
    "lars",
    "soap",
    "shampoo",
    "sophia",
    "schedule_free",
    "galore",
    "apollo",
    "apollo_mini",
    "adam_mini",
]
Momentum = Annotated[float, Field(ge=0, lt=1)]

_ADAM = ("betas", "eps")
KNOWN: dict[Name, tuple[str, ...]] = {
    "adamw": _ADAM,
    "adamw8bit": _ADAM,
    "paged_adamw": _ADAM,
    "paged_adamw8bit": _ADAM,
    "adafactor": (),
    "lion": ("betas",),
    "sgd": ("momentum",),
    "muon": ("betas", "eps", "momentum"),
    "lamb": _ADAM,
    "lars": ("momentum",),
    "soap": _ADAM,
    "shampoo": _ADAM,
    "sophia": ("betas",),
    "schedule_free": _ADAM,
    "galore": _ADAM,
    "apollo": _ADAM,
    "apollo_mini": _ADAM,
    "adam_mini": _ADAM,
}
"""Which of the settings betas, eps and momentum each optimizer has."""
ADAMS = ("adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit")
"""Those that take AdamW's steps, however they store its moments."""
OF_INNER_MATRICES = ("muon", "shampoo", "galore", "apollo", "apollo_mini")
"""Those for matrices inside the blocks, with AdamW for the rest."""
OF_WHOLE_MATRICES = ("galore", "apollo", "apollo_mini", "adam_mini")
"""Those that save memory where whole matrices train."""
_WHOLE_METHODS = ("full", "last-layers", "block-expansion")
_SUBSPACES: dict[str, tuple[int, float]] = {"galore": (128, 0.25), "apollo": (256, 1.0), "apollo_mini": (1, 128**0.5)}
"""Dimensions and factor of the optimizers that keep moments in a subspace, as in their papers."""

MIX_VALUES = ("muon", "galore", "soap", "shampoo")
"""Those that move a value by the gradients of others."""
_POWER = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
_COUNT_EACH = ("adamw", "sgd", "adafactor", "adam_mini")
"""Those whose state is of single parameters, which may begin anew."""
_LOOKING: dict[str, tuple[Name, ...]] = {"curvature_every": ("sophia", "shampoo"), "curvature_factor": ("sophia",)}
_WRITE_GRADIENTS = ("lars", "schedule_free")


class OptimizerConfig(ConsistentSection):
    """The optimizer, its settings, and what is done to gradients."""

    name: Name = "adamw"
    """Optimizer; each needs its own train.learning_rate.

    `adamw` (Loshchilov & Hutter 2019); `adamw8bit` (Dettmers et al. 2022): its moments in 8 bits, of parameters with
    4096 values or more; `paged_adamw`, `paged_adamw8bit`: moments that move to the host where an NVIDIA GPU's memory
    runs out. `adafactor` (Shazeer & Stern 2018): factored second moments; its rate is relative to the size of the
    weights, usually 1e-2. `lion` (Chen et al. 2023): signs; a third to a tenth of AdamW's rate. `sgd`. `muon` (Jordan
    et al. 2024): orthogonal steps for matrices of the blocks, in AdamW's size (Liu et al. 2025), AdamW for the rest.
    `lamb` (You et al. 2020), `lars` (You et al. 2017): steps relative to the size of the weights, for large batches;
    LoRA's B, which starts at zero, takes a plain first step and is small after it, so they need high rates: on the
    starter, where AdamW has 2e-3, lamb 3e-2 (at 2e-3 it hardly moves, at 0.1 it diverges) and lars 5 (1 is slow).
    `soap` (Vyas et al. 2024): AdamW in Shampoo's eigenbasis. `shampoo` (Gupta et al. 2018): gradients of matrices of
    the blocks times roots of their averaged products, with the length of Adam's steps (Anil et al. 2020), at AdamW's
    rate. `sophia` (Liu et al. 2024): momentum through the curvature, which gradients of tokens that the model draws
    itself tell in some steps (Gauss-Newton-Bartlett), each value clipped; a third to all of AdamW's rate.
    `schedule_free` (Defazio et al. 2024): AdamW that averages instead of lowering its rate; ask for
    schedule.name=constant.
    For adapter.method=full, with less state: `adam_mini` (Zhang et al. 2024), one second moment a row, at AdamW's rate;
    `galore` (Zhao et al. 2024), moments in the subspace of a gradient's largest singular values, at a higher rate;
    `apollo` and `apollo_mini` (Zhu et al. 2024), the gradient with its columns, or all of it, scaled as Adam's moments
    in a random subspace say. Embeddings, head and vectors have AdamW.
    Weight decay is decoupled from the gradient, but in sgd, lamb, lars and schedule_free it is part of the update.
    """
    betas: tuple[Momentum, Momentum] | None = None
    """Memory of the averages of the gradient and of its square (lion: of the step and of the state); null: its own."""
    eps: PositiveFloat | None = None
    """Added to the root of the second moment; null: its own."""
    momentum: Momentum | None = None
    """Memory of sgd (0), lars (0.9) and muon (0.95); null: what stands in brackets."""
    rank: Annotated[PositiveInt | None, Unit("dimensions")] = None
    """Dimensions of the subspace of galore (128) and apollo (256); null: what stands in brackets."""
    rank_every: Annotated[PositiveInt | None, Unit("steps")] = None
    """Steps after which galore, apollo and apollo_mini take another subspace; null: 200."""
    rank_scale: PositiveFloat | None = None
    """Factor on the steps of galore (0.25), apollo (1) and apollo_mini (the root of 128); null: what is in brackets."""
    curvature_every: Annotated[PositiveInt | None, Unit("steps")] = None
    """Steps from one look at the curvature to the next: sophia's estimate, shampoo's roots; null: 10."""
    curvature_factor: PositiveFloat | None = None
    """Factor on the curvature of sophia: the larger, the fewer values are clipped; null: 0.05."""
    sam: PositiveFloat | None = None
    """Sharpness-aware (Foret et al. 2021): the gradient is taken this far uphill, in units of the weights.

    It costs a second forward and backward pass; usually 0.05. null: off.
    """
    sam_adaptive: bool = False
    """Go further along larger weights (ASAM, Kwon et al. 2021); optimizer.sam is then usually ten times as large."""
    sam_every: Annotated[PositiveInt, Unit("steps")] = 1
    """Use SAM in every n-th step only, beginning with the first."""
    sam_reuse: PositiveFloat | None = None
    """In the steps between, add what was orthogonal to the gradient in the last that used SAM, so many times as long as
    the gradient (LookSAM, Liu et al. 2022), usually 0.7. null: they have plain gradients."""
    lookahead: Annotated[Annotated[int, Field(ge=2)] | None, Unit("steps")] = None
    """Slow weights that follow every so many steps, usually 5, and are evaluated and shipped (Zhang et al. 2019).

    null: off.
    """
    lookahead_alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the way to the fast weights that the slow ones go."""
    gradient_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the gradient's values, the largest over all that trains, that a step applies; the rest is added to the
    next gradient (error feedback, Stich et al. 2018). It holds a copy of the gradients. null: all are applied."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the learning rate from one layer to the one below; 1: all alike (Howard & Ruder 2018: 1 / 2.6)."""
    head_rate: PositiveFloat = 1.0
    """Factor on the learning rate of what starts at random, such as a classification head."""
    l1: NonNegativeFloat = 0.0
    """Penalty in nats for each unit of a weight's size; of what train.weight_decay would act on."""
    l2: NonNegativeFloat = 0.0
    """Penalty in nats for each squared unit of a weight; goes through the optimizer, as train.weight_decay does not."""
    l2_start: NonNegativeFloat = 0.0
    """Penalty in nats for each squared unit of a weight's way from its start (L2-SP, Li et al. 2018); goes through the
    optimizer, and holds a copy of the start."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """How train.learning_rate follows batch.size: times batch.size / reference_batch (Goyal et al. 2017), or its root
    (Krizhevsky 2014)."""
    reference_batch: Annotated[PositiveInt | None, Unit("rows")] = None
    """Rows of the batch that train.learning_rate was found for."""
    noise_scale: Annotated[PositiveInt | None, Unit("steps")] = None
    """Estimate the critical batch size in rows (McCandlish et al. 2018) every so many steps, as `noise_scale` of
    metrics.jsonl; null: never. It holds a copy of the gradients."""

    @property
    def given(self) -> dict[str, Any]:
        """Those of betas, eps and momentum that are not left to the optimizer."""
        return {key: value for key in ("betas", "eps", "momentum") if (value := getattr(self, key)) is not None}

    @property
    def subspace_rank(self) -> int:
        """Dimensions of the subspace that moments live in."""
        return _SUBSPACES[self.name][0] if self.rank is None else self.rank

    @property
    def subspace_every(self) -> int:
        """Steps after which there is another subspace."""
        return 200 if self.rank_every is None else self.rank_every

    @property
    def subspace_factor(self) -> float:
        """Factor on steps that come from a subspace."""
        return _SUBSPACES[self.name][1] if self.rank_scale is None else self.rank_scale

    @property
    def looks_every(self) -> int:
        """Steps from one look at the curvature to the next."""
        return 10 if self.curvature_every is None else self.curvature_every

    @property
    def gamma(self) -> float:
        """Factor on the curvature of sophia."""
        return 0.05 if self.curvature_factor is None else self.curvature_factor

    def _contradictions(self) -> Iterator[str]:
        for key in self.given:
            if key not in KNOWN[self.name]:
                able = "|".join(name for name, known in KNOWN.items() if key in known)
                yield f"{self.name} has no {key}. Leave optimizer.{key} out, or write optimizer.name={able}."
        for key in ("rank", "rank_every", "rank_scale"):
            if getattr(self, key) is not None and self.name not in _SUBSPACES:
                able = "|".join(_SUBSPACES)
                yield f"{self.name} has no {key}. Leave optimizer.{key} out, or write optimizer.name={able}."
        for key, looking in _LOOKING.items():
            if getattr(self, key) is not None and self.name not in looking:
                cure = f"Leave optimizer.{key} out, or write optimizer.name={'|'.join(looking)}."
                yield f"{self.name} has no {key}. {cure}"
        if self.name == "apollo_mini" and self.rank not in (None, 1):
            yield "apollo_mini has one dimension. Leave optimizer.rank out, or write optimizer.name=apollo."
        if self.name == "schedule_free" and self.betas is not None and not self.betas[0]:
            yield "schedule_free averages by its first beta, which cannot be 0. Write optimizer.betas=[0.9, 0.999]."
        if self.name == "schedule_free" and self.lookahead is not None:
            yield "schedule_free averages already. Leave optimizer.lookahead out, or write optimizer.name=adamw."
        if self.sam is None and self.sam_adaptive:
            yield "sam_adaptive is a kind of SAM, which is off. Write optimizer.sam=0.5, or leave sam_adaptive out."
        if self.sam is None and self.sam_every != 1:
            yield "sam_every says when SAM is used, and it is off. Write optimizer.sam=0.05, or leave sam_every out."
        if self.sam_reuse is not None and (self.sam is None or self.sam_every == 1):
            yield (
                "sam_reuse is for the steps between those that use SAM, and there are none. Write optimizer.sam=0.05 "
                "optimizer.sam_every=5, or leave sam_reuse out."
            )
        if self.lookahead is None and self.lookahead_alpha != 0.5:
            yield "lookahead_alpha is for Lookahead, which is off. Write optimizer.lookahead=5, or leave it out."
        if self.scaling != "none" and self.reference_batch is None:
            yield (
                f"scaling={self.scaling} needs the batch size that train.learning_rate was found for. "
                "Write optimizer.reference_batch=32."
            )
        if self.scaling == "none" and self.reference_batch is not None:
            yield "reference_batch is for scaling. Write optimizer.scaling=sqrt, or leave reference_batch out."

    def misfits(self, *, schedule: ScheduleConfig, freeze: FreezeConfig, batch: int, method: str) -> Iterator[str]:
        """Contradictions with the rest of a run, one sentence for each.

        Args:
            batch: Rows of a step.
            method: The adapter's.
        """
        if self.name == "schedule_free" and schedule.name != "constant":
            yield (
                f"schedule.name={schedule.name} lowers the rate, and optimizer.name=schedule_free averages instead. "
                "Write schedule.name=constant."
            )
        if not freeze.fixed and (self.name == "schedule_free" or self.lookahead is not None):
            key, cure = ("name", "adamw") if self.lookahead is None else ("lookahead", "null")
            yield (
                f"optimizer.{key}={getattr(self, key)} holds two values of every weight, and "
                f"freeze.policy={freeze.policy} would freeze the one that is not shipped. "
                f"Write optimizer.{key}={cure}, or leave freeze out."
            )
        if self.name in OF_WHOLE_MATRICES and method not in _WHOLE_METHODS:
            yield (
                f"optimizer.name={self.name} saves memory where whole matrices train, and adapter.method={method} has "
                "little of it to save. Write optimizer.name=adamw, or adapter.method=full."
            )
        if freeze.forgets and method != "full":
            yield (
                f"freeze.policy={freeze.policy} saves memory where all weights train, and adapter.method={method} has "
                "little of it to save. Write adapter.method=full, or freeze.policy=lisa."
            )
        if freeze.forgets and self.name not in _COUNT_EACH:
            yield (
                f"freeze.policy={freeze.policy} begins the optimizer anew in each block, and optimizer.name="
                f"{self.name} counts the steps of all together. Write optimizer.name={'|'.join(_COUNT_EACH)}."
            )
        if self.name in _WRITE_GRADIENTS and method == "adalora":
            yield (
                f"optimizer.name={self.name} writes over the gradients that adapter.method=adalora weighs its ranks "
                "by. Write optimizer.name=adamw, or adapter.method=lora."
            )
        if self.noise_scale is not None and batch < 2:
            yield (
                "optimizer.noise_scale compares parts of a batch, and batch.size=1 has none. "
                "Write batch.size=2 or more, or leave optimizer.noise_scale out."
            )

    def scaled(self, rate: float, *, batch: int) -> float:
        """A learning rate that was found for `reference_batch` rows, for a batch of so many."""
        if self.reference_batch is None:
            return rate
        scaled: float = rate * (batch / self.reference_batch) ** _POWER[self.scaling]
        return scaled
