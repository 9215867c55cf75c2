"""Codes against the formulas of their papers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.training.distributed.block_codes import BlockCode, Kind


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 9 - 4)


@given(seed=st.integers(0, 99), block=st.sampled_from([8, 24]), chunks=st.integers(1, 3), blocks=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_they_are_those_of_the_papers(seed: int, block: int, chunks: int, blocks: int) -> None:
    found = values(seed, chunks, blocks * block)
    found[0, :block] = 0.0
    for kind in ("int8", "onebit"):
        code = BlockCode(kind, block)  # type: ignore[arg-type]
        codes = code.encode(found)
        assert codes.dtype == torch.uint8 and codes.shape == (chunks, code.nbytes(blocks * block))
        for chunk, decoded in zip(found.tolist(), code.decode(codes).tolist(), strict=True):
            for start in range(0, len(chunk), block):
                own = chunk[start : start + block]
                mean, step = sum(map(abs, own)) / block, max(map(abs, own)) / 127
                for value, read in zip(own, decoded[start : start + block], strict=True):
                    if kind == "onebit":
                        assert read == pytest.approx(mean if value >= 0 else -mean, rel=1e-5)
                    else:
                        assert abs(read - value) <= step * 0.501
                        assert step == 0 or abs(read / step - round(read / step)) < 1e-3


@pytest.mark.parametrize("kind", ["int8", "onebit"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(kind: Kind, value: float) -> None:
    found = values(4, 1, 32)
    found[0, 3] = value
    first, second = BlockCode(kind, 16).decode(BlockCode(kind, 16).encode(found))[0].split(16)
    assert not first.isfinite().any() and second.isfinite().all()


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8 + 32 / 256), ("onebit", 1 + 32 / 256)])
def test_bits_of_a_value(kind: Kind, bits: float) -> None:
    assert BlockCode(kind, 256).nbytes(1024) * 8 / 1024 == bits
