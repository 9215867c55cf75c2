"""Views of a labelled row: other ways to write it, and how to read what is said of it in terms of the plain row.

Legend: N rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.classes_config import PAIR_FIELDS, ClassesConfig
from workbench.config.tta_config import NOISY, WINDOWS, TtaConfig, ViewName
from workbench.data.labelled.labelled_data import Labelled
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.records import LabelledRecord
from workbench.data.labelled.text_fields import FieldTokenizer, FieldTokens
from workbench.data.views import rewriting
from workbench.data.views.user_views import Fields, UserViews, require_used
from workbench.errors import ConfigError, DataError

Change: TypeAlias = Callable[[LabelledRecord], Fields]

LEAST_SHARE = 0.01
"""Of the rows that a view must change to be read at all."""
_PLAIN: Mapping[ViewName, Callable[[str], str]] = {
    "lower": str.lower,
    "upper": str.upper,
    "no_punctuation": rewriting.without_punctuation,
}
_NOISE = {"typos": rewriting.with_typos, "drop_words": rewriting.with_words_dropped}


@dataclass(frozen=True)
class View:
    """One other way to write a row; an image's would show it turned or cropped, and be merged alike."""

    name: str
    classes: ClassesConfig
    """How its columns are put together and cut."""
    change: Change
    """The columns of a row as it writes them, in the order of its template."""
    order_C: tuple[int, ...] | None = None
    """Which of its outputs stands for each output of the plain row; None: its own."""

    def rows(
        self, records: Sequence[LabelledRecord], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int
    ) -> list[FieldTokens]:
        """Tokens of the rows in this view; of the plain row where the view would leave a column that is needed empty.

        Raises:
            DataError: The view's template leaves no tokens to a row; names both.
        """
        writer = FieldTokenizer(tokenizer, self.classes, max_tokens=max_tokens)
        try:
            return writer.write([self.texts(record) for record in records], [record.place for record in records])
        except DataError as error:
            raise DataError(f"tta, view {self.name}: {error}") from None

    def texts(self, record: LabelledRecord) -> Fields:
        """The columns of a row in this view, in the order of its template."""
        seen = self.change(record)
        needed = PAIR_FIELDS if self.classes.kind == "pair" else ()
        columns = zip(self.classes.fields, seen, strict=True)
        empty = not any(text.strip() for text in seen) or any(
            name in needed and not text.strip() for name, text in columns
        )
        return record.fields if empty else seen

    def outputs(self, outputs_NC: Floats) -> Floats:
        """A model's outputs for rows in this view, as outputs, or values, of the plain rows."""
        return outputs_NC if self.order_C is None else outputs_NC[:, list(self.order_C)]


def make(
    config: TtaConfig, classes: ClassesConfig, labels: Labels, *, seed: int, example: LabelledRecord
) -> list[View]:
    """The views that `config` names, without the plain row.

    Args:
        seed: Of the noise.
        example: Any row; a user's function makes as many views of every row as of this one.

    Raises:
        ConfigError: A view does not go with the rows or their labels, or the user's file is wrong.
    """
    if reason := config.refusal(classes):
        raise ConfigError(reason)
    require_used(config)
    return [view for name in config.views for view in _named(name, config, classes, labels, seed, example)]


def apply(view: View, rows: Labelled, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> Labelled:
    """The same rows with the tokens of a view."""
    return replace(rows, written=tuple(view.rows(rows.records, tokenizer, max_tokens=config.data.max_tokens)))


def useful(
    views: Sequence[View], rows: Labelled, tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> tuple[list[View], list[str]]:
    """The views that change what the model reads of at least `LEAST_SHARE` of the rows; a sentence on each other one.

    Raises:
        DataError: None does, so that views would cost time and say what the plain rows say.
    """
    found = {}
    for view in views:
        pairs = zip(rows.written, apply(view, rows, tokenizer, config).written, strict=True)
        found[view.name] = sum(not np.array_equal(plain.input_ids, seen.input_ids) for plain, seen in pairs)
    useless = {name: count for name, count in found.items() if count < max(1, LEAST_SHARE * len(rows))}
    reasons = [
        f"view {view.name} changes {count or 'none'} of the {len(rows)} rows: {_why(view, rows, count)}"
        for view in views
        if (count := useless.get(view.name)) is not None
    ]
    if views and len(useless) == len(views):
        raise DataError(
            f"{rows.source}: {'; '.join(reasons)}. A view pays where it changes {LEAST_SHARE:.0%} "
            f"of the rows or more: leave {', '.join(useless)} out of tta.views."
        )
    return [view for view in views if view.name not in useless], [f"tta: {reason}. Left out." for reason in reasons]


def _why(view: View, rows: Labelled, changed: int) -> str:
    which = "no other row" if changed else "no row"
    if view.name in WINDOWS:
        return f"{which} is longer than data.max_tokens"
    if sum(view.texts(record) != record.fields for record in rows.records) >= LEAST_SHARE * len(rows):
        return "the tokenizer writes what it changes with the same tokens, as an uncased one does with letters"
    return f"{which} has anything that it would change"


def _named(
    name: ViewName, config: TtaConfig, classes: ClassesConfig, labels: Labels, seed: int, example: LabelledRecord
) -> list[View]:
    """The views of one name."""
    if name in _PLAIN:
        return [View(name, classes, partial(_rewritten, _PLAIN[name]))]
    if name in NOISY:
        copies = range(1, config.copies + 1)
        return [
            View(f"{name} {copy}", classes, partial(_noisy, name, share=config.noise, seed=seed, copy=copy))
            for copy in copies
        ]
    if name in WINDOWS:
        return [View(name, classes.model_copy(update={"keep": WINDOWS[name]}), _same)]
    if name == "swap":
        return [_swap(classes, labels)]
    if name == "templates":
        return [_template(number, text, classes) for number, text in enumerate(config.templates, start=1)]
    assert config.function is not None
    made = UserViews(config.function, columns=classes.fields, example=example.fields, place=example.place)
    return [View(f"user {number + 1}", classes, partial(_own, made, number)) for number in range(made.count)]


def _same(record: LabelledRecord) -> Fields:
    return record.fields


def _rewritten(rewrite: Callable[[str], str], record: LabelledRecord) -> Fields:
    return tuple(map(rewrite, record.fields))


def _noisy(name: ViewName, record: LabelledRecord, *, share: float, seed: int, copy: int) -> Fields:
    chance = rewriting.chance_of(seed, name, copy, record.fields)
    return tuple(_NOISE[name](text, chance, share=share) for text in record.fields)


def _own(made: UserViews, number: int, record: LabelledRecord) -> Fields:
    return made.of(record.fields, record.place)[number]


def _ordered(place: Sequence[int], record: LabelledRecord) -> Fields:
    return tuple(record.fields[number] for number in place)


def _swap(classes: ClassesConfig, labels: Labels) -> View:
    """The responses exchanged; what is then said of b is meant for a."""
    other = {"a": "b", "b": "a", "response_a": "response_b", "response_b": "response_a"}
    for name in labels.names:
        if other.get(name, name) not in labels.names:
            lacking = other[name]
            raise ConfigError(
                f"tta.views: swap turns a into b and b into a, and no training row has `{lacking}`, so that nothing "
                f"can be said of it. Give rows where {lacking} wins, or leave swap out."
            )
    place = [classes.fields.index(other.get(name, name)) for name in classes.fields]
    order_C = tuple(labels.names.index(other.get(name, name)) for name in labels.names)
    return View("swap", classes, partial(_ordered, place), order_C)


def _template(number: int, text: str, classes: ClassesConfig) -> View:
    """Another template; a column keeps its share of the tokens."""
    shares = dict(zip(classes.fields, classes.parts, strict=True))
    seen = ClassesConfig.model_validate({**classes.model_dump(), "text": text, "shares": shares})
    return View(f"template {number}", seen, partial(_ordered, [classes.fields.index(name) for name in seen.fields]))
