"""README: as long as one reads, and every figure in it is one of the page that its script's tables are on."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MEASURED = {
    **{path.name: ROOT / "scripts" / "bench" / "README.md" for path in (ROOT / "scripts" / "bench").glob("*.py")},
    "gpu.py": ROOT / "scripts" / "gpu" / "README.md",
}
"""Page with the tables of each script."""
HEADLINE = (ROOT / "scripts" / "bench" / "headline.md").read_text().split("\n\n")[1]
"""The table that one command wrote."""
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")


def _figures() -> list[tuple[str, str]]:
    """What was measured, and the script that measures it, of each line of the table."""
    section = README.partition("## Figures\n")[2].partition("\n## ")[0].replace(HEADLINE, "")
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ") and ".py`" in line]
    return [(measured, re.findall(r"`(\w+\.py)`", by)[0]) for _, _, measured, by, _ in rows]


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150 and [line for line in lines if len(line) > 120] == []


def test_every_figure_stands_in_a_table_of_its_page() -> None:
    assert len(_figures()) >= 4
    for measured, script in _figures():
        page = MEASURED[script].read_text()
        assert script in page, script
        for number in NUMBER.findall(measured):
            assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|\.\d)", page), (measured, number, script)


def test_figures_against_other_tools_are_those_that_one_command_measured() -> None:
    record = json.loads((ROOT / "scripts" / "bench" / "headline.json").read_text())
    rows = HEADLINE.splitlines()[2:]
    assert HEADLINE in README and len(rows) == len(record["found"]) >= 3
    for row, each in zip(rows, record["found"].values(), strict=True):
        _, title, measured, _, by, _ = (cell.strip() for cell in row.split("|"))
        assert (title, by) == (each["title"], f"`{each['script']}`")
        ratios = [f"{of_medians:.2f} {unit}" for unit, (of_medians, _, _) in each["figures"].items()]
        assert measured == ", ".join(ratios)


def test_what_fits_which_card_is_of_the_page_that_plans_wrote() -> None:
    section = README.partition("## What fits which card\n")[2].partition("\n## ")[0]
    header, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    page = (ROOT / "recipes" / "models.md").read_text().splitlines()
    assert header in page and len(rows) >= 5 and set(rows) <= set(page)


def test_torch_for_cpus_is_of_the_version_that_is_pinned() -> None:
    pinned = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert re.findall(r"pip install torch==(\S+) --index-url", README) == pinned


def test_what_never_ran_stands_before_what_is_promised() -> None:
    assert README.index("have not run yet") < README.index("It refuses to teach nothing")
