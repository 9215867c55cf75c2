"""Stages of folds of tags: views are a mean, pseudo-labels leak nothing, and what is refused changes nothing."""

from __future__ import annotations

import json
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes.over.test_folds_of_tasks import NAMES, PLACES, rows, sections
from tests.run_files import read_scores, write_lines
from workbench.cli.verbs import app
from workbench.config import RunConfig
from workbench.config.sections.pseudo_label_config import PseudoLabelConfig
from workbench.config.yaml_text import dump_yaml
from workbench.crossval.stages import StageLog
from workbench.errors import DataError
from workbench.recipes.over import crossval_words
from workbench.recipes.tasks.tag import task as tagging
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import predict

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

FOLDS, THRESHOLD, LABELLED = 2, 0.5, 24
FOLD = "repeat-0-fold-{}-seed-0"
ROUND = "round-1-repeat-0-fold-{}-seed-0"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    write_lines(folder / "tag.jsonl", rows("tag"))
    new = [{"tokens": [NAMES[n % 4], "met", PLACES[n % 3], "in", f"{n}"]} for n in range(20)]
    known = [{"tokens": row["tokens"]} for row in rows("tag")[:3]]
    write_lines(folder / "new.jsonl", [*known, *new, *new[:2]])
    write_lines(folder / "test.jsonl", [row | {"tags": ["B-PER", "O", "B-LOC", "O", "O"]} for row in new])
    save_tiny(folder / "bert", "Bert", "TokenClassification", MINILM)
    return folder


def staged(home: Path, *, least: float = 0.0, **changed: Any) -> dict[str, Any]:
    """A run with both stages."""
    stages = {
        "tta": {"views": ["typos"], "copies": 2, "least_gain": least},
        "pseudo_label": {
            "unlabelled": str(home / "new.jsonl"),
            "threshold": THRESHOLD,
            "cap": 0.5,
            "least_gain": least,
        },
    }
    return sections(home, "tag", train={"steps": 20, "learning_rate": 3e-2}, **(stages | changed))


def run(values: dict[str, Any], out: Path, **more: Any) -> Path:
    return workbench.run(RunConfig.model_validate(values), out=out, quiet=True, **more)


def stages(found: Path) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads((found / "stages.json").read_text())["stages"]
    return told


@pytest.fixture(scope="module")
def kept(home: Path) -> Path:
    """A run that keeps both stages, whether they help or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLog, "offer", partialmethod(StageLog.offer, forced=True))
        return run(staged(home), home / "kept")


def taggers(found: Path, config: RunConfig, name: str) -> list[tagging.Tagger]:
    return [tagging.load(found / "members" / name.format(fold), config) for fold in range(FOLDS)]


def test_refused_stages_leave_what_folds_say_as_it_was(home: Path, tmp_path: Path) -> None:
    plain = run(staged(home, tta={}, pseudo_label={}), tmp_path / "plain")
    found = run(staged(home, least=100.0), tmp_path / "run")
    assert [(each["name"], each["accepted"]) for each in stages(found)] == [
        ("supervised", True),
        ("pseudo_label 1", False),
        ("tta", False),
    ]
    tables = [pd.read_parquet(each / "out_of_fold.parquet") for each in (plain, found)]
    pd.testing.assert_frame_equal(*tables)
    assert read_scores(plain) == read_scores(found)
    for each in (plain, found):
        predict(each, str(home / "new.jsonl"), out=tmp_path / f"{each.name}.parquet", max_new_tokens=1)
    pd.testing.assert_frame_equal(*(pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("plain", "run")))


def test_rows_are_read_in_the_views_that_stay(home: Path, kept: Path) -> None:
    """Loss of the test rows: of the mean over folds and readings, written a second time for rows that are not cut."""
    config = RunConfig.model_validate(staged(home) | {"data": {"train": str(home / "test.jsonl")}})
    found = taggers(kept, config, ROUND)
    test = tagging.unlabelled(str(home / "test.jsonl"), config, found[0].tokenizer)
    readings = [test, *tagging.in_views(test, config.tta, config, found[0].tokenizer)]
    assert len(readings) == 3 and len({rows.rows[0].words for rows in readings}) > 1
    p = [[tagging.predicted(each.tags, own, each.probabilities(own)) for own in readings] for each in found]
    tags, names = ["B-PER", "O", "B-LOC", "O", "O"], found[0].tags.ids
    losses = []
    for row in range(len(test)):
        mean_WC = np.mean([[own[row] for own in each] for each in p], axis=(0, 1))
        losses += [-np.log(mean_WC[word, names[tag]]) for word, tag in enumerate(tags)]
    assert evaluate(kept, [f"data.test={home / 'test.jsonl'}"])["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_scores_out_of_fold_are_those_of_the_stages_that_stay(kept: Path) -> None:
    told, after = stages(kept), read_scores(kept)["after"]
    assert [each["accepted"] for each in told] == [True, True, True]
    assert told[-1]["oof"]["loss"] == pytest.approx(after["loss"], abs=1e-5)
    assert told[-1]["oof"]["f1"] == pytest.approx(after["f1"])
    members = [read_scores(kept / "members" / ROUND.format(fold))["after"]["loss"] for fold in range(FOLDS)]
    assert told[1]["oof"]["loss"] == pytest.approx(np.mean(members), abs=1e-5)
    assert "Pseudo-labels, round 1" in (kept / "report.html").read_text()


def test_pseudo_labels_of_a_fold_are_what_its_own_member_says(home: Path, kept: Path) -> None:
    config = RunConfig.model_validate(staged(home))
    labelled = {" ".join(row["tokens"]) for row in rows("tag")}
    said = []
    for fold, tagger in enumerate(taggers(kept, config, FOLD)):
        new = tagging.unlabelled(str(home / "new.jsonl"), config, tagger.tokenizer)
        p_RWC = tagging.predicted(tagger.tags, new, tagger.probabilities(new))
        sure = {row.text: p_WC.max(1).min() for row, p_WC in zip(new.rows, p_RWC, strict=True)}
        wanted = sorted(
            (text for text in sure if text not in labelled and sure[text] >= THRESHOLD), key=sure.__getitem__
        )
        cap = int(0.5 * LABELLED / FOLDS)
        found = pd.read_parquet(kept / "members" / ROUND.format(fold) / "pseudo_labels.parquet").set_index("text")
        assert found.index.is_unique and sorted(found.index) == sorted(wanted[-cap:]) and 0 < len(found) <= cap
        for row, p_WC in zip(new.rows, p_RWC, strict=True):
            if row.text in found.index:
                tags = [tagger.tags.names[at] for at in p_WC.argmax(1)]
                assert found.loc[row.text, "predicted"].split() == tags
        facts = json.loads((kept / "members" / ROUND.format(fold) / "manifest.json").read_text())["data"]
        assert (
            facts["train"]["rows"] == LABELLED // FOLDS + len(found) and facts["held_out"]["rows"] == LABELLED // FOLDS
        )
        said.append(found)
    assert not said[0].equals(said[1])


def test_a_killed_run_does_nothing_twice(home: Path, kept: Path, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    begun, offered = tmp_path / "run", StageLog.offer

    def killed(log: StageLog, name: str, *args: Any, **more: Any) -> bool:
        if name == "tta":
            raise Killed
        return offered(log, name, *args, **more, forced=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLog, "offer", killed)
        with pytest.raises(Killed):
            run(staged(home), begun)
    done = [*begun.glob("members/round-1-*/adapter/*"), *begun.glob("members/*/*.safetensors")]
    times = {path: path.stat().st_mtime_ns for path in done}
    assert len([path for path in done if path.name == "in_views.safetensors"]) == FOLDS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLog, "offer", partialmethod(StageLog.offer, forced=True))
        run(staged(home), begun, resume=True)
    assert {path: path.stat().st_mtime_ns for path in done} == times
    assert read_scores(begun) == read_scores(kept)
    both = [pd.read_parquet(each / "out_of_fold.parquet") for each in (begun, kept)]
    pd.testing.assert_frame_equal(*both)


def test_the_command_tells_of_both_stages(home: Path, tmp_path: Path) -> None:
    (tmp_path / "tags.yaml").write_bytes(dump_yaml(staged(home, least=100.0)).encode())
    words = ["run", str(tmp_path / "tags.yaml"), "--out", str(tmp_path / "run")]
    told = CliRunner().invoke(app, words, catch_exceptions=False)
    assert told.exit_code == 0 and "Pseudo-labels, round 1" in told.output and "Test-time views" in told.output


def test_only_rows_that_are_new_are_labelled(home: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "known.jsonl", [{"tokens": row["tokens"]} for row in rows("tag")])
    values = staged(home, pseudo_label={"unlabelled": str(tmp_path / "known.jsonl")})
    for verb in (check, lambda config: workbench.run(config, out=tmp_path / "run", quiet=True)):
        with pytest.raises(DataError, match="near-duplicate of one with labels"):
            verb(RunConfig.model_validate(values))


def test_a_view_that_changes_nothing_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Leave lower out"):
        run(staged(home, tta={"views": ["lower"]}), tmp_path / "run")


def test_every_word_has_to_be_sure_and_agreed_upon() -> None:
    sure, unsure, other = [0.9, 0.1], [0.6, 0.4], [0.2, 0.8]
    two = [[[sure, sure], [sure, unsure], [sure]], [[sure, sure], [sure, sure], [other]]]
    p_TRSC = [[np.asarray(row) for row in own] for own in two]
    for config, expected in {
        PseudoLabelConfig(threshold=0.85): [0],
        PseudoLabelConfig(threshold=0.7): [0, 1],
        PseudoLabelConfig(threshold=0.5): [0, 1],
        PseudoLabelConfig(threshold=0.5, agreement=0.5): [0, 1, 2],
        PseudoLabelConfig(threshold=0.5, agreement=0.5, cap=1.0): [0],
    }.items():
        assert crossval_words.choose(config, p_TRSC, labelled=1 if config.cap == 1 else 9).rows.tolist() == expected
