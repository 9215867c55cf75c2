"""Draws of a row in an epoch: each has a number of its own, in the order of the steps, where pictures are augmented."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.workbench.data.labelled.test_class_sampling import config as configured
from tests.workbench.data.labelled.test_class_sampling import labelled
from tests.workbench.evaluation.picture_sets import picture_set
from workbench.config import RunConfig
from workbench.data.batching import Indices
from workbench.data.labelled.class_sampling import ClassBalancedRows, balanced
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.packing import PADDED
from workbench.data.row_order import RowOrder
from workbench.distillation.class_distillation import examples
from workbench.evaluation import training_dynamics
from workbench.runs.ranks import Ranks
from workbench.training.distributed.data_parallel import share_rows
from workbench.training.row_losses import Visits

AUGMENT = {"rotation": 20, "brightness": 0.3, "erasing": 0.5, "mixup": 0.4, "cutmix": 1.0}


def config(**classes: object) -> RunConfig:
    return configured(**classes).model_copy(update={"batch": configured().batch.model_copy(update={"size": 7})})


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> LabelledSet:
    """30 pictures, of which the last two are of a rare class."""
    rows, _ = picture_set(tmp_path_factory.mktemp("unequal"), rows=30, augment=AUGMENT)
    class_N = np.asarray([0] * 14 + [1] * 14 + [2] * 2)
    return LabelledSet(
        rows.records, rows.inputs, np.eye(3, dtype=np.float32)[class_N], rows.supervised, rows.source, rows.fingerprint
    )


def steps(rows: ClassBalancedRows, seed: int, epoch: int) -> list[Indices]:
    order = RowOrder(rows, config().model_copy(update={"seed": seed}), None)
    each = order.steps_per_epoch
    return [order.rows(step) for step in range(epoch * each, (epoch + 1) * each)]


@pytest.mark.parametrize("sampling", ["even", "over", "under"])
@pytest.mark.parametrize("seed", [0, 4])
def test_a_number_counts_the_draws_of_its_row_in_earlier_steps(pictures: LabelledSet, sampling: str, seed: int) -> None:
    rows = ClassBalancedRows(pictures, sampling, seed)  # type: ignore[arg-type]
    plain = ClassBalancedRows(labelled([0] * 14 + [1] * 14 + [2] * 2), sampling, seed)  # type: ignore[arg-type]
    for epoch in (0, 3):
        known: Counter[int] = Counter()
        for numbers, wanted in zip(steps(rows, seed, epoch), steps(plain, seed, epoch), strict=True):
            np.testing.assert_array_equal(rows.row_of(numbers), wanted, "the same rows as without numbers")
            for number, row in zip(numbers.tolist(), wanted.tolist(), strict=True):
                assert number == row + known[row] * len(pictures)
                known[row] += 1
            assert (numbers < len(rows.lengths)).all() and len(rows.supervised) == len(rows.lengths)
            assert rows.place(int(numbers[0])) == pictures.place(int(wanted[0]))
        assert max(known.values()) <= rows.most_draws
    assert len(plain.lengths) == len(plain.rows), "a text is the same at each draw"


def test_the_rows_of_a_rare_class_are_augmented_in_another_way_at_each_draw(pictures: LabelledSet) -> None:
    rows = balanced(pictures, config())
    assert isinstance(rows, ClassBalancedRows)
    numbers = np.concatenate(steps(rows, 0, 0))
    rare = np.sort(numbers[rows.row_of(numbers) == 29])
    assert len(rare) >= 3
    pixels_B = rows.batch(rare, epoch=0).inputs["pixel_values"]
    assert not any(one.equal(other) for n, one in enumerate(pixels_B) for other in pixels_B[:n])
    assert pixels_B[0].equal(pictures.batch(np.asarray([29]), epoch=0).inputs["pixel_values"][0]), "the first draw"


def test_a_draw_is_the_same_in_any_micro_batch_and_on_any_device(pictures: LabelledSet) -> None:
    rows = balanced(pictures, config())
    (numbers, *_) = steps(rows, 0, 1)  # type: ignore[arg-type]
    whole = rows.batch(numbers, epoch=1)
    known = {
        int(n): (p, label) for n, p, label in zip(numbers, whole.inputs["pixel_values"], whole.labels_N, strict=True)
    }
    for tokens, world in ((16, 1), (48, 1), (48, 2), (200, 3)):
        found = []
        for rank in range(world):
            ranks = Ranks(rank, world) if world > 1 else Ranks()
            for share in share_rows(numbers, rows.lengths, PADDED, tokens=tokens, ranks=ranks, in_step=False):
                batch = rows.batch(share.rows, epoch=1)
                found += share.rows.tolist()
                for number, pixels, label in zip(share.rows, batch.inputs["pixel_values"], batch.labels_N, strict=True):
                    assert pixels.equal(known[int(number)][0]) and label.equal(known[int(number)][1])
        assert sorted(found) == sorted(numbers.tolist())


def test_further_rows_of_a_student_keep_the_numbers_of_draws(pictures: LabelledSet) -> None:
    extra = pictures.subset(np.arange(4))
    mixed = examples(config(), pictures, extra)
    numbers = mixed.sample(np.arange(len(mixed)), epoch=2)
    assert len(np.unique(numbers)) == len(mixed), "each draw has a number of its own"
    row, times = np.unique(numbers % 34, return_counts=True)
    assert (times[row >= 30] == 1).all() and times.max() > 2
    np.testing.assert_array_equal(mixed.batch(numbers[:3], epoch=2).rows_B, numbers[:3] % 34)


def test_dynamics_of_a_row_are_those_of_all_its_draws(pictures: LabelledSet, tmp_path: Path) -> None:
    rows = balanced(pictures, config())
    number = np.asarray([29, 29 + 30, 3, 29 + 60], dtype=np.int32)
    one = np.ones(4, dtype=np.float32)
    training_dynamics.write(tmp_path, Visits(np.arange(4, dtype=np.int32), number, one, one, one), rows)
    found = pd.read_parquet(tmp_path / training_dynamics.FILE)
    assert dict(zip(found["row"], found["visits"], strict=True)) == {pictures.place(3): 1, pictures.place(29): 3}
