"""A sweep from the command's side: its members are the runs they would be alone, its run directory serves the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import workbench
from tests.conftest import MINILM, save_tiny, write_questions
from tests.run_files import read_metrics, read_scores, write_lines
from tests.stopping import stop_after
from workbench import recipes
from workbench.cli import render
from workbench.config import RunConfig
from workbench.config.expansions import sweep_expansion
from workbench.data import starter
from workbench.errors import ConfigError, Stopped, TrainingError
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import generate, predict
from workbench.recipes.verbs.merge import merge
from workbench.report import sweep_sections
from workbench.runs import run_directory, score_files, units

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

RATES, SEEDS = (1e-3, 2e-2), (0, 1)


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> dict[str, Any]:
    """A short sweep on stories260K, whose held-out rows are a share: so they depend on the seed of a run."""
    folder = tmp_path_factory.mktemp("data")
    train = write_questions(folder / "train.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(69)])
    test = write_questions(folder / "test.jsonl", [f"It is {n + 1}, surely." for n in range(9)])
    return {
        "recipe": "sweep",
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": str(train), "held_out": 0.13, "test": str(test), "overlap": "drop"},
        "batch": {"size": 6},
        "train": {"steps": 4},
        "evaluate": {"every": 2, "answers": 3, "max_new_tokens": 4},
        "sweep": {"over": {"train.learning_rate": list(RATES), "seed": list(SEEDS)}},
    }


@pytest.fixture(scope="module")
def swept(sections: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep. Read only."""
    return run(sections, tmp_path_factory.mktemp("swept") / "run")


def run(sections: dict[str, Any], out: Path, *, resume: bool = False, **other: Any) -> Path:
    config = RunConfig.model_validate({**sections, **other})
    return workbench.run(config, out=out, quiet=True, resume=resume)


def held_out(path: Path) -> list[float]:
    lines = read_metrics(path)
    return [line["held_out_loss"] for line in lines if "held_out_loss" in line]


def table(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "sweep.json").read_text()))


def rows(path: Path) -> dict[str, dict[str, Any]]:
    """Of the table, without what a clock says."""
    return {row["member"]: {**row, "seconds": None} for row in table(path)["members"]}


def test_members_equal_runs_of_their_own(swept: Path, sections: dict[str, Any], tmp_path: Path) -> None:
    found = rows(swept)
    assert list(found) == [f"learning_rate={rate:g},seed={seed}" for rate in RATES for seed in SEEDS]
    member = swept / "members" / "learning_rate=0.02,seed=1"
    train, data = {**sections["train"], "learning_rate": RATES[1]}, {**sections["data"], "seed": 0}
    alone = run(sections, tmp_path / "alone", recipe="sft", sweep={}, train=train, seed=1, data=data)
    assert run_directory.read_config(alone) == run_directory.read_config(member)
    wanted = held_out(alone)
    assert held_out(member) == pytest.approx(wanted, rel=1e-4)
    for split, scores in read_scores(alone).items():
        assert read_scores(member)[split] == pytest.approx(scores, rel=1e-3), split
    row = found["learning_rate=0.02,seed=1"]
    assert (row["status"], row["settings"]) == ("done", {"train.learning_rate": RATES[1], "seed": 1})
    assert (row["held_out_loss"], row["best_held_out_loss"]) == pytest.approx((wanted[-1], min(wanted)), rel=1e-4)
    assert (row["steps"], row["best_step"]) == (4, 2 + 2 * wanted.index(min(wanted)))
    assert len({row["held_out_loss"] for row in found.values()}) == 4


def test_each_member_is_a_run_directory(swept: Path, tmp_path: Path) -> None:
    for member, row in rows(swept).items():
        own = swept / "members" / member
        scores = read_scores(own)
        assert row["scores"] == {split: scores[split] for split in ("after", "test")}
        assert evaluate(own, ["data.test=null"]) == scores["after"] and evaluate(own, []) == scores["test"]
        assert scores["before"] == read_scores(swept)["before"]
        assert len(pd.read_parquet(own / "predictions.parquet")) == 3
    own = swept / "members" / "learning_rate=0.02,seed=1"
    questions = write_questions(tmp_path / "asked.jsonl", ["It is 4."])
    predict(own, str(questions), out=tmp_path / "answers.csv", max_new_tokens=2)
    assert merge(own, out=tmp_path / "merged", weights="float32").agreement.sentence


def test_scores_are_summed_up_over_seeds(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By numpy and scipy, from the members' own files."""
    summed = table(swept)["over_seeds"]
    assert [each["settings"] for each in summed] == [{"train.learning_rate": rate} for rate in RATES]
    members = [f"learning_rate={RATES[1]:g},seed={seed}" for seed in SEEDS]
    for split, scores in summed[1]["scores"].items():
        each = [read_scores(swept / "members" / member)[split] for member in members]
        assert scores.keys() == {name for name in each[0] if not score_files.is_bound(name)}
        assert {"loss", "f1", "token_accuracy"} <= scores.keys()
        for name, found in scores.items():
            values = [own[name] for own in each]
            assert found["mean"] == pytest.approx(np.mean(values)) and found["seeds"] == 2
            assert found["sd"] == pytest.approx(np.std(values, ddof=1))
            if values[0] != values[1]:
                wanted = stats.t.interval(0.95, 1, np.mean(values), stats.sem(values))
                assert (found["low"], found["high"]) == pytest.approx(wanted)
    render.outcome(swept)
    printed, page = capsys.readouterr().out, (swept / "report.html").read_text()
    shown = units.number(summed[1]["scores"]["test"]["loss"]["mean"])
    assert "Scores of what was saved, over seeds" in printed and shown in printed
    assert "All scores over seeds" in page and shown in page


def test_the_best_is_shipped_and_served(swept: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = table(swept)
    best = min(found["members"], key=lambda row: float(row["held_out_loss"]))
    assert found["best"] == best["member"]
    config = run_directory.shipped_config(swept)
    assert config.recipe == "sft" and config.seed == 0
    assert config.train.learning_rate == best["settings"]["train.learning_rate"]
    scores = read_scores(swept)
    assert scores["after"]["loss"] == pytest.approx(best["held_out_loss"], rel=1e-4)
    assert {"loss", "f1", "rouge_l"} <= set(scores["before"])
    assert evaluate(swept, []) == scores["test"]
    generate(swept, "What comes after 3?", max_new_tokens=2)
    assert merge(swept, out=tmp_path / "merged", weights="float32").agreement.sentence
    assert held_out(swept) == held_out(swept / "members" / best["member"])
    capsys.readouterr()
    render.outcome(swept)
    printed = capsys.readouterr().out
    assert "spread" in printed and "flatters itself" in printed and "0.001" in printed


def test_the_report_shows_table_plot_and_caveat(swept: Path) -> None:
    found = sweep_sections.read_sweep(swept)
    assert found is not None and [setting.values for setting in found.settings] == [("0.001",), ("0.02",)]
    losses = [row["held_out_loss"] for row in table(swept)["members"]]
    assert found.settings[0].mean == pytest.approx((losses[0] + losses[1]) / 2)
    assert found.settings[0].spread == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    page = (swept / "report.html").read_text()
    for shown in (
        "Held-out loss against train.learning_rate",
        "Held-out loss of all members",
        f"{found.settings[0].mean:.4f}",
        "The best of 4 on the same held-out rows flatters itself",
    ):
        assert shown in page


def test_stopped_and_resumed_it_ends_where_it_would_have(
    swept: Path, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch)
        with pytest.raises(Stopped, match="after step 1"):
            run(sections, tmp_path / "run")
    assert {row["status"] for row in table(tmp_path / "run")["members"]} == {"training"}
    assert rows(run(sections, tmp_path / "run", resume=True)) == rows(swept)


def test_one_after_another_gives_the_same_table(
    swept: Path, sections: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As methods train that a bank does not hold."""
    config = RunConfig.model_validate({**sections, "sweep": {**sections["sweep"], "together": False}})
    path = workbench.run(config, out=tmp_path / "run")
    assert "4 members, one after another: sweep.together=false" in " ".join(capsys.readouterr().err.split())
    losses = [[row["held_out_loss"] for row in rows(each).values()] for each in (path, swept)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert table(path)["best"] == table(swept)["best"]


@pytest.mark.slow
def test_members_of_unlike_methods_train_in_one_bank(sections: dict[str, Any], tmp_path: Path) -> None:
    """As each does in a run of its own; what is shipped and reloaded is of the best one's method."""
    methods = ["lora", "dora", "ia3", "houlsby"]
    sweep = {"over": {"adapter.method": methods}}
    found = run(sections, tmp_path / "run", sweep=sweep, adapter={"rank": 4, "alpha": 8})
    assert list(rows(found)) == [f"method={method}" for method in methods]
    for method in methods:
        own = {"rank": 4, "alpha": 8} if method in ("lora", "dora") else {}
        single = run(sections, tmp_path / method, sweep={}, recipe="sft", adapter={"method": method, **own})
        assert held_out(found / "members" / f"method={method}") == pytest.approx(held_out(single), rel=1e-4)
    assert len({row["held_out_loss"] for row in rows(found).values()}) == len(methods)


def test_check_says_which_members_there_are_and_how_they_train(sections: dict[str, Any]) -> None:
    (found,) = check(RunConfig.model_validate(sections)).notes
    assert found.startswith("4 members, together in one bank. The first is shown: learning_rate=0.001,seed=0, learning")
    (found,) = check(RunConfig.model_validate({**sections, "adapter": {"method": "last-layers"}})).notes
    assert found.startswith("4 members, one after another: a bank holds no last-layers: its rows would share no block")
    (found,) = check(RunConfig.model_validate({**sections, "model": {**sections["model"], "dropout": True}})).notes
    assert "model.dropout: the backbone's own dropout would draw other numbers in a bank" in found
    wrong = {"over": {"adapter.targets": [["q_proj"], ["q_prj"]]}}
    with pytest.raises(ConfigError, match="q_prj"):
        check(RunConfig.model_validate({**sections, "sweep": wrong}))


def test_a_member_that_explodes_is_a_finding(sections: dict[str, Any], tmp_path: Path) -> None:
    over = {"train.learning_rate": [1e-2, 1e25], "schedule.name": ["linear"]}
    path = run(sections, tmp_path / "one", sweep={"over": over})
    good, bad = table(path)["members"]
    assert good["status"] == "done" and table(path)["best"] == good["member"]
    assert bad["status"] == "failed" and "Lower train.learning_rate (now 1e+25)" in bad["reason"]
    found = sweep_sections.read_sweep(path)
    assert found is not None and found.settings[1].row[-1] == "0 of 1, 1 failed"
    assert "Failed, and not shown: learning_rate=1e+25,name=linear." in (path / "report.html").read_text()
    with pytest.raises(TrainingError, match=r"Lower train\.learning_rate"):
        run(sections, tmp_path / "all", sweep={"over": {"train.learning_rate": [1e25, 1e26]}})
    assert {row["status"] for row in table(tmp_path / "all")["members"]} == {"failed"}


@pytest.mark.nightly
def test_classifiers_with_their_own_heads_equal_runs_of_their_own(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "bert", "Bert", "SequenceClassification", MINILM)
    for name, rows_ in (("train", 40), ("held_out", 12)):
        lines = [
            {"text": f"The {'cat' if n % 2 else 'dog'} of {name} said {n}.", "label": "ab"[n % 2]} for n in range(rows_)
        ]
        write_lines(tmp_path / f"{name}.jsonl", lines)
    sections = {
        "recipe": "sweep",
        "model": {"id": model, "weights": "float32"},
        "adapter": {"method": "lora", "rank": 2, "alpha": 4},
        "data": {"train": str(tmp_path / "train.jsonl"), "held_out": str(tmp_path / "held_out.jsonl")},
        "batch": {"size": 8},
        "train": {"steps": 4, "learning_rate": 1e-2},
        "evaluate": {"every": 2},
        "save": {"ship": "best"},
        "of": "classify",
        "sweep": {"over": {"classes.gamma": [0.0, 2.0], "seed": [0, 1]}},
    }
    path = run(sections, tmp_path / "run")
    wanted = run(
        sections,
        tmp_path / "alone",
        recipe="classify",
        of=None,
        sweep={},
        seed=1,
        classes={"gamma": 2.0},
        save={"ship": "best"},
    )
    assert held_out(path / "members" / "gamma=2,seed=1") == pytest.approx(held_out(wanted), rel=1e-4)
    scores = read_scores(path)
    assert "accuracy" in scores["after"] and evaluate(path, []) == scores["after"]
    lowest = min(float(row["best_held_out_loss"]) for row in table(path)["members"])
    assert scores["after"]["loss"] == pytest.approx(lowest, rel=1e-4), "of all members and steps"
    assert "nats per row" in (path / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.usefixtures("drawn")
def test_the_shipped_sweep_trains(tmp_path: Path) -> None:
    """With one of its learning rates, on few rows."""
    text = (recipes.CONFIGS / "sweep" / "quickstart.yaml").read_text()
    assert text.startswith("# workbench run sweep/quickstart\n")
    assert len(sweep_expansion.trials(load("sweep/quickstart"))) == 8
    rows_ = (starter.FOLDER / "fairytaleqa_held_out.jsonl").read_text().splitlines()
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows_[:6]))
    words = ["sweep.over.train.learning_rate=[2e-3]", "train.steps=2", "data.limit=24", "batch.size=4"]
    words += ["evaluate.answers=2", "evaluate.every=2", f"data.held_out={tmp_path / 'held_out.jsonl'}"]
    path = workbench.run("sweep/quickstart", words, out=tmp_path / "run", quiet=True)
    assert [row["status"] for row in table(path)["members"]] == ["done", "done"]
    assert "<path" in (path / "report.html").read_text()
