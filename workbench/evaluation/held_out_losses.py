"""Losses of held-out rows before and after training, kept in the run directory: they are compared in pairs.

Legend: S rows.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from workbench.data.batching import Indices, evenly_spaced
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import FileError
from workbench.evaluation.comparison import Floats, PairedScore, t_test
from workbench.evaluation.perplexity import SummedLosses
from workbench.runs import files

FILE = "held_out_losses.parquet"
BEFORE = "held_out_losses_before.parquet"
"""Those of the model that training started from."""
MOST = 2**20  # most rows that are kept, evenly spaced
_AT_ONCE, _PADDED = 2**12, 2**6  # rows that are written at a time, and rows of one padded batch
_ROWS = b"rows"
_SCHEMA = pa.schema([("row", pa.string()), ("tokens", pa.int64()), ("loss", pa.float64()), ("labels", pa.uint64())])


@dataclass(frozen=True)
class KeptLosses:
    """Rows of FILE, in the order of their places."""

    table: pa.Table
    rows: int  # number of rows that were scored

    @property
    def loss_S(self) -> Floats:
        """Loss of each row in nats, summed over its supervised tokens."""
        return np.asarray(self.table["loss"].to_numpy(), dtype=np.float64)

    @property
    def tokens_S(self) -> Floats:
        """Number of supervised tokens of each row."""
        return np.asarray(self.table["tokens"].to_numpy(), dtype=np.float64)


def write(folder: Path, rows: TokenizedSet, losses: SummedLosses, name: str = FILE) -> None:
    """Write FILE, or BEFORE: for each row its place, number of supervised tokens, their summed loss in nats and a hash.

    Memory is bounded: rows are read a few thousand at a time, and at most MOST are kept.
    """
    kept_S = evenly_spaced(len(rows), MOST)
    buffer = io.BytesIO()
    schema = _SCHEMA.with_metadata({_ROWS: str(len(rows))})
    with pq.ParquetWriter(buffer, schema, compression="zstd") as writer:
        for start in range(0, len(kept_S), _AT_ONCE):
            part_S = kept_S[start : start + _AT_ONCE]
            columns = {
                "row": list(rows.subset(part_S).places()),
                "tokens": losses.tokens_N[part_S],
                "loss": losses.loss_N[part_S],
                "labels": list(_hashes(rows, part_S, losses.tokens_N[part_S])),
            }
            writer.write_table(pa.table(columns, schema=schema))
    files.write_bytes(folder / name, buffer.getvalue())


def _hashes(rows: TokenizedSet, part_S: Indices, tokens_S: Indices) -> Iterator[int]:
    """A hash of the supervised tokens of each row, as they were predicted: recipe mlm masks at random."""
    for start in range(0, len(part_S), _PADDED):
        ends_S = np.cumsum(tokens_S[start : start + _PADDED])
        labels_N = rows.batch(part_S[start : start + _PADDED]).labels_N.numpy()
        assert ends_S[-1] == len(labels_N)
        for labels in np.split(labels_N, ends_S[:-1]):
            yield int.from_bytes(hashlib.blake2b(labels.tobytes(), digest_size=8).digest(), "little")


def read(folder: Path, name: str = FILE) -> KeptLosses | None:
    """The losses that a run kept; None where it kept none. Raises FileError where the file is damaged."""
    path = folder / name
    if not path.exists():
        return None
    try:
        table = pq.read_table(path, columns=_SCHEMA.names)
        rows = int((table.schema.metadata or {}).get(_ROWS, table.num_rows))
        table = table.cast(_SCHEMA)
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: damaged ({error}). Restore it, or train again.") from None
    return KeptLosses(table.sort_by([("row", "ascending"), ("labels", "ascending")]), rows)


def intervals(kept: KeptLosses) -> dict[str, tuple[float, float]]:
    """Student's 95 % intervals of the mean loss per token and of the perplexity, as in `paired`; empty for one row."""
    bounds = paired(np.zeros_like(kept.loss_S), kept.loss_S, kept.tokens_S).interval
    if bounds is None:
        return {}
    low, high = np.exp(bounds).tolist()
    return {"loss": bounds, "perplexity": (low, high)}


def learnt(folder: Path) -> PairedScore | None:
    """The mean loss per token before and after the training of a run; None where not both were kept."""
    before, after = read(folder, BEFORE), read(folder)
    found = None if before is None or after is None else compare(before, after)
    return None if isinstance(found, str) else found


def compare(first: KeptLosses, second: KeptLosses) -> PairedScore | str:
    """The mean loss per token of two runs over the same rows, or why they cannot be compared."""
    if first.rows != second.rows or not first.table["row"].equals(second.table["row"]):
        return f"their held-out rows are not the same ({first.rows:,} and {second.rows:,})"
    if not all(first.table[name].equals(second.table[name]) for name in ("tokens", "labels")):
        return "other tokens of the held-out rows carry loss: they are cut, masked or chosen otherwise"
    return paired(first.loss_S, second.loss_S, first.tokens_S)


def paired(first_S: Floats, second_S: Floats, tokens_S: Floats) -> PairedScore:
    """The difference of two mean losses per token, by the ratio estimator over rows (Cochran 1977, section 6.3).

    With T = sum t_s tokens and d_s = l2_s - l1_s, the difference is D = sum d_s / T, and its linearised variance
    S / (S - 1) * sum (d_s - D t_s)^2 / T^2; rows are the sample, as tokens of one row are not independent. Interval and
    p are those of Student's t with S - 1 degrees of freedom; for rows of one length they equal the paired t-test's.

    Args:
        first_S: Summed loss of each row in nats.
        tokens_S: Tokens over which it is summed.
    """
    count, tokens, difference_S = len(first_S), tokens_S.sum(), second_S - first_S
    residual_S = difference_S - difference_S.sum() / tokens * tokens_S
    error = float(np.sqrt(count / max(1, count - 1) * (residual_S**2).sum()) / tokens)
    means = float(first_S.sum() / tokens), float(second_S.sum() / tokens)
    return PairedScore("loss", count, *means, *t_test(means[1] - means[0], error, count))
