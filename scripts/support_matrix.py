"""Write the page of what works with what from the results of the contract tests.

pytest -m "nightly or not slow" tests/adapters/test_contract.py --junitxml cells.xml
pytest -m "nightly or slow or not slow" tests/recipes/test_every_recipe.py --junitxml recipes.xml
pytest -m slow tests/workbench/training/distributed/test_layouts.py --junitxml layouts.xml
python scripts/support_matrix.py cells.xml recipes.xml layouts.xml --out adapters/SUPPORT.md

Every number and sign of the page comes from these files. Parts of the tests may be run at other times, in any number of
files; of a test that stands in several the last one counts. A combination that no file has is shown as not run.
"""

from __future__ import annotations

import argparse
import platform
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from workbench.adapters import METHODS
from workbench.adapters.method import WEIGHTS

Outcome = Literal["kept", "refused", "failed"]
SIGNS: dict[Outcome | None, str] = {"kept": "+", "refused": "-", "failed": "!", None: "."}
MEANINGS: dict[Outcome | None, str] = {
    "kept": "kept",
    "refused": "refused with a reason and a cure",
    "failed": "failed",
    None: "not run",
}
PICTURES = ("Beit", "CLIP", "ConvNext", "Dinov2", "MobileNetV2", "ResNet", "Swin", "ViT")
HEAD = """\
# What works with what

Written by `scripts/support_matrix.py` from the results of the contract tests, never by hand. A combination is *kept*
where a fresh adapter changes nothing (or says why), every trainable tensor learns and nothing else moves, what is saved
gives the same outputs when it is read back, switched off the backbone is back bit for bit, and merging changes nothing
or is refused.

`+` kept, `-` refused with a reason and a cure, `!` failed, `.` not run."""
VERSIONS = ("peft-workbench", "torch", "transformers", "peft", "bitsandbytes")


@dataclass(frozen=True)
class SupportCell:
    """A combination that a test is about; empty where the test is not about that."""

    method: str
    family: str = ""
    weights: str = ""
    recipe: str = ""
    layout: str = ""


@dataclass(frozen=True)
class TestResult:
    """The result of one test."""

    __test__ = False

    cell: SupportCell
    outcome: Outcome


def read(files: Iterable[Path]) -> dict[str, TestResult]:
    """Results by the test's name, from JUnit XML of pytest; tests that name no combination are left out.

    A skipped test counts as refused where it says so, and else as not run.
    """
    found: dict[str, TestResult] = {}
    for file in files:
        for case in ET.parse(file).iter("testcase"):
            facts = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
            refused = facts.pop("refused", None) is not None
            broken = case.find("failure") is not None or case.find("error") is not None
            if "method" not in facts or (case.find("skipped") is not None and not refused):
                continue
            outcome: Outcome = "failed" if broken else "refused" if refused else "kept"
            found[f"{case.get('classname')}::{case.get('name')}"] = TestResult(SupportCell(**facts), outcome)
    return found


def together(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The outcome of several tests: the worst; None of no test."""
    found = set(outcomes)
    order: tuple[Outcome, ...] = ("failed", "kept", "refused")
    return next((each for each in order if each in found), None)


class SupportMatrix:
    """Outcomes of all combinations, of methods that the package has."""

    def __init__(self, results: Iterable[TestResult]) -> None:
        self.results = [each for each in results if each.cell.method in METHODS]

    def names(self, kind: str) -> list[str]:
        """Values of one part of the combinations that were run, in alphabetical order."""
        return sorted({getattr(each.cell, kind) for each in self.results} - {""})

    def sign(self, **parts: str) -> str:
        """The sign of a combination that is given by some of its parts."""
        wanted = parts.items()
        of = (each.outcome for each in self.results if all(getattr(each.cell, key) == value for key, value in wanted))
        return SIGNS[together(of)]

    def page(self) -> str:
        """The whole page, in Markdown."""
        return "\n\n".join([HEAD, *self._parts()]) + "\n"

    def _parts(self) -> Iterator[str]:
        methods, families = sorted(METHODS), self.names("family")
        counts = Counter(each.outcome for each in self.results)
        told = ", ".join(f"{counts[outcome]:,} {MEANINGS[outcome]}" for outcome in ("kept", "refused", "failed"))
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in VERSIONS)
        yield f"{len(self.results):,} tests: {told}. {versions}, Python {platform.python_version()}, on a CPU."
        yield "## Methods, families and weights"
        yield f"A sign in each cell for each format of the backbone's weights, in this order: {', '.join(WEIGHTS)}."
        groups = {
            "Pictures": [each for each in families if each in PICTURES],
            "Encoders and encoder-decoders": [each for each in families if "-" in each or each == "T5"],
        }
        others = [each for each in families if not any(each in group for group in groups.values())]
        for title, group in ({"Causal language models": others} | groups).items():
            yield f"### {title}"
            yield table(methods, group, lambda method, family: self._formats(method, family))
        yield "## Methods and recipes"
        yield (
            "A run of each recipe's quickstart, shortened, on a small backbone: it trains, saves, reads back what it "
            "saved and scores it. Recipes that are not here train what these train: folds, sweeps and searches many at "
            "a time, distillation from other targets."
        )
        recipes = [name for name in self.names("recipe") if self._of_one_process(name)]
        yield table(methods, recipes, lambda method, recipe: self.sign(method=method, recipe=recipe, layout=""))
        yield "## Methods and layouts"
        yield (
            "Two processes on a CPU, sft: the same losses and weights as one process. Methods that are not here were "
            "not run in layouts."
        )
        laid_out = sorted({each.cell.method for each in self.results if each.cell.layout})
        yield table(self.names("layout"), laid_out, lambda layout, method: self.sign(method=method, layout=layout))

    def _formats(self, method: str, family: str) -> str:
        return "".join(self.sign(method=method, family=family, weights=weights) for weights in WEIGHTS)

    def _of_one_process(self, recipe: str) -> bool:
        return any(each.cell.recipe == recipe and not each.cell.layout for each in self.results)


def table(rows: Sequence[str], columns: Sequence[str], cell: Callable[[str, str], str]) -> str:
    """A table of signs in Markdown."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(f"`{cell(row, each)}`" for each in columns) + " |" for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Read result files, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="JUnit XML of pytest")
    parser.add_argument("--out", required=True, type=Path, help="the Markdown page")
    given = parser.parse_args(arguments)
    matrix = SupportMatrix(read(given.results).values())
    if not matrix.results:
        parser.error("no test in these files names a combination: see the commands above in this script.")
    given.out.write_text(matrix.page(), encoding="utf-8")
    print(f"{given.out}: {len(matrix.results):,} tests")


if __name__ == "__main__":
    main(sys.argv[1:])
