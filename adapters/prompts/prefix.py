"""Prefix tuning and P-tuning v2: trainable keys and values before each row, in every layer.

In causal language models they are PEFT's, in the key-value cache. Everywhere else (encoders, encoder-decoders,
classifiers) they are ours, in each attention module.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import PositiveInt

from workbench.adapters import anatomy
from workbench.adapters.method import ExtraParameters, MethodInfo, Sample, register
from workbench.adapters.prompts import virtual_tokens
from workbench.adapters.prompts.virtual_tokens import NO_MERGE, VirtualTokens, follow_precision
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

CHECKPOINTING = "transformers leaves out the key-value cache, where the prefix stands, when it recomputes activations"

_facts = partial(
    MethodInfo,
    no_merge=NO_MERGE,
    no_freezing="one set of values serves all layers",
    no_packing="each row begins with virtual tokens of its own",
    starts_elsewhere="the text attends to the prefix from the start",
)


class _Prefix(VirtualTokens):
    """Base of the methods whose virtual tokens are keys and values."""

    def modules(self, model: PreTrainedModel) -> list[str]:
        """The attention modules, which see the prefix."""
        if not _cached(model):
            return sorted({path.rsplit(".", 1)[-1] for path in self._places(model)})
        leaves = {
            name.rsplit(".", 1)[-1]
            for stack in anatomy.blocks(model)
            for block in stack
            for name, module in model.get_submodule(block).named_modules()
            if anatomy.is_attention(name.rsplit(".", 1)[-1]) and list(module.children())
        }
        return sorted(leaves)

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse backbones without a place for keys and values, and attention windows that are too short."""
        if not _cached(model):
            from workbench.adapters.prompts.prefix_tuner import COMPUTED

            implementation = model.config._attn_implementation
            if not self._places(model):
                return (
                    f"{type(model).__name__} does not compute attention by transformers' functions, which is where a "
                    "prefix stands. Use adapter.method=lora."
                )
            if implementation not in COMPUTED:
                cure = "Write model.attention=sdpa, or use adapter.method=lora."
                return f"a prefix is not added to {implementation}. {cure}"
            return None
        if virtual_tokens.cache_sizes(model) is None:
            return (
                f"{type(model).__name__} keeps no key-value cache of one size in every layer, which is where a prefix "
                "stands. Use adapter.method=prompt, or adapter.method=lora."
            )
        window = virtual_tokens.attention_window(model)
        if window is not None and self.virtual_tokens >= window:
            return (
                f"every layer of {type(model).__name__} looks back {window} tokens, itself included: no text would see "
                f"the first of {self.virtual_tokens} virtual tokens. Write adapter.virtual_tokens={window - 1}."
            )
        return None

    def _places(self, model: PreTrainedModel) -> dict[str, tuple[int, int, int]]:
        from workbench.adapters.prompts.prefix_tuner import attention_sizes

        return attention_sizes(model)

    def extra_positions(self, model: PreTrainedModel) -> int:
        """Number of virtual tokens in the cache; 0 for prefixes in the attention modules."""
        return self.virtual_tokens if _cached(model) else 0

    def no_checkpointing(self, model: PreTrainedModel) -> str:
        """Say why not for a prefix in the cache; empty for one in the attention modules."""
        return CHECKPOINTING if _cached(model) else ""

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Set the precision of a prefix in the cache; keys and values are drawn from a normal distribution."""
        if _cached(model.get_base_model()):
            follow_precision(model)

    def _config(self, model: PreTrainedModel, beside: ExtraParameters, width: int | None) -> PeftConfig:
        from peft import PrefixTuningConfig

        if not _cached(model):
            from workbench.adapters.prompts.prefix_tuner import AttentionPrefixConfig

            return AttentionPrefixConfig(
                task_type=anatomy.task(model),
                virtual_tokens=self.virtual_tokens,
                network_width=width,
                sizes={path: list(sizes) for path, sizes in self._places(model).items()},
                modules_to_save=beside.heads or None,
            )
        cached = virtual_tokens.cache_sizes(model)
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

    In a causal model one network computes them for all layers, as in the paper; elsewhere each attention module has its
    own network, so that a layer's activations can be recomputed without the others.

    Try train.learning_rate=0.003; ten times that has diverged.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "prefix": _facts(
            trains="a network that computes keys and values of virtual tokens",
            paper="Li & Liang 2021, arXiv:2101.00190",
        )
    }
    method: Literal["prefix"] = "prefix"
    encoder_width: Annotated[PositiveInt | None, Unit("hidden units")] = 512
    """Width of the network's hidden layer (the paper's reparametrisation); null: the prefix trains as it is."""

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's PrefixTuningConfig for this backbone, or the configuration of our tuner."""
        return self._config(model, beside, self.encoder_width)


@register
class DeepPrompt(_Prefix):
    """Keys and values of virtual tokens in every layer, trained as they are.

    They need far higher learning rates than LoRA: try train.learning_rate=0.1 for a short run, less for a long one.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "p-tuning-v2": _facts(
            trains="keys and values of virtual tokens",
            paper="Liu et al. 2022, arXiv:2110.07602",
        )
    }
    method: Literal["p-tuning-v2"] = "p-tuning-v2"

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's PrefixTuningConfig for this backbone, or the configuration of our tuner, without a network."""
        return self._config(model, beside, None)


def _cached(model: Any) -> bool:
    """Whether the prefix is PEFT's, in the key-value cache, rather than ours in the attention modules."""
    return anatomy.task(model) == "CAUSAL_LM"
