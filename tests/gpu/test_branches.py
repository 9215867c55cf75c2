"""Functions that do one thing on an accelerator and another on a CPU, called on both."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.conftest import tiny
from tests.gpu.devices import DEVICE, HERE, gpu_alone, needs_device
from workbench.adapters.precision.peft_layers import InInputPrecision
from workbench.config import ModelConfig, RunConfig
from workbench.data.batching import Row, collate
from workbench.data.prefetch import Prefetcher
from workbench.errors import BackboneError, ConfigError
from workbench.losses.chunked_loss import CHUNK_ELEMENTS, MEMORY_SHARE, _chunk_elements
from workbench.losses.next_token import next_token
from workbench.losses.token_log_probs import token_log_probs
from workbench.models import attention_backend, backbones, flash_kernels, liger_kernels
from workbench.planning import step_time
from workbench.recipes.verbs import doctor
from workbench.runs.run_directory import hardware
from workbench.training import capacity, packing, step_metrics
from workbench.training.optim import optimizers

pytestmark = needs_device

LIMITS: dict[str, Any] = {"recipe": "sft", "data": {"train": "x.jsonl"}}


def on_both(work: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradient of the first tensor, on the CPU and here, all on the CPU."""
    found = []
    for device in (torch.device("cpu"), DEVICE):
        first, *others = (each.to(device) for each in tensors)
        first = first.detach().requires_grad_()
        result = work(first, *others)
        result.sum().backward()
        assert first.grad is not None
        found.append(torch.cat([result.detach().flatten().cpu(), first.grad.flatten().cpu()]))
    return found


def head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(37, 32), torch.randint(50, (37,)), torch.randn(50, 32)


def test_losses_of_tokens() -> None:
    hidden_ND, labels_N, weight_VD = head()

    def loss(hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        project = partial(F.linear, weight=weight)
        return next_token(hidden, labels, project, vocabulary=50, weights=[], scale=0.5)

    cpu, here = on_both(loss, hidden_ND, labels_N, weight_VD)
    torch.testing.assert_close(here, cpu, rtol=1e-4, atol=1e-5)


def test_log_probabilities_of_tokens() -> None:
    hidden_ND, labels_N, weight_VD = head()

    def log_probs(hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return token_log_probs(hidden, labels, partial(F.linear, weight=weight), vocabulary=50, weights=[])

    cpu, here = on_both(log_probs, hidden_ND, labels_N, weight_VD)
    torch.testing.assert_close(here, cpu, rtol=1e-4, atol=1e-5)


def test_chunks_are_larger_where_there_is_more_memory() -> None:
    elements = _chunk_elements(DEVICE)
    assert elements >= CHUNK_ELEMENTS == _chunk_elements(torch.device("cpu"))
    assert not HERE or elements == int(MEMORY_SHARE * hardware()["memory_bytes"]) // 4


def test_attention_of_short_rows() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 9, 8) for _ in range(3))
    module = SimpleNamespace(is_causal=True, num_key_value_groups=1)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        halves = (each.bfloat16() for each in (query, key, value))
        return attention_backend.attend_short_rows(cast(Any, module), *halves, None)[0].float()

    cpu, here = on_both(attend, query, key, value)
    torch.testing.assert_close(here, cpu, rtol=0.05, atol=0.05)


def test_memory_and_tokens_of_a_pass() -> None:
    assert capacity.available(DEVICE) > 0 and step_metrics.peak_bytes(DEVICE) >= 0
    tokens = capacity.forward_tokens(DEVICE, width=64)
    assert tokens & (tokens - 1) == 0 and capacity.FORWARD_TOKENS <= tokens <= capacity.MOST_FORWARD_TOKENS
    config = RunConfig.model_validate({**LIMITS, "batch": {"size": 1000}})
    rows = cast(Any, SimpleNamespace(lengths=np.array([65, 65])))
    assert capacity.tokens_per_device(config, rows, DEVICE, width=64) == (65_000 if HERE else 2**20 // 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 4])
def test_packed_rows_see_themselves_alone(dtype: torch.dtype, heads: int) -> None:
    """In one kernel in half precision, row by row in full."""
    lengths_B, layer = torch.tensor([40, 7, 7, 1]), torch.nn.Identity()
    layer.num_key_value_groups = 4 // heads
    starts = F.pad(lengths_B.cumsum(0), (1, 0)).int()
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, each, 55, 16, generator=draw) for each in (4, heads, heads)]

    def attend(*rows: torch.Tensor) -> torch.Tensor:
        given = {"row_lengths": lengths_B, "row_starts": starts.to(rows[0].device), "is_causal": True}
        return attention_backend.attend(layer, *(each.to(dtype) for each in rows), None, **given)[0].float()

    cpu, here = on_both(attend, *rows)
    close = 0.05 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(here, cpu, rtol=close, atol=close)


@pytest.mark.skipif(not HERE, reason="no accelerator here, so no kernel of flash attention")
def test_the_flash_attention_that_computes_here_agrees_with_float32() -> None:
    """torch's own, or the newer one that is installed for this card."""
    said = flash_kernels.activate(DEVICE, torch.bfloat16, dropout=False)
    assert said is None or said.startswith("attention by")
    assert flash_kernels.difference_from_float32(DEVICE) < flash_kernels.LEAST_LIKE


def test_what_packs_unasked() -> None:
    config = tiny("Llama").config
    assert packing.refusal(config, longest=10, reads_packed=True) is None
    at_once = attention_backend.packs_in_one_kernel(config, DEVICE, torch.bfloat16)
    assert at_once == HERE and not attention_backend.packs_in_one_kernel(config, DEVICE, torch.float32)
    assert packing.pays(0.5, compute=torch.bfloat16, at_once=at_once)


def test_precision_and_attention() -> None:
    config = ModelConfig(id="x")
    assert isinstance(backbones.has_bfloat16_units(DEVICE), bool)
    assert backbones._attention(config, torch.float32, DEVICE) is None
    if not HERE:
        with pytest.raises(BackboneError, match="flex_attention has no gradients on a CPU"):
            backbones._attention(ModelConfig(id="x", attention="flex_attention"), torch.float32, DEVICE)


@pytest.mark.parametrize("name", ["paged_adamw", "adamw8bit"])
def test_optimizers_of_a_device(name: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed here")
    config = RunConfig.model_validate({**LIMITS, "optimizer": {"name": name}})
    if name == "paged_adamw" and not HERE:
        with pytest.raises(ConfigError, match="NVIDIA GPU"):
            optimizers.require(config, device=DEVICE)
    else:
        optimizers.require(config, device=DEVICE)


@gpu_alone("memory is pinned for an accelerator")
def test_rows_come_from_pinned_memory() -> None:
    rows = [Row(np.arange(3, 9), np.arange(6) > 1)] * 2
    ahead = Prefetcher[Any](pin=True)
    batch = ahead.get("a", lambda: collate(rows))
    ahead.close()
    assert batch.labels_N.is_pinned() and all(each.is_pinned() for each in batch.inputs.values())
    assert torch.equal(batch.to(DEVICE).labels_N.cpu(), batch.labels_N)


def test_other_branches() -> None:
    step_time.synchronize(DEVICE)
    assert hardware()["device"] == DEVICE.type
    assert any(fact.subject == "cuda:0" for fact in doctor.accelerator()) == HERE
    layer = type("Layer", (InInputPrecision, torch.nn.Linear), {})(4, 4).to(DEVICE)
    assert layer(torch.ones(2, 4, device=DEVICE, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_ligers_kernels_and_torchs() -> None:
    """One step's loss and gradients, where the kernels are there; a CPU says that it has none."""
    assert "CPU" in str(liger_kernels.refusal(torch.device("cpu")))
    if reason := liger_kernels.refusal(DEVICE):
        pytest.skip(reason)
    ids = torch.randint(3, 64, (2, 40), device=DEVICE)
    found = []
    for with_kernels in (False, True):
        model = tiny("Qwen3").to(DEVICE)
        if with_kernels:
            liger_kernels.install(model)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(each.grad for each in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
