"""Task `rerank`: a cross-encoder learns which passages belong to a query."""

from collections.abc import Iterator
from typing import Any

from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import DIVERGENCES, TaskFacts, register
from workbench.recipes.tasks import embed


def _check(config: RunSections) -> Iterator[str]:
    if config.media:
        return  # which has a sentence of its own
    yield from embed.of_rows(
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


def _readable(config: Any, limit: int | None) -> None:
    from workbench.data.embedding import pair_data, rerank_candidates

    pair_data.require_readable(config, limit, rerank_candidates.split)


FACTS = register(
    TaskFacts(
        name="rerank",
        line="rerankers: score a query and a passage together",
        module="workbench.recipes.tasks.rerank.task",
        readable=_readable,
        head="classes",
        output="score",
        compares="passages",
        uncached="draws other passages for a row in each pass",
        own_choice=True,
        devices=True,
        pipeline="reads padded rows",
        folds=True,
        students="workbench.recipes.over.distill_rankings",
        student_losses=("forward_kl", *DIVERGENCES, "margin_mse", "mse"),
        sections=("rerank",),
        check=_check,
        report="retrieval",
        predicts=("scores.csv", "score every pair of a query and a passage of a file"),
    )
)
