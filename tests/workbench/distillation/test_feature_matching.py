"""Terms between layers: the equations once more, where gradients go, and what the loss must not depend on.

What is caught is what the model itself says of its inside, for every family; nothing is held on.
Which layers of two models meet, and what is refused: layers that are not there or cannot be compared.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from tests.conftest import FAMILIES, GROUPED, MINILM, T5_SIZES, tiny
from tests.vision_backbones import VISION, pixels, tiny_vision
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
from workbench.adapters import Lora, Prefix, Prompt, anatomy, attach
from workbench.config.sections.distill_config import MatchConfig
from workbench.data.batching import MicroBatch, Row, collate, encoder_inputs
from workbench.distillation import feature_matching
from workbench.distillation.feature_matching import (
    ActivationCatcher,
    CapturePoint,
    ComparedLayers,
    FeatureMatching,
    require_layers,
)
from workbench.errors import ConfigError
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


BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "decoder_start_token_id": 0,
}
OTHERS = {
    "Bert": ("MaskedLM", {}),
    "DistilBert": ("MaskedLM", {}),
    "Electra": ("MaskedLM", {}),
    "MPNet": ("MaskedLM", {}),
    "DebertaV2": ("MaskedLM", {"relative_attention": True}),
    "ModernBert": ("MaskedLM", {"cls_token_id": 3, "sep_token_id": 4}),
    "Phi3": ("CausalLM", GROUPED),
    "T5": ("Seq2SeqLM", {**T5_SIZES, "num_decoder_layers": 3}),
    "Bart": ("Seq2SeqLM", BART),
}
UNKNOWN = ["Falcon", "GPTNeoX"]
"""Families whose projections are interleaved."""
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "out_lin", "o", "Wo")
"""Names of the layer that reads what attention gives; the first of a block is that of its first attention."""
EVERY = pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
ids_BL = torch.tensor([[3, 60, 5, 61, 9, 7, 20], [8, 8, 15, 16, 23, 42, 4]])


def build(name: str) -> PreTrainedModel:
    head, settings = OTHERS.get(name, ("CausalLM", {}))
    return tiny(name, head=head, attn_implementation="eager", **settings)


def inputs(model: PreTrainedModel, *, tokens: int = 7) -> dict[str, Tensor]:
    given = {"input_ids": ids_BL[:, :tokens]}
    return {**given, "decoder_input_ids": given["input_ids"][:, :5]} if model.config.is_encoder_decoder else given


@torch.no_grad()
def catch(
    model: PreTrainedModel, spots: list[CapturePoint], **arguments: Any
) -> tuple[dict[CapturePoint, Tensor], Any]:
    """What was caught, and what the model said."""
    catcher = ActivationCatcher(model, spots, graph=False)
    with catcher.catching():
        said = model(**arguments)
    return catcher.take(), said


def require_its_hidden_states(model: PreTrainedModel, arguments: dict[str, Tensor]) -> None:
    layers = ComparedLayers(model)
    spots = [layers.hidden(layer) for layer in range(layers.count + 1)]
    caught, said = catch(model, spots, **arguments, output_hidden_states=True)
    wanted = said.get("decoder_hidden_states", said.get("hidden_states"))
    assert len(wanted) == layers.count + 1 >= 3
    for spot, hidden_BLD in zip(spots[:-1], wanted[:-1], strict=True):
        assert torch.equal(caught[spot], hidden_BLD)
    # Of the last layer many models only tell what the normalisation behind it makes of it.
    last = caught[spots[-1]]
    inside = tuple(f"{block}." for block in layers.blocks)
    norms = [part for path, part in model.named_modules() if "norm" in type(part).__name__.lower() + path]
    outside = [norm for path, norm in model.named_modules() if norm in norms and not path.startswith(inside)]
    fitting = [norm for norm in outside if getattr(norm, "weight", last[0, 0]).shape == last.shape[-1:]]
    assert any(torch.equal(each, wanted[-1]) for each in (last, *(norm(last) for norm in fitting)))


@EVERY
def test_hidden_states_are_those_that_the_model_tells(name: str) -> None:
    model = build(name)
    require_its_hidden_states(model, inputs(model))


def test_hidden_states_of_real_models(stories: str) -> None:
    require_its_hidden_states(AutoModelForCausalLM.from_pretrained(stories).eval(), {"input_ids": ids_BL})
    require_its_hidden_states(AutoModel.from_pretrained(MINILM).eval(), {"input_ids": ids_BL * 100})


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "Electra", "GPT2", "OPT", "Bart"])
def test_scores_are_what_the_model_attends_by(name: str) -> None:
    """Their softmax over what a token sees is the attention that the model tells."""
    model = build(name)
    layers = ComparedLayers(model)
    assert layers.adds_positions()
    for layer in range(1, layers.count + 1):
        found = layers.projections(layer)
        assert found is not None
        caught, said = catch(model, list(found.spots), **inputs(model), output_attentions=True)
        queries, keys, _ = found.of(caught)
        scores = feature_matching.scores(queries, keys, heads=layers.heads)
        if found.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        wanted = said.get("decoder_attentions", said.get("attentions"))[layer - 1]
        torch.testing.assert_close(scores.softmax(-1), wanted)
        assert found.causal == (wanted[0, 0, 0, 1] == 0)


@pytest.mark.parametrize("name", ["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "CLIP", "Siglip"])
def test_scores_of_patches_are_what_the_model_attends_by(name: str) -> None:
    model = tiny_vision(name)
    model.set_attn_implementation("eager")
    layers = ComparedLayers(model)
    assert layers.adds_positions() and layers.count == 2 and layers.heads == 4
    said = model(pixel_values=pixels(2), output_attentions=True).attentions
    for layer in (1, 2):
        found = layers.projections(layer)
        assert found is not None and not found.causal
        caught, _ = catch(model, list(found.spots), pixel_values=pixels(2))
        queries, keys, _ = found.of(caught)
        scores = feature_matching.scores(queries, keys, heads=4)
        torch.testing.assert_close(scores.softmax(-1), said[layer - 1])


@pytest.mark.parametrize("name", VISION)
def test_widths_and_positions_of_pictures_are_those_that_run(name: str) -> None:
    model = tiny_vision(name)
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    ends = [ComparedLayers(each, pixels(1)) for each in (model, skeleton)]
    spots = [ends[0].hidden(layer) for layer in range(ends[0].count + 1)]
    caught, _ = catch(model, spots, pixel_values=pixels(3))
    for spot in spots:
        assert caught[spot].ndim == 3 and len(caught[spot]) == 3
        for end in ends:
            assert caught[spot].shape == (3, (end.positions(spot) or (0, 0))[1], end.width(spot))
            assert torch.equal(end.own(spot, caught[spot], length=1), caught[spot])
    assert ends[0].count == len(anatomy.blocks(model)[0])


def test_a_feature_map_is_read_row_by_row() -> None:
    model = tiny_vision("ResNet")
    layers = ComparedLayers(model)
    caught, said = catch(model, [layers.hidden(3)], pixel_values=pixels(2), output_hidden_states=True)
    map_BDHW = said.hidden_states[-1]
    found_BLD = caught[layers.hidden(3)]
    for row, column in ((0, 0), (1, 2), (3, 1)):
        assert torch.equal(found_BLD[:, row * map_BDHW.shape[3] + column], map_BDHW[:, :, row, column])


@pytest.mark.parametrize("name", [name for name in (*FAMILIES, *OTHERS) if name not in UNKNOWN])
def test_a_lone_token_attends_to_its_value(name: str) -> None:
    model = build(name)
    layers = ComparedLayers(model)
    found = layers.projections(layers.count)
    assert found is not None
    inside = [path for path, _ in model.named_modules() if path.startswith(layers.blocks[-1])]
    output = CapturePoint(next(path for path in inside if path.rpartition(".")[2] in OUTPUTS), read=True)
    caught, _ = catch(model, [*found.spots, output], **inputs(model, tokens=1))
    queries, keys, values = found.of(caught)
    assert (queries.shape[-1], keys.shape[-1], values.shape[-1]) == found.widths
    width = queries.shape[-1] // layers.heads
    heads = values.unflatten(-1, (-1, width)).repeat_interleave(queries.shape[-1] // values.shape[-1], dim=-2)
    torch.testing.assert_close(caught[output], heads.flatten(-2))


@pytest.mark.parametrize("name", UNKNOWN)
def test_projections_that_are_not_known(name: str) -> None:
    assert ComparedLayers(build(name)).projections(1) is None


@pytest.mark.parametrize("name", ["Llama", "T5", "MPNet", "DebertaV2", "ModernBert", "Phi3", "Falcon"])
def test_positions_that_are_no_part_of_the_embeddings(name: str) -> None:
    assert not ComparedLayers(build(name)).adds_positions()


def test_positions_of_patches_that_attention_adds_to_its_scores() -> None:
    beit = {"use_relative_position_bias": False}
    found = {
        "Swin": [{}, {"use_absolute_embeddings": True}],
        "Swinv2": [{}],
        "Beit": [{}, {"use_absolute_position_embeddings": True}, beit],
    }
    for name, each in found.items():
        assert not any(ComparedLayers(tiny_vision(name, **settings)).adds_positions() for settings in each)
    assert ComparedLayers(tiny_vision("Beit", **beit, use_absolute_position_embeddings=True)).adds_positions()


def test_of_an_encoder_decoder_the_decoder_counts() -> None:
    layers = ComparedLayers(build("Bart"))
    assert (layers.count, layers.heads, feature_matching.layers(layers.model.config)) == (3, 4, 3)
    assert ComparedLayers(build("T5")).count == 3
    found = ComparedLayers(build("T5")).projections(1)
    assert found is not None and "SelfAttention" in found.spots[0].path


def test_layers_that_share_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"AlbertForMaskedLM has 2 layers in 1 blocks"):
        ComparedLayers(tiny("Albert", head="MaskedLM"))


def test_an_adapters_part_is_caught(llama: PreTrainedModel) -> None:
    model = attach(llama, Lora(rank=2, targets="attention"), seed=0)
    found = ComparedLayers(llama).projections(2)
    assert found is not None and found.widths == (32, 16, 16)
    adapted = model.get_submodule(f"base_model.model.{found.spots[0].path}")
    adapted.lora_B["default"].weight.data.fill_(0.5)
    with_adapter, _ = catch(llama, list(found.spots), **inputs(llama))
    read, _ = catch(llama, [CapturePoint(found.spots[0].path, read=True)], **inputs(llama))
    (hidden_BLD,) = read.values()
    assert torch.equal(with_adapter[found.spots[0]], adapted(hidden_BLD))
    assert not torch.allclose(with_adapter[found.spots[0]], adapted.base_layer(hidden_BLD))


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_nothing_is_held_on(llama: PreTrainedModel) -> None:
    layers = ComparedLayers(llama)
    spots = [layers.hidden(0), layers.hidden(2)]
    catcher = ActivationCatcher(llama, spots, graph=True)
    before = hooks(llama)
    with catcher.catching():
        assert hooks(llama) == before + 2
        llama(**inputs(llama))
    assert hooks(llama) == before
    llama(**inputs(llama))  # not seen
    caught = catcher.take()
    assert caught[spots[1]].requires_grad
    with pytest.raises(AssertionError, match="runs first"):
        catcher.take()
    with pytest.raises(RuntimeError, match="out of memory"), catcher.catching():
        llama(**inputs(llama))
        raise RuntimeError("out of memory")
    assert hooks(llama) == before
    with pytest.raises(AssertionError, match="runs first"):
        catcher.take()


def test_of_several_runs_the_mean_is_caught_without_a_graph(llama: PreTrainedModel) -> None:
    spot = ComparedLayers(llama).hidden(2)
    catcher = ActivationCatcher(llama, [spot], graph=False)
    each = [ids_BL[:1], ids_BL[1:]]
    with catcher.catching():
        for row in each:
            llama(input_ids=row)
    mean = catcher.take()[spot]
    assert not mean.requires_grad
    both, _ = catch(llama, [spot], input_ids=ids_BL)
    torch.testing.assert_close(mean[0], both[spot].mean(0))


@pytest.mark.parametrize(
    ("layers", "sizes", "wanted"),
    [
        ("last", (2, 6), {2: 6}),
        ("uniform", (3, 6), {1: 2, 2: 4, 3: 6}),
        ("uniform", (4, 6), {1: 2, 2: 3, 3: 5, 4: 6}),
        ("uniform", (3, 3), {1: 1, 2: 2, 3: 3}),
        ("uniform", (5, 2), {1: 1, 2: 1, 3: 1, 4: 2, 5: 2}),
        ({1: 5}, (4, 6), {1: 5}),
    ],
)
@pytest.mark.parametrize("what", ["hidden_mse", "relation"])
def test_which_layers_meet(layers: Any, sizes: tuple[int, int], wanted: dict[int, int], what: str) -> None:
    ends = [tiny("Llama", num_hidden_layers=size) for size in sizes]
    matching = FeatureMatching([term(what, layers=layers)], *ends, seed=0)
    name = "model.layers.{}" + ("" if what == "hidden_mse" else ".self_attn.q_proj")
    if layers == "uniform" and what == "hidden_mse":
        (own, *_), *rest = [(pair.student[0], pair.teacher[0]) for pair in matching.pairs]
        assert own.read and own.path == "model.layers.0"
    else:
        rest = [(pair.student[0], pair.teacher[0]) for pair in matching.pairs]
    found = {own.path: other.path for own, other in rest}
    assert found == {name.format(own - 1): name.format(other - 1) for own, other in wanted.items()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"what": "hidden_mse", "layers": {3: 1}}, r"match\.1\.layers: the student has no layer 3 .*Write 0 to 2"),
        ({"what": "hidden_mse", "layers": {2: 9}}, r"the teacher has no layer 9 .*Write 0 to 3, 0 being what enters"),
        ({"what": "relation", "layers": {0: 1}}, r"the student has no layer 0 for relation. Write 1 to 2"),
        ({"what": "attention", "layers": {1: 0}}, r"the teacher has no layer 0 for attention. Write 1 to 3"),
        ({"what": "relation", "layers": {}}, r"match\.1\.layers: names no layer"),
    ],
)
def test_layers_that_are_not_there(settings: dict[str, Any], message: str) -> None:
    student, teacher = tiny("Bert", head="MaskedLM"), tiny("Bert", head="MaskedLM", **LARGER)
    terms = [term("hidden_mse"), MatchConfig.model_validate(settings)]
    for refuse in (
        lambda: require_layers(terms, 2, 3),
        lambda: FeatureMatching(terms, student, teacher, seed=0),
    ):
        with pytest.raises(ConfigError, match=message):
            refuse()


@pytest.mark.parametrize(
    ("settings", "student", "teacher", "message"),
    [
        ({"what": "attention"}, ("Llama", {}), ("Llama", {}), r"0\.what=attention: LlamaForCausalLM .*what: relation"),
        ({"what": "attention"}, ("GPT2", {"num_attention_heads": 2}), ("GPT2", {}), r"has 2 .* teacher 4.*relation"),
        ({"what": "relation"}, ("Llama", {}), ("Falcon", {}), r"layer 2 of FalconForCausalLM .*what=hidden_mse or"),
        (
            {"what": "relation", "heads": 3},
            ("Llama", {}),
            ("Llama", {}),
            r"0\.heads: .* are 16, 32 wide, which 3 heads do not cut evenly. Write one of 1, 2, 4, 8, 16\.",
        ),
        (
            {"what": "relation"},
            ("GPT2", {"hidden_size": 36}),
            ("GPT2", {"hidden_size": 40, "num_attention_heads": 8}),
            r"36, 40 wide, which 8 heads .*one of 1, 2, 4\.",
        ),
    ],
)
def test_what_cannot_be_compared(settings: dict[str, Any], student: Any, teacher: Any, message: str) -> None:
    ends = [tiny(name, **own) for name, own in (student, teacher)]
    with pytest.raises(ConfigError, match=message):
        FeatureMatching([MatchConfig.model_validate(settings)], *ends, seed=0)
