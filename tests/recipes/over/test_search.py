"""A search from the command's side: who survives, that survivors are the runs they would be alone, and resuming."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.conftest import write_questions
from tests.run_files import read_metrics, read_scores
from tests.stopping import stop_after
from workbench import recipes
from workbench.cli import render
from workbench.config import RunConfig
from workbench.data import starter
from workbench.errors import ConfigError, Stopped, TrainingError
from workbench.recipes.load import load
from workbench.recipes.over import search
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.report import run_record, sweep_sections
from workbench.runs import run_directory

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SPACE = {"train.learning_rate": {"low": 1e-4, "high": 3e-2, "log": True}, "adapter.rank": [2, 4]}
CLOCK = ("elapsed_s", "tokens_per_second", "data_wait", "peak_bytes")


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> dict[str, Any]:
    """A short search on stories260K: four settings to 2 steps, two to 4, one to 8."""
    folder = tmp_path_factory.mktemp("data")
    train = write_questions(folder / "train.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(60)])
    held_out = write_questions(folder / "held_out.jsonl", [f"It is {n + 1}, surely." for n in range(9)])
    return {
        "recipe": "search",
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": str(train), "held_out": str(held_out), "overlap": "drop"},
        "batch": {"size": 6},
        "train": {"steps": 8},
        "evaluate": {"every": 4, "answers": 2, "max_new_tokens": 2},
        "save": {"every": None},
        "search": {"space": SPACE, "trials": 4, "eta": 2, "rungs": 2, "rows": 5},
    }


@pytest.fixture(scope="module")
def searched(sections: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished search. Read only."""
    return run(sections, tmp_path_factory.mktemp("searched") / "run")


def run(sections: dict[str, Any], out: Path, *, resume: bool = False, search: Any = None, **other: Any) -> Path:
    own = {**sections["search"], **(search or {})}
    config = RunConfig.model_validate({**sections, "search": own, **other})
    return workbench.run(config, out=out, quiet=True, resume=resume)


def table(path: Path) -> dict[str, Any]:
    """search.json, without what a clock says."""
    found = json.loads((path / "search.json").read_text())
    for row in [*found["members"], *found["waves"]]:
        row["seconds"] = None
    return dict(found)


def curve(path: Path) -> list[dict[str, Any]]:
    lines = read_metrics(path)
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


def alone(sections: dict[str, Any], row: dict[str, Any], out: Path) -> Path:
    """The member of a row as a plain run."""
    settings = row["settings"]
    train = {**sections["train"], "learning_rate": settings["train.learning_rate"]}
    adapter = {**sections["adapter"], "rank": settings["adapter.rank"]}
    config = {**sections, "recipe": "sft", "search": {}, "train": train, "adapter": adapter}
    return workbench.run(RunConfig.model_validate(config), out=out, quiet=True)


def test_who_goes_on_is_who_had_the_lowest_loss_and_the_best_is_shipped(searched: Path) -> None:
    found = table(searched)
    rows = found["members"]
    for rung, keep in enumerate((2, 1)):
        there = [row for row in rows if row["losses"][rung] is not None]
        best = sorted(there, key=lambda row: float(row["losses"][rung]))[:keep]
        assert {row["member"] for row in best} == {row["member"] for row in rows if row["losses"][rung + 1]}
    assert sorted(row["steps"] for row in rows) == [2, 2, 4, 8]
    assert sorted(row["status"] for row in rows) == ["done", "stopped", "stopped", "stopped"]
    assert found["trained"] == 4 * 0.25 + 2 * 0.25 + 0.5 and [len(wave["trials"]) for wave in found["waves"]] == [
        4,
        2,
        1,
    ]
    (best,) = (row for row in rows if row["status"] == "done")
    assert found["best"] == best["member"]
    config = run_directory.shipped_config(searched)
    assert (config.recipe, config.adapter.rank) == ("sft", best["settings"]["adapter.rank"])  # type: ignore[attr-defined]
    scores = read_scores(searched)
    assert scores["after"]["loss"] == pytest.approx(best["held_out_loss"], rel=1e-4)
    assert best["held_out_loss"] == best["losses"][2] and evaluate(searched, []) == scores["after"]
    assert not list(searched.glob("members/*/checkpoints")) and (searched / "adapter").is_dir()


def test_a_survivor_has_the_curve_of_a_plain_run_on_its_whole_schedule(
    searched: Path, sections: dict[str, Any], tmp_path: Path
) -> None:
    """In a bank to its last bits, for which it matters who else is there."""
    (best,) = (row for row in table(searched)["members"] if row["status"] == "done")
    found, wanted = curve(searched), curve(alone(sections, best, tmp_path / "alone"))
    for one, other in zip(found, wanted, strict=True):
        assert one == {key: pytest.approx(value, rel=2e-4) for key, value in other.items()}


@pytest.mark.slow
def test_one_after_another_a_survivor_is_a_plain_run_bit_for_bit(
    searched: Path, sections: dict[str, Any], tmp_path: Path
) -> None:
    path = run(sections, tmp_path / "run", search={"together": False})
    found = table(path)
    assert found["best"] == table(searched)["best"]
    (best,) = (row for row in found["members"] if row["status"] == "done")
    wanted = alone(sections, best, tmp_path / "alone")
    assert curve(path) == curve(wanted)
    file = "adapter/adapter_model.safetensors"
    assert (path / file).read_bytes() == (wanted / file).read_bytes()


@pytest.mark.slow
def test_who_leaves_does_not_change_who_stays(searched: Path, sections: dict[str, Any], tmp_path: Path) -> None:
    """The same four without a comparison that ends any: the losses of each step are those of the survivors."""
    over = {key: [row["settings"][key] for row in table(searched)["members"]] for key in SPACE}
    sweep = {"over": {key: sorted(set(values)) for key, values in over.items()}}
    config = RunConfig.model_validate({**sections, "recipe": "sweep", "search": {}, "sweep": sweep})
    path = workbench.run(config, out=tmp_path / "run", quiet=True)
    members = {
        tuple(row["settings"].values()): row["member"]
        for row in json.loads((path / "sweep.json").read_text())["members"]
    }
    for row in table(searched)["members"]:
        found = curve(searched / "members" / row["member"])
        wanted = curve(path / "members" / members[tuple(row["settings"].values())])[: len(found)]
        assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in wanted], rel=2e-4)
        assert [each["learning_rate"] for each in found] == [each["learning_rate"] for each in wanted]


@pytest.mark.parametrize(
    "step",
    [1, pytest.param(3, marks=pytest.mark.slow), *(pytest.param(late, marks=pytest.mark.nightly) for late in (2, 6))],
)
def test_stopped_in_any_wave_and_resumed_it_ends_with_the_same_bits(
    step: int, searched: Path, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(Stopped):
            run(sections, tmp_path / "run")
    stopped = json.loads((tmp_path / "run" / "search.json").read_text())
    assert all(wave["seconds"] > 0 for wave in stopped["waves"]), "of the wave that was stopped too"
    path = run(sections, tmp_path / "run", resume=True)
    assert table(path) == table(searched) and curve(path) == curve(searched)
    file = "adapter/adapter_model.safetensors"
    assert (path / file).read_bytes() == (searched / file).read_bytes()


@pytest.mark.slow
def test_later_waves_are_proposed_by_what_earlier_ones_gave_and_resume_too(
    sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that go on and new ones share a bank, each at its own step."""
    own = {"sampler": "tpe", "trials": 7, "at_once": 4}
    whole = run(sections, tmp_path / "whole", search=own)
    waves = table(whole)["waves"]
    assert [sum(begun == 0 for begun in wave["begun"]) for wave in waves[:2]] == [4, 2]
    assert waves[1]["begun"] == [2, 2, 0, 0] and waves[1]["rungs"] == [1, 1, 0, 0]
    with monkeypatch.context() as patch:
        stop_after(patch, 3)  # in the second wave
        with pytest.raises(Stopped):
            run(sections, tmp_path / "run", search=own)
    assert table(run(sections, tmp_path / "run", search=own, resume=True)) == table(whole)


@pytest.mark.slow
def test_members_that_explode_do_not_go_on(sections: dict[str, Any], tmp_path: Path) -> None:
    space = {"train.learning_rate": [1e-3, 1e25, 1e26, 1e27]}
    path = run(sections, tmp_path / "one", search={"space": space})
    rows = {row["settings"]["train.learning_rate"]: row for row in table(path)["members"]}
    assert (
        rows[1e-3]["status"] == "done"
        and [rows[rate]["status"] for rate in space["train.learning_rate"][1:]] == ["failed"] * 3
    )
    assert "Failed: " in (path / "report.html").read_text()
    with pytest.raises(TrainingError, match="No member came to its end"):
        run(sections, tmp_path / "all", search={"space": {"train.learning_rate": [1e25, 1e26, 1e27, 1e28]}})


@pytest.mark.slow
def test_a_search_ends_in_time_with_what_came_to_its_end(
    sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tell how long a step takes; then there is time for no comparison: the better one goes all the way."""
    budget = {"time": "1h"}
    left = iter([99.0, 0.7, 0.0])
    monkeypatch.setattr(search, "trainings_left", lambda *_: next(left))
    path = run(sections, tmp_path / "run", budget=budget)
    waves = table(path)["waves"]
    assert [(len(wave["trials"]), wave["rungs"][0]) for wave in waves] == [(2, 0), (1, 2)]
    assert table(path)["best"] is not None and table(path)["trained"] == 1.25
    assert read_scores(path)["after"]["loss"] > 0


def test_rows_of_a_comparison_are_among_those_of_the_next_one(sections: dict[str, Any]) -> None:
    config = RunConfig.model_validate({**sections, "search": {**sections["search"], "rungs": 4, "rows": 40}})
    found = [search.judging_rows(config, 100, rung=rung) for rung in range(4)]
    sets = [set(each.tolist()) for each in found if each is not None]
    assert [len(each) for each in sets] == [8, 10, 20, 40] and all(a <= b for a, b in itertools.pairwise(sets))
    assert search.judging_rows(config, 40, rung=3) is None, "there are no more"


def test_there_is_no_time_at_all(sections: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"budget: .* s are (not enough|spent)"):
        run(sections, tmp_path / "run", budget={"time": 0.01})


def test_the_report_has_settings_table_and_plots(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep_sections.read_search(searched)
    assert (
        found is not None
        and found.shipped == 0
        and found.columns[2:5] == ("loss after 1/4", "loss after 1/2", "loss after all")
    )
    assert len(found.members) == 4 and sum(key in SPACE for key, _ in found.settings) == 2
    titles = [plot.title for plot in sweep_sections.plots(run_record.read(searched))]
    assert titles[0].startswith("Settings of all members") and "Held-out loss against adapter.rank" in titles
    page = (searched / "report.html").read_text()
    for shown in ("What each setting explains", "4 settings took the steps of 2 trainings", "flatters itself", *titles):
        assert shown in page
    render.outcome(searched)
    printed = capsys.readouterr().out
    assert "Members that came farthest" in printed and "Explained: " in printed


def test_check_says_what_will_happen_and_refuses_too_many_rungs(sections: dict[str, Any]) -> None:
    first, second, early = check(RunConfig.model_validate(sections)).notes
    assert first.startswith(
        "4 settings, proposed by chance; 4 members begin, together in one bank. The first: 000-learning"
    )
    assert second == "Members come 4 to 1/4 (2), 2 to 1/2 (4), 1 to all (8) of their steps: 2 trainings, instead of 4."
    assert early.startswith("The first comparison comes after step 2 of 8, where the best settings may not lead yet.")
    steep = {**sections, "search": {**sections["search"], "rungs": 4}}
    with pytest.raises(ConfigError, match=r"1 of 16 parts of their 8 steps, .* Write search\.rungs=3, or longer"):
        check(RunConfig.model_validate(steep))
    (first, *_) = check(RunConfig.model_validate({**sections, "adapter": {"method": "eva", "rank": 4}})).notes
    assert "one after another: a bank holds no eva: its start comes from the training rows" in first


@pytest.mark.nightly
def test_the_shipped_search_trains(tmp_path: Path) -> None:
    """With few trials, on few rows."""
    text = (recipes.CONFIGS / "search" / "quickstart.yaml").read_text()
    assert text.startswith("# workbench run search/quickstart\n") and load("search/quickstart").search.trials == 32
    rows = (starter.FOLDER / "fairytaleqa_held_out.jsonl").read_text().splitlines()
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows[:6]))
    words = [
        "search.trials=3",
        "search.rungs=1",
        "train.steps=3",
        "data.limit=24",
        "data.max_tokens=128",
        "batch.size=4",
        "evaluate.answers=2",
    ]
    path = workbench.run(
        "search/quickstart", [*words, f"data.held_out={tmp_path / 'held_out.jsonl'}"], out=tmp_path / "run", quiet=True
    )
    assert [row["status"] for row in table(path)["members"]].count("done") == 1
