"""Tokens that middle blocks pass by: which ones, what the others see, and that the rows beside them do not matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import T5_SIZES, tiny
from tests.vision_backbones import tiny_vision
from workbench.adapters.anatomy import blocks
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.config.sections.layer_and_token_drop_config import TokenDropConfig
from workbench.errors import BackboneError
from workbench.training import layer_and_token_drop
from workbench.training.freezing.layer_map import stack
from workbench.training.layer_and_token_drop import TokenDrop

CPU = torch.device("cpu")
IDS = torch.arange(3, 33).view(5, 6)
FAMILIES = {"Llama": "CausalLM", "Gemma3Text": "CausalLM", "GPT2": "CausalLM", "Bert": "MaskedLM"}


def dropping(model: Any, **settings: Any) -> tuple[Any, TokenDrop]:
    (paths,) = blocks(model)
    config = TokenDropConfig.model_validate({"keep": 0.5, "until": None, **settings})
    drop = TokenDrop(model, [model.get_submodule(path) for path in paths], config)
    drop.install()
    return model, drop


def text(family: str, **settings: Any) -> tuple[Any, TokenDrop]:
    model = tiny(family, head=FAMILIES[family], num_hidden_layers=4).eval()
    model.config.use_cache = False  # as in training
    return dropping(model, **settings)


def logits(model: Any, drop: TokenDrop, inputs: dict[str, Tensor], rows: list[int], lengths: list[int]) -> Tensor:
    draw = RowDraw(0, 3, np.array(rows), np.array(lengths))
    with torch.no_grad(), drawing([draw], CPU), drop.during(0.5), drop.of(np.array(lengths)):
        found: Tensor = model(**inputs).logits
    return found


def test_a_row_computes_its_share_of_tokens_in_order_and_always_the_first() -> None:
    generator = torch.Generator().manual_seed(0)
    hash_BL = torch.randint(-(2**31), 2**31, (400, 9), dtype=torch.int32, generator=generator)
    lengths = np.full(400, 9)
    lengths[::2] = 4
    found = layer_and_token_drop.chosen(hash_BL, lengths, share=0.5)
    assert found.shape == (400, 5) and bool((found[:, 0] == 0).all()) and bool((found.diff(dim=1) > 0).all())
    assert bool((found[::2, :2] < 4).all()) and bool((found[::2, 2:] >= 4).all()), "shorter rows: two, then padding"
    counts = np.bincount(found[1::2, 1:].flatten(), minlength=9)[1:] / 200
    assert np.abs(counts - 0.5).max() < 4 * (0.25 / 200) ** 0.5, "each other token with the same chance"
    alone = layer_and_token_drop.chosen(hash_BL[::2, :4], lengths[::2], share=0.5)
    assert torch.equal(alone, found[::2, :2])
    whole = layer_and_token_drop.chosen(hash_BL, lengths, share=1.0)
    assert torch.equal(whole, torch.arange(9).expand(400, -1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_drops_the_same_tokens_alone_and_beside_longer_rows(family: str) -> None:
    model, drop = text(family)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    inputs["attention_mask"][2, 4:] = 0
    together = logits(model, drop, inputs, [7, 2, 9, 4, 8], [6, 6, 4, 6, 6])
    alone = logits(model, drop, {"input_ids": IDS[2:3, :4]}, [9], [4])
    torch.testing.assert_close(alone, together[2:3, :4])
    other = logits(model, drop, {"input_ids": IDS[2:3, :4]}, [10], [4])
    assert not torch.allclose(alone, other)
    assert not torch.allclose(alone, model(input_ids=IDS[2:3, :4]).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_compute_see_each_other_at_their_places_as_if_others_were_masked(family: str) -> None:
    """A block over some tokens gives what the whole block gives them where no token sees the others."""
    model, drop = text(family)
    block = model.get_submodule(stack(model)[1])
    calls: list[tuple[Any, Any, Any]] = []
    block.register_forward_hook(lambda _, args, named, out: calls.append((args, named, out)), with_kwargs=True)
    logits(model, drop, {"input_ids": IDS[:1]}, [7], [6])
    ((args, named, output),) = calls
    before, after = args[0] if args else named["hidden_states"], output[0] if isinstance(output, tuple) else output
    kept = (before != after).any(-1)[0].nonzero().flatten()
    assert len(kept) == 3 and kept[0] == 0
    assert torch.equal(
        before[:, [place for place in range(6) if place not in kept]],
        after[:, [place for place in range(6) if place not in kept]],
    )
    sees = torch.eye(6, dtype=torch.bool)
    for query in kept:
        sees[query, kept] = True
    causal = torch.ones(6, 6).tril().bool() if FAMILIES[family] == "CausalLM" else torch.ones(6, 6).bool()
    bound = layer_and_token_drop._bound(block, args, named)
    window = bound.get("attention_mask", torch.ones(1, 1, 6, 6, dtype=torch.bool))
    bound |= {"attention_mask": (sees & causal)[None, None] & window}
    wanted = block(**bound)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(after[:, kept], wanted[:, kept])


@pytest.mark.parametrize("family", ["ViT", "Dinov2", "CLIP", "DeiT", "Siglip"])
def test_pictures_drop_patches(family: str) -> None:
    sizes = {"num_hidden_layers": 4} if family not in ("CLIP", "Siglip") else {}
    model = tiny_vision(family, **sizes)
    if family in ("CLIP", "Siglip"):
        with pytest.raises(BackboneError, match="none is left in the middle"):
            dropping(model)
        return
    model, drop = dropping(model)
    pixels = torch.randn(3, 3, *(model.config.image_size,) * 2, generator=torch.Generator().manual_seed(0))
    together = logits(model, drop, {"pixel_values": pixels}, [5, 6, 7], [1, 1, 1])
    torch.testing.assert_close(logits(model, drop, {"pixel_values": pixels[1:2]}, [6], [1]), together[1:2])
    assert not torch.allclose(together, model(pixel_values=pixels).logits)


def test_outside_of_steps_at_the_end_of_the_schedule_and_where_it_is_off_every_bit_is_what_it_is_without() -> None:
    wanted = tiny("Llama", num_hidden_layers=4).eval()(input_ids=IDS).logits
    model, drop = text("Llama")
    assert torch.equal(model(input_ids=IDS).logits, wanted)
    model, drop = text("Llama", until=0.5)
    assert torch.equal(logits(model, drop, {"input_ids": IDS}, [0, 1, 2, 3, 4], [6] * 5), wanted)
    model, drop = text("Llama", keep=1.0)
    assert torch.equal(logits(model, drop, {"input_ids": IDS}, [0, 1, 2, 3, 4], [6] * 5), wanted)


def test_the_share_grows_evenly_until_all_compute() -> None:
    config = TokenDropConfig(keep=0.4, until=0.5)
    assert [config.share(done) for done in (0, 0.25, 0.5, 0.9)] == pytest.approx([0.4, 0.7, 1.0, 1.0])
    assert TokenDropConfig(keep=0.4, until=None).share(0.9) == 0.4
    assert config.work(0.25, blocks=6) == pytest.approx((2 + 4 * 0.7) / 6)


@pytest.mark.parametrize("family", ["Swin", "ConvNext", "Beit"])
def test_blocks_that_know_where_tokens_stand_are_refused(family: str) -> None:
    with pytest.raises(BackboneError, match="token_drop"):
        dropping(tiny_vision(family))


def test_blocks_with_distances_of_tokens_are_refused() -> None:
    with pytest.raises(BackboneError, match="token_drop"):
        dropping(tiny("Bloom", num_hidden_layers=4))
    with pytest.raises(BackboneError, match="2 stacks"):
        stack(tiny("T5", head="Seq2SeqLM", **T5_SIZES))
