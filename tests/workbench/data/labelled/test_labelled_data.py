"""Labelled rows are told apart by what is read of them and by their targets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.conftest import MINILM, write_animals
from workbench.config import RunConfig
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.models import classifier


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> LabelledSet:
    source = write_animals(tmp_path_factory.mktemp("rows") / "rows.jsonl", range(20))
    data = {"train": str(source), "held_out": 0.2}
    config = RunConfig.model_validate({"recipe": "classify", "model": {"id": MINILM}, "data": data})
    return labelled_data.load(config, classifier.reader_of_backbone(config)).train


def test_equal_digests_mean_equal_rows_with_equal_targets(rows: LabelledSet) -> None:
    assert len(set(rows.digests.tolist())) == len(rows) == len(list(rows.places()))
    assert (rows.subset(np.array([3, 3, 1])).digests == rows.digests[[3, 3, 1]]).all()
    others = rows.with_targets(np.roll(rows.targets_NC, 1, axis=1))
    assert not (others.digests == rows.digests).any()


def test_rows_fall_into_the_classes_that_any_of_them_has(rows: LabelledSet) -> None:
    np.testing.assert_array_equal(rows.of_class_NG, rows.targets_NC > 0.5)
    one = rows.subset(rows.targets_NC[:, 1] > 0.5)
    assert one.of_class_NG.shape == (len(one), 1) and one.of_class_NG.all()
    number = replace(rows, targets_NC=np.linspace(-1, 1, len(rows), dtype=np.float32)[:, None])
    assert number.of_class_NG.shape == (len(rows), 1) and number.of_class_NG.all()
