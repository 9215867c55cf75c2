"""Task `mlm`: an encoder learns to find hidden tokens, which each epoch hides anew. Its run is that of `sft`."""

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import TaskFacts, register


def _check(config: RunSections) -> Iterator[str]:
    if config.model.chat_template is not None or config.data.loss_on != "assistant":
        yield "recipe=mlm reads text as it is: leave model.chat_template and data.loss_on out."


def _readable(config: RunSections, limit: int | None) -> None:
    from workbench.data.text import tokenized

    tokenized.require_readable(config.data, limit)


FACTS = register(
    TaskFacts(
        name="mlm",
        line="masked language modelling: find hidden tokens",
        module="workbench.recipes.tasks.sft.task",
        readable=_readable,
        head="masked",
        tokens=True,
        uncached="hides other tokens in each epoch, so that no row comes twice",
        token_sampling="hides other tokens in each epoch",
        records_losses=True,
        packs=True,
        devices=True,
        pipeline=None,
        grows=True,
        banked=True,
        fleets=True,
        students="workbench.recipes.over.distill",
        sections=("masking",),
        check=_check,
        predicts=None,
    )
)
