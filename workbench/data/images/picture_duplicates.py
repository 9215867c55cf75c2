"""Exact and near-duplicates of pictures: copies that were resized, compressed, moved a little or made brighter.

Legend: N pictures, U distinct ones, P pairs, K candidates of a picture, S the side at which details are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import TypeAlias

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.folds.similarity import Ints, components
from workbench.data.images.decoding import Pixels

Floats: TypeAlias = NDArray[np.float32]

SIDE, MARGIN = 64, 6
"""Side, in pixels, at which details are compared, and by how many of them a copy may be moved."""
FINE, COARSE = 1.0, 4.0
"""Standard deviations of two Gaussian blurs, in pixels of SIDE, whose difference are the details: shapes that light
does not change and compression keeps (scripts/bench/picture_duplicates.py)."""
COARSE_SIDE, FREQUENCIES, CANDIDATES, LEAST = 32, 8, 5, 0.3
"""Side of the pictures whose spectra propose candidates, frequencies along each axis, candidates of a picture, and the
least similarity of two spectra."""
BLOCK = 2048
"""Pictures whose spectra are compared with all others at a time."""
FLAT = 1.0
"""Standard deviation of details, in levels of 255, below which a picture has none to be known by."""


def find(pictures: Iterable[Pixels], *, threshold: float) -> DuplicateClusters:
    """Find pictures that are equal, or whose details correlate by `threshold` at the best shift.

    The magnitudes of a picture's low frequencies, which a shift does not change, propose CANDIDATES others for each; a
    proposed pair is then measured: normalised cross-correlation of details at every shift up to MARGIN pixels, refined
    below a pixel. The result does not depend on the order of the pictures, but for ties among candidates.

    Args:
        pictures: Arrays (H, W, 3), read once each.
        threshold: Correlation from which two pictures are near-duplicates, in (0, 1].
    """
    number: dict[bytes, int] = {}
    row_N: list[int] = []
    details: list[NDArray[np.float16]] = []
    spectra: list[Floats] = []
    for picture in pictures:
        digest = blake2b(picture.tobytes(), digest_size=12).digest()
        row_N.append(number.setdefault(digest, len(number)))
        if row_N[-1] == len(details):
            grey = _grey(picture)
            details.append(_details(grey))
            spectra.append(_spectrum(grey))
    candidates_P2 = _candidates(np.stack(spectra)) if threshold < 1 else np.zeros((0, 2), dtype=np.int64)
    similarity_P = _measured(details, candidates_P2)
    near_P = similarity_P >= threshold
    pairs_P2, similarity_P = candidates_P2[near_P], similarity_P[near_P]
    cluster_U = components(len(details), pairs_P2)
    similarity_U = np.ones(len(details))
    np.minimum.at(similarity_U, cluster_U[pairs_P2[:, 0]], similarity_P)
    return DuplicateClusters(
        distinct_N=np.asarray(row_N, dtype=np.int64),
        pairs_P2=pairs_P2,
        cluster_U=cluster_U,
        similarity_U=similarity_U[cluster_U],
        name_U=tuple(digest.hex() for digest in number),
    )


def correlation(first: Pixels, second: Pixels) -> float:
    """How alike the details of two pictures are at the best shift, from -1 to 1; 0 where one has none."""
    return _correlation(*(_details(_grey(each)) for each in (first, second)))


def _grey(picture: Pixels) -> Pixels:
    return np.asarray(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), dtype=np.uint8)


def _details(grey: Pixels) -> NDArray[np.float16]:
    """Details (S, S) of a grey picture."""
    small = cv2.resize(grey, (SIDE, SIDE), interpolation=_interpolation(grey, SIDE)).astype(np.float32)
    band = cv2.GaussianBlur(small, (0, 0), FINE) - cv2.GaussianBlur(small, (0, 0), COARSE)
    return np.asarray(band, dtype=np.float16)


def _spectrum(grey: Pixels) -> Floats:
    """Logarithms of the magnitudes of low frequencies, without a picture's brightness."""
    small = cv2.resize(grey, (COARSE_SIDE, COARSE_SIDE), interpolation=_interpolation(grey, COARSE_SIDE))
    window = np.hanning(COARSE_SIDE + 2)[1:-1]
    waves = np.fft.rfft2((small - small.mean()) * window[:, None] * window)
    low = np.concatenate([waves[: FREQUENCIES + 1, : FREQUENCIES + 1], waves[-FREQUENCIES:, : FREQUENCIES + 1]])
    return np.asarray(np.log1p(np.abs(low)).ravel(), dtype=np.float32)


def _interpolation(grey: Pixels, side: int) -> int:
    return cv2.INTER_AREA if min(grey.shape) >= side else cv2.INTER_CUBIC


def _candidates(spectra_UF: Floats) -> Ints:
    """Pairs (P, 2) of pictures, the smaller number first, of which one has the other among its nearest."""
    centred = torch.from_numpy(spectra_UF - spectra_UF.mean(0))
    unit_UF = torch.nn.functional.normalize(centred, dim=1)
    count = min(CANDIDATES + 1, len(unit_UF))  # the nearest of all is the picture itself
    found = []
    for start in range(0, len(unit_UF), BLOCK):
        similarity, nearest = (unit_UF[start : start + BLOCK] @ unit_UF.T).topk(count, dim=1)
        row, rank = torch.nonzero(similarity > LEAST, as_tuple=True)
        found.append(torch.stack([row + start, nearest[row, rank]], dim=1).sort(dim=1).values)
    pairs_P2 = np.unique(torch.cat(found).numpy(), axis=0)
    return np.asarray(pairs_P2[pairs_P2[:, 0] != pairs_P2[:, 1]], dtype=np.int64)


def _measured(details: Sequence[NDArray[np.float16]], pairs_P2: Ints) -> NDArray[np.float64]:
    """Correlation of each pair, by all cores; OpenCV leaves the interpreter to others meanwhile."""
    chunks = np.array_split(pairs_P2, max(1, len(pairs_P2) // 256))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return np.asarray([each for part in threads.map(partial(_chunk, details), chunks) for each in part])


def _chunk(details: Sequence[NDArray[np.float16]], pairs_P2: Ints) -> list[float]:
    return [_correlation(details[first], details[second]) for first, second in pairs_P2.tolist()]


def _correlation(first: NDArray[np.float16], second: NDArray[np.float16]) -> float:
    whole, inner = second.astype(np.float32), first.astype(np.float32)[MARGIN:-MARGIN, MARGIN:-MARGIN]
    if inner.std() < FLAT or whole.std() < FLAT:
        return 0.0
    by_shift = cv2.matchTemplate(whole, inner, cv2.TM_CCOEFF_NORMED)
    _, best, _, (right, down) = cv2.minMaxLoc(by_shift)
    centre = [shift + offset + (inner.shape[0] - 1) / 2 for shift, offset in _peak(by_shift, right, down)]
    moved = cv2.getRectSubPix(whole, inner.shape[::-1], centre)
    return max(best, float(np.corrcoef(inner.ravel(), moved.ravel())[0, 1]))


def _peak(by_shift: NDArray[np.generic], right: int, down: int) -> Iterator[tuple[int, float]]:
    """The best whole shift along each axis, and how far from it a parabola through its neighbours has its top."""
    for place, line in ((right, by_shift[down]), (down, by_shift[:, right])):
        before, at, after = (float(line[each]) for each in np.clip([place - 1, place, place + 1], 0, len(line) - 1))
        bend = before - 2 * at + after
        yield place, 0.5 * (before - after) / bend if bend < 0 and 0 < place < len(line) - 1 else 0.0
