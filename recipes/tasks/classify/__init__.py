"""Task `classify`: labels of texts, pictures or sound: one class, several, a number, or the better of two responses."""

from collections.abc import Iterator
from typing import Any, get_args

from workbench.config.sections.cleaning_config import DUPLICATE_RULES
from workbench.config.sections.run_sections import RunSections
from workbench.config.sections.tta_config import ViewName
from workbench.config.task_facts import TaskFacts, register


def _check(config: RunSections) -> Iterator[str]:
    media, name = config.media, config.data.format
    unused = ("truncate", "loss_on") if media else ("format", "truncate", "loss_on")
    given = [f"data.{key}" for key in unused if config.data.differs(key)]
    given += ["model.chat_template"] if config.model.chat_template is not None else []
    if config.model.new_tokens:
        yield f"recipe={config.recipe} trains no rows of new tokens: leave model.new_tokens out."
    if given:
        yield (
            f"recipe={config.recipe} reads columns as classes.text puts them together, and cuts them as classes.keep "
            f"and classes.shares say: leave {', '.join(given)} out."
        )
    for section, (_, many) in _WORDS.items():
        if section != name and config.differs(section):
            yield f"{section} is for rows that are {many}. Write data.format={section}, or leave {section} out."
    if media is None:
        return
    one, many = _WORDS[name]
    classes = config.classes
    text = {"text": classes.text is not None, "shares": bool(classes.shares), "keep": classes.keep != "start"}
    given = [f"classes.{key}" for key, is_set in text.items() if is_set]
    given += ["data.max_tokens"] if config.data.differs("max_tokens") else []
    if given:
        default = type(config.data).model_fields["max_tokens"].default
        cure = (
            f" A command leaves it out of a shipped recipe: data.max_tokens={default}."
            if "data.max_tokens" in given
            else ""
        )
        yield f"data.format={name} reads {many}: leave {' and '.join(given)} out, for text alone.{cure}"
    if config.data.columns.get(media.column, media.column) != media.column:
        yield (
            f"data.columns renames `{media.column}`, and the column of {many} has a setting of its own. "
            f"Write {name}.column={config.data.columns[media.column]} instead."
        )
    if config.data.select.by == "importance":
        cure = config.data.select.random_instead
        yield f"data.select.by=importance compares words, and {many} have none. Write {cure}."
    if config.data.decontaminate.action != "off":
        yield (
            f"data.decontaminate compares words; copies of {many} are found by data.overlap. Leave "
            "data.decontaminate out."
        )
    if worded := [rule for rule in config.data.clean if rule not in DUPLICATE_RULES]:
        yield (
            f"data.clean={', '.join(worded)}: judges texts by their words, and rows with data.format={name} have none. "
            f"Leave {'it' if len(worded) == 1 else 'them'} out; {many} have {' and '.join(DUPLICATE_RULES)}."
        )
    if shingled := [f"duplicates.{key}" for key in ("shingle", "size") if config.duplicates.differs(key)]:
        yield (
            f"data.format={name} has no shingles: leave {' and '.join(shingled)} out, for text alone."
            + (" duplicates.threshold says how alike pictures are." if config.reads_pictures else "")
        )
    if named := [key for key in ("duplicates", "correction") if getattr(config, key).embedder is not None]:
        yield (
            f"{named[0]}.embedder embeds texts, and data.format={name} reads {many}. Leave it out: features of the "
            "frozen backbone are compared."
        )
    if classes.kind == "pair":
        yield f"classes.kind=pair compares two texts, and data.format={name} reads one {one} a row. Write kind: one."
    if media.changes and config.freeze.cache in ("memory", "disk"):
        yield (
            f"freeze.cache={config.freeze.cache} keeps what frozen blocks give, and {name}.augment shows other {many} "
            f"in each epoch, so that no row comes twice. Write freeze.cache=off, or leave {name}.augment out."
        )
    yield from _of_sound(config) if config.reads_sound else _of_pictures(config)


_WORDS = {"image": ("picture", "pictures"), "audio": ("recording", "recordings")}
"""What rows are with a `data.format` of files: one, and many."""


def _of_pictures(config: RunSections) -> Iterator[str]:
    augment, classes = config.image.augment, config.classes
    if augment.mixes and classes.kind not in ("one", "several"):
        yield f"image.augment mixes two labels, which are of kind {classes.kind}. Leave mixup and cutmix out."
    if augment.grows and config.train.epochs is None and config.train.steps is None and not config.budget.unlimited:
        yield (
            "image.augment.curriculum grows over a known number of steps, and budget alone ends the run. "
            "Write train.epochs or train.steps too."
        )


def _of_sound(config: RunSections) -> Iterator[str]:
    for key in ("language", "task", "timestamps"):
        if config.audio.differs(key):
            yield f"audio.{key} says how transcripts are written, and classes have none. Leave it out."
    if config.duplicates.differs("threshold"):
        yield (
            "duplicates.threshold says how alike texts and pictures are; of recordings only equal ones count as "
            "duplicates. Leave it out."
        )
    if config.token_drop.is_on:
        yield "token_drop skips tokens of texts and patches of pictures, and data.format=audio has none. Leave it out."
    if config.distill.match:
        yield "distill.match compares layers of texts and pictures, not yet of sound. Leave it out."


def _readable(config: Any, limit: int | None) -> None:
    from workbench.data.labelled import text_reader

    text_reader.require_readable(config, limit)


FACTS = register(
    TaskFacts(
        name="classify",
        line="labelled text, pictures or sound: one class, several, a number, the better of two responses",
        module="workbench.recipes.tasks.classify.task",
        readable=_readable,
        head="classes",
        media=("image", "audio"),
        labelled=True,
        judged=lambda config: config.classes.kind,
        records_losses=True,
        packs=True,
        chooses=frozenset({"gradient"}),
        difficulties={"loss": "asks a linear probe about the classes of rows"},
        devices=True,
        pipeline=None,
        folds=True,
        views=get_args(ViewName),
        grows=True,
        banked=True,
        fleets=True,
        students="workbench.recipes.over.distill_classes",
        sections=("classes", "image", "audio", "tta"),
        check=_check,
        serves=True,
        report="classes",
        predicts=("answers.csv", "answer every row of a file"),
        answer="predicted",
        score="accuracy",
        higher_is_better=True,
    )
)
