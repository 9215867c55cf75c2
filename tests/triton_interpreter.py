"""Liger's kernels on a CPU: Triton interprets them there, where it is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, kernels of Triton compute with tensors on a CPU. Skips where Triton or Liger-Kernel is missing.

    Whether Triton interprets is decided where it is imported. Its interpreter hands numbers with a fraction on as
    Python has them, and Liger's kernels convert them, as they can on a GPU: here they are scalars of float32. Functions
    of CUDA's library, which it lacks, are written with those of Triton's language.
    """
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1 before Triton is imported")
    pytest.importorskip("liger_kernel")
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    import numpy as np
    import triton.language as tl

    convert = interpreter._implicit_cvt

    def with_fractions(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", with_fractions)
        patch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda x: tl.math.rsqrt(x))
        patch.setattr("liger_kernel.ops.geglu.tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
        yield
