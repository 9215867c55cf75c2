"""Tokenised data sets: made once, cached as Arrow files, memory-mapped, and split without leaks."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.data import dataset_facts, starter
from workbench.data.batching import Collate, Indices, MicroBatch, Row, collate
from workbench.data.text import chat, contamination, formats
from workbench.data.text.contamination import Contamination
from workbench.data.text.decontamination import TextRow
from workbench.errors import DataError, FileError
from workbench.runs import files

CODE_VERSION = 2
"""Part of the cache key, beside the columns: raise it when rendering or masking changes."""

_FEATURES = Features(
    {
        "input_ids": ListOf(Value("int32")),
        "supervised": ListOf(Value("bool")),
        "place": Value("string"),
        "digest": Value("string"),
        "length": Value("int32"),
        "source": Value("int32"),
        "targets": Value("int32"),
        "ends": Value("int32"),
        "truncated": Value("bool"),
        "chat": Value("bool"),
    }
)


class RowEncoder(Protocol):
    """How examples are written for a model, and what it sees of them."""

    @property
    def identity(self) -> list[Any]:
        """All that the written tokens depend on, besides the tokenizer; JSON."""

    def expanded(self, example: formats.Example, *, loss_on: chat.LossOn) -> Sequence[formats.Example]:
        """The examples that the model learns from this one: itself, or several where one does not hold all answers."""

    def encode(self, example: formats.Example, *, loss_on: chat.LossOn) -> chat.Encoded:
        """The example's ids, and which of them carry loss."""

    def targets(self, encoded: chat.Encoded) -> int:
        """How many tokens of the example are predicted."""

    def seen(self, row: Row, *, epoch: int) -> Row:
        """One row as the model sees it in pass `epoch` over the data, with what is predicted marked."""

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        """Rows as the model sees them in pass `epoch` over the data."""


@dataclass(frozen=True)
class TokenizedSet:
    """A tokenised set of examples, read from disk row by row."""

    table: Dataset
    rows: Indices
    """Which rows of the table belong to this set."""
    source: str
    fingerprint: str
    skipped: list[str] = field(default_factory=list)
    """Rows that were left out, and why."""
    chat: bool = True
    """Whether rows are conversations, rendered by the chat template, or raw text."""
    collate: Collate = collate
    """How rows are seen."""
    contamination: Contamination | None = None
    """Rows that held the text of evaluation rows, where they were looked for."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        number = int(self.rows[index])
        row = self.table[number]
        ids, supervised = np.asarray(row["input_ids"], dtype=np.int64), np.asarray(row["supervised"], dtype=bool)
        return Row(ids, supervised, row["source"], number)

    def place(self, index: int) -> str:
        """File and row that example `index` came from."""
        return str(self.table[int(self.rows[index])]["place"])

    @property
    def places(self) -> list[str]:
        """File and row that each example came from."""
        column = self.table["place"]
        return [str(column[int(row)]) for row in self.rows]

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """Each draw takes the example of its number."""
        return draws

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The examples `indices`, padded, as they are seen in pass `epoch` over the data."""
        return replace(self.collate([self[int(index)] for index in indices], epoch=epoch), rows_B=indices)

    def subset(self, keep: Indices | npt.NDArray[np.bool_], note: str | None = None) -> TokenizedSet:
        """The examples that `keep` indexes or marks."""
        return replace(self, rows=self.rows[keep], skipped=[*self.skipped, note] if note else self.skipped)

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each example."""
        return self._column("length")

    @cached_property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest sequence that one stack of the model reads, of each example."""
        source = self._column("source")
        longer: Indices = np.maximum(source, self.lengths - source)
        return longer

    @cached_property
    def supervised(self) -> Indices:
        """Predicted tokens that carry loss, of each example; the first token of a row has no prediction."""
        return self._column("targets")

    @cached_property
    def ends(self) -> Indices:
        """Supervised end-of-turn tokens of each example."""
        return self._column("ends")

    @cached_property
    def truncated(self) -> int:
        """How many examples were cut to `data.max_tokens`."""
        return int(self._column("truncated").sum())

    @cached_property
    def digests(self) -> list[str]:
        """A hash of each example's tokens: equal for exact duplicates."""
        column = self.table["digest"]
        return [column[int(row)] for row in self.rows]

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        found = {} if self.contamination is None else {"contamination": self.contamination.facts()}
        return {
            **dataset_facts.shared(self, supervised_tokens=int(self.supervised.sum())),
            "chat": self.chat,
            **found,
        }

    def _column(self, name: str) -> Indices:
        return np.asarray(self.table[name], dtype=np.int64)[self.rows]


class Splits(NamedTuple):
    """Training, held-out and test sets of a run."""

    train: TokenizedSet
    held_out: TokenizedSet
    test: TokenizedSet | None


def load(config: DataConfig, tokenizer: PreTrainedTokenizerBase, template: RowEncoder, *, seed: int) -> Splits:
    """Read, render, tokenise and split; refuses data that would teach or measure nothing."""
    train = read(config.train, config, tokenizer, template, limit=config.limit)
    if isinstance(config.held_out, str):
        held_out = read(config.held_out, config, tokenizer, template)
    else:
        train, held_out = hold_out(train, share=config.held_out, seed=seed)
    train = _without_overlap(train, held_out, config)
    test = read(config.test, config, tokenizer, template) if config.test else None
    if test is not None:
        train = _without_overlap(train, test, config)
    return Splits(_decontaminated(train, held_out, test, config), held_out, test)


def read(
    source: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: RowEncoder,
    *,
    limit: int | None = None,
) -> TokenizedSet:
    """One source, tokenised; from the cache where the same bytes were tokenised in the same way before."""
    path = starter.resolve(source)
    fingerprint = formats.fingerprint(path)
    used = {"format", "columns", "max_tokens", "truncate", "loss_on", "on_bad_row"}
    settings = config.model_dump(mode="json", include=used)
    # The name is part of what is cached (places), and which token is eos is not part of the backend.
    written = [template.identity, tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]
    key = [CODE_VERSION, sorted(_FEATURES), Path(path).name, fingerprint, settings, limit, *written]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "tokens"
    arrow, notes = folder / f"{name}.arrow", folder / f"{name}.json"
    if not notes.exists():
        skipped: list[str] = []
        examples = formats.read(path, config, skipped=skipped, limit=limit)
        _write(arrow, _encoded(examples, config, template, skipped))
        files.write_bytes(notes, json.dumps(skipped).encode())
    table = Dataset.from_file(str(arrow))
    skipped = json.loads(notes.read_text())
    if len(table) == 0:
        raise DataError(f"{source}: no usable row" + (f"; the first was left out: {skipped[0]}" if skipped else "."))
    return TokenizedSet(
        table,
        np.arange(len(table)),
        source,
        fingerprint,
        skipped,
        chat=bool(table[0]["chat"]),
        collate=template.collate,
    )


def hold_out(tokens: TokenizedSet, *, share: float, seed: int) -> tuple[TokenizedSet, TokenizedSet]:
    """Split off `share` of the examples; exact duplicates always stay on the same side."""
    groups: dict[str, list[int]] = {}
    for index, digest in enumerate(tokens.digests):
        groups.setdefault(digest, []).append(index)
    wanted = max(1, round(share * len(tokens)))
    chosen = np.zeros(len(tokens), dtype=bool)
    members = list(groups.values())
    for group in np.random.default_rng([seed, 1]).permutation(len(members)):
        if chosen.sum() >= wanted:
            break
        chosen[members[group]] = True
    if chosen.all():
        raise DataError(
            f"{tokens.source}: {len(groups)} distinct row(s) are too few to hold out a share of {share}. "
            "Give more rows, or a file of its own as data.held_out."
        )
    return tokens.subset(~chosen), tokens.subset(chosen)


def cache_folder() -> Path:
    """Where tokenised data and other things worth keeping stand; WORKBENCH_CACHE moves it."""
    base = os.environ.get("WORKBENCH_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "peft-workbench"


def _without_overlap(train: TokenizedSet, held_out: TokenizedSet, config: DataConfig) -> TokenizedSet:
    """`train` without rows that are also in `held_out`: refused, or dropped where the config says so."""
    known = {digest: index for index, digest in reversed(list(enumerate(held_out.digests)))}
    shared = np.asarray([digest in known for digest in train.digests])
    if not shared.any():
        return train
    if config.overlap == "drop":
        if shared.all():
            raise DataError(f"{train.source}: every row is also in {held_out.source}; nothing is left to train on.")
        return train.subset(~shared, f"{int(shared.sum())} rows that are also in {held_out.source}")
    first = int(np.flatnonzero(shared)[0])
    raise DataError(
        f"{int(shared.sum())} of {len(train)} training rows are also in {held_out.source}, so its scores would "
        f"flatter: {train.place(first)} equals {held_out.place(known[train.digests[first]])}.\n"
        "  Write data.overlap=drop to leave them out of training."
    )


def _decontaminated(
    train: TokenizedSet, held_out: TokenizedSet, test: TokenizedSet | None, config: DataConfig
) -> TokenizedSet:
    """`train`, compared with every evaluation set as `data.decontaminate` says; its texts are read a second time."""
    wanted = config.decontaminate
    if wanted.action == "off":
        return train
    sets = {"data.held_out": _texts(held_out, config, limit=config.limit if held_out.source == train.source else None)}
    sets |= {} if test is None else {"data.test": _texts(test, config)}
    sets |= contamination.named_sets(config)
    found = contamination.find(train.source, _texts(train, config, limit=config.limit), sets, wanted)
    train = replace(train, contamination=found)
    if wanted.action != "drop" or not found.matches:
        return train
    dropped = {match.train for match in found.matches}
    kept = np.asarray([place not in dropped for place in train.places])
    return train.subset(kept, f"{len(found.matches)} rows that hold the text of evaluation rows")


def _texts(tokens: TokenizedSet, config: DataConfig, *, limit: int | None = None) -> Iterator[TextRow]:
    """The texts of the rows of a set, in their order."""
    wanted = set(tokens.places)
    for example in formats.read(starter.resolve(tokens.source), config, skipped=[], limit=limit):
        if example.place in wanted:
            yield contamination.text_row(example)


def _encoded(
    examples: Iterator[formats.Example], config: DataConfig, template: RowEncoder, skipped: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows of the table; a digest is of the whole example, so that what one is expanded into stays on one side."""
    emptied = Emptied(config)
    for example in examples:
        rows: list[tuple[formats.Example, chat.Encoded, chat.Encoded]] = []
        try:
            for part in template.expanded(example, loss_on=config.loss_on):
                whole = template.encode(part, loss_on=config.loss_on)
                cut = chat.truncate(whole, max_tokens=config.max_tokens, side=config.truncate)
                if len(cut.input_ids) > config.max_tokens:
                    raise DataError(_too_long(part, whole, config))
                if not any(whole.supervised[1:]):
                    raise DataError(
                        f"{part.place}: no token carries loss. Give it an answer, or write data.on_bad_row=skip."
                    )
                emptied.add(part, whole, cut)
                if any(cut.supervised[1:]):
                    rows.append((part, whole, cut))
        except DataError as error:
            if config.on_bad_row == "refuse":
                raise
            skipped.append(str(error))
            continue
        digest = hashlib.sha256(np.asarray([id for *_, cut in rows for id in cut.input_ids], dtype=np.int64).tobytes())
        for part, whole, cut in rows:
            yield {
                "input_ids": cut.input_ids,
                "supervised": cut.supervised,
                "place": part.place,
                "digest": digest.hexdigest()[:32],
                "length": len(cut.input_ids),
                "source": cut.source,
                "targets": template.targets(cut),
                "ends": cut.ends,
                "truncated": len(cut.input_ids) < len(whole.input_ids),
                "chat": bool(part.messages),
            }
    if reason := emptied.reason():
        if config.on_bad_row == "refuse":
            raise DataError(reason)
        skipped.append(reason)


class Emptied:
    """Counts the examples of which cutting to data.max_tokens leaves no supervised token."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._all = self._count = self._needed = 0
        self._first = ""

    def add(self, example: formats.Example, whole: chat.Encoded, cut: chat.Encoded) -> None:
        """An example, whole and cut."""
        self._all += 1
        if any(cut.supervised[1:]):
            return
        self._count += 1
        self._first = self._first or example.place
        # The fewest tokens that keep a supervised one, with one before it to predict it from.
        carries = [number for number, loss in enumerate(whole.supervised) if loss and number]
        kept = carries[0] + 1 if self._config.truncate == "right" else len(whole.input_ids) - carries[-1] + 1
        self._needed = max(self._needed, kept)

    def reason(self) -> str | None:
        """Sentence on their share, and on what would keep them; None where there are none."""
        if not self._count:
            return None
        share = f"{self._count:,} of {self._all:,} examples ({self._count / self._all:.0%})"
        side = "left" if self._config.truncate == "right" else "right"
        return (
            f"{self._first}: no supervised token is left after cutting to data.max_tokens={self._config.max_tokens}, "
            f"as in {share}.\n  Write data.max_tokens={self._needed} or more, data.truncate={side}, or "
            "data.on_bad_row=skip to leave them out."
        )


def _too_long(example: formats.Example, whole: chat.Encoded, config: DataConfig) -> str:
    return (
        f"{example.place}: {whole.kept} of its {len(whole.input_ids)} tokens are its answer, which is never cut: "
        f"data.max_tokens={config.max_tokens} leaves nothing to read. Raise it, or write data.on_bad_row=skip."
    )


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """An Arrow file of `rows`, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            unfinished = Path(aside) / path.name
            with ArrowWriter(path=str(unfinished), features=_FEATURES) as writer:
                for row in rows:
                    writer.write(row)
                writer.finalize()
            os.replace(unfinished, path)
    except OSError as error:
        raise FileError(
            f"{path.parent}: cannot be written ({error.strerror or error}). "
            "Make room there, or set WORKBENCH_CACHE to another folder."
        ) from None
