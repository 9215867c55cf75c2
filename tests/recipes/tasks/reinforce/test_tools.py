"""Runs of recipe reinforce whose model acts in an environment: what is told, and that kills change no bit."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import workbench
from tests import forked
from tests.stopping import stop_after
from workbench.errors import Stopped, WorkbenchError
from workbench.recipes.load import load
from workbench.recipes.verbs import check, evaluate

RECIPE = """
recipe: reinforce
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {folder}/prompts.jsonl, held_out: 0.2, max_tokens: 400}}
reinforce:
  answers: 4
  max_new_tokens: 96
  temperature: 8.0
  updates: 2
  beta: 0.1
  tools: {{file: {folder}/tools.py, environment: Game, turns: 3}}
batch: {{size: 4}}
train: {{steps: 4, learning_rate: 2.0e-2}}
evaluate: {{every: null, answers: 3}}
save: {{every: null}}
"""
TOOLS = '''
import os, sys
from pathlib import Path

FOLDER = Path(__file__).parent


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Other.
    """
    return a + b


class Game:
    def reset(self, row):
        self.said = []
        if (FOLDER / "deadly").exists():
            process, folder = (FOLDER / "deadly").read_text().split(" ", 1)
            if list(Path(folder).glob("checkpoints/step-*2")):
                os.kill(int(process), 9)
        return None

    def step(self, said):
        self.said.append(said)
        return "And then?", False

    def reward(self):
        text = "".join(map(str, self.said))
        return {"vowels": sum(each in "aeiou" for each in text) / (1 + len(text)), "turns": 0.1 * len(self.said)}
'''
KILLED = """
import os, sys
from pathlib import Path
import workbench

recipe, out, moment = sys.argv[1:]
deadly = Path(recipe).parent / "deadly"
deadly.unlink(missing_ok=True)
if moment == "call":
    deadly.write_text(f"{os.getpid()} {out}")
workbench.run(recipe, ["save.every=1"], out=Path(out), resume=moment == "resume", quiet=True)
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """A recipe beside prompts and an environment that asks for more."""
    folder = tmp_path_factory.mktemp("tools")
    rows = [{"question": f"What comes after {n}?", "answer": str(n + 1)} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tools.py").write_text(TOOLS)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=short_stories, folder=folder))
    return path


def run(recipe: Path, out: Path, *overrides: str) -> Path:
    return workbench.run(recipe, overrides, out=out, quiet=True)


def told(run: Path) -> list[dict[str, Any]]:
    clocks = ("tokens_per_second", "data_wait", "peak_bytes", "elapsed_s")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: each for name, each in line.items() if name not in clocks} for line in lines]


@pytest.fixture(scope="module")
def trained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rollouts with two updates each. Read only."""
    return run(recipe, tmp_path_factory.mktemp("trained") / "run")


@pytest.mark.slow
def test_tells_episodes_turn_by_turn(trained: Path, recipe: Path) -> None:
    assert max(line["grad_norm"] for line in told(trained)) > 0
    for line in told(trained):
        assert {"episodes[turns]", "episodes[calls]", "episodes[errors]", "episodes[success]"} <= line.keys()
        assert line["reward[mean]"] == pytest.approx(line["reward[vowels]"] + line["reward[turns]"])
    scores = json.loads((trained / "scores.json").read_text())
    assert scores["after"]["turns"] >= 1 and {"success", "calls", "errors"} <= scores["before"].keys()
    page = (trained / "report.html").read_text()
    assert "Turns and calls" in page and "Episodes" in page
    (shown, *_) = check.check(load(str(recipe), [])).examples
    assert "vowels" in shown[0]
    with pytest.raises(WorkbenchError, match="its tools need"):
        evaluate.evaluate(trained, [], trust=False)
    for asked in (
        lambda: workbench.generate(trained, "What comes after 3?", trust=True),
        lambda: workbench.predict(trained, str(recipe.parent / "prompts.jsonl"), trust=True),
    ):
        with pytest.raises(WorkbenchError, match="one turn without them"):
            asked()
    found = evaluate.evaluate(trained, [], trust=True)
    assert found["reward"] == pytest.approx(scores["after"]["reward"], abs=1e-6)


@pytest.mark.slow
def test_the_shipped_recipe_learns_from_calls_of_its_calculator(tmp_path: Path) -> None:
    """From its shipped start, which rarely calls greedily, and in a third of its draws."""
    few = ["train.steps=2", "evaluate.answers=8"]
    trained = workbench.run("reinforce/tools", few, out=tmp_path / "run", quiet=True)
    assert json.loads((trained / "scores.json").read_text())["before"]["success"] < 0.3
    first = told(trained)[0]
    assert 0.1 < first["episodes[calls]"] < 0.6 and 0 < first["reward[mean]"] == first["episodes[success]"]
    assert first["grad_norm"] > 0


@pytest.mark.slow
def test_sample_writes_episodes_as_rows(recipe: Path, tmp_path: Path) -> None:
    """With what the environment said and gave, twice the same, and recipe sft reads them. The model can end a turn."""
    every, prompts = recipe.parent / "prompts.jsonl", tmp_path / "few.jsonl"
    prompts.write_text("".join(every.read_text().splitlines(keepends=True)[:3]))
    taught = [f"reinforce.warm_up={every}", "train.steps=1", "evaluate.answers=1"]
    trained = run(recipe, tmp_path / "run", *taught)

    def drawn(name: str, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
        settings = {"n": 2, "to": "all", "temperature": 2, "max_new_tokens": 96, "trust": True, **settings}
        found = workbench.sample(trained, str(prompts), out=tmp_path / name, **settings)
        return found, [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    found, rows = drawn("all.jsonl")
    assert len(rows) == found.answers == 6 and found.reward is not None and found.reward_interval is not None
    assert found.reward == pytest.approx(np.mean([row["reward"] for row in rows]))
    for row in rows:
        roles = [each["role"] for each in row["messages"]]
        assert roles == (["user", "assistant"] * row["turns"]) and row["tools"][0]["function"]["name"] == "add"
        assert row["reward"] == pytest.approx(row["rewards"]["vowels"] + row["rewards"]["turns"])
    assert max(row["turns"] for row in rows) > 1
    assert drawn("again.jsonl")[1] == rows
    least, kept = found.reward, [row for row in rows if row["reward"] >= found.reward]
    assert [row["reward"] for row in drawn("least.jsonl", least=least)[1]] == [row["reward"] for row in kept]
    taught = [f"data.train={tmp_path / 'all.jsonl'}", "data.held_out=0.2", f"model.id={load(str(recipe), []).model.id}"]
    assert check.check(load("sft/quickstart", [*taught, "data.ignore=[reward, rewards, place]"])).steps
    for settings, message in (
        ({"to": "pairs"}, "plays episodes of several turns. Write --to best"),
        ({"score": ["likelihood"]}, "likelihood reads an answer of one turn"),
        ({"trust": False}, "its tools need"),
    ):
        with pytest.raises(WorkbenchError, match=message):
            drawn("wrong.jsonl", **settings)


@pytest.mark.nightly
@pytest.mark.slow
def test_turns_with_rewards_of_their_own_are_learnt_also_after_a_stop(recipe: Path, tmp_path: Path) -> None:
    """By a model that was taught short answers; it stops between two updates on one rollout."""
    rows = recipe.parent / "prompts.jsonl"
    words = ["reinforce.tools.credit=turn", "reinforce.temperature=2", f"reinforce.warm_up={rows}", "train.steps=2"]
    whole = run(recipe, tmp_path / "whole", *words)
    mine, plain = told(whole)[0], told(run(recipe, tmp_path / "plain", *words, "reinforce.tools.credit=episode"))[0]
    assert mine["reward[mean]"] == plain["reward[mean]"] and mine["episodes[turns]"] > 1
    assert 0 < mine["grad_norm"] != plain["grad_norm"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 1)
        run(recipe, tmp_path / "run", *words)
    assert told(workbench.run(recipe, words, out=tmp_path / "run", resume=True, quiet=True)) == told(whole)
    adapters = [load_file(each / "adapter" / "adapter_model.safetensors") for each in (whole, tmp_path / "run")]
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())


@pytest.mark.slow
def test_killed_in_a_call_it_goes_on_with_the_same_bits(
    trained: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that trains is killed from the environment, within the second rollout."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    (tmp_path / "killed.py").write_text(KILLED)

    def status(moment: str) -> int:
        command = [forked.python(), tmp_path / "killed.py", recipe, tmp_path / "run", moment]
        return subprocess.run(list(map(str, command)), timeout=180).returncode

    assert status("call") == -signal.SIGKILL
    assert not (tmp_path / "run" / "adapter").exists()
    assert status("resume") == 0
    mine, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (trained, tmp_path / "run"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine) and told(trained) == told(tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reinforce.tools.file=null"], "reinforce.tools.file"),
        (["reinforce.tools={{turns: 3}}"], "reinforce.tools.file names no Python file"),
        (["reinforce.method=online_dpo"], "online_dpo compares two whole answers, and episodes"),
        (["reinforce.tools.environment=null"], "rewards: recipe reinforce learns from rewards"),
        (["reinforce.tools.environment=null", "reinforce.tools.failed=drop"], "failed is for an environment"),
        (
            ["reinforce.tools.credit=turn", "reinforce.method=rloo"],
            "baseline is leave_one_out. Write reinforce.baseline=",
        ),
        (
            ["reinforce.tools.credit=turn", "reinforce.method=gspo"],
            "normalise=mean_ratio takes an answer as one action",
        ),
        (
            ["reinforce.tools.credit=turn", "reinforce.kl=reward"],
            "credit=turn has one for each turn. Write reinforce.kl",
        ),
        (
            ["reinforce.tools.credit=turn", "reinforce.tools.environment=null", "rewards=[{{kind: number}}]"],
            "credit=turn asks the environment .* there is no environment",
        ),
        (["reinforce.tools.discount=0.5"], "discount is for reinforce.tools.credit=gigpo. Leave it out"),
        (["reinforce.tools.credit=gigpo", "reinforce.tools.discount=0"], "reinforce.tools.discount.*greater than 0"),
        (["reinforce.tools.credit=gigpo", "reinforce.method=gspo"], "credit=gigpo gives each turn an advantage"),
        (["reinforce.tools.turns=0"], "reinforce.tools.turns.*greater than or equal to 1"),
        (["reinforce.tools.memory=some"], "reinforce.tools.memory"),
        (["reinforce.tools.time=1"], "reinforce.tools.time: unknown key"),
        (["model.chat_template={folder}/bare.jinja"], "chat template writes no tools.*model.chat_template=FILE"),
        (["model.chat_template={folder}/odd.jinja"], "writes calls in no form that is known here"),
        (["data.train={folder}/raw.jsonl"], "is raw text, which has no turns for tools. Name its column `question`"),
        (["data.train={folder}/own.jsonl"], "has `tools` of its own beside reinforce.tools"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    recipe: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    bare = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
    calls = "{% for call in message.tool_calls or [] %}{{ '@' + call.function.name }}{% endfor %}"
    folder = recipe.parent
    (folder / "bare.jinja").write_text(bare)
    (folder / "odd.jinja").write_text("{{ tools }}" + bare.replace("{{ message", calls + "{{ message"))
    (folder / "raw.jsonl").write_text(json.dumps({"prompt": "One", "answer": "2"}) + "\n")
    tool = {"name": "x", "description": "y", "parameters": {"type": "object", "properties": {}}}
    (folder / "own.jsonl").write_text(json.dumps({"question": "One?", "answer": "2", "tools": [tool]}) + "\n")
    with pytest.raises(WorkbenchError, match=f"(?s){message}"):
        run(recipe, tmp_path / "run", *(word.format(folder=folder) for word in words))
    assert not (tmp_path / "run" / "adapter").exists()
