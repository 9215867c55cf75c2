"""A sheet of pictures for a person: a row for each picture, a column for each state of it.

Legend: H, W, 3 channels RGB of a picture; it may be grey (H, W).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

CELL = 192
"""Pixels of the square that a picture is fitted into."""
_GAP = 10
_HEADING, _CAPTION = 15, 12
_INK, _FAINT, _PAPER = (30, 30, 30), (105, 105, 105), (255, 255, 255)


def contact_sheet(
    rows: Sequence[tuple[str, Sequence[tuple[str, NDArray[np.uint8]]]]], *, note: str = ""
) -> Image.Image:
    """Draw titled rows of captioned pictures.

    Small pictures are enlarged by whole factors without smoothing, so that their pixels can be seen.

    Args:
        rows: Of each picture a title, such as its file and label, and its states: a caption, such as the step that led
            to it, and the pixels, which may have another size than those of its neighbours.
        note: A line below them.

    Raises:
        ValueError: There is nothing to draw.
    """
    columns = max((len(cells) for _, cells in rows), default=0)
    if not columns:
        raise ValueError("no picture to draw")
    line = _HEADING + _CAPTION + CELL + 3 * _GAP
    width = max(columns * (CELL + _GAP) + _GAP, 360)
    bottom = len(rows) * line + _GAP
    sheet = Image.new("RGB", (width, bottom + (_HEADING + _GAP if note else 0)), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, (title, cells) in enumerate(rows):
        top = _GAP + number * line
        pen.text((_GAP, top), shortened(title, _HEADING, width - 2 * _GAP), fill=_INK, font=_font(_HEADING))
        for column, (caption, picture) in enumerate(cells):
            left = _GAP + column * (CELL + _GAP)
            text_top = top + _HEADING + _GAP // 2
            pen.text((left, text_top), shortened(caption, _CAPTION, CELL), fill=_FAINT, font=_font(_CAPTION))
            sheet.paste(_fitted(picture), (left, text_top + _CAPTION + _GAP // 2))
    if note:
        pen.text((_GAP, bottom), shortened(note, _HEADING, width - 2 * _GAP), fill=_INK, font=_font(_HEADING))
    return sheet


def shortened(text: str, height: int, width: int) -> str:
    """`text` on one line, with its middle left out where it is wider than so many pixels."""
    text = " ".join(text.split())
    font = _font(height)
    if font.getlength(text) <= width:
        return text
    for kept in range(len(text) - 1, 1, -1):
        short = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
        if font.getlength(short) <= width:
            return short
    return "…"


def _fitted(picture: NDArray[np.uint8]) -> Image.Image:
    """The picture as large as the cell allows."""
    image = Image.fromarray(picture).convert("RGB")
    factor = CELL / max(image.size)
    if factor >= 1:
        whole = int(factor)
        return image.resize((image.width * whole, image.height * whole), Image.Resampling.NEAREST)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image.resize(size, Image.Resampling.LANCZOS)


@cache
def _font(height: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib and has more alphabets than Pillow's own font."""
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), height)
