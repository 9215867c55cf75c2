"""Exact and near-duplicates of pictures: copies that were resized, compressed, moved a little or made brighter.

Legend: N pictures, U distinct ones, P pairs, K candidates of a picture, S the side at which details are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from workbench.data.folds.duplicates import DuplicateClusters, Ints, components
from workbench.data.images.picture_files import Pixels

Floats: TypeAlias = NDArray[np.float32]

SIDE, MARGIN = 64, 6  # side, in pixels, at which details are compared, and by how many of them a copy may be moved
FINE, COARSE = 1.0, 4.0
"""Standard deviations of two Gaussian blurs, in pixels of SIDE, whose difference are the details: shapes that light
does not change and compression keeps (scripts/bench/picture_duplicates.py)."""
COARSE_SIDE, FREQUENCIES, CANDIDATES, LEAST = 32, 8, 5, 0.3
"""Side of the pictures whose spectra propose candidates, frequencies along each axis, candidates of a picture, and the
least similarity of two spectra."""
BLOCK = 2048  # pictures whose spectra are compared with all others at a time
FLAT = 1.0  # standard deviation of details, in levels of 255, below which a picture has none to be known by
SHAPES, STRICTNESS = 2.5, 32
"""Standard deviation of the blur, in pixels of SIDE, that leaves shapes, and how many times as much a difference of
shapes counts as one of details: resizing and compression change details of small pictures and keep shapes, while
different trousers are alike in details (scripts/bench/picture_duplicates.py)."""
CLIPPED = 250  # level from which a pixel may have been brighter before the picture was brightened


class _Look(NamedTuple):
    """A picture for comparisons."""

    small_SS: Pixels  # grey
    details_SS: NDArray[np.float16]


def find(pictures: Iterable[Pixels], *, threshold: float) -> DuplicateClusters:
    """Find pictures that are equal, or whose similarity is `threshold` at the best shift.

    The magnitudes of a picture's low frequencies, which a shift does not change, propose CANDIDATES others for each. A
    proposed pair is then measured: normalised cross-correlation of details at every shift up to MARGIN pixels, refined
    below a pixel, and there the correlation of shapes, once the darker picture is as bright as the other. The
    similarity is 1 - max(1 - details, STRICTNESS (1 - shapes)) / 2. The result does not depend on the order of the
    pictures, but for ties among candidates.

    Args:
        pictures: Arrays (H, W, 3), read once each.
        threshold: Similarity from which two pictures are near-duplicates, in (0, 1].
    """
    number: dict[bytes, int] = {}
    row_N: list[int] = []
    looks: list[_Look] = []
    spectra: list[Floats] = []
    for picture in pictures:
        digest = blake2b(picture.tobytes(), digest_size=12).digest()
        row_N.append(number.setdefault(digest, len(number)))
        if row_N[-1] == len(looks):
            grey = _grey(picture)
            looks.append(_look(grey))
            small = cv2.resize(grey, (COARSE_SIDE, COARSE_SIDE), interpolation=_interpolation(grey, COARSE_SIDE))
            window = np.hanning(COARSE_SIDE + 2)[1:-1]
            waves = np.fft.rfft2((small - small.mean()) * window[:, None] * window)
            low = np.concatenate([waves[: FREQUENCIES + 1, : FREQUENCIES + 1], waves[-FREQUENCIES:, : FREQUENCIES + 1]])
            spectra.append(np.asarray(np.log1p(np.abs(low)).ravel(), dtype=np.float32))
    candidates_P2 = _candidates(np.stack(spectra)) if threshold < 1 else np.zeros((0, 2), dtype=np.int64)
    similarity_P = _measured(looks, candidates_P2, threshold)
    near_P = similarity_P >= threshold
    pairs_P2, similarity_P = candidates_P2[near_P], similarity_P[near_P]
    cluster_U = components(len(looks), pairs_P2)
    similarity_U = np.ones(len(looks))
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
    return _aligned(*(_look(_grey(each)).details_SS for each in (first, second))).correlation


def similarity(first: Pixels, second: Pixels) -> float:
    """How alike two pictures are, by details and shapes at the best shift, at most 1; see `find`."""
    return _similarity(*(_look(_grey(each)) for each in (first, second)), least=-np.inf)


def _grey(picture: Pixels) -> Pixels:
    return np.asarray(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), dtype=np.uint8)


def _look(grey: Pixels) -> _Look:
    small = np.asarray(cv2.resize(grey, (SIDE, SIDE), interpolation=_interpolation(grey, SIDE)), dtype=np.uint8)
    exact = small.astype(np.float32)
    band = cv2.GaussianBlur(exact, (0, 0), FINE) - cv2.GaussianBlur(exact, (0, 0), COARSE)
    return _Look(small, np.asarray(band, dtype=np.float16))


def _interpolation(grey: Pixels, side: int) -> int:
    return cv2.INTER_AREA if min(grey.shape) >= side else cv2.INTER_CUBIC


def _candidates(spectra_UF: Floats) -> Ints:
    """Pairs (P, 2) of pictures, the smaller number first, where one is among the other's nearest."""
    centred = torch.from_numpy(spectra_UF - spectra_UF.mean(0))
    unit_UF = torch.nn.functional.normalize(centred, dim=1)
    count = min(CANDIDATES + 1, len(unit_UF))  # the nearest of all is the picture itself
    pairs = []
    for start in range(0, len(unit_UF), BLOCK):
        similarity, nearest = (unit_UF[start : start + BLOCK] @ unit_UF.T).topk(count, dim=1)
        row, rank = torch.nonzero(similarity > LEAST, as_tuple=True)
        pairs.append(torch.stack([row + start, nearest[row, rank]], dim=1).sort(dim=1).values)
    pairs_P2 = np.unique(torch.cat(pairs).numpy(), axis=0)
    return np.asarray(pairs_P2[pairs_P2[:, 0] != pairs_P2[:, 1]], dtype=np.int64)


def _measured(looks: Sequence[_Look], pairs_P2: Ints, least: float) -> NDArray[np.float64]:
    """Similarity of each pair, by all cores; OpenCV leaves the interpreter to others meanwhile."""
    chunks = np.array_split(pairs_P2, max(1, len(pairs_P2) // 256))

    def measured(chunk_P2: Ints) -> list[float]:
        return [_similarity(looks[first], looks[second], least=least) for first, second in chunk_P2.tolist()]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return np.asarray([each for part in threads.map(measured, chunks) for each in part])


def _similarity(first: _Look, second: _Look, *, least: float) -> float:
    """Similarity of two pictures; what is below `least` by details alone is not looked at further."""
    best = _aligned(first.details_SS, second.details_SS)
    score = 1 - (1 - best.correlation) / 2
    if score < least:
        return score
    return min(score, 1 - STRICTNESS / 2 * (1 - _same_shapes(first.small_SS, second.small_SS, best.centre)))


class _Alignment(NamedTuple):
    correlation: float  # 0 where one of the pictures has no details
    centre: tuple[float, float]
    """Point of the second picture that lies on the first one's centre, in pixels from the left and from the top."""


def _aligned(first: NDArray[np.float16], second: NDArray[np.float16]) -> _Alignment:
    whole, inner = second.astype(np.float32), first.astype(np.float32)[MARGIN:-MARGIN, MARGIN:-MARGIN]
    if inner.std() < FLAT or whole.std() < FLAT:
        return _Alignment(0.0, ((SIDE - 1) / 2,) * 2)
    by_shift = cv2.matchTemplate(whole, inner, cv2.TM_CCOEFF_NORMED)
    _, best, _, (right, down) = cv2.minMaxLoc(by_shift)
    half = (inner.shape[0] - 1) / 2
    centre = (half + _peak(by_shift[down], right), half + _peak(by_shift[:, right], down))
    moved = cv2.getRectSubPix(whole, inner.shape[::-1], centre)
    return _Alignment(max(best, float(np.corrcoef(inner.ravel(), moved.ravel())[0, 1])), centre)


def _peak(line: NDArray[np.generic], place: int) -> float:
    """The top of a parabola through the best whole shift along an axis and its neighbours."""
    before, at, after = (float(line[each]) for each in np.clip([place - 1, place, place + 1], 0, len(line) - 1))
    bend = before - 2 * at + after
    return place + (0.5 * (before - after) / bend if bend < 0 and 0 < place < len(line) - 1 else 0.0)


def _same_shapes(first_SS: Pixels, second_SS: Pixels, centre: tuple[float, float]) -> float:
    """Correlation of two blurred pictures at a shift; brightening, which clips what was bright, changes nothing."""
    inner = first_SS.astype(np.float32)[MARGIN:-MARGIN, MARGIN:-MARGIN]
    moved = cv2.getRectSubPix(second_SS.astype(np.float32), inner.shape[::-1], centre)
    dark, bright = (inner, moved) if inner.mean() < moved.mean() else (moved, inner)
    exact = bright < CLIPPED
    one, other = (dark[exact], bright[exact]) if exact.any() else (dark, bright)
    gain = float(np.mean((one - one.mean()) * (other - other.mean())) / max(one.var(), 1e-6))
    brightened = np.clip(gain * (dark - one.mean()) + other.mean(), 0, 255)
    one, other = (cv2.GaussianBlur(each, (0, 0), SHAPES).ravel() for each in (brightened, bright))
    return float(np.corrcoef(one, other)[0, 1]) if min(one.std(), other.std()) > 0 else 0.0
