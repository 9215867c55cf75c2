"""Rows that sentence embeddings learn from: texts that belong together, scored pairs, or texts with a class."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.config import DataConfig
from workbench.config.sections.embed_config import COLUMNS, NEGATIVE, NEGATIVES, Form
from workbench.data import named_sets
from workbench.data.batching import Indices
from workbench.data.folds.duplicates import normalised
from workbench.data.rows import RawRow, convert_rows, excerpt, fingerprint, finite
from workbench.data.text.formats import renamed
from workbench.data.unread_columns import columns_in_file
from workbench.errors import DataError
from workbench.schema import did_you_mean

PASSAGES = ("passage", "positive", "sentence2")  # columns of texts that are found; any other text finds
QUERIES = ("text", "query", "anchor", "sentence1")
LISTED = "passages"  # column of several passages that are scored for one query


class PairRecord(NamedTuple):
    """One row."""

    place: str
    texts: tuple[str, ...]
    """Anchor, positive and negatives; the two sentences of a scored pair; the one text of a class."""
    label: str = ""
    score: float = 0.0

    @property
    def key(self) -> str:
        """Equal for rows with the same texts, but for case and punctuation, whatever their negatives."""
        return "\n".join(map(normalised, self.texts[:2]))

    @property
    def content(self) -> tuple[str, ...]:
        """What was read, as it stands."""
        return self.texts[:2]


@dataclass(frozen=True)
class PairSource:
    """The usable rows of a file."""

    name: str
    fingerprint: str
    form: Form
    records: tuple[PairRecord, ...]
    skipped: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Names of the sets that rows are from; empty where there is one."""
    source_N: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Number of the set of each row, where there are several."""

    def subset(self, keep: npt.NDArray[np.bool_], note: str | None = None) -> PairSource:
        """The rows that `keep` marks; `note` is added to `skipped`."""
        kept = tuple(itertools.compress(self.records, keep.tolist()))
        source_N = self.source_N[keep] if self.sources else self.source_N
        return replace(self, records=kept, source_N=source_N, skipped=(note, *self.skipped) if note else self.skipped)


def joined(sets: Mapping[str, PairSource]) -> PairSource:
    """The rows of several sets, which they know by name; of one that has none (``) as they are."""
    parts = list(sets.values())
    if sets.keys() == {""}:
        return parts[0]
    prefixes = named_sets.prefixes({name: each.name for name, each in sets.items()})
    return replace(
        parts[0],
        name=" + ".join(each.name for each in parts),
        fingerprint=hashlib.sha256("".join(each.fingerprint for each in parts).encode()).hexdigest(),
        records=tuple(
            record._replace(place=prefixes[name] + record.place)
            for name, each in sets.items()
            for record in each.records
        ),
        skipped=tuple(reason for each in parts for reason in each.skipped),
        sources=tuple(sets),
        source_N=np.repeat(np.arange(len(parts)), [len(each.records) for each in parts]),
    )


def read(source: str, config: DataConfig, *, limit: int | None = None, form: Form | None = None) -> PairSource:
    """Read the rows of a file, a folder or a hub data set. Raises DataError: as `convert_rows`; or no form fits the
    columns. `limit`: rows to read; None for all. `form`: the form that they must have; None: the one that their columns
    tell."""
    forms: list[Form] = []

    def converter(first: RawRow) -> Callable[[RawRow], PairRecord]:
        own = _form(source, first, config.columns)
        if form not in (None, own):
            raise DataError(
                f"{source}: has columns of {own} rows, and the training rows are {form} ones. Give it the columns "
                f"{', '.join(COLUMNS[form or own])}, or write data.columns with their names."
            )
        forms.append(own)
        return lambda row: _record(row, own, renamed(row.columns, config.columns))

    skipped: list[str] = []

    def reads(_: RawRow) -> set[str]:
        return columns_in_file(config, (*COLUMNS[forms[0]], *((NEGATIVE, NEGATIVES) if forms[0] == "pairs" else ())))

    records = tuple(convert_rows(source, converter, config, skipped=skipped, limit=limit, reads=reads))
    return PairSource(source, fingerprint(source, config), forms[0], records, tuple(skipped))


def _form(source: str, row: RawRow, renames: Mapping[str, str]) -> Form:
    wanted = {name for names in COLUMNS.values() for name in names} | {NEGATIVE, NEGATIVES}
    for name, in_file in renames.items():
        if name not in wanted:
            raise DataError(
                f"data.columns: `{name}` is no column that recipe embed reads.{did_you_mean(name, sorted(wanted))}"
            )
        if in_file not in row.columns:
            raise DataError(
                f"data.columns: {source} has no column `{in_file}`.{did_you_mean(in_file, list(row.columns))}"
            )
    columns = renamed(row.columns, renames)
    fits = [form for form, names in COLUMNS.items() if set(names) <= columns.keys()]
    if len(fits) == 1:
        return fits[0]
    there = ", ".join(f"`{name[:60]}`" for name in row.columns) or "none"
    known = "; ".join(f"{', '.join(names)} ({form})" for form, names in COLUMNS.items())
    if fits:
        raise DataError(
            f"{source}: its columns {there} fit {' and '.join(fits)} rows. Leave out those that are not meant."
        )
    alone = " Texts alone are learnt from a teacher: of=embed of recipe distill reads them as distill.unlabelled."
    raise DataError(
        f"{source}: its columns are {there}. Recipe embed reads {known}. Write data.columns='{{anchor: NAME, positive: "
        f"NAME}}' with their names.{alone if 'text' in columns else ''}"
    )


def _record(row: RawRow, form: Form, values: Mapping[str, Any]) -> PairRecord:
    if form == "labelled":
        value = values.get("label")
        if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
            raise DataError(f"`label` must be the name or number of one class, found {excerpt(value)}.")
        return PairRecord(row.place, (_text(values, "text"),), label=str(value))
    if form == "scored":
        sentences = (_text(values, "sentence1"), _text(values, "sentence2"))
        value = values.get("score")
        if (score := finite(value)) is None:
            raise DataError(f"`score` must be a number, found {excerpt(value)}.")
        return PairRecord(row.place, sentences, score=score)
    anchor, positive = _text(values, "anchor"), _text(values, "positive")
    if normalised(anchor) == normalised(positive):
        raise DataError("`anchor` and `positive` are the same text, which teaches nothing. Leave the row out.")
    negatives = [] if values.get(NEGATIVE) is None else [_text(values, NEGATIVE)]
    if (more := values.get(NEGATIVES)) is not None:
        if not isinstance(more, list):
            raise DataError(f"`{NEGATIVES}` must be a list of texts, found {excerpt(more)}. Write [{excerpt(more)}].")
        negatives += [_text({NEGATIVES: each}, NEGATIVES) for each in more]
    if normalised(positive) in map(normalised, negatives):
        raise DataError("its positive is among its negatives. Leave it out of them.")
    return PairRecord(row.place, (anchor, positive, *negatives))


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise DataError(f"`{name}` must be text, found {excerpt(value)}.")
    if not value.strip():
        raise DataError(f"`{name}` is empty.")
    return value


class AskedPassages(NamedTuple):
    """A query, and passages that are to be scored for it."""

    place: str
    query: str
    passages: tuple[str, ...]


def read_asked(source: str, config: DataConfig, skipped: list[str]) -> list[AskedPassages]:
    """Queries of a file with their passages: a text in one of PASSAGES, or a list in `passages`. Raises DataError: as
    `convert_rows`; or no column is one of QUERIES, or none is of passages. `skipped`: place and reason of every skipped
    row are appended."""

    def converter(first: RawRow) -> Callable[[RawRow], AskedPassages]:
        columns = renamed(first.columns, config.columns)
        queries = [name for name in QUERIES if name in columns]
        passages = [name for name in (LISTED, *PASSAGES) if name in columns]
        if not queries or not passages:
            missing = ", ".join(QUERIES) if not queries else ", ".join((LISTED, *PASSAGES))
            there = ", ".join(f"`{name[:60]}`" for name in first.columns) or "none"
            raise DataError(
                f"{source}: has none of the columns {missing} among {there}. "
                "Write data.columns='{query: NAME, passage: NAME}' with their names."
            )

        def asked(row: RawRow) -> AskedPassages:
            values = renamed(row.columns, config.columns)
            if passages[0] != LISTED:
                return AskedPassages(row.place, _text(values, queries[0]), (_text(values, passages[0]),))
            listed = values.get(LISTED)
            if not isinstance(listed, list) or not listed:
                raise DataError(f"`{LISTED}` must be a list of texts, found {excerpt(listed)}.")
            texts = tuple(_text({LISTED: each}, LISTED) for each in listed)
            return AskedPassages(row.place, _text(values, queries[0]), texts)

        return asked

    return list(convert_rows(source, converter, config, skipped=skipped))


class GivenText(NamedTuple):
    """A text that is to be embedded."""

    place: str
    text: str


def read_texts(source: str, config: DataConfig, skipped: list[str]) -> tuple[list[GivenText], bool]:
    """Texts of a file that are to be embedded, and whether their column says that they are passages. Raises DataError:
    as `convert_rows`; or no column is one of QUERIES or PASSAGES. `skipped`: place and reason of every skipped row are
    appended."""
    chosen: list[str] = []

    def converter(first: RawRow) -> Callable[[RawRow], GivenText]:
        columns = renamed(first.columns, config.columns)
        names = [name for name in (*QUERIES, *PASSAGES) if name in columns]
        if not names:
            there = ", ".join(f"`{name[:60]}`" for name in first.columns) or "none"
            raise DataError(
                f"{source}: has none of the columns {', '.join((*QUERIES, *PASSAGES))} among {there}. "
                "Write data.columns='{text: NAME}' with its name."
            )
        chosen.append(names[0])
        return lambda row: GivenText(row.place, _text(renamed(row.columns, config.columns), names[0]))

    texts = list(convert_rows(source, converter, config, skipped=skipped))
    return texts, chosen[0] in PASSAGES
