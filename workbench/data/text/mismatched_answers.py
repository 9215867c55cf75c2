"""Answers to other prompts, by which KTO estimates how far a model is from its reference (arXiv:2402.01306)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow

from workbench.config import DataConfig
from workbench.data import named_sets
from workbench.data.batching import Indices, Row
from workbench.data.text import encoded_rows
from workbench.data.text.encoded_rows import SCHEMA, Emptied, EncodedChunk
from workbench.data.text.token_table import TokenTable
from workbench.data.text.tokenized import cache_folder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError

_AT_ONCE = 1000
"""Rows of a record batch."""


def mismatched(answers: TokenizedSet, config: DataConfig, *, bos: int | None = None) -> TokenizedSet:
    """For each answer its prompt with the answer of the nearest row before (the first follows the last) to another one.

    Which that is depends on the rows alone, so that a reference is asked once. Prompts are cut on the left,
    behind the token that begins a text.

    Args:
        bos: That token, where there is one.

    Raises:
        DataError: All rows have one prompt.
        FileError: The rows cannot be written.
    """
    partner = _partners(answers)
    digest = hashlib.sha256(f"2 {config.max_tokens} {bos}".encode())
    for part in (answers.digests, answers.lengths, answers.supervised, partner):
        digest.update(np.ascontiguousarray(part).tobytes())
    digest.update(str(answers.fingerprint).encode() + answers.rows.tobytes() + answers.table.identity.encode())
    path = cache_folder() / "tokens" / f"{digest.hexdigest()[:32]}-mismatched.arrow"
    if not path.exists():
        encoded_rows.write(path, _chunks(answers, partner, config.max_tokens, bos), config)
    table = TokenTable.from_file(path)
    return TokenizedSet(
        table, np.arange(len(table)), answers.source, answers.fingerprint, chat=answers.chat, collate=answers.collate
    )


def _partners(answers: TokenizedSet) -> Indices:
    """Number of the row whose answer each row gets, one of its own set where there are several."""
    partner = np.arange(len(answers))
    for name, own in (named_sets.rows_by_set(answers) or {"": np.arange(len(answers))}).items():
        where = f"{answers.source}, set {name}" if name else answers.source
        partner[own] = own[_partners_within(answers.digests[own], where)]
    return partner


def _partners_within(digests: npt.NDArray[np.uint64], where: str) -> Indices:
    count = len(digests)
    if count < 2 or (digests == digests[0]).all():
        raise DataError(
            f"{where}: prefer.loss=kto compares with answers to other prompts, and these {count} row(s) have "
            "one prompt. Give rows of two prompts at least, or write prefer.loss=dpo for pairs."
        )
    partner = np.roll(np.arange(count), 1)
    while (same := digests[partner] == digests).any():
        partner[same] -= 1
    partner_rows: Indices = partner % count
    return partner_rows


def _chunks(answers: TokenizedSet, partner: Indices, max_tokens: int, bos: int | None) -> Iterator[EncodedChunk]:
    for start in range(0, len(answers), _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, len(answers)))
        columns = [_columns(answers, number, int(partner[number]), max_tokens, bos) for number in numbers]
        rows = {name: [each[name] for each in columns] for name in SCHEMA.names}
        yield EncodedChunk(pyarrow.RecordBatch.from_pydict(rows, schema=SCHEMA), [], Emptied())


def _columns(answers: TokenizedSet, number: int, partner: int, max_tokens: int, bos: int | None) -> dict[str, object]:
    asked, given = answers[number], answers[partner]
    start, stop = _answer_start(asked), _answer_start(given)
    excess = max(0, start + len(given.input_ids) - stop - max_tokens)
    first = int(asked.input_ids[0] == bos)
    ids = np.concatenate([asked.input_ids[:first], asked.input_ids[first + excess : start], given.input_ids[stop:]])
    loss = np.concatenate([asked.supervised[:first], asked.supervised[first + excess : start], given.supervised[stop:]])
    return {
        "input_ids": ids,
        "supervised": loss,
        "place": f"{answers.place(number)} with the answer of {answers.place(partner)}",
        "digest": int(answers.digests[number]),
        "length": len(ids),
        "source": max(0, asked.source - excess),
        "targets": int(loss[1:].sum()),
        "ends": 0,
        "truncated": excess > 0,
        "chat": answers.chat,
        "weight": 1.0,
        "desired": 0,
        "margin": 0.0,
        "tie": False,
        "step_labels": None,
        "cut_steps": 0,
    }


def _answer_start(row: Row) -> int:
    """Tokens of the prompt, with which a row begins."""
    return row.source or int(np.argmax(row.supervised))
