"""The metric that a configuration names: intervals, rows on which it is not defined, and functions of a user's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from workbench.config.sections.metrics import Choice
from workbench.data.labelled.labels import Labels
from workbench.errors import ConfigError, DataError
from workbench.evaluation import chosen_metric

RATED = Labels("one", ("0", "1", "2"))
ANIMALS = Labels("one", ("cat", "dog"))
NUMBER = Labels("number", ("value",), mean=3.0, scale=2.0)
MINE = """
import time

def share(labels, predicted):
    return (labels == predicted).mean()

def sure(labels, predicted, p):
    return p.max(1).mean()

def nothing(labels, predicted):
    return float("nan")

def word(labels, predicted):
    return "high"

def pair(labels, predicted):
    return 0.5, 0.7

def broken(labels, predicted):
    return 1 / 0

def hangs(labels, predicted):
    while True:
        pass
"""


def hot(classes: list[int], of: int) -> np.ndarray:
    return np.eye(of)[classes]


def chance(rows: int, of: int) -> np.ndarray:
    return np.random.default_rng(0).dirichlet(np.ones(of), rows)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_the_interval_holds_the_score_and_shrinks_with_more_rows() -> None:
    labels, widths = replace(RATED, metric=Choice("qwk", higher=True)), []
    for rows in (30, 480):
        true_NC = hot([0, 1, 2] * (rows // 3), 3)
        p_NC = 0.3 * true_NC + chance(rows, 3)
        score = chosen_metric.score(labels, p_NC, true_NC)
        low, high = chosen_metric.bounds(labels, p_NC, true_NC).values()
        assert low < score < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


@pytest.mark.parametrize(
    ("labels", "name", "true_NC", "why"),
    [
        (ANIMALS, "roc_auc", hot([0, 0, 0], 2), "every row has the class `cat`"),
        (RATED, "average_precision", hot([0, 2, 0], 3), "no row has the class `1`"),
        (ANIMALS, "qwk", hot([0, 1], 2), "the classes `cat`, `dog` are no whole numbers"),
        (NUMBER, "r2", np.full((3, 1), 2.0), "all rows have the same label"),
        (NUMBER, "spearman", np.full((3, 1), 2.0), "all rows have the same label"),
        (NUMBER, "qwk", np.array([[1.0], [2.5]]), "labels that are whole numbers"),
    ],
)
def test_rows_on_which_a_metric_is_not_defined_are_named(
    labels: Labels, name: str, true_NC: np.ndarray, why: str
) -> None:
    judged = replace(labels, metric=Choice(name, higher=True))
    with pytest.raises(DataError, match=rf"evaluate.metric={name} on the held-out rows: .*{why}.*evaluate.metric="):
        chosen_metric.require(judged, true_NC, rows="held-out")
    assert chosen_metric.defined(judged, np.ones_like(true_NC), true_NC) == {}
    assert chosen_metric.bounds(judged, np.ones_like(true_NC), true_NC) == {}


def test_a_function_of_the_users_takes_labels_and_what_is_said(mine: Path) -> None:
    true_NC, p_NC = hot([0, 1, 1, 0], 2), np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]])
    for name, wanted in {"share": 0.75, "sure": 0.75}.items():
        labels = replace(ANIMALS, metric=Choice(name, higher=True, file=mine))
        assert chosen_metric.score(labels, p_NC, true_NC) == pytest.approx(wanted)
        assert set(chosen_metric.bounds(labels, p_NC, true_NC)) == {f"{name}_low", f"{name}_high"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "nothing in .*mine.py returned nan, and a metric is a finite number"),
        ("word", "word in .*mine.py returned 'high'"),
        ("pair", r"pair in .*mine.py returned \(0.5, 0.7\), and a metric is a finite number. Correct the function"),
        ("broken", "mine.py, line 20: ZeroDivisionError: division by zero"),
        ("hangs", "hangs in .*mine.py took more than 0 s"),
        ("absent", "defines no function absent. Write `def absent"),
    ],
)
def test_a_function_that_fails_is_told_in_a_line(
    name: str, why: str, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_metric, "SECONDS", 0.2)
    labels = replace(ANIMALS, metric=Choice(name, higher=True, file=mine))
    with pytest.raises(ConfigError, match=why) as caught:
        chosen_metric.require(labels, hot([0, 1], 2), rows="held-out")
    assert "\n" not in str(caught.value)
