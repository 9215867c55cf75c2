"""What does not go with sparse training, and with activated LoRA."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.adapters import ALora, Full, Method
from workbench.config.sections.basic_sections import ModelConfig
from workbench.config.sections.optimizer_config import MIX_VALUES
from workbench.config.sections.run_sections import RunSections

TRAIN_WEIGHTS = ("block-expansion", "full", "last-layers", "osf", "shira", "sparse", "super")
"""Methods that train weights of the layers themselves, or copies of them, and nothing beside them."""
UNQUANTISED = ("auto", "float32", "bfloat16", "float16")


def unprunable(model: ModelConfig, adapter: Method) -> str | None:
    """Why a backbone cannot be pruned under this method, and what to write instead; None where it can."""
    if reason := packed(model):
        return reason
    if adapter.method in TRAIN_WEIGHTS:
        besides = " (adapter.sparsity=0.5 trains a sparse model)" if isinstance(adapter, Full) else ""
        return (
            f"model.sparsity={model.sparsity} keeps half of the frozen weights at zero, and "
            f"adapter.method={adapter.method} trains such weights. Write adapter.method=lora, or leave model.sparsity "
            f"out{besides}."
        )
    return None


def packed(model: ModelConfig) -> str | None:
    """Why weights that are stored so cannot be pruned, and what to write instead; None where they can."""
    if model.sparsity is None or model.weights in UNQUANTISED:
        return None
    return (
        f"model.sparsity={model.sparsity} prunes weights that are numbers, and model.weights={model.weights} packs "
        "them. Write model.weights=bfloat16, or leave model.sparsity out."
    )


def of_sparsity(config: RunSections) -> Iterator[str]:
    """Where weights that are pruned would not stay zero."""
    adapter, optimizer = config.adapter, config.optimizer
    if isinstance(adapter, Full) and adapter.sparsity is not None and optimizer.name in MIX_VALUES:
        yield (
            f"optimizer.name={optimizer.name} moves a weight by the gradients of others, and adapter.sparsity keeps "
            "weights at zero. Write optimizer.name=adamw, or leave adapter.sparsity out."
        )


LORA = "take adapter.method=lora"


def of_alora(config: RunSections) -> Iterator[str]:
    """Contradictions to `adapter.method=alora`, one sentence for each."""
    if not isinstance(config.adapter, ALora):
        return
    for why, cure in _reasons(config):
        yield f"adapter.method=alora {why}. {cure}, or {LORA}."


def _reasons(config: RunSections) -> Iterator[tuple[str, str]]:
    if not config.task.shares_prefixes:
        yield (
            f"begins where a row asks for an answer, which recipe={config.recipe} does not tell it",
            "Write recipe=sft",
        )
    if config.token_drop.is_on:
        yield "counts the tokens of a row, of which token_drop leaves some out", "Leave token_drop out"
    if config.train.compile:
        yield (
            "tells its layers in each pass where rows begin, which train.compile cuts off",
            "Write train.compile=false",
        )
