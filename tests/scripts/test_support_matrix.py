"""The page of what works with what: made from results alone, complete, and about the methods that there are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import forked
from tests.matrix import BACKBONES, LAYOUTS, TASKS
from workbench.adapters import METHODS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "adapters" / "SUPPORT.md"
SHIPPED = {name for name, section in METHODS.items() if section.__module__.startswith("workbench.")}
"""The package's methods, without those of the tests."""


def tables(page: str) -> dict[str, tuple[list[str], dict[str, list[str]]]]:
    """The columns, and cells by row, of the table below each heading."""
    found = {}
    for title, text in re.findall(r"^#+ ([^\n]*)\n((?:(?!^#).*\n?)*)", page, re.M):
        lines = [
            [cell.strip(" `") for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*$", text, re.M)
        ]
        if lines:
            found[title] = lines[0][1:], {cells[0]: cells[1:] for cells in lines[2:]}
    return found


def written(folder: Path, *files: str) -> subprocess.CompletedProcess[str]:
    """The script over files of results with these test cases."""
    names = []
    for number, cases in enumerate(files):
        names.append(str(folder / f"{number}.xml"))
        Path(names[-1]).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    command = [forked.python(), str(ROOT / "scripts" / "support_matrix.py"), *names, "--out", str(folder / "page.md")]
    return subprocess.run(command, capture_output=True, text=True)


def case(name: str, inside: str = "", **cell: str) -> str:
    properties = "".join(f'<property name="{key}" value="{value}"/>' for key, value in cell.items())
    return f'<testcase classname="tests" name="{name}"><properties>{properties}</properties>{inside}</testcase>'


def test_the_page_names_what_the_package_has() -> None:
    found = tables(PAGE.read_text())
    families = [found[title] for title in ("Causal language models", "Encoders and encoder-decoders", "Pictures")]
    assert sorted(name for columns, _ in families for name in columns) == BACKBONES
    assert all(rows.keys() == SHIPPED for _, rows in families)
    recipes, rows = found["Methods and recipes"]
    assert sorted(recipes) == sorted(TASKS) and rows.keys() == SHIPPED
    assert found["Methods and layouts"][1].keys() == {*LAYOUTS, "json"}


def test_no_combination_on_the_page_has_failed() -> None:
    cells = [cell for _, rows in tables(PAGE.read_text()).values() for row in rows.values() for cell in row]
    assert not [cell for cell in cells if not set(cell) <= set("+-.")]
    assert sum(cell.startswith("+") for cell in cells) > 0.7 * len(cells)


@pytest.mark.slow
def test_every_sign_comes_from_a_result(tmp_path: Path) -> None:
    llama = {"family": "Llama", "method": "lora"}
    first = (
        case("a", **llama, weights="float32")
        + case("b", **llama, weights="bfloat16", refused="why")
        + case("c", "<failure/>", **llama, weights="int8")
        + case("d", "<skipped/>", **llama, weights="nf4")
        + case("e", "<skipped/>", **llama, weights="fp4", refused="why")
        + case("f", **llama | {"method": "of a test"}, weights="float32")
        + case("g", family="T5", method="ia3", weights="float32")
        + case("h", "<error/>", family="T5", method="ia3", weights="float32")
        + case("i", method="full", recipe="sft")
        + case("j", method="full", recipe="sft", layout="zero2")
        + case("k", "<failure/>", method="ia3", recipe="sft", layout="zero2")
        + '<testcase classname="tests" name="of something else"/>'
    )
    done = written(tmp_path, first, case("k", method="ia3", recipe="sft", layout="zero2"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    found = tables(page)
    assert found["Causal language models"][0] == ["Llama"] and found["Causal language models"][1].keys() == SHIPPED
    assert found["Causal language models"][1]["lora"] == ["+-.!.-."]
    assert found["Causal language models"][1]["dora"] == ["......."]
    assert found["Encoders and encoder-decoders"][1]["ia3"] == ["!......"], "a cell is as good as its worst test"
    assert found["Methods and recipes"][1]["full"] == ["+"] and found["Methods and recipes"][1]["lora"] == ["."]
    assert found["Methods and layouts"] == (["full", "ia3"], {"zero2": ["+", "+"]}), "a later file counts"
    assert re.search(r"\n\d+ tests: 5 kept, 2 refused with a reason and a cure, 2 failed\.", page)


@pytest.mark.slow
def test_results_without_combinations_make_no_page(tmp_path: Path) -> None:
    done = written(tmp_path, '<testcase classname="tests" name="of something else"/>')
    assert done.returncode == 2 and "no test in these files" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "page.md").exists()
