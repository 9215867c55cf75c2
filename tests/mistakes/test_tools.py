"""Mistakes with tools and environments of recipe reinforce end in status 2, with place and cure, before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mistakes.cases import AssertRefused, Case, Prepare, file, lines

RECIPE = """
recipe: reinforce
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.2, max_tokens: 300}
rewards: [{kind: number}]
reinforce: {answers: 2, max_new_tokens: 32, tools: {file: tools.py, turns: 2}}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null}
"""
ADD = '''
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Other.
    """
    return a + b
'''
GAME = """
class Game:
    def reset(self, row): ...
    def reward(self): return 1.0
"""
SCHEMA = {"name": "x", "description": "y", "parameters": {"type": "object", "properties": {}}}
TOOLS = "reinforce.tools"


def tools(source: str, **rows: Any) -> Prepare:
    """The recipe, with these tools and prompts."""

    def prepare(folder: Path) -> None:
        file("tools.py", source)(folder)
        file("my.yaml", RECIPE)(folder)
        lines([{"question": f"{n} + 1?", "answer": str(n + 1), **rows} for n in range(12)], "rows.jsonl")(folder)

    return prepare


def case(place: str, cure: str, words: str = "", source: str = ADD + GAME, **rows: Any) -> Case:
    return Case(f"run my.yaml {words}", place, cure, tools(source, **rows))


CASES = {
    "no file": case("nothing.py is no Python file", "Write", f"{TOOLS}.file=nothing.py"),
    "no Python": case("tools.py", "Correct the file", source="def add(:"),
    "an error in the file": case("tools.py", "Correct the file", source="raise ValueError('no')"),
    "no function": case("defines no function, and so no tool", "Write one, such as", source="x = 1"),
    "no docstring": case("has no docstring", "Write one, such as", source="def add(a: int): return a"),
    "no types": case("add", "Write a type for each parameter", source=ADD.replace(": int, b: int", ", b")),
    "an argument without a line": case("add", "a line for each under `Args:`", source=ADD.replace("b: Other.", "")),
    "any arguments": case("takes *rest", "Name each parameter", source=ADD.replace("b: int)", "b: int, *rest: int)")),
    "an unknown function": case("defines no function ad", "Did you mean `add`?", f"'{TOOLS}.functions=[ad]'"),
    "a function twice": case("add is named twice", "Leave one out", f"'{TOOLS}.functions=[add, add]'"),
    "an unknown class": case("defines no class Gam", "Did you mean `Game`?", f"{TOOLS}.environment=Gam"),
    "no server": case(
        "environment=http://127.0.0.1:1: ",
        "Start the server",
        f"{TOOLS}.file=null {TOOLS}.environment=http://127.0.0.1:1",
    ),
    "a file beside a server": case(
        "both say what the tools are", "Leave one out", f"{TOOLS}.environment=http://127.0.0.1:1"
    ),
    "neither a file nor a server": case(f"{TOOLS}.file names no Python file", "Write one", f"{TOOLS}.file=null"),
    "a server with a key": case(
        f"{TOOLS}.environment",
        "an address holds no key",
        f"{TOOLS}.file=null {TOOLS}.environment=http://me:secret@127.0.0.1:1",
    ),
    "no reset": case(
        "Game of tools.py has no reset",
        "Write `def reset(self, row):`",
        f"{TOOLS}.environment=Game",
        ADD + "class Game:\n    def reward(self): return 1.0\n",
    ),
    "an environment with arguments": case(
        "needs size",
        "Give them defaults",
        f"{TOOLS}.environment=Game",
        ADD + GAME.replace("def reset", "def __init__(self, size): ...\n    def reset"),
    ),
    "a tool of both": case(
        "two tools of one name",
        "Rename one of them",
        f"{TOOLS}.environment=Game",
        ADD + GAME + ADD.replace("\n", "\n    ").replace("(a", "(self, a"),
    ),
    "failures of no environment": case("failed is for an environment", "Leave it out", f"{TOOLS}.failed=drop"),
    "credit of no environment": case("there is no environment", "leave credit out", f"{TOOLS}.credit=turn"),
    "credit without a reward": case(
        "there is no Game.reward()",
        "leave credit out",
        f"{TOOLS}.environment=Game {TOOLS}.credit=turn",
        ADD + "class Game:\n    def reset(self, row): ...\n",
    ),
    "an unknown credit": case(f"{TOOLS}.credit", "'gigpo'", f"{TOOLS}.credit=step"),
    "a discount of no turns": case("discount is for", "Leave it out", f"{TOOLS}.discount=0.9"),
    "a weight of no states": case("state_weight is for", "Leave it out", f"{TOOLS}.state_weight=2"),
    "turns within one action": case(
        "gives each turn an advantage",
        "Write reinforce.normalise=token",
        f"{TOOLS}.credit=gigpo reinforce.method=gspo",
    ),
    "no turns": case(f"{TOOLS}.turns", "greater than or equal to 1", f"{TOOLS}.turns=0"),
    "no time": case(f"{TOOLS}.seconds", "greater than 0", f"{TOOLS}.seconds=0"),
    "no output": case(f"{TOOLS}.output", "greater than 0", f"{TOOLS}.output=0"),
    "no memory": case(f"{TOOLS}.memory", "could not parse value", f"{TOOLS}.memory=some"),
    "an unknown key": case(f"{TOOLS}.turn", "Did you mean `turns`?", f"{TOOLS}.turn=2"),
    "whole answers in pairs": case(
        "episodes with tools have turns", "Write reinforce.method=grpo", "reinforce.method=online_dpo"
    ),
    "a template without tools": case("writes no tools", "model.chat_template=FILE", "model.chat_template=my.yaml"),
    "rows with tools": case("has `tools` of its own", "data.ignore='[tools]'", tools=[SCHEMA]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
