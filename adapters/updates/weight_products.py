"""Updates computed from the weights themselves: HiRA, PEANuT, DEFT and GLoRA, on HF PEFT's tuners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from workbench.adapters.method import HALF_OR_FULL, MethodInfo, register
from workbench.adapters.target_modules import OnLayers, OnLinear, linear_layers
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STORED = "it multiplies the stored weights"


@register
class Hira(OnLinear):
    """W + W * (B A), element by element: of a high rank where W is. B is zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "hira": MethodInfo("the weights times a low-rank matrix, element by element", "Huang et al. 2025, openreview "
                           "TwJrTz9cRS", weights=HALF_OR_FULL, why_weights=STORED),
    }  # fmt: skip
    tuner: ClassVar[str] = "HiraConfig"
    method: Literal["hira"] = "hira"
    rank: Annotated[PositiveInt, Unit("ranks")] = 32
    """Rank of B A."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(r=self.rank, hira_dropout=self.dropout)


@register
class Peanut(OnLayers):
    """W + a small network of W: activation(W A), further hidden layers, times B, which is zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "peanut": MethodInfo("a small network that reads the weights", "Zhong et al. 2024, arXiv:2410.01870",
                             weights=HALF_OR_FULL, why_weights=STORED),
    }  # fmt: skip
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "PeanutConfig"
    method: Literal["peanut"] = "peanut"
    rank: Annotated[PositiveInt, Unit("hidden units")] = 32
    """Units of the hidden layers."""
    depth: Annotated[NonNegativeInt, Unit("hidden layers")] = 0
    """Hidden layers more than A and B, as many on either side."""
    activation: Literal["relu", "gelu", "silu", "tanh", "sigmoid"] = "relu"
    """Function between the layers."""
    scale: float = Field(default=1.0, gt=0)
    """Factor of the update."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(r=self.rank, depth=self.depth, act_fn=self.activation, scaling=self.scale)


@register
class Deft(OnLinear):
    """(I - P p(P)^T) W + P R: a subspace of the outputs is taken from W and filled anew; nothing changes at first."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "deft": MethodInfo("a subspace of the outputs, removed and learnt anew", "Kumar et al. 2025, NeurIPS",
                           weights=HALF_OR_FULL, why_weights=STORED),
    }  # fmt: skip
    tuner: ClassVar[str] = "DeftConfig"
    method: Literal["deft"] = "deft"
    rank: Annotated[PositiveInt, Unit("ranks")] = 8
    """Width of the subspace."""
    projection: Literal["relu", "qr"] = "relu"
    """relu: p(P) is relu(P), no orthogonal projection; qr: P is made orthonormal in each pass."""

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(r=self.rank, decomposition_method=self.projection, deft_dropout=self.dropout)


@register
class Glora(OnLayers):
    """W + W A + B with the bias b + b D + E + W c: each of them low-rank, a vector, or a number; zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "glora": MethodInfo("scales and updates of weights and biases", "Chavan et al. 2023, arXiv:2306.07967",
                            weights=("float32", "bfloat16"), why_weights=STORED),
    }  # fmt: skip
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "GloraConfig"
    method: Literal["glora"] = "glora"
    rank: Annotated[PositiveInt, Unit("ranks")] = 8
    """Rank of what is low-rank."""
    weight: Literal["lora", "vector", "constant", "none"] = "lora"
    """Form of A and of B."""
    coupling: Literal["lora", "vector", "none"] = "lora"
    """Form of c, which carries the weights into the bias."""
    bias: Literal["vector", "constant", "none"] = "constant"
    """Form of D and of E."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse layers that are computed in another precision than they are stored in, which PEFT does not know."""
        from torch import nn

        for path, layer in linear_layers(model, self.targets).items():
            if type(layer) is not nn.Linear:
                return f"{path} is a {type(layer).__name__}, not plain to PEFT. Write model.weights=float32."
        return None

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(r=self.rank, config_A_B=self.weight, config_C=self.coupling, config_D_E=self.bias)
