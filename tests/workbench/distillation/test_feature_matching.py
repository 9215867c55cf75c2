"""Terms between layers: the equations once more, where gradients go, and what the loss must not depend on."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM

from tests.conftest import MINILM, T5_SIZES, tiny
from tests.workbench.distillation.matched import (
    LARGER,
    ROWS,
    SUPERVISED,
    WHATS,
    Collate,
    alone,
    compared,
    labelled,
    pair,
    run,
    sources,
    term,
    text,
)
from workbench.adapters import Lora, Prefix, Prompt, attach
from workbench.data.batching import MicroBatch, Row, collate, encoder_inputs
from workbench.distillation.feature_matching import FeatureMatching
from workbench.training import activation_checkpointing

# The equations, written a second time, row by row.


def states(model: Any, ids_1L: Tensor) -> list[Tensor]:
    """Hidden states (L, D) of each layer, from the embeddings on."""
    return [hidden[0] for hidden in model(ids_1L, output_hidden_states=True).hidden_states]


def relation(student_LD: Tensor, teacher_LE: Tensor, heads: int) -> Tensor:
    total = torch.zeros(())
    for own, other in zip(student_LD.chunk(heads, dim=1), teacher_LE.chunk(heads, dim=1), strict=True):
        p = F.softmax(other @ other.T / math.sqrt(other.shape[1]), dim=-1)
        q = F.log_softmax(own @ own.T / math.sqrt(own.shape[1]), dim=-1)
        total = total + (p * (p.log() - q)).sum(-1).mean()
    return total / heads


def test_hidden_states_written_out() -> None:
    student, teacher = pair("Llama")
    terms = [term("hidden_mse", layers={0: 0, 1: 1}, weight=3), term("hidden_cosine", layers={1: 0})]
    found = compared(terms, student, teacher, text(range(4)))
    wanted = torch.zeros(())
    for row, supervised in zip(ROWS, SUPERVISED, strict=True):
        own, others = (states(model, torch.from_numpy(row)[None]) for model in (student, teacher))
        squared = (F.mse_loss(own[0], others[0]) + F.mse_loss(own[1], others[1])) / 2
        cosine = 1 - F.cosine_similarity(own[1], others[0], dim=-1).mean()
        wanted = wanted + (3 * squared + cosine) * supervised[1:].sum()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("heads", [None, 2, 8])
def test_relations_written_out(heads: int | None) -> None:
    student, teacher = (tiny("Bert", head="SequenceClassification", **sizes) for sizes in ({}, LARGER))
    batch = labelled(range(4))
    found = compared([term("relation", heads=heads, layers={1: 2})], student, teacher, batch)
    wanted = torch.zeros(())
    for row, weight in zip(ROWS, batch.labels_N[:, 0], strict=True):
        ids = torch.from_numpy(row)[None]
        own, other = states(student, ids)[0], states(teacher, ids)[1]
        for name in ("query", "key", "value"):
            mine = getattr(student.bert.encoder.layer[0].attention.self, name)(own)
            theirs = getattr(teacher.bert.encoder.layer[1].attention.self, name)(other)
            wanted = wanted + weight * relation(mine, theirs, heads or 4)
    torch.testing.assert_close(found, wanted)


def test_attention_written_out() -> None:
    student, teacher = pair("Bert", "MaskedLM")
    length = len(ROWS[0])
    row = alone(ROWS[0].tolist())
    found = compared([term("attention")], student, teacher, row)
    scores = []
    for model in (student, teacher):
        hidden = states(model, row.inputs["input_ids"])[1]
        layer = model.bert.encoder.layer[1].attention.self
        queries, keys = (part(hidden).view(length, 4, 8) for part in (layer.query, layer.key))
        scores.append(torch.einsum("ihd,jhd->hij", queries, keys) / math.sqrt(8))
    torch.testing.assert_close(found, (scores[0] - scores[1]).square().mean())


def test_a_causal_model_is_not_compared_where_it_does_not_look() -> None:
    student, teacher = pair("GPT2")
    row = alone([5, 9])
    found = compared([term("attention", layers={1: 1})], student, teacher, row)
    scores = []
    for model in (student, teacher):
        block = model.transformer.h[0]
        hidden = states(model, row.inputs["input_ids"])[0]
        queries, keys, _ = block.attn.c_attn(block.ln_1(hidden)).split(32, dim=-1)
        each = zip(queries.chunk(4, dim=1), keys.chunk(4, dim=1), strict=True)
        scores.append(torch.stack([query @ key.T / math.sqrt(8) for query, key in each]))
    difference = (scores[0] - scores[1]).square()
    torch.testing.assert_close(found, (difference[:, 0, 0] + difference[:, 1, 0] + difference[:, 1, 1]).mean() / 4)


# Where gradients go.


@pytest.mark.parametrize("what", WHATS)
def test_a_copy_has_nothing_to_learn(what: str) -> None:
    student = tiny("GPT2")
    loss = compared([term(what, layers="uniform")], student, copy.deepcopy(student), text(range(4)))
    loss.backward()
    assert loss.detach().abs() < 1e-4
    assert all(p.grad is None or p.grad.abs().max() < 1e-3 for p in student.parameters())
    assert any(p.grad is not None for p in student.parameters())


@pytest.mark.parametrize("what", WHATS)
def test_gradients_reach_student_and_projections_alone(what: str) -> None:
    student, teacher = tiny("OPT"), tiny("OPT", **LARGER, word_embed_proj_dim=48)
    matching = FeatureMatching([term(what, layers={1: 2})], student, teacher, seed=0)
    assert len(list(matching.parameters())) == (2 if what.startswith("hidden") else 0)
    run(matching, student, teacher, text(range(4))).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    reached = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-6}
    assert any("embed_tokens" in name for name in reached)
    assert any("layers.0" in name for name in reached) and not any("layers.1" in name for name in reached)
    assert all(p.grad is not None and p.grad.abs().max() > 1e-6 for p in matching.parameters())


def test_descending_makes_layers_alike() -> None:
    student, teacher = tiny("Llama"), tiny("Llama", **LARGER)
    terms = [term("hidden_mse", layers="uniform"), term("hidden_cosine"), term("relation")]
    matching = FeatureMatching(terms, student, teacher, seed=0)
    optimizer = torch.optim.Adam([*student.parameters(), *matching.parameters()], lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = run(matching, student, teacher, text(range(4)))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_recomputed_activations_give_the_same_gradients() -> None:
    student, teacher = pair("Llama", use_cache=False)
    student.train()
    terms = [term("hidden_mse", layers="uniform"), term("relation", layers="uniform")]
    found = []
    for recompute in (False, True):
        if recompute:
            activation_checkpointing.keep(student, True)
        student.zero_grad()
        compared(terms, student, teacher, text(range(4))).backward()
        found.append([p.grad.clone() for p in student.model.layers.parameters() if p.grad is not None])
    assert len(found[0]) > 10
    torch.testing.assert_close(found[0], found[1])


# What the loss must not depend on.


@pytest.mark.parametrize(
    ("family", "head", "settings", "batch", "whats"),
    [
        ("Llama", "CausalLM", {}, text, WHATS[:3]),
        ("GPT2", "CausalLM", {}, text, WHATS),
        ("T5", "Seq2SeqLM", T5_SIZES, sources, WHATS[:3]),
        ("Bert", "SequenceClassification", {}, labelled, WHATS),
        ("Llama", "SequenceClassification", {}, labelled, WHATS[:3]),
    ],
)
def test_neither_padding_nor_micro_batches_matter(
    family: str, head: str, settings: dict[str, Any], batch: Collate, whats: list[str]
) -> None:
    student, teacher = pair(family, head, **settings)
    matching = FeatureMatching([term(what, layers="uniform") for what in whats], student, teacher, seed=0)
    together = run(matching, student, teacher, batch([0, 1, 2, 3]))
    for groups in ([[0, 1], [2, 3]], [[0, 3], [1], [2]]):
        parts = [run(matching, student, teacher, batch(group)) for group in groups]
        torch.testing.assert_close(torch.stack(parts).sum(), together)
    assert together > 1


def test_a_row_weighs_what_its_labels_weigh() -> None:
    student, teacher = pair("Llama")
    whole = text([0, 1])
    heavy = MicroBatch(whole.inputs, whole.positions_N.repeat(2), whole.labels_N.repeat(2), 0, whole.lengths_B)
    matching = FeatureMatching([term("hidden_mse")], student, teacher, seed=0)
    losses = [run(matching, student, teacher, batch) for batch in (whole, heavy)]
    torch.testing.assert_close(losses[1], 2 * losses[0])


def test_seed_alone_decides_the_projections() -> None:
    student, teacher = tiny("Llama"), tiny("Llama", **LARGER)
    terms = [term("hidden_mse", layers="uniform")]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, again, other = (
        dict(FeatureMatching(terms, student, teacher, seed=seed).named_parameters()) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert len(one) == 6 and all(parameter.dtype == torch.float32 for parameter in one.values())
    assert all(torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name]) for name in one)


def test_half_precision() -> None:
    student, teacher = (model.bfloat16() for model in pair("Llama"))
    terms = [term("hidden_mse", layers="uniform"), term("relation")]
    loss = compared(terms, student, teacher, text(range(4)))
    loss.backward()
    assert loss.dtype == torch.float32
    wanted = compared(terms, student.float(), teacher.float(), text(range(4)))
    torch.testing.assert_close(loss, wanted, rtol=0.1, atol=0)
    wider = tiny("Llama", **LARGER)
    matching = FeatureMatching(terms, student, wider, seed=0).bfloat16()
    assert run(matching, student, wider, text(range(4))).dtype == torch.float32


# Students with an adapter.


def test_adapter_and_teacher_over_one_backbone() -> None:
    backbone = tiny("Llama").requires_grad_(False)
    model = attach(backbone, Lora(rank=2, targets=("q_proj", "k_proj", "v_proj")), seed=0)
    terms = [term("hidden_mse", layers="uniform"), term("relation")]
    matching = FeatureMatching(terms, backbone, backbone, seed=0)
    batch = text(range(4))

    def loss() -> Tensor:
        with torch.no_grad(), matching.teacher(), model.disable_adapter():
            model(**batch.inputs)
        with matching.student():
            model(**batch.inputs)
        return matching.loss(batch)

    assert loss().detach().abs() < 1e-5  # an adapter that changes nothing yet
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    found = loss()
    found.backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(found, compared(terms, merged, tiny("Llama"), batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [Prompt(virtual_tokens=3), Prefix(virtual_tokens=3)])
def test_virtual_tokens_are_not_compared(method: Any) -> None:
    backbone = tiny("Llama").requires_grad_(False)
    model = attach(backbone, method, seed=0)
    teacher = tiny("Llama")
    matching = FeatureMatching(
        [term("hidden_mse", layers={0: 0}), term("relation", layers={1: 1})], backbone, teacher, seed=0
    )
    # What enters the first layer, and what it makes queries, keys and values of, is the same with them.
    assert run(matching, model, teacher, text(range(4))).detach().abs() < 1e-6
    deeper = FeatureMatching([term("hidden_mse")], backbone, teacher, seed=0)
    loss = run(deeper, model, teacher, text(range(4)))
    loss.backward()
    assert loss > 0 and all(p.grad is not None for p in model.parameters() if p.requires_grad)


# Real models.


def test_fewer_layers_of_real_models(stories: str) -> None:
    """A student of a teacher's first layers differs from it only from where they end."""
    ids = [np.arange(5, 25), np.arange(40, 50)]
    for teacher, batch in (
        (AutoModelForCausalLM.from_pretrained(stories), collate([Row(row, row > 0) for row in ids])),
        (
            AutoModel.from_pretrained(MINILM),
            MicroBatch(encoder_inputs([row * 50 for row in ids]), torch.arange(2), torch.ones(2, 2), 30),
        ),
    ):
        teacher.eval()
        config = copy.deepcopy(teacher.config)
        config.num_hidden_layers = 2
        student = type(teacher)(config).eval()
        student.load_state_dict(teacher.state_dict(), strict=False)
        whats = WHATS if "Bert" in type(teacher).__name__ else WHATS[:3]
        with torch.no_grad():
            same = [float(compared([term(what, layers={2: 2})], student, teacher, batch)) for what in whats]
            last = [float(compared([term(what, layers="last")], student, teacher, batch)) for what in whats]
        assert same == pytest.approx([0] * len(whats), abs=1e-4)
        assert all(value > 0.1 for value in last)
