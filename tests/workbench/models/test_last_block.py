"""A last block that computes supervised positions alone gives the losses and gradients of one that computes all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from tests.workbench.models.test_packed_attention import SHAPES
from workbench import losses
from workbench.adapters import Lora, attach
from workbench.adapters.banks import bank
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.data.batching import MicroBatch, Row, collate
from workbench.data.packing import PACKED, SharedPrefix
from workbench.models import fused_lora, last_block, output_heads, packed_attention
from workbench.models.output_heads import Head
from workbench.training import activation_checkpointing

LENGTHS = (40, 33, 33, 20)
ANSWERS = (5, 9, 1, 7)
PREFIX = 8


def _model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    packed_attention.register()
    name, shape = SHAPES[family]
    # Its window reaches back less far than the longest row, so that transformers makes a mask of it.
    return tiny(name, **{**shape, **({"sliding_window": 30} if family == "mistral" else {})}).to(dtype)


def _rows() -> list[Row]:
    """Rows that begin alike, some with loss on single tokens in the middle."""
    draw = np.random.default_rng(0)
    first = draw.integers(3, 64, PREFIX)
    rows = []
    for length, answer in zip(LENGTHS, ANSWERS, strict=True):
        supervised = np.arange(length) >= length - answer
        supervised[[PREFIX + 2, PREFIX + 5]] = True
        rows.append(Row(np.concatenate([first, draw.integers(3, 64, length - PREFIX)]), supervised))
    return rows


class _Shapes:
    """Notes what the MLP of the last block gets."""

    def __init__(self, head: Head) -> None:
        self.seen: list[tuple[int, ...]] = []
        assert head.last_block is not None
        head.last_block.post_attention_layernorm.register_forward_hook(  # type: ignore[union-attr, operator]
            lambda *given: self.seen.append(tuple(given[-1].shape[:2]))
        )


def _loss(model: nn.Module, head: Head, batch: MicroBatch) -> Tensor:
    hidden_ND = head.supervised(model, batch.inputs, batch.positions_N)
    return losses.next_token(
        hidden_ND, batch.labels_N, head.project, vocabulary=head.vocabulary, weights=[], scale=1 / len(batch.labels_N)
    )


def _values(model: nn.Module, head: Head, batch: MicroBatch) -> list[Tensor]:
    """The loss, and the gradients of what trains."""
    loss = _loss(model, head, batch)
    trains = [each for each in model.parameters() if each.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, trains, materialize_grads=True)]


def _off(head: Head) -> Head:
    return replace(head, last_block=None)


def _adapted(model: PreTrainedModel, method: Lora | None = None) -> nn.Module:
    adapted = attach(model, method or Lora(rank=3, targets="all-linear"), seed=0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    fused_lora.fuse(adapted)
    return adapted.double().train()


LAYOUTS: dict[str, Callable[[list[Row]], MicroBatch]] = {
    "padded": collate,
    "packed": lambda rows: PACKED.lay(collate(rows)),
    "shared": lambda rows: SharedPrefix(PREFIX).lay(collate(rows)),
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [*((each, "padded") for each in last_block.FAMILIES), ("qwen3", "packed"), ("llama", "shared")],
)
def test_losses_and_gradients_are_those_of_all_positions(family: str, layout: str) -> None:
    model = _adapted(backbone := _model(family))
    head, batch = output_heads.known(backbone), LAYOUTS[layout](_rows())
    shapes = _Shapes(head)
    found, wanted = _values(model, head, batch), _values(model, _off(head), batch)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    narrow, whole = shapes.seen
    assert narrow[0] * narrow[1] < 0.6 * whole[0] * whole[1]
    assert "forward" not in vars(head.last_block), "it is put back"


def test_in_float32_they_agree_to_its_rounding() -> None:
    backbone = _model("llama", torch.float32)
    model = _adapted(backbone).float()
    head, batch = output_heads.known(backbone), collate(_rows())
    torch.testing.assert_close(_values(model, head, batch), _values(model, _off(head), batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_activations_change_nothing(layout: str) -> None:
    backbone = _model("llama")
    model, head, batch = _adapted(backbone), output_heads.known(backbone), LAYOUTS[layout](_rows())
    wanted = _values(model, head, batch)
    activation_checkpointing.keep(backbone, True)
    shapes = _Shapes(head)
    torch.testing.assert_close(_values(model, head, batch), wanted, rtol=0, atol=0)
    assert len(shapes.seen) == 1, "the last block keeps its activations"
    assert head.last_block is not None and head.last_block.gradient_checkpointing is True


@pytest.mark.parametrize("packed", [False, True])
def test_members_of_a_bank_have_their_own_rows(packed: bool) -> None:
    backbone = _model("llama").requires_grad_(False)
    together = bank.attach(backbone, [Lora(rank=3), Lora(rank=2, alpha=5)], seeds=[0, 1])
    for name, parameter in together.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    head, batch = output_heads.known(backbone), (LAYOUTS["packed" if packed else "padded"])(_rows())
    tokens = LENGTHS[0], sum(LENGTHS[1:])
    shares = [MemberRows(name, many, each) for name, many, each in zip(together.members, (1, 3), tokens, strict=True)]
    shapes = _Shapes(head)
    with together.route(shares, length=None if packed else LENGTHS[0]):
        found, wanted = (_values(together.model, each, batch) for each in (head, _off(head)))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert (shapes.seen[0] == shapes.seen[1]) is packed, "packed members are counted in tokens"


def _hooked(model: nn.Module, head: Head) -> None:
    assert head.last_block is not None
    head.last_block.register_forward_hook(lambda *_: None)


def _virtual(model: nn.Module, head: Head) -> None:
    assert head.last_block is not None
    own = head.last_block.forward
    head.last_block.forward = lambda *given, **named: own(*given, **named)


def _dropping(model: nn.Module, head: Head) -> None:
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = nn.Dropout(1e-9)


@pytest.mark.parametrize("reader", [_hooked, _virtual, _dropping])
def test_where_others_read_the_block_it_computes_all(reader: Callable[[nn.Module, Head], None]) -> None:
    backbone = _model("llama")
    model, head = _adapted(backbone), output_heads.known(backbone)
    reader(model, head)
    shapes = _Shapes(head)
    head.supervised(model, (batch := collate(_rows())).inputs, batch.positions_N)
    assert shapes.seen == [(len(LENGTHS), max(LENGTHS))]


def test_dora_and_rows_that_are_supervised_throughout_compute_all() -> None:
    backbone = _model("llama")
    model, head = _adapted(backbone, Lora(rank=3, method="dora")), output_heads.known(backbone)
    shapes, batch = _Shapes(head), collate(_rows())
    everything = collate([row._replace(supervised=np.ones(len(row.input_ids), dtype=bool)) for row in _rows()])
    head.supervised(model, batch.inputs, batch.positions_N)
    head.supervised(backbone, everything.inputs, everything.positions_N)
    assert shapes.seen == [(len(LENGTHS), max(LENGTHS))] * 2


def test_on_an_accelerator_nothing_is_counted() -> None:
    """A tensor on the meta device has no values that anything could wait for."""
    batch = collate(_rows())
    places_N, ids_BL = batch.positions_N.to("meta"), batch.inputs["input_ids"]
    found = last_block._chosen(places_N, ids_BL, packed=False, by_member=False)
    assert found is not None and found.queries is None and found.places.shape == (1, len(places_N))
    assert last_block._chosen(places_N, ids_BL, packed=False, by_member=True) is None


def test_other_families_have_no_such_block() -> None:
    assert output_heads.known(tiny("GPT2")).last_block is None
