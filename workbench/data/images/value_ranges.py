"""Ranges of values of pictures of more than 8 bits, decided once over all training pictures: `image.depth`.

Pictures that were each scaled by their own brightest value would lose how bright they are beside one another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import PIL

from workbench.data.images import threads
from workbench.data.images.deep_pictures import DEPTHS, ValueRanges, extremes
from workbench.data.images.picture_files import PictureFile
from workbench.errors import DataError
from workbench.runs import files as whole_files

_VERSION = "1"
"""Raise it when what is kept changes."""
_Span = tuple[float, float]
_KINDS = ("integers", "floats")


def measure(
    files: Sequence[PictureFile], *, max_pixels: int, depth: int | Literal["auto"], folder: Path
) -> ValueRanges:
    """The values that become 0 and 255 in all pictures of a run.

    Args:
        files: Of data.train, held-out rows too: how far values go says nothing of a label. Unreadable ones, and those
            of 8 bits, do not count.
        depth: As `image.depth`.
        folder: Where what was found is kept, so that later runs decode nothing.
    """
    least_and_greatest = _kept(files, max_pixels, folder) if files else {}
    whole, real = (least_and_greatest.get(kind) for kind in _KINDS)
    if depth != "auto":
        whole = (0.0, 2.0**depth - 1)
    elif whole is not None and whole[0] >= 0 and whole[1] < 2 ** DEPTHS[-1]:
        whole = (0.0, 2.0 ** next(bits for bits in DEPTHS if whole[1] < 2**bits) - 1)
    return ValueRanges(whole, (0.0, 1.0) if real is not None and real[0] >= 0 and real[1] <= 1 else real)


def in_words(ranges: ValueRanges, depth: int | Literal["auto"]) -> str:
    """The ranges, for a person who checks a recipe; empty where no picture has more than 8 bits."""
    decided = "as the training pictures need" if depth == "auto" else f"image.depth={depth}"
    phrases = []
    if ranges.integers is not None:
        low, high = ranges.integers
        bits = {2.0**bits - 1: f"{bits} bits, " for bits in DEPTHS}.get(high, "") if low == 0 else ""
        phrases.append(f"{bits}{low:,.0f} to {high:,.0f} become 0 to 255, {decided}")
    if ranges.floats is not None:
        phrases.append("floats of {:.4g} to {:.4g} become 0 to 255".format(*ranges.floats))
    return "; ".join(phrases)


def _kept(files: Sequence[PictureFile], max_pixels: int, folder: Path) -> dict[str, _Span]:
    """Least and greatest value of each kind of numbers over all files."""
    name = hashlib.sha256(json.dumps([_VERSION, PIL.__version__, max_pixels]).encode())
    for file in files:
        name.update(file.digest_or_fault())
    path = folder / f"{name.hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError, AttributeError):  # none yet, or a damaged one
        return {kind: (float(low), float(high)) for kind, (low, high) in json.loads(path.read_text()).items()}
    spans: dict[str, _Span] = {}
    for each in threads.each(lambda file: _extremes(file, max_pixels), files, size=threads.LARGE):
        if each is not None:
            kind, (low, high) = each
            known = spans.get(kind, (low, high))
            spans[kind] = (min(low, known[0]), max(high, known[1]))
    whole_files.write_json(path, spans)
    return spans


def _extremes(file: PictureFile, max_pixels: int) -> tuple[str, _Span] | None:
    try:
        values = file.deep_values(max_pixels=max_pixels)
        return None if values is None else (_KINDS[values.dtype.kind == "f"], extremes(values))
    except (DataError, ValueError):
        return None
