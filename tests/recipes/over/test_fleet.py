"""A fleet: each member is the run that it would be alone, whoever trains beside it and whenever it joined."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import workbench
from tests import forked
from tests.conftest import MINILM, save_tiny, write_questions
from tests.stopping import stop_after
from workbench.cli import render
from workbench.config import RunConfig
from workbench.errors import ConfigError, ResumeError, Stopped, TrainingError, WorkbenchError
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import generate
from workbench.recipes.verbs.merge import merge

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> dict[str, Any]:
    """Four members on stories260K, of whom two train at once: files, ranks, batches, ends and seeds of their own."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in {"alice": 40, "bob": 30, "carol": 24, "dave": 36}.items():
        write_questions(folder / f"{name}.jsonl", [f"{name} {n + 1}" + " it is" * (n % 7) for n in range(rows)])
    members: dict[str, dict[str, Any]] = {
        "alice": {"adapter.rank": 4, "train.steps": 3},
        "bob": {"adapter": {"rank": 8, "dropout": 0.1}, "train": {"steps": 8, "learning_rate": 2e-3}, "seed": 3},
        "carol": {"adapter.rank": 2, "batch.size": 4, "train.steps": 6, "data.held_out": 0.3},
        "dave": {"adapter.targets": "attention", "train.epochs": 0.5, "schedule.name": "linear"},
    }
    return {
        "recipe": "fleet",
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"held_out": 0.2},
        "batch": {"size": 6},
        "train": {"learning_rate": 1e-2},
        "evaluate": {"every": 2, "answers": 2, "max_new_tokens": 4},
        "save": {"every": 2},
        "fleet": {
            "at_once": 2,
            "members": {name: {"data.train": str(folder / f"{name}.jsonl"), **own} for name, own in members.items()},
        },
    }


@pytest.fixture(scope="module")
def fleet(sections: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished fleet. Read only."""
    return run(sections, tmp_path_factory.mktemp("fleet") / "run")


def run(sections: dict[str, Any], out: Path, *, resume: bool = False, **other: Any) -> Path:
    config = RunConfig.model_validate({**sections, **other})
    return workbench.run(config, out=out, quiet=True, resume=resume)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def table(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "fleet.json").read_text()))


def assert_same(path: Path, other: Path, members: tuple[str, ...] = ("alice", "bob", "carol", "dave")) -> None:
    """The same bits of every member, in its losses, adapter and scores."""
    for name in members:
        one, two = path / "members" / name, other / "members" / name
        assert [line["loss"] for line in lines(one)] == [line["loss"] for line in lines(two)], name
        tensors = [load_file(each / "adapter" / "adapter_model.safetensors") for each in (one, two)]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(tensors[0][key].equal(tensors[1][key]) for key in tensors[0]), name
        assert (one / "scores.json").read_text() == (two / "scores.json").read_text()
        assert (one / "samples.jsonl").read_text() == (two / "samples.jsonl").read_text()


def with_members(sections: dict[str, Any], **members: dict[str, Any]) -> dict[str, Any]:
    return {**sections["fleet"], "members": sections["fleet"]["members"] | members}


@pytest.mark.parametrize("name", [pytest.param("alice", marks=pytest.mark.nightly), "dave"])  # who waited
def test_members_equal_runs_of_their_own(name: str, fleet: Path, tmp_path: Path) -> None:
    own = fleet / "members" / name
    alone = workbench.run(own / "config.yaml", out=tmp_path / "alone", quiet=True)
    for key in ("step", "loss", "learning_rate", "held_out_loss"):
        found, wanted = ([line[key] for line in lines(each) if key in line] for each in (own, alone))
        assert found == pytest.approx(wanted, rel=1e-4), key
    found, wanted = (json.loads((each / "scores.json").read_text()) for each in (own, alone))
    for when in ("before", "after"):
        assert found[when] == pytest.approx(wanted[when], rel=1e-3), when
    assert (own / "samples.jsonl").exists() and (alone / "samples.jsonl").exists()


def test_members_leave_and_join_in_their_order(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = table(fleet)
    assert (found["at_once"], found["bank"], found["left"]) == (2, {}, ["alice", "bob", "carol", "dave"])
    steps = {row["member"]: (row["status"], row["steps"], row["rows"], row["rank"]) for row in found["members"]}
    assert steps == {
        "alice": ("done", 3, 32, 4),
        "bob": ("done", 8, 24, 8),
        "carol": ("done", 6, 17, 2),
        "dave": ("done", 2, 29, 4),
    }
    log = (fleet / "log.txt").read_text()
    assert "2 members train in one bank, 2 wait." in log
    assert "alice leaves. carol joins: 2 members train in one bank, 1 waits." in log
    scores = json.loads((fleet / "scores.json").read_text())
    losses = [json.loads((fleet / "members" / name / "scores.json").read_text())["after"]["loss"] for name in steps]
    assert scores["after"]["loss"] == pytest.approx(sum(losses) / 4)
    assert [scores["after"][f"loss[{name}]"] for name in steps] == losses
    page = (fleet / "report.html").read_text()
    assert "Held-out loss of all members" in page and 'href="members/carol/report.html"' in page
    render.outcome(fleet)
    assert "carol" in capsys.readouterr().out


def test_a_member_is_a_run_like_any_other(fleet: Path, tmp_path: Path) -> None:
    own = fleet / "members" / "bob"
    assert evaluate(own, []) == json.loads((own / "scores.json").read_text())["after"]
    generate(own, "What comes after 3?", max_new_tokens=2)
    assert merge(own, out=tmp_path / "merged", weights="float32").agreement.sentence
    with pytest.raises(ConfigError, match="members/alice"):
        evaluate(fleet, [])


def test_stopped_and_resumed_it_ends_with_the_same_bits(
    fleet: Path, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 5):
        with monkeypatch.context() as patch:
            stop_after(patch, step)
            with pytest.raises(Stopped):
                run(sections, tmp_path / "run", resume=step > 1)
    assert table(tmp_path / "run")["bank"]
    assert_same(run(sections, tmp_path / "run", resume=True), fleet)


@pytest.mark.slow
def test_members_may_come_to_a_fleet_that_stopped(
    sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = sections["fleet"]["members"]
    small = {**sections["fleet"], "members": {name: known[name] for name in ("alice", "carol")}}
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            run(sections, tmp_path / "run", fleet=small)
    more = {**small, "members": {**small["members"], "eve": {**known["alice"], "seed": 5}}}
    path = run(sections, tmp_path / "run", fleet=more, resume=True)
    assert [row["status"] for row in table(path)["members"]] == ["done"] * 3
    assert len(lines(path / "members" / "eve")) == 3
    later = {**more, "members": {**more["members"], "fay": {**known["alice"], "seed": 6}}}
    path = run(sections, tmp_path / "run", fleet=later, resume=True)
    assert table(path)["left"][-1] == "fay"
    for other in (small, {**later, "members": dict(reversed(later["members"].items()))}):
        with pytest.raises(ResumeError, match=r"another configuration|in this order"):
            run(sections, tmp_path / "run", fleet=other, resume=True)


@pytest.mark.slow
def test_members_of_other_methods(sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = sections["fleet"]["members"]
    methods = {"alice": {"method": "lora", "rank": 4}, "bob": {"method": "ia3"}, "carol": {"method": "dora", "rank": 2}}
    methods |= {"dave": {"method": "lora", "rank": 2, "dropout": 0.1}}
    rest = {name: {key: each for key, each in known[name].items() if "adapter" not in key} for name in methods}
    members = {name: {**rest[name], "adapter": each} for name, each in methods.items()}
    mixed, adapter = {**sections["fleet"], "members": members}, {"method": "ia3"}
    sections = {**sections, "evaluate": {"every": 4, "answers": 1, "max_new_tokens": 2}}
    path = run(sections, tmp_path / "run", fleet=mixed, adapter=adapter)
    for name in members:
        own = path / "members" / name
        alone = workbench.run(own / "config.yaml", out=tmp_path / name, quiet=True)
        found, wanted = ([line["loss"] for line in lines(each)] for each in (own, alone))
        assert found == pytest.approx(wanted, rel=1e-4), name
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            run(sections, tmp_path / "stopped", fleet=mixed, adapter=adapter)
    assert_same(run(sections, tmp_path / "stopped", fleet=mixed, adapter=adapter, resume=True), path)

    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stopped):
            run(sections, tmp_path / "plain")
    fleet = with_members(sections, eve={**rest["alice"], "adapter.method": "dora"})
    with pytest.raises(ResumeError, match="eve must wait until"):
        run(sections, tmp_path / "plain", fleet=fleet, resume=True)


@pytest.mark.slow
def test_a_member_that_explodes_leaves_and_the_others_go_on(sections: dict[str, Any], tmp_path: Path) -> None:
    known = sections["fleet"]["members"]
    wild = {**known["bob"], "train": {"steps": 8, "learning_rate": 1e25}, "schedule.name": "linear"}
    members = {"alice": known["alice"], "bob": wild, "carol": known["carol"]}
    path = run(sections, tmp_path / "run", fleet={"at_once": 2, "members": members})
    assert {row["member"]: row["status"] for row in table(path)["members"]} == {
        "alice": "done",
        "bob": "failed",
        "carol": "done",
    }
    assert json.loads((path / "manifest.json").read_text())["failed"] == ["bob"]
    assert "bob failed, and has no adapter" in (path / "log.txt").read_text()
    with pytest.raises(TrainingError, match=r"Lower train\.learning_rate"):
        run(sections, tmp_path / "all", fleet={"members": {"bob": wild}})


def test_a_fleet_with_wrong_rows_leaves_no_members(sections: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    members = {"alice": sections["fleet"]["members"]["alice"], "eve": {"data.train": str(tmp_path / "bad.jsonl")}}
    with pytest.raises(WorkbenchError, match=r"fleet\.members\.eve: .*bad\.jsonl"):
        run(sections, tmp_path / "run", fleet={"members": members})
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"config.yaml", "log.txt", "manifest.json", "report.html", "run.lock"}
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"


def test_check_says_whose_rows_are_wrong(sections: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "eve.jsonl").write_text('{"x": 1}\n')
    fleet = with_members(sections, eve={"data.train": str(tmp_path / "eve.jsonl")})
    with pytest.raises(WorkbenchError, match=r"fleet\.members\.eve: .*fit no known format"):
        check(RunConfig.model_validate({**sections, "fleet": fleet}))
    fleet = with_members(sections, eve={**sections["fleet"]["members"]["bob"], "optimizer": {"sam": 0.05}})
    with pytest.raises(ConfigError, match=r"fleet\.members\.eve: optimizer\.sam"):
        check(RunConfig.model_validate({**sections, "fleet": fleet}))
    found = check(RunConfig.model_validate(sections))
    assert any("4 members, 2 at a time" in note for note in found.notes)


@pytest.mark.nightly(but=["dora"])
@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"adapter.method": "dora"}], ids=["lora", "dora"])
def test_classifiers_of_different_classes_equal_runs_of_their_own(own: dict[str, Any], tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "bert", "Bert", "SequenceClassification", MINILM)
    for name, classes in (("two", "ab"), ("three", "xyz")):
        rows = [
            {"text": f"The {['cat', 'dog', 'cow'][n % 3]} said {n}.", "label": classes[n % len(classes)]}
            for n in range(45)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "recipe": "fleet",
        "model": {"id": model, "weights": "float32"},
        "adapter": {"method": "lora", "rank": 2, "alpha": 4},
        "data": {"held_out": 0.3, "overlap": "exact"},
        "batch": {"size": 8},
        "train": {"steps": 4, "learning_rate": 1e-2},
        "evaluate": {"every": 2, "probe": 0},
        "of": "classify",
        "fleet": {
            "at_once": 2,
            "members": {
                "two": {"data.train": str(tmp_path / "two.jsonl")},
                "three": {"data.train": str(tmp_path / "three.jsonl"), "seed": 2, "train.steps": 6, **own},
                "late": {"data.train": str(tmp_path / "three.jsonl"), "adapter.rank": 4, "train.steps": 3},
            },
        },
    }
    path = run(sections, tmp_path / "run")
    for name in ("three", "late"):
        folder = path / "members" / name
        alone = workbench.run(folder / "config.yaml", out=tmp_path / name, quiet=True)
        found, wanted = ([line["loss"] for line in lines(each)] for each in (folder, alone))
        assert found == pytest.approx(wanted, rel=1e-4)
        assert evaluate(folder, []) == json.loads((folder / "scores.json").read_text())["after"]


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bits(
    fleet: Path, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe = tmp_path / "fleet.yaml"
    recipe.write_text(json.dumps(sections))

    def begin(out: Path, *, resume: bool) -> subprocess.Popen[str]:
        command = [forked.python(), "-m", "workbench.cli.verbs", "run", str(recipe), "--out", str(out)]
        command += ["--resume"] if resume else []
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def steps(out: Path) -> int:
        return sum(len(path.read_text().splitlines()) for path in out.glob("members/*/metrics.jsonl"))

    broken = tmp_path / "broken"
    for wanted in (2, 7, 15):
        process = begin(broken, resume=(broken / "config.yaml").exists())
        end = time.monotonic() + 90
        while steps(broken) < wanted and process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        process.kill()
        process.communicate()  # to the end of what it writes, which is its own
    assert table(broken)["bank"], "it ended before it was killed often enough"
    process = begin(broken, resume=True)
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said
    assert_same(broken, fleet)
