"""A page with pictures shows the right ones, stays small, and lets nothing of a file's name or bytes through."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests.run_files import write_lines
from tests.workbench.report.test_pages import Page, metrics
from workbench import report
from workbench.config.yaml_text import dump_yaml
from workbench.evaluation import training_dynamics
from workbench.report import picture_section
from workbench.report.picture_section import PictureSection, pictured
from workbench.report.run_record import read

HOSTILE = ['a"><script>alert(1)</script>', "'b' onload=x", "<c>&amp;"]
"""Classes; file names hold them too."""


def jpeg(number: int, *, side: int = 24, noise: bool = False) -> bytes:
    """A picture of one colour of its own, or of noise."""
    draw = np.random.default_rng(number)
    shape = (side, side, 3) if noise else (1, 1, 3)
    pixels = np.broadcast_to(draw.integers(0, 256, shape, dtype=np.uint8), (side, side, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def stored(rows: list[int], kind: str = "row", captions: tuple[str, ...] = ("",), **how: Any) -> list[dict[str, Any]]:
    return [
        {"row": place(row), "image": place(row), "kind": kind, "label": HOSTILE[0], "caption": caption, "jpeg": made}
        for row in rows
        for caption, made in zip(captions, [jpeg(row, **how)] * len(captions), strict=True)
    ]


def place(row: int) -> str:
    return f"pictures/{HOSTILE[row % 3]}/{row}.jpg"


def predictions(rows: int, *, labels: list[Any] | None = None) -> pd.DataFrame:
    """Random predictions of the hostile classes."""
    draw = np.random.default_rng(0)
    p_NC = draw.dirichlet([1.0] * 3, rows)
    table = {
        "row": [place(row) for row in range(rows)],
        "image": [place(row) for row in range(rows)],
        "label": labels or [HOSTILE[number] for number in draw.integers(0, 3, rows)],
        "predicted": [HOSTILE[number] for number in p_NC.argmax(1)],
    }
    return pd.DataFrame(table | {f"p_{name}": p_NC[:, number] for number, name in enumerate(HOSTILE)})


def make(
    folder: Path,
    table: pd.DataFrame,
    pictures: list[dict[str, Any]],
    *,
    recipe: str = "classify",
    kind: str = "one",
    stages: dict[str, Any] | None = None,
    lines: list[dict[str, Any]] | None = None,
) -> Path:
    folder.mkdir()
    settings = {"recipe": recipe, "classes": {"kind": kind}, "data": {"format": "image"}}
    (folder / "config.yaml").write_text(dump_yaml(settings))
    (folder / "manifest.json").write_text(json.dumps({"name": "run", "status": "done"}))
    scores = {"loss": 1.0} | ({"rmse": 1.0} if kind == "number" else {"accuracy": 0.5})
    (folder / "scores.json").write_text(json.dumps({"before": scores, "after": scores}))
    write_lines(folder / "metrics.jsonl", lines or [])
    (folder / "stages.json").write_text(json.dumps(stages or {}))
    if recipe == "crossval":
        table = table.assign(repeat=0, fold="0")
        table.to_parquet(folder / "out_of_fold.parquet")
    table.to_parquet(folder / "predictions.parquet")
    pd.DataFrame(pictures).to_parquet(folder / "pictures.parquet")
    return folder


class Attributes(HTMLParser):
    """The names of all attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {name for name, _ in attrs}


def section(run: Path) -> PictureSection:
    found = pictured(read(run))
    assert found is not None
    return found


def test_mistakes_doubt_and_cells_show_the_rows_that_they_name(tmp_path: Path) -> None:
    table = predictions(90)
    found = section(make(tmp_path / "run", table, stored(list(range(90)))))
    of_row = {row["row"]: row for row in table.to_dict("records")}
    sure = table[[f"p_{name}" for name in HOSTILE]].max(axis=1)
    wrong = table[table["label"] != table["predicted"]]
    assert [card.place for card in found.mistakes] == list(
        wrong.loc[sure[wrong.index].sort_values(ascending=False, kind="stable").index]["row"][: picture_section.SHOWN]
    )
    assert not any(card.right for card in found.mistakes) and len(found.uncertain) == picture_section.SHOWN
    counts = table.groupby(["label", "predicted"]).size().to_dict()
    assert {cell: panel.count for cell, panel in found.panels.items()} == counts
    for (label, predicted), panel in found.panels.items():
        assert len(panel.cards) == min(panel.count, picture_section.IN_A_CELL)
        assert all((of_row[c.place]["label"], of_row[c.place]["predicted"]) == (label, predicted) for c in panel.cards)
    assert len({panel.id for panel in found.panels.values()}) == len(counts)


def test_only_rows_with_a_picture_are_shown_and_the_page_counts_the_others(tmp_path: Path) -> None:
    table = predictions(60)
    run = make(tmp_path / "run", table, stored([3, 4, 5]))
    found = section(run)
    shown = {card.place for cards in (found.mistakes, found.uncertain) for card in cards}
    assert shown <= {place(row) for row in (3, 4, 5)}
    assert sum(len(panel.cards) for panel in found.panels.values()) == 3
    assert re.search(r"1 of \d+ rows, the surest first", Page(report.write(run)).text)


def test_the_page_stands_alone_and_escapes_every_name(tmp_path: Path) -> None:
    states = ("file", "prepared", "epoch 1", "epoch 2")
    pictures = [*stored(list(range(40))), *stored([0, 7], "map"), *stored([50, 51], "trained", states)]
    path = report.write(make(tmp_path / "run", predictions(40), pictures))
    page, html = Page(path), path.read_text()
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|@import|url\((?!#)|<c>", html)
    assert "&lt;script&gt;" in html and not any(name.startswith("on") for name in Attributes(html).names)
    assert len(page.ids) == len(set(page.ids))
    drawn = [name for name in page.references if not name.startswith("data:")]
    assert {"#" + name for name in page.ids} >= set(drawn)
    uris = [name for name in page.references if name.startswith("data:")]
    assert len(uris) == 40 + 2 + 8 and all(re.fullmatch(r"data:image/jpeg;base64,[\w+/=]+", uri) for uri in uris)
    for said in ("Surest mistakes", "Most uncertain", "Pixels that predictions hang on", "A number opens its pictures"):
        assert said in page.text
    assert all(f" {state} " in page.text for state in states)


def test_every_cell_with_pictures_is_a_link_to_them(tmp_path: Path) -> None:
    run = make(tmp_path / "run", predictions(60), stored(list(range(60))))
    html, found = report.write(run).read_text(), section(run)
    cells = re.search(r'<table class="confusion">.*?</table>', html, flags=re.DOTALL)
    assert cells is not None
    assert set(re.findall(r'href="#(cell-\d-\d)"', cells[0])) == {panel.id for panel in found.panels.values()}
    assert all(html.count(f'id="{panel.id}"') == 1 for panel in found.panels.values())


def test_the_page_is_below_five_megabytes(tmp_path: Path) -> None:
    rows = list(range(800))
    pictures = [*stored(rows, side=96, noise=True), *stored([801], "trained", ("file",), side=96)]
    run = make(tmp_path / "run", predictions(800), pictures)
    found = section(run)
    assert sum(len(each.uri) for each in found.pictures) <= picture_section.MOST_BYTES
    assert len(found.pictures) < 800 and found.trained[0].states
    assert report.write(run).stat().st_size < 5_000_000


def test_bytes_that_are_no_jpeg_are_left_out(tmp_path: Path) -> None:
    pictures = stored(list(range(6)))
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    pictures[0]["jpeg"], pictures[1]["jpeg"], pictures[2]["jpeg"] = b"", b"<svg onload=alert(1)>", buffer.getvalue()
    found = section(make(tmp_path / "run", predictions(6), pictures))
    assert len(found.pictures) == 3


@pytest.mark.parametrize("kind", ["several", "number"])
def test_other_labels_have_pictures_too(tmp_path: Path, kind: str) -> None:
    table = predictions(30)
    if kind == "several":
        table["label"] = [[label] for label in table["label"]]
        table["predicted"] = [[said] for said in table["predicted"]]
    else:
        draw = np.random.default_rng(1)
        numbers = {name: draw.normal(size=30) for name in ("label", "predicted")}
        table = table[["row", "image"]].assign(**numbers)
    run = make(tmp_path / "run", table, stored(list(range(30))), kind=kind)
    found, text = section(run), Page(report.write(run)).text
    assert found.mistakes and not found.panels and bool(found.uncertain) == (kind == "several")
    assert ("Largest errors" if kind == "number" else "Surest mistakes") in text


def test_contradicting_duplicates_show_their_pictures(tmp_path: Path) -> None:
    table = predictions(12)
    clusters = [[place(0), place(1)], [place(2), "gone.jpg"], ["gone.jpg", "too.jpg"]]
    facts = {"rows": 12, "exact": 0, "clusters": 3, "clustered": 6, "largest": 2, "least_similar": 0.9}
    duplicates = {**facts, "conflicts": clusters, "leak": 0, "left_out": []}
    stages = {"stages": [], "duplicates": duplicates, "folds": [], "summary": {}}
    run = make(tmp_path / "run", table, stored(list(range(12))), recipe="crossval", stages=stages)
    assert [[card.place for card in cards] for cards in section(run).conflicts] == [[place(0), place(1)], [place(2)]]
    assert "Pictures of near-duplicates with different labels" in Page(report.write(run)).text


def test_a_run_without_pictures_has_no_section(tmp_path: Path) -> None:
    run = make(tmp_path / "run", predictions(6), stored([0]))
    (run / "pictures.parquet").unlink()
    assert pictured(read(run)) is None
    text = Page(report.write(run)).text
    assert "Most uncertain" not in text and "Surest mistakes" in text


def test_the_share_of_the_steps_that_waited_for_data(tmp_path: Path) -> None:
    quick, slow = (
        {**metrics(4)[0], "step": step, "tokens": 100, "tokens_per_second": speed, "data_wait": share}
        for step, speed, share in ((1, 100.0, 0.4), (2, 50.0, 0.1))
    )  # 1 s, of which 0.4 s, and 2 s, of which 0.2 s
    lines = [quick, slow]
    run = make(tmp_path / "run", predictions(6), stored([0]), lines=lines)
    assert read(run).data_wait == pytest.approx(0.2)
    assert "Waited for data 20 % of the time of the steps" in Page(report.write(run)).text
    plain = make(tmp_path / "plain", predictions(6), stored([0]), lines=metrics(8))
    assert read(plain).data_wait is None and "Waited" not in Page(report.write(plain)).text


def test_the_hardest_training_rows_are_pictures_or_all_names(tmp_path: Path) -> None:
    rows = [f"train/{number}.jpg" for number in range(training_dynamics.HARDEST + 3)]
    confidence_N = np.linspace(0, 1, len(rows))
    table = pd.DataFrame({"row": rows, "confidence": confidence_N, "variability": 0.1, "correctness": confidence_N})
    table = table.assign(visits=3, forgotten=0)
    kept = [
        {"row": row, "image": f"far/away/{row}", "kind": "hard", "label": "a", "caption": "", "jpeg": jpeg(number)}
        for number, row in enumerate(rows[: training_dynamics.HARDEST])
    ]
    for name, pictures in (("all", kept), ("some", kept[1:])):
        folder = make(tmp_path / name, predictions(6), [*stored([0]), *pictures])
        table.to_parquet(folder / training_dynamics.FILE)
        section, html = pictured(read(folder)), report.write(folder).read_text()
        assert section is not None and "Rows whose labels stayed least probable" in html
        cards = section.hard
        assert [card.place for card in cards] == (rows[: training_dynamics.HARDEST] if name == "all" else [])
        assert ("far/away" in html, "train/0.jpg" in html) == (False, True)
    assert cards == []
