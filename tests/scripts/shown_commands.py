"""Commands that pages show, in blocks and in the text, and what comments before a block say of it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import forked

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(path for path in (ROOT / "scripts" / "tutorials").glob("*.md") if path.name != "README.md")
_GUIDES = (
    "README.md",
    "scripts/docs/how_it_works.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "adapters/README.md",
    "workbench/config/glossary.md",
)
_OF_SCRIPTS = ("scripts/README.md", "scripts/launch/README.md", "scripts/gpu/README.md", "scripts/bench/README.md")
OF_RECIPES = sorted([*(ROOT / "recipes").glob("*.md"), *(ROOT / "recipes").glob("*/*.md")])
PAGES = [*(ROOT / name for name in (*_GUIDES, *_OF_SCRIPTS)), *OF_RECIPES, *TUTORIALS]
TAKES_A_RECIPE = ("run", "check", "plan")
MARK = r"(needs|run by|tiny): (.*)"
_FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`([^`]+)`")
_OPTIONAL = re.compile(r"\[((?:[a-z_.]+=|--)[^\]]*)\]")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment before it: `needs: HARDWARE`, `run by: TEST` or `tiny: key=value ...`."""

    language: str
    text: str
    needs: str = ""
    """Hardware or files that it needs and a test has not; empty where a test runs it."""
    run_by: str = ""
    """The test that runs what it shows, where that takes a server, an answer or a layout of its own."""
    tiny: str = ""
    """Settings that a test adds to each command that takes a recipe."""

    @property
    def runs_as_printed(self) -> bool:
        """A shell runs it, with the settings of `tiny`."""
        return self.language == "sh" and not self.needs and not self.run_by

    def script(self) -> str:
        """Its commands, as a test runs them."""
        lines = (line.partition("  #")[0].rstrip() for line in self.text.splitlines())
        return "\n".join(f"{line} {self.tiny}" if _takes_a_recipe(line) else line for line in lines)


def links(page: Path) -> list[str]:
    """What a page links to within the checkout: a file from its own folder, an anchor, or both."""
    found = re.findall(r"\]\(([^)\s]+)\)", _INLINE.sub("", _FENCE.sub("", page.read_text())))
    return [link for link in found if not link.startswith(("http://", "https://"))]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    return [_block(match) for match in _FENCE.finditer(page.read_text())]


def _block(match: re.Match[str]) -> Block:
    mark = re.search(MARK, match["mark"] or "")
    marks = {mark[1].replace(" ", "_"): mark[2]} if mark else {}
    return Block(match["language"], match["text"], **marks)


def _takes_a_recipe(line: str) -> bool:
    words = line.split()
    return "scripts/launch/" in line or (words[:1] == ["workbench"] and words[1] in TAKES_A_RECIPE)


def commands(page: Path) -> list[list[str]]:
    """The words behind `workbench` of each command in a block of a page."""
    return _parsed(line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines())


def mentioned(page: Path) -> list[list[str]]:
    """Those of each command in the text of a page, which may leave things out."""
    return _parsed(inline(page))


def _parsed(lines: Iterable[str]) -> list[list[str]]:
    """Words of commands; those in brackets, which may be there, too."""
    shown = (line for line in lines if re.search(r"(^|\s)workbench [a-z]", line))
    words = (shlex.split(_OPTIONAL.sub(r"\1", line).replace(" ...", ""), comments=True) for line in shown)
    return [command for each in words for command in _workbench(each)]


def _workbench(words: list[str]) -> Iterator[list[str]]:
    ends = [place for place, word in enumerate(words) if word == "&&"]
    for start, end in zip([0, *(place + 1 for place in ends)], [*ends, len(words)], strict=True):
        if words[start] == "workbench" and end - start > 1:
            yield words[start + 1 : end]


def inline(page: Path) -> list[str]:
    """Code in the text of a page."""
    return [" ".join(code.split()) for code in _INLINE.findall(_FENCE.sub("", page.read_text()))]


def run_in_shell(script: str, folder: Path, *, status: int = 0) -> str:
    """What a script says there, with the package of these tests, a thread a process and nothing to read.

    Raises:
        AssertionError: It ended with another exit status.
    """
    folders = [Path(forked.python()).parent, Path(sys.executable).parent]
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
