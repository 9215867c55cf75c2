"""The methods whose adapters may share a bank, and why others may not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.adapters.method import Method
from workbench.adapters.updates.lora import Lora, LoraPlus

if TYPE_CHECKING:
    from peft import PeftConfig

OWN_LAYERS = (
    *("dora", "ia3", "houlsby", "pfeiffer", "parallel", "layernorm", "bitfit", "beft"),
    *("vera", "pvera", "oft", "boft", "hra", "road", "miss", "loha", "lokr", "gralora", "delora", "randlora"),
    *("tinylora", "c3a", "fourierft", "waveft", "hira", "deft", "glora", "peanut"),
)
"""Methods that change single layers and start from the backbone alone: a bank routes a member's rows through layers of
its own."""

WHY = {
    "full": "it trains the backbone that all members share",
    "last-layers": "its rows would share no block above its first one with the others",
    "linear-probe": "the output head is outside of the layers in which a bank routes rows",
    "block-expansion": "it adds blocks that the rows of other members would pass, too",
    "adalora": "its ranks move between all of its layers by their gradients",
    "alora": "it acts from a place in the text on, which a bank does not look for",
    "trainable-tokens": "it trains rows of the embedding, which a bank does not route",
}
"""Why members with a method train one after the other."""
_DATA = "its start comes from the training rows, or from the weights"
_TOKENS = "it puts virtual tokens before its rows, which the rows of the others do not have"
_VALUES = "its values are shared by layers, or are single places of weights"
WHY |= dict.fromkeys(("eva", "corda", "lora-ga", "pissa", "olora", "loftq", "osf", "psoft"), _DATA)
WHY |= dict.fromkeys(("prompt", "p-tuning", "p-tuning-v2", "prefix"), _TOKENS)
WHY |= dict.fromkeys(("vb-lora", "uni-lora", "sparse", "shira", "super"), _VALUES)


def together(config: Method) -> bool:
    """Whether the low-rank products of members with this configuration are computed together."""
    return isinstance(config, (Lora, LoraPlus)) and config.method != "dora"


def refusal(config: Method) -> str | None:
    """Say why adapters of this method cannot share a bank, and train one after the other instead; None if they can."""
    if getattr(config, "experts", False):
        return "a bank routes rows to linear layers; adapters of experts train one after the other"
    if together(config) or config.method in OWN_LAYERS:
        return None
    why = WHY.get(config.method, "a bank does not know its layers")
    return f"a bank holds no {config.method}: {why}; its adapters train one after the other"


def is_plain(config: PeftConfig) -> bool:
    """Whether a saved adapter is plain LoRA, whose products are computed together."""
    from peft import LoraConfig

    if not isinstance(config, LoraConfig) or config.use_dora:
        return False
    return not (config.trainable_token_indices or config.alora_invocation_tokens)


def refusal_of_saved(config: PeftConfig) -> str | None:
    """Why no bank holds a saved adapter; None if one does."""
    kind = str(config.peft_type).removeprefix("PeftType.")
    dora = kind == "LORA" and getattr(config, "use_dora", False)
    if getattr(config, "trainable_token_indices", None):
        return f"a bank trains no rows of tokens, which this {kind} adapter has"
    if is_plain(config) or (dora and not getattr(config, "alora_invocation_tokens", None)):
        return None
    biases = all(name.endswith("bias") for name in getattr(config, "parameter_names", None) or [""])
    if kind in SAVED and (kind != "PARTIAL" or biases):
        return None
    return f"a bank holds no {kind} adapter"


SAVED = (
    *("IA3", "BOTTLENECK", "LN_TUNING", "PARTIAL", "BEFT", "VERA", "PVERA", "OFT", "BOFT", "HRA", "ROAD", "MISS"),
    *("LOHA", "LOKR", "GRALORA", "DELORA", "RANDLORA", "TINYLORA", "C3A", "FOURIERFT", "WAVEFT", "HIRA", "DEFT"),
    *("GLORA", "PEANUT"),
)
"""PEFT's names of the methods of `OWN_LAYERS`."""
