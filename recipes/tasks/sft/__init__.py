"""Task `sft`: a causal or sequence-to-sequence model learns to write the answers, or all of the text, of its rows, and
one that hears to write transcripts."""

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import BY_PROCESSOR, TaskFacts, register


def _readable(config: RunSections, limit: int | None) -> None:
    from workbench.data.text import tokenized

    tokenized.require_readable(config.data, limit)


_OF_TEXT = {
    "data.loss_on": "says which turns of a text are learnt, and a transcript is learnt whole",
    "data.truncate": "says which end of a text is cut, and a transcript is never cut",
    "data.clean": "judges texts by their words",
    "data.decontaminate": "compares the words of rows",
    "data.select": "chooses among rows of text",
    "data.curriculum": "orders rows of text",
    "data.sampling": "draws rows of text",
    "data.length_warm_up": "cuts rows of text",
    "data.sources": "mixes files of text; data.train is one file of recordings",
    "data.fold": "holds out a fold of texts; data.held_out takes a share or a file",
    "model.chat_template": "writes conversations, and a decoder begins with the tokens of language and task",
    "model.new_tokens": "trains rows of new tokens, which a model that hears has none for",
    "token_drop": "skips tokens of texts",
    "image": "reads pictures",
    "regularise.r_drop": "lays rows of text twice",
    "batch.shared_prefix": "computes the same first tokens once, and recordings share none",
    "train.start": "goes on from an adapter over texts",
    "train.compile": "compiles blocks by the length of texts",
}
"""Settings that rows of recordings have no use for, each with why."""
_DISTRIBUTED = ("tensor", "pipeline", "sequence")


def _check(config: RunSections) -> Iterator[str]:
    if not config.reads_sound:
        if config.differs("audio"):
            yield "audio is for rows that are recordings. Write data.format=audio, or leave audio out."
        return
    if config.over is not None:
        yield f"recipe={config.recipe} reads text, and data.format=audio recordings. Write recipe=sft for one training."
    for key, why in _OF_TEXT.items():
        if config.given(key):
            yield f"{key} {why}; rows with data.format=audio are recordings. Leave {key} out."
    for key in _DISTRIBUTED:
        if getattr(config.distributed, key) > 1:
            yield f"distributed.{key} cuts what reads text, and rows here are recordings. Leave it out."
    if config.freeze.policy != "none":
        yield (
            "freeze.policy freezes the blocks of one stack, and a model that hears has an encoder and a decoder. Leave "
            "it out; adapter.targets names the layers that train."
        )
    if config.data.columns.get("audio", config.audio.column) != config.audio.column:
        yield f"data.columns renames `audio`. Write audio.column={config.data.columns['audio']} instead."


FACTS = register(
    TaskFacts(
        name="sft",
        line="instruction tuning: write the answers of prompts, plain text, or transcripts of speech",
        module="workbench.recipes.tasks.sft.task",
        readable=_readable,
        head="text",
        media=("audio",),
        pictured=True,
        writes_text=True,
        answer="answer",
        serves=True,
        start="train",
        answers=True,
        learns_answers=("best", "accepted"),
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
        sections=("image", "audio"),
        check=_check,
        refuses=BY_PROCESSOR,
    )
)
