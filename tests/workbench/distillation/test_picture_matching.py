"""Terms between layers of backbones that read pictures: the equations once more, and what cannot be compared."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.vision_backbones import VISION, pixels, tiny_vision
from tests.workbench.distillation.matched import WHATS, pair, picture_pair, pictured, run, term
from workbench.adapters import Lora, Prompt, attach
from workbench.config.sections.distill_config import MatchConfig
from workbench.distillation.feature_matching import FeatureMatching
from workbench.errors import ConfigError

WEIGHTS = [0.5, 2.0, 1.0, 3.0]
"""Of the labels of `pictured`."""


def matching_of(terms: list[MatchConfig], student: PreTrainedModel, teacher: PreTrainedModel) -> FeatureMatching:
    return FeatureMatching(terms, student, teacher, seed=0, picture_13HW=pixels(1))


def compared(terms: list[MatchConfig], student: PreTrainedModel, teacher: PreTrainedModel) -> Tensor:
    return run(matching_of(terms, student, teacher), student, teacher, pictured(range(4)))


def states(model: Any) -> list[Tensor]:
    """Hidden states (4, L, D) in front of the first block, and behind each."""
    found = model(pixel_values=pixels(4), output_hidden_states=True).hidden_states
    return list(found)


def projections(model: Any, layer: int) -> list[Tensor]:
    """Queries, keys and values (4, L, D) of a layer of a ViT or a Dinov2."""
    blocks = model.vit.layers if hasattr(model, "vit") else model.dinov2.encoder.layer
    block = blocks[layer]
    norm = block.layernorm_before if hasattr(block, "layernorm_before") else block.norm1
    attention = block.attention
    return [part(norm(states(model)[layer])) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]


def heads(states_LD: Tensor, count: int) -> list[Tensor]:
    return list(states_LD.chunk(count, dim=1))


PAIRS = [("ViT", "ViT"), ("ViT", "Dinov2")]


@pytest.mark.parametrize("families", PAIRS)
@pytest.mark.parametrize("what", WHATS)
def test_every_term_written_out(what: str, families: tuple[str, str]) -> None:
    student, teacher = tiny_vision(families[0]), tiny_vision(families[1], num_hidden_layers=3)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    found = compared([term(what, layers={1: 2})], student, teacher)
    wanted = torch.zeros(())
    for row, weight in enumerate(WEIGHTS):
        if what.startswith("hidden"):
            own, other = states(student)[1][row], states(teacher)[2][row]
            cosine = 1 - F.cosine_similarity(own, other, dim=-1).mean()
            wanted = wanted + weight * (F.mse_loss(own, other) if what == "hidden_mse" else cosine)
            continue
        mine, theirs = ([each[row] for each in projections(*end)] for end in ((student, 0), (teacher, 1)))
        if what == "attention":
            ends = [zip(heads(queries, 4), heads(keys, 4), strict=True) for queries, keys, _ in (mine, theirs)]
            own, other = (torch.stack([q @ k.T / math.sqrt(8) for q, k in end]) for end in ends)
            wanted = wanted + weight * F.mse_loss(own, other)
            continue
        for one, another in zip(mine, theirs, strict=True):
            for own, other in zip(heads(one, 4), heads(another, 4), strict=True):
                p, q = (F.softmax(each @ each.T / math.sqrt(8), dim=-1) for each in (other, own))
                wanted = wanted + weight * (p * (p / q).log()).sum(-1).mean() / 4
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["ConvNext", "ResNet", "MobileNetV2"])
def test_feature_maps_written_out(family: str) -> None:
    student, teacher = picture_pair(family)
    found = compared([term("hidden_mse")], student, teacher)
    own, other = (states(model.base_model)[-1] for model in (student, teacher))
    each_B = (own - other).square().flatten(1).mean(1)
    torch.testing.assert_close(found, (each_B * torch.tensor(WEIGHTS)).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", VISION)
def test_hidden_states_of_every_family_are_learnt(family: str) -> None:
    student, teacher = picture_pair(family)
    loss = compared([term("hidden_mse"), term("hidden_cosine", layers="uniform")], student, teacher)
    loss.backward()
    assert loss > 0.1 and any(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("family", ["ViT", "Dinov2WithRegisters", "CLIP", "Siglip"])
def test_micro_batches_change_nothing_and_a_copy_has_nothing_to_learn(family: str) -> None:
    student, teacher = picture_pair(family)
    terms = [term(what, layers="uniform") for what in WHATS]
    matching = matching_of(terms, student, teacher)
    together = run(matching, student, teacher, pictured(range(4)))
    parts = [run(matching, student, teacher, pictured(rows)) for rows in ([0], [1, 3], [2])]
    torch.testing.assert_close(torch.stack(parts).sum(), together)
    assert together > 1
    assert compared(terms, student, copy.deepcopy(student)).detach().abs() < 1e-4


def test_a_teacher_of_other_sizes_is_compared_through_projections() -> None:
    student, teacher = tiny_vision("ResNet"), tiny_vision("ResNet", hidden_sizes=[24, 40])
    matching = matching_of([term("hidden_mse", layers="uniform")], student, teacher)
    shapes = [tuple(parameter.shape) for parameter in matching.parameters() if parameter.ndim == 2]
    assert shapes == [(24, 16), (40, 32), (40, 32)]  # what enters the first layer is equally wide
    run(matching, student, teacher, pictured(range(4))).backward()
    assert all(parameter.grad is not None for parameter in matching.parameters())


@pytest.mark.parametrize("family", ["ViT", "CLIP"])
def test_visual_prompts_are_not_compared(family: str) -> None:
    backbone = tiny_vision(family).requires_grad_(False)
    model = attach(backbone, Prompt(virtual_tokens=3), seed=0)
    teacher = tiny_vision(family)
    first = matching_of([term("hidden_mse", layers={0: 0}), term("relation", layers={1: 1})], backbone, teacher)
    # What enters the first layer, and what it makes queries, keys and values of, is the same with them.
    assert run(first, model, teacher, pictured(range(4))).detach().abs() < 1e-6
    for terms in ([term("hidden_mse", layers={1: 1})], [term(what) for what in WHATS]):
        loss = run(matching_of(terms, backbone, teacher), model, teacher, pictured(range(4)))
        loss.backward()
        assert loss > 0 and any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_an_adapter_learns() -> None:
    backbone, teacher = picture_pair("ViT")
    model = attach(backbone.requires_grad_(False), Lora(rank=2, targets="all-linear"), seed=0)
    matching = matching_of([term("hidden_mse", layers="uniform"), term("relation")], backbone, teacher)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = run(matching, model, teacher, pictured(range(4)))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_positions_are_counted_in_pictures_of_the_size_that_is_read() -> None:
    student, teacher = tiny_vision("ViT"), tiny_vision("Dinov2", image_size=64)
    matching_of([term("hidden_mse")], student, teacher)
    with pytest.raises(ConfigError, match=r"17 positions .* 65\."):
        FeatureMatching([term("hidden_mse")], student, teacher, seed=0)


@pytest.mark.parametrize(
    ("settings", "student", "teacher", "message"),
    [
        (
            {"what": "hidden_mse"},
            "Siglip",
            "ViT",
            r"0\.layers: layer 2 of the student, Siglip\w+, has 16 positions .*17\.",
        ),
        (
            {"what": "relation"},
            "Dinov2",
            "Dinov2WithRegisters",
            r"has 17 positions .* 19\. No layers .* Take a teacher",
        ),
        ({"what": "hidden_mse"}, "ResNet", "ViT", r"has 16 positions .* 17\."),
        ({"what": "hidden_cosine", "layers": {1: 3}}, "ResNet", "ConvNext", r"has 64 .* 16\. Write .*layers=\{3: 3\}"),
        (
            {"what": "relation"},
            "ConvNext",
            "ConvNext",
            r"layer 3 of ConvNext\w+ computes no queries.*what=hidden_mse or",
        ),
        ({"what": "attention"}, "MobileNetV2", "MobileNetV2", r"layer 16 of MobileNetV2\w+ computes no queries"),
        ({"what": "relation"}, "Swin", "Swin", r"layer 3 of Swin\w+ attends inside of windows.*what=hidden_mse or"),
        ({"what": "attention"}, "ViT", "Beit", r"BeitFor\w+ turns .* or adds to their scores.*what: relation"),
        ({"what": "hidden_mse", "layers": {4: 1}}, "ResNet", "ResNet", r"the student has no layer 4 .*Write 0 to 3"),
        ({"what": "hidden_mse", "layers": {1: 3}}, "CLIP", "CLIP", r"the teacher has no layer 3 .*Write 0 to 2"),
    ],
)
def test_what_cannot_be_compared_of_pictures(
    settings: dict[str, Any], student: str, teacher: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        matching_of([MatchConfig.model_validate(settings)], tiny_vision(student), tiny_vision(teacher))


def test_a_window_that_holds_the_whole_picture_is_one_row() -> None:
    student, teacher = picture_pair("Swin", window_size=8)  # that of the last stage
    with pytest.raises(
        ConfigError, match=r"other numbers of attention heads in each stage. Write distill.match.0.heads"
    ):
        matching_of([term("relation")], student, teacher)
    assert compared([term("relation", heads=4)], student, teacher) > 0


def test_texts_ask_for_no_picture() -> None:
    student, teacher = pair("Bert", "MaskedLM")
    FeatureMatching([term("hidden_mse")], student, teacher, seed=0)
