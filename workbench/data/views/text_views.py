"""Views of labelled rows for test-time augmentation: rewritten rows, and outputs mapped back to the original rows.

Legend: N rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TypeAlias

from workbench.config.sections.classes_config import PAIR_FIELDS, ClassesConfig
from workbench.config.sections.tta_config import MIN_CHANGED_SHARE, NOISY, WINDOWS, TtaConfig, ViewName
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import RowReader
from workbench.data.labelled.text_reader import FieldTokenizer, TextReader, TokenRows
from workbench.data.text import rewriting
from workbench.data.views.user_views import Fields, UserViews, require_used
from workbench.errors import ConfigError, DataError

Change: TypeAlias = Callable[[LabelledRecord], Fields]

_REWRITES: Mapping[ViewName, Callable[[str], str]] = {
    "lower": str.lower,
    "upper": str.upper,
    "no_punctuation": rewriting.without_punctuation,
}
_NOISE = {"typos": rewriting.with_typos, "drop_words": rewriting.with_words_dropped}


@dataclass(frozen=True)
class TextView:
    """A way to rewrite rows."""

    name: str
    classes: ClassesConfig
    """Its template, and how long rows are truncated."""
    change: Change
    """Rewrites a row; returns its columns in the order of the template."""
    order_C: tuple[int, ...] | None = None
    """The output of the view that corresponds to each output of the original row; None where they are the same."""

    def rows(self, rows: LabelledSet, reader: RowReader) -> LabelledSet:
        """The same rows, tokenised in this view.

        Raises:
            DataError: The view's template leaves no tokens to the columns of a row.
        """
        assert isinstance(reader, TextReader)
        encoder = FieldTokenizer(reader.tokenizer, self.classes, max_tokens=reader.data.max_tokens)
        try:
            tokens = encoder.encode(
                (self.texts(record) for record in rows.records), (each.place for each in rows.records)
            )
        except DataError as error:
            raise DataError(f"tta, view {self.name}: {error}") from None
        return replace(rows, inputs=TokenRows(tokens))

    def why_useless(self, rows: LabelledSet, changed: int) -> str:
        """Why this view changes so few rows."""
        which = "no other row" if changed else "no row"
        if self.name in WINDOWS:
            return f"{which} is longer than data.max_tokens"
        if sum(self.texts(record) != record.fields for record in rows.records) >= MIN_CHANGED_SHARE * len(rows):
            return "the tokenizer gives changed texts the same tokens, as an uncased one does with letters"
        return f"{which} has anything that it would change"

    def texts(self, record: LabelledRecord) -> Fields:
        """The columns of a row in this view; unchanged where the view would leave a required column empty."""
        changed = self.change(record)
        required = PAIR_FIELDS if self.classes.kind == "pair" else ()
        columns = zip(self.classes.fields, changed, strict=True)
        empty = not any(text.strip() for text in changed) or any(
            name in required and not text.strip() for name, text in columns
        )
        return record.fields if empty else changed

    def outputs(self, outputs_NC: Floats) -> Floats:
        """Map outputs (or values) for rows in this view to outputs for the original rows."""
        return outputs_NC if self.order_C is None else outputs_NC[:, list(self.order_C)]


def make(
    config: TtaConfig, classes: ClassesConfig, labels: Labels, *, seed: int, example: LabelledRecord
) -> list[TextView]:
    """Make the views that `config` names.

    Args:
        seed: Seed of the noise.
        example: Any row; a user's function must return as many views of every row as of this one.

    Raises:
        ConfigError: A view does not fit the rows or their labels, or the user's file is wrong.
    """
    if reason := config.refusal(classes):
        raise ConfigError(reason)
    require_used(config)
    return [view for name in config.views for view in _make(name, config, classes, labels, seed, example)]


def _make(
    name: ViewName, config: TtaConfig, classes: ClassesConfig, labels: Labels, seed: int, example: LabelledRecord
) -> list[TextView]:
    """The views of one name."""
    if name in _REWRITES:
        return [TextView(name, classes, lambda record: tuple(map(_REWRITES[name], record.fields)))]
    if name in NOISY:
        copies = range(1, config.copies + 1)
        return [
            TextView(f"{name} {copy}", classes, partial(_add_noise, name, share=config.noise, seed=seed, copy=copy))
            for copy in copies
        ]
    if name in WINDOWS:
        return [TextView(name, classes.model_copy(update={"keep": WINDOWS[name]}), attrgetter("fields"))]
    if name == "swap":
        return [_swap(classes, labels)]
    if name == "templates":
        return [_template(number, text, classes) for number, text in enumerate(config.templates, start=1)]
    assert config.function is not None
    views = UserViews(config.function, columns=classes.fields, example=example.fields, place=example.place)
    return [
        TextView(f"user {number + 1}", classes, partial(_user_view, views, number)) for number in range(views.count)
    ]


def _add_noise(name: ViewName, record: LabelledRecord, *, share: float, seed: int, copy: int) -> Fields:
    rng = rewriting.noise_rng(seed, name, copy, record.fields)
    return tuple(_NOISE[name](text, rng, share=share) for text in record.fields)


def _user_view(views: UserViews, number: int, record: LabelledRecord) -> Fields:
    return views.views(record.fields, record.place)[number]


def _reorder(order: Sequence[int], record: LabelledRecord) -> Fields:
    return tuple(record.fields[number] for number in order)


def _swap(classes: ClassesConfig, labels: Labels) -> TextView:
    """Exchanges the two responses, and the outputs for a and b."""
    other = {"a": "b", "b": "a", "response_a": "response_b", "response_b": "response_a"}
    for name in labels.names:
        if other.get(name, name) not in labels.names:
            missing = other[name]
            raise ConfigError(
                f"tta.views: swap turns a into b and b into a, but no training row has the label `{missing}`. "
                f"Give rows where {missing} wins, or leave swap out."
            )
    order = [classes.fields.index(other.get(name, name)) for name in classes.fields]
    order_C = tuple(labels.names.index(other.get(name, name)) for name in labels.names)
    return TextView("swap", classes, partial(_reorder, order), order_C)


def _template(number: int, text: str, classes: ClassesConfig) -> TextView:
    """Another template; each column keeps its share of the tokens."""
    shares = dict(zip(classes.fields, classes.parts, strict=True))
    other = ClassesConfig.model_validate({**classes.model_dump(), "text": text, "shares": shares})
    return TextView(
        f"template {number}", other, partial(_reorder, [classes.fields.index(name) for name in other.fields])
    )
