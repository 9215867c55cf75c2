"""Kept outputs of frozen blocks change nothing but time: losses, values, and what a resumed run goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.workbench.training.freezing.fits import Trained, assert_same_bits, build, configured, interrupted, train
from workbench.config import ModelConfig
from workbench.config.freeze_config import UNKEPT
from workbench.errors import ConfigError
from workbench.models import backbones
from workbench.recipes.load import load
from workbench.training.freezing import prefix_cache

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 3, "alpha": 6},
    "full": {"method": "full"},
}
ROWS = 24 + 9
"""Different ones, held-out rows included."""


@pytest.fixture(scope="module")
def stories_model(short_stories: str) -> PreTrainedModel:
    """Real weights, whose products have other last bits in other shapes."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(short_stories)
    return model


def assert_close(trained: Trained, wanted: Trained, *, rel: float) -> None:
    """The same curve; and the same weights, but for biases.

    Softmax ignores those of keys, so that their gradients are noise, which Adam scales up to whole steps. How much
    rounding differs between shapes depends on the processor.
    """
    assert len(trained.losses) == len(wanted.losses) == 8 and len(trained.held_out) == 2
    assert trained.losses == pytest.approx(wanted.losses, rel=100 * rel)
    assert trained.held_out == pytest.approx(wanted.held_out, rel=100 * rel)
    for name, tensor in wanted.shipped.items():
        if not name.endswith("bias"):
            assert (trained.shipped[name] - tensor).norm() <= 1000 * rel * (1 + tensor.norm()), name


@pytest.mark.nightly(but=["Llama-lora", "GPT2-full", "Gemma3Text-full", "Bert-lora"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma2", "Gemma3Text", "Bert"])
def test_kept_outputs_give_the_same_curve_over_two_epochs(family: str, method: str, tmp_path: Path) -> None:
    """With an adapter's dropout above the line, which draws the same numbers; each row is computed once."""
    model = build(family)
    found = {
        cache: train(
            model,
            configured(adapter=METHODS[method], freeze={"policy": "static", "cache": cache}),
            tmp_path / cache,
        )
        for cache in ("off", "memory", "disk")
    }
    assert not found["off"].callback.prefixes and found["off"].losses[-1] != found["off"].losses[0]
    for cache in ("memory", "disk"):
        assert_close(found[cache], found["off"], rel=1e-6)
        (cached,) = found[cache].callback.prefixes
        assert (cached.computed, cached.read, cached.passed) == (ROWS, 2 * 24 + 2 * 9, 0)


@pytest.mark.nightly(but=["dora", "bitfit"])
@pytest.mark.parametrize(
    "adapter",
    [
        {"method": "lora", "rank": 3, "dropout": 0.2},
        {"method": "dora", "rank": 3},
        {"method": "houlsby"},
        {"method": "bitfit"},
        {"method": "last-layers", "layers": 2},
        {"method": "linear-probe"},
    ],
    ids=lambda adapter: str(adapter["method"]),
)
def test_with_other_methods_and_dropout_above_the_line(adapter: dict[str, Any], tmp_path: Path) -> None:
    """Methods that freeze the first layers by themselves need no policy."""
    policy = {} if adapter["method"] in ("last-layers", "linear-probe") else {"policy": "static"}
    wanted, found = (
        train(build("Bert"), configured(adapter=adapter, freeze={**policy, "cache": cache}), tmp_path / cache)
        for cache in ("off", "memory")
    )
    assert_close(found, wanted, rel=1e-6)
    assert [cached.computed for cached in found.callback.prefixes] == [ROWS] and not wanted.callback.prefixes


@pytest.mark.nightly(but=["lora"])
@pytest.mark.parametrize("method", METHODS)
def test_with_activations_that_are_recomputed(method: str, tmp_path: Path) -> None:
    model = build("Llama")
    found = {
        f"{cache} {again}": train(
            model,
            configured(
                adapter=METHODS[method],
                freeze={"policy": "static", "cache": cache},
                train={"checkpointing": again},
            ),
            tmp_path / f"{cache}-{again}",
        )
        for cache in ("off", "memory")
        for again in (False, True)
    }
    for each in found.values():
        assert_close(each, found["off False"], rel=1e-6)
    assert [cached.computed for cached in found["memory True"].callback.prefixes] == [ROWS]


@pytest.mark.nightly(but=["compute-0.0001"])
@pytest.mark.parametrize(("stored", "rel"), [("compute", 1e-4), ("bfloat16", 2e-2)])
def test_over_quantised_weights(stored: str, rel: float, short_stories: str, tmp_path: Path) -> None:
    asked = ModelConfig.model_validate({"id": short_stories, "weights": "nf4", "compute": "float32"})
    model = backbones.load(asked, backbones.tokenizer(asked)).model
    wanted, found = (
        train(
            model,
            configured(
                model={"weights": "nf4"},
                freeze={"policy": "static", "cache": cache, "stored": stored},
                train={"learning_rate": 1e-2},
            ),
            tmp_path / cache,
        )
        for cache in ("off", "memory")
    )
    assert found.losses == pytest.approx(wanted.losses, rel=rel)
    assert found.held_out == pytest.approx(wanted.held_out, rel=rel) and found.held_out[-1] < found.held_out[0]
    assert [cached.computed for cached in found.callback.prefixes] == [ROWS]


def test_half_precision_is_kept_as_it_was_computed(tmp_path: Path) -> None:
    model = build("Llama").bfloat16()
    wanted, found = (
        train(
            model,
            configured(model={"compute": "bfloat16"}, freeze={"policy": "static", "cache": cache}),
            tmp_path / cache,
            compute=torch.bfloat16,
        )
        for cache in ("off", "memory")
    )
    assert_close(found, wanted, rel=1e-3)
    assert {cached.states.dtype for cached in found.callback.prefixes} == {torch.bfloat16}
    assert {tensor.dtype for tensor in found.shipped.values()} == {torch.float32}


MOVING: list[dict[str, Any]] = [
    {"policy": "static"},
    {"policy": "autofreeze", "every": 1, "percentile": 90},
    {"policy": "freezeout", "first": 0.2},
    {"policy": "gradual", "until": 0.9},
]


@pytest.mark.nightly(but=["freezeout", "gradual"])
@pytest.mark.parametrize("policy", MOVING, ids=lambda policy: str(policy["policy"]))
def test_a_line_that_moves_changes_nothing_either(policy: dict[str, Any], tmp_path: Path) -> None:
    model = build("Llama")
    wanted, found = (
        train(model, configured(adapter=METHODS["full"], freeze={**policy, "cache": cache}), tmp_path / cache)
        for cache in ("off", "disk")
    )
    assert_close(found, wanted, rel=1e-6)
    assert len(found.callback.prefixes) >= (1 if policy["policy"] in ("static", "autofreeze") else 2)
    assert not (tmp_path / "disk" / "prefix").exists(), "what no other run can use is removed"


@pytest.mark.nightly(but=["static", "freezeout"])
@pytest.mark.parametrize("policy", MOVING, ids=lambda policy: str(policy["policy"]))
def test_a_resumed_run_computes_what_was_kept_to_the_same_bits(
    policy: dict[str, Any], stories_model: PreTrainedModel, tmp_path: Path
) -> None:
    """Stopped in the second epoch: its memory is empty, and the rows come in other batches than in the first."""
    config = configured(freeze={**policy, "cache": "memory"}, batch={"tokens_per_device": 20}, adapter=METHODS["lora"])
    whole = train(stories_model, config, tmp_path / "whole")
    broken = interrupted(stories_model, config, tmp_path / "broken", after=5)
    assert whole.callback.prefixes and broken.callback.prefixes
    assert_same_bits(broken, whole)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"policy": "static"}, True),
        ({"policy": "autofreeze", "every": 1}, True),
        ({"policy": "gradual", "until": 1.0}, False),
        ({"policy": "lisa", "every": 2, "active": 1}, False),
    ],
    ids=lambda value: str(value["policy"]) if isinstance(value, dict) else "",
)
def test_by_itself_it_keeps_what_comes_again_before_the_line_moves(
    policy: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    """Three epochs; gradual unfreezing of four blocks moves the line three times in them, LISA at every other step."""
    config = configured(freeze=policy, train={"epochs": 3}, adapter=METHODS["full"])
    found = train(build("Llama"), config, tmp_path)
    assert bool(found.callback.prefixes) == kept
    if policy["policy"] == "lisa":
        assert found.callback.said == []
    elif not kept:
        assert {said.split(": ")[1] for said in found.callback.said} == {"each row is seen only once."}


def test_what_it_decides_does_not_depend_on_where_a_run_was_stopped(tmp_path: Path) -> None:
    """Late in a run little is left to save; had it then decided otherwise, last bits would differ."""
    config = configured(freeze={"policy": "static"}, train={"epochs": 3}, adapter=METHODS["full"])
    model = build("Llama")
    whole = train(model, config, tmp_path / "whole")
    late = interrupted(model, config, tmp_path / "late", after=11)
    assert whole.callback.said[0] in late.callback.said
    assert len(late.callback.prefixes) == 1


def test_how_often_rows_come_is_known_from_tokens_too(tmp_path: Path) -> None:
    for tokens, kept in ((150, False), (800, True)):
        config = configured(
            adapter=METHODS["full"], freeze={"policy": "static"}, train={"epochs": None}, budget={"tokens": tokens}
        )
        found = train(build("Llama"), config, tmp_path / str(tokens))
        assert bool(found.callback.prefixes) == kept


def test_dropout_below_the_line_is_an_obstacle_that_is_told(tmp_path: Path) -> None:
    model = build("Llama", attention_dropout=0.1)
    found = train(model, configured(freeze={"policy": "static"}), tmp_path / "auto")
    assert not found.callback.prefixes and "draws by lot below the line" in found.callback.said[0]
    with pytest.raises(ConfigError, match=r"(?s)freeze\.cache=memory cannot be: .*draws by lot.*freeze\.cache=off"):
        train(model, configured(freeze={"policy": "static", "cache": "memory"}), tmp_path / "memory")


def test_numbers_are_finite_where_every_block_is_frozen(tmp_path: Path) -> None:
    """Only the head learns."""
    found = {
        cache: train(
            build("Bert"),
            configured(adapter=METHODS["full"], freeze={"policy": "static", "layers": 4, "cache": cache}),
            tmp_path / cache,
        )
        for cache in ("off", "memory")
    }
    assert_close(found["memory"], found["off"], rel=1e-6)
    (cached,) = found["memory"].callback.prefixes
    assert cached.computed == ROWS
    assert {name.split(".")[-2] for name in found["memory"].fit.masters.named()} == {"dense", "classifier"}


@pytest.mark.parametrize("recipe", ["embed", "mlm", "prefer", "reinforce", "rerank", "reward"])
def test_layers_freeze_where_rows_have_no_outputs_to_keep(recipe: str) -> None:
    """Left to itself, the cache is not one more setting to write; asked for, it is refused (`tests/mistakes`)."""
    config = load(f"{recipe}/quickstart", ["freeze.policy=static", "freeze.layers=2"])
    assert config.freeze.cache == "auto" and prefix_cache.of_recipe(config) == f"recipe={recipe} {UNKEPT[recipe]}"
