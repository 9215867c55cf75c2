"""Recomputed elementwise operations give the same bits, and what they read is all that stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

from tests.adapters import contract
from tests.conftest import tiny
from tests.workbench.models.test_attention_backend import SHAPES
from tests.workbench.models.test_attention_backend import STILL as DROPOUTS
from workbench.adapters import METHODS, Lora, anatomy, attach, row_dropout
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.config.sections.basic_sections import ModelConfig
from workbench.losses import chunked_loss
from workbench.models import activation_recomputation, backbones, fused_lora
from workbench.models.activation_recomputation import Tiled, Tiling, recomputing_elementwise
from workbench.planning.counters import LiveBytes
from workbench.training import activation_checkpointing
from workbench.training.activation_checkpointing import keep

CPU = torch.device("cpu")
STILL = {"T5": {"dropout_rate": 0.0}, "Bert": {"attention_probs_dropout_prob": 0.0}, "GPT2": {"attn_pdrop": 0.0}}
LENGTH = 23
TILES = (1, 5, 22)


def _gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    draw = RowDraw(0, 3, np.arange(2))
    with drawing([draw], CPU):
        model(**contract.inputs(model)).loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.nightly(but=["Llama-lora"])
@pytest.mark.parametrize("method", ["lora", "dora", "houlsby", "full"])
@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "GPT2", "Bert", "T5", "Mixtral"])
def test_gradients_are_equal_to_the_last_bit_with_dropout(kind: str, method: str) -> None:
    section = contract.section(method)
    if "dropout" in type(section).model_fields:
        section = section.model_copy(update={"dropout": 0.3})
    model: Any = contract.attach(contract.build(kind, **STILL.get(kind, {})), section)
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                each += 0.02 * torch.randn_like(each)
    fused_lora.fuse(model)
    for module in model.train().modules():
        if type(module) is nn.Dropout:  # the backbone's own draws other numbers each time
            module.p = 0.0
    backbone = model if method == "full" else model.get_base_model()
    kept = _gradients(model)
    for wanted in ("elementwise", 0.5):
        activation_checkpointing.keep(backbone, wanted)
        again = _gradients(model)
        assert len(again) == len(kept) > 0
        assert all(torch.equal(one, other) for one, other in zip(again, kept, strict=True))


def _peak(forward: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, Tensor]:
    """Bytes that a forward pass leaves, and the gradient of its input."""
    x = x.clone().requires_grad_()
    with LiveBytes() as alive:
        loss = forward(x).sum()
        left = alive.now
        loss.backward()
    assert x.grad is not None
    return left, x.grad


def test_of_a_gated_mlp_after_a_norm_the_products_alone_stay() -> None:
    """The norm's wide copy, its root and result, SiLU and the product before the last layer are not kept."""
    torch.manual_seed(0)
    tokens, width, mlp, element = 64, 16, 48, torch.float32.itemsize
    gate, up, down = (torch.randn(*shape) for shape in ((width, mlp), (width, mlp), (mlp, width)))
    weight = torch.randn(width)

    def forward(x: Tensor) -> Tensor:
        wide = x.double()
        normal = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).float()
        return (F.silu(normal @ gate) * (normal @ up)) @ down

    x = torch.randn(tokens, width)
    kept, wanted = _peak(forward, x)
    left, found = _peak(lambda x: recomputing_elementwise(forward, x), x)
    assert torch.equal(found, wanted)
    products, roots, scalar = 2 * tokens * mlp * element, 2 * tokens * torch.float64.itemsize, element
    assert left == products + roots // 2 + scalar, "a root is computed from its sum of squares"
    assert kept >= 1.7 * left


def test_a_result_smaller_than_what_it_reads_stays_itself() -> None:
    """Reading again would keep float32 of softmax in place of its bfloat16."""
    scores = torch.randn(64, 64)

    def forward(x: Tensor) -> Tensor:
        return (x + scores).softmax(-1).bfloat16() @ torch.ones(64, 1, dtype=torch.bfloat16, requires_grad=True)

    x = torch.randn(64, 64)
    kept, wanted = _peak(forward, x)
    left, found = _peak(lambda x: recomputing_elementwise(forward, x), x)
    assert left == kept and torch.equal(found, wanted)


def test_what_is_overwritten_is_read_before() -> None:
    """A cast's gradient needs none of its values, so that autograd lets them be overwritten."""
    weight = torch.randn(8, 8, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        product = x @ weight
        wide = product.double()
        product.mul_(0.0)
        doubled = wide * 2
        narrow = doubled.float() + 0
        doubled.add_(1.0)  # a result that is itself overwritten, after another has read it
        return wide.sin().float() @ weight + narrow @ weight + doubled.cos().float() @ weight

    x = torch.randn(4, 8)
    forward(x).sum().backward()
    wanted, weight.grad = weight.grad, None
    recomputing_elementwise(forward, x).sum().backward()
    assert wanted is not None and torch.equal(weight.grad, wanted)


def test_nothing_is_alive_after_the_backward_pass() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    seen: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        product = x @ weight
        seen.append(weakref.ref(product))
        return F.silu(product) @ weight

    gc.disable()
    try:
        recomputing_elementwise(forward, torch.randn(4, 8)).sum().backward()
        assert seen[0]() is None, "without the collector of cycles"
    finally:
        gc.enable()


def test_a_graph_that_is_kept_is_walked_twice() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    loss = recomputing_elementwise(lambda x: (F.silu(x @ weight) * 3) @ weight, torch.randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    once = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)


def test_weights_that_are_unpacked_and_results_nobody_keeps_are_let_go_of() -> None:
    """As without recomputing, or a block would hold all of its weights unpacked until its end."""
    codes, x = torch.ones(64, 64, dtype=torch.int8), torch.randn(4, 64, requires_grad=True)

    class Unpacked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ (codes.float() * 0.01)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def forward(x: Tensor) -> Tensor:
        for _ in range(4):
            x = Unpacked.apply(x) + 1  # type: ignore[no-untyped-call]
        return x

    peaks = []
    for call in (forward, lambda x: recomputing_elementwise(forward, x)):
        with LiveBytes() as alive:
            call(x)
        peaks.append(alive.peak)
    assert peaks[1] == peaks[0]


def _model(family: str = "llama", adapter: Any = None, dtype: torch.dtype = torch.float64) -> Any:
    name, shape = SHAPES[family]
    model = tiny(name, **shape, **dict.fromkeys(DROPOUTS, 0.0))
    method = adapter or Lora(rank=3)
    attached = model.requires_grad_(True) if adapter == "full" else attach(model, method, seed=0)
    for path, each in attached.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(each, std=0.3)
    return attached.to(dtype).train()


def _gradients_tiled_mlp(model: Any, *, again: bool = False, draw: RowDraw | None = None) -> dict[str, Tensor]:
    """The loss of random tokens and all gradients of it, by name."""
    ids = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if again:
        keep(model, True)
        model.train()
    with row_dropout.drawing([draw], torch.device("cpu")) if draw else nullcontext():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return {"loss": loss.detach()} | {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def _assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor], *, off: float) -> None:
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=off, atol=off * float(each.abs().max()))


@pytest.mark.nightly(but=["llama-kept", "llama-recomputed", "gpt2-recomputed"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["gemma", "gpt2", "granite", "llama", "mistral", "qwen3"])
def test_loss_and_gradients_are_those_of_whole_rows(family: str, again: bool) -> None:
    for dtype, off in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        wanted = _gradients_tiled_mlp(_model(family, dtype=dtype))
        for tokens in TILES if dtype == torch.float64 else TILES[1:2]:
            model = _model(family, dtype=dtype)
            activation_recomputation.tile_mlps(model, tokens)
            assert sum(isinstance(each, Tiled) for each in model.modules()) == 2
            _assert_alike(_gradients_tiled_mlp(model, again=again), wanted, off=off)


@pytest.mark.parametrize(
    "adapter",
    ["full", METHODS["houlsby"](), METHODS["dora"](), METHODS["vera"](), METHODS["last-layers"](layers=1)],
    ids=["full", "houlsby", "dora", "vera", "last-layers"],
)
def test_other_methods_are_summed_over_tiles_too(adapter: Any) -> None:
    """Copies of weights are computed with in float32."""
    copied = isinstance(adapter, METHODS["last-layers"])
    dtype, off = (torch.float32, 2e-5) if copied else (torch.float64, 1e-10)
    model = _model(adapter=adapter, dtype=dtype)
    wanted = _gradients_tiled_mlp(model)
    model = _model(adapter=adapter, dtype=dtype)
    activation_recomputation.tile_mlps(model, 5)
    assert sum(isinstance(each, Tiled) for each in model.modules()) == 2
    _assert_alike(_gradients_tiled_mlp(model, again=True), wanted, off=off)


@pytest.mark.parametrize("fused", [False, True], ids=["peft", "fused"])
@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_packed_weights_give_tiles_what_they_give_whole_rows(weights: str, fused: bool, short_stories: str) -> None:
    """Tiles dequantise the same codes; no input here is an outlier, which 8-bit layers would look for by tile."""
    found = []
    for tokens in (None, 5):
        model = _packed(weights, short_stories)
        if fused:
            fused_lora.fuse(model)
        activation_recomputation.tile_mlps(model, tokens)
        assert any(isinstance(each, Tiled) for each in model.modules()) is bool(tokens)
        found.append(_gradients_tiled_mlp(model, again=True))
    _assert_alike(found[1], found[0], off=2e-5)
    assert all(each.abs().max() > 0 for each in found[0].values())


def _packed(weights: str, folder: str) -> Any:
    """A backbone whose blocks bitsandbytes holds, with LoRA whose B is not zero."""
    loaded = backbones.load(ModelConfig.model_validate({"id": folder, "weights": weights, "compute": "float32"}), None)
    model = attach(loaded.model, Lora(rank=3), seed=0)
    for path, each in model.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(each, std=0.3, generator=torch.Generator().manual_seed(len(path)))
    return model.train()


def test_equals_the_mlp_written_out() -> None:
    """down(silu(gate(x)) * up(x)) with LoRA, and its gradients by the chain rule, tile by tile."""
    torch.manual_seed(0)
    mlp: Any = (
        LlamaMLP(LlamaConfig(hidden_size=6, intermediate_size=10, num_attention_heads=1)).double().requires_grad_(False)
    )
    mlp.up_proj.weight.requires_grad_()
    mlp.tiling = Tiling(4, ())
    mlp.__class__ = type("Tiles", (Tiled, LlamaMLP), {})
    x_LD = torch.randn(1, 11, 6, dtype=torch.float64, requires_grad=True)
    output = mlp(x_LD)
    grad = torch.randn_like(output)
    output.backward(grad)
    gate, up, down = (each.weight.detach() for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    x, g = x_LD.detach()[0], grad[0]
    a, b = x @ gate.T, x @ up.T
    sigmoid = torch.sigmoid(a)
    torch.testing.assert_close(output[0], (a * sigmoid * b) @ down.T)
    h = g @ down
    by_b, by_a = h * a * sigmoid, h * b * sigmoid * (1 + a * (1 - sigmoid))
    torch.testing.assert_close(mlp.up_proj.weight.grad, by_b.T @ x)
    assert x_LD.grad is not None
    torch.testing.assert_close(x_LD.grad[0], by_b @ up + by_a @ gate)


def _passes(model: Any, run: Any) -> float:
    """Forward passes of a whole row that the MLP of the first block makes."""
    tokens = 0

    def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal tokens
        tokens += inputs[0].shape[1]

    block: Any = anatomy.decoder_layers(model)[0]
    handle = block.mlp.gate_proj.register_forward_pre_hook(count)
    run()
    handle.remove()
    return tokens / LENGTH


def test_a_block_that_is_computed_again_computes_its_mlp_twice_and_not_three_times() -> None:
    for tokens in (None, 5):
        model = _model()
        activation_recomputation.tile_mlps(model, tokens)
        assert _passes(model, lambda model=model: _gradients_tiled_mlp(model, again=True)) == 2


def test_what_the_mlp_computes_exists_for_one_tile() -> None:
    """Its peak over a long row is far below the bytes of one intermediate array of it."""
    torch.manual_seed(0)
    mlp: Any = LlamaMLP(LlamaConfig(hidden_size=4, intermediate_size=256, num_attention_heads=1)).requires_grad_(False)
    peaks = []
    for tokens in (4096, 64):
        mlp.__class__ = LlamaMLP
        mlp.tiling = Tiling(tokens, ())
        mlp.__class__ = type("Tiles", (Tiled, LlamaMLP), {})
        with LiveBytes() as live:
            x_LD = torch.randn(1, 4096, 4, requires_grad=True)
            mlp(x_LD).sum().backward()
        peaks.append(live.peak)
    array = 4096 * 256 * 4
    assert peaks[0] > 3 * array and peaks[1] < array / 2


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_dropout_by_rows_is_the_same_in_any_tile(packed: bool) -> None:
    lengths = np.array([LENGTH, LENGTH]) if not packed else np.array([20, 26])
    draw = RowDraw(seed=1, step=2, rows=np.array([7, 3]), lengths=lengths, packed=packed)
    ids = torch.randint(3, 64, (1, 46) if packed else (2, LENGTH), generator=torch.Generator().manual_seed(1))
    found = []
    for tokens in (None, 1, 7):
        model = _model(adapter=Lora(rank=3, dropout=0.4))
        activation_recomputation.tile_mlps(model, tokens)
        with row_dropout.drawing([draw], torch.device("cpu")):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        grads = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        found.append({"loss": loss.detach()} | grads)
    for each in found[1:]:
        _assert_alike(each, found[0], off=1e-12)
    assert abs(found[0]["loss"] - _gradients_tiled_mlp(_model())["loss"]) > 1e-4, "it drops something"


def test_auto_waits_until_a_block_is_computed_again_or_nobody_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_recomputation, "LEAST_TILE", 5)
    model = _model()
    activation_recomputation.tile_mlps(model, "auto")
    (tokens,) = {each.tiling.tokens for each in model.modules() if isinstance(each, Tiled)}
    assert tokens == 32, "the hidden size, where that is more"
    for each in model.modules():
        if isinstance(each, Tiled):
            each.tiling = Tiling(5, each.tiling.block)
    assert _passes(model, lambda: _gradients_tiled_mlp(model)) == 1
    block: Any = anatomy.decoder_layers(model)[0]
    with torch.no_grad():
        assert block.mlp.tiling.is_on
    assert not block.mlp.tiling.is_on
    keep(model, True)
    assert block.mlp.tiling.is_on and not _off(block)


def _off(block: nn.Module) -> bool:
    block.eval()
    off: bool = not block.mlp.tiling.is_on  # type: ignore[union-attr]
    block.train()
    return not off


def test_without_gradients_outputs_are_the_same() -> None:
    model = _model().eval()
    ids = torch.arange(3, 3 + LENGTH)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        activation_recomputation.tile_mlps(model, 4)
        torch.testing.assert_close(model(input_ids=ids).logits, wanted)


def test_blocks_that_cannot_say_why_and_stay_as_they_are() -> None:
    for model, reason in _unable():
        (block, *_) = anatomy.decoder_layers(model)
        assert reason in (activation_recomputation.tiling_refusal(block) or "")
        activation_recomputation.tile_mlps(model, 4)
        assert not any(isinstance(each, Tiled) for each in model.modules())


def _unable() -> Iterator[tuple[PreTrainedModel, str]]:
    yield tiny("Bert", head="MaskedLM"), "no MLP"
    yield tiny("Mixtral", num_local_experts=2, num_key_value_heads=2), "beside its linear layers"
    yield tiny("GPT2", resid_pdrop=0.1), "drops values"


def test_few_tiles_are_the_first_two_and_the_last() -> None:
    assert list(activation_recomputation._tiles(4, 18)) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 18)]
    with chunked_loss.few_parts():
        assert list(activation_recomputation._tiles(4, 18)) == [(0, 4), (4, 8), (16, 18)]
        assert list(activation_recomputation._tiles(4, 5)) == [(0, 4), (4, 5)]
