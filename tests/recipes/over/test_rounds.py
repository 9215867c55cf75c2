"""Rounds: each is a run of its own that begins with the adapter of the one before, whatever interrupts it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import workbench
from tests import forked
from tests.fake_judge import JudgeServer, judge
from tests.run_files import read_lines, read_scores
from workbench.cli import render
from workbench.cli.console import Terminal
from workbench.config import RunConfig
from workbench.data import starter
from workbench.errors import BackboneError, ConfigError, Stopped
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.sample import sample

__all__ = ["judge"]

# Stock PEFT uses what transformers calls deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]
EVEN = {"kind": "regex", "pattern": "[02468]"}


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two rounds of pairs on the starter, which learns to answer with a number before, and is to prefer even ones."""
    folder = tmp_path_factory.mktemp("rows")
    for name, rows in {"train": slice(8), "start": slice(48), "held_out": slice(8)}.items():
        lines = Path(starter.resolve(f"starter/arithmetic_{name}.jsonl")).read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[rows]))
    return {
        "recipe": "rounds",
        "model": {"id": "starter", "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": str(folder / "train.jsonl"), "held_out": str(folder / "held_out.jsonl"), "max_tokens": 32},
        "rounds": {
            "count": 2,
            "n": 4,
            "max_new_tokens": 4,
            "score": [EVEN],
            "on_worse": "go_on",
            "warm_up": str(folder / "start.jsonl"),
            "warm_up_steps": 12,
            "warm_up_rate": 3e-3,
        },
        "batch": {"size": 12},
        "train": {"steps": 3, "learning_rate": 5e-4},
        "evaluate": {"every": None, "answers": 0},
        "save": {"every": 1},
    }


@pytest.fixture(scope="module")
def rounds(sections: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Read only."""
    return run(sections, tmp_path_factory.mktemp("rounds") / "run")


def run(sections: dict[str, Any], out: Path, *, resume: bool = False, **other: Any) -> Path:
    own = {**sections, **other, "rounds": sections["rounds"] | other.get("rounds", {})}
    return workbench.run(RunConfig.model_validate(own), out=out, quiet=True, resume=resume)


def assert_same_adapter(one: Path, other: Path) -> None:
    first, second = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (one, other))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def table(path: Path) -> dict[str, Any]:
    """rounds.json without what takes its time, and with folders of this run as those of any."""
    text = (path / "rounds.json").read_text().replace(str(path), "RUN")
    return dict(json.loads(text, object_hook=lambda each: {k: v for k, v in each.items() if k != "seconds"}))


def test_each_round_begins_with_the_one_before(rounds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = table(rounds)
    first, second = (rounds / "members" / f"round-{n}" for n in (1, 2))
    assert [row["member"] for row in found["members"]] == ["round-1", "round-2"]
    assert workbench.load_recipe(first / "config.yaml").prefer.start == str(rounds / "warm-up")
    assert workbench.load_recipe(second / "config.yaml").prefer.start == str(first)
    for folder, row in zip((first, second), found["members"], strict=True):
        answers = read_lines(folder / "held_out_answers.jsonl")
        assert len(answers) == 8 * 4 and len(read_lines(folder / "answers.jsonl")) == 8 * 4
        assert row["reward"] == pytest.approx(sum(each["reward"] for each in answers) / len(answers))
        assert all(each["margin"] == 1 for each in read_lines(folder / "rows.jsonl"))
        assert row["rows"] == len(read_lines(folder / "rows.jsonl"))
    shipped = rounds / "members" / found["best"]
    assert_same_adapter(rounds, shipped)
    assert read_scores(rounds)["after"]["reward"] == max(row["reward"] for row in found["members"])
    assert evaluate(rounds) == evaluate(shipped) == read_scores(shipped)["after"]
    assert not [*rounds.rglob("*.unfinished.jsonl")]
    page = (rounds / "report.html").read_text()
    assert 'href="members/round-2/report.html"' in page and "held-out prompts" in page
    render.outcome(rounds)
    assert "which is shipped" in " ".join(capsys.readouterr().out.split())


def test_a_round_is_three_commands(rounds: Path, sections: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"score": ["{kind: regex, pattern: '[02468]'}"], "to": "pairs", "n": 4}
    for name, prompts in {"rows": "train", "held_out": "held_out"}.items():
        source = sections["data"][prompts]
        sample(rounds / "warm-up", source, out=tmp_path / f"{name}.jsonl", max_new_tokens=4, **settings)
    own = {name: sections[name] for name in ("model", "adapter", "batch", "train", "evaluate", "save")}
    data = {"train": str(tmp_path / "rows.jsonl"), "held_out": str(tmp_path / "held_out.jsonl"), "max_tokens": 32}
    start = {"start": str(rounds / "warm-up")}
    config = RunConfig.model_validate({**own, "recipe": "prefer", "data": data, "prefer": start})
    by_hand = workbench.run(config, out=tmp_path / "run", quiet=True)
    first = rounds / "members" / "round-1"
    for name in ("rows.jsonl", "held_out.jsonl"):
        assert (tmp_path / name).read_bytes() == (first / name).read_bytes()
    assert_same_adapter(by_hand, first)
    assert read_scores(by_hand) == read_scores(first)


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
import workbench
from torch.optim.optimizer import register_optimizer_step_post_hook
from workbench.evaluation import comparison, generation

def killing(function, call):
    calls = itertools.count(1)
    end = lambda: os.kill(os.getpid(), signal.SIGKILL)
    return lambda *given, **named: end() if next(calls) == call else function(*given, **named)

out, moment = Path(sys.argv[1]), sys.argv[2]
if moment == "training":  # weights have moved, and nothing of it is saved
    register_optimizer_step_post_hook(killing(lambda *_: None, 2))
if moment == "sampling":  # the second token of the answers after those to held-out prompts
    generation.picked = killing(generation.picked, 4 + 2)
if moment == "judging":
    comparison.paired = killing(comparison.paired, 1)
workbench.run(out / "config.yaml", out=out, resume=True, quiet=True)
"""


def test_stopped_and_killed_wherever_it_was_it_ends_with_the_same_bits(
    rounds: Path, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped once the first round has drawn answers; killed while it trains, while the second one draws, and while the
    first is judged."""
    own = tmp_path / "run"
    first, second = (own / f"members/round-{number}" for number in (1, 2))
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="answers were drawn"):
        patch.setattr(Terminal, "stop_requested", lambda _: (first / ".answers.jsonl.unfinished.jsonl").exists())
        run(sections, own)
    (tmp_path / "killed.py").write_text(KILLED)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    moments = {"training": first / "metrics.jsonl", "sampling": first / "adapter", "judging": first / "adapter"}
    for moment, there in moments.items():
        command = [forked.python(), str(tmp_path / "killed.py"), str(own), moment]
        assert subprocess.run(command, timeout=300).returncode == -signal.SIGKILL
        assert there.exists() and not (second / "metrics.jsonl").exists(), moment
    run(sections, own, resume=True)
    assert table(own) == table(rounds)
    for name in ("warm-up", "members/round-1", "members/round-2"):
        assert_same_adapter(own / name, rounds / name)
    for name in ("rows.jsonl", "held_out.jsonl", "answers.jsonl", "held_out_answers.jsonl"):
        for path in own.rglob(name):
            assert path.read_bytes() == (rounds / path.relative_to(own)).read_bytes()


def test_a_judge_at_an_address_says_what_is_learnt_and_which_round_is_best(
    rounds: Path, sections: dict[str, Any], tmp_path: Path, judge: JudgeServer
) -> None:
    """It prefers even numbers; its server fails in the middle of the first round, and nothing is asked twice."""

    def verdict(*answers: str) -> str:
        one, other = (text.strip()[-1:] in {*"02468"} for text in answers)
        return "[[C]]" if one == other else "[[A]]" if one else "[[B]]"

    judge.verdict = verdict
    well, own = judge.answer, tmp_path / "run"
    assert well is not None
    judge.answer = lambda body: well(body) if len(judge.asked) < 60 else {"error": "no more"}
    of = {"warm_up": None, "score": [{"kind": "judge", "url": judge.url, "model": "teacher", "at_once": 1}]}
    words: dict[str, Any] = {"prefer": {"start": str(rounds / "warm-up")}, "rounds": of}
    with pytest.raises(BackboneError, match="kept"):
        run(sections, own, **words)
    answered, judge.asked[:] = [json.dumps(body) for body in judge.asked[:59]], []
    judge.answer = well
    run(sections, own, resume=True, **words)
    again = [json.dumps(body) for body in judge.asked]
    assert len({*again, *answered}) == len(again) + len(answered)

    for number in (1, 2):
        pairs = read_lines(own / f"members/round-{number}/rows.jsonl")
        assert pairs and all(verdict(row["chosen"], row["rejected"]) == "[[A]]" for row in pairs)
    files = (own / "held_out_answers.jsonl", own / "members/round-1/held_out_answers.jsonl")
    before, now = ([row["completion"] for row in read_lines(path)][::4] for path in files)
    worth = {"[[A]]": 1.0, "[[B]]": 0.0, "[[C]]": 0.5}
    shares = [worth[verdict(one, other)] for one, other in zip(now, before, strict=True)]
    first = table(own)["members"][0]
    assert first["reward"] == pytest.approx(sum(shares) / len(shares)), "beside what was there before"


def test_a_round_that_is_worse_ends_them_and_is_told_first(
    rounds: Path, sections: dict[str, Any], tmp_path: Path
) -> None:
    """A rate that breaks the model; the rounds begin with the other run's warm-up."""
    words = {"rounds": {"count": 3, "warm_up": None, "on_worse": "stop"}, "train": {"steps": 3, "learning_rate": 3.0}}
    own = run(sections, tmp_path / "run", prefer={"start": str(rounds / "warm-up")}, **words)
    (row,) = table(own)["members"]
    assert row["worse"] and row["difference"] < 0
    assert "Worse than what was there before: round-1." in (own / "report.html").read_text()


def test_best_of_n_learns_single_answers(rounds: Path, sections: dict[str, Any], tmp_path: Path) -> None:
    start = {"steps": 1, "start": str(rounds / "warm-up")}
    own = run(sections, tmp_path / "run", of="sft", train=start, rounds={"count": 1, "warm_up": None, "least": 1})
    rows = read_lines(own / "members" / "round-1" / "rows.jsonl")
    assert rows and all(row["reward"] == 1 for row in rows)
    assert len({row["prompt"] for row in rows}) == len(rows), "one answer to a prompt"


def test_answers_that_are_all_alike_teach_nothing(sections: dict[str, Any], rounds: Path, tmp_path: Path) -> None:
    alike = {"warm_up": None, "score": [{"kind": "regex", "pattern": "(?s).*"}]}
    with pytest.raises(ConfigError, match="none of 8 prompts has two finished answers that differ in reward"):
        run(sections, tmp_path / "run", prefer={"start": str(rounds / "warm-up")}, rounds=alike)


def test_check_shows_the_prompts_and_counts_the_rounds(sections: dict[str, Any]) -> None:
    found = check(RunConfig.model_validate(sections))
    assert len(found.data.train) == len(found.data.held_out) == 8
    assert "2 rounds: each writes 4 answers to each of 8 prompts" in found.notes[0]
