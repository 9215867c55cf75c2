"""Exact and near-duplicates of pictures: copies that were saved again, resized, moved, brightened, flipped or cropped.

Legend: N pictures, U distinct ones, Q those that are compared with all, P pairs, K candidates of a picture, V forms of
a picture, F frequencies of its spectrum, D components of it, S the side at which details are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple, TypeAlias

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.data.folds.duplicates import DuplicateClusters, Ints, components
from workbench.data.images.picture_files import Pixels

Floats: TypeAlias = NDArray[np.float32]

SIDE, MARGIN = 64, 6  # side, in pixels, at which details are compared, and by how many of them a copy may be moved
FINE, COARSE = 1.0, 4.0
"""Standard deviations of two Gaussian blurs, in pixels of SIDE, whose difference are the details: shapes that light
does not change and compression keeps (scripts/bench/picture_duplicates.py)."""
COARSE_SIDE, FREQUENCIES, COMPONENTS, LEAST = 32, 8, 64, 0.6
"""Side of the pictures whose spectra propose candidates, frequencies along each axis, principal components of their
spectra, and the least similarity of two spectra."""
WHOLE, CUT = 4, 3
"""Candidates of a picture as copies of the whole, and in each direction as copies of a part."""
WINDOW = 0.85
"""Side of four windows in the corners of a picture, as a share of its own, which stand for crops of it: copies that
show from 0.77 of each side are found."""
QUERIES, BLOCK = 128, 4096  # pictures whose spectra are compared at a time, and with how many
FLAT = 1.0  # standard deviation of details, in levels of 255, below which a picture has none to be known by
SHAPES, STRICTNESS = 2.5, 32
"""Standard deviation of the blur, in pixels of SIDE, that leaves shapes, and how many times as much a difference of
shapes counts as one of details: resizing and compression change details of small pictures and keep shapes, while
different trousers are alike in details (scripts/bench/picture_duplicates.py)."""
CLIPPED = 250  # level from which a pixel may have been brighter before the picture was brightened
SCALES, PROMISING = (0.94, 0.86, 0.78), 0.6
"""Sizes at which a picture is looked for inside another, and the least correlation there with which it is fitted."""
STEPS = cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 30, 1e-4
FREEDOM = 2
"""How many times as much a difference counts where a picture was turned or fitted first: unlike pictures have more ways
to be alike."""
DIMMED, FLATTENED = 4.0, 1.07
"""Difference of mean levels, and ratio of contrasts, from which a copy was brightened or darkened."""
CROPPED = 0.97  # share of a side below which a copy shows a part


class _Look(NamedTuple):
    """A picture for comparisons."""

    small_SS: Pixels  # grey
    half_HH: NDArray[np.float16]  # details, at half of SIDE

    def turned(self, turn: int) -> _Look:
        """One of the eight symmetries of a square, of which 0 changes nothing."""
        return _Look(*(np.ascontiguousarray(_turned(each, turn)) for each in self))


class _Copy(NamedTuple):
    similarity: float
    kind: str = ""


def find(pictures: Iterable[Pixels], *, threshold: float, part_N: Ints | None = None) -> DuplicateClusters:
    """Find pictures that are equal, or whose similarity is `threshold` at the best fit.

    The magnitudes of a picture's low frequencies, which a shift does not change and a flip reorders, propose others for
    each: WHOLE of them by whole pictures, CUT by the corners of either. A proposed pair is then measured: normalised
    cross-correlation of details at every shift up to MARGIN pixels, refined below a pixel, and there the correlation of
    shapes, once the darker picture is as bright as the other. A part is first fitted onto the whole by an affine map
    (Evangelidis and Psarakis 2008). The similarity is 1 - max(1 - details, STRICTNESS (1 - shapes)) / 2. The result
    does not depend on the order of the pictures, but for ties among candidates.

    Args:
        pictures: Arrays (H, W, 3), read once each.
        threshold: Similarity from which two pictures are near-duplicates, in (0, 1].
        part_N: The part of a split that each is in, from 0: only copies in other parts than their own are looked for,
            of all parts but the first; None: among all.
    """
    number: dict[bytes, int] = {}
    row_N: list[int] = []
    looks: list[_Look] = []
    for picture in pictures:
        digest = blake2b(picture.tobytes(), digest_size=12).digest()
        row_N.append(number.setdefault(digest, len(number)))
        if row_N[-1] == len(looks):
            looks.append(_look(_grey(picture)))
    distinct_N = np.asarray(row_N, dtype=np.int64)
    part_U = np.full(len(looks), -1, dtype=np.int64)
    if part_N is not None:
        part_U[distinct_N[::-1]] = part_N[::-1]
    found = dict[tuple[int, int], _Copy]()
    if threshold < 1:
        for pair, copy in _measured(looks, _candidates(looks, part_U), threshold):
            if copy.similarity >= max(threshold, found.get(pair, copy).similarity):
                found[pair] = copy
    pairs = sorted(found)
    pairs_P2 = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    cluster_U = components(len(looks), pairs_P2)
    similarity_U = np.ones(len(looks))
    np.minimum.at(similarity_U, cluster_U[pairs_P2[:, 0]], [found[pair].similarity for pair in pairs])
    return DuplicateClusters(
        distinct_N=distinct_N,
        pairs_P2=pairs_P2,
        cluster_U=cluster_U,
        similarity_U=similarity_U[cluster_U],
        name_U=tuple(digest.hex() for digest in number),
        kind_P=tuple(found[pair].kind for pair in pairs),
    )


def correlation(first: Pixels, second: Pixels) -> float:
    """How alike the details of two pictures are at the best shift, from -1 to 1; 0 where one has none."""
    return _aligned(*(_details(_look(_grey(each)).small_SS) for each in (first, second))).correlation


def similarity(first: Pixels, second: Pixels) -> float:
    """How alike two pictures are, by details and shapes at the best shift, at most 1; see `find`."""
    return _similarity(*(_look(_grey(each)) for each in (first, second)), least=-np.inf)


def _grey(picture: Pixels) -> Pixels:
    return np.asarray(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), dtype=np.uint8)


def _look(grey: Pixels) -> _Look:
    small = grey if grey.shape == (SIDE, SIDE) else cv2.resize(grey, (SIDE, SIDE), interpolation=_interpolation(grey))
    small = np.asarray(small, dtype=np.uint8)
    half = cv2.resize(_details(small), (SIDE // 2, SIDE // 2), interpolation=cv2.INTER_AREA)
    return _Look(small, np.asarray(half, dtype=np.float16))


def _details(small_SS: Pixels) -> Floats:
    exact = small_SS.astype(np.float32)
    return np.asarray(cv2.GaussianBlur(exact, (0, 0), FINE) - cv2.GaussianBlur(exact, (0, 0), COARSE), dtype=np.float32)


def _interpolation(grey: Pixels) -> int:
    return cv2.INTER_AREA if min(grey.shape) >= SIDE else cv2.INTER_CUBIC


def _turned(picture: NDArray[np.generic], turn: int) -> NDArray[np.generic]:
    """Symmetries whose spectra are equal follow each other: as it is and upside down, mirrored, transposed, turned."""
    class_, half = divmod(turn, 2)
    if class_ in (2, 3):
        picture = picture.T
    if class_ in (1, 3):
        picture = picture[:, ::-1]
    return picture[::-1, ::-1] if half else picture


TURNS = ("", "turned", "flipped", "flipped", "flipped", "flipped", "turned", "turned")


def _spectra(looks: Sequence[_Look]) -> Tensor:
    """Log-magnitudes (U, V, F, F'), of the whole and of four windows, of frequencies -FREQUENCIES to FREQUENCIES down
    and 0 to FREQUENCIES across."""
    taper = np.hanning(COARSE_SIDE + 2)[1:-1].astype(np.float32)
    cut = round(WINDOW * SIDE)
    corners = [slice(0, cut), slice(SIDE - cut, SIDE)]
    parts = [(slice(None), slice(None)), *((down, across) for down in corners for across in corners)]
    blocks = []
    for start in range(0, len(looks), BLOCK):
        small = [
            cv2.resize(look.small_SS[part], (COARSE_SIDE, COARSE_SIDE), interpolation=cv2.INTER_AREA)
            for look in looks[start : start + BLOCK]
            for part in parts
        ]
        pixels = torch.from_numpy(np.stack(small)).float()
        waves = torch.fft.rfft2((pixels - pixels.mean((1, 2), keepdim=True)) * torch.from_numpy(np.outer(taper, taper)))
        low = torch.cat([waves[:, -FREQUENCIES:], waves[:, : FREQUENCIES + 1]], dim=1)[..., : FREQUENCIES + 1]
        blocks.append(low.abs().log1p().unflatten(0, (-1, len(parts))))
    return torch.cat(blocks)


def _symmetries(spectra: Tensor) -> Tensor:
    """Spectra (..., 4, F F') of a picture that is as it is, mirrored, transposed, and both."""
    mirrored = spectra.flip(-2)

    def transposed(one: Tensor) -> Tensor:
        down, up = one[..., FREQUENCIES:, :], one[..., : FREQUENCIES + 1, :].flip(-2)
        return torch.cat([up.mT.flip(-2)[..., :-1, :], down.mT], dim=-2)

    forms = [spectra, mirrored, transposed(spectra), transposed(spectra).flip(-2)]
    return torch.stack(forms, dim=-3).flatten(-2)


class _Candidate(NamedTuple):
    first: int
    second: int
    turn: int
    """The class of symmetries of the first that has the spectrum of the second."""
    cut: int
    """0: copies of the whole; 1: the first may be a part of the second; -1: the reverse."""


def _candidates(looks: Sequence[_Look], part_U: Ints) -> set[_Candidate]:
    """Pictures that are among the nearest of another, by the spectra of their wholes or windows."""
    blocks = _spectra(looks).split(BLOCK)
    flat = torch.cat([_symmetries(block[:, 0]).flatten(0, 1) for block in blocks])
    mean_F = flat.mean(0)
    _, basis_FF = torch.linalg.eigh((flat - mean_F).T @ (flat - mean_F))
    reduced = [(_symmetries(block) - mean_F) @ basis_FF[:, -COMPONENTS:] for block in blocks]
    unit_UVSD = torch.nn.functional.normalize(torch.cat(reduced), dim=-1)
    queries = np.flatnonzero(part_U != 0) if (part_U >= 0).any() else np.arange(len(looks))
    parts = torch.from_numpy(part_U)
    whole, windows = [0], list(range(1, unit_UVSD.shape[1]))
    kinds = [(whole, whole, WHOLE, 0), (windows, whole, CUT, -1), (whole, windows, CUT, 1)]
    if (part_U < 0).all():  # every picture is compared with every other, in both directions
        kinds = kinds[:2]
    return {
        candidate
        for forms, others, count, cut in kinds
        for candidate in _nearest(
            # A part may be mirrored, and not turned as well.
            unit_UVSD[:, forms][torch.from_numpy(queries), :, : 2 if cut else 4],
            unit_UVSD[:, others, 0],
            torch.from_numpy(queries),
            parts,
            count,
            cut,
        )
    }


def _nearest(
    own_QVSD: Tensor, other_UVD: Tensor, queries: Tensor, part_U: Tensor, count: int, cut: int
) -> Iterator[_Candidate]:
    """The `count` pictures that are nearest to each query by the best of its forms and symmetries and of theirs."""
    blocks = [block.transpose(0, 1).mT.contiguous() for block in other_UVD.split(BLOCK)]
    for own_BVSD, query_B in zip(own_QVSD.split(QUERIES), queries.split(QUERIES), strict=True):
        best, at, start = [], [], 0
        for block_VDU in blocks:
            near = own_BVSD.flatten(0, 2) @ block_VDU
            near = near.amax(0).unflatten(0, (len(query_B), -1)).amax(1)
            numbers = torch.arange(start, start + near.shape[1])
            same = (part_U[query_B, None] == part_U[numbers]) & (part_U[query_B, None] >= 0)
            near[same | (query_B[:, None] == numbers)] = -1
            top = near.topk(min(count, near.shape[1]), dim=1)
            best.append(top.values)
            at.append(top.indices + start)
            start += near.shape[1]
        top = torch.cat(best, dim=1).topk(min(count, start), dim=1)
        row, rank = torch.nonzero(top.values > LEAST, as_tuple=True)
        second_P = torch.cat(at, dim=1).gather(1, top.indices)[row, rank]
        likeness_PVSV = torch.einsum("pvsd,pxd->pvsx", own_BVSD[row], other_UVD[second_P])
        symmetry_P = likeness_PVSV.amax((1, 3)).argmax(1)
        for first, second, turn in zip(query_B[row].tolist(), second_P.tolist(), symmetry_P.tolist(), strict=True):
            # Each class of symmetries holds the inverse of each of its members.
            yield _Candidate(first, second, turn, cut) if first < second else _Candidate(second, first, turn, -cut)


def _measured(
    looks: Sequence[_Look], candidates: set[_Candidate], least: float
) -> Iterator[tuple[tuple[int, int], _Copy]]:
    """Similarity and kind of each candidate, by all cores; OpenCV leaves the interpreter to others meanwhile."""
    ordered = sorted(candidates)
    chunks = [ordered[start : start + 256] for start in range(0, len(ordered), 256)]

    def measured(chunk: list[_Candidate]) -> list[_Copy]:
        return [_copy(looks[each.first], looks[each.second], each.turn, each.cut, least) for each in chunk]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        copies = chain.from_iterable(threads.map(measured, chunks))
        for candidate, copy in zip(ordered, copies, strict=True):
            yield candidate[:2], copy


def _copy(first: _Look, second: _Look, symmetry: int, cut: int, least: float) -> _Copy:
    """The best fit of the first, by either symmetry that has its spectrum, onto the second."""
    best = _Copy(-1.0)
    for turn in (2 * symmetry, 2 * symmetry + 1):
        own = first.turned(turn)
        part, whole = (own, second) if cut >= 0 else (second, own)
        fitted = _fitted(part, whole) if cut else _placed(part, whole, 1.0).correlation >= PROMISING and (whole, 1.0)
        if not fitted:
            continue
        whole, shown = fitted
        score = _similarity(part, whole, least=least)
        if cut or turn:
            score = 1 - FREEDOM * (1 - score)
        if score >= max(least, best.similarity):
            best = _Copy(score, _kind(turn, shown, part, whole))
    return best


class _Placement(NamedTuple):
    correlation: float
    scale: float
    corner: tuple[int, int]
    """Left and top of the part in the whole, at half of SIDE."""


def _placed(part: _Look, whole: _Look, scale: float) -> _Placement:
    """Where the details of `part`, at a share of their size, are most like those of `whole`; of all but its edges where
    it is as large."""
    template, place = part.half_HH.astype(np.float32), whole.half_HH.astype(np.float32)
    if scale < 1:
        side = round(scale * len(place))
        template = np.asarray(cv2.resize(template, (side, side), interpolation=cv2.INTER_AREA), dtype=np.float32)
    else:
        template = template[MARGIN // 2 : -MARGIN // 2, MARGIN // 2 : -MARGIN // 2]
    if min(template.std(), place.std()) < FLAT / 2:
        return _Placement(0.0, scale, (0, 0))
    _, correlation, _, corner = cv2.minMaxLoc(cv2.matchTemplate(place, template, cv2.TM_CCOEFF_NORMED))
    return _Placement(correlation, len(template) / len(place), (corner[0], corner[1]))


def _fitted(part: _Look, whole: _Look) -> tuple[_Look, float] | None:
    """What of `whole` the picture `part` shows, and the share of a side that it is; None where it shows none of it."""
    best = max(_placed(part, whole, scale) for scale in SCALES)
    if best.correlation < PROMISING:
        return None
    _, scale, (right, down) = best
    start = np.asarray([[scale, 0, 2 * right], [0, scale, 2 * down]], dtype=np.float32)
    one, other = (each.small_SS.astype(np.float32) for each in (part, whole))
    try:
        _, warp = cv2.findTransformECC(one, other, start, cv2.MOTION_AFFINE, STEPS)
    except cv2.error:  # it does not converge
        return None
    flags = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
    shown = cv2.warpAffine(whole.small_SS, warp, (SIDE, SIDE), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    sides = np.linalg.norm(warp[:, :2], axis=0)
    if not 0.6 < sides.min() <= sides.max() < 1.1:
        return None
    return _look(np.asarray(shown, dtype=np.uint8)), float(sides.min())


def _kind(turn: int, shown: float, first: _Look, second: _Look) -> str:
    """What was done to a copy, in words."""
    one, other = (cv2.GaussianBlur(each.small_SS.astype(np.float32), (0, 0), SHAPES) for each in (first, second))
    contrast = (one.std() + 1) / (other.std() + 1)
    light = abs(one.mean() - other.mean()) > DIMMED or not 1 / FLATTENED < contrast < FLATTENED
    done = [TURNS[turn], "cropped" * (shown < CROPPED), "brightened" * bool(light)]
    return " and ".join(filter(None, done)) or "saved again"


def _similarity(first: _Look, second: _Look, *, least: float) -> float:
    """Similarity of two pictures; what is below `least` by details alone is not looked at further."""
    best = _aligned(_details(first.small_SS), _details(second.small_SS))
    score = 1 - (1 - best.correlation) / 2
    if score < least:
        return score
    return min(score, 1 - STRICTNESS / 2 * (1 - _same_shapes(first.small_SS, second.small_SS, best.centre)))


class _Alignment(NamedTuple):
    correlation: float  # 0 where one of the pictures has no details
    centre: tuple[float, float]
    """Point of the second picture that lies on the first one's centre, in pixels from the left and from the top."""


def _aligned(first: Floats, second: Floats) -> _Alignment:
    whole, inner = second, first[MARGIN:-MARGIN, MARGIN:-MARGIN]
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
