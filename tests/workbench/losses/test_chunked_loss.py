"""The chunked sum against the criterion of all positions at once, with further tensors of each position."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workbench.training.fake_cuda import CUDA, fake_cuda
from workbench.losses import chunked, next_token
from workbench.losses.chunked_loss import planned_for
from workbench.losses.divergences import forward_kl, log_probs
from workbench.planning.counters import LiveBytes
from workbench.planning.fake_tensors import fake_tensors

N, D, V = 10, 8, 13


def _criterion(logits_nV: Tensor, teacher_nV: Tensor, weights_n: Tensor) -> Tensor:
    """Not the same at every position, so that chunks that are mixed up show."""
    return forward_kl(log_probs(logits_nV, 2.0), teacher_nV) + (weights_n * logits_nV.logsumexp(-1)).sum()


@pytest.mark.parametrize("rows", [1, 3, N, 100])
@pytest.mark.parametrize("head_trains", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradients_equal_the_whole(
    monkeypatch: pytest.MonkeyPatch, rows: int, head_trains: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(sys.modules["workbench.losses.chunked_loss"], "CHUNK_ELEMENTS", V * rows)
    torch.manual_seed(0)
    head = nn.Linear(D, V, dtype=dtype).requires_grad_(head_trains)
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    known = [log_probs(torch.randn(N, V, dtype=dtype), 2.0), torch.rand(N, dtype=dtype)]
    weights = [*head.parameters()] if head_trains else []
    seen = []

    def project(hidden_nD: Tensor) -> Tensor:
        seen.append(len(hidden_nD))
        return head(hidden_nD)

    wanted = _criterion(head(hidden), *known) * 0.25
    wanted_grads = torch.autograd.grad(wanted * 3, [hidden, *weights])
    found = chunked(hidden, known, _criterion, project, vocabulary=V, weights=weights, scale=0.25)
    found_grads = torch.autograd.grad(found * 3, [hidden, *weights])
    torch.testing.assert_close((found, *found_grads), (wanted, *wanted_grads))
    assert max(seen) == min(rows, N) and sum(seen) == N


class _Peak(TorchDispatchMode):
    """The most float32 copies of a tensor that are in memory at once, by bytes, counting all arrays of its size."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.size, self.most = tensor.numel(), 0.0
        self._live = {tensor.untyped_storage()._cdata: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.numel() >= self.size:
            storage = found.untyped_storage()
            if storage._cdata not in self._live:
                self._live[storage._cdata] = found.nbytes
                weakref.finalize(storage, self._live.pop, storage._cdata)
        self.most = max(self.most, sum(self._live.values()) / (4 * self.size))
        return found


@pytest.mark.parametrize(("dtype", "arrays"), [(torch.float32, 1), (torch.bfloat16, 1.5)])
def test_a_trained_head_takes_one_gradient(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, arrays: float) -> None:
    """Of float32, beside its copy in the precision of the head: no array of its size for a chunk or the backward."""
    vocabulary, width = 9000, 40
    monkeypatch.setattr(sys.modules["workbench.losses.chunked_loss"], "CHUNK_ELEMENTS", 4 * vocabulary)
    head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
    hidden = torch.randn(12, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (12,))
    next_token(hidden, labels, head, vocabulary=vocabulary, weights=[head.weight], scale=1.0).backward()
    assert head.weight.grad is not None
    wanted, head.weight.grad = head.weight.grad, None
    with _Peak(head.weight) as peak:
        next_token(hidden, labels, head, vocabulary=vocabulary, weights=[head.weight], scale=1.0).backward()
    assert peak.most <= arrays
    assert torch.equal(head.weight.grad, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_holds_its_logits_and_their_gradient(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In the precision of the head; no float32 copy of them: softmax and gradient take a few positions at a time."""
    vocabulary, rows = 4096, 64
    monkeypatch.setattr(sys.modules["workbench.losses.chunked_loss"], "CHUNK_ELEMENTS", rows * vocabulary)
    monkeypatch.setattr(sys.modules["workbench.losses.next_token"], "CACHED_ELEMENTS", 4 * vocabulary)
    head = nn.Linear(8, vocabulary, bias=False, dtype=dtype).requires_grad_(False)
    hidden = torch.randn(3 * rows, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (3 * rows,))
    with LiveBytes() as live:
        next_token(hidden, labels, head, vocabulary=vocabulary, weights=[], scale=1.0).backward()
    assert live.peak <= 2.3 * rows * vocabulary * dtype.itemsize


@pytest.mark.parametrize(("memory", "elements"), [(2**30, 2**24), (80 * 2**30, 80 * 2**20)])
def test_a_chunk_takes_a_share_of_an_accelerators_memory(
    monkeypatch: pytest.MonkeyPatch, memory: int, elements: int
) -> None:
    module = sys.modules["workbench.losses.chunked_loss"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    assert module._chunk_elements(torch.device("cuda")) == elements
    assert module._chunk_elements(torch.device("cpu")) == 2**24


def test_a_row_of_300000_positions_takes_the_logits_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient are the unchunked float64's; bytes alive do not grow with positions times vocabulary."""
    width, vocabulary = 2, 128
    monkeypatch.setattr(sys.modules["workbench.losses.chunked_loss"], "CHUNK_ELEMENTS", 10_000 * vocabulary)
    head = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
    peaks = {}
    for rows in (30_000, 300_000):
        hidden = torch.randn(rows, width, requires_grad=True)
        labels = torch.randint(vocabulary, (rows,))
        with LiveBytes() as live:
            loss = next_token(hidden, labels, head, vocabulary=vocabulary, weights=[], scale=1 / rows)
            loss.backward()
        peaks[rows] = live.peak
    growth = (peaks[300_000] - peaks[30_000]) / 270_000
    assert growth <= 8 * width * 4 < vocabulary, "bytes of a position, below a byte of each of its logits"
    exact = hidden.detach().double().requires_grad_()
    wanted = nn.functional.cross_entropy(exact @ head.weight.double().T, labels)
    wanted.backward()
    assert hidden.grad is not None and exact.grad is not None
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("memory", [10**10, 8 * 10**10])
def test_a_cpu_that_stands_for_an_accelerator_takes_its_bytes(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk in float32 exists at once there, and not a few positions at a time as in a CPU's cache."""
    peaks = list[int]()
    for device in (torch.device("cpu"), CUDA):
        with fake_tensors() if device.type == "cpu" else fake_cuda(monkeypatch), planned_for(memory):
            hidden = torch.empty(3001, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
            labels, weight = torch.empty(3001, dtype=torch.int64, device=device), hidden.new_empty(20_000, 64)
            with LiveBytes(device.type) as alive:
                project = partial(F.linear, weight=weight)
                next_token(hidden, labels, project, vocabulary=20_000, weights=[], scale=1.0).backward()
            peaks.append(alive.peak)
    assert peaks[0] == peaks[1] > memory // 256
