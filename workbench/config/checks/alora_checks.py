"""Settings with which activated LoRA would not find its invocation in the rows."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.adapters import ALora
from workbench.config.sections.run_sections import RunSections

LORA = "take adapter.method=lora"


def mistakes(config: RunSections) -> Iterator[str]:
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
