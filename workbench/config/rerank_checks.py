"""Settings that do not go with recipe rerank, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.run_sections import RunSections

_OF_TEXT = ("format", "truncate", "loss_on")
"""Keys of `data` for text that is written."""
_OF_ROWS = ("sampling", "curriculum", "augment", "length_warm_up", "decontaminate", "select")
"""Keys of `data` that choose, order or rewrite rows one by one."""


def mistakes(config: RunSections) -> Iterator[str]:
    """Yield a sentence for each setting that does not go with recipe rerank."""
    if config.reads_pictures:
        return  # which has a sentence of its own
    data = config.data
    if given := [f"data.{key}" for key in _OF_TEXT if data.differs(key)]:
        yield f"recipe=rerank reads columns of text, and cuts passages on the right: leave {', '.join(given)} out."
    if given := [f"data.{key}" for key in _OF_ROWS if data.differs(key)]:
        yield f"recipe=rerank draws passages of other rows beside each row: leave {', '.join(given)} out."
    if data.weighs:
        yield "data.columns names a weight, and rows of recipe=rerank count once each. Leave it out."
    if config.model.chat_template is not None or config.model.new_tokens:
        yield "recipe=rerank reads texts as they are: leave model.chat_template and model.new_tokens out."
    if config.adapter.looks:
        yield (
            f"adapter.method={config.adapter.method} looks at the loss of single rows, and recipe=rerank computes "
            f"several passages a row. Write {config.adapter.without_looking}."
        )
    if config.freeze.policy != "none" and config.freeze.cache != "off":
        yield (
            f"freeze.cache={config.freeze.cache} keeps what frozen blocks give for rows, and recipe=rerank draws other "
            "passages for a row in each pass. Write freeze.cache=off."
        )
    for key in ("label_smoothing", "z_loss", "r_drop"):
        if getattr(config.regularise, key):
            yield f"regularise.{key} is for losses of tokens and classes, not for recipe=rerank. Leave it out."
    if config.distributed.sharded:
        yield "distributed: recipe=rerank was not tried with ZeRO or FSDP2. Leave section distributed out."
