"""Settings of a run under which devices cannot compute the same rows together, each a part of every block."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.checks import parted_model_checks
from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `distributed.tensor`, one sentence for each."""
    if (size := config.distributed.tensor) == 1:
        return
    untried = ((f"was not tried with {name}", cure) for name, cure in parted_model_checks.untried(config))
    for why, cure in (*_of_blocks(config), *untried):
        yield f"distributed.tensor={size} {why}. Write {cure}, or distributed.tensor=1."


def _of_blocks(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield a reason, and what to write instead of its cause."""
    model = config.model
    if model.weights in ("int8", "nf4", "fp4"):
        yield f"cuts rows and columns, which model.weights={model.weights} packs", "model.weights=bfloat16"
    if model.attention not in ("auto", "sdpa"):
        yield f"was not tried with model.attention={model.attention}", "model.attention=sdpa"
    for name, drops, cure in (("adapter", config.adapter.noise, "0"), ("model", model.dropout, "false")):
        if drops:
            yield f"has no device with all heads and features, for which {name}.dropout draws", f"{name}.dropout={cure}"
