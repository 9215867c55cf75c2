"""Tokenised data sets: encoded once, cached as Arrow files, memory-mapped, and split without leaks.

Examples are encoded in chunks, each of which becomes one record batch. Chunks depend on nothing but the examples, and
what is written of one on nothing but the chunk: the file has the same bytes, however many processes encode.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import re
import tempfile
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow

from workbench.config import DataConfig
from workbench.data import named_sets, ordered_processes, selection, starter, unread_columns
from workbench.data.batching import Indices
from workbench.data.folds import held_fold
from workbench.data.folds.held_fold import FoldRow
from workbench.data.held_out_split import Splits
from workbench.data.rows import RawRow, read_rows
from workbench.data.text import chat, decontamination, formats, media
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.decontamination import TextRow
from workbench.data.text.formats import Example
from workbench.data.text.messages import READ
from workbench.data.text.quality import cleaning
from workbench.data.text.row_encoder import RowEncoder
from workbench.data.text.tokenized_set import TokenizedSet, TokenTable, join_sets
from workbench.data.text.transcripts import TranscriptEncoder
from workbench.errors import ConfigError, DataError, FileError, WorkbenchError
from workbench.runs import files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        "whole": pyarrow.int32(),
        "block": pyarrow.int32(),
        "chat": pyarrow.bool_(),
        "weight": pyarrow.float64(),
        "desired": pyarrow.int8(),
        "margin": pyarrow.float64(),
        "tie": pyarrow.bool_(),
        "step_labels": pyarrow.list_(pyarrow.float64()),
        "cut_steps": pyarrow.int32(),
        "pictures": pyarrow.string(),
        "picture_files": pyarrow.list_(pyarrow.string()),
        "picture_count": pyarrow.int32(),
    }
)

ROWS, CHARACTERS = 1000, 2**20  # most examples and, but for the last one, most characters of a chunk

Item = formats.Example | str  # an example, or in its place the note of a row that was left out


class Emptied(NamedTuple):
    """Examples that lose all supervised tokens by cutting to data.max_tokens."""

    examples: int = 0  # all examples, whether they were cut or not
    emptied: int = 0
    needed: int = 0  # the fewest tokens that keep a supervised one of each, with one before it to predict it from
    first: str = ""  # place of the first

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


class EncodedRow(NamedTuple):
    """A row, and what it was made of."""

    part: formats.Example
    whole: chat.Encoded  # before it was cut
    cut: chat.Encoded
    tokens: int  # that `whole` has, or those of a long document that this row is the first to have
    block: int = 0  # number of a block of a long document, from 1; 0: it is none


class EncodedChunk(NamedTuple):
    """The rows of a chunk, and notes of what was left out, in the order of its items."""

    rows: pyarrow.RecordBatch
    skipped: list[str]
    emptied: Emptied


def example_chunks(examples: Iterator[formats.Example], skipped: list[str]) -> Iterator[list[Item]]:
    """Examples and the notes that reading them appends to `skipped`, which is emptied, in their order."""
    chunk: list[Item] = []
    characters = 0
    unread: WorkbenchError | None = None
    try:
        for example in examples:
            chunk += skipped
            skipped.clear()
            chunk.append(example)
            characters += sum(len(str(message.get("content") or "")) for message in example.messages)
            characters += sum(len(text) for text, _ in example.text)
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


def encode_chunk(items: Sequence[Item], *, config: DataConfig, encoder: RowEncoder) -> EncodedChunk:
    """The rows of a chunk. Raises DataError: an example cannot be encoded, and data.on_bad_row is refuse."""

    def expanded(item: Item) -> Sequence[formats.Example] | str:
        return item if isinstance(item, str) else encoder.expanded(item, loss_on=config.loss_on)

    expansions = chat.outcomes(expanded, items)
    parts = [part for each in expansions if not isinstance(each, str | WorkbenchError) for part in each]
    collecting = gc.isenabled()
    gc.disable()  # the search for garbage takes a tenth of the time: hundreds of tuples a row, and no cycles
    try:
        encoded = encoder.encode_many(parts, loss_on=config.loss_on)
    finally:
        if collecting:
            gc.enable()
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    skipped: list[str] = []
    emptied, position = Emptied(), 0
    for item in expansions:
        if isinstance(item, str):
            skipped.append(item)
            continue
        rows: list[EncodedRow] = []
        try:
            if isinstance(item, WorkbenchError):
                raise item
            wholes = encoded[position : position + len(item)]
            position += len(item)
            for row in _cuts(item, wholes, config):
                part, whole, cut, *_ = row
                if any(cut.supervised[1:]):
                    emptied = emptied.plus(Emptied(examples=1))
                    rows.append(row)
                    continue
                carries = [number for number, loss in enumerate(whole.supervised) if loss and number]
                right = config.truncate == "right"
                needed = carries[0] + 1 if right else len(whole.input_ids) - carries[-1] + 1
                emptied = emptied.plus(Emptied(1, 1, needed, part.place))
        except DataError as error:
            if config.on_bad_row == "refuse":
                raise
            skipped.append(str(error))
        else:
            _append(columns, rows, encoder)
    return EncodedChunk(pyarrow.RecordBatch.from_pydict(columns, schema=SCHEMA), skipped, emptied)


def write_chunks(path: Path, encoded: Iterator[EncodedChunk], config: DataConfig) -> list[str]:
    """Write chunks into an Arrow file, whole or not at all; returns the notes of what was left out. Raises DataError:
    rows have no supervised token left, and data.on_bad_row is refuse; FileError: the file cannot be written."""
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


def _cuts(
    parts: Sequence[formats.Example], wholes: Sequence[chat.Encoded | WorkbenchError], config: DataConfig
) -> Iterator[EncodedRow]:
    """Yield the parts of an example, whole and cut, or the blocks of raw text; raises the first error among them."""
    encoded: list[chat.Encoded] = []
    for whole in wholes:  # an error that ended the encoding is the last one
        if isinstance(whole, WorkbenchError):
            raise whole
        encoded.append(whole)
    if parts[0].desired is not None:
        for part, whole in zip(parts, encoded, strict=True):
            _require_loss(part, whole)
        for part, whole, cut in zip(parts, encoded, cut_together(parts, encoded, config), strict=True):
            yield EncodedRow(part, whole, cut, len(whole.input_ids))
        return
    for part, whole in zip(parts, encoded, strict=True):
        if len(part.text) == 1 and len(whole.input_ids) > config.max_tokens:
            _require_loss(part, whole)
            found = chat.blocks(whole, max_tokens=config.max_tokens, overlap=config.document_overlap)
            for number, (block, tokens) in enumerate(found, start=1):
                named = replace(part, place=f"{part.place}, block {number} of {len(found)}")
                yield EncodedRow(named, whole, block, tokens, number)
            continue
        if whole.source and whole.pictures:  # a recording, whose transcript is never cut
            if (tokens := len(whole.input_ids) - whole.source) > config.max_tokens:
                raise DataError(
                    f"{part.place}: its transcript has {tokens} tokens, which data.max_tokens={config.max_tokens} "
                    f"would cut. Write data.max_tokens={tokens} or more, or data.on_bad_row=skip to leave it out."
                )
            yield EncodedRow(part, whole, whole, len(whole.input_ids))
            continue
        cut = chat.truncate(whole, max_tokens=config.max_tokens, side=config.truncate)
        if len(cut.input_ids) > config.max_tokens and whole.pictures:
            raise DataError(
                f"{part.place}: has {len(whole.input_ids)} tokens, and data.max_tokens={config.max_tokens} would cut a "
                f"picture. Write data.max_tokens={len(whole.input_ids)} or more, or data.on_bad_row=skip to leave such "
                "rows out."
            )
        if len(cut.input_ids) > config.max_tokens:
            raise DataError(
                f"{part.place}: {whole.kept} of its {len(whole.input_ids)} tokens are its answer, which is never cut: "
                f"data.max_tokens={config.max_tokens} leaves nothing to read. Raise it, or write data.on_bad_row=skip."
            )
        _require_loss(part, whole)
        if part.steps:  # labels of those steps whose last token cutting leaves
            labels, kept = part.step_labels, sum(cut.supervised[1:])
            labels = labels[:kept] if config.truncate == "right" else labels[len(labels) - kept :]
            part = replace(part, step_labels=labels)
        yield EncodedRow(part, whole, cut, len(whole.input_ids))


def _require_loss(part: formats.Example, whole: chat.Encoded) -> None:
    if not any(whole.supervised[1:]):
        raise DataError(f"{part.place}: no token carries loss. Give it an answer, or write data.on_bad_row=skip.")


def _append(columns: dict[str, list[Any]], rows: Sequence[EncodedRow], encoder: RowEncoder) -> None:
    """Add the rows of one example; their digest is of all of them, so that they stay on one side of a split.

    That of judged answers, and of answers whose steps are, is of their prompt: all answers to it stay on one side.
    """
    ids = array("q", itertools.chain.from_iterable(each.cut.input_ids for each in rows))
    if rows and rows[0].part.desired is not None:
        whole = rows[0].whole
        ids = array("q", whole.input_ids[: int(np.argmax(whole.supervised))])
    identity = ids.tobytes() + (rows[0].whole.pictures.key.encode() if rows and rows[0].whole.pictures else b"")
    if rows and (example := rows[0].part).steps:
        before = [list(example.messages[:-1]), list(example.tools), [text for text, _ in example.text[:-1]]]
        identity = json.dumps(before, sort_keys=True).encode()
    # Of 5 million different rows, the chance that two share eight bytes is one in a million.
    digest = int.from_bytes(hashlib.sha256(identity).digest()[:8], "little")
    for part, _, cut, tokens, block in rows:
        row = {
            "input_ids": cut.input_ids,
            "supervised": cut.supervised,
            "place": part.place,
            "digest": digest,
            "length": len(cut.input_ids),
            "source": cut.source,
            "targets": encoder.targets(cut),
            "ends": cut.ends,
            "whole": tokens,
            "block": block,
            "chat": bool(part.messages),
            "weight": part.weight,
            "desired": None if part.desired is None else int(part.desired),
            "margin": part.margin,
            "tie": part.tie,
            "step_labels": list(part.step_labels) if part.steps else None,
            "cut_steps": len(part.steps) - len(part.step_labels),
            "pictures": cut.pictures.key if cut.pictures else "",
            "picture_files": list(cut.pictures.stamps) if cut.pictures else None,
            "picture_count": len(cut.pictures.texts) if cut.pictures else 0,
        }
        for name, value in row.items():
            columns[name].append(value)


def cut_together(
    parts: Sequence[formats.Example], wholes: Sequence[chat.Encoded], config: DataConfig
) -> list[chat.Encoded]:
    """Cut answers to one prompt to data.max_tokens; on the left all lose as much of the prompt, and none of the answer.
    Raises DataError: cutting leaves no prompt, no answer, or no difference."""
    place, most = parts[0].place.removesuffix(", answer 1 of 2"), config.max_tokens
    if len(wholes) == 2 and wholes[0].input_ids == wholes[1].input_ids:
        raise DataError(
            f"{place}: both answers have the same tokens: there is nothing to prefer. Remove the row, or write "
            "data.on_bad_row=skip."
        )
    excess = max(len(whole.input_ids) for whole in wholes) - most
    if excess <= 0:
        return list(wholes)
    if config.truncate == "left":
        # At least one token is left to predict the answer's first one from.
        room = min(int(np.argmax(whole.supervised)) - int(whole.bos) for whole in wholes) - 1
        if excess > room:
            raise DataError(
                f"{place}: its longer answer leaves no room for a prompt in data.max_tokens={most}. Write "
                f"data.max_tokens={most + excess - room} or more, data.truncate=right, or data.on_bad_row=skip."
            )
        return [chat.truncate(each, max_tokens=len(each.input_ids) - excess, side="left") for each in wholes]
    cuts = [chat.truncate(each, max_tokens=most, side="right") for each in wholes]
    if not all(any(each.supervised[1:]) for each in cuts):
        raise DataError(
            f"{place}: cutting to data.max_tokens={most} leaves no answer. Write a larger data.max_tokens, "
            "data.truncate=left, or data.on_bad_row=skip."
        )
    if len(cuts) == 2 and cuts[0].input_ids == cuts[1].input_ids:
        differ = next(
            (at for at, (a, b) in enumerate(zip(*(each.input_ids for each in wholes), strict=False)) if a != b), most
        )
        raise DataError(
            f"{place}: its answers differ from token {differ + 1} on, and cutting to data.max_tokens={most} removes "
            f"the difference. Write data.max_tokens={differ + 1} or more, data.truncate=left, or data.on_bad_row=skip."
        )
    return cuts


CODE_VERSION = 5  # part of the cache key, beside the columns: raise it when rendering or masking changes


def load(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: RowEncoder | None = None,
    *,
    seed: int = 0,
    scored: DataConfig | None = None,
) -> Splits[TokenizedSet]:
    """Read, render, tokenise and split the rows of files; refuses data that would teach or measure nothing.

    Args:
        config: The files, their format, and what is held out.
        tokenizer: Of the backbone.
        template: How rows are written for it; None: as a causal language model reads them, by its chat template.
        seed: What is held out depends on it, unless `config.seed` is given.
        scored: How held-out and test files are read; None: as the training file.

    Returns:
        `train`, `held_out` and `test`: rows of token ids, memory-mapped, each of which knows its `lengths` in tokens,
        how many are `supervised`, and the `place` that a row came from. `batch(numbers)` pads some to a micro-batch.

    Raises:
        DataError: A row cannot be read, has no token that carries loss, or is also among the held-out ones.

    Examples:
        >>> import workbench
        >>> from workbench.config import DataConfig, ModelConfig
        >>> tokenizer = workbench.load_tokenizer(ModelConfig(id="starter"))
        >>> section = DataConfig(train="starter/fairytaleqa_train.jsonl", limit=40, held_out=0.1)
        >>> data = workbench.load_rows(section, tokenizer)
        >>> len(data.train), len(data.held_out), data.train.place(0)
        (36, 4, 'fairytaleqa_train.jsonl, row 1')
        >>> numbers = workbench.global_batch(0, rows=len(data.train), size=8, seed=0)
        >>> batch = data.train.batch(numbers)
        >>> batch.inputs["input_ids"].shape == (8, data.train.lengths[numbers].max())
        True
        >>> len(batch.labels_N), int(data.train.supervised[numbers].sum())
        (84, 84)
    """
    read_as, template = scored or config, template or ChatEncoder(tokenizer)
    seed = seed if config.seed is None else config.seed
    held_out, test = (
        read_each(named, read_as, tokenizer, template) for named in (config.held_out_files, config.test_files)
    )
    files, trains, shares = config.training_files, dict[str, TokenizedSet](), dict[str, TokenizedSet]()
    prefixes = named_sets.prefixes({name: own.train for name, own in files.items()})
    for name, own in files.items():
        assert not own.streaming.on, "streamed rows are files of this machine by now"
        with named_sets.naming(prefixes[name]):
            trains[name] = read(own.train, own, tokenizer, template, limit=own.limit, weighted=True)
        if own.fold.of is not None:
            fold = held_fold.split(own.fold, _fold_rows(trains[name], own), config=own, seed=seed)
            trains[name], shares[name] = trains[name].subset(fold.train_N), trains[name].subset(fold.validation_N)
        elif own.own_share is not None:
            trains[name], shares[name] = hold_out(trains[name], share=own.own_share, seed=seed)
    held_out = held_out or shares
    # A share is read, a second time, as the rows that it was a part of.
    keys = decontamination.evaluation_sets({name: files.get(name, read_as) for name in shares}, {})
    sets = decontamination.evaluation_sets(held_out, test)
    trains = _cleaned(trains, files, template)
    for name, own in files.items():
        for other in test.values() if own.fold.trains else sets.values():
            trains[name] = _without_overlap(trains[name], other, own)
        texts = {
            key: _texts(rows, keys.get(key, read_as), template, limit=keys[key].limit if key in keys else None)
            for key, rows in sets.items()
        }
        trains[name] = _decontaminated(trains[name], texts, own, template)
    if config.select.by == "gradient":
        target_rows(config, tokenizer, template)  # what is wrong with them is told before anything trains
    train = _selected(together(trains), trains, config, seed=seed)
    return Splits(train, together(held_out), together(test) if test else None)


def require_readable(
    config: DataConfig,
    limit: int | None,
    *,
    conversion: formats.Conversion | None = None,
    reader: formats.Reader | None = None,
    scored: DataConfig | None = None,
) -> None:
    """Raise DataError where `load` would as it reads rows, before there is a tokenizer. `limit`: rows of each file."""

    def consume(source: str, own: DataConfig, most: int | None, weighted: bool) -> None:
        path, limits = starter.resolve(source), [each for each in (most, limit) if each is not None]
        deque(
            formats.read(
                path,
                own,
                skipped=[],
                limit=min(limits, default=None),
                weighted=weighted,
                conversion=conversion,
                reader=reader,
            ),
            maxlen=0,
        )

    read_as = scored or config
    for path in (*config.held_out_files.values(), *config.test_files.values()):
        consume(path, read_as.unweighted, None, False)
    prefixes = named_sets.prefixes({name: own.train for name, own in config.training_files.items()})
    for name, own in config.training_files.items():
        with named_sets.naming(prefixes[name]):
            consume(own.train, own, own.limit, True)


def read_files(
    named: Mapping[str, str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, template: RowEncoder
) -> TokenizedSet | None:
    """The rows of files by name together, tokenised; of the one that has no name; None where there is no file."""
    return together(sets) if (sets := read_each(named, config, tokenizer, template)) else None


def read_each(
    named: Mapping[str, str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, template: RowEncoder
) -> dict[str, TokenizedSet]:
    """The rows of each of some files by name, tokenised."""
    return {name: read(path, config, tokenizer, template) for name, path in named.items()}


def together(sets: Mapping[str, TokenizedSet]) -> TokenizedSet:
    """The rows of several sets, which they know by name; of one that has none (``) as they are."""
    return join_sets(sets) if sets.keys() - {""} else sets[""]


def read(
    source: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: RowEncoder,
    *,
    limit: int | None = None,
    weighted: bool = False,
) -> TokenizedSet:
    """One source, tokenised; from the cache where the same bytes were read so before; `weighted` as in formats.read."""
    path, config = starter.resolve(source), config if weighted else config.unweighted
    of_files = template.processor.fingerprint if isinstance(template, TranscriptEncoder) else formats.fingerprint
    fingerprint = of_files(path, config)
    used = {
        "format",
        "columns",
        "max_tokens",
        "document_overlap",
        "truncate",
        "loss_on",
        "on_bad_row",
        "header",
        "encoding",
        "labels",
        "label_names",
        "ignore",
    }
    settings = config.model_dump(mode="json", include=used)
    # The name is part of what is cached (places), and which token is eos is not part of the backend.
    tokens_of = [template.identity, tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]
    key = [CODE_VERSION, sorted(SCHEMA.names), Path(path).name, fingerprint, settings, limit, *tokens_of]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = files.cache_folder() / "tokens"
    arrow, notes = folder / f"{name}.arrow", folder / f"{name}.json"
    if not notes.exists() or not _known_pictures(json.loads(notes.read_text()), arrow, path, template):
        skipped: list[str] = []
        examples = formats.read(
            path,
            config,
            skipped=skipped,
            limit=limit,
            weighted=weighted,
            conversion=template.conversion,
            reader=template.reader,
        )
        keys = dict[str, None]()
        chunks = example_chunks(_with_keys(examples, keys), skipped)
        encode = partial(encode_chunk, config=config, encoder=template)
        with unread_columns.noting() as found:
            written = write_chunks(arrow, ordered_processes.results(encode, chunks), config)
        unread = [key for key in keys if key not in READ and not _template_reads(key, template)]
        pictures = _pictures_of(path, template) if media.KEY in keys else None
        about = {"skipped": written, "unread": [*found.get(path, ()), *unread], "pictures": pictures}
        files.write_bytes(notes, json.dumps(about).encode())
    kept = json.loads(notes.read_text())
    unread_columns.note(path, kept["unread"])
    return _set(TokenTable.from_file(arrow), source, fingerprint, kept["skipped"], template)


def _pictures_of(path: str, template: RowEncoder) -> list[Any]:
    """What the pictures of a file's rows depend on besides the rows: how they are read, and where paths begin."""
    return [*(template.processor.settings if template.processor else ()), formats.folder_of(path)]


def _known_pictures(notes: Mapping[str, Any], arrow: Path, path: str, template: RowEncoder) -> bool:
    """Whether rows that were tokenised before have no pictures, or those that they have now, made as they are now."""
    if notes["pictures"] is None:
        return True
    if notes["skipped"] or notes["pictures"] != _pictures_of(path, template):
        return False  # a row that was left out may have its picture by now
    if template.processor is None:
        return True
    keys, stamps = (TokenTable.from_file(arrow).data.column(name).to_pylist() for name in ("pictures", "picture_files"))
    return template.processor.knows(keys, itertools.chain.from_iterable(filter(None, stamps)))


def _template_reads(key: str, template: RowEncoder) -> bool:
    """Whether a chat template asks messages for a key, such as `message.name` or `'name' in message`."""
    message, name = r"\b(?:messages?(?:\[[^\]]*\])?|msg|m|turn)", rf"\\*['\"]{re.escape(key)}\\*['\"]"
    asked = rf"{message}(?:\.{re.escape(key)}\b|\[\s*{name}|\.get\(\s*{name})|{name}\s+(?:not\s+)?in\s+{message}"
    return re.search(asked, json.dumps(template.identity)) is not None  # with the source of the template


def _with_keys(examples: Iterator[Example], keys: dict[str, None]) -> Iterator[Example]:
    """Yield examples; `keys` gets those of their messages."""
    for example in examples:
        for message in (*example.messages, *(example.rejected.messages if example.rejected else ())):
            keys.update(dict.fromkeys(message))
        yield example


def _set(table: TokenTable, source: str, fingerprint: str, skipped: list[str], template: RowEncoder) -> TokenizedSet:
    """All rows of a table; raises DataError where it has none."""
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
        processor=template.processor,
    )


def encode(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template: RowEncoder | None = None,
    *,
    config: DataConfig | None = None,
) -> TokenizedSet:
    """Render and tokenise rows in memory, such as those of a pandas table or a data set of Hugging Face.

    Args:
        rows: Their columns, in any format that files have: `messages`, or `question` and `answer`, or `text`, ...
        tokenizer: Of the backbone.
        template: How rows are written for it; None: as a causal language model reads them, by its chat template.
        config: Its format, columns, max_tokens, truncate, loss_on and on_bad_row are used; None: the defaults.

    Returns:
        Rows of token ids, as `load_rows` gives them.

    Raises:
        DataError: A row cannot be read, or has no token that carries loss.

    Examples:
        >>> import workbench
        >>> from workbench.config import ModelConfig
        >>> tokenizer = workbench.load_tokenizer(ModelConfig(id="starter"))
        >>> rows = workbench.encode_rows([{"prompt": "Once upon", "completion": " a time"}], tokenizer)
        >>> tokenizer.decode(rows[0].input_ids[rows[0].supervised])
        ' a time<|endoftext|>'
    """
    config, template, skipped = config or DataConfig(train="rows"), template or ChatEncoder(tokenizer), list[str]()

    def raw(source: str, config: DataConfig) -> Iterator[RawRow]:
        yield from (RawRow(f"row {number}", dict(row)) for number, row in enumerate(rows, 1))

    examples = formats.read("rows", config, skipped=skipped, weighted=True, conversion=template.conversion, reader=raw)
    chunks = (encode_chunk(chunk, config=config, encoder=template) for chunk in example_chunks(examples, skipped))
    with tempfile.TemporaryDirectory() as aside:
        path = Path(aside) / "rows.arrow"
        skipped = write_chunks(path, chunks, config)
        identity = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        return _set(TokenTable.from_file(path.rename(path.with_stem(identity))), "rows", identity, skipped, template)


def target_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase, template: RowEncoder) -> TokenizedSet:
    """The rows of `data.select.target`, whose gradients others are compared with."""
    assert config.select.target is not None
    return read(config.select.target, config.model_copy(update={"format": "auto", "columns": {}}), tokenizer, template)


def first_examples(config: DataConfig, count: int) -> Iterator[Example]:
    """Yield the first training examples of each source as they stand in its file, `count` of each."""
    for own in config.training_files.values():
        yield from itertools.islice(formats.read(starter.resolve(own.train), own, skipped=[], limit=own.limit), count)


def hold_out(tokens: TokenizedSet, *, share: float, seed: int) -> tuple[TokenizedSet, TokenizedSet]:
    """Split off `share` of the examples; exact duplicates, and those with the same pictures, stay on the same side."""
    drawn_G, group_N, size_G = _drawn_groups(tokens, seed)
    # As many are drawn as it takes to reach the share.
    wanted = max(1, round(share * len(tokens)))
    count = 1 + int(np.searchsorted(np.cumsum(size_G[drawn_G]), wanted))
    chosen = np.isin(group_N, drawn_G[:count])
    if chosen.all():
        raise DataError(
            f"{tokens.source}: {len(size_G)} distinct row(s) are too few to hold out a share of {share}. "
            "Give more rows, or a file of its own as data.held_out."
        )
    return tokens.subset(~chosen), tokens.subset(chosen)


def _fold_rows(tokens: TokenizedSet, config: DataConfig) -> list[FoldRow]:
    """The rows of a file as folds see them; duplicates, all answers to a prompt, and rows with the same pictures have
    one key. Rows with other pictures are no near-duplicates, whatever their texts."""
    known = zip(map(example_of, tokens.places()), tokens.digests.tolist(), tokens.pictures, strict=True)
    rows = zip(_texts(tokens, config, limit=config.limit), itertools.groupby(known, itemgetter(0)), strict=True)
    return [
        FoldRow(row.place, pictures or "\n".join(row.texts), pictures or str(digest))
        for row, (_, own) in rows
        for _, digest, pictures in own
    ]


def _drawn_groups(tokens: TokenizedSet, seed: int) -> tuple[Indices, Indices, Indices]:
    """Groups of examples that stay together in a drawn order, the group of each example, and how many each has."""
    keys_N = tokens.digests.copy()
    for number, pictures in enumerate(tokens.pictures):
        if pictures:
            keys_N[number] = int(pictures[:16], 16)
    _, first_G, group_N, size_G = np.unique(keys_N, return_index=True, return_inverse=True, return_counts=True)
    # Groups are numbered by their first example.
    drawn_G = np.argsort(first_G)[np.random.default_rng([seed, 1]).permutation(len(first_G))]
    return drawn_G, group_N, size_G


def _without_overlap(train: TokenizedSet, held_out: TokenizedSet, config: DataConfig) -> TokenizedSet:
    """`train` without rows that are also in `held_out`: refused, or dropped where the config says so."""
    if config.overlap == "tell":
        raise ConfigError(
            "data.overlap=tell scores rows with and without copies, which recipes of tokens do not. Write "
            "data.overlap=drop."
        )
    shared = np.isin(train.digests, held_out.digests)
    if not shared.any():
        return train
    if config.overlap == "drop":
        if shared.all():
            raise DataError(f"{train.source}: every row is also in {held_out.source}; nothing is left to train on.")
        return train.subset(~shared, f"{int(shared.sum())} rows that are also in {held_out.source}")
    first = int(np.flatnonzero(shared)[0])
    known = int(np.flatnonzero(held_out.digests == train.digests[first])[0])
    raise DataError(
        f"{int(shared.sum())} of {len(train)} training rows are also in {held_out.source}, so its scores would "
        f"flatter: {train.place(first)} {'answers the prompt of' if train.judged else 'equals'} "
        f"{held_out.place(known)}.\n"
        "  Write data.overlap=drop to leave them out of training."
    )


def _cleaned(
    train: Mapping[str, TokenizedSet], files: Mapping[str, DataConfig], template: RowEncoder
) -> dict[str, TokenizedSet]:
    """Training rows of each source without those that `data.clean` flags, duplicates in an earlier source included.

    Held-out rows are chosen before: other rules, same scores.
    """
    (rules,) = {config.clean for config in files.values()}
    if not rules:
        return dict(train)
    places = {name: [example_of(place) for place in each.places()] for name, each in train.items()}
    cleaning_reports = cleaning.clean_sources(
        [
            (
                config.train,
                cleaning.row_texts_at(
                    config.train, places[name], config, limit=config.limit, conversion=template.conversion
                ),
            )
            for name, config in files.items()
        ],
        rules,
    )
    return {
        name: replace(each.subset(own.kept(places[name])), cleaning=own)
        for (name, each), own in zip(train.items(), cleaning_reports, strict=True)
    }


def _decontaminated(
    train: TokenizedSet, sets: Mapping[str, Iterable[TextRow]], config: DataConfig, template: RowEncoder
) -> TokenizedSet:
    """`train`, compared with every evaluation set as `data.decontaminate` says; its texts are read a second time."""
    wanted = config.decontaminate
    if wanted.action == "off":
        return train
    sets = {**sets, **decontamination.named_sets(config)}
    contamination_report = decontamination.find_contamination(
        train.source, _texts(train, config, template, limit=config.limit), sets, wanted
    )
    train = replace(train, contamination=contamination_report)
    if wanted.action != "drop" or not contamination_report.matches:
        return train
    dropped = {match.train for match in contamination_report.matches}
    kept = np.fromiter((example_of(place) not in dropped for place in train.places()), dtype=bool, count=len(train))
    return train.subset(kept, f"{len(contamination_report.matches)} rows that hold the text of evaluation rows")


def _selected(train: TokenizedSet, parts: Mapping[str, TokenizedSet], config: DataConfig, *, seed: int) -> TokenizedSet:
    """The rows of `train` that `data.select` keeps; where it chooses by texts, these are read a second time. `parts`:
    the rows of each source, of which `train` consists."""
    if config.select.by == "all":
        return train

    def texts() -> Iterator[str]:
        for name, own in config.training_files.items():
            rows_of = (len(list(rows)) for _, rows in itertools.groupby(map(example_of, parts[name].places())))
            for row, count in zip(_texts(parts[name], own, limit=own.limit), rows_of, strict=True):
                yield from itertools.repeat(" ".join(row.texts), count)

    kept, note = selection.selected(
        config.select, train.lengths, seed=seed, texts=texts, target=partial(decontamination.texts_of, config)
    )
    return train.subset(kept, note)


def of_files(tokens: TokenizedSet, files: Mapping[str, DataConfig]) -> Iterator[tuple[TokenizedSet, DataConfig]]:
    """Yield the rows of each of several files of a set, and how that is read; all rows where there is one. `files`:
    each file by the name that its rows have in the set; see `DataConfig.files_of`."""
    if not tokens.sources:
        yield tokens, files[""]
        return
    for number, name in enumerate(tokens.sources):
        rows = tokens.subset(tokens.source_N == number)
        yield replace(rows, source=files[name].train, sources={}, prefixes=()), files[name]


def raw_rows(tokens: TokenizedSet, config: DataConfig) -> Iterator[RawRow]:
    """The row of the file that each example came from, in their order, which is that of the file."""
    groups = itertools.groupby(map(example_of, tokens.places()))
    following = next(groups, None)
    for row in itertools.islice(read_rows(starter.resolve(tokens.source), config), config.limit):
        if following is not None and row.place == following[0]:
            yield from itertools.repeat(row, len(list(following[1])))
            following = next(groups, None)


def _texts(
    tokens: TokenizedSet, config: DataConfig, template: RowEncoder | None = None, *, limit: int | None = None
) -> Iterator[TextRow]:
    """The texts of the rows of a set, in their order, which is that of the file; rows of one example have one.
    `template`: reads them; None: as their format says."""
    wanted = (place for place, _ in itertools.groupby(map(example_of, tokens.places())))
    following = next(wanted, None)
    conversion, reader = (None, None) if template is None else (template.conversion, template.reader)
    read = formats.read(
        starter.resolve(tokens.source), config, skipped=[], limit=limit, conversion=conversion, reader=reader
    )
    for example in read:
        if example.place == following:
            yield decontamination.text_row(example)
            following = next(wanted, None)


def example_of(place: str) -> str:
    """Place of the example that became the row of a place, such as `rows.jsonl, row 3, answer 1 of 2`, or a block."""
    return re.sub(r", (answer|block) \d+ of \d+$", "", place)
