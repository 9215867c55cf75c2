"""Mistakes with rewards, sample and evaluate --against end in status 2 and a message with place and cure."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.mistakes.cases import AssertRowsRefused, RowsCase, trained
from tests.mistakes.conftest import RECIPE

ROWS = [{"question": f"What comes after {n}?", "answer": f"#### {n + 1}", "n": n} for n in range(10)]
CODE = """
def raises(answers):
    raise KeyError("n")

def short(answers):
    return [1.0]

def nan(answers):
    return [float("nan") for _ in answers]

def hangs(answers):
    while True:
        pass

def reward(answers):
    return [1.0 for _ in answers]
"""


def sampled(place: str, cure: str, words: str) -> RowsCase:
    """`sample` with few short answers."""
    command = "sample one other.jsonl --out a.jsonl --n 2 --max-new-tokens 2 --to all"
    return RowsCase(place, cure, words, ROWS, ROWS[:2], command)


def against(place: str, cure: str, words: str, command: str = "evaluate one --against one") -> RowsCase:
    return RowsCase(place, cure, f"--max-new-tokens 2 {words}", ROWS, ROWS[:2], command)


Config = partial(RowsCase, rows=ROWS, other=(), command="check my.yaml")

CASES = {
    "unknown kind": Config(
        "rewards.0.kind: unknown kind 'nomber'", "Did you mean `number`?", "rewards=[{kind: nomber}]"
    ),
    "unknown key": Config(
        "rewards.0.anser: unknown key", "Did you mean `answer`?", "rewards=[{kind: number, anser: a}]"
    ),
    "key of another kind": Config(
        "rewards.file: is for kind=function", "Leave it out", "rewards=[{kind: number, file: code.py}]"
    ),
    "no list": Config("rewards: expected a list", "such as [a, b]", "rewards=number"),
    "no pattern": Config("rewards.0.pattern", "is required", "rewards=[{kind: regex}]"),
    "bad pattern": Config("'(' is no regular expression", "Correct it", "rewards=[{kind: regex, pattern: (}]"),
    "no run": Config("rewards.0.run", "is required", "rewards=[{kind: model}]"),
    "no time": Config("rewards.0.seconds", "greater than 0", "rewards=[{kind: unit_tests, seconds: 0}]"),
    "negative tolerance": Config(
        "rewards.0.tolerance", "greater than or equal to 0", "rewards=[{kind: number, tolerance: -1}]"
    ),
    "endless weight": Config("rewards.0.weight", "finite number", "rewards=[{kind: number, weight: .inf}]"),
    "recipe without rewards": Config("rewards is for recipe=", "Leave rewards out", "rewards=[{kind: number}]"),
    "score: misspelt": sampled("--score nomber", "Did you mean `number`?", "--score nomber"),
    "score: no settings": sampled("--score regex: has settings of its own", "{kind: regex", "--score regex"),
    "score: no mapping": sampled("not valid YAML", "Correct it", "--score '{kind: '"),
    "score: no file": sampled("none.py is no Python file", "my_code.py", "--score none.py"),
    "score: no function": sampled("defines no function score", "def score(answers", "--score code.py:score"),
    "score: no reward model": sampled("is a run of recipe sft", "recipe reward", "--score one"),
    "score: no column": sampled("no column `right`", "Name another one", "--score '{kind: number, answer: right}'"),
    "score: no number in it": sampled(
        "`w` holds no number", "Correct the row", "--score '{kind: number, answer: w}'"
    )._replace(other=[{**row, "w": "many"} for row in ROWS[:2]]),
    "score: no group": sampled(
        "has no group to compare", "leave `answer` out", "--score '{kind: regex, pattern: a, answer: answer}'"
    ),
    "score: no schema": sampled(
        "none.json: cannot be read", "JSON schema", "--score '{kind: json, json_schema: none.json}'"
    ),
    "score: unknown keyword": sampled(
        "typ is no", "Did you mean `type`?", "--score '{kind: json, json_schema: {typ: object}}'"
    ),
    "score: tests that are none": sampled(
        "`n` must be Python code", "name another column", "--score '{kind: unit_tests, tests: n}'"
    ),
    "score: little memory": sampled(
        "memory may be too few", "Take another", "--score '{kind: unit_tests, tests: question, memory: 1MiB}'"
    ),
    "score: raises": sampled("code.py, line 3: KeyError", "Correct the file", "--score code.py:raises"),
    "score: too few": sampled("returned 1 rewards for", "one for each answer", "--score code.py:short"),
    "score: not a number": sampled("the reward of an answer is nan", "a finite number", "--score code.py:nan"),
    "score: hangs": sampled(
        "took more than 0.1 s", "a higher timeout", "--score '{file: code.py, function: hangs, timeout: 0.1}'"
    ),
    "sample: another ending": sampled("--out b.csv", "that ending", "--score number --out b.csv"),
    "sample: a file that is there": sampled(
        "rows.jsonl exists already", "Name another", "--score number --out rows.jsonl"
    ),
    "sample: unknown rows": sampled("--to bests", "best, accepted, pairs, all", "--score number --to bests"),
    "sample: one answer a pair": sampled("--n 1 gives one", "Write --n 2", "--score number --to pairs --n 1"),
    "sample: no least": sampled("--least, which is not given", "Write --least 1", "--score number --to accepted"),
    "sample: a margin of nothing": sampled("--margin is for --to pairs", "Leave it out", "--score number --margin 1"),
    "sample: no temperature": sampled("--temperature 0", "above 0", "--score number --temperature 0"),
    "sample: nothing finished": sampled("ended within --max-new-tokens 2", "a higher", "--score number --to best"),
    "against: by nothing": against("--score REWARD", "Write one of them", ""),
    "against: by two": against("--score REWARD", "Write one of them", "--score number --judge cat"),
    "score: a vote of one": sampled("--score vote compares answers", "Write --n 2", "--score vote --n 1"),
    "against: by vote": against(
        "--score vote compares several answers", "Write another --score", "data.test=other.jsonl --score vote"
    ),
    "against: by likelihood": against(
        "--score likelihood reads how likely", "Write another --score", "data.test=other.jsonl --score likelihood"
    ),
    "against: no rows": against("held out a share", "data.test=FILE", "--score number"),
    "against: no program": against(
        "'no-such' cannot be started", "Name a program", "data.test=other.jsonl --judge no-such"
    ),
    "against: no verdicts": against(
        "wrote 'first' in line 1", "1, 2 or 0", "data.test=other.jsonl --judge 'sed s/.*/first/'"
    ),
    "against: devices": against("--against ask on one device", "Leave --devices out", "--devices 2"),
    "against: no other": against("compare with another run", "Write --against", "--score number", "evaluate one"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """A run of two steps. Read only."""
    return trained(RECIPE, ROWS, tmp_path_factory.mktemp("finished"), short_stories)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: RowsCase, tmp_path: Path, finished: Path, assert_rows_refused: AssertRowsRefused
) -> None:
    (tmp_path / "code.py").write_text(CODE)
    case = case._replace(words=f"'{case.words}'") if case.command == "check my.yaml" else case
    assert_rows_refused(case, one=finished)
    assert not (tmp_path / "a.jsonl").exists()
