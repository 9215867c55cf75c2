"""Settings that do not go with recipe reward, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.run_sections import RunSections

_OF_ROWS = ("decontaminate", "select", "sampling", "curriculum", "length_warm_up", "augment")
"""Keys of `data` that are for rows of one answer."""


def mistakes(config: RunSections) -> Iterator[str]:
    """Yield a sentence for each setting that does not go with recipe reward."""
    data = config.data
    if data.format not in ("auto", "preference"):
        yield f"data.format={data.format} judges no answers. recipe=reward reads data.format=preference; leave it out."
    if data.loss_on != "assistant":
        yield "recipe=reward compares whole answers, of which no token carries loss: leave data.loss_on out."
    if given := [f"data.{key}" for key in _OF_ROWS if data.differs(key)]:
        yield f"recipe=reward compares two answers a row: leave {', '.join(given)} out, for rows of one answer."
    if config.model.new_tokens:
        yield "recipe=reward trains no rows of new tokens: leave model.new_tokens out."
    for key in ("label_smoothing", "z_loss", "r_drop"):
        if getattr(config.regularise, key):
            yield f"regularise.{key} is for losses of tokens and classes, not for recipe=reward. Leave it out."
    if config.freeze.policy != "none" and config.freeze.cache != "off":
        yield (
            f"freeze.cache={config.freeze.cache} keeps what frozen blocks give for single rows, and recipe=reward "
            "computes two together. Write freeze.cache=off."
        )
    if config.distributed.sharded:
        yield "distributed: recipe=reward was not tried with ZeRO or FSDP2. Leave section distributed out."
