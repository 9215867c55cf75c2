"""Number of torch's threads on a CPU: as many as the arrays of a training are worth, and the same in a resumed run.

The number of threads in a product decides how its sums are rounded. So it depends only on the rows, the backbone and
the cores, not on a measurement, which other work on the machine would change.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.runs.run_directory import Run
from workbench.training.adapter_trainer import AdapterTrainer

ASKED = "OMP_NUM_THREADS"
"""Environment variable with which a user sets the number; it is obeyed."""

WORTH = 2**16
"""Numbers that a layer reads of one adapter's rows, for each thread. With fewer, threads wait for each other as long as
they work.

Microseconds with one thread and with two, the least of thousands, on an AMD EPYC with bfloat16 units. Of 1,638 tokens
at width 160 (2**18 numbers): a product with a square weight 389 and 297, with rank 16 56 and 44, SiLU 142 and 75. Of 80
tokens at width 160, as a member of a bank has them, with rank 16: 16 and 19 (7 and 9 in float32); at width 384: 19, 19.
"""


def worth(tokens: float, width: int, *, most: int) -> int:
    """Number of threads for layers that read `tokens` of this width at once: 1 to `most`."""
    return max(1, min(most, int(tokens * width) // WORTH))


@contextmanager
def chosen(members: Collection[AdapterTrainer], budget: int, backbone: PreTrainedModel) -> Iterator[None]:
    """Inside, torch uses as many threads as the rows of these adapters, which train together, are worth, on a CPU.

    It never uses more than before, and exactly as many where the user asks for a number.

    Args:
        budget: Most tokens in a micro-batch.
    """
    before = torch.get_num_threads()
    if backbone.device.type != "cpu" or ASKED in os.environ:
        yield
        return
    width = anatomy.hidden_size(backbone.config)
    sizes = [each.task.config.batch.size * each.task.config.rows_of_draw for each in members]
    step = sum(size * float(each.task.train.lengths.mean()) for size, each in zip(sizes, members, strict=True))
    torch.set_num_threads(worth(min(step, budget) / len(members), width, most=before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def as_begun(run: Run) -> Iterator[None]:
    """Inside, a resumed run has the threads that it began with, unless the user asks for others; a new run notes them.

    It notes the thread limit, so that every member of a search, including late ones, chooses the same number.
    """
    before, asked = torch.get_num_threads(), os.environ.get(ASKED)
    known = run.manifest.get("threads")
    if known is None and run.ranks.first:
        run.note(threads={"most": before, "asked": asked is not None})
    if known is None or asked is not None:
        yield
        return
    torch.set_num_threads(known["most"])
    if known["asked"]:
        os.environ[ASKED] = str(known["most"])
    try:
        yield
    finally:
        os.environ.pop(ASKED, None)
        torch.set_num_threads(before)
