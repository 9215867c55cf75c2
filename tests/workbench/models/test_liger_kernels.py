"""Liger's kernels compute what a family's own modules do, forward and backward, at the same roundings.

Those that call kernels run with TRITON_INTERPRET=1 where liger-kernel and triton are installed; all others see which
modules change. In half precision float16 alone is compared: Triton's interpreter stores bfloat16 wrongly.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from tests.conftest import tiny
from tests.triton_interpreter import interpreted
from workbench.adapters import METHODS, Lora, attach
from workbench.models import activation_recomputation, fused_lora, liger_kernels
from workbench.models.liger_kernels import OUTLINES, GatedMlp, GemmaNorm, LlamaNorm
from workbench.training.activation_checkpointing import keep

GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": GROUPED,
    "Qwen3": {},
    "Gemma": {**GROUPED, "head_dim": 8},
    "Gemma2": {},
    "Gemma3Text": {},
}
"""Every module of theirs that norms, gates or rotates has a kernel; with what `tiny` leaves out."""
NORMS = {"Qwen3": 9, "Gemma2": 9, "Gemma3Text": 13}
"""Norms of two blocks and the last one; 5 in other families."""
TURNED = ("Falcon", "GPTNeoX", "Phi")
"""Families of which at most the rotation is one of these formulas."""
UNLIKE = ("GPT2", "OPT")
"""Families in which nothing is one of these formulas."""


@pytest.fixture
def kernels() -> Iterator[None]:
    with interpreted():
        yield


def _norm(kind: str, width: int, dtype: torch.dtype) -> Any:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm: nn.Module = (Gemma2RMSNorm if kind == "gemma" else LlamaRMSNorm)(width)
    nn.init.normal_(norm.weight, 0.7, 0.2)  # type: ignore[arg-type]
    return norm.to(dtype)


def _results(work: Any, inputs: list[Tensor], gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs, and gradients of the inputs, of copies in a precision."""
    own = [each.detach().to(dtype).requires_grad_() for each in inputs]
    found = work(*(each * 1 for each in own))  # kernels overwrite what is computed, never a leaf
    outputs = list(found) if isinstance(found, tuple) else [found]
    torch.autograd.backward(outputs, [each.to(dtype) for each in gradients])
    return [each.detach().double() for each in (*outputs, *(own_each.grad for own_each in own))]  # type: ignore[union-attr]


def _assert_within_rounding(
    by_kernel: Any, written_out: Any, inputs: list[Tensor], gradients: list[Tensor], dtype: torch.dtype, roundings: int
) -> None:
    """Compare with float64 from the same values, by roundings of the precision at the size of the largest result."""
    rounded = [each.to(dtype).double() for each in (*inputs, *gradients)]
    inputs, gradients = rounded[: len(inputs)], rounded[len(inputs) :]
    exact = _results(written_out, inputs, gradients, torch.float64)
    for found, wanted in zip(_results(by_kernel, inputs, gradients, dtype), exact, strict=True):
        off = roundings * torch.finfo(dtype).eps * float(wanted.abs().max())
        assert float((found - wanted).abs().max()) <= off


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_norm(kind: str, dtype: torch.dtype, kernels: None) -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(2, 7, 24), 0.7 + 0.2 * torch.randn(24), torch.randn(2, 7, 24)
    addend = 1.0 if kind == "gemma" else 0.0

    def written_out(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + addend)

    def by_kernel(x: Tensor, weight: Tensor) -> Tensor:
        return liger_kernels.liger().norm(x, weight, 1e-6, addend, kind)

    _assert_within_rounding(by_kernel, written_out, [x, weight], [grad], dtype, roundings=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_gate(kind: str, dtype: torch.dtype, kernels: None) -> None:
    torch.manual_seed(0)
    gate, up, grad = (torch.randn(2, 7, 24) for _ in range(3))

    def written_out(gate: Tensor, up: Tensor) -> Tensor:
        if kind == "silu":
            return gate / (1 + (-gate).exp()) * up
        return 0.5 * gate * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up

    _assert_within_rounding(getattr(liger_kernels.liger(), kind), written_out, [gate, up], [grad], dtype, roundings=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2], ids=["positions of all rows", "of each"])
def test_rotation(rows: int, dtype: torch.dtype, kernels: None) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 2, 8)
    angle = torch.rand(rows, 7, 4).repeat(1, 1, 2)
    cos, sin = (each.to(dtype).double() for each in (angle.cos(), angle.sin()))

    def turned(states: Tensor) -> Tensor:
        """Each pair (i, i + E/2) is a complex number, turned by its angle."""
        first, second = states.transpose(1, 2).chunk(2, -1)
        c, s = cos[:, None, :, :4], sin[:, None, :, :4]
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    def by_kernel(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        rotate = liger_kernels.liger().rotate
        return rotate(query.transpose(1, 2), key.transpose(1, 2), cos.to(dtype), sin.to(dtype))

    grads = [torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)]
    _assert_within_rounding(by_kernel, lambda q, k: (turned(q), turned(k)), [query, key], grads, dtype, roundings=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_of_a_family_change(family: str) -> None:
    model = tiny(family, **FAMILIES[family])
    before = [type(each).__name__ for each in model.modules()]
    liger_kernels.install(model)
    kinds = Counter(type(each).__mro__[1] for each in model.modules() if isinstance(each, liger_kernels._ByKernel))
    norm = GemmaNorm if family.startswith("Gemma") else LlamaNorm
    assert kinds == {norm: NORMS.get(family, 5), GatedMlp: 2, liger_kernels._ByKernel: 2}
    assert [type(each).__name__ for each in model.modules()] == before
    assert liger_kernels.known(model)


def test_formulas_that_no_kernel_computes_stay() -> None:
    for family in UNLIKE:
        model = tiny(family)
        assert not liger_kernels.known(model)
        liger_kernels.install(model)
        assert not any(isinstance(each, liger_kernels._ByKernel) for each in model.modules())
    relu = tiny("Llama", hidden_act="relu")
    liger_kernels.install(relu)
    assert not any(isinstance(each, GatedMlp) for each in relu.modules())


def test_precisions_that_no_kernel_has_are_computed_as_ever() -> None:
    ids = torch.randint(3, 64, (2, 9))
    model = tiny("Qwen3").double()
    wanted = model(ids).logits
    liger_kernels.install(model)
    assert torch.equal(model(ids).logits, wanted)


def _gradients(model: Any, way: Any = False) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    keep(model, way)
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def _attached(family: str, method: str) -> Any:
    adapter = Lora(rank=3) if method == "lora" else METHODS[method](method=method)
    model = attach(tiny(family, **FAMILIES.get(family, {})).requires_grad_(False), adapter, seed=0)
    for each in model.parameters():
        if each.requires_grad:
            with torch.no_grad():
                each.add_(torch.randn(each.shape, generator=torch.Generator().manual_seed(2)), alpha=0.1)
    fused_lora.fuse(model)
    return model


def _assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=3e-5, atol=3e-5 * float(each.abs().max()))


@pytest.mark.parametrize("family", [*FAMILIES, *TURNED])
def test_gradients_of_a_model(family: str, kernels: None) -> None:
    wanted = _gradients(_attached(family, "lora"))
    model = _attached(family, "lora")
    liger_kernels.install(model)
    _assert_alike(_gradients(model), wanted)


@pytest.mark.parametrize("method", ["ia3", "layernorm", "full", "dora"])
def test_adapters_over_and_inside_of_what_changes_train(method: str, kernels: None) -> None:
    wanted = _gradients(_attached("Llama", method))
    model = _attached("Llama", method)
    liger_kernels.install(model)
    _assert_alike(_gradients(model), wanted)


@pytest.mark.parametrize("way", [True, "elementwise"])
def test_activations_that_are_computed_again(way: Any, kernels: None) -> None:
    """Whole blocks by kernels; operation by operation without them, which would overwrite what is noted."""
    wanted = _gradients(_attached("Qwen3", "ia3"))
    model = _attached("Qwen3", "ia3")
    liger_kernels.install(model)
    _assert_alike(_gradients(model, way), wanted)


def test_where_operations_are_noted_kernels_stand_back() -> None:
    seen = []
    activation_recomputation.recomputing_elementwise(lambda: seen.append(activation_recomputation.is_noting()))
    assert seen == [True]
    assert not activation_recomputation.is_noting()


def _kept(kernels: Any, *, fake: bool) -> list[tuple[int, torch.dtype]]:
    """Values and precisions of what a norm, a gate and a rotation keep for the backward pass."""
    kept: list[Tensor] = []
    with FakeTensorMode() if fake else nullcontext():
        x, weight = torch.randn(2, 10, 64, requires_grad=True), torch.randn(64)
        gate, up = x * 2, x * 3
        query, key = ((x * number).view(2, 10, 4, 16).transpose(1, 2) for number in (2, 3))
        cos = torch.randn(1, 10, 16)
        with saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
            outputs = kernels.norm(x, weight, 1e-6, 0.0, "llama"), kernels.silu(gate, up)
            turned = kernels.rotate(query, key, cos, cos)
        torch.autograd.grad([*outputs, *turned], x, [torch.ones_like(each) for each in (*outputs, *turned)])
    return [(each.numel(), each.dtype) for each in kept]


def test_a_plan_counts_what_kernels_keep(kernels: None) -> None:
    assert _kept(OUTLINES, fake=True) == _kept(liger_kernels.liger(), fake=False)


def test_the_refusal_says_what_is_missing() -> None:
    assert "computes on its CPU" in str(liger_kernels.refusal(torch.device("cpu")))
    missing = liger_kernels.refusal(torch.device("cuda"))
    assert missing is None or "pip install liger-kernel" in missing


@pytest.mark.slow
def test_the_kernels_are_interpreted_where_they_are_installed() -> None:
    """The tests above in a process of their own, whose Triton interprets."""
    import subprocess
    import sys

    pytest.importorskip("liger_kernel")
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
