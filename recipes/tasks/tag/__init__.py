"""Task `tag`: a tag for each word, such as named entities or parts of speech (token classification)."""

from typing import Literal

from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import TaskFacts, register
from workbench.schema import Section


class TagConfig(Section):
    """Tags of words."""

    scheme: Literal["auto", "IOB1", "IOB2", "BILOU", "plain"] = "auto"
    """How the tags of a file mark entities; `plain`: they mark none, as parts of speech do. IOBES and BMES are read as
    BILOU. `auto` recognises it, per file."""
    strict: bool = False
    """Count only predicted entities whose tags are in order, as seqeval's strict mode does; conlleval's rule, the usual
    one, makes the best of any tags."""


_UNREAD = "{key} is for rows of text, and {recipe} reads words with tags: leave {key} out."
_ROWS = "{key} chooses, orders or rewrites rows of text, which {recipe} does not: leave {key} out."
_LOSS = "{key} is for losses of tokens and classes of rows, not for {recipe}. Leave it out."


def _readable(config: RunSections, limit: int | None) -> None:
    from workbench.data import tagged_rows

    data, scheme = config.data, config.section(TagConfig).scheme
    for path in (data.train, *data.test_files.values(), *data.held_out_files.values()):
        most = min((each for each in (data.limit if path == data.train else None, limit) if each), default=None)
        tagged_rows.read(path, data, scheme=None if scheme == "auto" else scheme, limit=most)


FACTS = register(
    TaskFacts(
        name="tag",
        line="a tag for each word: named entities, parts of speech",
        module="workbench.recipes.tasks.tag.task",
        readable=_readable,
        head="tokens",
        packs=True,
        devices=True,
        folds=True,
        averages=lambda config: True,
        pipeline=None,
        views=("lower", "upper", "typos"),
        word_stages=True,
        banked=True,
        fleets=True,
        students="workbench.recipes.over.distill_tags",
        own_choice=True,
        serves=True,
        section=TagConfig,
        sections=("tta",),
        refuses={
            **dict.fromkeys(
                ("data.format", "data.truncate", "data.loss_on", "data.sources", "data.streaming"), _UNREAD
            ),
            **dict.fromkeys(("model.chat_template", "model.new_tokens"), _UNREAD),
            **dict.fromkeys(("data.select", "data.sampling", "data.curriculum", "data.augment"), _ROWS),
            **dict.fromkeys(("data.length_warm_up", "data.decontaminate", "data.clean"), _ROWS),
            **dict.fromkeys(("regularise.label_smoothing", "regularise.z_loss", "regularise.r_drop"), _LOSS),
        },
        predicts=("entities.jsonl", "tag every text of a file"),
        report="tags",
        score="f1",
        higher_is_better=True,
    )
)
