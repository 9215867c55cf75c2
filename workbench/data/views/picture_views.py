"""Views of pictures for test-time augmentation: deterministic pure functions of stored uint8 pictures.

Legend: H and W of a picture, 3 channels RGB. Beyond its edges a picture is mirrored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.config import plugins
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.tta_config import TtaConfig, ViewName
from workbench.data.images import augmentation
from workbench.data.images.augmentation import Box, Warp
from workbench.data.images.picture_reader import PictureRows
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.data.labelled.records import RowReader
from workbench.data.rows import excerpt
from workbench.data.views.user_views import KEY, require_used
from workbench.errors import ConfigError

Picture: TypeAlias = NDArray[np.uint8]
Change: TypeAlias = Callable[[Picture, int], Picture]
"""A picture and the number of its row to the picture that is read instead."""


@dataclass(frozen=True)
class PictureView:
    """A way to look at a picture once more."""

    name: str
    change: Change

    def picture(self, picture_HW3: Picture, row: int) -> Picture:
        """The picture of a row in this view, of the same size.

        Raises:
            ConfigError: A user's function returns no such picture; the message names the row.
        """
        return self.change(picture_HW3, row)

    def rows(self, rows: LabelledSet, reader: RowReader) -> LabelledSet:
        """The same rows in this view."""
        assert isinstance(rows.inputs, PictureRows)
        return replace(rows, inputs=rows.inputs.seen(self.picture))

    def why_useless(self, rows: LabelledSet, changed: int) -> str:
        """Why this view changes so few rows."""
        return f"{'no other picture' if changed else 'no picture'} looks different in it"

    def outputs(self, outputs_NC: Floats) -> Floats:
        """Outputs (or values) for rows in this view as those for the original rows: they are the same."""
        return outputs_NC


def make(config: TtaConfig, classes: ClassesConfig, *, example: Picture, row: int = 0) -> list[PictureView]:
    """Make the views of pictures that `config` names.

    Args:
        example: Any stored picture; a user's function must return as many views of every picture as of this one.
        row: Number of its row.

    Raises:
        ConfigError: A view does not fit the rows, or the user's file is wrong.
    """
    if reason := config.refusal(classes, pictures=True):
        raise ConfigError(reason)
    require_used(config)
    return [view for name in config.views for view in _make(name, config, example, row)]


def _make(name: ViewName, config: TtaConfig, example: Picture, row: int) -> Iterator[PictureView]:
    """The views of one name."""
    if name == "flip":
        yield PictureView("flip", partial(_symmetry, 0, True))
    elif name == "eight":
        for flips, turns in ((False, 1), (False, 2), (False, 3), (True, 0), (True, 1), (True, 2), (True, 3)):
            words = ["flip"] * flips + [f"turn {90 * turns}"] * bool(turns)
            yield PictureView(" ".join(words), partial(_symmetry, turns, flips))
    elif name == "five_crops":
        places = {"top left": (0, 0), "top right": (0, 1), "bottom left": (1, 0), "bottom right": (1, 1)}
        for place, (down, right) in {**places, "centre": (0.5, 0.5)}.items():
            yield PictureView(f"crop {place}", partial(_crop, config.crop, down, right))
    elif name == "scales":
        for scale in config.scales:
            yield PictureView(f"scale {scale:g}", partial(_scaled, scale))
    elif name == "rotations":
        for degrees in config.rotations:
            yield PictureView(f"rotation {degrees:g}", partial(_moved, degrees, 0.0, 0.0))
    elif name == "shifts":
        share = config.shift
        for side, (right, down) in {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}.items():
            yield PictureView(f"shift {side}", partial(_moved, 0.0, right * share, down * share))
    else:
        assert name == "user" and config.function is not None
        views = _UserPictures(config.function, example=example, row=row)
        for number in range(views.count):
            yield PictureView(f"user {number + 1}", partial(_user_picture, views, number))


def _symmetry(turns: int, flips: bool, picture_HW3: Picture, row: int) -> Picture:
    """Left and right exchanged where `flips`, then so many quarter turns counter-clockwise; resized if not square."""
    flipped_HW3 = picture_HW3[:, ::-1] if flips else picture_HW3
    turned = np.ascontiguousarray(np.rot90(flipped_HW3, turns))
    return augmentation.resized_to(turned, (picture_HW3.shape[0], picture_HW3.shape[1]))


def _crop(share: float, down: float, right: float, picture_HW3: Picture, row: int) -> Picture:
    """A crop of a share of each side at full size; `down` and `right` are its place between the edges, from 0 to 1."""
    height, width = picture_HW3.shape[:2]
    crop_h, crop_w = max(1, round(height * share)), max(1, round(width * share))
    top, left = round(down * (height - crop_h)), round(right * (width - crop_w))
    return augmentation.resized_to(picture_HW3[top : top + crop_h, left : left + crop_w], (height, width))


def _scaled(scale: float, picture_HW3: Picture, row: int) -> Picture:
    height, width = picture_HW3.shape[:2]
    box_h, box_w = height / scale, width / scale
    box = Box((height - box_h) / 2, (width - box_w) / 2, box_h, box_w)
    return augmentation.warped(picture_HW3, Warp(box), border="reflect")


def _moved(degrees: float, right: float, down: float, picture_HW3: Picture, row: int) -> Picture:
    """The picture rotated about its centre, then shifted by shares of its sides."""
    height, width = picture_HW3.shape[:2]
    box = Box(0.0, 0.0, float(height), float(width))
    warp = Warp(box, degrees=degrees, shift_x=right * width, shift_y=down * height)
    return augmentation.warped(picture_HW3, warp, border="reflect")


class _UserPictures:
    """Views that a user's function `views` returns: equally many pictures for every one, each of its size."""

    def __init__(self, path: Path, *, example: Picture, row: int) -> None:
        self._path = path
        self._function = plugins.function(path, "views", "def views(picture: ndarray) -> list[ndarray]", key=KEY)
        self._example_row = row
        views = self._called(example, row)
        if not views:
            raise self._error(row, "returned no view. Return a list of one or more pictures")
        if any((first != second).any() for first, second in zip(views, self._called(example, row), strict=True)):
            raise self._error(row, "returned other views when called again. Derive randomness from the picture alone")
        self.count = len(views)

    def views(self, picture_HW3: Picture, row: int) -> list[Picture]:
        """The views of a picture."""
        views = self._called(picture_HW3, row)
        if len(views) != self.count:
            raise self._error(
                row,
                f"returned {len(views)} views, but {self.count} for row {self._example_row}. Return equally many for "
                "every picture; the picture itself may be one",
            )
        return views

    def _called(self, picture_HW3: Picture, row: int) -> list[Picture]:
        try:
            views = self._function(picture_HW3.copy())
        except Exception as error:  # a user's code may raise anything
            raise plugins.failed(self._path, error, key=f"{KEY}, called with the picture of row {row}") from error
        if not isinstance(views, (list, tuple)):
            raise self._error(row, f"returned {excerpt(views)}. Return a list of pictures")
        return [self._checked(view, picture_HW3.shape, row) for view in views]

    def _checked(self, view: Any, shape: tuple[int, ...], row: int) -> Picture:
        if not isinstance(view, np.ndarray):
            raise self._error(row, f"returned {excerpt(view)} as a picture. Return a numpy array of uint8")
        if view.dtype != np.uint8 or view.shape != shape:
            raise self._error(
                row,
                f"returned a picture of {view.dtype} and shape {view.shape}. Return uint8 of the shape that it got, "
                f"{shape}, such as by numpy.clip(x.round(), 0, 255).astype(numpy.uint8)",
            )
        return np.ascontiguousarray(view)

    def _error(self, row: int, problem: str) -> ConfigError:
        return ConfigError(f"{KEY}: views() of {self._path}, called with the picture of row {row}, {problem}.")


def _user_picture(views: _UserPictures, number: int, picture_HW3: Picture, row: int) -> Picture:
    return views.views(picture_HW3, row)[number]
