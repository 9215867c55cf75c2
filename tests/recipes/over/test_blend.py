"""Blends of cross-validations from the command's side: a competition in four commands, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes.drawings import draw
from tests.recipes.weather import weather, write
from workbench.cli.verbs import main
from workbench.errors import ConfigError, ResumeError, WorkbenchError

pytestmark = pytest.mark.slow


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["workbench", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)


def test_a_competition_takes_four_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """init, run, blend, predict --like: from a folder with tables and pictures to a file that is as the sample is."""
    folder, lines = tmp_path / "shapes", dict[str, list[tuple[str, str]]](train=[], test=[])
    (folder / "images").mkdir(parents=True)
    for number, file in enumerate(sorted(draw(tmp_path / "drawn", 75).glob("*/*.png"))):
        lines["test" if number % 5 == 0 else "train"].append((file.stem, file.parent.name))
        file.rename(folder / "images" / file.name)
    order = [id for id, _ in reversed(lines["test"])]
    tables = {
        "train": [("id", "shape"), *lines["train"]],
        "test": [("id",), *((id,) for id, _ in lines["test"])],
        "sample_submission": [("id", "bar", "circle", "square"), *((id, 0.3, 0.3, 0.4) for id in order)],
    }
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    monkeypatch.chdir(tmp_path)
    short = ["train.epochs=4", "folds.k=3", "folds.refit=false", "pseudo_label.unlabelled=null", "tta={}"]
    command(monkeypatch, "init", folder, *short, "correction={}", "sweep.over={seed: [0, 1]}", "--memory", "8GB")
    command(monkeypatch, "run", "shapes.yaml", "--out", "runs/shapes")
    parts = sorted(Path("runs/shapes/members").iterdir())
    for part in parts:  # members are not resumed, so that nobody is told to
        told = json.loads((part / "stages.json").read_text())["stages"]
        assert not any("--resume" in stage["why"] for stage in told)
    command(monkeypatch, "blend", *parts, "--way", "mean", "--out", "runs/both")
    command(
        monkeypatch,
        *("predict", "runs/both", folder / "test.csv", "--like", folder / "sample_submission.csv"),
        *("--out", "submission.csv"),
    )
    found = pd.read_csv("submission.csv", dtype={"id": str})
    assert list(found.columns) == ["id", "bar", "circle", "square"] and list(found["id"]) == order
    np.testing.assert_allclose(found.iloc[:, 1:].sum(axis=1), 1, atol=1e-6)
    right = found.set_index("id").idxmax(axis=1)[[id for id, _ in lines["test"]]]
    assert (right.to_numpy() == [shape for _, shape in lines["test"]]).mean() > 0.6
    # The run of the sweep is a blend too, and both are moved with their parts.
    Path("runs").rename("moved")
    again = workbench.predict("moved/shapes", str(folder / "test.csv")).table
    assert set(again["predicted"]) <= {"bar", "circle", "square"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Cross-validations of two seeds on the same folds, and of other folds, with a table of pictures beside a text."""
    home = tmp_path_factory.mktemp("blend")
    save_tiny(home, "Bert", "SequenceClassification", MINILM, vocabulary=None)
    train = write(home / "train.jsonl", weather(60, seed=0, wrong=0.1))
    write(home / "test.jsonl", weather(30, seed=1))
    words = [f"data.train={train}", f"data.test={home / 'test.jsonl'}", f"model.id={home}", "model.weights=float32"]
    words += ["data.limit=null", "folds.k=3", "train.learning_rate=1e-2", "train.steps=12", "batch.size=8"]
    own = {
        "one": ["data.seed=0"],
        "two": ["data.seed=0", "seed=1"],
        "otherwise": ["data.seed=1"],
        "fewer": ["data.seed=0", "data.limit=50"],
    }
    return {
        name: workbench.run("crossval/quickstart", [*words, *more], out=home / name, quiet=True)
        for name, more in own.items()
    }


def test_a_blend_answers_as_it_says(runs: dict[str, Path], tmp_path: Path) -> None:
    blended = workbench.blend([runs["one"], runs["two"]], out=tmp_path / "both", way="mean")
    test, names = runs["one"].parent / "test.jsonl", ["p_rain", "p_snow", "p_sun"]
    each = [workbench.predict(runs[name], str(test)).table[names].to_numpy() for name in ("one", "two")]
    told = workbench.predict(tmp_path / "both", str(test)).table
    if blended.kept.temperature == 1:
        np.testing.assert_allclose(told[names], np.mean(each, axis=0), atol=1e-9)
    kept = pd.read_parquet(tmp_path / "both" / "predictions.parquet")
    np.testing.assert_allclose(kept[names], told[names], atol=1e-9)
    scores = workbench.evaluate(tmp_path / "both", [f"data.test={test}"])
    assert scores["loss"] == pytest.approx(blended.scores["test"]["loss"], abs=1e-5)
    assert [part.weight for part in blended.parts] == [0.5, 0.5]
    stages = json.loads((tmp_path / "both" / "stages.json").read_text())
    assert len(stages["parts"]) == 2 and (tmp_path / "both" / "report.html").exists()
    assert set(json.loads((tmp_path / "both" / "scores.json").read_text())) == {"before", "after", "test"}
    assert not any("--resume" in stage["why"] or "folds.keep" in stage["why"] for stage in stages["stages"])
    with pytest.raises(ConfigError, match=r"a blend is no single model.*distill/ensemble"):
        workbench.merge(tmp_path / "both", out=tmp_path / "merged")
    with pytest.raises(ResumeError, match="is a blend, which trains nothing"):
        workbench.run(str(tmp_path / "both" / "config.yaml"), out=tmp_path / "both", resume=True, quiet=True)


def test_a_blend_that_cannot_be_leaves_no_folder(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="rmse"):
        workbench.blend([runs["one"], runs["two"]], ["evaluate.metric=rmse"], out=tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_a_blend_of_itself_is_told(runs: dict[str, Path], tmp_path: Path) -> None:
    """A foreign folder may name anything as its part."""
    workbench.blend([runs["one"], runs["two"]], out=tmp_path / "both")
    decision = tmp_path / "both" / "decision.json"
    told = json.loads(decision.read_text())
    told["parts"][0]["run"] = "."
    decision.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"has changed since: decision\.json"):
        workbench.predict(tmp_path / "both", str(runs["one"].parent / "test.jsonl"))


def test_a_blend_teaches_one_adapter(runs: dict[str, Path], tmp_path: Path) -> None:
    workbench.blend([runs["one"], runs["two"]], out=tmp_path / "both")
    words = [f"distill.teacher.id={tmp_path / 'both'}", f"model.id={runs['one'].parent}", "train.steps=4"]
    words += [f"data.train={runs['one'].parent / 'train.jsonl'}", f"data.held_out={runs['one'].parent / 'test.jsonl'}"]
    words += ["distill.unlabelled=null", "data.limit=null", "model.weights=float32"]
    student = workbench.run("distill/ensemble", words, out=tmp_path / "student", quiet=True)
    scores = json.loads((student / "scores.json").read_text())
    both = workbench.evaluate(tmp_path / "both", [f"data.test={runs['one'].parent / 'test.jsonl'}"])
    assert scores["teacher"]["loss"] == pytest.approx(both["loss"], abs=1e-4)


def _sorted_labels(run: Path) -> None:
    table = pd.read_parquet(run / "out_of_fold.parquet")
    table["label"] = sorted(table["label"])
    table.to_parquet(run / "out_of_fold.parquet")


def _of_other_classes(run: Path) -> None:
    facts = json.loads((run / "classes.json").read_text())
    (run / "classes.json").write_text(json.dumps({**facts, "names": ["a", "b", "c"]}))


@pytest.mark.parametrize(
    ("names", "change", "says"),
    [
        (["one"], None, "takes two runs or more.*Write workbench blend RUN RUN"),
        (["one", "one"], None, "named twice"),
        (["one", "otherwise"], None, "other folds: .*data.seed=0"),
        (["one", "fewer"], None, "other rows: 10 that the first lacks.*data.limit=null"),
        (["one", "two"], _sorted_labels, "other labels in .* rows"),
        (["one", "two"], _of_other_classes, "predict other things"),
        (["one", "two"], lambda run: (run / "decision.json").unlink(), "has not ended. Continue it"),
    ],
)
def test_runs_that_do_not_go_together_are_refused(
    runs: dict[str, Path], tmp_path: Path, names: list[str], change: Callable[[Path], object] | None, says: str
) -> None:
    parts = [runs[name] for name in names]
    if change is not None:
        parts[1] = Path(shutil.copytree(parts[1], tmp_path / "changed"))
        change(parts[1])
    with pytest.raises(ConfigError, match=says):
        workbench.blend(parts, out=tmp_path / "both")
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize("word", ["data.limit=3", "model.id=other"])
def test_a_blend_leaves_its_parts_as_they_are(runs: dict[str, Path], tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match="takes its parts as they are"):
        workbench.blend([runs["one"], runs["two"]], [word], out=tmp_path / "both")


def test_a_part_that_is_gone_or_changed_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    parts = [Path(shutil.copytree(runs[name], tmp_path / name)) for name in ("one", "two")]
    workbench.blend(parts, out=tmp_path / "both", way="mean")
    test = str(runs["one"].parent / "test.jsonl")
    weights = next((tmp_path / "two").rglob("adapter_model.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + b"0000")
    with pytest.raises(ConfigError, match=r"two has changed since: .*adapter_model"):
        workbench.predict(tmp_path / "both", test)
    (tmp_path / "two").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="two is not there any more"):
        workbench.predict(tmp_path / "both", test)
