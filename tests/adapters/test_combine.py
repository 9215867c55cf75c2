"""Combined adapters do what the sum of their updates does, in stock PEFT, and what cannot be summed is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Lora, combine
from workbench.errors import ConfigError, FileError

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])
WEIGHTS = (0.5, -1.5, 2.0)
SETTINGS: list[dict[str, Any]] = [
    {"rank": 3, "alpha": 6.0},
    {"method": "rslora", "rank": 5, "alpha": 7.0, "targets": "mlp"},
    {"rank": 2, "alpha": 1.0, "targets": "attention"},
]


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    logits: Tensor = model.eval()(input_ids=IDS).logits
    return logits


def _save(base: PreTrainedModel, folder: Path, seed: int = 1, **settings: Any) -> Path:
    """An adapter of random values."""
    model = adapters.attach(copy.deepcopy(base), Lora.model_validate(settings), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapters.save(model, folder)
    return folder


def _merged(base: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """All weights with the adapter added, by stock PEFT, in float64."""
    model: Any = PeftModel.from_pretrained(copy.deepcopy(base).double(), str(folder))
    return dict(model.double().merge_and_unload().state_dict())


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Falcon"])
def test_the_sum_is_exact_for_different_ranks_scales_and_targets(name: str, tmp_path: Path) -> None:
    base = tiny(name)
    folders = [_save(base, tmp_path / str(seed), seed, **each) for seed, each in enumerate(SETTINGS)]
    saved = [combine.read(folder) for folder in folders]
    total = combine.weighted_sum(saved, WEIGHTS)
    written = combine.write(total, tmp_path / "sum", like=saved[0])
    error = combine.error(written, total)
    assert error.overall < 1e-6 and max(error.layers.values()) < 1e-6 and error.layers.keys() == total.keys()

    own = {key: each.double() for key, each in base.state_dict().items()}
    parts = [_merged(base, folder) for folder in folders]
    found = _merged(base, tmp_path / "sum")
    for key, value in own.items():
        wanted = value + sum(w * (part[key] - value) for w, part in zip(WEIGHTS, parts, strict=True))
        torch.testing.assert_close(found[key], wanted, rtol=1e-5, atol=1e-5)
    ours = adapters.load(copy.deepcopy(base), tmp_path / "sum")
    stock = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "sum"))
    assert torch.equal(_logits(ours), _logits(stock))
    assert not torch.allclose(_logits(ours), _logits(base), atol=1e-2)


def test_a_soup_is_the_mean_of_the_updates_and_not_of_their_factors(tmp_path: Path) -> None:
    base = tiny("Llama")
    saved = [combine.read(_save(base, tmp_path / str(seed), seed, rank=3, alpha=6.0)) for seed in range(3)]
    soup = combine.weighted_sum(saved, [1 / 3] * 3)
    combine.write(combine.nearest(soup, 9), tmp_path / "soup", like=saved[0])
    found = combine.read(tmp_path / "soup").updates
    for layer in soup:
        updates = [each.updates[layer] for each in saved]
        wanted = sum(each.up_OR @ each.down_RI for each in updates) / 3
        torch.testing.assert_close(found[layer].up_OR @ found[layer].down_RI, wanted, rtol=1e-5, atol=1e-6)
        down, up = (torch.stack(factors).mean(dim=0) for factors in zip(*updates, strict=True))
        assert torch.linalg.norm(up @ down - wanted) > 0.3 * torch.linalg.norm(wanted)


def test_a_soup_does_not_mind_how_an_update_is_written_as_factors(tmp_path: Path) -> None:
    """A twin with both factors negated does the same; the mean of their factors does nothing at all."""
    base = tiny("Llama")
    saved = combine.read(_save(base, tmp_path / "one", rank=3))
    twin = {layer: combine.Update(-down, -up) for layer, (down, up) in saved.updates.items()}
    soup = combine.weighted_sum([saved, replace(saved, updates=twin)], (0.5, 0.5))
    assert combine.error(combine.nearest(soup, 3), saved.updates).overall < 1e-7


@pytest.mark.parametrize("rank", [1, 4, 7])
def test_the_nearest_update_of_a_rank_is_that_of_the_singular_values(rank: int, tmp_path: Path) -> None:
    base = tiny("Llama")
    saved = [combine.read(_save(base, tmp_path / str(seed), seed, **SETTINGS[seed])) for seed in (0, 1)]
    total = combine.weighted_sum(saved, WEIGHTS[:2])
    near = combine.nearest(total, rank)
    error = combine.error(near, total)
    squares, kept = 0.0, 0.0
    for layer, (down, up) in total.items():
        values = torch.linalg.svdvals(up @ down)
        assert near[layer].down_RI.shape[0] == min(rank, len(down))
        tail, all_ = float((values[rank:] ** 2).sum()), float((values**2).sum())
        assert error.layers[layer] == pytest.approx((tail / all_) ** 0.5, abs=1e-7)
        squares, kept = squares + all_, kept + tail
    assert error.overall == pytest.approx((kept / squares) ** 0.5, abs=1e-7)
    assert error.overall > 0.01
    combine.write(near, tmp_path / "near", like=saved[0])
    loaded = load_file(tmp_path / "near" / "adapter_model.safetensors")
    assert max(each.shape[0] for name, each in loaded.items() if "lora_A" in name) == rank


def test_a_rank_that_suffices_loses_nothing(tmp_path: Path) -> None:
    saved = combine.read(_save(tiny("Llama"), tmp_path / "one", rank=4))
    doubled = combine.weighted_sum([saved, saved], (0.25, 0.75))
    assert combine.error(combine.nearest(doubled, 4), saved.updates).overall < 1e-7


def test_what_cancels_out_is_written_as_nothing(tmp_path: Path) -> None:
    base = tiny("Llama")
    saved = combine.read(_save(base, tmp_path / "one", rank=2))
    total = combine.weighted_sum([saved, saved], (1.0, -1.0))
    combine.write(total, tmp_path / "none", like=saved)
    torch.testing.assert_close(_logits(adapters.load(copy.deepcopy(base), tmp_path / "none")), _logits(base))


STOCK: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora=True makes it more than a sum of updates"),
    "bias": ({"bias": "lora_only"}, "bias='lora_only' makes it more"),
    "head": ({"modules_to_save": ["lm_head"]}, "modules_to_save=.'lm_head'. makes it more"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' makes it more"),
    "rows": ({"trainable_token_indices": [3]}, "it holds rows of new tokens"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "embed_tokens.base_layer.weight is no part of an update of"),
}


@pytest.mark.parametrize("case", STOCK)
@pytest.mark.filterwarnings("ignore")  # stock PEFT warns about some of these itself
def test_what_is_more_than_updates_is_refused(case: str, tmp_path: Path) -> None:
    settings, message = STOCK[case]
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **settings})
    get_peft_model(tiny("Llama", tie_word_embeddings=False), config).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=message) as caught:
        combine.read(tmp_path)
    assert "Combine adapters" in str(caught.value)


@pytest.mark.filterwarnings("ignore")  # stock PEFT warns about heads
def test_trained_heads_are_averaged_by_the_weights(tmp_path: Path) -> None:
    base, weights = tiny("Llama", tie_word_embeddings=False), (0.5, 1.5)
    for seed, folder in enumerate((tmp_path / "one", tmp_path / "two")):
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = get_peft_model(copy.deepcopy(base), config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(str(folder))
        (folder / combine.LABELS).write_text("{}")
    saved = [combine.read(tmp_path / name) for name in ("one", "two")]
    total, heads = combine.weighted_sum(saved, weights), combine.mean_heads(saved, weights)
    combine.write(total, tmp_path / "both", like=saved[0], heads=heads)
    first, second, both = (_merged(base, tmp_path / name) for name in ("one", "two", "both"))
    for name, value in base.double().state_dict().items():
        wanted = value + 0.5 * (first[name] - value) + 1.5 * (second[name] - value)
        if name == "lm_head.weight":
            wanted = 0.25 * first[name] + 0.75 * second[name]
        torch.testing.assert_close(both[name], wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="have no mean"):
        combine.mean_heads(saved, (1.0, -1.0))
    (tmp_path / "two" / combine.LABELS).write_text('{"names": []}')
    with pytest.raises(ConfigError, match="tell other labels"):
        combine.mean_heads(saved, weights)


def test_other_kinds_other_backbones_and_other_folders_are_refused(tmp_path: Path) -> None:
    base = tiny("GPT2")
    adapters.save(adapters.attach(copy.deepcopy(base), adapters.BitFit(), seed=0), tmp_path / "bitfit")
    with pytest.raises(ConfigError, match="a PARTIAL adapter is no update of weights that could be added"):
        combine.read(tmp_path / "bitfit")
    with pytest.raises(
        FileError, match=r"no whole adapter \(.*adapter_config\.json.*Name the folder of a saved adapter"
    ):
        combine.read(tmp_path)

    saved = combine.read(_save(tiny("Llama"), tmp_path / "narrow"))
    wide = combine.read(_save(tiny("Llama", intermediate_size=64), tmp_path / "wide"))
    with pytest.raises(ConfigError, match=r"has 48 inputs and 32 outputs in .*narrow, 64 and 32 in .*wide"):
        combine.weighted_sum([saved, wide], (1.0, 1.0))
    config = json.loads((tmp_path / "narrow" / "adapter_config.json").read_text())
    (tmp_path / "narrow" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "x"}))
    with pytest.raises(ConfigError, match="stands on base_model_name_or_path="):
        combine.weighted_sum([saved, combine.read(tmp_path / "narrow")], (1.0, 1.0))


def _pair(base: PreTrainedModel, folder: Path) -> list[combine.Saved]:
    return [combine.read(_save(base, folder / str(seed), seed, rank=3, alpha=6.0)) for seed in (1, 2)]


def _whole(saved: combine.Saved, layer: str) -> Tensor:
    return saved.updates[layer].up_OR @ saved.updates[layer].down_RI


def test_along_the_arc_is_shoemakes_formula_and_begins_and_ends_at_the_adapters(tmp_path: Path) -> None:
    saved = _pair(tiny("Llama"), tmp_path)
    for weights in ((0.75, 0.25), (1.0, 0.0), (0.0, 1.0)):
        found = combine.along_the_arc(saved, weights)
        for layer, (down, up) in found.items():
            one, other = (_whole(each, layer) for each in saved)
            angle = torch.arccos((one * other).sum() / (one.norm() * other.norm()))
            wanted = sum((w * angle).sin() / angle.sin() * each for w, each in zip(weights, (one, other), strict=True))
            torch.testing.assert_close(up @ down, wanted)
    alike = combine.along_the_arc([saved[0], saved[0]], (0.3, 0.7))
    assert combine.error(alike, saved[0].updates).overall < 1e-7
    for runs, weights in ((saved, (0.5, 0.6)), (saved, (1.5, -0.5)), (saved * 2, (0.25,) * 4)):
        with pytest.raises(ConfigError, match="slerp goes from one adapter to another"):
            combine.along_the_arc(runs, weights)


def test_ties_keeps_the_largest_values_and_the_sign_of_most(tmp_path: Path) -> None:
    """The equations of Yadav et al., value by value, at full rank."""
    saved = [*_pair(tiny("Llama"), tmp_path), combine.read(tmp_path / "1")]
    weights, density = (0.5, 2.0, 1.0), 0.4
    found, error = combine.by_value(saved, weights, "ties", density=density, rank=99)
    assert error.overall < 1e-6
    for layer, (down, up) in found.items():
        kept = []
        for each in saved:
            value = _whole(each, layer)
            least = value.abs().flatten().sort(descending=True).values[int(density * value.numel()) - 1]
            kept.append(value * (value.abs() >= least))
        sign = torch.stack(kept).sum(0).sign()
        agree = [(each.sign() == sign) & (each != 0) for each in kept]
        total = sum(w * each * yes for w, each, yes in zip(weights, kept, agree, strict=True))
        assert isinstance(total, Tensor)
        wanted = total / torch.stack(agree).sum(0).clamp_min(1)
        torch.testing.assert_close(up @ down, wanted, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("way", ["dare", "dare_ties"])
def test_dare_keeps_values_by_chance_and_their_mean(way: str, tmp_path: Path) -> None:
    saved = _pair(tiny("Llama"), tmp_path)
    found, _ = combine.by_value(saved[:1], (1.0,), way, density=0.5, rank=99)
    again, _ = combine.by_value(saved[:1], (1.0,), way, density=0.5, rank=99)
    other, _ = combine.by_value(saved[:1], (1.0,), way, density=0.5, rank=99, seed=1)
    for layer, (down, up) in found.items():
        value, merged = _whole(saved[0], layer), up @ down
        gone = merged.abs() < 1e-9
        assert 0.4 < gone.double().mean() < 0.6
        torch.testing.assert_close(merged[~gone], 2 * value[~gone], atol=1e-8, rtol=1e-6)
        assert torch.equal(again[layer].up_OR, up) and not torch.equal(other[layer].up_OR, up)


def test_a_merge_of_values_says_what_its_rank_loses(tmp_path: Path) -> None:
    saved = _pair(tiny("Llama"), tmp_path)
    whole, _ = combine.by_value(saved, (1.0, 1.0), "ties", density=0.5, rank=99)
    found, error = combine.by_value(saved, (1.0, 1.0), "ties", density=0.5)
    assert {len(each.down_RI) for each in found.values()} == {6}
    assert combine.error(found, whole).overall == pytest.approx(error.overall, rel=1e-5) and error.overall > 0.05
