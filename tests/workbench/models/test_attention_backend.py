"""cuDNN may compute attention where rows have one length, and nowhere else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.conftest import tiny
from tests.workbench.training.fake_cuda import CUDA, fake_cuda
from tests.workbench.training.freezing.fits import build, configured, train
from workbench.data.batching import MicroBatch, Row, collate, encoder_inputs
from workbench.data.packing import PACKED
from workbench.models import attention_backend, output_heads
from workbench.models.attention_backend import FAMILIES, RowCache, RowPart, attend_cached_rows, room
from workbench.planning.counters import LiveBytes, Operations
from workbench.planning.fake_tensors import fake_tensors
from workbench.training import activation_checkpointing
from workbench.training.trainer import Trainer

enabled = torch.backends.cuda.cudnn_sdp_enabled
ROUNDING = 2**-7
"""Relative, of some products in bfloat16, each of which rounds by 2^-9 at most."""
HEADS, GROUPS, WIDTH = 4, 2, 8
LENGTHS = (12, 7, 7, 1)
SHAPES = {
    "bert": ("Bert", {}),
    "gemma": ("Gemma", {"head_dim": 8, "num_key_value_heads": 2}),
    "gpt2": ("GPT2", {"n_positions": 64}),
    "granite": ("Granite", {"num_key_value_heads": 2}),
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 12}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}
STILL = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("lengths", "may"),
    [([[7, 7, 7]], True), ([[7, 8]], False), ([[7, 7], [7]], True), ([[7, 7], [8, 8]], False)],
)
def test_rows_of_one_length_alone(lengths: list[list[int]], may: bool) -> None:
    with attention_backend.cudnn_allowed([np.array(each) for each in lengths]):
        assert enabled() == may
    assert not enabled()


def test_a_training_asks_by_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, follow = list[tuple[bool, bool]](), Trainer._follow_policy

    def noting(self: Trainer) -> None:
        same = int(self.train.lengths.min()) == int(self.train.lengths.max())
        seen.append((enabled(), same))
        follow(self)

    monkeypatch.setattr(Trainer, "_follow_policy", noting)
    train(build("Llama"), configured(train={"steps": 1}), tmp_path / "run")
    ((may, same),) = seen
    assert may == same and not enabled()


class Attending(nn.Module):
    """What models tell about their attention."""

    def __init__(self, groups: int = 1, *, is_causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal


def _inputs(heads: int = 4, shared: int = 4, queries: int = 12, keys: int = 12) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((heads, queries), (shared, keys), (shared, keys))
    return [torch.randn(2, length, count, 8).bfloat16().transpose(1, 2) for count, length in sizes]


def _hidden_tail(queries: int = 12, keys: int = 12) -> Tensor:
    """A mask (B, 1, L, S) that hides the last keys of one row."""
    seen = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    seen[1, :, :, 8:] = False
    return seen


def _both(kernel: Any, module: nn.Module, inputs: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Output and gradients, as float32."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    output, _ = kernel(module, *leaves, mask, dropout=0.0)
    torch.manual_seed(1)
    output.backward(torch.randn(output.shape).to(output.dtype))
    return [output.detach().float(), *(each.grad.float() for each in leaves if each.grad is not None)]


ADDED = torch.zeros(2, 1, 12, 12).masked_fill(~_hidden_tail(), -torch.inf)


CASES: dict[str, tuple[list[Tensor], nn.Module, Tensor | None]] = {
    "causal": (_inputs(), Attending(), None),
    "everything": (_inputs(), Attending(is_causal=False), None),
    "grouped heads": (_inputs(heads=6, shared=2), Attending(3), None),
    "grouped heads, mask": (_inputs(heads=6, shared=2), Attending(3), _hidden_tail()),
    "boolean mask": (_inputs(), Attending(), _hidden_tail()),
    "added mask": (_inputs(), Attending(), ADDED.bfloat16()),
    "other keys": (_inputs(queries=5), Attending(is_causal=False), _hidden_tail(queries=5)),
}


@pytest.mark.parametrize("case", CASES)
def test_half_precision_rounds_little(case: str) -> None:
    attention_backend.register()
    inputs, module, mask = CASES[case]
    wide = mask.float() if mask is not None and mask.is_floating_point() else mask
    exact = _both(sdpa_attention_forward, module, [each.float() for each in inputs], wide)
    assert len(exact) == 4
    found = _both(AttentionInterface()["sdpa"], module, inputs, mask)
    for one, other in zip(found, exact, strict=True):
        assert float((one - other).norm() / other.norm()) < ROUNDING


def test_a_row_that_sees_nothing_harms_no_other() -> None:
    attention_backend.register()
    inputs, seen = _inputs(), _hidden_tail()
    known = _both(AttentionInterface()["sdpa"], Attending(), inputs, seen)[0]
    seen[1, :, -1] = False
    found = _both(AttentionInterface()["sdpa"], Attending(), inputs, seen)[0]
    assert torch.isfinite(found).all()
    assert torch.equal(found[:, :-1], known[:, :-1])


@pytest.mark.parametrize("of", ["dropout", "bias"])
def test_what_is_random_or_learns_is_computed_in_float32(of: str) -> None:
    attention_backend.register()
    query, key, value = _inputs()
    bias = torch.randn(1, 4, 12, 12).bfloat16().requires_grad_() if of == "bias" else None
    settings: dict[str, Any] = {"dropout": 0.5 if of == "dropout" else 0.0, "position_bias": bias}
    torch.manual_seed(2)
    found, _ = AttentionInterface()["sdpa"](Attending(), query, key, value, None, **settings)
    torch.manual_seed(2)
    settings["position_bias"] = None if bias is None else bias.float()
    exact, _ = sdpa_attention_forward(Attending(), query.float(), key.float(), value.float(), None, **settings)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())
    assert found.requires_grad == (bias is not None)


def test_float32_and_long_rows_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_backend.register()
    kernel, module, inputs = AttentionInterface()["sdpa"], Attending(), _inputs()
    wide = [each.float() for each in inputs]
    known = sdpa_attention_forward(module, *wide, None, dropout=0.0)[0]
    assert torch.equal(kernel(module, *wide, None, dropout=0.0)[0], known)
    monkeypatch.setattr(attention_backend, "LONGEST", 12)
    known = sdpa_attention_forward(module, *inputs, None, dropout=0.0)[0]
    assert torch.equal(kernel(module, *inputs, None, dropout=0.0)[0], known)


class Layer(nn.Module):
    layer_idx = 0
    num_key_value_groups = HEADS // GROUPS


def _numbers(tokens: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, 1, WIDTH, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]


def _written_out(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention of one whole row: softmax(q k / sqrt(D)) v, head by head and token by token."""
    attended = torch.zeros(len(query), 1, HEADS, WIDTH)
    for token in range(len(query)):
        first = 0 if window is None else max(0, token + 1 - window)
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            keys, values = key[first : token + 1, group, 0], value[first : token + 1, group, 0]
            weights = (keys @ query[token, head, 0] / math.sqrt(WIDTH)).softmax(0)
            attended[token, 0, head] = weights @ values
    return attended


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cuts", [[1] * 12, [7, 1, 1, 3], [12]])
def test_parts_of_two_rows_and_padding_attend_to_their_own(cuts: list[int], window: int | None) -> None:
    rows = [_numbers(12, seed) for seed in (1, 2)]
    padding = _numbers(2, 3)
    caches, found, start = [RowCache(), RowCache()], [[], []], 0  # type: ignore[var-annotated]
    for cut in cuts:
        where = slice(start, start + cut)
        batch = [torch.cat([rows[0][n][where], padding[n], rows[1][n][where]]) for n in range(3)]
        parts = [RowPart(caches[0], slice(0, cut)), RowPart(caches[1], slice(cut + 2, 2 * cut + 2))]
        attended, _ = attend_cached_rows(Layer(), *batch, parts=parts, sliding_window=window)
        for row, part in enumerate(parts):
            found[row].append(attended[part.where])
            part.cache.length += cut
        assert torch.equal(attended[cut : cut + 2, 0], padding[2][:, :, 0].repeat_interleave(2, dim=1))
        start += cut
    for row, pieces in zip(rows, found, strict=True):
        torch.testing.assert_close(torch.cat(pieces), _written_out(row[0], row[1], row[2], window))


def test_storage_doubles_and_keeps_what_it_holds() -> None:
    cache, seen = RowCache(), []
    for token in range(200):
        new = torch.full((1, GROUPS, 1, WIDTH), float(token))
        keys, values = cache.extended(0, new, -new)
        cache.length += 1
        seen.append(cache.bytes)
        assert keys[0, 0, :, 0].tolist() == list(range(token + 1)) and torch.equal(values, -keys)
    assert sorted({size // (2 * GROUPS * WIDTH * 4) for size in seen}) == [64, 128, 256]
    assert [room(tokens) for tokens in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 256]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model in training, without dropout."""
    attention_backend.register()
    name, shape = SHAPES[request.param]
    head = "MaskedLM" if name == "Bert" else "CausalLM"
    return tiny(name, head=head, **shape, **dict.fromkeys(STILL, 0.0)).train()


def _rows() -> list[Row]:
    draw = np.random.default_rng(0)
    return [Row(draw.integers(3, 64, length), np.ones(length, dtype=bool)) for length in LENGTHS]


def _padded(model: PreTrainedModel, rows: list[Row]) -> MicroBatch:
    """The rows as recipe sft, or of BERT as recipe mlm, pads them."""
    if model.config.model_type != "bert":
        return collate(rows)
    ids = [row.input_ids for row in rows]
    inputs = encoder_inputs(ids)
    places = torch.cat([number * max(LENGTHS) + torch.arange(len(row)) for number, row in enumerate(ids)])
    return MicroBatch(inputs, places, torch.from_numpy(np.concatenate(ids)), sum(map(len, ids)))


def row_losses(model: PreTrainedModel, batch: MicroBatch, rows: int) -> Tensor:
    """Summed loss of each row (B,)."""
    head = output_heads.known(model)
    logits_NV = head.project(head.hidden(model, batch.inputs).flatten(0, 1)[batch.positions_N])
    loss_N = nn.functional.cross_entropy(logits_NV, batch.labels_N, reduction="none")
    return torch.zeros(rows).index_add(0, batch.row_of_label, loss_N)


def test_losses_and_gradients_are_those_of_one_row_at_a_time(model: PreTrainedModel) -> None:
    rows = _rows()
    alone = torch.cat([row_losses(model, _padded(model, [row]), 1) for row in rows])
    wanted = torch.autograd.grad(alone.sum(), list(model.parameters()), materialize_grads=True)
    packed = row_losses(model, PACKED.lay(_padded(model, rows)), len(rows))
    found = torch.autograd.grad(packed.sum(), list(model.parameters()), materialize_grads=True)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_another_row_beside_it_changes_no_bit_of_a_row(model: PreTrainedModel) -> None:
    """Tokens that a row must not see are others; those of the row have the same places and lengths."""
    rows = _rows()
    others = [rows[0], *(row._replace(input_ids=row.input_ids[::-1].copy() % 61 + 3) for row in rows[1:])]
    found, wanted = (
        model(**PACKED.lay(_padded(model, each)).inputs).logits[0, : LENGTHS[0]] for each in (others, rows)
    )
    assert torch.equal(found, wanted)


def test_recomputed_activations_give_the_same_gradients(model: PreTrainedModel) -> None:
    rows = _rows()

    def gradients() -> tuple[Tensor, ...]:
        loss = row_losses(model, PACKED.lay(_padded(model, rows)), len(rows)).sum()
        return torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)

    wanted = gradients()
    activation_checkpointing.keep(model, True)
    torch.testing.assert_close(gradients(), wanted, rtol=0, atol=0)


def test_half_precision_rounds_little_packed_attention(model: PreTrainedModel) -> None:
    batch = PACKED.lay(_padded(model, _rows()))
    with torch.no_grad():
        exact = model(**batch.inputs).logits
        half = model.bfloat16()(**batch.inputs).logits.float()
    assert float((half - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("causal", [True, False])
def test_rows_computed_together_are_planned_without_values(causal: bool) -> None:
    layer, lengths_B = nn.Identity(), torch.tensor(LENGTHS)
    with FakeTensorMode():
        rows = [torch.empty(1, 2, sum(LENGTHS), 8, dtype=torch.bfloat16) for _ in range(3)]
        attended, _ = attention_backend.attend(layer, *rows, None, row_lengths=lengths_B, is_causal=causal)
    assert attended.shape == (1, sum(LENGTHS), 2, 8)


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_short_rows_compute_what_each_computes_alone(causal: bool) -> None:
    """Rows of two owners, some of which share a block, one that fills its own, and one that is longer than any."""
    lengths, owners = (130, 60, 20, 9, 9, 1, 40, 15, 15, 3), torch.tensor([0] * 6 + [1] * 4)
    layer, draw = nn.Identity(), torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 2, sum(lengths), 8, generator=draw).bfloat16().requires_grad_() for _ in range(3)]
    attend = partial(attention_backend.attend, layer, is_causal=causal)
    found, _ = attend(*rows, None, row_lengths=torch.tensor(lengths), row_owners=owners)
    cut = zip(*(each.split(lengths, dim=2) for each in rows), strict=True)
    wanted = torch.cat([attend(*each, None, row_lengths=torch.tensor([each[0].shape[2]]))[0] for each in cut], dim=1)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    grads = [torch.autograd.grad(each.float().square().sum(), rows, retain_graph=True) for each in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("lengths", [LENGTHS, (130, 60, 20, 9, 9, 1), (105, 50, 38, 22, 17), (48, 40), (1,)])
def test_pairs_are_those_that_blocks_compute(lengths: tuple[int, ...]) -> None:
    """By the operations of both products of attention: a multiplication and an addition for each pair and number."""
    rows = [torch.zeros(1, 2, sum(lengths), 8, dtype=torch.bfloat16) for _ in range(3)]
    with Operations() as operations:
        attention_backend.attend(nn.Identity(), *rows, None, row_lengths=torch.tensor(lengths))
    assert operations.count == 2 * 2 * 2 * 8 * attention_backend.pairs_in_blocks(lengths)


def test_infinities_of_an_owner_stay_with_it() -> None:
    lengths, owners = torch.tensor([9, 7, 7, 5]), torch.tensor([0, 0, 1, 1])
    rows = [torch.ones(1, 2, 28, 8, dtype=torch.bfloat16) for _ in range(3)]
    rows[2][:, :, :16] = torch.inf
    found, _ = attention_backend.attend(nn.Identity(), *rows, None, row_lengths=lengths, row_owners=owners)
    assert torch.equal(found[:, 16:], torch.ones(1, 12, 2, 8, dtype=torch.bfloat16))


def _by_rows(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """The contract of `varlen_attn`, row by row in the formula of attention."""
    assert starts_q.dtype == torch.int32 and torch.equal(starts_q, starts_k)
    assert longest_q == longest_k == int(starts_q.diff().max())
    assert enable_gqa == (query_THD.shape[1] != key_TKD.shape[1]) and window_size[0] == -1
    found = []
    for start, end in itertools.pairwise(starts_q.tolist()):
        query, key, value = (each[start:end] for each in (query_THD, key_TKD, value_TKD))
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        score = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if window_size[1] == 0:
            score = score.masked_fill(torch.ones(end - start, end - start).triu(1).bool(), -torch.inf)
        found.append(torch.einsum("hqk,khd->qhd", score.softmax(-1), value))
    return torch.cat(found)


def _of_equal_heads(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    *places: Any,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """The same of torch 2.11, where no heads share keys."""
    return _by_rows(query_THD, key_TKD, value_TKD, *places, scale=scale, window_size=window_size)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kernel", [_by_rows, _of_equal_heads])
@pytest.mark.parametrize("heads", [2, 4])
def test_one_kernel_for_rows_of_any_lengths(causal: bool, scale: float | None, heads: int, kernel: Any) -> None:
    """What a GPU is asked for is what a CPU computes row by row, for heads that share keys too."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, each, sum(LENGTHS), 8) for each in (4, heads, heads)]
    rows = [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]
    lengths_B, layer = torch.tensor(LENGTHS), nn.Identity()
    layer.num_key_value_groups = 4 // heads
    wanted, _ = attention_backend.attend(layer, *rows, None, row_lengths=lengths_B, is_causal=causal, scaling=scale)
    starts = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    found = attention_backend.of_any_lengths(
        *rows, starts, longest=max(LENGTHS), causal=causal, scale=scale, kernel=kernel
    )
    torch.testing.assert_close(found, wanted)
    weight = torch.randn(wanted.shape, generator=draw)
    gradients = (torch.autograd.grad((each * weight).sum(), rows) for each in (found, wanted))
    torch.testing.assert_close(*gradients)


def test_torch_has_the_kernel() -> None:
    """With the arguments that are given, and shapes for a plan."""
    assert attention_backend._kernel() is not None
    with FakeTensorMode():
        rows = [torch.empty(1, heads, 9, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
        starts = torch.tensor([0, 5, 9], dtype=torch.int32)
        found = attention_backend.of_any_lengths(*rows, starts, longest=5, causal=True, scale=None)
        gradients = torch.autograd.grad(found.sum(), rows)
    assert found.shape == (1, 9, 4, 8) and [each.shape for each in gradients] == [each.shape for each in rows]


@pytest.mark.parametrize("here", [False, True])
def test_a_plan_for_an_accelerator_asks_for_that_kernel(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU stands for it, and on one that is here: the same bytes are kept, no score is, and pairs of tokens of
    a row are counted, which only a CPU knows; elsewhere all rows are taken for the longest."""
    with fake_cuda(monkeypatch) if here else fake_tensors(), attention_backend.planned(not here):
        device = CUDA if here else torch.device("cpu")
        shapes = [(1, each, sum(LENGTHS), 8) for each in (4, 2, 2)]
        rows = [torch.empty(each, dtype=torch.bfloat16, device=device, requires_grad=True) for each in shapes]
        starts = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
        places = {"row_lengths": torch.tensor(LENGTHS), "row_starts": starts.to(device, non_blocking=True)}
        with LiveBytes(device.type) as alive, Operations() as operations:
            found, _ = attention_backend.attend(nn.Identity(), *rows, None, is_causal=True, **places)
            kept = alive.now
            torch.autograd.grad(found, rows, torch.empty_like(found))
    assert found.shape == (1, sum(LENGTHS), 4, 8)
    assert kept == sum(LENGTHS) * 4 * (8 * 2 + 4) + 16  # outputs, sums of scores, and the state of random numbers
    pairs = max(LENGTHS) * sum(LENGTHS) if here else sum(length**2 for length in LENGTHS)
    assert operations.count == 4 * pairs * 2 * 8 * (2 + 5)


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "able"),
    [
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.float32, 64, False),
        ("cuda", torch.bfloat16, 20, False),
        ("cuda", torch.float16, 256, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_rows_that_the_kernel_computes(kind: str, dtype: torch.dtype, width: int, able: bool) -> None:
    assert attention_backend._computes(torch.device(kind), dtype, width) == able


@pytest.mark.parametrize(("capability", "known"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_an_old_gpu_has_no_kernel(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], known: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    attention_backend._kernel.cache_clear()
    found = attention_backend._kernel()
    attention_backend._kernel.cache_clear()
    assert (found is not None) == known


def test_attention_that_knows_no_packed_rows_fails_rather_than_leaks() -> None:
    model = tiny("Llama", num_key_value_heads=4)
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError):
        model(**PACKED.lay(collate(_rows())).inputs)


@pytest.mark.parametrize(
    ("name", "changes", "longest", "why"),
    [
        ("Mistral", {"sliding_window": 11}, 12, "reaches back 11 tokens"),
        ("Gemma2", {}, 4, "gemma2"),
        ("Llama", {"attn_implementation": "eager"}, 12, "eager"),
        ("Llama", {"attention_chunk_size": 8}, 12, "reaches back 8 tokens"),
    ],
    ids=["window", "softcap", "kernel", "chunks"],
)
def test_what_cannot_be_packed_is_told(name: str, changes: dict[str, object], longest: int, why: str) -> None:
    told = attention_backend.packing_refusal(tiny(name, **changes).config, longest=longest)
    assert told is not None
    assert why in told
