"""Planted copies of training rows are found, by kind, and every verb gives the same answer about them."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageEnhance

import workbench
from tests.run_files import read_scores, write_lines
from workbench.cli.verbs import main
from workbench.data.folds import duplicates
from workbench.data.images.picture_files import Pixels
from workbench.data.images.picture_sources import read_rows
from workbench.errors import DataError

TRAIN, CLEAN, HELD_OUT, EACH = 100, 30, 30, 2
KINDS = {"exact": 2, "saved again": 4, "flipped": 2, "cropped": 2, "brightened": 2}
"""Copies of each kind; pictures that were resized or compressed are saved again."""
TEXT_KINDS = {"exact": 2, "other case or punctuation": 2, "nearly equal": 2}
PICTURES = ["model.id=starter/vision", "model.weights=auto", "data.format=image", "data.max_tokens=1024"]
SHORT = ["train.steps=1", "train.epochs=null", "evaluate.every=null", "evaluate.probe=0", "model.weights=float32"]


def resized(picture: Pixels) -> Pixels:
    return np.asarray(Image.fromarray(picture).resize((48, 48), Image.Resampling.BICUBIC))


def compressed(picture: Pixels) -> Pixels:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=50)
    return np.asarray(Image.open(buffer).convert("RGB"))


COPIES: dict[str, Callable[[Pixels], Pixels]] = {
    "exact": np.copy,
    "resized": resized,
    "compressed": compressed,
    "flipped": lambda picture: picture[:, ::-1],
    "cropped": lambda picture: np.asarray(Image.fromarray(picture[4:58, 6:60]).resize((64, 64))),
    "brightened": lambda picture: np.asarray(ImageEnhance.Brightness(Image.fromarray(picture)).enhance(1.25)),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders train and test; EACH pictures of the test are copies of training pictures of each kind."""
    folder = tmp_path_factory.mktemp("hands")
    rows = list(read_rows("starter/sign_digits.zip/train"))
    order = np.random.default_rng(0).permutation(len(rows))

    def put(at: str, number: int, picture: Pixels) -> None:
        label = "even" if number % 2 else "odd"
        path = folder / at / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ascontiguousarray(picture)).save(path)

    every = [rows[row].columns["image"].decode(max_pixels=10**6) for row in order[: TRAIN + CLEAN + HELD_OUT]]
    for number, picture in enumerate(every):
        put("train" if number < TRAIN else "test" if number < TRAIN + CLEAN else "held_out", number, picture)
    for place, copied in enumerate(COPIES.values()):
        for number in range(place * EACH, place * EACH + EACH):
            put("test", number, copied(every[number]))
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    rows = pd.read_csv(workbench.__path__[0] + "/data/starter/banking77_train.csv").sample(160, random_state=0)
    every: list[dict[str, Any]] = [dict(row, label=str(n % 2)) for n, row in enumerate(rows.to_dict("records"))]
    train, held_out, test = every[:TRAIN], every[TRAIN : TRAIN + HELD_OUT], every[TRAIN + HELD_OUT :]
    test += train[:2]
    test += [{**row, "text": row["text"].upper() + " !"} for row in train[2:4]]
    test += [{**row, "text": row["text"] + " please"} for row in train[4:] if len(row["text"]) > 60][:2]
    for name, own in (("train", train), ("held_out", held_out), ("test", test)):
        write_lines(folder / f"{name}.jsonl", own)
    return folder


SETS = {"pictures": ("", KINDS), "texts": (".jsonl", TEXT_KINDS)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETS)
def test_every_verb_finds_the_same_copies(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (suffix, wanted) = request.getfixturevalue(kind), SETS[kind]
    recipe, words = ("pictures", PICTURES) if kind == "pictures" else ("quickstart", [])
    files = {name: f"{folder}/{name}{suffix}" for name in ("train", "test", "held_out")}
    words = [*words, f"data.train={files['train']}", f"data.test={files['test']}", "data.overlap=tell"]
    plain = [*words, f"data.held_out={files['held_out']}"]
    folded = [*words, "folds.k=2", "data.limit=null", "pseudo_label.unlabelled=null"]
    monkeypatch.chdir(tmp_path)

    checked = workbench.check("classify/quickstart", plain)
    assert Counter(copy.kind for copy in checked.data.test.copies) == wanted  # type: ignore[union-attr]
    told = f"{sum(wanted.values())} of {len(checked.data.test)} test rows are copies"  # type: ignore[arg-type]
    assert any(told in note for note in checked.notes)
    found = {(copy.place, copy.of, copy.kind) for copy in checked.data.test.copies}  # type: ignore[union-attr]

    run = workbench.run("classify/quickstart", [*plain, *SHORT], out=tmp_path / "run", quiet=True)
    copies = json.loads((run / "copies.json").read_text())["test"]
    assert {(copy["place"], copy["of"], copy["kind"]) for copy in copies} == found
    assert told in (run / "log.txt").read_text() and "copies of training rows" in (run / "report.html").read_text()
    assert json.loads((run / "manifest.json").read_text())["data"]["test"]["copies"]["kinds"] == wanted
    scores = read_scores(run)["test"]
    assert scores["accuracy[without copies]"] != scores["accuracy"] or "loss[without copies]" in scores
    again = workbench.evaluate(run, [f"data.test={files['test']}"])
    assert again["loss[without copies]"] == pytest.approx(scores["loss[without copies]"], abs=1e-4)

    folds = workbench.check(f"crossval/{recipe}", folded)
    assert {(copy.place, copy.of, copy.kind) for copy in folds.data.test.copies} == found  # type: ignore[union-attr]
    assert any(told in note for note in folds.notes)

    monkeypatch.setattr(sys, "argv", ["workbench", "data", "classify/quickstart", *plain, "--out", "page"])
    with pytest.raises(SystemExit, match="0"):
        main()
    flags = pd.read_parquet("page/flags.parquet").query("rule == 'copy_of_training'")
    assert {(flag.row, *reversed(flag.note[:-1].split(" (", 1))) for flag in flags.itertuples()} == found

    for action, message in {"refuse": "data.overlap=drop", "auto": "are also in", "exact": "are also in"}.items():
        for name, own in (("classify/quickstart", plain), (f"crossval/{recipe}", folded)):
            with pytest.raises(DataError, match=message):
                workbench.check(name, [*own, f"data.overlap={action}"])
    dropped = workbench.check("classify/quickstart", [*plain, "data.overlap=drop"]).data
    assert not dropped.test.copies and len(dropped.test) == len(checked.data.test)  # type: ignore[union-attr,arg-type]
    gone = {of for _, of, _ in found}
    assert not gone & {*dropped.train.places()} and gone & {*checked.data.train.places()}
    monkeypatch.setattr(f"workbench.data.leaks.MAX_{'PICTURES' if kind == 'pictures' else 'CHARACTERS'}", 10)
    notes = workbench.check("classify/quickstart", [*plain, "data.test=null", "data.overlap=auto"]).notes
    assert any("for equal ones alone" in note for note in notes)


@pytest.mark.parametrize(
    "limit", ["leaks.MAX_CHARACTERS", pytest.param("folds.duplicates.MAX_PAIRS", marks=pytest.mark.slow)]
)
def test_auto_compares_too_many_rows_for_equality_alone_and_says_so(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"the weather in city {n} is fine today", "label": "ab"[n % 2]} for n in range(60)]
    files = [write_lines(tmp_path / "train.jsonl", rows[:40]), write_lines(tmp_path / "test.jsonl", rows[40:])]
    words = [f"data.train={files[0]}", "data.held_out=0.2", f"data.test={files[1]}"]
    note = "compared with training rows for equal ones alone"
    assert not any(note in each for each in workbench.check("classify/quickstart", words).notes)
    monkeypatch.setattr(f"workbench.data.{limit}", 10)
    duplicates._find.cache_clear()
    checked = workbench.check("classify/quickstart", words)
    (told,) = [each for each in checked.notes if note in each]
    assert "data.overlap=tell" in told and "data.overlap=exact" in told
    assert not any(
        note in each for each in workbench.check("classify/quickstart", [*words, "data.overlap=exact"]).notes
    )
    write_lines(files[1], [*rows[40:], *rows[:20]])
    with pytest.raises(DataError, match="are also in"):
        workbench.check("classify/quickstart", words)
