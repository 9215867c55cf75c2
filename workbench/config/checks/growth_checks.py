"""Settings that a growing batch does not go with, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions, one sentence for each."""
    growth, size = config.batch.growth, config.batch.size
    if growth is None:
        return
    if growth <= size:
        yield f"batch.growth={growth} is no growth from batch.size={size}. Write batch.growth={8 * size}."
    if config.optimizer.noise_scale is None:
        yield "batch.growth follows the measured noise scale. Write optimizer.noise_scale=10 as well."
    if config.train.steps is None and (config.train.epochs is not None or config.budget.unlimited):
        yield (
            "batch.growth leaves open how many steps an epoch has. Write train.steps, or train.epochs=null and "
            "budget.tokens or budget.time."
        )
    if config.data.curriculum.by != "none":
        yield "batch.growth and data.curriculum both say which rows a step takes. Leave one of them out."
    if config.data.mix.by == "learned":
        yield "batch.growth and data.mix.by=learned both say which rows a step takes. Leave one of them out."
    if config.over is not None and config.over.table is not None:
        yield f"batch.growth differs from run to run, and recipe={config.recipe} compares runs. Leave it out."
