"""Labelled rows of text: several columns as one truncated text, its tokens, and texts that training augments.

A text is rewritten in the same way wherever its row stands, in any micro-batch, on any device and after any restart.

Shapes: F columns of a template, T tokens of a row, B rows of a micro-batch, L padded length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from workbench.config import DataConfig, RunConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.folds_config import DuplicatesConfig
from workbench.config.sections.text_augment_config import NOISY, OperatorName, TextAugmentConfig
from workbench.data import row_order
from workbench.data.batching import Indices, encoder_inputs, evenly_spaced
from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.labelled import labelled_data, labels, records
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.record_table import EncodedTexts, FieldTokens, LabelledRecord, RecordTable
from workbench.data.labelled.records import ModelInputs, NamedColumns, RecordSource, RowInputs, RowReader
from workbench.data.rows import excerpt
from workbench.data.text import rewriting
from workbench.errors import BackboneError, DataError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

TOKENISED_AT_ONCE = 1000
"""Rows that are tokenised together: what the tokenizer says of them takes 5 kB a row until they are copied."""


class FieldTokenizer:
    """Tokenises rows of several columns; a row that fits gets the tokens that the tokenizer gives to its whole text.
    Raises BackboneError: the tokenizer is not a fast one.

    Args:
        tokenizer: A fast tokenizer, since truncation needs the offsets of tokens in the text.
        max_tokens: Most tokens of a row, special tokens included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ClassesConfig, *, max_tokens: int) -> None:
        if not tokenizer.is_fast:
            raise BackboneError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, which truncating long rows needs. "
                "Use a backbone with a tokenizer.json."
            )
        self._tokenizer, self._config, self._max_tokens = tokenizer, config, max_tokens

    def text(self, fields: Sequence[str]) -> str:
        """The whole text of a row."""
        return "".join(text for text, _ in self._segments(fields))

    def encode(self, rows: Iterable[Sequence[str]], places: Iterable[str]) -> EncodedTexts:
        """Tokenise rows of columns; `places` name them in messages. Raises DataError: the text of the template alone
        fills max_tokens."""
        return EncodedTexts.of(self._encoded(zip(rows, places, strict=True)))

    def _encoded(self, rows: Iterator[tuple[Sequence[str], str]]) -> Iterator[FieldTokens]:
        while chunk := list(itertools.islice(rows, TOKENISED_AT_ONCE)):
            texts = [self.text(fields) for fields, _ in chunk]
            whole = self._tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)[
                "input_ids"
            ]
            for ids, (fields, place) in zip(whole, chunk, strict=True):
                if len(ids) <= self._max_tokens:
                    yield FieldTokens(np.asarray(ids, dtype=np.int64), False)
                else:
                    yield FieldTokens(self._truncated(fields, place), True)

    def _truncated(self, fields: Sequence[str], place: str) -> Indices:
        encoding = self._tokenizer(self.text(fields), return_offsets_mapping=True, verbose=False)
        ids_T = np.asarray(encoding["input_ids"], dtype=np.int64)
        segments = self._segments(fields)
        field_of_character = np.repeat([column for _, column in segments], [len(text) for text, _ in segments])
        fields_T = [field_of_character[end - 1] if end > start else -1 for start, end in encoding["offset_mapping"]]
        field_T = np.asarray(fields_T, dtype=np.int64)
        kept_T = field_T < 0  # the template and special tokens
        overhead = int(kept_T.sum())
        lengths = [int((field_T == column).sum()) for column in range(len(fields))]
        budget = self._max_tokens - overhead
        if budget < sum(map(bool, lengths)):
            raise DataError(
                f"{place}: data.max_tokens={self._max_tokens} leaves no token to some of its columns: the template and "
                f"special tokens take {overhead}. Raise it, or shorten classes.text."
            )
        for column, count in enumerate(allocate(lengths, self._config.parts, budget)):
            tokens, keep = np.flatnonzero(field_T == column), self._config.keep
            head = {"start": count, "end": 0, "ends": -(-count // 2), "middle": 0}[keep]
            start = (len(tokens) - count) // 2 if keep == "middle" else len(tokens) - (count - head)
            kept_T[tokens[:head]] = kept_T[tokens[start : start + count - head]] = True
        return ids_T[kept_T]

    def _segments(self, fields: Sequence[str]) -> list[tuple[str, int]]:
        """The text in pieces, each with the number of its column, or -1 for the template's own words."""
        segments, number = [], 0
        for literal, column in self._config.pieces:
            segments.append((literal, -1))
            if column is not None:
                segments.append((fields[number], number))
                number += 1
        return segments


def allocate(lengths: Sequence[int], shares: Sequence[float], budget: int) -> list[int]:
    """Tokens that each column keeps: all where all fit, else `budget` in total.

    Each of the n columns that are not empty keeps at least one token and its share of budget - n, or all that it has;
    what short columns leave is divided among the others by their shares.

    Args:
        lengths: Tokens of each column (F,).
        shares: Above 0, sum 1 (F,).
        budget: Tokens for all columns; at least one for each that is not empty.
    """
    kept = [min(length, 1) for length in lengths]
    budget -= sum(kept)
    unfilled = {column for column, length in enumerate(lengths) if length > 1}
    while unfilled:
        total = sum(shares[column] for column in unfilled)
        quota = {column: budget * shares[column] / total for column in unfilled}
        short = {column for column in unfilled if lengths[column] - 1 <= quota[column]}
        if not short:
            for column, share in quota.items():
                kept[column] += int(share)
            left = budget - sum(int(share) for share in quota.values())
            for column in sorted(quota, key=lambda column: (int(quota[column]) - quota[column], column))[:left]:
                kept[column] += 1
            return kept
        for column in short:
            kept[column] = lengths[column]
            budget -= lengths[column] - 1
        unfilled -= short
    return kept


Fields: TypeAlias = tuple[str, ...]
KEPT = 2  # passes whose tokens are kept: the present one, and the next where a step is looked ahead to

_PLAIN: Mapping[OperatorName, Callable[[str], str]] = {
    "lower": str.lower,
    "upper": str.upper,
    "no_punctuation": rewriting.without_punctuation,
}
_NOISE: Mapping[OperatorName, Callable[..., str]] = {
    "drop_words": rewriting.with_words_dropped,
    "swap_words": rewriting.with_words_swapped,
    "insert_words": rewriting.with_words_inserted,
    "punctuation": rewriting.with_punctuation,
    "typos": rewriting.with_typos,
}


def rewritten(texts: Fields, config: TextAugmentConfig, *, seed: int, epoch: int) -> Fields:
    """The columns of a row as pass `epoch` reads them; as they are where chance leaves them, or nothing would be left.

    One operator rewrites all columns, which are drawn from on their own.
    """
    rng = rewriting.noise_rng(seed, "augment", epoch, texts)
    if rng.random() >= config.probability:
        return texts
    name = config.operators[rng.integers(len(config.operators))]
    change = partial(_NOISE[name], rng=rng, share=config.noise) if name in NOISY else _PLAIN[name]
    augmented = tuple(map(change, texts))
    emptied = any(before.strip() and not after.strip() for before, after in zip(texts, augmented, strict=True))
    return texts if emptied else augmented


@dataclass(frozen=True, eq=False)
class AugmentedTexts:
    """Texts of rows, and their tokens in each pass."""

    texts: tuple[Fields, ...]  # the columns of each row
    places: tuple[str, ...]
    config: TextAugmentConfig
    seed: int
    encoder: FieldTokenizer
    _known: dict[int, EncodedTexts] = field(default_factory=dict)  # tokens of the last passes

    def tokens(self, epoch: int) -> EncodedTexts:
        """Tokens of each row in a pass."""
        if epoch not in self._known:
            while len(self._known) >= KEPT:
                del self._known[min(self._known)]
            self._known[epoch] = self.encoder.encode(self.rewritten(epoch), self.places)
        return self._known[epoch]

    def rewritten(self, epoch: int) -> list[Fields]:
        """The columns of each row in a pass."""
        return [rewritten(texts, self.config, seed=self.seed, epoch=epoch) for texts in self.texts]

    def take(self, indices: Indices) -> AugmentedTexts:
        return self._with([self.texts[each] for each in indices], [self.places[each] for each in indices])

    def concatenated(self, other: AugmentedTexts) -> AugmentedTexts:
        return self._with([*self.texts, *other.texts], [*self.places, *other.places])

    def alone(self, operator: OperatorName) -> AugmentedTexts:
        """The same rows, with each pass rewriting all of them by `operator`."""
        return replace(
            self, config=self.config.model_copy(update={"operators": (operator,), "probability": 1.0}), _known={}
        )

    def changed(self, epoch: int) -> Indices:
        """Numbers of the rows that a pass rewrites."""
        pairs = zip(self.texts, self.rewritten(epoch), strict=True)
        return np.flatnonzero([before != after for before, after in pairs])

    def _with(self, texts: Sequence[Fields], places: Sequence[str]) -> AugmentedTexts:
        return replace(self, texts=tuple(texts), places=tuple(places), _known={})


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Tokenised rows; see `RowInputs`."""

    encoded: EncodedTexts
    augmented: AugmentedTexts | None = None  # the same rows as training rewrites them; None: it reads them as they are

    @property
    def lengths(self) -> Indices:
        return self.encoded.length_N

    @property
    def truncated(self) -> int:
        """Number of rows that were truncated to data.max_tokens."""
        return int(self.encoded.truncated_N.sum())

    @property
    def redrawn(self) -> bool:
        """No: a pass reads a text in one way."""
        return False

    def batch(self, indices: Indices, *, epoch: int | None, repeats: Indices | None = None) -> ModelInputs:
        """The rows `indices`, padded; the same in each epoch."""
        import torch

        ids = [self.encoded[index].input_ids for index in indices]
        inputs = encoder_inputs(ids)
        length = inputs["input_ids"].shape[1]
        last_B = [row * length + len(each) - 1 for row, each in enumerate(ids)]
        return ModelInputs(inputs, torch.tensor(last_B), sum(map(len, ids)))

    def rewritten(self, *, epoch: int, progress: float) -> TokenRows:
        """The rows as pass `epoch` has rewritten them."""
        return self if self.augmented is None else TokenRows(self.augmented.tokens(epoch))

    def take(self, indices: Indices) -> TokenRows:
        return TokenRows(self.encoded.take(indices), None if self.augmented is None else self.augmented.take(indices))

    def concatenated(self, other: TokenRows) -> TokenRows:
        """These rows, followed by those of `other`; either both or neither are rewritten."""
        assert (self.augmented is None) == (other.augmented is None)
        both = self.augmented and other.augmented and self.augmented.concatenated(other.augmented)
        return TokenRows(self.encoded.concatenated(other.encoded), both)

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        return (each.input_ids for each in self.encoded)

    def differ(self, other: TokenRows) -> npt.NDArray[np.bool_]:
        pairs = zip(self.encoded, other.encoded, strict=True)
        return np.asarray([not np.array_equal(one.input_ids, two.input_ids) for one, two in pairs], dtype=bool)


@dataclass(frozen=True)
class TextReader:
    """Reads columns of text as `classes` puts them together; see `RowReader`."""

    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    classes: ClassesConfig
    near: DuplicatesConfig  # when two texts are near-duplicates
    title: str = "text"
    file: str = "tokenizer.json"

    @property
    def columns(self) -> tuple[str, ...]:
        return self.classes.fields

    @property
    def encoder(self) -> FieldTokenizer:
        """Tokenises rows of columns."""
        return FieldTokenizer(self.tokenizer, self.classes, max_tokens=self.data.max_tokens)

    def read(
        self,
        source: str,
        *,
        limit: int | None = None,
        labelled: bool = True,
        weighted: bool = False,
        columns: Mapping[str, str] | None = None,
    ) -> RecordSource:
        """Read the rows of a file, a folder or a hub data set; raises what `records.read` does."""
        data = self.data.with_columns(columns)
        return records.read(source, data, self.classes, limit=limit, labelled=labelled, weighted=weighted)

    def reread(self, source: str, fingerprint: str, rows: Sequence[NamedColumns]) -> RecordSource:
        read = (
            LabelledRecord(row, tuple(_text(columns.get(name), row.place, name) for name in self.columns))
            for row, columns in rows
        )
        return RecordSource(source, fingerprint, RecordTable.of(read))

    def inputs(self, source: RecordSource) -> TokenRows:
        fields, places = (record.fields for record in source.records), (record.place for record in source.records)
        return TokenRows(self.encoder.encode(fields, places))

    def describe(self, record: LabelledRecord) -> str:
        return self.encoder.text(record.fields)

    def rendered(self, inputs: RowInputs, index: int) -> str:
        """The tokens of a row as text, special ones too."""
        assert isinstance(inputs, TokenRows)
        return str(self.tokenizer.decode(inputs.encoded[index].input_ids))

    def duplicates(self, sources: Sequence[RecordSource], part_N: Indices | None = None) -> DuplicateClusters:
        texts = [key for source in sources for key in source.keys]
        threshold = self.near.cutoff(pictures=False)
        return duplicates.find(
            texts, threshold=threshold, shingle=self.near.shingle, size=self.near.length, part_N=part_N
        )

    def same_positions(self, other: RowReader) -> bool:
        """Whether `other` has the same vocabulary."""
        return other.tokenizer is not None and other.tokenizer.get_vocab() == self.tokenizer.get_vocab()

    def as_read_by(self, other: RowReader, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same tokens."""
        return inputs

    def save(self, folder: Path) -> None:
        """Write the tokenizer into `folder`."""
        self.tokenizer.save_pretrained(folder)


def _text(value: Any, place: str, name: str) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{place}: the teacher reads `{name}`, which must be text, found {excerpt(value)}.")
    return str(value)


def require_readable(config: RunConfig, limit: int | None) -> None:
    """Raise DataError where texts with labels are malformed, or a run of one training has nothing to learn or measure.

    Args:
        limit: Rows of each file to read, which are not split then.
    """
    if config.media:
        return
    # Texts are read without their tokens.
    reader = TextReader(cast(Any, None), config.data, config.classes, config.duplicates)
    if limit is None and not config.crossvalidates:
        sources = labelled_data.split(config, reader)
        for each in (*sources.held_out.values(), *sources.test.values()):
            labels.require_known(sources.labels, each.labels, (record.place for record in each.records))
        return
    for path in (*config.data.held_out_files.values(), *config.data.test_files.values()):
        reader.read(path, limit=limit)
    for own in config.data.training_files.values():
        most = min((each for each in (own.limit, limit) if each is not None), default=None)
        reader.read(own.train, limit=most, weighted=True, columns=own.columns)


SAMPLED = 200  # rows that show whether an operator changes any
PRESERVED = (
    "Whether such texts keep their labels: `workbench features RECIPE` (recipe classify or crossval) tells how often "
    "each operator changes the class that the frozen backbone knows them by."
)  # sentence of `check` where a row has one class


def training_rows(rows: LabelledSet, config: RunConfig, reader: RowReader) -> LabelledSet:
    """Training rows as `data.curriculum` and `data.augment` ask for them; other rows are read as they are.

    Chance stands in for a difficulty that the backbone is to say: a run measures it after this. Raises ConfigError: the
    user's file is wrong; DataError: a row has no number in the column, or an operator changes no row.
    """
    if config.data.curriculum.measured:
        rows = replace(rows, difficulty=row_order.random_difficulty(len(rows), seed=config.rows_seed))
    else:
        rows = rows.graded(config.data.curriculum)
    if not config.data.augment.is_on:
        return rows
    assert isinstance(reader, TextReader) and isinstance(rows.inputs, TokenRows), "pictures are refused"
    augmented = augmented_texts(rows, config, reader)
    chosen = evenly_spaced(len(augmented.texts), SAMPLED)
    before = rows.inputs.take(chosen)
    for name in augmented.config.operators:
        if not before.differ(TokenRows(augmented.take(chosen).alone(name).tokens(0))).any():
            raise DataError(
                f"{rows.source}: data.augment.operators: {name} changes none of {len(chosen):,} training rows as the "
                "model reads them: they have nothing that it would change, or the tokenizer does not see it, as an "
                f"uncased one does not see letters' case.\n  Leave {name} out."
            )
    return replace(rows, inputs=replace(rows.inputs, augmented=augmented))


def augmented_texts(rows: LabelledSet, config: RunConfig, reader: TextReader) -> AugmentedTexts:
    """Texts of rows as `data.augment` rewrites them."""
    texts, places = zip(*((record.fields, record.place) for record in rows.records), strict=True)
    return AugmentedTexts(texts, places, config.data.augment, config.rows_seed, reader.encoder)


def augmentation_in_words(rows: LabelledSet, *, one_class: bool) -> list[str]:
    """Sentences on the rows that the first pass rewrites, and some of them; none where there are none. `one_class`:
    whether a row's label is one class, which a probe can tell."""
    if not isinstance(rows.inputs, TokenRows) or rows.inputs.augmented is None:
        return []
    augmented = rows.inputs.augmented
    changed, after = augmented.changed(0), augmented.rewritten(0)
    text = augmented.encoder.text
    shown = [
        f"  {augmented.places[row]}: {text(augmented.texts[row])}\n    -> {text(after[row])}"
        for row in changed[np.linspace(0, max(0, len(changed) - 1), num=min(3, len(changed)), dtype=np.int64)]
    ]
    names = ", ".join(augmented.config.operators)
    return [
        f"Augmentation ({names}): the first pass rewrites {len(changed):,} of {len(rows):,} training rows, whose "
        "labels stay; each pass does so in another way.",
        *shown,
        *([PRESERVED] if one_class else ()),
    ]
