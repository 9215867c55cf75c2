"""Examples as rows of a token table: encoded in chunks, each of which becomes one record batch of an Arrow file.

Chunks depend on nothing but the examples, and what is written of one on nothing but the chunk: the file has the same
bytes, however many processes encode.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow

from workbench.config import DataConfig
from workbench.data.batching import MicroBatch, Row
from workbench.data.text import chat, formats, judged_encoder
from workbench.errors import DataError, FileError, WorkbenchError

SCHEMA = pyarrow.schema(
    {
        "input_ids": pyarrow.list_(pyarrow.int32()),
        "supervised": pyarrow.list_(pyarrow.bool_()),
        "place": pyarrow.string(),
        "digest": pyarrow.uint64(),
        "length": pyarrow.int32(),
        "source": pyarrow.int32(),
        "targets": pyarrow.int32(),
        "ends": pyarrow.int32(),
        "truncated": pyarrow.bool_(),
        "chat": pyarrow.bool_(),
        "weight": pyarrow.float64(),
        "desired": pyarrow.int8(),
        "margin": pyarrow.float64(),
        "tie": pyarrow.bool_(),
        "step_labels": pyarrow.list_(pyarrow.float64()),
        "cut_steps": pyarrow.int32(),
    }
)

ROWS, CHARACTERS = 1000, 2**20
"""Most examples and, but for the last one, most characters of a chunk."""

Item = formats.Example | str
"""An example, or in its place the note of a row that was left out."""


class RowEncoder(Protocol):
    """How examples are written for a model, and what it sees of them. It can be pickled."""

    @property
    def conversion(self) -> formats.Conversion | None:
        """How rows are read where they are not read as their format says."""

    @property
    def reader(self) -> formats.Reader | None:
        """How a file is read where its rows are not taken as they are."""

    @property
    def identity(self) -> list[Any]:
        """All that the written tokens depend on, besides the tokenizer; JSON."""

    def expanded(self, example: formats.Example, *, loss_on: chat.LossOn) -> Sequence[formats.Example]:
        """The examples that the model learns from this one: itself, or several where one does not hold all answers."""

    def encode(self, example: formats.Example, *, loss_on: chat.LossOn) -> chat.Encoded:
        """The example's ids, and which of them carry loss."""

    def encode_many(
        self, examples: Sequence[formats.Example], *, loss_on: chat.LossOn
    ) -> list[chat.Encoded | WorkbenchError]:
        """`encode` of each example, as `chat.outcomes`: the same for the same examples, whatever came before."""

    def targets(self, encoded: chat.Encoded) -> int:
        """How many tokens of the example are predicted."""

    def seen(self, row: Row, *, epoch: int) -> Row:
        """One row as the model sees it in pass `epoch` over the data, with what is predicted marked."""

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        """Rows as the model sees them in pass `epoch` over the data."""


class Emptied(NamedTuple):
    """The examples of which cutting to data.max_tokens leaves no supervised token."""

    examples: int = 0
    """All examples, whether they were cut or not."""
    emptied: int = 0
    needed: int = 0
    """The fewest tokens that keep a supervised one of each, with one before it to predict it from."""
    first: str = ""
    """Place of the first."""

    def plus(self, other: Emptied) -> Emptied:
        """These and later ones."""
        return Emptied(
            self.examples + other.examples,
            self.emptied + other.emptied,
            max(self.needed, other.needed),
            self.first or other.first,
        )

    def reason(self, config: DataConfig) -> str | None:
        """Sentence on their share, and on what would keep them; None where there are none."""
        if not self.emptied:
            return None
        share = f"{self.emptied:,} of {self.examples:,} examples ({self.emptied / self.examples:.0%})"
        side = "left" if config.truncate == "right" else "right"
        return (
            f"{self.first}: no supervised token is left after cutting to data.max_tokens={config.max_tokens}, "
            f"as in {share}.\n  Write data.max_tokens={self.needed} or more, data.truncate={side}, or "
            "data.on_bad_row=skip to leave them out."
        )


class EncodedChunk(NamedTuple):
    """The rows of a chunk, and notes of what was left out, in the order of its items."""

    rows: pyarrow.RecordBatch
    skipped: list[str]
    emptied: Emptied


def chunks(examples: Iterator[formats.Example], skipped: list[str]) -> Iterator[list[Item]]:
    """Examples and the notes that reading them appends to `skipped`, which is emptied, in their order."""
    chunk: list[Item] = []
    characters = 0
    unread: WorkbenchError | None = None
    try:
        for example in examples:
            chunk += skipped
            skipped.clear()
            chunk.append(example)
            characters += _characters(example)
            if len(chunk) >= ROWS or characters >= CHARACTERS:
                yield chunk
                chunk, characters = [], 0
    except WorkbenchError as error:  # raised in its turn, after errors of the rows before
        unread = error
    if chunk or (skipped and unread is None):
        yield [*chunk, *skipped]
        skipped.clear()
    if unread is not None:
        raise unread


def encode(items: Sequence[Item], *, config: DataConfig, encoder: RowEncoder) -> EncodedChunk:
    """The rows of a chunk.

    Raises:
        DataError: An example cannot be encoded, and data.on_bad_row is refuse.
    """

    def expanded(item: Item) -> Sequence[formats.Example] | str:
        return item if isinstance(item, str) else encoder.expanded(item, loss_on=config.loss_on)

    expansions = chat.outcomes(expanded, items)
    parts = [part for each in expansions if not isinstance(each, str | WorkbenchError) for part in each]
    with _no_collection():
        encoded = encoder.encode_many(parts, loss_on=config.loss_on)
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    skipped: list[str] = []
    emptied, position = Emptied(), 0
    for item in expansions:
        if isinstance(item, str):
            skipped.append(item)
            continue
        rows: list[tuple[formats.Example, chat.Encoded, chat.Encoded]] = []
        try:
            if isinstance(item, WorkbenchError):
                raise item
            wholes = encoded[position : position + len(item)]
            position += len(item)
            for part, whole, cut in _cuts(item, wholes, config):
                emptied = emptied.plus(_emptied(part, whole, cut, config))
                if any(cut.supervised[1:]):
                    rows.append((part, whole, cut))
        except DataError as error:
            if config.on_bad_row == "refuse":
                raise
            skipped.append(str(error))
        else:
            _append(columns, rows, encoder)
    return EncodedChunk(pyarrow.RecordBatch.from_pydict(columns, schema=SCHEMA), skipped, emptied)


def write(path: Path, encoded: Iterator[EncodedChunk], config: DataConfig) -> list[str]:
    """Write chunks into an Arrow file, whole or not at all; returns the notes of what was left out.

    Raises:
        DataError: Rows have no supervised token left, and data.on_bad_row is refuse.
        FileError: The file cannot be written.
    """
    skipped: list[str] = []
    emptied = Emptied()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            unfinished = Path(aside) / path.name
            with pyarrow.ipc.new_stream(str(unfinished), SCHEMA) as writer:
                for chunk in encoded:
                    writer.write_batch(chunk.rows)
                    skipped += chunk.skipped
                    emptied = emptied.plus(chunk.emptied)
            if reason := emptied.reason(config):
                if config.on_bad_row == "refuse":
                    raise DataError(reason)
                skipped.append(reason)
            os.replace(unfinished, path)
    except OSError as error:
        raise FileError(
            f"{path.parent}: cannot be written ({error.strerror or error}). "
            "Make room there, or set WORKBENCH_CACHE to another folder."
        ) from None
    return skipped


@contextmanager
def _no_collection() -> Iterator[None]:
    """No search for garbage, which takes a tenth of the time: a chunk makes hundreds of tuples a row, and no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _characters(example: formats.Example) -> int:
    characters = sum(len(str(message.get("content") or "")) for message in example.messages)
    return characters + sum(len(text) for text, _ in example.text)


def _cuts(
    parts: Sequence[formats.Example], wholes: Sequence[chat.Encoded | WorkbenchError], config: DataConfig
) -> Iterator[tuple[formats.Example, chat.Encoded, chat.Encoded]]:
    """Yield the parts of an example, whole and cut; raises the first error among them."""
    encoded: list[chat.Encoded] = []
    for whole in wholes:  # an error that ended the encoding is the last one
        if isinstance(whole, WorkbenchError):
            raise whole
        encoded.append(whole)
    if parts[0].desired is not None:
        for part, whole in zip(parts, encoded, strict=True):
            _require_loss(part, whole)
        yield from zip(parts, encoded, judged_encoder.cut(parts, encoded, config), strict=True)
        return
    for part, whole in zip(parts, encoded, strict=True):
        cut = _cut(part, whole, config)
        yield _with_kept_steps(part, cut, config) if part.steps else part, whole, cut


def _with_kept_steps(part: formats.Example, cut: chat.Encoded, config: DataConfig) -> formats.Example:
    """The example with the labels of those steps whose last token cutting leaves."""
    labels, kept = part.step_labels, sum(cut.supervised[1:])
    return replace(part, step_labels=labels[:kept] if config.truncate == "right" else labels[len(labels) - kept :])


def _require_loss(part: formats.Example, whole: chat.Encoded) -> None:
    if not any(whole.supervised[1:]):
        raise DataError(f"{part.place}: no token carries loss. Give it an answer, or write data.on_bad_row=skip.")


def _cut(part: formats.Example, whole: chat.Encoded, config: DataConfig) -> chat.Encoded:
    """The example cut to data.max_tokens."""
    cut = chat.truncate(whole, max_tokens=config.max_tokens, side=config.truncate)
    if len(cut.input_ids) > config.max_tokens:
        raise DataError(
            f"{part.place}: {whole.kept} of its {len(whole.input_ids)} tokens are its answer, which is never cut: "
            f"data.max_tokens={config.max_tokens} leaves nothing to read. Raise it, or write data.on_bad_row=skip."
        )
    _require_loss(part, whole)
    return cut


def _emptied(part: formats.Example, whole: chat.Encoded, cut: chat.Encoded, config: DataConfig) -> Emptied:
    """The count of one example."""
    if any(cut.supervised[1:]):
        return Emptied(examples=1)
    carries = [number for number, loss in enumerate(whole.supervised) if loss and number]
    needed = carries[0] + 1 if config.truncate == "right" else len(whole.input_ids) - carries[-1] + 1
    return Emptied(1, 1, needed, part.place)


def _prompt(example: formats.Example) -> bytes:
    """All that stands before the last answer, as bytes to be hashed."""
    before = [list(example.messages[:-1]), list(example.tools), [text for text, _ in example.text[:-1]]]
    return json.dumps(before, sort_keys=True).encode()


def _append(
    columns: dict[str, list[Any]],
    rows: Sequence[tuple[formats.Example, chat.Encoded, chat.Encoded]],
    encoder: RowEncoder,
) -> None:
    """Add the rows of one example; their digest is of all of them, so that they stay on one side of a split.

    That of judged answers, and of answers whose steps are, is of their prompt: all answers to it stay on one side.
    """
    ids = array("q", itertools.chain.from_iterable(cut.input_ids for *_, cut in rows))
    if rows and rows[0][0].desired is not None:
        whole = rows[0][1]
        ids = array("q", whole.input_ids[: judged_encoder.prompt_length(whole)])
    identity = _prompt(rows[0][0]) if rows and rows[0][0].steps else ids.tobytes()
    # Of 5 million different rows, the chance that two share eight bytes is one in a million.
    digest = int.from_bytes(hashlib.sha256(identity).digest()[:8], "little")
    for part, whole, cut in rows:
        row = {
            "input_ids": cut.input_ids,
            "supervised": cut.supervised,
            "place": part.place,
            "digest": digest,
            "length": len(cut.input_ids),
            "source": cut.source,
            "targets": encoder.targets(cut),
            "ends": cut.ends,
            "truncated": len(cut.input_ids) < len(whole.input_ids),
            "chat": bool(part.messages),
            "weight": part.weight,
            "desired": None if part.desired is None else int(part.desired),
            "margin": part.margin,
            "tie": part.tie,
            "step_labels": list(part.step_labels) if part.steps else None,
            "cut_steps": len(part.steps) - len(part.step_labels),
        }
        for name, value in row.items():
            columns[name].append(value)
