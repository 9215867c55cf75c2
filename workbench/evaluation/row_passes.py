"""Forward passes without gradients over the rows of a set, as many rows in each as memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.adapters import anatomy
from workbench.data.batching import Indices, micro_batches
from workbench.errors import TrainingError
from workbench.evaluation.result_store import ModelResults
from workbench.runs.ranks import ALONE
from workbench.training import capacity
from workbench.training.distributed.pipeline_stage import Absent
from workbench.training.distributed.row_shares import own_rows

T = TypeVar("T")


@torch.no_grad()
def over_rows(
    model: nn.Module,
    lengths: Indices,
    compute: Callable[[Indices], Sequence[T] | None],
    *,
    scoring: ModelResults | None = None,
    content: Iterable[np.ndarray[Any, Any]] = (),
) -> dict[int, T]:
    """Results of rows by their numbers, computed in micro-batches of similar lengths.

    Where memory runs out, the rows without a result are computed in smaller micro-batches. Where `scoring` deals rows
    to several processes, each computes its own, and all get all results.

    Args:
        lengths: Tokens of each row.
        compute: From the numbers of the rows of a micro-batch to a result for each, or to None where `scoring` stops.
        scoring: Results of an earlier process, which are not computed again, where this one may be stopped.
        content: All arrays that the rows consist of; read where there is a `scoring`.

    Raises:
        Stopped: a person asked for it, or the time is over.
        TrainingError: not even one row fits into memory.
    """
    device = next(model.parameters()).device
    size = capacity.forward_tokens(device, width=_width(model))
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
            if scoring is not None:
                scoring.store.stop_if_asked()

    dealt = ALONE if scoring is None else scoring.store.dealt
    for indices in micro_batches(own_rows(lengths, dealt), lengths, tokens=size):
        longest = int(lengths[indices].max())
        try:
            # Processes that share weights pass through each block together, so that none may repeat a pass.
            smallest = size if _shares_weights(model) else longest
            capacity.smaller_until_fits(remaining, size, longest=smallest, retry=lambda _: None)
        except torch.OutOfMemoryError:
            raise TrainingError(
                f"Out of memory while scoring rows of {longest} tokens, {max(size, longest)} in a forward pass.\n"
                "  Lower data.max_tokens, or write model.weights=nf4."
            ) from None
    for results in dealt.gathered(result_by_row):
        result_by_row.update(results)
    return result_by_row


def _width(model: nn.Module) -> int:
    return anatomy.hidden_size(model.config)  # type: ignore[arg-type]


def _shares_weights(model: nn.Module) -> bool:
    """Whether this process holds a share of each weight, by FSDP2 or DeepSpeed, or of the blocks."""
    return any(isinstance(each, DTensor | Absent) or hasattr(each, "ds_id") for each in model.parameters())
