"""Where cuDNN computes attention: on rows that all have one length.

cuDNN prepares a plan for every new shape, which on an H100 takes longer than the rest of a step of a 1 B model, forward
and again backward. Flash attention takes shapes as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from workbench.data.batching import Indices


def forbid() -> None:
    """Let torch take other kernels, in this process."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def allowed(lengths: Sequence[Indices]) -> Iterator[None]:
    """Inside the block cuDNN may compute where its plans are used again.

    Args:
        lengths: Tokens of the rows of each training.
    """
    torch.backends.cuda.enable_cudnn_sdp(len({length for each in lengths for length in (each.min(), each.max())}) == 1)
    try:
        yield
    finally:
        forbid()
