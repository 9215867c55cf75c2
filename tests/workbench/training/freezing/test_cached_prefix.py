"""With outputs of the frozen blocks that were kept, a model gives what it gives without; nothing below is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from tests.conftest import FAMILIES, MINILM
from tests.workbench.training.freezing.prefixes import (
    DROPOUTS,
    ENCODERS,
    OTHERS,
    batch,
    build,
    freeze,
    installed,
    prefix_of,
    stack,
)
from workbench import adapters
from workbench.adapters import Lora
from workbench.data.batching import MicroBatch
from workbench.data.packing import PACKED, SharedPrefix
from workbench.errors import BackboneError
from workbench.models import attention_backend
from workbench.training import activation_checkpointing
from workbench.training.freezing.cached_prefix import rows_of
from workbench.training.freezing.hidden_state_store import DiskStore, MemoryStore

EVERY = [(name, depth) for name in (*FAMILIES, *OTHERS, *ENCODERS) for depth in (1, 3)]
ROWS = [[5, 60, 7, 9, 2, 33, 8], [8, 16, 23, 42], [3, 1, 4, 1, 5], [9, 8], [5, 60, 7, 9, 2, 33, 8], [5, 60, 7], [44]]
TWICE = 1
"""How many of ROWS come twice."""
DEALS = ([[0, 1, 4], [2, 6], [3, 5]], [[3, 0], [1, 2, 6], [4, 5, 0]])
"""Micro-batches of two passes over ROWS."""


def learn(model: nn.Module, rows: Sequence[Sequence[int]], *, masked: bool, more: int = 0) -> list[Tensor]:
    """Logits (l, V) of each row; a loss adds its gradients."""
    model_inputs = batch(rows, masked=masked, more=more)
    logits = model(**model_inputs, **({} if masked else {"use_cache": False})).logits
    real = [each[: len(row)] for each, row in zip(logits, rows, strict=True)]
    found = torch.cat(real)
    torch.manual_seed(0)
    if found.requires_grad:
        (found * torch.randn(found.shape[1]).to(found)).sum().backward()
    return [each.detach() for each in real]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Taken from the model."""
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def require_like(value: Any, wanted: Any, *, share: float = 1e-6) -> None:
    """Equal up to `share` of the largest value of all: small ones are differences of large ones."""
    wanted = list(wanted)
    largest = max(1.0, *(float(each.detach().abs().max()) for each in wanted))
    for one, other in zip(value, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=share * largest)


@contextmanager
def counted(block: nn.Module) -> Iterator[list[int]]:
    """Rows that a block really computed, in each of its calls."""
    seen: list[int] = []
    part = next(each for each in block.modules() if not list(each.children()) and list(each.parameters()))
    hook = part.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("name, depth", EVERY)
def test_passes_equal_those_without_and_the_second_computes_nothing(name: str, depth: int) -> None:
    # In float32, weights as large as these make more than 1e-6 of the last bits, which depend on the padding.
    dtype = torch.float32 if name == "Mixtral" else torch.float64  # torch groups no products of doubles
    model, masked = freeze(build(name).to(dtype), depth), name in ENCODERS
    wanted = []
    for deal in DEALS:
        outputs = [learn(model, [ROWS[row] for row in rows], masked=masked) for rows in deal]
        wanted.append((outputs, gradients(model)))
    states = MemoryStore(dtype)
    with installed(prefix_of(model, depth, states)) as cached, counted(stack(model)[0]) as calls:
        for number, (deal, (outputs, grads)) in enumerate(zip(DEALS, wanted, strict=True)):
            for rows, each in zip(deal, outputs, strict=True):
                found = learn(model, [ROWS[row] for row in rows], masked=masked, more=2 * number)
                require_like(found, each)
            now = gradients(model)
            assert now.keys() == grads.keys() and grads
            require_like(now.values(), grads.values())
            assert cached.computed == len(ROWS) - TWICE
            assert len(calls) == len(DEALS[0])
        assert cached.read == sum(len(rows) for deal in DEALS for rows in deal) and cached.passed == 0


def test_memory_that_runs_out_makes_passes_smaller_and_computes_no_row_twice() -> None:
    model = freeze(build("Llama").double(), 2)
    wanted = learn(model, ROWS, masked=False)
    with installed(prefix_of(model, 2, MemoryStore(torch.float64))) as cached, counted(stack(model)[0]) as calls:

        def limited(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            if len(arguments[0]) > 3:
                raise torch.OutOfMemoryError("fake")

        handle = stack(model)[1].mlp.register_forward_pre_hook(limited)
        found = learn(model, ROWS, masked=False)
        handle.remove()
        assert cached.computed == len(ROWS) - TWICE
        assert [rows for rows in calls if rows <= 3] == [3, 3]
    require_like(found, wanted)


@pytest.mark.parametrize("masked", [False, True], ids=["stories", "minilm"])
def test_real_models(masked: bool, short_stories: str) -> None:
    model = (
        AutoModel.from_pretrained(MINILM) if masked else AutoModelForCausalLM.from_pretrained(short_stories)
    ).eval()
    inputs = {"use_cache": False, **batch(ROWS, masked=masked)}
    real_BL = batch(ROWS, masked=True)["attention_mask"] > 0
    with torch.no_grad(), installed(prefix_of(model, len(stack(model)) // 2)) as cached:
        found = [model(**inputs)[0][real_BL] for _ in range(2)]
        cached.remove()
        wanted = model(**inputs)[0][real_BL]
    require_like(found, [wanted, wanted])
    assert (cached.computed, cached.read) == (len(ROWS) - TWICE, 2 * len(ROWS))


@pytest.mark.parametrize("name, shared", [("Llama", 0), ("Llama", 3), ("GPT2", 0), ("Bert", 0)])
def test_packed_rows_read_what_padded_ones_left_and_the_other_way_round(name: str, shared: int) -> None:
    attention_backend.register()
    model, masked = freeze(build(name).double(), 2).eval(), name in ENCODERS
    rows = [[5, 60, 7, *row] for row in ROWS[1:]]
    padded = batch(rows, masked=masked)
    lengths_B = torch.tensor([len(row) for row in rows])
    whole = MicroBatch(padded, torch.zeros(1, dtype=torch.int64), torch.zeros(1), tokens=0, lengths_B=lengths_B)
    packed = (SharedPrefix(shared) if shared else PACKED).lay(whole)
    assert packed.inputs["input_ids"].shape[1] == int(lengths_B.sum()) - shared * (len(rows) - 1)
    wanted = model(**packed.inputs, use_cache=False).logits
    for first, later in ((padded, packed.inputs), (packed.inputs, padded)):
        with installed(prefix_of(model, 2, MemoryStore(torch.float64))) as cached, counted(stack(model)[0]) as calls:
            found = [model(**given, use_cache=False).logits for given in (first, later)]
        assert (cached.computed, cached.read, cached.passed) == (len(rows), 2 * len(rows), 0) and len(calls) == 1
        require_like(found[later is packed.inputs], wanted)


def test_of_a_batch_only_unknown_rows_are_computed(llama: PreTrainedModel) -> None:
    wanted = learn(llama.eval().requires_grad_(False), ROWS, masked=False)
    with installed(prefix_of(llama, 1)) as cached, counted(stack(llama)[0]) as calls:
        learn(llama, ROWS[:2], masked=False)
        require_like(learn(llama, ROWS, masked=False), wanted)
    assert calls == [2, 4] and cached.computed == 6


@pytest.mark.parametrize("name", ["Llama", "GPT2", "OPT"])
@pytest.mark.parametrize("trailing", [1, 3])
def test_rows_that_end_in_zeros(name: str, trailing: int) -> None:
    """They are exact to their end, also beside rows that they would be taken for, and up to the model's length."""
    model = build(name).requires_grad_(False)
    rows = [[5, 6, 0], [5, 6], [7, 8, 9, 4], [5, 0, 6, 0], [0], [11] * 63 + [0], [12] * 64]
    wanted = [learn(model, [row], masked=False)[0] for row in rows]
    with installed(prefix_of(model, 2, trailing=trailing)) as cached:
        for more in (0, 1):
            for few in ([0], [1], [3, 2, 1], [4, 0]):
                found = learn(model, [rows[row] for row in few], masked=False, more=more)
                require_like(found, [wanted[row] for row in few])
        require_like(learn(model, rows[-2:], masked=False), wanted[-2:])
    assert cached.computed == len(rows) - 1  # [5, 6] and [5, 6, 0] hold the same


def test_a_mask_says_which_zeros_are_real() -> None:
    model = build("Bert").requires_grad_(False)
    rows = [[5, 6, 0], [5, 6], [0], [0, 0, 0]]
    wanted = [learn(model, [row], masked=True)[0] for row in rows]
    with installed(prefix_of(model, 2)) as cached:
        require_like(learn(model, rows, masked=True), wanted)
    assert cached.computed == 4


def test_without_a_mask_an_encoder_looks_at_everything() -> None:
    model = build("Bert").requires_grad_(False)
    rows = [torch.tensor([row]) for row in ([5, 6], [5, 6, 0], [5, 6, 0, 0])]
    wanted = [model(input_ids=row).logits for row in rows]
    with installed(prefix_of(model, 2)) as cached:
        require_like([model(input_ids=row).logits for row in rows], wanted)
    assert cached.computed == 3


def test_token_types_are_part_of_a_row() -> None:
    model = build("Bert").requires_grad_(False)
    inputs = batch([ROWS[0], ROWS[0], ROWS[1]], masked=True)
    types_BL = torch.tensor([[0] * 7, [0, 0, 0, 1, 1, 1, 1], [0] * 7])
    wanted = model(**inputs, token_type_ids=types_BL).logits
    with installed(prefix_of(model, 2)) as cached:
        for _ in range(2):
            found = model(**inputs, token_type_ids=types_BL).logits
            require_like([found[:2], found[2, :4]], [wanted[:2], wanted[2, :4]])
    assert cached.computed == 3


def test_what_is_no_plain_call_computes_as_ever(llama: PreTrainedModel) -> None:
    ids_BL = torch.tensor([ROWS[0], ROWS[0][::-1]])
    calls: list[dict[str, Any]] = [
        {"input_ids": ids_BL, "use_cache": True},
        {"inputs_embeds": llama.get_input_embeddings()(ids_BL), "use_cache": False},
        {"input_ids": ids_BL, "position_ids": torch.arange(7)[None] + 3},
        {"input_ids": ids_BL, "output_hidden_states": True},
        {"input_ids": ids_BL, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])},
        {"input_ids": ids_BL, "attention_mask": torch.tensor([[1] * 7, [0] * 7])},
    ]
    wanted = [llama(**call) for call in calls]
    written = llama.generate(ids_BL, max_new_tokens=5, do_sample=False)
    with installed(prefix_of(llama, 1)) as cached:
        for call, each in zip(calls, wanted, strict=True):
            assert torch.equal(llama(**call).logits, each.logits)
        assert cached.passed == len(calls)
        assert torch.equal(llama.generate(ids_BL, max_new_tokens=5, do_sample=False), written)
        assert cached.read == 0 < len(calls) < cached.passed


def everything(model: nn.Module) -> list[Any]:
    """All that a cached prefix might leave behind."""
    parts = list(model.modules())
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in parts]
    return [[sorted(vars(part)) for part in parts], hooks, list(model.state_dict())]


def test_nothing_is_left_behind(llama: PreTrainedModel) -> None:
    before, wanted = everything(llama), learn(llama, ROWS, masked=False)
    cached = prefix_of(llama, 2)
    for _ in range(2):
        with installed(cached):
            assert list(llama.state_dict()) == before[-1]
            learn(llama, ROWS, masked=False)
        assert everything(llama) == before
        for one, other in zip(learn(llama, ROWS, masked=False), wanted, strict=True):
            assert torch.equal(one, other)


def test_a_call_that_fails_leaves_nothing_for_the_next(llama: PreTrainedModel) -> None:
    wanted = learn(llama.requires_grad_(False), ROWS, masked=False)
    with installed(prefix_of(llama, 1)) as cached:
        learn(llama, ROWS, masked=False)
        block, hidden_BLD = stack(llama)[0], torch.randn(1, 3, 32)
        places = llama.model.rotary_emb(hidden_BLD, torch.arange(3)[None])
        alone = block(hidden_BLD, position_embeddings=places)
        hook = llama.model.embed_tokens.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            learn(llama, ROWS, masked=False)
        hook.remove()
        assert torch.equal(block(hidden_BLD, position_embeddings=places), alone)
        require_like(learn(llama, ROWS, masked=False), wanted)
    assert cached.computed == 6


def fail(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_hooks_above_the_line_see_each_call_once(llama: PreTrainedModel) -> None:
    """And those on the last block below it see what was kept."""
    wanted: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, output: wanted.append(output.detach())) for block in stack(llama)
    ]
    learn(llama, ROWS, masked=False)
    expected, wanted[:] = list(wanted), []
    with installed(prefix_of(llama, 1)):
        learn(llama, ROWS, masked=False)
    for hook in hooks:
        hook.remove()
    require_like([wanted[0][0], wanted[1][0]], [expected[0][0], expected[1][0]])
    assert len(wanted) == 2


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
def test_with_checkpointing_and_dropout_above(name: str) -> None:
    """Dropout above the line draws the same numbers, because nothing below draws any."""
    model = freeze(build(name, **dict.fromkeys(DROPOUTS, 0.1)), 2)
    activation_checkpointing.keep(model, True)
    cached = prefix_of(model, 2)

    def found() -> list[Tensor]:
        torch.manual_seed(3)
        model(**batch(ROWS[:2], masked=True)).logits[1, :4].sum().backward()
        return list(gradients(model).values())

    wanted = found()
    with installed(cached):
        require_like(found() + found(), wanted + wanted, share=1e-5)
    assert cached.computed == 2


def test_blocks_that_were_compiled(llama: PreTrainedModel) -> None:
    wanted = learn(llama.requires_grad_(False), ROWS, masked=False)
    compiled: list[int] = []
    for number, block in enumerate(stack(llama)):
        block.compile(backend=lambda graph, _, number=number: compiled.append(number) or graph)
    before = everything(llama)
    with installed(prefix_of(llama, 1)):
        for _ in range(2):
            require_like(learn(llama, ROWS, masked=False), wanted)
        assert set(compiled) == {1}
    assert everything(llama) == before
    require_like(learn(llama, ROWS, masked=False), wanted)
    assert set(compiled) == {0, 1}


@pytest.mark.parametrize("below", [False, True])
def test_adapters_above_and_below(below: bool) -> None:
    backbone = build("Llama").requires_grad_(False)
    blocks = stack(backbone)
    model = adapters.attach(backbone, Lora(rank=2, targets="all-linear"), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    for block in blocks[:2]:
        block.eval().requires_grad_(False)
        if not below:
            for name, parameter in block.named_parameters():
                if "lora_B" in name:
                    parameter.data.zero_()
    assert stack(backbone) == blocks
    wanted, grads = learn(model, ROWS, masked=False), gradients(model)
    with model.disable_adapter():
        bare = learn(model, ROWS, masked=False)
    with installed(prefix_of(backbone, 2)) as cached:
        for _ in range(2):
            require_like(learn(model, ROWS, masked=False), wanted, share=1e-5)
            now = gradients(model)
            assert now.keys() == grads.keys() and all("layers.2" in name or "layers.3" in name for name in now)
            require_like(now.values(), grads.values(), share=1e-5)
        assert cached.passed == 0
        with model.disable_adapter():  # below the line, other adapters mean other outputs
            require_like(learn(model, ROWS, masked=False), bare)
        assert cached.passed == 1 and cached.computed == 6
        require_like(learn(model, ROWS, masked=False), wanted, share=1e-5)
        assert cached.passed == 1


@pytest.mark.parametrize("name", ["Falcon", "Llama", "DebertaV2"])
def test_another_run_computes_nothing(name: str, tmp_path: Path) -> None:
    """It reads rows whose blocks it has never seen at work."""
    masked, wanted = name in ENCODERS, []
    for computed in (6, 0):
        model = build(name).requires_grad_(False)
        states = DiskStore(tmp_path, fingerprint=name, dtype=torch.float32)
        with installed(prefix_of(model, 2, states)) as cached:
            wanted.append(learn(model, ROWS, masked=masked))
        assert (cached.computed, cached.read) == (computed, 7)
    for one, other in zip(*wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_in_half_precision_is_given_what_it_computed(llama: PreTrainedModel, kept: torch.dtype) -> None:
    llama.bfloat16().requires_grad_(False)
    wanted = learn(llama, ROWS, masked=False)
    with installed(prefix_of(llama, 1, MemoryStore(kept))):
        for one, other in zip(learn(llama, ROWS, masked=False) * 2, wanted * 2, strict=True):
            assert torch.equal(one, other)


def test_half_the_bytes_round_once(llama: PreTrainedModel) -> None:
    seen: list[Tensor] = []
    stack(llama)[1].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    for states in (MemoryStore(torch.float32), MemoryStore(torch.bfloat16)):
        with installed(prefix_of(llama, 1, states)):
            learn(llama, ROWS, masked=False)
    assert torch.equal(seen[0].bfloat16().float(), seen[1]) and not torch.equal(seen[0], seen[1])


def test_a_stack_that_pads_by_itself() -> None:
    model = build("Bert", num_hidden_layers=2)
    cached = prefix_of(model, 1)
    longer = lambda _, __, output: nn.functional.pad(output, (0, 0, 0, 1))  # noqa: E731
    hook = model.base_model.embeddings.register_forward_hook(longer)
    with installed(cached), pytest.raises(BackboneError, match=r"BertModel pads long rows.*\n?.*freeze.cache=off"):
        model(input_ids=torch.tensor([ROWS[0]]))
    hook.remove()


def batch_keys(rows: Sequence[Sequence[int]]) -> list[bytes]:
    found = rows_of(batch(rows, masked=False), causal=True)
    assert found is not None
    return found.keys


def test_rows_are_known_by_what_they_hold() -> None:
    assert len(set(batch_keys(ROWS))) == len(ROWS) - TWICE
    assert batch_keys(ROWS[1:2]) == batch_keys([*ROWS[:1], ROWS[1]])[1:]
    masked = rows_of(batch(ROWS, masked=True), causal=False)
    assert masked is not None and masked.keys == batch_keys(ROWS)
