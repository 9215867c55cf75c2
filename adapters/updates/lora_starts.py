"""LoRA with other initial values: parts of weights or gradients, leading directions of inputs, quantisation errors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from workbench.adapters.anatomy import features
from workbench.adapters.method import (
    HALF_OR_FULL,
    WEIGHTS,
    MethodInfo,
    RowLosses,
    Sample,
    register,
)
from workbench.adapters.target_modules import linear_layers
from workbench.adapters.updates.lora import Decomposition, LowRank
from workbench.errors import ConfigError
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

QUANTISED = tuple(name for name in WEIGHTS if name not in HALF_OR_FULL)
_facts = partial(MethodInfo, token_rows=True)


class Decomposed(LowRank):
    """LoRA whose start is a decomposition of matrices as large as the weights."""

    parts: ClassVar[int] = 1
    """Singular parts of a matrix that a rank takes."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse convolutions, and ranks above the number of singular parts of a matrix, its shorter side."""
        if reason := super().refusal(model):
            return reason
        for path, layer in linear_layers(model, self.targets).items():
            short = min(features(layer))
            if short < self.parts * self.rank:
                most = f"adapter.rank={short // self.parts} or less, or " if short >= self.parts else ""
                return f"{path} is only {short} wide. Write {most}other adapter.targets."
        return None


class FromWeights(Decomposed):
    """W + scale * (B A - B0 A0), where B A starts at B0 A0, a part of W: the identity at the start."""

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Set A and B to parts of the weights, and remember them."""
        from workbench.adapters.updates.lora_start_values import shift

        shift(model, self.start)  # on the meta device too: what is shipped is known from shapes

    def start(self, weight_OI: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        """A0 (rank, I) and B0 (O, rank) for one weight."""
        raise NotImplementedError


@register
class Pissa(FromWeights):
    """LoRA from the largest singular values and vectors of each weight.

    Over quantised weights it is not QPiSSA: these stay as they were quantised, and the start changes nothing of their
    error (relative error of the weights at rank 16 over nf4: 0.093, QPiSSA's 0.069, loftq's 0.084).
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "pissa": _facts("lora, from the largest singular parts", "Meng et al. 2024, arXiv:2404.02948"),
    }
    method: Literal["pissa"] = "pissa"
    decomposition: Decomposition = "auto"
    """Singular value decomposition: exact, randomised, or auto, which is exact where a side is at most 1,024 wide."""

    def start(self, weight_OI: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        """scale * B0 A0 is the nearest matrix of that rank to the weight (paper, eq. 2 and 3)."""
        from workbench.adapters.updates.lora_start_values import leading_parts

        return leading_parts(weight_OI / scale, rank, decomposition=self.decomposition)


@register
class Olora(FromWeights):
    """LoRA from the first orthonormal directions of each weight."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "olora": _facts("lora, from an orthonormal basis", "Büyükakyüz 2024, arXiv:2406.01775"),
    }
    method: Literal["olora"] = "olora"

    def start(self, weight_OI: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        """B0 and A0 are the first columns of Q and rows of R in the weight's QR decomposition (paper, section 3).

        The first columns of Q depend on as many columns of the weight, and R is Q^T W: nothing else is decomposed.
        """
        import torch

        Q_OR, _ = torch.linalg.qr(weight_OI[:, :rank])
        return Q_OR.T @ weight_OI, Q_OR


@register
class Corda(FromWeights):
    """LoRA from the parts of each weight that the task's inputs excite most, or least."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "corda": _facts("lora, from the parts of weights that data excite", "Yang et al. 2024, arXiv:2406.05223"),
    }
    method: Literal["corda"] = "corda"
    mode: Literal["ipm", "kpm"] = "ipm"
    """`ipm` trains the parts that the training rows excite most, for the task. `kpm` (keeps knowledge) is refused:
    its parts are those that rows of that knowledge excite least, and training rows are not such rows."""

    @field_validator("mode")
    @classmethod
    def _has_rows(cls, mode: str) -> str:
        if mode == "kpm":
            raise ValueError(
                "adapter.mode=kpm keeps knowledge that rows of its own show, and starts are computed from training "
                "rows, so that it would keep something else. Write `adapter.mode=ipm`."
            )
        return mode

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Set A and B from one pass over the sample, and remember them."""
        from workbench.adapters.updates.lora_start_values import covariances, leading_parts, oriented_parts, shift

        if model.device.type == "meta":  # what is shipped is known from shapes
            shift(model, lambda weight_OI, rank, _: leading_parts(weight_OI, rank))
            return
        if sample is None:
            raise ConfigError("adapter.method=corda starts from training rows: give adapters.attach a sample.")
        seen = iter(covariances(model, sample()))
        shift(model, lambda weight_OI, rank, scale: oriented_parts(weight_OI / scale, next(seen), rank))


@register
class LoraGa(Decomposed):
    """LoRA whose first step moves W as the full gradient would: along its 2 * rank largest singular parts.

    Of the gradient of each whole weight (which may be quantised), A starts at the right singular vectors of the first
    half of these parts and B at the left ones of the second half. Plain LoRA until `choose` is called.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "lora-ga": _facts("lora, along the full gradient's largest parts", "Wang et al. 2024, arXiv:2407.05000"),
    }
    parts: ClassVar[int] = 2
    method: Literal["lora-ga"] = "lora-ga"
    rows: Annotated[PositiveInt, Unit("rows")] = 64
    """Training rows whose summed gradient is decomposed before the first step, or all there are. The sums temporarily
    take four bytes for each weight of a changed layer."""
    gamma: float = Field(default=64.0, gt=0)
    """A and B start with rows and columns of length (outputs / gamma^2)^(1/4): the higher gamma, the nearer to zero.
    The authors' runs of Llama 2 have 64."""
    decomposition: Decomposition = "auto"
    """Singular value decomposition: exact, randomised, or auto, which is exact where a side is at most 1,024 wide."""

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Start at zero until `choose` sets the start along the gradient."""
        from workbench.adapters.updates.lora_start_values import shift_later

        shift_later(model)

    @property
    def looks(self) -> int:
        """Training rows whose gradients are summed."""
        return self.rows

    def choose(self, model: PeftModel, losses: RowLosses) -> None:
        """Set A and B from the gradients of training rows, and remember them."""
        from workbench.adapters.updates.lora_start_values import start_along_gradients

        start_along_gradients(model, losses, gamma=self.gamma, decomposition=self.decomposition)

    def chosen(self, model: PeftModel) -> dict[str, Tensor]:
        """Initial A and B of each layer."""
        from workbench.adapters.updates.lora_start_values import starts

        return starts(model)


@register
class Eva(LowRank):
    """LoRA whose A, and whose rank in each layer, come from principal components of the layers' inputs; B is zero."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "eva": _facts("lora, along the inputs' principal components", "Paischer et al. 2024, arXiv:2410.07170"),
    }
    method: Literal["eva"] = "eva"
    rho: float = Field(default=1.0, ge=1)
    """Largest rank of a layer, in multiples of `rank`; layers whose inputs vary in more directions get more, and the
    sum over layers stays. At 1 every layer has `rank`; the paper takes 2: the parameter count then depends on the data.
    """

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Set A from one pass over the sample."""
        if model.device.type == "meta":
            return
        if sample is None:
            raise ConfigError("adapter.method=eva starts from training rows: give adapters.attach a sample.")
        from workbench.adapters.updates.lora_start_values import start_along_inputs

        start_along_inputs(model, sample(), rank=self.rank, rho=self.rho)


@register
class Loftq(Decomposed):
    """LoRA that starts at the low-rank update nearest to each weight's quantisation error.

    This is the first of the paper's alternating steps (algorithm 1 with T = 1): later ones would change the quantised
    weights, so that the adapter would not fit a backbone that others quantise.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "loftq": _facts(
            "lora, from the quantisation error",
            "Li et al. 2023, arXiv:2310.08659",
            weights=QUANTISED,
            why_weights="it starts from the quantisation error",
            starts_elsewhere="it starts nearer to the unquantised backbone",
        ),
    }
    method: Literal["loftq"] = "loftq"
    decomposition: Decomposition = "auto"
    """Singular value decomposition: exact, randomised, or auto, which is exact where a side is at most 1,024 wide."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse weights that are not quantised, which have no quantisation error to start from."""
        weights = [layer.get_parameter("weight") for layer in linear_layers(model, self.targets).values()]
        if not weights:
            return super().refusal(model)
        if model.device.type != "meta" and all(weight.is_floating_point() for weight in weights):
            return f"{self.facts.why_weights}, and these weights are not quantised. Write model.weights=nf4."
        return super().refusal(model)

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Set A and B from the unquantised weights, which are read one at a time."""
        from workbench.adapters.updates.lora_start_values import start_from_rounding

        if model.device.type != "meta":
            start_from_rounding(model, decomposition=self.decomposition)
