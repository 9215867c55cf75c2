"""Prefix tuning and P-tuning v2: trainable keys and values before each row, in every layer, on HF PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveInt

from workbench.adapters import anatomy, attention_cache
from workbench.adapters.method import ExtraParameters, MethodInfo, Sample, register
from workbench.adapters.virtual_tokens import NO_MERGE, VirtualTokens, follow_precision

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

CHECKPOINTING = "transformers leaves out the key-value cache, where the prefix stands, when it recomputes activations"


class _Prefix(VirtualTokens):
    """Base of the methods whose virtual tokens are keys and values."""

    def modules(self, model: PreTrainedModel) -> list[str]:
        """The attention modules, which see the prefix."""
        leaves = {
            name.rsplit(".", 1)[-1]
            for stack in anatomy.blocks(model)
            for block in stack
            for name, module in model.get_submodule(block).named_modules()
            if anatomy.is_attention(name.rsplit(".", 1)[-1]) and list(module.children())
        }
        return sorted(leaves)

    def refusal(self, model: PreTrainedModel) -> str | None:
        """A prefix needs keys and values of one size that are cached, and text that looks back far enough."""
        if reason := super().refusal(model):
            return reason
        if model.config.is_encoder_decoder:
            return (
                "PEFT leaves out every other layer of a prefix that stands in a decoder behind an encoder. "
                "Use adapter.method=prompt, or adapter.method=lora."
            )
        if attention_cache.sizes(model) is None:
            return (
                f"{type(model).__name__} keeps no key-value cache of one size in every layer, which is where a prefix "
                "stands. Use adapter.method=prompt, or adapter.method=lora."
            )
        window = attention_cache.window(model)
        if window is not None and self.virtual_tokens >= window:
            return (
                f"every layer of {type(model).__name__} looks back {window} tokens, itself included: no text would see "
                f"the first of {self.virtual_tokens} virtual tokens. Write adapter.virtual_tokens={window - 1}."
            )
        return None

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Nothing but its precision; PEFT draws keys and values from a normal distribution."""
        follow_precision(model)

    def _config(self, model: PreTrainedModel, width: int | None) -> PeftConfig:
        from peft import PrefixTuningConfig

        cached = attention_cache.sizes(model)
        assert cached is not None, "require_fit comes first"
        return PrefixTuningConfig(
            task_type=anatomy.task(model),
            num_virtual_tokens=self.virtual_tokens,
            num_layers=cached.layers,
            num_attention_heads=cached.heads,
            token_dim=cached.heads * cached.width,
            prefix_projection=width is not None,
            encoder_hidden_size=width,  # type: ignore[arg-type]  # PEFT's own default is None
        )


@register
class Prefix(_Prefix):
    """Keys and values of virtual tokens in every layer, computed by a small network that is dropped at the end.

    Try train.learning_rate=0.003; ten times that has diverged.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "prefix": MethodInfo(
            trains="a network that computes keys and values of virtual tokens",
            paper="Li & Liang 2021, arXiv:2101.00190",
            no_merge=NO_MERGE,
            no_freezing="one set of values serves all layers",
            starts_elsewhere="the text attends to the prefix from the start",
            no_checkpointing=CHECKPOINTING,
        )
    }
    method: Literal["prefix"] = "prefix"
    encoder_width: PositiveInt | None = 512
    """Width of the network's hidden layer (the paper's reparametrisation); null: the prefix trains as it is."""

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's PrefixTuningConfig for this backbone."""
        return self._config(model, self.encoder_width)


@register
class DeepPrompt(_Prefix):
    """Keys and values of virtual tokens in every layer, trained as they are.

    They need far higher learning rates than LoRA: try train.learning_rate=0.1 for a short run, less for a long one.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "p-tuning-v2": MethodInfo(
            trains="keys and values of virtual tokens",
            paper="Liu et al. 2022, arXiv:2110.07602",
            no_merge=NO_MERGE,
            no_freezing="one set of values serves all layers",
            starts_elsewhere="the text attends to the prefix from the start",
            no_checkpointing=CHECKPOINTING,
        )
    }
    method: Literal["p-tuning-v2"] = "p-tuning-v2"

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's PrefixTuningConfig for this backbone, without a network."""
        return self._config(model, None)
