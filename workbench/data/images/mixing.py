"""mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019): a row's picture and label with a share of another row's.

Legend: N rows, C classes, h and w of an augmented picture, 3 channels. Plans are pure functions of seed, epoch and row;
both pictures are augmented before they are mixed, each as `augmentation.augment` does for its own row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from workbench.config.sections.picture_augment_config import AugmentConfig
from workbench.data.images.draws import generator


class PixelBox(NamedTuple):
    """A rectangle of whole pixels; bottom and right are the first ones outside."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def area(self) -> int:
        """Its pixels."""
        return (self.bottom - self.top) * (self.right - self.left)


@dataclass(frozen=True)
class MixPlan:
    """How a row is mixed with its partner."""

    partner: int
    """Number of the other row."""
    weight: float
    """Share of the row's own label, from 0 to 1; the rest is the partner's."""
    box: PixelBox | None = None
    """CutMix: the pixels that come from the partner; None: mixup, all pixels are blended by `weight`."""


def partners(rows: int, *, seed: int, epoch: int, groups_N: NDArray[Any] | None = None) -> NDArray[np.int64]:
    """The partner (N,) of each row in an epoch: another row of its group, and each row is the partner of one.

    Args:
        rows: Number of rows, N.
        groups_N: Rows that may be mixed with each other, such as those of a fold: an adapter that does not train on a
            fold must not see its pictures through the other rows. None: all rows.

    Returns:
        Row numbers; a row that is alone in its group is its own partner.
    """
    order_N = generator("partners", seed=seed, epoch=epoch, row=0).permutation(rows)
    if groups_N is None:
        groups_N = np.zeros(rows, dtype=np.int64)
    order_N = order_N[np.argsort(groups_N[order_N], kind="stable")]
    # In each group the next row of the order, and for the last one the first: one cycle, in which no row meets itself.
    sorted_N = groups_N[order_N]
    is_last_N = np.append(sorted_N[1:] != sorted_N[:-1], np.ones(min(rows, 1), dtype=bool))
    is_first_N = np.roll(is_last_N, 1)
    next_N = np.roll(order_N, -1)
    next_N[is_last_N] = order_N[is_first_N]
    partner_N = np.empty(rows, dtype=np.int64)
    partner_N[order_N] = next_N
    return partner_N


def plan(
    config: AugmentConfig,
    *,
    seed: int,
    epoch: int,
    row: int,
    partner: int,
    size: tuple[int, int],
    repeat: int = 0,
    progress: float = 1.0,
) -> MixPlan | None:
    """How a row is mixed in an epoch; None where it is trained on as it is.

    Args:
        partner: The row's partner, of `partners`.
        size: Height and width of the augmented pictures, of `augmentation.output_size`.
        repeat: How often the row was drawn before in this epoch.
        progress: Share of the run that is done, at the optimizer step that trains on the row.
    """
    if not config.mixes or partner == row:
        return None
    rng = generator("mix", seed=seed, epoch=epoch, row=row, repeat=repeat)
    mixed, switch, centre_y, centre_x = rng.random(4).tolist()
    if mixed >= config.mix_probability * config.curriculum.strength.at(progress):
        return None
    cuts = switch < 0.5 if config.mixup and config.cutmix else bool(config.cutmix)
    alpha = config.cutmix if cuts else config.mixup
    weight = float(rng.beta(alpha, alpha))
    if not cuts:
        return MixPlan(partner, weight)
    height, width = size
    box = _box(size, 1.0 - weight, centre=(centre_y * height, centre_x * width))
    return MixPlan(partner, 1.0 - box.area / (height * width), box)


def mix(picture_hw3: NDArray[np.uint8], partner_hw3: NDArray[np.uint8], how: MixPlan) -> NDArray[np.uint8]:
    """The mixed picture of a row and its partner, both augmented and of one size."""
    if how.box is None:
        blend_hw3 = cv2.addWeighted(picture_hw3, how.weight, partner_hw3, 1.0 - how.weight, 0.0)
        return np.asarray(blend_hw3, dtype=np.uint8)
    result_hw3: NDArray[np.uint8] = picture_hw3.copy()
    window = np.s_[how.box.top : how.box.bottom, how.box.left : how.box.right]
    result_hw3[window] = partner_hw3[window]
    return result_hw3


def _box(size: tuple[int, int], share: float, *, centre: tuple[float, float]) -> PixelBox:
    """A box of a share of the picture's area and of its shape, less what lies beyond the picture's edges."""
    height, width = size
    half_h, half_w = height * share**0.5 / 2, width * share**0.5 / 2
    top, bottom = (min(max(round(centre[0] + side), 0), height) for side in (-half_h, half_h))
    left, right = (min(max(round(centre[1] + side), 0), width) for side in (-half_w, half_w))
    return PixelBox(top, left, bottom, right)
