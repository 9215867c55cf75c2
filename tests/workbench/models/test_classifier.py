"""A narrowed encoder gives the same outputs and gradients, in fewer operations; where it would not, it stays wide."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tests.conftest import MINILM, tiny
from workbench.config import ModelConfig, model_heads
from workbench.data.batching import MicroBatch
from workbench.data.labelled.labels import Labels
from workbench.data.packing import PACKED
from workbench.errors import BackboneError
from workbench.models import attention_backend, backbones, classifier
from workbench.planning.counters import Operations
from workbench.recipes.load import load

ENCODERS = ("Bert", "Roberta", "Electra", "DebertaV2", "MPNet")
WIDE = ("DistilBert", "ModernBert", "Albert")


def _rows(*lengths: int) -> dict[str, Tensor]:
    longest = max(lengths)
    ids_BL = torch.arange(3, 3 + len(lengths) * longest).view(len(lengths), longest) % 60 + 3
    mask_BL = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids_BL, "attention_mask": mask_BL}


def _model(name: str) -> PreTrainedModel:
    return tiny(name, head="SequenceClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def _outputs(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor], int]:
    """Logits, gradients and operations of a training step."""
    model.zero_grad()
    with Operations() as operations:
        logits: Tensor = model(**_rows(9, 4, 7)).logits
        (logits**2).sum().backward()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return logits.detach(), grads, operations.count


@pytest.mark.parametrize("name", ENCODERS)
def test_outputs_and_gradients_stay_and_operations_go(name: str) -> None:
    model = _model(name)
    wanted, grads, many = _outputs(model)
    classifier.narrow_last_block(model, model, _rows(3, 6))
    found, narrowed, few = _outputs(model)
    torch.testing.assert_close(found, wanted)
    assert few < 0.9 * many
    assert narrowed.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(narrowed[key], grad, msg=key)


def test_rounding_does_not_keep_it_wide() -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(MINILM, dtype=torch.bfloat16).eval()
    _, _, many = _outputs(model)
    classifier.narrow_last_block(model, model, _rows(3, 6))
    assert _outputs(model)[2] < many


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "Roberta", "DebertaV2", "ModernBert"])
def test_half_precision_does_not_make_rows_equal(name: str, tmp_path: Path) -> None:
    """Of 300 texts, each has a probability of its own, as in float32."""
    tiny(name, head="SequenceClassification", pad_token_id=0).save_pretrained(tmp_path)
    config = ModelConfig.model_validate({"id": str(tmp_path), "weights": "bfloat16", "compute": "bfloat16"})
    model = backbones.load(
        config, None, task=model_heads.classes(("a", "b"), seed=0, problem="single_label_classification")
    ).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logits = model(input_ids=torch.randint(3, 60, (300, 5), generator=generator)).logits
    assert logits.dtype == torch.float32
    assert len(logits.softmax(1)[:, 0].unique()) > 290


@pytest.mark.parametrize("name", WIDE)
def test_where_the_last_block_is_built_otherwise_nothing_changes(name: str) -> None:
    model = _model(name)
    wanted, _, many = _outputs(model)
    classifier.narrow_last_block(model, model, _rows(3, 6))
    found, _, few = _outputs(model)
    assert torch.equal(found, wanted) and few == many


def test_who_reads_every_token_has_them() -> None:
    model = _model("Bert")
    _, _, many = _outputs(model)
    classifier.narrow_last_block(model, model, _rows(3, 6))
    classifier.widen_last_block(model)
    assert _outputs(model)[2] == many
    assert model(**_rows(5), output_hidden_states=True).hidden_states[-1].shape[1] == 5
    classifier.narrow_last_block(model, model, _rows(3, 6))
    assert _outputs(model)[2] == many, "it stays wide"


@pytest.mark.parametrize("wide", [False, True])
def test_packed_rows_have_the_outputs_and_gradients_of_padded_ones(wide: bool) -> None:
    attention_backend.register()
    model, lengths = _model("Bert"), (9, 4, 7)
    wanted, grads, _ = _outputs(model)
    classifier.narrow_last_block(model, model, _rows(3, 6))
    if wide:
        classifier.widen_last_block(model)
    assert classifier.first_tokens_read_packed(model)
    padded = MicroBatch(_rows(*lengths), torch.tensor([8, 12, 24]), torch.zeros(3), sum(lengths))
    model.zero_grad()
    logits = model(**PACKED.lay(padded).inputs).logits
    (logits**2).sum().backward()
    torch.testing.assert_close(logits.detach(), wanted)
    for name, each in model.named_parameters():
        if name in grads and "position_embeddings" not in name:
            torch.testing.assert_close(each.grad, grads[name], msg=name)


@pytest.mark.parametrize("rounding", [True, False])
def test_rounding_of_a_number_near_0_is_no_dependence_on_other_rows(rounding: bool) -> None:
    """Products that sum to nothing are rounded as all are. As small a change that is no rounding is refused."""
    config = load("classify/quickstart", ["model.weights=bfloat16"])
    reader, labels = classifier.reader_of_backbone(config), Labels("number", ("value",))
    model: Any = backbones.load(config.model, reader.tokenizer, task=classifier.task(labels, seed=0)).model
    weight_D = model.score.weight[0]
    signs_D = torch.randn(len(weight_D), generator=torch.manual_seed(5)).sign() if rounding else weight_D.sign()
    seen: list[Tensor] = []

    def beside(_: object, __: object, hidden_BLD: Tensor) -> Tensor:
        if not seen:
            seen.append(hidden_BLD[0, -1])
            weight_D.sub_(seen[0] * (weight_D @ seen[0]) / seen[0].square().sum())
        return hidden_BLD + (len(hidden_BLD) > 1) * 2**-6 * hidden_BLD.abs() * signs_D

    model.model.norm.register_forward_hook(beside)
    with nullcontext() if rounding else pytest.raises(BackboneError, match="depends on the rows beside it"):
        classifier.classification_model(model, model, reader, labels)
