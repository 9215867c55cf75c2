"""Size of a micro-batch, in tokens: found before the first step, and remembered for later runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from workbench.config import TrainingSections
from workbench.config.sections.basic_sections import Checkpointing
from workbench.data.batching import Examples, Indices
from workbench.errors import ConfigError, TrainingError
from workbench.models.weight_formats import HALVES
from workbench.runs import files
from workbench.runs.files import cache_folder
from workbench.runs.ranks import Ranks
from workbench.training.step_metrics import forget_peak, peak_bytes

T = TypeVar("T")

WITHOUT_TENSORS = {"seed", "data", "evaluate", "save", "trackers", "budget", "schedule", "plugins"}
"""Sections of the configuration on which the memory of a step depends only through the lengths of rows."""

CPU_ELEMENTS, CPU_TOKENS = 2**18, 640
"""On a CPU, the size of a micro-batch in tokens times hidden width, and its fewest tokens: larger ones take more
memory, and more time because they exceed the processor's caches.

Processor time of a step, of 2,300 tokens in short rows at width 384 (512 / 768 / 1,365 / 2,600 tokens a micro-batch):
2.10, 2.13, 2.53, 3.05 s in float32; nf4 2.11, 2.22, 2.23, 2.61. Of 2,600 tokens in rows of 170 at width 768, bfloat16
(256 / 384 / 683 / 1,400): 9.6, 9.5, 9.3, 10.1.
"""
HALF_BANK_ELEMENTS = 2**19
"""The same for a bank in half precision, whose members' low-rank products gain from more rows.

Processor time of the gradients of five members' 160 short rows at width 384, packed, in half precision (683 / 1,400 /
2,800 tokens a micro-batch): 2.02, 1.76, 1.71 s; 2,800 take 100 MB more. In float32: 2.17, 1.99, 2.00.
"""
EVEN_CPU_ELEMENTS = 2**20
"""The same where all rows have one length, as pictures have, so that larger micro-batches have no more padding.

Processor time of a bank's step of 160 pictures of 65 patches at width 160 (1,638 / 4,096 / 10,400 patches a
micro-batch): 0.78, 0.60, 0.62 s in bfloat16; 1.39, 1.38, 1.37 in float32 (the last of 8,192). Of 32 pictures of 197 at
width 384, bfloat16 (682 / 1,576 / 3,152 / 6,304): 1.95, 1.79, 1.75, 1.72.
"""


SPARE = 0.1
"""Share of the memory that a pass which is foreseen must leave free: allocators cannot join all of it."""

FORWARD_TOKENS, MOST_FORWARD_TOKENS = 4096, 2**16
"""Padded tokens of a forward pass without gradients: on a CPU and at least elsewhere; at most."""
FORWARD_ELEMENTS = 32
"""Float32 numbers in such a pass for each token and hidden feature: hidden states, an MLP four times as wide with its
gate, keys and values of a generation."""


def tokens_per_device(
    config: TrainingSections,
    train: Examples,
    device: torch.device,
    *,
    width: int,
    members: int = 1,
    compute: torch.dtype = torch.float32,
) -> int:
    """Tokens of a micro-batch as configured, checked against the longest row; for `auto` the most worth trying.

    Args:
        width: Hidden size of the backbone.
        members: Adapters with a batch each in a step.
        compute: Precision of the matrix products of several members.
    """
    require_longest_fits(config, train)
    wanted = config.batch.tokens_per_device
    if wanted != "auto":
        return wanted
    own = longest_part(config, train.lengths)
    whole_batch = own * config.batch.size * config.rows_of_draw * members
    if limits_steps(device):
        # Processes that compute rows together cannot try separately how many fit; they are meant for one row at a time.
        return whole_batch if config.distributed.rows_together == 1 else own
    elements = HALF_BANK_ELEMENTS if members > 1 and compute in HALVES else CPU_ELEMENTS
    if train.lengths.max() == train.lengths.min():
        elements = EVEN_CPU_ELEMENTS
    return min(whole_batch, max(own, CPU_TOKENS, elements // width))


def limits_steps(device: torch.device) -> bool:
    """Whether a step may take all memory of the device, so that it decides how large a micro-batch is."""
    return device.type != "cpu"


def longest_part(config: TrainingSections, lengths: Indices) -> int:
    """Tokens of the longest row that one device computes."""
    return -(-int(lengths.max()) // config.distributed.sequence)


def available(device: torch.device) -> int:
    """Free memory of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def forward_tokens(device: torch.device, *, width: int) -> int:
    """Padded tokens worth trying in one forward pass without gradients.

    On an accelerator as many as fill half of its free memory, rounded down to a power of two, so that the last bits of
    scores do not depend on every megabyte that is free. On a CPU a constant: more are not faster.

    Args:
        width: Hidden size of the backbone.
    """
    if device.type == "cpu":
        return FORWARD_TOKENS
    room = available(device) // 2 // (4 * FORWARD_ELEMENTS * width)
    return max(FORWARD_TOKENS, min(MOST_FORWARD_TOKENS, 1 << max(0, room.bit_length() - 1)))


def require_longest_fits(config: TrainingSections, train: Examples) -> None:
    """Raise ConfigError where the configured budget is below the longest row."""
    own, wanted = longest_part(config, train.lengths), config.batch.tokens_per_device
    devices = config.distributed.sequence
    if wanted != "auto" and wanted < own:
        share = f", of which each of {devices} devices computes {own}" if devices > 1 else ""
        raise ConfigError(
            f"batch.tokens_per_device: {wanted} is below the longest example ({train.lengths.max()} tokens, "
            f"{train.place(int(train.lengths.argmax()))}{share}).\n"
            f"  Raise it to {own}, write auto, or set data.max_tokens to cut longer examples."
        )


def smaller_until_fits(compute: Callable[[int], T], tokens: int, *, longest: int, retry: Callable[[int], None]) -> T:
    """Result of `compute(tokens)`; where memory runs out, with half as many tokens, and so on.

    Args:
        tokens: The most to try, of tokens or of anything else that takes memory.
        longest: Tokens of the longest row, the fewest that are tried.
        retry: Called with the smaller number before it is tried, to free memory and to report.

    Raises:
        torch.OutOfMemoryError: not even one row fits.
    """
    while True:
        try:
            return compute(tokens)
        except torch.OutOfMemoryError:
            if tokens <= longest:
                raise
        # Outside of the handler, whose traceback holds the tensors of the failed pass.
        tokens = max(longest, tokens // 2)
        retry(tokens)


def room(device: torch.device) -> int:
    """Bytes that tensors of this process may hold on the device in all."""
    return available(device) + (torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)


def growing_passes(lengths: Indices, *, tokens: int) -> list[Indices]:
    """Rows of forward passes, each of which has about twice the tokens of the one before: single rows, of an eighth of
    the longest one's length and more, then several of the longest, up to so many tokens.

    >>> [rows.tolist() for rows in growing_passes(np.array([9, 2, 5, 8]), tokens=27)]
    [[1], [2], [0], [0, 3], [0, 3, 2]]
    """
    order, longest = (-lengths).argsort(kind="stable"), int(lengths.max())
    passes, least = list[Indices](), longest / 8
    while least < longest:
        passes.append(order[lengths[order] >= least][-1:])
        least = min(longest, 2 * int(lengths[passes[-1][0]]))
    counts, most = [1], min(len(order), max(1, tokens // longest))
    while counts[-1] < most:
        counts.append(min(most, 2 * counts[-1]))
    return [rows for rows in passes if lengths[rows[0]] < longest] + [order[:count] for count in counts]


def largest_foreseen(
    passes: list[Indices], train: Examples, compute: Callable[[Indices], None], *, device: torch.device, ranks: Ranks
) -> int:
    """Tokens of the largest pass that fits in the memory of every process; they compute each pass together.

    A process that ran out of memory within a pass would leave the others waiting for it. So the memory of each pass is
    foreseen from those of the two before it, and it is computed only where all have room.

    Args:
        passes: Of growing size.
        compute: A forward and a backward pass over some rows.

    Raises:
        TrainingError: the smallest pass does not fit, or one that was foreseen to.
    """
    forget_peak(device)
    taken = [(0, peak_bytes(device))]
    for rows in (passes[0], *passes):  # the first pass of all makes room for what an engine keeps
        size = int(train.lengths[rows].max()) * len(rows)
        if len(taken) > 1 and size > taken[-1][0]:
            (less, low), (more, high) = taken[-2:]
            foreseen = high + (high - low) / (more - less) * (size - more)
            if ranks.any(foreseen > (1 - SPARE) * room(device)):
                break
        forget_peak(device)
        try:
            compute(rows)
        except torch.OutOfMemoryError:
            if len(taken) == 1:
                raise nothing_fits(int(train.lengths.max()), train) from None
            raise TrainingError(
                f"Out of memory with {size} tokens in a forward pass, for which there seemed to be room.\n"
                f"  Write batch.tokens_per_device={taken[-1][0]}"
            ) from None
        taken = [each for each in taken if each[0] < size] + [(size, peak_bytes(device))]
    return taken[-1][0]


class Fitting(NamedTuple):
    """A way to compute a step that fits in memory."""

    tokens: int
    """In a forward pass."""
    checkpointing: Checkpointing


@dataclass(frozen=True)
class Remembered:
    """Ways to compute a step that fitted in earlier runs like this one; written only where memory was the limit.

    Args:
        config: All sections except `WITHOUT_TENSORS` are part of the key.
        longest: Tokens of the longest row.
        signal: `TrainingSignal.settings`, such as the teacher of a distillation.
        processes: That train together, each of which may hold a share.
    """

    config: TrainingSections
    longest: int
    signal: Mapping[str, Any]
    processes: int = 1

    def read(self) -> Fitting | None:
        """None where memory limited no earlier run."""
        if not self._path.exists():
            return None
        kept = json.loads(self._path.read_text())
        return Fitting(int(kept["tokens_per_device"]), kept["checkpointing"])

    def write(self, tokens: int, checkpointing: Checkpointing) -> None:
        """Remember the number of tokens that fits, and how activations are kept."""
        files.write_json(self._path, {"tokens_per_device": tokens, "checkpointing": checkpointing})

    @cached_property
    def _path(self) -> Path:
        device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
        key = [
            self.config.model_dump(mode="json", exclude=WITHOUT_TENSORS),
            self.longest,
            dict(self.signal),
            self.processes,
            str(torch.accelerator.current_accelerator()),
            device and [device.name, device.total_memory],
        ]
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        return cache_folder() / "fitting" / f"{name}.json"


def nothing_fits(longest: int, train: Examples) -> TrainingError:
    """The error where no micro-batch is small enough."""
    return TrainingError(
        f"Not even one example fits into memory: the longest has {longest} tokens "
        f"({train.place(int(train.lengths.argmax()))}).\n"
        "  Lower data.max_tokens, write train.checkpointing=true where the method allows it, or model.weights=nf4."
    )
