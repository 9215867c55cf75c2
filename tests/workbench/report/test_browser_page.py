"""The page of a run over pictures in a real browser: every picture is drawn, cells open theirs, nothing is fetched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.recipes.drawings import draw
from tests.vision_backbones import save_vision

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `browser`")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium on the path")]


BROKEN = """async () => {
    const pictures = [...document.querySelectorAll("svg.picture use")].map(use => use.getAttribute("href"));
    const wrong = [];
    for (const name of new Set(pictures)) {
        const image = new Image();
        image.src = document.querySelector(name + " image, image" + name)?.getAttribute("href") ?? "";
        try { await image.decode(); } catch { wrong.push(name); }
    }
    return {pictures: pictures.length, wrong};
}"""
"""Counts pictures, and names those that cannot be drawn."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a short run that mistakes some pictures."""
    folder = tmp_path_factory.mktemp("run")
    recipe = folder / "my.yaml"
    recipe.write_text(
        f"recipe: classify\nmodel: {{id: {save_vision(folder / 'vit', 'ViT')}, weights: float32}}\n"
        f"data: {{format: image, train: {draw(folder / 'drawings', 60)}, held_out: 0.3}}\n"
        "adapter: {method: lora, rank: 2}\ntrain: {steps: 4}\nimage: {augment: {preset: light}}\n"
    )
    return workbench.run(recipe, out=folder / "run", quiet=True) / "report.html"


@pytest.fixture
def page(report: Path) -> Iterator[Any]:
    """The page, which fails the test where it fetches anything or logs an error."""
    wrong: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        found = browser.new_page(viewport={"width": 1100, "height": 900})
        found.on("pageerror", lambda error: wrong.append(str(error)))
        found.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
        found.on(
            "request", lambda request: None if request.url[:5] in ("file:", "data:") else wrong.append(request.url)
        )
        found.goto(report.as_uri())
        yield found
        browser.close()
    assert not wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_picture_is_drawn_and_nothing_is_wider_than_a_phone(page: Any, report: Path, scheme: str) -> None:
    assert report.stat().st_size < 5_000_000
    page.emulate_media(color_scheme=scheme)
    # Every picture is in the page once, and drawn wherever it is used.
    broken = page.evaluate(BROKEN)
    assert broken["pictures"] > 10 and broken["wrong"] == []
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_number_of_the_confusions_opens_its_pictures(page: Any) -> None:
    link = page.locator("td.wrong a").first
    target, count = link.get_attribute("href"), int(link.inner_text())
    assert not page.locator(target).is_visible()
    link.click()
    assert page.locator(target).is_visible()
    assert page.locator(f"{target} svg.picture").count() == count
