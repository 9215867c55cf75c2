"""Rows that are pictures, as the model reads them: prepared pixels, augmented in training, normalised.

Legend: N rows, B rows of a micro-batch, H height, W width, 3 colours; h and w of an augmented picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from workbench.config.sections.picture_augment_config import AugmentConfig
from workbench.data.batching import Indices
from workbench.data.images import augmentation, mixing, threads
from workbench.data.images.decoding import Pixels
from workbench.data.images.picture_format import PictureFormat
from workbench.data.labelled.records import Mix, ModelInputs

Change: TypeAlias = Callable[[Pixels, int], Pixels]
"""From a picture (H, W, 3) and the number of its row to the picture that is read instead."""


@dataclass(frozen=True)
class Augmenter:
    """How training pictures change: in other ways at each draw, whatever the micro-batches and restarts."""

    config: AugmentConfig
    seed: int
    epochs: float
    """Passes over the training rows that the run will make."""
    multiple: int
    """The side of a smaller picture is a multiple of it, such as the side of a patch."""

    def progress(self, epoch: int) -> float:
        """Share of the run that is done at some step of a pass, to show its pictures: 0 in the first, 1 in the last."""
        last = math.ceil(self.epochs) - 1
        return min(1.0, epoch / last) if last > 0 else 1.0

    def __call__(self, picture_HW3: Pixels, *, epoch: int, key: int, repeat: int, progress: float) -> Pixels:
        """The picture as a draw of it reads it.

        Args:
            key: Tells it from others wherever it stands.
            repeat: How often the epoch has drawn it before.
            progress: Share of the run that is done.
        """
        return augmentation.augment(
            picture_HW3,
            self.config,
            seed=self.seed,
            epoch=epoch,
            row=key,
            repeat=repeat,
            progress=progress,
            multiple=self.multiple,
        )

    def plan(
        self, *, epoch: int, key: int, row: int, rows: int, size: tuple[int, int], repeat: int, progress: float
    ) -> mixing.MixPlan | None:
        """How a draw of a row of a set of so many is mixed with another row, if it is."""
        return mixing.plan(
            self.config,
            seed=self.seed,
            epoch=epoch,
            row=key,
            partner=int(_partners(rows, self.seed, epoch)[row]),
            size=size,
            repeat=repeat,
            progress=progress,
        )


class _Draw(NamedTuple):
    """A row that is read, and how often its epoch has drawn it before."""

    row: int
    repeat: int


@dataclass(frozen=True, eq=False)
class PictureRows:
    """Pictures of one size in memory-mapped stores; see `RowInputs`."""

    stores: tuple[Pixels, ...]
    """Prepared pictures (., H, W, 3)."""
    place_N2: Indices
    """Store and number of each row."""
    key_N: Indices
    """A number from the pixels of each row, which decides how it is augmented: the same wherever the row stands."""
    format: PictureFormat
    patches: int
    """Patches that the model cuts a picture into: its tokens."""
    augmenter: Augmenter | None = None
    change: Change | None = None
    """Another look at each picture."""
    progress: float = 1.0
    """Share of the run that is done when they are read, by which augmentation may have grown."""

    @property
    def redrawn(self) -> bool:
        """Whether pictures are augmented, each draw in another way."""
        return self.augmenter is not None

    @property
    def lengths(self) -> Indices:
        """Patches of each row."""
        return np.full(len(self.place_N2), self.patches, dtype=np.int64)

    @property
    def truncated(self) -> int:
        """None loses a part: preparing has brought all to one size."""
        return 0

    def rewritten(self, *, epoch: int, progress: float) -> PictureRows:
        """The rows after a share of the run, as large as a curriculum has them by then."""
        if self.augmenter is None or not self.augmenter.config.grows:
            return self
        full, multiple = (self.format.height, self.format.width), self.augmenter.multiple
        size = augmentation.output_size(full, self.augmenter.config, progress=progress, multiple=multiple)
        return replace(self, progress=progress, patches=math.prod(-(-side // multiple) for side in size))

    def picture(self, index: int) -> Pixels:
        """The prepared picture of a row (H, W, 3), changed where there is a `change`."""
        store, number = self.place_N2[index]
        pixels: Pixels = self.stores[store][number]
        return pixels if self.change is None else self.change(pixels, int(self.key_N[index]))

    def batch(self, indices: Indices, *, epoch: int | None, repeats: Indices | None = None) -> ModelInputs:
        """The rows `indices`; augmented where there are an `augmenter` and an epoch."""
        if self.augmenter is None or epoch is None:
            pictures, mix = [self.picture(index) for index in indices], None
        else:
            repeats = np.zeros_like(indices) if repeats is None else repeats
            pictures, mix = self._augmented(self.augmenter, indices, epoch, repeats)
        pixels_B3hw = torch.from_numpy(self.format.normalised(pictures))
        last_B = torch.arange(1, len(indices) + 1) * self.patches - 1
        return ModelInputs({"pixel_values": pixels_B3hw}, last_B, len(indices) * self.patches, mix)

    def augmented(self, index: int, *, epoch: int) -> tuple[Pixels, int, float]:
        """The picture of a row as it is trained on in an epoch, the row that is mixed into it, and its own share."""
        assert self.augmenter is not None
        pictures, mix = self._augmented(self.augmenter, np.asarray([index]), epoch, np.zeros(1, dtype=np.int64))
        return pictures[0], *((index, 1.0) if mix is None else (int(mix.partner_B[0]), float(mix.share_B[0])))

    def _augmented(
        self, augmenter: Augmenter, indices: Indices, epoch: int, repeats: Indices
    ) -> tuple[list[Pixels], Mix | None]:
        def changed(draw: _Draw) -> Pixels:
            index, repeat = draw
            key = int(self.key_N[index])
            return augmenter(self.picture(index), epoch=epoch, key=key, repeat=repeat, progress=self.progress)

        def mixed(draw: _Draw) -> tuple[Pixels, int, float]:
            picture, (index, repeat) = changed(draw), draw
            how = augmenter.plan(
                epoch=epoch,
                key=int(self.key_N[index]),
                row=index,
                rows=len(self.key_N),
                size=(picture.shape[0], picture.shape[1]),
                repeat=repeat,
                progress=self.progress,
            )
            if how is None:
                return picture, index, 1.0
            return mixing.mix(picture, changed(_Draw(how.partner, repeat)), how), how.partner, how.weight

        pixels = self.format.height * self.format.width
        draws = list(map(_Draw, indices.tolist(), repeats.tolist()))
        if not augmenter.config.mixes:
            return threads.each(changed, draws, size=pixels), None
        pictures, partner_B, share_B = zip(*threads.each(mixed, draws, size=pixels), strict=True)
        return list(pictures), Mix(np.asarray(partner_B), np.asarray(share_B))

    def take(self, indices: Indices) -> PictureRows:
        """The rows `indices`."""
        return replace(self, place_N2=self.place_N2[indices], key_N=self.key_N[indices])

    def concatenated(self, other: PictureRows) -> PictureRows:
        """These rows, followed by those of `other`, which are augmented as these are."""
        moved_N2 = other.place_N2 + np.asarray([len(self.stores), 0])
        return replace(
            self,
            stores=(*self.stores, *other.stores),
            place_N2=np.concatenate([self.place_N2, moved_N2]),
            key_N=np.concatenate([self.key_N, other.key_N]),
        )

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """The pixels of each row."""
        return (self.picture(index) for index in range(len(self.place_N2)))

    def differ(self, other: PictureRows) -> npt.NDArray[np.bool_]:
        """Which rows look different in `other`."""
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        return np.asarray([not np.array_equal(one, two) for one, two in pairs], dtype=bool)

    def seen(self, change: Change) -> PictureRows:
        """The same rows, each changed before it is read."""
        return replace(self, change=change)


@lru_cache(maxsize=4)
def _partners(rows: int, seed: int, epoch: int) -> Indices:
    return mixing.partners(rows, seed=seed, epoch=epoch)
