"""Copies of pictures are found however they were changed, other pictures are not, in any order."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance

from workbench.data.folds import duplicates
from workbench.data.images.picture_duplicates import correlation, find, similarity
from workbench.data.images.picture_files import Pixels
from workbench.data.images.picture_sources import read_rows

COUNT, THRESHOLD = 60, 0.95


@pytest.fixture(scope="module")
def hands() -> list[Pixels]:
    rows = list(read_rows("starter/sign_digits.zip/test"))[:COUNT]
    return [row.columns["image"].decode(max_pixels=10**6) for row in rows]


def compressed(picture: Pixels) -> Pixels:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=40)
    return np.asarray(Image.open(buffer).convert("RGB"))


def resized(picture: Pixels) -> Pixels:
    small = Image.fromarray(picture).resize((45, 45), Image.Resampling.BICUBIC)
    return np.asarray(small.resize((64, 64), Image.Resampling.BICUBIC))


COPIES: dict[str, Callable[[Pixels], Pixels]] = {
    "equal": np.copy,
    "resized": resized,
    "compressed": compressed,
    "shifted": lambda picture: np.pad(picture, ((2, 0), (0, 2), (0, 0)), mode="edge")[:64, 2:],
    "brightened": lambda picture: np.asarray(ImageEnhance.Brightness(Image.fromarray(picture)).enhance(1.3)),
    "darkened": lambda picture: np.asarray(ImageEnhance.Brightness(Image.fromarray(picture)).enhance(0.7)),
    "flipped": lambda picture: np.ascontiguousarray(picture[:, ::-1]),
    "turned": lambda picture: np.ascontiguousarray(np.rot90(picture)),
    "cropped": lambda picture: np.asarray(Image.fromarray(picture[2:56, 5:59]).resize((64, 64))),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_found_and_nothing_else_is(hands: list[Pixels], name: str) -> None:
    found = find([*hands, *map(COPIES[name], hands)], threshold=THRESHOLD)
    same = found.cluster_N[:COUNT] == found.cluster_N[COUNT:]
    assert same.mean() >= 0.95
    assert len(set(found.cluster_N[:COUNT].tolist())) == COUNT, "no two people's hands are one"
    assert found.similarity_U.min() >= THRESHOLD
    report = duplicates.report(found)
    assert report.clustered == 2 * same.sum() and (report.exact == COUNT) == (name == "equal")


def test_the_order_of_pictures_only_permutes_the_clusters(hands: list[Pixels]) -> None:
    pictures = [*hands, *map(compressed, hands[::2])]
    order = np.random.default_rng(1).permutation(len(pictures))
    straight, mixed = find(pictures, threshold=THRESHOLD), find([pictures[n] for n in order], threshold=THRESHOLD)
    together = straight.cluster_N[order][:, None] == straight.cluster_N[order]
    np.testing.assert_array_equal(mixed.cluster_N[:, None] == mixed.cluster_N, together)
    names = np.asarray(straight.name_U)[straight.distinct_N]
    np.testing.assert_array_equal(np.asarray(mixed.name_U)[mixed.distinct_N], names[order])


def test_correlation_is_that_of_details_at_the_best_shift(hands: list[Pixels]) -> None:
    one, two = hands[:2]
    assert correlation(one, one) == pytest.approx(1, abs=1e-3)
    moved = np.roll(one, (3, -4), axis=(0, 1))
    assert correlation(one, moved) > 0.97 > correlation(one, two)

    def band(picture: Pixels) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY).astype(np.float32)
        return cv2.GaussianBlur(grey, (0, 0), 1.0) - cv2.GaussianBlur(grey, (0, 0), 4.0)  # type: ignore[return-value]

    inner, whole = band(one)[6:-6, 6:-6], band(two)
    by_hand = max(
        np.corrcoef(inner.ravel(), whole[down : down + 52, right : right + 52].ravel())[0, 1]
        for down in range(13)
        for right in range(13)
    )
    assert by_hand - 0.005 < correlation(one, two) < by_hand + 0.05, "and a little more between the pixels"


def test_even_pictures_are_duplicates_only_where_they_are_equal() -> None:
    grey, white = (np.full((64, 64, 3), level, dtype=np.uint8) for level in (128, 255))
    found = find([grey, white, grey], threshold=0.5)
    assert found.cluster_N[0] == found.cluster_N[2] != found.cluster_N[1]
    assert len(find([grey], threshold=0.95).cluster_N) == 1


def test_a_threshold_of_one_finds_equal_pictures_alone(hands: list[Pixels]) -> None:
    found = find([*hands, *hands[:5], *map(compressed, hands)], threshold=1)
    assert duplicates.report(found).clustered == 10 and not len(found.pairs_P2)


@pytest.mark.parametrize("gain", [1.2, 1.4])
def test_shapes_stay_where_brightening_clips(hands: list[Pixels], gain: float) -> None:
    grey = np.stack([cv2.cvtColor(hands[0], cv2.COLOR_RGB2GRAY)] * 3, axis=2)
    bright = (grey * gain + 20).clip(0, 255).astype(np.uint8)
    assert (bright == 255).mean() > 0.02
    assert similarity(grey, bright) > THRESHOLD and similarity(bright, grey) > THRESHOLD


def trousers(gap: int) -> Pixels:
    """Small and without texture."""
    picture = np.zeros((28, 28, 3), np.uint8)
    picture[2:26, 8:20] = 200
    picture[10:26, 14 - gap : 14 + gap] = 0
    return np.asarray(cv2.GaussianBlur(picture, (0, 0), 0.7), np.uint8)


def test_like_objects_without_texture_are_apart_from_their_copies() -> None:
    one, other = trousers(1), trousers(2)
    small = Image.fromarray(one).resize((20, 20), Image.Resampling.BICUBIC)
    copies = [
        np.asarray(small),
        np.asarray(small.resize((28, 28), Image.Resampling.BICUBIC)),
        one // 2,
        compressed(one),
    ]
    assert all(similarity(one, copy) >= THRESHOLD for copy in copies)
    assert similarity(one, other) < THRESHOLD


def test_similarity_counts_what_is_worse_of_details_and_shapes(hands: list[Pixels]) -> None:
    for one, other in itertools.pairwise(hands[:9]):
        assert similarity(one, other) <= 1 - (1 - correlation(one, other)) / 2
        assert similarity(one, one) == pytest.approx(1, abs=0.005)
