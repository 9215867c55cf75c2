"""LoRA that does not start at random: at parts of the weights, along what data excite, at what quantisation took."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters.anatomy import features
from workbench.adapters.lora import LowRank
from workbench.adapters.method import HALF_OR_FULL, WEIGHTS, MethodInfo, Sample, register
from workbench.adapters.target_modules import linear_layers
from workbench.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

QUANTISED = tuple(name for name in WEIGHTS if name not in HALF_OR_FULL)


class Decomposed(LowRank):
    """LoRA whose start is a decomposition of matrices as large as the weights."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """A matrix has no more parts than its shorter side."""
        for path, layer in linear_layers(model, self.targets).items():
            short = min(features(layer))
            if short < self.rank:
                return f"{path} is only {short} wide. Write adapter.rank={short} or less, or other adapter.targets."
        return None


class FromWeights(Decomposed):
    """W + scale * (B A - B0 A0), where training starts at B0 A0, a part of W: the identity at the start."""

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Set A and B to parts of the weights, and remember them."""
        from workbench.adapters.shifted_lora import shift

        shift(model, self.start)  # on the meta device too: what is shipped is known from shapes

    def start(self, weight_OI: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        """A0 (rank, I) and B0 (O, rank) for one weight."""
        raise NotImplementedError


@register
class Pissa(FromWeights):
    """LoRA from the largest singular values and vectors of each weight."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "pissa": MethodInfo(
            "lora, from the largest singular parts", "Meng et al. 2024, arXiv:2404.02948", token_rows=True
        ),
    }
    method: Literal["pissa"] = "pissa"
    iterations: PositiveInt | None = None
    """Subspace iterations of a randomised decomposition, for weights of thousands of rows (16 is near); null: exact."""

    def start(self, weight_OI: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        """scale * B0 A0 is the nearest matrix of that rank to the weight (paper, eq. 2 and 3)."""
        from workbench.adapters.svd import leading_parts

        return leading_parts(weight_OI / scale, rank, iterations=self.iterations)


@register
class Olora(FromWeights):
    """LoRA from the first orthonormal directions of each weight."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "olora": MethodInfo("lora, from an orthonormal basis", "Büyükakyüz 2024, arXiv:2406.01775", token_rows=True),
    }
    method: Literal["olora"] = "olora"

    def start(self, weight_OI: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        """B0 and A0 are the first columns of Q and rows of R in the weight's QR decomposition (paper, section 3)."""
        import torch

        Q_OO, R_OI = torch.linalg.qr(weight_OI)
        return R_OI[:rank], Q_OO[:, :rank]


@register
class Eva(LowRank):
    """LoRA whose A, and whose rank in each layer, come from what training rows excite; B is zero."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "eva": MethodInfo("lora, along what data excite", "Paischer et al. 2024, arXiv:2410.07170", token_rows=True),
    }
    method: Literal["eva"] = "eva"
    rho: float = Field(default=1.0, ge=1)
    """Times `rank` that a layer may have where its inputs vary in more directions than others'; the sum over layers
    stays. At 1 every layer has `rank`; the paper takes 2, and the number of parameters then depends on the data."""

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """One pass over the sample."""
        if model.device.type == "meta":
            return
        if sample is None:
            raise ConfigError("adapter.method=eva starts from training rows: give adapters.attach a sample.")
        from workbench.adapters.eva import start_there

        start_there(model, sample(), rank=self.rank, rho=self.rho)


@register
class Loftq(Decomposed):
    """LoRA that starts at the nearest update to what quantisation took from each weight.

    This is the first of the alternating steps in the paper (algorithm 1 with T = 1): later ones would change the
    quantised weights, and what is shipped would not fit a backbone that anybody else quantises.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "loftq": MethodInfo(
            "lora, from what quantisation took away",
            "Li et al. 2023, arXiv:2310.08659",
            token_rows=True,
            weights=QUANTISED,
            why_weights="it starts from what quantisation took away",
            starts_elsewhere="it starts nearer to the unquantised backbone",
        ),
    }
    method: Literal["loftq"] = "loftq"
    iterations: PositiveInt | None = None
    """Subspace iterations of a randomised decomposition, for weights of thousands of rows (16 is near); null: exact."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Nothing was taken from weights that are not quantised."""
        weights = [layer.get_parameter("weight") for layer in linear_layers(model, self.targets).values()]
        if model.device.type != "meta" and all(weight.is_floating_point() for weight in weights):
            return f"{self.facts.why_weights}, and these weights are not quantised. Write model.weights=nf4."
        return super().refusal(model)

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Read the unquantised weights, one after the other."""
        from workbench.adapters.svd import start_from_rounding

        if model.device.type != "meta":
            start_from_rounding(model, iterations=self.iterations)
