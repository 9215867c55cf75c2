"""Task `embed`: texts that belong together get embeddings that are close, for sentence-transformers."""

from collections.abc import Iterator
from typing import Any

from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import TaskFacts, register

OF_TEXT = ("format", "truncate", "loss_on")
"""Keys of `data` for text that is written."""
OF_ROWS = ("sampling", "curriculum", "augment", "length_warm_up", "decontaminate", "select")
"""Keys of `data` that choose, order or rewrite rows one by one."""


def _check(config: RunSections) -> Iterator[str]:
    if config.media:
        return  # which has a sentence of its own
    yield from of_rows(
        config, cut="columns of text, cut on the right", why="compares the rows of a batch with each other"
    )
    if config.adapter.looks:
        yield (
            f"adapter.method={config.adapter.method} looks at the loss of single rows, and that of recipe=embed "
            f"compares rows. Write {config.adapter.without_looking}."
        )
    if config.optimizer.noise_scale is not None:
        yield (
            "optimizer.noise_scale compares gradients of parts of a batch, and recipe=embed has one loss of the whole. "
            "Leave it out."
        )
    if config.freeze.policy != "none" and config.freeze.observes == "activations":
        yield (
            f"freeze.policy={config.freeze.policy} observes activations of rows, and rows of recipe=embed are several "
            "texts. Write freeze.policy=static."
        )
    for key in ("label_smoothing", "z_loss", "r_drop"):
        if getattr(config.regularise, key):
            yield f"regularise.{key} is for losses of tokens and classes, not for recipe=embed. Leave it out."


def of_rows(config: RunSections, *, cut: str, why: str) -> Iterator[str]:
    """Settings of rows and of their form that a recipe of pairs of texts does not take.

    Args:
        cut: What it reads.
        why: Rows cannot be chosen, ordered or rewritten one by one.
    """
    data, recipe = config.data, f"recipe={config.recipe}"
    if given := [f"data.{key}" for key in OF_TEXT if data.differs(key)]:
        yield f"{recipe} reads {cut}: leave {', '.join(given)} out."
    if given := [f"data.{key}" for key in OF_ROWS if data.differs(key)]:
        yield f"{recipe} {why}: leave {', '.join(given)} out."
    if data.weighs:
        yield f"data.columns names a weight, and rows of {recipe} count once each. Leave it out."
    if config.model.chat_template is not None or config.model.new_tokens:
        yield f"{recipe} reads texts as they are: leave model.chat_template and model.new_tokens out."


def _readable(config: Any, limit: int | None) -> None:
    from workbench.data.embedding import pair_data

    pair_data.require_readable(config, limit, pair_data.split_of_embeddings)


FACTS = register(
    TaskFacts(
        name="embed",
        line="sentence embeddings of pairs, triplets, scored pairs or classes",
        module="workbench.recipes.tasks.embed.task",
        readable=_readable,
        head="hidden",
        compares="rows of a batch",
        uncached="reads rows of several texts",
        packs=True,
        own_choice=True,
        one_source_batches=True,
        devices=True,
        pipeline="compares outputs of all rows of a step before any is differentiated",
        cut=lambda config: (
            "mines with the whole backbone (embed.mine), and zero=3 and fsdp2 cut it" if config.embed.mine else None
        ),
        folds=True,
        students="workbench.recipes.over.distill_embeddings",
        student_losses=("cosine", "mse", "relation"),
        sections=("embed",),
        check=_check,
        serves=True,
        report="retrieval",
        predicts=("embeddings.parquet", "embed every text of a file"),
    )
)
