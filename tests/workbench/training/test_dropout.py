"""Dropout is a part of what a run is a function of: its curve is the same however the rows are computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import workbench
from tests.conftest import save_tiny, trains
from tests.stopping import stop_after
from tests.workbench.training.together import LabelledSet, Together, Trained, bert, class_outputs, section
from workbench.config import RunConfig
from workbench.config.sections.regularise_config import RegulariseConfig
from workbench.errors import Stopped

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: 4, learning_rate: 5.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: null}}
"""


@pytest.fixture
def curve(short_stories: str, questions: Path, tmp_path: Path) -> Callable[..., list[float]]:
    """The losses of a run of a few steps with dropout."""

    def run(*overrides: str) -> list[float]:
        recipe, out = tmp_path / "recipe.yaml", tmp_path / str(len(list(tmp_path.iterdir())))
        recipe.write_text(RECIPE.format(model=short_stories, train=questions))
        workbench.run(recipe, overrides, out=out, quiet=True)
        return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]

    return run


@pytest.mark.nightly(but=["lora"])
@pytest.mark.parametrize(
    "adapter",
    [
        "{method: lora, rank: 4, dropout: 0.3}",
        "{method: houlsby, dropout: 0.3}",
        pytest.param("{method: boft, block: 2, dropout: 0.3}", marks=pytest.mark.slow),
        pytest.param("{method: pvera, rank: 16, dropout: 0.3}", marks=pytest.mark.slow),
    ],
    ids=["lora", "houlsby", "boft", "pvera"],
)
def test_micro_batches_and_checkpointing_change_nothing(curve: Callable[..., list[float]], adapter: str) -> None:
    wanted = curve(f"adapter={adapter}", "batch.tokens_per_device=4000")
    for how in (("batch.tokens_per_device=150",), ("batch.tokens_per_device=400", "train.checkpointing=true")):
        assert curve(f"adapter={adapter}", *how) == pytest.approx(wanted, rel=1e-5)
    assert curve(f"adapter={adapter}", "batch.tokens_per_device=4000", "train.steps=1", "seed=1")[0] != pytest.approx(
        wanted[0], rel=1e-3
    )


def test_the_backbones_own_dropout_is_a_function_of_seed_and_step(
    short_stories: str, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else has drawn numbers in this process, and after a stop too."""
    gpt2 = save_tiny(tmp_path / "gpt2", "GPT2", "CausalLM", short_stories, max_position_embeddings=128, resid_pdrop=0.2)
    train = trains(tmp_path, RECIPE, model=gpt2, train=questions)

    def losses(name: str, *words: str, resume: bool = False) -> list[float]:
        torch.manual_seed(len(name))
        run = train(*words, "adapter={method: full}", name=name, resume=resume)
        return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]

    whole = losses("whole", "model.dropout=true")
    assert whole[0] != pytest.approx(losses("without")[0], rel=1e-5)
    with monkeypatch.context() as patch:
        stop_after(patch, step=2)
        with pytest.raises(Stopped):
            losses("stopped", "model.dropout=true")
    assert losses("stopped", "model.dropout=true", resume=True) == whole


def test_the_members_of_a_bank_drop_what_they_drop_alone(tmp_path: Path) -> None:
    """Members of different shares, ranks, seeds and data; float64, so that nothing but the order of sums differs."""
    configs = [
        section(seed=0, size=6, adapter={"dropout": 0.3}),
        section(seed=1, size=4, steps=13, adapter={"dropout": 0.6, "rank": 5}),
        section(seed=2, size=5),
    ]
    model, data = bert(), [LabelledSet(50, 1), LabelledSet(23, 2, shortest=9), LabelledSet(31, 3)]

    def fit(name: str, chosen: slice, tokens: int) -> Trained:
        own = data[chosen], configs[chosen]
        return Together(model, *own, tmp_path / name, class_outputs, tokens=tokens).fit()

    found = fit("together", slice(0, 3), 40)
    for number in range(3):
        wanted = fit(str(number), slice(number, number + 1), 10_000)
        assert found.losses[number] == pytest.approx(wanted.losses[0], rel=1e-9)
        for name, tensor in wanted.tensors[0].items():
            torch.testing.assert_close(found.tensors[number][name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.nightly(but=["neftune"])
@pytest.mark.parametrize("noise", [{"neftune": 20.0}, {"stochastic_depth": 0.5}], ids=["neftune", "depth"])
def test_the_members_of_a_bank_have_the_noise_that_they_have_alone(tmp_path: Path, noise: dict[str, float]) -> None:
    regularise = {"regularise": RegulariseConfig.model_validate(noise)}
    configs = [section(seed=number, steps=4).model_copy(update=regularise) for number in range(2)]
    model, data = bert(), [LabelledSet(50, 1), LabelledSet(23, 2, shortest=9)]

    def fit(name: str, chosen: slice, configs: list[RunConfig] = configs) -> Trained:
        return Together(model, data[chosen], configs[chosen], tmp_path / name, class_outputs, tokens=60).fit()

    found = fit("together", slice(0, 2))
    for number in range(2):
        assert found.losses[number] == pytest.approx(fit(str(number), slice(number, number + 1)).losses[0], rel=1e-9)
    bare = fit("bare", slice(0, 1), [section(seed=0, steps=4)])
    assert bare.losses[0] != pytest.approx(found.losses[0], rel=1e-3), "what was installed before is gone"


@pytest.mark.nightly(but=["stochastic_depth=0.4"])
@pytest.mark.parametrize("noise", ["neftune=5", "stochastic_depth=0.4"])
def test_noise_of_the_forward_pass_is_the_same_in_any_micro_batches(
    curve: Callable[..., list[float]], noise: str
) -> None:
    wanted = curve(f"regularise.{noise}", "batch.tokens_per_device=4000")
    for how in (("batch.tokens_per_device=150",), ("batch.tokens_per_device=400", "train.checkpointing=true")):
        assert curve(f"regularise.{noise}", *how) == pytest.approx(wanted, rel=1e-5)
    assert curve("batch.tokens_per_device=4000", "train.steps=1")[0] != pytest.approx(wanted[0], rel=1e-3)
