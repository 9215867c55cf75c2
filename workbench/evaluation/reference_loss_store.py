"""Losses of a reference model on every supervised token of the training rows, computed once and kept on disk.

The folder's name is a hash of the model and of the content of the rows. The losses are written part by part, so that a
killed process continues where it was.

Legend: N supervised tokens.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import torch
from torch import nn

from workbench import losses
from workbench.data.batching import Indices
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import Stopped
from workbench.evaluation.forward_passes import over_rows
from workbench.models.output_heads import Head
from workbench.runs import files
from workbench.runs.files import cache_folder
from workbench.runs.ranks import ALONE
from workbench.runs.run_directory import Run
from workbench.training.distributed.placement import Reading
from workbench.training.row_losses import Floats32
from workbench.training.sampling import loss_based
from workbench.training.sampling.loss_based import reference_parts, reference_path

VERSION = 1  # part of the folder's name: raise it when losses are computed in another way
_AT_ONCE = 2**16  # rows that are hashed at a time


class Answerer(NamedTuple):
    """A model that computes the losses of rows."""

    model: nn.Module
    answer: Callable[[Indices], Sequence[Floats32]]  # maps row numbers to the losses of each row's supervised tokens
    read: Reading  # runs a function while the model may be called
    together: bool  # whether each process holds a shard of the weights, so that all must read the same rows


def folder(identity: Sequence[Any], rows: TokenizedSet) -> Path:
    """The folder of the losses of a model on these rows. `identity`: everything that the model's losses depend on, as
    JSON values."""
    digest = hashlib.sha256(json.dumps([VERSION, loss_based.PART, *identity], sort_keys=True).encode())
    for name in ("input_ids", "supervised", "source"):
        column = rows.table.data.column(name)
        for start in range(0, len(rows), _AT_ONCE):
            for chunk in column.take(pyarrow.array(rows.rows[start : start + _AT_ONCE])).chunks:
                values = chunk.flatten() if pyarrow.types.is_list(chunk.type) else chunk
                digest.update(values.to_numpy(zero_copy_only=False).tobytes())
    digest.update(rows.lengths.tobytes())
    return cache_folder() / "reference" / digest.hexdigest()[:32]


def missing(where: Path, rows: TokenizedSet) -> list[int]:
    """Numbers of the parts that are not on disk."""
    return [part for part in range(len(reference_parts(rows.supervised))) if not reference_path(where, part).exists()]


def write(
    where: Path,
    rows: TokenizedSet,
    answerer: Answerer,
    run: Run,
    stop_requested: Callable[[], bool],
) -> None:
    """Compute the missing parts: each process a shard of them, or all processes each part together. Raises Stopped: a
    person asked for it, or time is over; finished parts are kept."""
    ranks, bounds = run.ranks, reference_parts(rows.supervised)
    wanted, apart = ranks.agreed(missing(where, rows)), ranks
    if answerer.together:
        wanted, apart = sorted({part for own in ranks.gathered(missing(where, rows)) for part in own}), ALONE
    for start in range(0, len(wanted), apart.world):
        for part in wanted[start + apart.rank : start + apart.rank + 1]:
            part_losses = answerer.read(partial(_losses, np.arange(*bounds[part]), rows, answerer))
            if not answerer.together or ranks.local == 0:  # one process of each machine
                _write_part(reference_path(where, part), part_losses)
        if ranks.any(stop_requested()) and start + apart.world < len(wanted):
            raise Stopped("Stopped while the reference read; what it has read so far is kept.")
        if ranks.any(run.deadline.over):
            raise run.deadline.overrun()
    ranks.wait()
    for part in missing(where, rows):  # another machine has its own folder
        _write_part(reference_path(where, part), _losses(np.arange(*bounds[part]), rows, answerer))


def _losses(chosen: Indices, rows: TokenizedSet, answerer: Answerer) -> Floats32:
    return np.concatenate(over_rows(answerer.model, rows.lengths[chosen], lambda at: answerer.answer(chosen[at])))


def _write_part(file: Path, losses: Floats32) -> None:
    buffer = io.BytesIO()
    np.save(buffer, losses)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(file, buffer.getvalue())


@torch.no_grad()
def token_losses(model: nn.Module, head: Head, rows: TokenizedSet, numbers: Indices) -> list[Floats32]:
    """Losses of the supervised tokens of each of some rows, in nats."""
    batch = rows.batch(numbers)
    row_N = batch.row_of_label
    batch = batch.to(next(model.parameters()).device)
    hidden_ND = head.supervised(model, batch.inputs, batch.positions_N)
    loss_N, _ = losses.token_scores(hidden_ND, batch.labels_N, head.project, vocabulary=head.vocabulary)
    ends = np.cumsum(np.bincount(row_N.numpy(), minlength=len(numbers)))
    return np.split(loss_N.float().cpu().numpy(), ends[:-1])
