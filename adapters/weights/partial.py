"""Methods that train some of the backbone's own weights: BitFit, BEFT, norms, a linear probe, the last blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import PositiveInt

from workbench.adapters import anatomy
from workbench.adapters.method import HALF_OR_FULL, ExtraParameters, Method, MethodInfo, register
from workbench.adapters.target_modules import OnLayers, linear_layers, short_names
from workbench.errors import ConfigError
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedModel

FINAL_NORMS = (
    *("norm", "norm_f", "ln_f", "final_norm", "final_layernorm", "final_layer_norm"),
    *("layernorm", "layer_norm", "post_layernorm"),
)
"""Names of the norm between the last block and the head; DeBERTa's LayerNorm is another one."""


class Partial(Method):
    """Base of the three: trains copies of the weights that `parameters` names, and leaves the backbone as it is."""

    def parameters(self, model: PreTrainedModel) -> list[str]:
        """Full names of the parameters that train."""
        raise NotImplementedError

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Paths of the modules that own them, and of a fresh head where it is all that trains."""
        chosen = self.parameters(model)
        if not chosen:
            raise ConfigError(f"adapter.method={self.method}: {self.refusal(model)}")
        return list(dict.fromkeys(name.rpartition(".")[0] for name in chosen))

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """The configuration of our tuner for this backbone."""
        from peft.utils.constants import DUMMY_TARGET_MODULES

        from workbench.adapters.weights.partial_tuner import PartialConfig

        chosen = [name for name in self.parameters(model) if not _below(name, beside.heads)]
        return PartialConfig(
            task_type=anatomy.task(model),
            target_modules=sorted({name.rpartition(".")[0] for name in chosen}) or DUMMY_TARGET_MODULES,
            parameter_names=sorted({name.rpartition(".")[2] for name in chosen}),
            modules_to_save=beside.heads or None,
            trainable_token_indices=beside.token_rows,
        )


@register
class BitFit(Partial):
    """Every bias below the output head: of linear layers and of norms.

    That of the keys is among them, as in the paper, though softmax attention without rotary positions ignores it.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "bitfit": MethodInfo("every bias of the backbone", "Ben Zaken et al. 2022, arXiv:2106.10199", token_rows=True)
    }
    method: Literal["bitfit"] = "bitfit"

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse a backbone without biases, as Llama and most later families are."""
        if self.parameters(model):
            return None
        return (
            f"{type(model).__name__} has no biases, so nothing would train. "
            "Write adapter.method=layernorm, which is as small, or adapter.method=lora."
        )

    def parameters(self, model: PreTrainedModel) -> list[str]:
        """Names of parameters that end in bias, as those of some experts do (down_proj_bias)."""
        body = f"{inside}." if (inside := anatomy.language_model(model) or anatomy.body(model)) else ""
        left_out = [*_heads(model), *anatomy.unread(model)]
        return [
            name
            for name, _ in model.named_parameters()
            if name.startswith(body) and name.endswith("bias") and not _below(name, left_out)
        ]


@register
class LinearProbe(Partial):
    """Only the output head, which gets weights of its own where it shares the embedding's."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "linear-probe": MethodInfo(
            trains="the output head alone",
            paper="Alain & Bengio 2016, arXiv:1610.01644",
            no_freezing="it freezes every layer itself",
        )
    }
    method: Literal["linear-probe"] = "linear-probe"

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse a backbone without a head, where nothing would train."""
        if _heads(model):
            return None
        return f"{type(model).__name__} has no output head. Take a backbone with one, or write adapter.method=lora."

    def parameters(self, model: PreTrainedModel) -> list[str]:
        """Names of the head's parameters."""
        return [name for name, _ in model.named_parameters(remove_duplicate=False) if _below(name, _heads(model))]


@register
class LastLayers(Partial):
    """The last blocks, of an encoder-decoder those of the decoder, and the norm that follows them."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "last-layers": MethodInfo(
            trains="the last blocks and the final norm",
            no_freezing="it freezes the first layers itself: adapter.layers says how many train",
            paper="Howard & Ruder 2018, arXiv:1801.06146",
            weights=HALF_OR_FULL,
            why_weights="quantised weights have no gradient",
            token_rows=True,
        )
    }
    method: Literal["last-layers"] = "last-layers"
    layers: Annotated[PositiveInt, Unit("blocks")] = 2
    """Number of blocks that train, counted from the output."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse more blocks than the backbone has."""
        blocks = len(anatomy.blocks(model)[-1])
        if self.layers <= blocks:
            return None
        return f"adapter.layers={self.layers}, but {type(model).__name__} has {blocks} blocks. Write adapter.layers=2."

    def parameters(self, model: PreTrainedModel) -> list[str]:
        """Names of all parameters in the last blocks and in the norm behind them."""
        modules = self.modules(model)
        return [name for name, _ in model.named_parameters() if _below(name, modules)]

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Paths of the blocks and of the norm."""
        return [*anatomy.blocks(model)[-1][-self.layers :], *_final_norm(model)]


def _below(name: str, paths: list[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


def _heads(model: PreTrainedModel) -> list[str]:
    """Paths of a classification head, or of the projection to the vocabulary."""
    output: nn.Module | None = model.get_output_embeddings()
    return anatomy.fresh_heads(model) or [name for name, module in model.named_modules() if module is output]


def _final_norm(model: PreTrainedModel) -> list[str]:
    """Path of the norm after the last stack of blocks: it stands beside the stack, or beside what holds it."""
    stack = anatomy.blocks(model)[-1][0].rpartition(".")[0]
    places = [stack.rpartition(".")[0], stack.rpartition(".")[0].rpartition(".")[0]]
    if not anatomy.reads_tokens(model):
        places = [anatomy.body(model), f"{anatomy.body(model)}.pooler"]
    return [
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in FINAL_NORMS
        and name.rpartition(".")[0] in places
        and name not in anatomy.unread(model)
        and all(parameter.ndim == 1 for parameter in module.parameters())
    ]


@register
class LayerNorm(Method):
    """Every LayerNorm and RMSNorm of the backbone trains, with its bias where it has one.

    Of batch normalisation the factors and biases train; its statistics stay those of pretraining.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "layernorm": MethodInfo("every norm's weight and bias", "Zhao et al. 2023, arXiv:2312.11420"),
    }
    method: Literal["layernorm"] = "layernorm"

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Names of the norms."""
        return short_names(model, _norms(model))

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's LNTuningConfig for this backbone."""
        from peft import LNTuningConfig

        return LNTuningConfig(
            task_type=anatomy.task(model),
            target_modules=self.modules(model),
            modules_to_save=beside.heads or None,
        )


def _norms(model: PreTrainedModel) -> list[str]:
    """Paths of the modules that are called a norm by their class and have a vector of weights."""
    norm_paths, unread = [], anatomy.unread(model)
    for name, module in anatomy.text_modules(model):
        weights = dict(module.named_parameters(recurse=False))
        named = type(module).__name__.endswith(("Norm", "BatchNorm2d"))
        if named and name not in unread and "weight" in weights and weights["weight"].ndim == 1:
            norm_paths.append(name)
    if not norm_paths:
        raise ConfigError(
            f"adapter.method=layernorm: {type(model).__name__} has no norms with weights. Take adapter.method=lora."
        )
    return norm_paths


@register
class Beft(OnLayers):
    """b + a vector for the biases of the chosen layers; zero at the start. The paper takes those of the values."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "beft": MethodInfo("biases of the chosen layers", "Huang et al. 2025, arXiv:2509.15974"),
    }
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "BeftConfig"
    method: Literal["beft"] = "beft"

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse layers without biases, whose adapter could not be merged."""
        layers = linear_layers(model, self.targets).items()
        without = next((path for path, layer in layers if layer._parameters.get("bias") is None), None)
        if without is None:
            return None
        return (
            f"{without} of {type(model).__name__} has no bias. Write adapter.targets as a list of layers with one, "
            "or take adapter.method=ia3."
        )

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict()
