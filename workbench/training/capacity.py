"""How many tokens one forward pass may hold: found before the first step, remembered for the next run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch

from workbench.config import RunConfig
from workbench.data.batching import Examples, MicroBatch
from workbench.data.text.tokenized import cache_folder
from workbench.errors import ConfigError
from workbench.runs import files

CPU_ELEMENTS, CPU_TOKENS = 2**18, 640
"""On a CPU, tokens times hidden width of a micro-batch, and the fewest tokens that are worth a pass over the weights:
more takes more memory, and more time out of the caches.

Processor time of a step, of 2,300 tokens in short rows at width 384 (512 / 768 / 1,365 / 2,600 tokens a micro-batch):
2.10, 2.13, 2.53, 3.05 s in float32; nf4 2.11, 2.22, 2.23, 2.61. Of 2,600 tokens in rows of 170 at width 768, bfloat16
(256 / 384 / 683 / 1,400): 9.6, 9.5, 9.3, 10.1.
"""


def tokens_per_device(config: RunConfig, train: Examples, device: torch.device, *, width: int) -> int:
    """The configured budget, checked against the longest row; for `auto` the largest worth trying.

    `width` is the hidden size of the backbone.
    """
    require_longest_fits(config, train)
    wanted = config.batch.tokens_per_device
    if wanted != "auto":
        return wanted
    longest = int(train.lengths.max())
    whole_batch = longest * config.batch.size
    return min(whole_batch, max(longest, CPU_TOKENS, CPU_ELEMENTS // width)) if device.type == "cpu" else whole_batch


def available(device: torch.device) -> int:
    """Bytes of memory that a run could have here."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def require_longest_fits(config: RunConfig, train: Examples) -> None:
    """Raise ConfigError where the configured budget is below the longest row."""
    longest, wanted = int(train.lengths.max()), config.batch.tokens_per_device
    if wanted != "auto" and wanted < longest:
        raise ConfigError(
            f"batch.tokens_per_device: {wanted} is below the longest example ({longest} tokens, "
            f"{train.place(int(train.lengths.argmax()))}).\n"
            f"  Raise it to {longest}, write auto, or set data.max_tokens to cut longer examples."
        )


def largest_that_fits(tokens: int, train: Examples, trial: Callable[[MicroBatch], None], *, config: RunConfig) -> int:
    """Halve `tokens` until a forward and backward pass over the longest rows fits the accelerator's memory.

    Raises:
        torch.OutOfMemoryError: not even one row fits.
    """
    remembered = _memory_file(config, train)
    if remembered.exists():
        return min(tokens, int(json.loads(remembered.read_text())["tokens_per_device"]))
    order = np.argsort(-train.lengths, kind="stable")
    longest = int(train.lengths[order[0]])
    while True:
        try:
            trial(train.batch(order[: max(1, tokens // longest)]))
        except torch.OutOfMemoryError:
            if tokens <= longest:
                raise
            tokens = max(longest, tokens // 2)
            continue
        files.write_json(remembered, {"tokens_per_device": tokens})
        return tokens


def _memory_file(config: RunConfig, train: Examples) -> Path:
    device = torch.accelerator.current_accelerator()
    found = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    what = [
        config.model.model_dump(mode="json"),
        config.adapter.model_dump(mode="json"),
        config.train.checkpointing,
        config.train.compile,
        int(train.lengths.max()),
        str(device),
        found and [found.name, found.total_memory],
    ]
    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "fits" / f"{name}.json"
