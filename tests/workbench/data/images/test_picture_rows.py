"""Rows of pictures as steps read them: a function of seed, epoch, row, repeat and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workbench.evaluation.picture_sets import SIZE, picture_set
from workbench.data.images import augmentation
from workbench.data.images.picture_reader import PictureRows

CHANGES = {"rotation": 20, "brightness": 0.3, "erasing": 0.5}
GROWS = {"curriculum": {"strength": {"start": 0.2}, "resolution": {"start": 0.25, "steps": None}}}
MIXES = {"mixup": 0.4, "cutmix": 1.0}


def read(folder: Path, augment: dict[str, Any]) -> Any:
    rows, _ = picture_set(folder, rows=12, augment=augment)
    assert isinstance(rows.inputs, PictureRows) and rows.inputs.augmenter is not None
    return rows


@pytest.mark.parametrize("mixes", [{}, MIXES], ids=["alone", "mixed"])
@pytest.mark.parametrize("grows", [{}, GROWS], ids=["whole", "grows"])
def test_a_draw_is_what_seed_epoch_row_repeat_and_step_say(
    tmp_path: Path, mixes: dict[str, Any], grows: dict[str, Any]
) -> None:
    rows = read(tmp_path, {**CHANGES, **mixes, **grows})
    inputs, config = rows.inputs, rows.inputs.augmenter.config
    some, repeats, epoch = np.asarray([7, 2, 7]), np.asarray([0, 3, 5]), 2
    partner_N = augmentation.mix_partners(len(rows), seed=3, epoch=epoch)
    for step in (0, 13, 39):
        given = {"seed": 3, "epoch": epoch, "progress": step / 40 if grows else 1.0}

        def augmented(row: int, repeat: int, given: dict[str, Any] = given) -> Any:
            key = int(inputs.key_N[row])
            return augmentation.augment(inputs.picture(row), config, row=key, repeat=repeat, multiple=8, **given)

        found = rows.seen(epoch=epoch, step=step, steps=40).inputs.batch(some, epoch=epoch, repeats=repeats)
        for pixels, row, repeat in zip(found.inputs["pixel_values"], some.tolist(), repeats.tolist(), strict=True):
            wanted, key = augmented(row, repeat), int(inputs.key_N[row])
            how = augmentation.mix_plan(
                config, row=key, repeat=repeat, partner=int(partner_N[row]), size=wanted.shape[:2], **given
            )
            if how is not None:
                wanted = augmentation.mix(wanted, augmented(how.partner, repeat), how)
            np.testing.assert_array_equal(pixels.numpy(), inputs.format.normalised([wanted])[0])
        again = rows.seen(epoch=epoch, step=step, steps=40).inputs.batch(some[:1], epoch=epoch)
        assert again.inputs["pixel_values"][0].equal(found.inputs["pixel_values"][0]), "the first draw"


@pytest.mark.parametrize("steps", [5, 40])
def test_pictures_grow_at_every_step_of_any_number_of_epochs(tmp_path: Path, steps: int) -> None:
    """With one epoch too: what has grown is a share of the run's steps."""
    rows = read(tmp_path, {**CHANGES, **GROWS})
    sides, epoch = [], 0
    for step in range(steps):
        seen = rows.seen(epoch=epoch, step=step, steps=steps)
        batch = seen.batch(np.asarray([1, 4]), epoch=epoch)
        side = batch.inputs["pixel_values"].shape[-1]
        assert seen.lengths.tolist() == [(side // 8) ** 2] * 12 and batch.tokens == 2 * (side // 8) ** 2
        assert batch.positions_N.tolist() == [batch.tokens // 2 - 1, batch.tokens - 1]
        sides.append(side)
    assert sides == sorted(sides) and sides[0] == 8 and sides[-1] == SIZE and len(set(sides)) >= 3
    assert rows.lengths.tolist() == [16] * 12, "the run has room for whole pictures"
    assert rows.batch(np.asarray([1]), epoch=0).inputs["pixel_values"].shape[-1] == SIZE


def test_rows_that_do_not_grow_are_themselves_in_every_step(tmp_path: Path) -> None:
    rows = read(tmp_path, CHANGES)
    assert rows.seen(epoch=0, step=3, steps=10) is rows
