"""What FSDP2 gathers and scatters as codes, in one of two processes whose messages are handed over here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from workbench.errors import TrainingError
from workbench.training.distributed.block_codes import BlockCode
from workbench.training.distributed.quantised_shards import QuantisedAllGather, QuantisedReduceScatter
from workbench.training.distributed.wire import Wire

GROUP: Any = SimpleNamespace(size=lambda: 2)
CODE = BlockCode("int8", 8)
SHARD = 21


def near(value: Tensor) -> Tensor:
    """As it comes through: in blocks of 8, the last one shorter."""
    blocks = [block.double() for block in value.split(8)]
    steps = [block.abs().max() / 127 for block in blocks]
    return torch.cat([step * (block / step).round() for block, step in zip(blocks, steps, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everybody_computes_with_what_was_sent(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a shard, too."""
    own, other = torch.randn(2, SHARD, generator=torch.Generator().manual_seed(0)).to(dtype)

    def gather(received: Tensor, sent: Tensor, *, group: object) -> None:
        padded = torch.nn.functional.pad(other.float(), (0, 3))
        received.copy_(torch.cat([sent, CODE.encode(padded[None])[0]]))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    output, wire = torch.empty(2 * SHARD, dtype=dtype), Wire(compressing=True)
    output[:SHARD] = own
    QuantisedAllGather(CODE, wire)(output, output[:SHARD], GROUP)
    wanted = torch.cat([near(own), near(other)])
    torch.testing.assert_close(output.double(), wanted, atol=1e-6, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5)
    assert wire.sent == 24 + 3 * 4


@pytest.mark.parametrize(("op", "factor"), [(dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 0.5)])
def test_gradients_are_rounded_once_and_added_up(op: Any, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, others = torch.randn(2, 2, SHARD, generator=torch.Generator().manual_seed(1))

    def exchange(received: Tensor, sent: Tensor, *, group: object) -> None:
        padded = torch.nn.functional.pad(others[:1], (0, 3))
        received.copy_(torch.cat([sent[:1], CODE.encode(padded)]))

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    output, wire = torch.empty(SHARD), Wire(compressing=True)
    QuantisedReduceScatter(CODE, wire)(output, mine.reshape(-1), GROUP, op)
    wanted = factor * (near(mine[0]) + near(others[0]))
    torch.testing.assert_close(output.double(), wanted, atol=1e-6, rtol=1e-5)
    assert wire.sent == 24 + 3 * 4


def test_weights_of_several_precisions_are_refused() -> None:
    """torch gathers those as bytes."""
    output = torch.empty(2 * SHARD, dtype=torch.uint8)
    with pytest.raises(TrainingError, match=r"Write model\.weights and model.compute alike"):
        QuantisedAllGather(CODE, Wire())(output, output[:SHARD], GROUP)
