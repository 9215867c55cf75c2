"""Families that read pictures beside text: what a row costs here is what the stock model says of the stock batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.processing_utils import VideosKwargs

from tests.vision_families import FAMILIES, save
from workbench import adapters, losses
from workbench.adapters import Lora, anatomy
from workbench.config import DataConfig, ModelConfig
from workbench.config.sections.image_config import ImageConfig
from workbench.data.packing import PACKED
from workbench.data.text import generated_answers, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation.generation import AnswerSampler
from workbench.models import backbones, output_heads
from workbench.models.backbones import Backbone
from workbench.models.picture_features import PictureFeatures, can_keep, kept_bytes, tensors
from workbench.models.picture_processor import PictureProcessor
from workbench.planning.counters import LiveBytes, Operations
from workbench.planning.fake_tensors import BlueprintLoader, fake_tensors

SIZES = ((60, 40), (33, 70), (28, 28), (90, 31))


def _line(name: str) -> Sequence[pytest.MarkDecorator]:
    """The line of tests that a family stands in."""
    return (pytest.mark.slow,) if name in ("llava", "qwen2_5_vl") else (pytest.mark.nightly,)


class Family(NamedTuple):
    """A family's checkpoint, rows of it, and the stock model."""

    rows: TokenizedSet
    processor: PictureProcessor
    model: PreTrainedModel
    stock: PreTrainedModel
    conversations: list[list[dict[str, Any]]]


def _pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in SIZES]


def _conversations(pictures: Sequence[Image.Image]) -> list[list[dict[str, Any]]]:
    """One picture; two in a turn, and one in a later turn; one after the text."""

    def turn(role: str, *parts: object) -> dict[str, Any]:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ]
        return {"role": role, "content": content}

    one, two, three, four = pictures
    return [
        [turn("user", one, "What is it?"), turn("assistant", "A fox in the snow.")],
        [
            turn("user", "First", two, "and then", three, "?"),
            turn("assistant", "Two owls."),
            turn("user", one, "And here?"),
            turn("assistant", "A fox."),
        ],
        [turn("user", "Who lives here?", four), turn("assistant", "Nobody does, as you can see.")],
    ]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=_line(name)) for name in FAMILIES])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name: str = request.param
    section = ModelConfig(id=save(name, tmp_path_factory.mktemp(name)), weights="float32")
    conversations = _conversations(_pictures())
    return _family(section, conversations)


def _family(section: ModelConfig, conversations: list[list[dict[str, Any]]]) -> Family:
    tokenizer = backbones.tokenizer(section)
    processor = PictureProcessor(section, type(backbones.hub_config(section)), ImageConfig())
    encoder = ChatEncoder(tokenizer, processor=processor)
    config = DataConfig(train="rows", max_tokens=4096)
    rows = tokenized.encode([{"messages": each} for each in conversations], tokenizer, encoder, config=config)
    stock = AutoModelForImageTextToText.from_pretrained(section.id, dtype=torch.float32).eval()
    model = backbones.load(section, tokenizer).model
    model.get_input_embeddings().requires_grad_(True)
    return Family(rows, processor, model, stock, conversations)


def _summed(family: Family, numbers: Sequence[int], *, packed: bool = False) -> torch.Tensor:
    """The summed loss of rows, as a run computes it."""
    batch = family.rows.batch(np.asarray(numbers))
    batch = PACKED.lay(batch) if packed else batch
    head = output_heads.find(family.model, family.model)
    hidden_ND = head.supervised(family.model, batch.inputs, batch.positions_N)
    loss = losses.next_token(
        hidden_ND, batch.labels_N, head.project, vocabulary=head.vocabulary, weights=head.trainable(), scale=1.0
    )
    return loss


def test_tokens_loss_and_gradients_are_the_stock_ones(family: Family) -> None:
    if getattr(family.processor.processor, "video_processor", None) is None:  # stock SmolVLM asks it about no video
        family.processor.processor.video_processor = Mock(valid_kwargs=VideosKwargs, fps=None, num_frames=None, size={})
    stock = family.processor.processor.apply_chat_template(
        family.conversations,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "right"},
    )
    labels = torch.full_like(stock["input_ids"], -100)
    for number in range(len(family.rows)):
        row = family.rows[number]
        own = stock["input_ids"][number][stock["attention_mask"][number].bool()]
        assert own.tolist() == row.input_ids.tolist()
        labels[number, : len(own)][torch.from_numpy(row.supervised)] = own[torch.from_numpy(row.supervised)]
    counted = int((labels != -100).sum())
    wanted_loss = family.stock(**stock, labels=labels).loss
    (wanted,) = torch.autograd.grad(wanted_loss, family.stock.get_input_embeddings().weight)
    loss = _summed(family, range(len(family.rows)))
    (found,) = torch.autograd.grad(loss / counted, family.model.get_input_embeddings().weight)
    assert loss.item() / counted == pytest.approx(wanted_loss.item(), abs=1e-5)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_rows_cost_the_same_in_any_micro_batch(family: Family) -> None:
    alone = sum(_summed(family, [number]).item() for number in range(len(family.rows)))
    assert _summed(family, [2, 0, 1]).item() == pytest.approx(alone, rel=1e-5)
    if family.processor.packs:
        assert _summed(family, [0, 1, 2], packed=True).item() == pytest.approx(alone, rel=1e-5)


def test_answers_are_drawn_as_the_stock_model_would(family: Family) -> None:
    rows = [family.rows[number] for number in range(len(family.rows))]
    asked = [row.input_ids[: int(np.flatnonzero(row.supervised)[-1]) - 3] for row in rows]
    draws = [generated_answers.sampling_numbers([7, number], answers=2, tokens=4) for number in range(len(rows))]
    sampler = AnswerSampler(family.model, known=200, stop=[], temperature=1.0, processor=family.processor)
    for batch in ([0, 1, 2], [1]):
        told = sampler.scored([asked[n] for n in batch], [draws[n] for n in batch], [rows[n].pictures for n in batch])
        for number, answer in ((n, answer) for n, group in zip(batch, told, strict=True) for answer in group):
            ids_1L = torch.from_numpy(np.concatenate([asked[number], answer.ids]))[None]
            inputs = family.processor.inputs(ids_1L, [rows[number].pictures])
            with torch.no_grad():
                logits_LV = family.stock(input_ids=ids_1L, **inputs).logits[0, -5:-1, :200]
            wanted = logits_LV.double().log_softmax(-1).gather(1, torch.from_numpy(answer.ids)[:, None])[:, 0]
            assert answer.log_probs == pytest.approx(wanted.numpy(), abs=1e-5)


def test_pictures_carry_no_loss_and_count(family: Family) -> None:
    for number in range(len(family.rows)):
        row = family.rows[number]
        assert not row.supervised[np.isin(row.input_ids, family.processor.token_ids)].any()
    others = [Image.fromarray(255 - np.asarray(each)) for each in _pictures()]
    changed = _family(family.processor.model, _conversations(others))
    assert not set(changed.rows.digests.tolist()) & set(family.rows.digests.tolist())
    assert abs((_summed(changed, [0]) - _summed(family, [0])).item()) > 1e-4


def test_outputs_of_a_frozen_tower_that_were_kept_are_its_own(family: Family) -> None:
    alone = [_summed(family, [number]).item() for number in range(len(family.rows))]
    own = _family(family.processor.model, family.conversations)  # whose processor and model are others
    for each in anatomy.towers(own.model):
        each.requires_grad_(False)
    assert can_keep(own.model)
    features = PictureFeatures(own.model, own.processor)
    own.processor.name_rows(True)
    for _ in range(2):
        assert _summed(own, [2, 0, 1]).item() == pytest.approx(sum(alone), rel=1e-5)
        assert [_summed(own, [number]).item() for number in range(3)] == pytest.approx(alone, rel=1e-5)
    assert features.computed == len(family.rows), "each row went through the tower once"
    held = sum(each.nbytes for outputs in features._kept.values() for each in tensors(outputs))
    assert held <= kept_bytes(own.model, [own.rows]) <= 1.01 * held
    own.processor.name_rows(False)
    assert _summed(own, [0]).item() == pytest.approx(alone[0], rel=1e-6)


def test_a_step_without_values_takes_what_a_real_one_takes(family: Family) -> None:
    def step(backbone: Backbone) -> tuple[int, int]:
        model = adapters.attach(backbone.model, Lora(rank=4), seed=0).train()
        head, batch = output_heads.find(model, backbone.model), family.rows.batch(np.arange(len(family.rows)))
        with LiveBytes() as live, Operations() as operations:
            hidden_ND = head.supervised(model, batch.inputs, batch.positions_N)
            hidden_ND.float().square().sum().backward()
        return live.peak, operations.count

    section, tokenizer = family.processor.model, backbones.tokenizer(family.processor.model)
    real = step(backbones.load(section, tokenizer))
    with fake_tensors():
        planned = step(BlueprintLoader()(section, tokenizer))
    assert planned[0] == pytest.approx(real[0], rel=0.05)
    assert planned[1] == pytest.approx(real[1], rel=0.01)
