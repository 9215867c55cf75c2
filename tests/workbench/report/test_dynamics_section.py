"""The map of the data on a page: its counts, its hardest rows first, and nothing where nothing was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from workbench.evaluation import training_dynamics
from workbench.report import dynamics_section
from workbench.report.run_record import RunRecord


def record(**parts: Any) -> RunRecord:
    empty: dict[str, Any] = {name: {} for name in ("config", "manifest", "scores")}
    empty |= {name: pd.DataFrame() for name in ("metrics", "predictions")}
    return RunRecord(**{"folder": Path("run"), "name": "run", "config_text": "", **empty, **parts})


@pytest.fixture
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = 40
    correctness = np.repeat([0.0, 0.5, 1.0, 1.0], rows // 4)
    return pd.DataFrame(
        {
            "row": [f"train.jsonl:{number + 1}" for number in range(rows)],
            "visits": 4,
            "forgotten": np.where(correctness == 0.5, 1, 0),
            "confidence": rng.permutation(np.linspace(0, 1, rows)),
            "variability": rng.random(rows) / 2,
            "correctness": correctness,
        }
    )


def test_a_run_without_a_record_has_no_section() -> None:
    assert dynamics_section.observed(record()) is None


def test_rows_are_counted_and_the_hardest_come_first(table: pd.DataFrame) -> None:
    section = dynamics_section.observed(record(dynamics=table))
    assert (
        section is not None and section.sentence.startswith("10 of 40 rows") and "10 were forgotten" in section.sentence
    )
    shown = [float(row.confidence) for row in section.hardest]
    assert shown == sorted(shown) and shown[0] == 0 and len(shown) == training_dynamics.HARDEST
    plot, forgetting = section.plots
    assert forgetting.title == "Forgetting events" and "never forgotten: 30 of 40 rows" in forgetting.caption
    assert forgetting.svg.count(">1</text>") == 1, "one tick of times, which are whole"
    assert "<path" in plot.svg and [one.label for one in plot.legend] == [name for name, *_ in dynamics_section._BANDS]


def test_labels_in_doubt_are_drawn_where_rows_were_cross_validated(table: pd.DataFrame) -> None:
    p = np.random.default_rng(1).dirichlet([1, 1], size=40)
    out_of_fold = pd.DataFrame({"row": table["row"], "text": table["row"], "repeat": 0, "label": ["a", "b"] * 20})
    out_of_fold = out_of_fold.assign(predicted=out_of_fold["label"], p_a=p[:, 0], p_b=p[:, 1])
    run = record(config={"recipe": "crossval"}, dynamics=table, out_of_fold=out_of_fold, suspects=out_of_fold.head(3))
    section = dynamics_section.observed(run)
    assert section is not None and len(section.plots) == 3
    assert section.plots[-1].caption.startswith("3 of 40 labels") and section.hardest[0].text


def test_hard_rows_are_told_in_words_where_they_were_written(table: pd.DataFrame) -> None:
    hardest = training_dynamics.hardest(table).index
    told = table.assign(text=pd.Series([f"Why {at}? " * 40 + "So." for at in range(len(hardest))], index=hardest))
    section = dynamics_section.observed(record(config={"recipe": "sft"}, dynamics=told))
    assert section is not None
    assert [row.text.partition("?")[0] for row in section.hardest] == [f"Why {at}" for at in range(len(hardest))]
    assert section.hardest[0].text.endswith("So.") and len(section.hardest[0].text) < 250


def test_losses_are_drawn_from_visit_to_visit(table: pd.DataFrame) -> None:
    rng = np.random.default_rng(3)
    losses = [rng.random(3 if number % 4 else 1).astype(np.float32) for number in range(40)]
    section = dynamics_section.observed(record(dynamics=table.assign(losses=losses)))
    assert section is not None
    (drawn,) = [plot for plot in section.plots if plot.title.startswith("Loss of rows")]
    median = next(each for each in drawn.legend if each.label == "median")
    np.testing.assert_allclose(median.y, np.median([each for each in losses if len(each) == 3], axis=0), rtol=1e-6)
    assert median.x.tolist() == [1, 2, 3] and [each.label for each in drawn.legend] == ["quartiles", "median"]
    once = dynamics_section.observed(record(dynamics=table.assign(losses=[each[:1] for each in losses])))
    assert once is not None and not [plot for plot in once.plots if plot.title.startswith("Loss of rows")]


def test_rows_that_no_fold_can_learn_are_counted_drawn_and_listed(table: pd.DataFrame) -> None:
    asked = table.assign(right_out_of_fold=np.where(np.arange(40) < 4, 0.0, 1.0))
    section = dynamics_section.observed(record(dynamics=asked))
    assert section is not None and "4 of the first no fold can learn" in section.sentence
    assert {row.row for row in section.unlearnable} == {f"train.jsonl:{number}" for number in range(1, 5)}
    assert section.plots[0].legend[0].label == "no fold learns"
    plain = dynamics_section.observed(record(dynamics=table))
    assert plain is not None and not plain.unlearnable and "no fold" not in plain.sentence


def test_few_of_many_rows_are_drawn(table: pd.DataFrame) -> None:
    section = dynamics_section.observed(record(dynamics=pd.concat([table] * 50)))
    assert section is not None and f"{dynamics_section.DRAWN} of 2,000 rows are drawn" in section.plots[0].caption
