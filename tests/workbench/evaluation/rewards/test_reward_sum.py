"""A sum of rewards names the one that fails, bounds it, and executes no code of others unless it is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from workbench.config import plugins
from workbench.config.sections.rewards_config import RewardSource
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import Answer, answer_to
from workbench.errors import ConfigError
from workbench.evaluation import rewards
from workbench.runs.trust import Trust

FUNCTIONS = """
import time
import numpy as np

def length(answers):
    return np.array([len(answer.text) for answer in answers])

def raises(answers):
    raise KeyError(answers[0].row["n"])

def leaves(answers):
    raise SystemExit(0)

def hangs(answers):
    while True:
        try:
            time.sleep(1)
        except Exception:
            pass

def nan(answers):
    return [float("nan")] * len(answers)

def short(answers):
    return [1.0]

def words(answers):
    return ["good"] * len(answers)

def nothing(answers):
    pass
"""
ANSWERS = [Answer("p", text, row={"n": n}, place=f"rows.jsonl, row {n}") for n, text in enumerate(["a", "bb", "ccc"])]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def _sum(*sources: Mapping[str, Any]) -> rewards.RewardSum:
    return rewards.build([RewardSource.model_validate(source) for source in sources])


def test_rewards_are_weighted_and_named(code: Path) -> None:
    found = _sum(
        {"file": code, "function": "length", "weight": 2.0},
        {"kind": "regex", "pattern": "b"},
        {"kind": "regex", "pattern": "c", "weight": -1},
    )
    assert found(ANSWERS) == [2.0, 5.0, 5.0]
    assert found.named(ANSWERS) == {"length": [1, 2, 3], "regex 1": [0, 1, 0], "regex 2": [0, 0, 1]}
    assert found([]) == []


@pytest.mark.parametrize(
    ("function", "message"),
    {
        "raises": "rewards, raises, from rows.jsonl, row 0 on: {file}, line 9: KeyError: 0",
        "leaves": "rewards, leaves, from rows.jsonl, row 0 on: {file}, line 12: SystemExit: 0",
        "hangs": "hangs() of {file} took more than 0.05 s for 3 answers",
        "nan": "rewards, nan: the reward of an answer is nan",
        "short": "short() of {file} returned 1 rewards for 3 answers. Return one for each answer",
        "words": "returned ['good', 'good', 'good']. Return a list of numbers",
        "nothing": "returned null. Return a list of numbers",
    }.items(),
)
def test_a_function_that_fails_is_named_and_bounded(code: Path, function: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        _sum({"file": code, "function": function, "timeout": 0.05})(ANSWERS)
    assert message.format(file=code) in str(error.value)


def test_a_missing_function_is_named_with_its_signature(code: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"defines no function score. Write `def score\(answers"):
        _sum({"file": code, "function": "score"})
    with pytest.raises(ConfigError, match="is no Python file"):
        _sum({"file": tmp_path / "none.py"})


def test_code_that_a_run_directory_names_runs_where_it_is_trusted(tmp_path: Path) -> None:
    code = tmp_path / "theirs.py"
    code.write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\ndef reward(answers): return [0]")
    source = RewardSource.model_validate({"file": code})
    with pytest.raises(ConfigError, match="--trust"):
        rewards.build([source], read_from=(tmp_path, Trust()))
    assert not (tmp_path / "ran").exists()
    rewards.build([source], read_from=(tmp_path, Trust(given=True)))
    assert (tmp_path / "ran").exists()


def test_files_are_known_by_their_digests(code: Path, tmp_path: Path) -> None:
    sources = [RewardSource.model_validate({"file": each}) for each in (code, tmp_path / "none.py")]
    assert rewards.digests(sources) == plugins.fingerprints([code])


def test_an_answer_knows_its_prompt() -> None:
    chat = answer_to(Example("row 1", messages=({"role": "user", "content": "Why?"},)), "So.", {"n": 1})
    assert (chat.prompt, chat.text, chat.place) == ("Why?", "So.", "row 1")
    assert [message["content"] for message in chat.example.messages] == ["Why?", "So."]
    raw = answer_to(Example("row 2", text=(("One, ", False), ("two, ", False))), "three", {})
    assert (raw.prompt, raw.messages) == ("One, two, ", ())
    assert raw.example.text == (("One, two, ", False), ("three", True))
