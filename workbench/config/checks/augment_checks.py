"""Settings of a run under which its texts cannot be rewritten while they are trained on."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections

KEY = "data.augment"


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to `data.augment`, one sentence for each."""
    if not config.data.augment.is_on:
        return
    if config.task.tokens:
        yield (
            f"{KEY} rewrites texts that are read, and recipe={config.recipe} learns to write its texts: what it puts "
            f"into them would be learnt. It is for recipe=classify|crossval. Leave {KEY} out."
        )
    elif config.reads_pictures:
        yield f"{KEY} rewrites words, and rows with data.format=image have none. Write image.augment instead."
    elif config.classes.kind == "pair":
        yield (
            f"{KEY} makes one of two responses worse than it is, which may change which is better (classes.kind=pair). "
            f"Leave {KEY} out."
        )
    if config.freeze.cache in ("memory", "disk"):
        yield (
            f"freeze.cache={config.freeze.cache} keeps what frozen blocks give, and {KEY} rewrites rows in each pass, "
            f"so that none comes twice. Write freeze.cache=off, or leave {KEY} out."
        )
