"""Drawings on pages are those that their script makes."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.scripts.shown_commands import ROOT
from workbench.config import plugins

SCRIPT = plugins.module(ROOT / "scripts" / "docs" / "drawings.py", key="docs")


@pytest.mark.parametrize("name", SCRIPT.DRAWINGS)
def test_a_drawing_is_that_of_its_script_and_stands_on_the_page(name: str) -> None:
    made = SCRIPT.DRAWINGS[name]().svg()
    assert (SCRIPT.OUT / f"{name}.svg").read_text(encoding="utf-8") == made
    assert f"(pictures/{name}.svg)" in (ROOT / "scripts" / "docs" / "how_it_works.md").read_text()
    _, _, width, height = map(float, ElementTree.fromstring(made).attrib["viewBox"].split())
    for box in ElementTree.fromstring(made).iter("{http://www.w3.org/2000/svg}rect"):
        x, y = (float(box.get(key, 0)) for key in "xy")
        assert x + float(box.attrib["width"]) <= width and y + float(box.attrib["height"]) <= height
