"""Every picture stands on the sheet, in its order, and text stays inside its cell."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from workbench.data.images.picture_checks import CELL, contact_sheet, shortened

COLOURS = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200)]


def flat(colour: tuple[int, ...], size: tuple[int, int] = (64, 64)) -> NDArray[np.uint8]:
    return np.full((*size, 3), colour, dtype=np.uint8)


def test_pictures_stand_in_rows_and_columns() -> None:
    first, second = [("raw", flat(each)) for each in COLOURS[:3]], [("raw", flat(each)) for each in COLOURS[3:]]
    sheet = np.asarray(contact_sheet([("one", first), ("two", second)]))
    places = [np.argwhere((sheet == colour).all(2)) for colour in COLOURS]
    assert all(len(place) == 192**2 for place in places), "enlarged by the largest whole factor"
    tops, lefts = np.array([place.min(0) for place in places]).T
    assert tops[0] == tops[1] == tops[2] < tops[3] == tops[4]
    assert lefts[0] < lefts[1] < lefts[2] and lefts[3] == lefts[0] and lefts[4] == lefts[1]


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (700, 500), (192, 192)])
def test_pictures_of_any_size_fit_into_their_cell(size: tuple[int, int]) -> None:
    sheet = np.asarray(contact_sheet([("", [("", flat((200, 0, 0), size)), ("", flat((0, 200, 0)))])]))
    rows, columns = np.nonzero((sheet == (200, 0, 0)).all(2))
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    assert max(height, width) <= CELL and len(rows) == height * width
    assert max(height, width) > CELL / 2


def test_a_note_stands_below_and_changes_nothing_above() -> None:
    rows = [("one", [("raw", flat(COLOURS[0]))])]
    sheet, noted = contact_sheet(rows), contact_sheet(rows, note="12 of 28 classes are not shown: " + "class, " * 99)
    assert noted.crop((0, 0, *sheet.size)).tobytes() == sheet.tobytes()
    below = np.asarray(noted)[sheet.height :]
    assert noted.width == sheet.width and (below < 100).any() and (below[-1] == 255).all()


def test_grey_pictures_and_labels_in_other_alphabets() -> None:
    grey = np.full((8, 8), 90, dtype=np.uint8)
    sheet = np.asarray(contact_sheet([("Zürich\nŁódź", [("gráu", grey)])]))
    rows, columns = np.nonzero((sheet == 90).all(2))
    assert np.bincount(rows).max() == np.bincount(columns).max() == CELL


def test_long_titles_lose_their_middle() -> None:
    assert shortened("short  text\n", 12, 400) == "short text"
    short = shortened("folder/" * 30 + "picture.jpg", 12, 200)
    assert short.startswith("folder/") and short.endswith("picture.jpg") and "…" in short


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no picture"):
        contact_sheet([])
