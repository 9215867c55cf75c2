"""Tools of a user's file: their schemas, the limits of what runs them, and mistakes, each with its cure."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from workbench.config.sections.tools_config import ToolsConfig
from workbench.data.text.tool_calls import ToolCall
from workbench.errors import ConfigError
from workbench.evaluation.tools.toolbox import Toolbox, opening, rewarded

GOOD = '''
import os, time

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''
BEHAVIOUR = '''
import os, sys, time
count = 0

def hang() -> str:
    """Hangs."""
    while True:
        time.sleep(1)

def sleeper() -> str:
    """Leaves a process behind, and hangs."""
    if not os.fork():
        time.sleep(60)
    time.sleep(60)

def eat() -> str:
    """Takes memory."""
    return str(len(bytearray(2 << 30)))

def shout() -> str:
    """Says much."""
    print("to nobody", flush=True)
    return "x" * 10_000

def leave() -> str:
    """Ends its process."""
    os._exit(5)

def quit() -> str:
    """Wants to end it."""
    sys.exit(3)

def fail() -> str:
    """Raises."""
    raise RuntimeError("no luck")

def counted() -> int:
    """Counts its calls."""
    global count
    count += 1
    return count

def noise() -> str:
    """Writes where it should not."""
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"nonsense\\\\n")
        except OSError:
            pass
    return "done"

class World:
    def reset(self, row):
        self.row, self.steps = row, 0
        if row["kind"] == "raise":
            raise ValueError("not today")
        if row["kind"] == "hang":
            time.sleep(60)
        return row.get("messages")

    def look(self, where: str) -> str:
        """Looks.

        Args:
            where: There.
        """
        self.steps += 1
        return f"{where} {self.steps}"

    def step(self, said):
        return {"lie": 3, "late": ("x", 1)}.get(self.row["kind"], ("ok", True))

    def reward(self):
        return {"nan": float("nan"), "text": "much"}.get(self.row["kind"], {"steps": self.steps})
'''


def written(folder: Path, text: str, **settings: Any) -> Toolbox:
    path = folder / f"tools_{abs(hash(text))}.py"
    path.write_text(text)
    return Toolbox(ToolsConfig(file=path, **settings))


def call(toolbox: Toolbox, *names: str, **arguments: Any) -> list[dict[str, Any]]:
    requests = [toolbox.request(ToolCall(name, arguments), number) for number, name in enumerate(names)]
    return toolbox.carried_out([each for each in requests if not isinstance(each, str)])


def test_a_signature_and_its_docstring_are_the_schema(tmp_path: Path) -> None:
    (schema,) = written(tmp_path, GOOD).schemas
    wanted = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "description": "The second."},
        },
        "required": ["a", "b"],
    }
    assert schema["function"] == {"name": "add", "description": "Adds two numbers.", "parameters": wanted}


def test_calls_are_answered_in_order_within_their_limits(tmp_path: Path) -> None:
    toolbox = written(tmp_path, BEHAVIOUR, seconds=0.5, memory="256MB", output=100, at_once=3)
    names = ["counted", "hang", "eat", "shout", "leave", "quit", "fail", "counted", "sleeper", "noise", "counted"]
    began = time.monotonic()
    found = dict(zip(names, call(toolbox, *names), strict=True))
    assert time.monotonic() - began < 20
    assert found["counted"]["text"] == "1"  # each call has the memory of a fresh process
    assert found["hang"]["failed"] == found["sleeper"]["failed"] == "it took more than 0.5 s"
    assert "bytes of memory" in found["eat"]["failed"] and "status 5" in found["leave"]["failed"]
    assert found["shout"] == {"text": "x" * 100 + " ...", "cut": True, "step": False}
    assert found["fail"]["failed"] == "RuntimeError: no luck" and "SystemExit" in found["quit"]["failed"]
    assert "failed" in found["noise"] or found["noise"]["text"] == "done"
    assert call(toolbox, "counted")[0]["text"] == "1"  # and it goes on
    toolbox.close()


def test_environments_keep_their_state_and_their_mistakes_are_named(tmp_path: Path) -> None:
    toolbox = written(tmp_path, BEHAVIOUR, environment="World", functions=[], seconds=0.5)
    kinds = ["good", "raise", "hang", "lie", "late", "nan", "text"]
    jobs: list[dict[str, Any]] = [
        {"kind": "reset", "class": "World", "row": {"kind": kind}, "episode": n} for n, kind in enumerate(kinds)
    ]
    first = toolbox.carried_out(jobs)
    assert opening(first[0], []) is None and first[1]["failed"] == "ValueError: not today"
    assert first[2]["failed"] == "it took more than 0.5 s"
    for count in (1, 2):
        looks = [toolbox.request(ToolCall("look", {"where": "up"}), n) for n in (0, 3)]
        assert [each["text"] for each in toolbox.carried_out(looks)] == [f"up {count}"] * 2  # type: ignore[arg-type]
    steps = toolbox.carried_out([toolbox.said("hello", n) for n in (0, 2, 3, 4)])
    assert steps[0]["done"] is True and steps[1]["failed"] == "its process has ended"
    assert all("Return an observation and whether" in each["failed"] for each in steps[2:])
    ends = toolbox.carried_out([{"kind": "reward", "episode": n} for n in (0, 5, 6)])
    assert rewarded(ends[0]) == {"steps": 2.0} and "could not convert" in ends[2]["failed"]
    with pytest.raises(ValueError, match="reward\\(\\) returned nan"):
        rewarded(ends[1])
    assert toolbox.carried_out([{"kind": "end", "episode": n} for n in range(7)]) == [{}] * 7
    for wrong in (3, [], [{"role": "nobody", "content": "x"}], {"a": 1}):
        with pytest.raises(ValueError, match="reset"):
            opening({"messages": wrong}, [])
    toolbox.close()


def test_the_program_ends_with_its_toolbox(tmp_path: Path) -> None:
    toolbox = written(tmp_path, GOOD)
    toolbox.start()
    assert toolbox._host is not None
    number = toolbox._host.pid
    del toolbox
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


UNTYPED = GOOD.replace("a: int, b: int", "a, b: int")
UNTOLD = GOOD.replace("        b: The second.\n", "")
TWICE = GOOD + "\nclass World:\n    def reset(self, row):\n        pass\n    add = add\n"
CLASS = GOOD + "\nclass World:\n    def reset(self, row):\n        pass\n"
MISTAKES = {
    "no docstring": ("def add(a: int) -> int:\n    return a\n", {}, "add of .* has no docstring.*Write one"),
    "no types": (UNTYPED, {}, "add of .*: Argument a is missing a type hint.*Write a type for each"),
    "a parameter is not described": (UNTOLD, {}, "no description for the argument 'b'.*each under `Args:`"),
    "any parameters": (GOOD.replace("b: int", "*b: int"), {}, r"takes \*b, which no schema can tell"),
    "no function": ("x = 1\n", {}, "defines no function, and so no tool. Write one"),
    "a file that fails": ("import nowhere\n", {}, "line 1: ModuleNotFoundError: .*nowhere.*Correct the file"),
    "a file with a slip": ("def add(\n", {}, "SyntaxError.*Correct the file"),
    "an unknown function": (GOOD, {"functions": ["ad"]}, "no function ad. Did you mean `add`.*leave the name out"),
    "a function named twice": (GOOD, {"functions": ["add", "add"]}, "named twice: two tools of one name"),
    "two tools of one name": (TWICE, {"environment": "World"}, "two tools of one name. Rename"),
    "an unknown class": (CLASS, {"environment": "Worl"}, "no class Worl. Did you mean `World`.*class Worl:"),
    "no reset": (
        CLASS.replace("reset", "begin"),
        {"environment": "World"},
        "World of .* has no reset. Write `def reset",
    ),
    "a class with arguments": (
        CLASS + "    def __init__(self, size):\n        pass\n",
        {"environment": "World"},
        r"World\(\) of .* needs size.*Give them defaults",
    ),
    "odd types": (GOOD.replace("a: int", "a: 'Nowhere'"), {}, "no schema can be made of it.*plain types"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_with_their_cure(name: str, tmp_path: Path) -> None:
    text, settings, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=rf"(?s)reinforce\.tools.*{message}"):
        written(tmp_path, text, **settings)


def test_a_file_that_only_fails_in_the_program_is_told(tmp_path: Path) -> None:
    text = GOOD + "import sys\nif sys.modules.get('workbench_tools'):\n    raise OSError('no device')\n"
    with pytest.raises(ConfigError, match=r"OSError: no device\. Correct the file"):
        written(tmp_path, text).start()


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reinforce\.tools\.file: .*nothing\.py is no Python file"):
        Toolbox(ToolsConfig(file=tmp_path / "nothing.py"))
