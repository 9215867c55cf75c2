"""An MLP in tiles of tokens computes what it computes whole, and no pass more where its block is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

from tests.conftest import tiny
from tests.workbench.models.test_packed_attention import SHAPES, STILL
from workbench.adapters import METHODS, Lora, anatomy, attach, row_dropout
from workbench.adapters.row_dropout import RowDraw
from workbench.config.sections.basic_sections import ModelConfig
from workbench.losses import few_parts
from workbench.models import backbones, fused_lora, tiled_mlp
from workbench.models.tiled_mlp import Tiled, Tiling
from workbench.planning.counters import LiveBytes
from workbench.training.activation_checkpointing import keep

LENGTH = 23
TILES = (1, 5, 22)


def _model(family: str = "llama", adapter: Any = None, dtype: torch.dtype = torch.float64) -> Any:
    name, shape = SHAPES[family]
    model = tiny(name, **shape, **dict.fromkeys(STILL, 0.0))
    method = adapter or Lora(rank=3)
    attached = model.requires_grad_(True) if adapter == "full" else attach(model, method, seed=0)
    for path, each in attached.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(each, std=0.3)
    return attached.to(dtype).train()


def _gradients(model: Any, *, again: bool = False, draw: RowDraw | None = None) -> dict[str, Tensor]:
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
        wanted = _gradients(_model(family, dtype=dtype))
        for tokens in TILES if dtype == torch.float64 else TILES[1:2]:
            model = _model(family, dtype=dtype)
            tiled_mlp.tile(model, tokens)
            assert sum(isinstance(each, Tiled) for each in model.modules()) == 2
            _assert_alike(_gradients(model, again=again), wanted, off=off)


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
    wanted = _gradients(model)
    model = _model(adapter=adapter, dtype=dtype)
    tiled_mlp.tile(model, 5)
    assert sum(isinstance(each, Tiled) for each in model.modules()) == 2
    _assert_alike(_gradients(model, again=True), wanted, off=off)


@pytest.mark.parametrize("fused", [False, True], ids=["peft", "fused"])
@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_packed_weights_give_tiles_what_they_give_whole_rows(weights: str, fused: bool, short_stories: str) -> None:
    """Tiles dequantise the same codes; no input here is an outlier, which 8-bit layers would look for by tile."""
    found = []
    for tokens in (None, 5):
        model = _packed(weights, short_stories)
        if fused:
            fused_lora.fuse(model)
        tiled_mlp.tile(model, tokens)
        assert any(isinstance(each, Tiled) for each in model.modules()) is bool(tokens)
        found.append(_gradients(model, again=True))
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
        tiled_mlp.tile(model, tokens)
        assert _passes(model, lambda model=model: _gradients(model, again=True)) == 2


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
        tiled_mlp.tile(model, tokens)
        with row_dropout.drawing([draw], torch.device("cpu")):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        grads = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        found.append({"loss": loss.detach()} | grads)
    for each in found[1:]:
        _assert_alike(each, found[0], off=1e-12)
    assert abs(found[0]["loss"] - _gradients(_model())["loss"]) > 1e-4, "it drops something"


def test_auto_waits_until_a_block_is_computed_again_or_nobody_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_mlp, "LEAST", 5)
    model = _model()
    tiled_mlp.tile(model, "auto")
    (tokens,) = {each.tiling.tokens for each in model.modules() if isinstance(each, Tiled)}
    assert tokens == 32, "the hidden size, where that is more"
    for each in model.modules():
        if isinstance(each, Tiled):
            each.tiling = Tiling(5, each.tiling.block)
    assert _passes(model, lambda: _gradients(model)) == 1
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
        tiled_mlp.tile(model, 4)
        torch.testing.assert_close(model(input_ids=ids).logits, wanted)


def test_blocks_that_cannot_say_why_and_stay_as_they_are() -> None:
    for model, reason in _unable():
        (block, *_) = anatomy.decoder_layers(model)
        assert reason in (tiled_mlp.refusal(block) or "")
        tiled_mlp.tile(model, 4)
        assert not any(isinstance(each, Tiled) for each in model.modules())


def _unable() -> Iterator[tuple[PreTrainedModel, str]]:
    yield tiny("Bert", head="MaskedLM"), "no MLP"
    yield tiny("Mixtral", num_local_experts=2, num_key_value_heads=2), "beside its linear layers"
    yield tiny("GPT2", resid_pdrop=0.1), "drops values"


def test_few_tiles_are_the_first_two_and_the_last() -> None:
    assert list(tiled_mlp._tiles(4, 18)) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 18)]
    with few_parts.few():
        assert list(tiled_mlp._tiles(4, 18)) == [(0, 4), (4, 8), (16, 18)]
        assert list(tiled_mlp._tiles(4, 5)) == [(0, 4), (4, 5)]
