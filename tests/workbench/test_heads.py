"""Body and head apart are the model, for every family; a model of which that cannot be said is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BertConfig, PreTrainedModel

from workbench import heads, objectives
from workbench.adapters import Lora, attach
from workbench.data.batching import Indices, collate
from workbench.errors import BackboneError


def _rows() -> list[Indices]:
    """Longer than the sliding windows of the families that have one."""
    chance = np.random.default_rng(0)
    return [chance.integers(3, 64, size) for size in (11, 5, 2, 8)]


@torch.no_grad()
def test_body_and_head_apart_give_the_models_logits(family: PreTrainedModel) -> None:
    head = heads.find(family, family)
    ids = torch.from_numpy(_rows()[0])[None]
    wanted = family(input_ids=ids).logits
    torch.testing.assert_close(head.project(head.hidden(family, ids)), wanted, rtol=1e-5, atol=1e-5)
    assert wanted.std() > 0.05, "logits so small that a wrong head would pass"
    assert head.vocabulary == wanted.shape[-1]


def test_padding_on_the_right_without_a_mask_changes_no_loss(family: PreTrainedModel) -> None:
    head = heads.find(family, family)
    rows = _rows()
    masks = [np.arange(len(row)) % 3 != 1 for row in rows]
    batch = collate(list(zip(rows, masks, strict=True)))
    hidden = head.hidden(family, batch.input_ids_BL).flatten(0, 1)[batch.positions_N]
    found = objectives.next_token(
        hidden, batch.labels_N, head.project, vocabulary=head.vocabulary, weights=[], scale=1.0
    )
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

    head = heads.find(model, llama)
    batch = collate([(ids[0].numpy(), np.ones(6, dtype=bool))])
    hidden = head.hidden(model, batch.input_ids_BL).flatten(0, 1)[batch.positions_N]
    loss = objectives.next_token(
        hidden, batch.labels_N, head.project, vocabulary=head.vocabulary, weights=head.trainable(), scale=1 / 5
    )
    found = torch.autograd.grad(loss, list(rows.values()))
    for one, other in zip(found, wanted, strict=True):
        assert other.abs().sum() > 0
        torch.testing.assert_close(one, other)


def test_a_family_that_scales_its_logits_in_a_way_of_its_own_is_refused(llama: PreTrainedModel) -> None:
    def scale(_: Any, __: Any, output: Any) -> Any:
        output.logits = output.logits * 0.9
        return output

    llama.register_forward_hook(scale)
    with pytest.raises(BackboneError, match="LlamaForCausalLM: its logits are not those of its output head alone"):
        heads.find(llama, llama)


def test_a_model_that_sees_the_tokens_it_is_to_predict_is_refused() -> None:
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config.is_decoder = False
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(BackboneError, match="BertLMHeadModel is no causal language model"):
        heads.find(model, model)
    config.is_decoder = True
    causal = AutoModelForCausalLM.from_config(config).eval()
    assert heads.find(causal, causal).vocabulary == 64


def test_finding_the_head_leaves_the_model_as_it_was(llama: PreTrainedModel) -> None:
    llama.train().requires_grad_(True)
    ids = torch.tensor([[3, 4, 5]])
    before = llama(input_ids=ids).logits
    head = heads.find(llama, llama)
    assert llama.training and all(parameter.grad is None for parameter in llama.parameters())
    assert torch.equal(llama(input_ids=ids).logits, before)
    assert [id(tensor) for tensor in head.trainable()] == [id(llama.get_output_embeddings().weight)]
    assert heads.find(llama.requires_grad_(False), llama).trainable() == []
