"""Soups and searched weights: scored on held-out rows that the runs share, before anything is written."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import workbench
from workbench.adapters import combine
from workbench.cli.verbs import app
from workbench.errors import ConfigError, Stopped
from workbench.runs import files, run_directory
from workbench.training.callbacks import Silent

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 2, alpha: 4}}
data: {{train: {rows}, held_out: 0.2, test: {test}}}
batch: {{size: 8}}
train: {{steps: 10, learning_rate: 0.01}}
evaluate: {{every: null, answers: 2, max_new_tokens: 4}}
"""


@pytest.fixture
def runs(short_stories: str, questions: Path, tmp_path: Path) -> list[Path]:
    """A run that learnt, and the same one with noise in place of what it learnt."""
    test = tmp_path / "test.jsonl"
    lines = [{"question": f"What comes before {n}?", "answer": f"{n - 1}"} for n in range(200, 220)]
    test.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=short_stories, rows=questions, test=test))
    learnt = workbench.run(tmp_path / "recipe.yaml", out=tmp_path / "learnt", quiet=True)
    noise = shutil.copytree(learnt, tmp_path / "noise")
    weights = noise / "adapter" / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(0)
    noisy = {name: 0.2 * torch.randn(each.shape, generator=generator) for name, each in load_file(weights).items()}
    save_file(noisy, weights, metadata={"format": "pt"})
    return [noise, learnt]


class _Impatient(Silent):
    def stop_requested(self) -> bool:
        return True


def _noted(run: Path) -> dict[str, Any]:
    noted: dict[str, Any] = files.read_json(run / "manifest.json")["combined"]
    return noted


def test_noise_is_dropped_and_outweighed(runs: list[Path], tmp_path: Path) -> None:
    outs = {name: tmp_path / name for name in ("uniform", "greedy", "searched", "cut")}
    words = ["combine", *map(str, runs)]
    more = {
        "uniform": ["--by", "soup"],
        "greedy": ["--by", "greedy-soup"],
        "searched": ["--weights", "search", "--trials", "10"],
        "cut": ["--by", "soup", "--rank", "1"],
    }
    call = partial(CliRunner().invoke, app, catch_exceptions=False)
    said = {name: call([*words, *more[name], "--out", str(outs[name])]) for name in outs}
    assert all(each.exit_code == 0 for each in said.values()), [each.output for each in said.values()]
    noted = {name: _noted(out) for name, out in outs.items()}
    kept = {name: [part["weight"] for part in each["of"]] for name, each in noted.items()}
    assert kept["uniform"] == [0.5, 0.5] and kept["greedy"] == [0, 1] and kept["searched"][1] > kept["searched"][0]
    found = {name: each["scores"]["held_out"] for name, each in noted.items()}
    assert found["searched"] <= found["greedy"] < found["uniform"]
    assert found["searched"] == min(trial["loss"] for trial in noted["searched"]["trials"])
    assert len(noted["searched"]["trials"]) <= 10 and len(noted["greedy"]["trials"]) == 3

    alone = files.read_json(runs[1] / "scores.json")["after"]["loss"]
    assert found["greedy"] == pytest.approx(alone, abs=1e-5)
    for name, out in outs.items():  # what was scored before is what was written
        assert workbench.evaluate(out, ["data.test=null"])["loss"] == pytest.approx(found[name], abs=1e-5)
        assert workbench.evaluate(out)["loss"] == pytest.approx(noted[name]["scores"]["test"]["written"], abs=1e-5)
        assert f"held-out rows: loss {found[name]:.4f}" in said[name].output and "test rows" in said[name].output
    assert "These rows chose the weights" in said["searched"].output + said["greedy"].output
    assert "chose the weights" not in said["uniform"].output
    updates = {name: combine.read(out / "adapter").updates for name, out in outs.items()}
    ranks = {name: {len(down) for down, _ in each.values()} for name, each in updates.items()}
    assert (ranks["uniform"], ranks["greedy"], ranks["cut"]) == ({4}, {2}, {1})

    both = combine.weighted_sum([combine.read(run / "adapter") for run in runs], (0.5, 0.5))
    assert combine.error(updates["uniform"], both).overall < 1e-6

    config = runs[0] / "config.yaml"
    config.write_text(config.read_text().replace("held_out: 0.2", "held_out: 0.1"))
    said_of = CliRunner().invoke(app, [*words, "--by", "soup", "--out", str(tmp_path / "other")])
    assert isinstance(said_of.exception, ConfigError) and "have other held-out rows" in str(said_of.exception)
    rows = tmp_path / "test.jsonl"
    named = CliRunner().invoke(
        app, [*words, f"data.held_out={rows}", "data.test=null", "--by", "soup", "--out", str(tmp_path / "other")]
    )
    assert named.exit_code == 0 and _noted(tmp_path / "other")["held_out_rows"] == 20, named.output


@pytest.mark.parametrize("way", [{"by": "soup"}, {"by": "greedy-soup"}, {"weights": "search", "trials": 8}])
def test_classifiers_have_the_mean_of_their_heads(way: dict[str, Any], short_stories: str, tmp_path: Path) -> None:
    """Over one backbone and rows, from two rates; what was scored is what is written."""
    lines = [{"text": f"{n} {'is more' if n % 3 else 'is no more'}", "label": "yn"[n % 3 > 0]} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["adapter.rank=2", "batch.size=8", "train.steps=8", "train.epochs=null", "data.held_out=0.4"]
    words += [f"model.id={short_stories}", f"data.train={tmp_path}/rows.jsonl", "data.columns={}", "seed=1"]
    words += [
        "model.weights=float32",
        "model.compute=float32",
        "evaluate.every=null",
        "data.seed=0",
        "data.overlap=tell",
    ]
    runs = [
        workbench.run("classify/quickstart", [*words, f"train.learning_rate={rate}"], out=tmp_path / rate, quiet=True)
        for rate in ("1e-3", "3e-2")
    ]
    alone = [files.read_json(run / "scores.json")["after"]["accuracy"] for run in runs]
    workbench.combine(runs, out=tmp_path / "both", **way)
    noted = _noted(tmp_path / "both")
    assert [trial["accuracy"] for trial in noted["trials"]][:2] == pytest.approx(alone)
    assert workbench.evaluate(tmp_path / "both")["accuracy"] == pytest.approx(noted["scores"]["held_out"])
    saved, weights = [combine.read(run / "adapter") for run in runs], [part["weight"] for part in noted["of"]]
    wanted = combine.mean_heads(saved, weights)
    heads = combine.read(tmp_path / "both" / "adapter").heads
    assert heads.keys() == wanted.keys() and heads
    for name, head in heads.items():
        torch.testing.assert_close(head, wanted[name])


def test_what_cannot_be_scored_is_refused(runs: list[Path], tmp_path: Path) -> None:
    out, (one, two) = tmp_path / "out", runs

    def refused(match: str, runs: list[Path], **settings: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            workbench.combine(runs, out=out, **settings)
        assert not out.exists()

    refused("two runs or more, each of them once", [one], by="soup")
    refused("two runs or more, each of them once", [one, one], by="greedy-soup")
    refused("--weights search takes two runs", [one], weights="search")
    refused("weighs runs alike. Leave --weights out", runs, by="soup", weights=(1, 1))
    refused(r"--by sum takes a factor for each run. Write --weights 0.5,0.5", runs)
    refused("--by ties takes a factor", runs, by="ties", weights="search")
    refused("--trials 2: .* at least 3", runs, weights="search", trials=2)
    refused("--trials 9: .* with --weights search", runs, by="soup", trials=9)
    refused("--density 0.5", runs, by="soup", density=0.5)
    refused("is read as it was trained", runs, overrides=["data.held_out=x.jsonl"], weights=(1, 1))
    learnt = f"data.held_out={shutil.copy(tmp_path / 'questions.jsonl', tmp_path / 'copy.jsonl')}"
    refused("training rows are also in .* Name rows as data.held_out that none", runs, overrides=[learnt], by="soup")
    with pytest.raises(Stopped, match="Stopped after 0 trials; nothing was written"):
        workbench.combine(runs, by="soup", out=out, callback=_Impatient())
    assert not out.exists()
    config = (two / "config.yaml").read_text()
    (two / "config.yaml").write_text(config.replace("recipe: sft", "recipe: mlm"))
    refused("of recipe mlm", runs, by="soup")
    (two / "config.yaml").write_text(config.replace("recipe: sft", "recipe: prefer"))
    refused("of recipe prefer, and .* of sft, which score rows in other ways", runs, weights="search")
    (two / "config.yaml").write_text(config.replace(run_directory.read_config(one).model.id, "starter"))
    refused("Combine runs over one backbone", runs, by="greedy-soup")
