"""Task `sft`: a causal or sequence-to-sequence model learns to write the answers, or all of the text, of its rows."""

from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import TaskFacts, register


def _readable(config: RunSections, limit: int | None) -> None:
    from workbench.data.text import tokenized

    tokenized.require_readable(config.data, limit)


_BY_PROCESSOR = (
    "image.{}: pictures beside text are read as the backbone's own processor reads them, and image.folder and "
    "image.max_pixels are all that is asked. Leave it out."
)
FACTS = register(
    TaskFacts(
        name="sft",
        line="instruction tuning: write the answers of prompts, or plain text",
        module="workbench.recipes.tasks.sft.task",
        readable=_readable,
        head="text",
        pictured=True,
        writes_text=True,
        answer="answer",
        serves=True,
        start="train",
        answers=True,
        tokens=True,
        records_losses=True,
        packs=True,
        shares_prefixes=True,
        chooses=frozenset({"perplexity", "ifd", "gradient"}),
        difficulties={"perplexity": "asks the backbone about answers before it trains"},
        token_sampling=None,
        folds=True,
        devices=True,
        pipeline=None,
        sequence=None,
        grows=True,
        banked=True,
        fleets=True,
        students="workbench.recipes.over.distill",
        sections=("image",),
        refuses={
            f"image.{key}": _BY_PROCESSOR.format(key)
            for key in ("column", "size", "prepare", "augment", "depth", "workers")
        },
    )
)
