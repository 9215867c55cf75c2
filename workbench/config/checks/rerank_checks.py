"""Settings that do not go with recipe rerank, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.checks import embed_checks
from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Yield a sentence for each setting that does not go with recipe rerank."""
    if config.reads_pictures:
        return  # which has a sentence of its own
    yield from embed_checks.of_rows(
        config,
        cut="columns of text, and cuts passages on the right",
        why="draws passages of other rows beside each row",
    )
    if config.adapter.looks:
        yield (
            f"adapter.method={config.adapter.method} looks at the loss of single rows, and recipe=rerank computes "
            f"several passages a row. Write {config.adapter.without_looking}."
        )
    for key in ("label_smoothing", "z_loss", "r_drop"):
        if getattr(config.regularise, key):
            yield f"regularise.{key} is for losses of tokens and classes, not for recipe=rerank. Leave it out."
    if config.distributed.sharded:
        yield "distributed: recipe=rerank was not tried with ZeRO or FSDP2. Leave section distributed out."
