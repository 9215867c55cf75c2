"""Body and head apart are the model, for every family; a model of which that cannot be said is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BertConfig, PreTrainedModel

from tests.conftest import T5_SIZES, tiny
from tests.workbench.models.test_attention_backend import SHAPES
from workbench import losses
from workbench.adapters import Lora, attach
from workbench.adapters.banks import bank
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.data.batching import Indices, MicroBatch, Row, collate, encoder_inputs
from workbench.data.packing import PACKED, SharedPrefix
from workbench.errors import BackboneError
from workbench.models import attention_backend, fused_lora, output_heads
from workbench.models.output_heads import Head
from workbench.training import activation_checkpointing

LENGTHS = (40, 33, 33, 20)
ANSWERS = (5, 9, 1, 7)
PREFIX = 8


def _rows() -> list[Indices]:
    """Longer than the sliding windows of the families that have one."""
    chance = np.random.default_rng(0)
    return [chance.integers(3, 64, size) for size in (11, 5, 2, 8)]


@torch.no_grad()
def test_body_and_head_apart_give_the_models_logits(family: PreTrainedModel) -> None:
    head = output_heads.find(family, family)
    ids = torch.from_numpy(_rows()[0])[None]
    wanted = family(input_ids=ids).logits
    torch.testing.assert_close(head.project(head.hidden(family, {"input_ids": ids})), wanted, rtol=1e-5, atol=1e-5)
    assert wanted.std() > 0.05, "logits so small that a wrong head would pass"
    assert head.vocabulary == wanted.shape[-1]


def test_padding_on_the_right_without_a_mask_changes_no_loss(family: PreTrainedModel) -> None:
    head = output_heads.find(family, family)
    rows = _rows()
    masks = [np.arange(len(row)) % 3 != 1 for row in rows]
    batch = collate(list(map(Row, rows, masks)))
    hidden = head.hidden(family, batch.inputs).flatten(0, 1)[batch.positions_N]
    found = losses.next_token(hidden, batch.labels_N, head.project, vocabulary=head.vocabulary, weights=[], scale=1.0)
    wanted = torch.zeros(())
    for row, mask in zip(rows, masks, strict=True):
        logits = family(input_ids=torch.from_numpy(row)[None]).logits[0, :-1]
        wanted += F.cross_entropy(logits[mask[1:]], torch.from_numpy(row[1:][mask[1:]]), reduction="sum").detach()
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_new_rows_are_those_of_the_whole_model(llama: PreTrainedModel, tied: bool) -> None:
    if tied:
        llama.config.tie_word_embeddings = True
        llama.tie_weights()
    model = attach(llama, Lora(rank=2), seed=0, new_token_ids=[60, 61])
    rows = {name: each for name, each in model.named_parameters() if each.requires_grad and "token" in name}
    assert len(rows) == (1 if tied else 2)
    ids = torch.tensor([[3, 60, 5, 61, 9, 60]])
    wanted = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, list(rows.values()))

    head = output_heads.find(model, llama)
    batch = collate([Row(ids[0].numpy(), np.ones(6, dtype=bool))])
    hidden = head.hidden(model, batch.inputs).flatten(0, 1)[batch.positions_N]
    loss = losses.next_token(
        hidden, batch.labels_N, head.project, vocabulary=head.vocabulary, weights=head.trainable(), scale=1 / 5
    )
    found = torch.autograd.grad(loss, list(rows.values()))
    for one, other in zip(found, wanted, strict=True):
        assert other.abs().sum() > 0
        torch.testing.assert_close(one, other)


ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "T5": T5_SIZES,
    "Bart": {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2},
    "Marian": {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 0},
}


@pytest.fixture(params=sorted(ENCODER_DECODERS))
def encoder_decoder(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model with an encoder and a decoder; Marian adds a bias to its logits, which is not zero here."""
    model = tiny(request.param, head="Seq2SeqLM", **ENCODER_DECODERS[request.param])
    if request.param == "Marian":
        model.final_logits_bias.normal_()  # type: ignore[union-attr, operator]
    return model


def test_loss_and_gradients_of_an_encoder_decoder_are_transformers_own(encoder_decoder: PreTrainedModel) -> None:
    """Answers of unequal length to prompts of unequal length, padded and masked here and there."""
    model = attach(encoder_decoder, Lora(rank=2, dropout=0.0), seed=0).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    start = encoder_decoder.config.decoder_start_token_id
    asked, answered = _rows(), _rows()[::-1]
    rows = [
        Row(np.asarray([*question, start, *answer]), np.arange(len(question) + 1 + len(answer)) > len(question), size)
        for question, answer, size in zip(asked, answered, map(len, asked), strict=True)
    ]
    ids, mask, labels = (torch.full((4, 11), fill) for fill in (0, 0, -100))
    for number, (question, answer) in enumerate(zip(asked, answered, strict=True)):
        ids[number, : len(question)], mask[number, : len(question)] = torch.from_numpy(question), 1
        labels[number, : len(answer)] = torch.from_numpy(answer)
    wanted = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    wanted_grads = torch.autograd.grad(wanted, trained)

    head, batch = output_heads.find(model, encoder_decoder), collate(rows)
    hidden = head.hidden(model, batch.inputs).flatten(0, 1)[batch.positions_N]
    count = sum(map(len, answered))
    found = losses.next_token(
        hidden, batch.labels_N, head.project, vocabulary=head.vocabulary, weights=[], scale=1 / count
    )
    torch.testing.assert_close(found, wanted)
    assert batch.tokens == count + 4 + sum(map(len, asked))
    for one, other in zip(torch.autograd.grad(found, trained), wanted_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_decoder_that_sees_the_tokens_it_is_to_predict_is_refused() -> None:
    model = tiny("T5", head="Seq2SeqLM", **T5_SIZES)
    assert output_heads.find(model, model).vocabulary == 64

    def mean(_: Any, __: Any, output: Any) -> Any:
        return output[0] + output[0].mean(1, keepdim=True), *output[1:]

    model.get_decoder().block[0].register_forward_hook(mean)
    with pytest.raises(BackboneError, match="T5ForConditionalGeneration is no causal language model"):
        output_heads.find(model, model)


@pytest.mark.parametrize("name", ["Bert", "Roberta", "DebertaV2"])
@torch.no_grad()
def test_the_head_of_a_masked_language_model_gives_its_logits(name: str) -> None:
    model = tiny(name, head="MaskedLM")
    head, inputs = output_heads.find(model, model), encoder_inputs(_rows())
    wanted = model(**inputs).logits
    torch.testing.assert_close(head.project(head.hidden(model, inputs)), wanted, rtol=1e-5, atol=1e-5)
    assert wanted.std() > 0.05


def test_a_family_that_scales_its_logits_in_a_way_of_its_own_is_refused(llama: PreTrainedModel) -> None:
    def scale(_: Any, __: Any, output: Any) -> Any:
        output.logits = output.logits * 0.9
        return output

    llama.register_forward_hook(scale)
    with pytest.raises(BackboneError, match="LlamaForCausalLM: its logits are not those of its output head alone"):
        output_heads.find(llama, llama)


def test_a_model_that_sees_the_tokens_it_is_to_predict_is_refused() -> None:
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config.is_decoder = False
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(BackboneError, match="BertLMHeadModel is no causal language model"):
        output_heads.find(model, model)
    config.is_decoder = True
    causal = AutoModelForCausalLM.from_config(config).eval()
    assert output_heads.find(causal, causal).vocabulary == 64


def test_finding_the_head_leaves_the_model_as_it_was(llama: PreTrainedModel) -> None:
    llama.train().requires_grad_(True)
    ids = torch.tensor([[3, 4, 5]])
    before = llama(input_ids=ids).logits
    head = output_heads.find(llama, llama)
    assert llama.training and all(parameter.grad is None for parameter in llama.parameters())
    assert torch.equal(llama(input_ids=ids).logits, before)
    assert [id(tensor) for tensor in head.trainable()] == [id(llama.get_output_embeddings().weight)]
    assert output_heads.find(llama.requires_grad_(False), llama).trainable() == []


def _model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    attention_backend.register()
    name, shape = SHAPES[family]
    # Its window reaches back less far than the longest row, so that transformers makes a mask of it.
    return tiny(name, **{**shape, **({"sliding_window": 30} if family == "mistral" else {})}).to(dtype)


def _rows_last_block() -> list[Row]:
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
    [*((each, "padded") for each in output_heads.LAST_BLOCK_FAMILIES), ("qwen3", "packed"), ("llama", "shared")],
)
def test_losses_and_gradients_are_those_of_all_positions(family: str, layout: str) -> None:
    model = _adapted(backbone := _model(family))
    head, batch = output_heads.known(backbone), LAYOUTS[layout](_rows_last_block())
    shapes = _Shapes(head)
    found, wanted = _values(model, head, batch), _values(model, _off(head), batch)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    narrow, whole = shapes.seen
    assert narrow[0] * narrow[1] < 0.6 * whole[0] * whole[1]
    assert "forward" not in vars(head.last_block), "it is put back"


def test_in_float32_they_agree_to_its_rounding() -> None:
    backbone = _model("llama", torch.float32)
    model = _adapted(backbone).float()
    head, batch = output_heads.known(backbone), collate(_rows_last_block())
    torch.testing.assert_close(_values(model, head, batch), _values(model, _off(head), batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_activations_change_nothing(layout: str) -> None:
    backbone = _model("llama")
    model, head, batch = _adapted(backbone), output_heads.known(backbone), LAYOUTS[layout](_rows_last_block())
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
    head, batch = output_heads.known(backbone), (LAYOUTS["packed" if packed else "padded"])(_rows_last_block())
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
    head.supervised(model, (batch := collate(_rows_last_block())).inputs, batch.positions_N)
    assert shapes.seen == [(len(LENGTHS), max(LENGTHS))]


def test_dora_and_rows_that_are_supervised_throughout_compute_all() -> None:
    backbone = _model("llama")
    model, head = _adapted(backbone, Lora(rank=3, method="dora")), output_heads.known(backbone)
    shapes, batch = _Shapes(head), collate(_rows_last_block())
    everything = collate(
        [row._replace(supervised=np.ones(len(row.input_ids), dtype=bool)) for row in _rows_last_block()]
    )
    head.supervised(model, batch.inputs, batch.positions_N)
    head.supervised(backbone, everything.inputs, everything.positions_N)
    assert shapes.seen == [(len(LENGTHS), max(LENGTHS))] * 2


def test_on_an_accelerator_nothing_is_counted() -> None:
    """A tensor on the meta device has no values that anything could wait for."""
    batch = collate(_rows_last_block())
    places_N, ids_BL = batch.positions_N.to("meta"), batch.inputs["input_ids"]
    found = output_heads._chosen(places_N, ids_BL, packed=False, by_member=False)
    assert found is not None and found.queries is None and found.places.shape == (1, len(places_N))
    assert output_heads._chosen(places_N, ids_BL, packed=False, by_member=True) is None


def test_other_families_have_no_such_block() -> None:
    assert output_heads.known(tiny("GPT2")).last_block is None
