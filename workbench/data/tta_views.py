"""Views of labelled rows for test-time augmentation, and outputs mapped back to the original rows.

Texts are rewritten; pictures are changed by deterministic pure functions of stored uint8 pictures, mirrored beyond
their edges; a user's Python file may define views and how predictions are merged.

Legend: N rows, V views, C outputs (classes, or 1 for a number), H and W of a picture, 3 channels RGB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.config import RunConfig, plugins
from workbench.config.sections.classes_config import PAIR_FIELDS, ClassesConfig
from workbench.config.sections.tta_config import MIN_CHANGED_SHARE, NOISY, WINDOWS, TtaConfig, ViewName
from workbench.data.images import augmentation
from workbench.data.images.augmentation import Box, Warp
from workbench.data.images.picture_reader import PictureRows
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import RowReader
from workbench.data.labelled.text_reader import FieldTokenizer, TextReader, TokenRows
from workbench.data.rows import excerpt
from workbench.data.sound import sound_augmentation
from workbench.data.sound.sound_format import SoundFormat
from workbench.data.sound.sound_reader import Change as SoundChange
from workbench.data.sound.sound_reader import SoundRows
from workbench.data.text import rewriting
from workbench.errors import ConfigError, DataError
from workbench.schema import did_you_mean

Fields: TypeAlias = tuple[str, ...]
UserMerge: TypeAlias = Callable[[Floats], Floats]
"""Merges values (V, N, C) of the views, the original rows first, to values (N, C), each row by itself."""
KEY = "tta.function"  # the setting that names the file, for messages


class UserViews:
    """Views that a user's function `views` returns: equally many for every row, with texts in the same columns. Raises
    ConfigError: the file has no such function, or its results do not fit.

    Args:
        path: The user's file.
        columns: Names of the columns of a row.
        example: Columns of the row that decides how many views there are.
        place: Place of that row.
    """

    def __init__(self, path: Path, *, columns: Fields, example: Fields, place: str) -> None:
        self._path, self._columns, self._example_place = path, columns, place
        self._function = plugins.function(
            path, "views", "def views(row: dict[str, str]) -> list[dict[str, str]]", key=KEY
        )
        views = self._call(example, place)
        if not views:
            raise self._error(place, "returned no view. Return a list of one or more rows")
        if self._call(example, place) != views:
            raise self._error(place, "returned other views when called again. Derive randomness from the row alone")
        self.count = len(views)
        self._cache = {example: views}

    def view(self, number: int, record: LabelledRecord) -> Fields:
        """One of the views of a row."""
        fields, place = record.fields, record.place
        if fields not in self._cache:
            views = self._call(fields, place)
            if len(views) != self.count:
                raise self._error(
                    place,
                    f"returned {len(views)} views, but {self.count} for {self._example_place}. Return equally many for "
                    "every row; the row itself may be one",
                )
            self._cache[fields] = views
        return self._cache[fields][number]

    def _call(self, fields: Fields, place: str) -> list[Fields]:
        try:
            views = self._function(dict(zip(self._columns, fields, strict=True)))
        except Exception as error:  # a user's code may raise anything
            raise plugins.failed(self._path, error, key=f"{KEY}, called with {place}") from error
        if not isinstance(views, (list, tuple)):
            raise self._error(place, f"returned {excerpt(views)}. Return a list of rows")
        return [self._fields(row, place) for row in views]

    def _fields(self, row: Any, place: str) -> Fields:
        if not isinstance(row, dict):
            raise self._error(
                place, f"returned {excerpt(row)} as a row. Return {{{', '.join(self._columns)}}}, each with its text"
            )
        for name in self._columns:
            if name not in row:
                raise self._error(
                    place, f"returned a row without `{name}`. Return every column: {', '.join(self._columns)}"
                )
            if not isinstance(row[name], str):
                raise self._error(place, f"returned {excerpt(row[name])} as `{name}`. Return text")
        for name in row:
            if name not in self._columns:
                hint = did_you_mean(str(name), self._columns)
                raise self._error(
                    place, f"returned a row with `{name}`, which classes.text does not name.{hint} Leave it out"
                )
        return tuple(row[name] for name in self._columns)

    def _error(self, place: str, problem: str) -> ConfigError:
        return ConfigError(f"{KEY}: views() of {self._path}, called with {place}, {problem}.")


def require_used(config: TtaConfig) -> None:
    """Raise ConfigError where the user's file defines a function that the configuration does not use."""
    if config.function is None:
        return
    defined = vars(plugins.module(config.function, key=KEY))
    for name, is_used, remedy in (
        ("views", "user" in config.views, "add user to tta.views"),
        ("merge", config.merge == "user", "write tta.merge=user"),
    ):
        if callable(defined.get(name)) and not is_used:
            raise ConfigError(
                f"{KEY}: {config.function} defines {name}(), which is not used. To use it, {remedy}; "
                "otherwise give it another name."
            )


def user_merge(config: TtaConfig) -> UserMerge | None:
    """The user's function `merge`, where `tta.merge` is user; workbench/crossval/tta.py checks its results. Raises
    ConfigError: the file has no such function."""
    path = config.function
    if path is None or config.merge != "user":
        return None
    merge = plugins.function(path, "merge", "def merge(p: ndarray) -> ndarray", key=KEY)

    def called(values_VNC: Floats) -> Floats:
        try:
            return np.asarray(merge(values_VNC.copy()), dtype=np.float64)
        except Exception as error:  # a user's code may raise anything
            raise plugins.failed(path, error, key=KEY) from error

    return called


TextChange: TypeAlias = Callable[[LabelledRecord], Fields]

_REWRITES: Mapping[ViewName, Callable[[str], str]] = {
    "lower": str.lower,
    "upper": str.upper,
    "no_punctuation": rewriting.without_punctuation,
}
_NOISE = {"typos": rewriting.with_typos, "drop_words": rewriting.with_words_dropped}


@dataclass(frozen=True)
class TextView:
    """A way to rewrite rows."""

    name: str
    classes: ClassesConfig
    """Its template, and how long rows are truncated."""
    change: TextChange
    """Rewrites a row; returns its columns in the order of the template."""
    order_C: tuple[int, ...] | None = None
    """The output of the view that corresponds to each output of the original row; None where they are the same."""

    def rows(self, rows: LabelledSet, reader: RowReader) -> LabelledSet:
        """The same rows, tokenised in this view. Raises DataError: the view's template leaves no tokens to the columns
        of a row."""
        assert isinstance(reader, TextReader)
        encoder = FieldTokenizer(reader.tokenizer, self.classes, max_tokens=reader.data.max_tokens)
        try:
            tokens = encoder.encode(
                (self.texts(record) for record in rows.records), (each.place for each in rows.records)
            )
        except DataError as error:
            raise DataError(f"tta, view {self.name}: {error}") from None
        return replace(rows, inputs=TokenRows(tokens))

    def why_useless(self, rows: LabelledSet, changed: int) -> str:
        which = "no other row" if changed else "no row"
        if self.name in WINDOWS:
            return f"{which} is longer than data.max_tokens"
        if sum(self.texts(record) != record.fields for record in rows.records) >= MIN_CHANGED_SHARE * len(rows):
            return "the tokenizer gives changed texts the same tokens, as an uncased one does with letters"
        return f"{which} has anything that it would change"

    def texts(self, record: LabelledRecord) -> Fields:
        """The columns of a row in this view; unchanged where the view would leave a required column empty."""
        changed = self.change(record)
        required = PAIR_FIELDS if self.classes.kind == "pair" else ()
        columns = zip(self.classes.fields, changed, strict=True)
        empty = not any(text.strip() for text in changed) or any(
            name in required and not text.strip() for name, text in columns
        )
        return record.fields if empty else changed

    def outputs(self, outputs_NC: Floats) -> Floats:
        return outputs_NC if self.order_C is None else outputs_NC[:, list(self.order_C)]


def text_views(
    config: TtaConfig, classes: ClassesConfig, labels: Labels, *, seed: int, example: LabelledRecord
) -> list[TextView]:
    """Make the views that `config` names. Raises ConfigError: a view does not fit the rows or their labels, or the
    user's file is wrong. `seed`: seed of the noise. `example`: any row; a user's function must return as many views of
    every row as of this one."""
    if reason := config.refusal(classes):
        raise ConfigError(reason)
    require_used(config)
    return [view for name in config.views for view in _named_text_views(name, config, classes, labels, seed, example)]


def _named_text_views(
    name: ViewName, config: TtaConfig, classes: ClassesConfig, labels: Labels, seed: int, example: LabelledRecord
) -> list[TextView]:
    """The views of one name."""
    if name in _REWRITES:
        return [TextView(name, classes, lambda record: tuple(map(_REWRITES[name], record.fields)))]
    if name in NOISY:
        copies = range(1, config.copies + 1)
        return [
            TextView(f"{name} {copy}", classes, partial(_add_noise, name, share=config.noise, seed=seed, copy=copy))
            for copy in copies
        ]
    if name in WINDOWS:
        return [TextView(name, classes.model_copy(update={"keep": WINDOWS[name]}), attrgetter("fields"))]
    if name == "swap":
        # Exchanges the two responses, and the outputs for a and b.
        other = {"a": "b", "b": "a", "response_a": "response_b", "response_b": "response_a"}
        for label in labels.names:
            if other.get(label, label) not in labels.names:
                raise ConfigError(
                    f"tta.views: swap turns a into b and b into a, but no training row has the label `{other[label]}`. "
                    f"Give rows where {other[label]} wins, or leave swap out."
                )
        order = [classes.fields.index(other.get(field, field)) for field in classes.fields]
        order_C = tuple(labels.names.index(other.get(label, label)) for label in labels.names)
        return [TextView("swap", classes, partial(_reorder, order), order_C)]
    if name == "templates":
        # Each column keeps its share of the tokens.
        shares = dict(zip(classes.fields, classes.parts, strict=True))
        others = [
            ClassesConfig.model_validate({**classes.model_dump(), "text": text, "shares": shares})
            for text in config.templates
        ]
        orders = [[classes.fields.index(field) for field in other.fields] for other in others]
        return [
            TextView(f"template {number}", other, partial(_reorder, order))
            for number, (other, order) in enumerate(zip(others, orders, strict=True), start=1)
        ]
    assert config.function is not None
    views = UserViews(config.function, columns=classes.fields, example=example.fields, place=example.place)
    return [TextView(f"user {number + 1}", classes, partial(views.view, number)) for number in range(views.count)]


def _add_noise(name: ViewName, record: LabelledRecord, *, share: float, seed: int, copy: int) -> Fields:
    rng = rewriting.noise_rng(seed, name, copy, record.fields)
    return tuple(_NOISE[name](text, rng, share=share) for text in record.fields)


def _reorder(order: Sequence[int], record: LabelledRecord) -> Fields:
    return tuple(record.fields[number] for number in order)


Picture: TypeAlias = NDArray[np.uint8]
PictureChange: TypeAlias = Callable[[Picture, int], Picture]
"""A picture and the number of its row to the picture that is read instead."""


@dataclass(frozen=True)
class PictureView:
    """A way to look at a picture once more."""

    name: str
    change: PictureChange

    def picture(self, picture_HW3: Picture, row: int) -> Picture:
        """The picture of a row in this view, of the same size. Raises ConfigError: a user's function returns no such
        picture; the message names the row."""
        return self.change(picture_HW3, row)

    def rows(self, rows: LabelledSet, reader: RowReader) -> LabelledSet:
        assert isinstance(rows.inputs, PictureRows)
        return replace(rows, inputs=rows.inputs.seen(self.picture))

    def why_useless(self, rows: LabelledSet, changed: int) -> str:
        return f"{'no other picture' if changed else 'no picture'} looks different in it"

    def outputs(self, outputs_NC: Floats) -> Floats:
        """Outputs (or values) for rows in this view as those for the original rows: they are the same."""
        return outputs_NC


def picture_views(config: TtaConfig, classes: ClassesConfig, *, example: Picture) -> list[PictureView]:
    """Make the views of pictures that `config` names. Raises ConfigError: a view does not fit the rows, or the user's
    file is wrong. `example`: the picture of row 0; a user's function must return as many views of every picture as of
    this one."""
    if reason := config.refusal(classes, rows="image"):
        raise ConfigError(reason)
    require_used(config)
    return [view for name in config.views for view in _named_picture_views(name, config, example)]


def _named_picture_views(name: ViewName, config: TtaConfig, example: Picture) -> Iterator[PictureView]:
    if name == "flip":
        yield PictureView("flip", partial(_symmetry, 0, True))
    elif name == "eight":
        for flips, turns in ((False, 1), (False, 2), (False, 3), (True, 0), (True, 1), (True, 2), (True, 3)):
            words = ["flip"] * flips + [f"turn {90 * turns}"] * bool(turns)
            yield PictureView(" ".join(words), partial(_symmetry, turns, flips))
    elif name == "five_crops":
        places = {"top left": (0, 0), "top right": (0, 2), "bottom left": (2, 0), "bottom right": (2, 2)}
        for place, (down, right) in {**places, "centre": (1, 1)}.items():
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
        views = _UserPictures(config.function, example)
        for number in range(views.count):
            yield PictureView(f"user {number + 1}", partial(views.view, number))


def _symmetry(turns: int, flips: bool, picture_HW3: Picture, row: int) -> Picture:
    """Mirror left and right if `flips`, then turn counter-clockwise by quarters; resized if not square."""
    flipped_HW3 = picture_HW3[:, ::-1] if flips else picture_HW3
    turned = np.ascontiguousarray(np.rot90(flipped_HW3, turns))
    return augmentation.resized_to(turned, (picture_HW3.shape[0], picture_HW3.shape[1]))


def _crop(share: float, down: int, right: int, picture_HW3: Picture, row: int) -> Picture:
    """A crop of a share of each side at full size; `down` and `right`: 0 at the first edge, 1 in the middle, 2 at the
    last edge. The middle is that of ttach, also where what is left over is odd."""
    height, width = picture_HW3.shape[:2]
    crop_h, crop_w = max(1, round(height * share)), max(1, round(width * share))
    top = (0, height // 2 - crop_h // 2, height - crop_h)[down]
    left = (0, width // 2 - crop_w // 2, width - crop_w)[right]
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

    def __init__(self, path: Path, example: Picture) -> None:
        self._path = path
        self._function = plugins.function(path, "views", "def views(picture: ndarray) -> list[ndarray]", key=KEY)
        views = self._called(example, 0)
        if not views:
            raise self._error(0, "returned no view. Return a list of one or more pictures")
        if any((first != second).any() for first, second in zip(views, self._called(example, 0), strict=True)):
            raise self._error(0, "returned other views when called again. Derive randomness from the picture alone")
        self.count = len(views)

    def view(self, number: int, picture_HW3: Picture, row: int) -> Picture:
        """One of the views of a picture."""
        views = self._called(picture_HW3, row)
        if len(views) != self.count:
            raise self._error(
                row,
                f"returned {len(views)} views, but {self.count} for row 0. Return equally many for every picture; the "
                "picture itself may be one",
            )
        return views[number]

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


@dataclass(frozen=True)
class SoundView:
    """A way to hear a recording once more."""

    name: str
    change: SoundChange

    def rows(self, rows: LabelledSet, reader: RowReader) -> LabelledSet:
        assert isinstance(rows.inputs, SoundRows)
        return replace(rows, inputs=rows.inputs.seen(self.change))

    def why_useless(self, rows: LabelledSet, changed: int) -> str:
        return f"{'no other recording' if changed else 'no recording'} sounds different in it"

    def outputs(self, outputs_NC: Floats) -> Floats:
        """Outputs (or values) for rows in this view as those for the original rows: they are the same."""
        return outputs_NC


def sound_views(config: TtaConfig, classes: ClassesConfig, format: SoundFormat) -> list[SoundView]:
    """Make the views of recordings that `config` names. Raises ConfigError: a view does not fit the rows."""
    if reason := config.refusal(classes, rows="audio"):
        raise ConfigError(reason)
    require_used(config)
    views = []
    for seconds in config.delays if "delays" in config.views else ():
        change = partial(sound_augmentation.shifted, format=format, seconds=seconds)
        views.append(SoundView(f"delay {seconds:g} s", change))
    for factor in config.speeds if "speeds" in config.views else ():
        views.append(SoundView(f"speed {factor:g}", partial(sound_augmentation.at_speed, format=format, factor=factor)))
    return views


SAMPLED = 500  # pictures or recordings that are looked at to see whether a view changes any


class RowView(Protocol):
    """Another look at the same rows."""

    @property
    def name(self) -> str:
        """Name of the view, as the report shows it."""

    def rows(self, rows: LabelledSet, reader: RowReader) -> LabelledSet:
        """The same rows in this view."""

    def outputs(self, outputs_NC: Floats) -> Floats:
        """Map outputs (or values) for rows in this view to outputs for the original rows."""

    def why_useless(self, rows: LabelledSet, changed: int) -> str:
        """Why this view changes so few rows."""


def row_views(config: RunConfig, labels: Labels, rows: LabelledSet) -> Sequence[RowView]:
    """Make the views that `tta.views` names. Raises ConfigError: a view does not fit the rows or their labels, or the
    user's file is wrong. `rows`: a user's function must return as many views of every row as of the first one."""
    if isinstance(rows.inputs, PictureRows):
        return picture_views(config.tta, config.classes, example=rows.inputs.picture(0))
    if isinstance(rows.inputs, SoundRows):
        return sound_views(config.tta, config.classes, rows.inputs.format)
    return text_views(config.tta, config.classes, labels, seed=config.seed, example=rows.records[0])


def useful_views(views: Sequence[RowView], rows: LabelledSet, reader: RowReader) -> tuple[list[RowView], list[str]]:
    """Select the views that change at least `MIN_CHANGED_SHARE` of the rows as the model reads them. Raises DataError:
    no view does.

    Returns:
        The views, and a sentence about each one that was left out.
    """
    if isinstance(rows.inputs, PictureRows | SoundRows):
        rows = rows.subset(np.arange(0, len(rows), max(1, len(rows) // SAMPLED)))
    useless, reasons = [], []
    for view in views:
        count = int(rows.inputs.differ(view.rows(rows, reader).inputs).sum())
        if count < max(1, MIN_CHANGED_SHARE * len(rows)):
            useless.append(view.name)
            changes = f"view {view.name} changes {count or 'none'} of the {len(rows)} rows"
            reasons.append(f"{changes}: {view.why_useless(rows, count)}")
    if views and len(useless) == len(views):
        raise DataError(
            f"{rows.source}: {'; '.join(reasons)}. A view must change {MIN_CHANGED_SHARE:.0%} of the rows or more: "
            f"leave {', '.join(useless)} out of tta.views."
        )
    return [view for view in views if view.name not in useless], [f"tta: {reason}. Left out." for reason in reasons]
