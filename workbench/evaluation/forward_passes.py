"""Forward passes without gradients over the rows of a set; their results are kept, so that scoring can be stopped.

As many rows go into each pass as memory holds. A resumed run computes only the rows that have no result yet.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from workbench.adapters import anatomy
from workbench.config import RunConfig
from workbench.data.batching import Indices, micro_batches
from workbench.errors import Stopped, TrainingError
from workbench.runs import files
from workbench.runs.deadline import Deadline
from workbench.runs.ranks import ALONE, Ranks
from workbench.runs.run_directory import Run
from workbench.training import capacity
from workbench.training.distributed.data_parallel import own_rows
from workbench.training.distributed.placement import Placement
from workbench.training.distributed.sharding import is_whole

FILE = "scored_rows.json"  # in a run directory: results of an interrupted scoring, deleted once the scores are written
T = TypeVar("T")
_count: ContextVar[Callable[[int], None] | None] = ContextVar("_count", default=None)


@contextmanager
def progress(say: Callable[[str], object], *, every: float = 3.0) -> Iterator[None]:
    """Inside the block, `say` is told every few seconds how many rows passed through a model; a row counts once for
    each adapter and view."""
    began = latest = time.monotonic()
    passed = 0

    def count(rows: int) -> None:
        nonlocal latest, passed
        passed += rows
        if (now := time.monotonic()) - latest >= every:
            latest = now
            say(f"{passed:,} forward passes of rows, {passed / (now - began):,.0f} a second, {now - began:.0f} s")

    token = _count.set(count)
    try:
        yield
    finally:
        _count.reset(token)


class ResultStore:
    """Results of rows by model and set of rows.

    Args:
        folder: Where FILE is; None in a process that writes no file.
        stop_requested: Whether a person asked the run to stop.
        deadline: Of the run.
        ranks: Processes that score the same rows together, and stop together.
        dealt: Processes that each score a shard of the rows, and exchange results.
    """

    def __init__(
        self,
        folder: Path | None,
        stop_requested: Callable[[], bool],
        deadline: Deadline | None = None,
        ranks: Ranks = ALONE,
        dealt: Ranks = ALONE,
    ) -> None:
        self.dealt = dealt
        self._folder, self._stop_requested, self._ranks = folder, stop_requested, ranks
        self._deadline = deadline or Deadline()
        kept: dict[str, list[tuple[int, Any]]] = {} if folder is None else files.read_json(folder / FILE)
        self._found = {name: dict(rows) for name, rows in ranks.agreed(kept).items()}

    def by(self, model: str) -> ModelResults:
        """Results of one model, by a name that is unique in the run."""
        return ModelResults(self, model)

    def results(self, name: str) -> dict[int, Any]:
        """Results of a model for the rows of a set, by row number."""
        return self._found.setdefault(name, {})

    def clear(self) -> None:
        """Delete all results, once the scores are written."""
        self._found.clear()
        if self._folder is not None:
            (self._folder / FILE).unlink(missing_ok=True)

    @property
    def stopping(self) -> bool:
        """Whether a person asked a process to stop, or time is over; all processes must call this together."""
        return self._ranks.any(self._stop_requested() or self._deadline.over)

    def stop_if_asked(self) -> None:
        """Save all results and raise Stopped where a person asked for it, or where time is over."""
        requested = self._ranks.any(self._stop_requested())
        if not requested and not self._ranks.any(self._deadline.over):
            return
        if self._folder is not None and any(self._found.values()):
            files.write_json(self._folder / FILE, {name: list(rows.items()) for name, rows in self._found.items()})
        if requested:
            raise Stopped("Stopped while scoring; what is scored so far is kept.")
        raise self._deadline.overrun()


@dataclass(frozen=True)
class ModelResults:
    """Results of one model."""

    store: ResultStore
    model: str

    def results(self, content: Iterable[np.ndarray[Any, Any]]) -> dict[int, Any]:
        """Results for a set of rows by row number; the caller adds to it, values that JSON can hold. `content`: all
        arrays that the rows consist of, by which the set is recognised."""
        digest = hashlib.sha256()
        for array in content:
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return self.store.results(f"{self.model} {digest.hexdigest()[:32]}")


def dealt_results(ranks: Ranks) -> ModelResults | None:
    """The results of rows that are sharded over these processes; None where there is one process."""
    return None if ranks.alone else ResultStore(None, lambda: False, dealt=ranks).by("shipped")


def stored_results(
    config: RunConfig, run: Run, stop_requested: Callable[[], bool], *, model: str = "after"
) -> ModelResults:
    """The results of a run that may be stopped and resumed; all processes score together where weights are sharded."""
    together = run.ranks if Placement(config.distributed, run.ranks).cuts_weights else ALONE
    return ResultStore(run.path if run.ranks.first else None, stop_requested, run.deadline, together).by(model)


@torch.no_grad()
def over_rows(
    model: nn.Module,
    lengths: Indices,
    compute: Callable[[Indices], Sequence[T] | None],
    *,
    scoring: ModelResults | None = None,
    content: Iterable[np.ndarray[Any, Any]] = (),
) -> list[T]:
    """Results of all rows in order, computed in micro-batches of rows of similar length.

    Where memory runs out, the rows without a result are computed in smaller micro-batches. Where `scoring` shards rows
    over several processes, each computes its shard, and all get all results. Raises Stopped: a person asked for it, or
    the time is over; TrainingError: not even one row fits into memory.

    Args:
        lengths: Tokens of each row.
        compute: Maps the row numbers of a micro-batch to one result per row, or to None where `scoring` stops.
        scoring: Keeps results where the run may be stopped; rows with a kept result are not computed again.
        content: All arrays that the rows consist of; read only with `scoring`.
    """
    device = next(model.parameters()).device
    size = capacity.forward_tokens(device, width=anatomy.hidden_size(model.config))  # type: ignore[arg-type]
    shares_weights = not all(map(is_whole, model.parameters()))
    result_by_row: dict[int, T] = {} if scoring is None else scoring.results(content)
    indices: Indices

    def remaining(fewer: int) -> None:
        nonlocal size
        size = fewer
        missing = np.asarray([row for row in indices if int(row) not in result_by_row], dtype=np.int64)
        for rows in micro_batches(missing, lengths, tokens=fewer):
            if scoring is not None:
                scoring.store.stop_if_asked()
            results = compute(rows)
            if results is not None:
                result_by_row.update(zip(rows.tolist(), results, strict=True))
            if (count := _count.get()) is not None:
                count(len(rows))
            if scoring is not None:
                scoring.store.stop_if_asked()

    dealt = ALONE if scoring is None else scoring.store.dealt
    for indices in micro_batches(own_rows(lengths, dealt), lengths, tokens=size):
        longest = int(lengths[indices].max())
        try:
            # Processes that hold shards of the weights pass through each block together, so none may repeat a pass.
            smallest = size if shares_weights else longest
            capacity.smaller_until_fits(remaining, size, longest=smallest, retry=lambda _: None)
        except torch.OutOfMemoryError:
            raise TrainingError(
                f"Out of memory while scoring rows of {longest} tokens, {max(size, longest)} in a forward pass.\n"
                "  Lower data.max_tokens, or write model.weights=nf4."
            ) from None
    for results in dealt.gathered(result_by_row):
        result_by_row.update(results)
    return [result_by_row[row] for row in range(len(lengths))]
