"""What is caught is what the model itself says of its inside, for every family; nothing is held on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from tests.conftest import FAMILIES, GROUPED, MINILM, T5_SIZES, tiny
from tests.vision_backbones import VISION, pixels, tiny_vision
from workbench.adapters import Lora, anatomy, attach
from workbench.distillation import feature_matching
from workbench.distillation.feature_matching import ActivationCatcher, CapturePoint, ComparedLayers
from workbench.errors import ConfigError

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
