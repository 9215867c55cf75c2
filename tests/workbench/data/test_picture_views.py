"""Views of pictures are deterministic and keep sizes; the symmetries of a square form a group."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.tta_config import PICTURES, TtaConfig
from workbench.data import tta_views
from workbench.data.images import augmentation
from workbench.data.tta_views import Picture, PictureView
from workbench.errors import ConfigError

SMALL = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
PICTURE = np.asarray(cv2.resize(SMALL, (32, 32), interpolation=cv2.INTER_CUBIC), dtype=np.uint8)
ALL = {"views": [name for name in PICTURES if name != "flip"]}


def made(tta: dict[str, Any]) -> list[PictureView]:
    return tta_views.picture_views(TtaConfig.model_validate(tta), ClassesConfig(), example=PICTURE)


def named(tta: dict[str, Any], picture: Picture = PICTURE) -> dict[str, Picture]:
    return {view.name: view.picture(picture, 0) for view in made(tta)}


def test_names_are_different_and_outputs_are_those_of_the_row() -> None:
    views = made(ALL)
    assert len({view.name for view in views}) == len(views) == 7 + 5 + 2 + 2 + 4
    outputs = np.arange(6.0).reshape(2, 3)
    assert all(view.outputs(outputs) is outputs for view in views)


def test_views_are_deterministic_keep_the_size_and_go_to_other_processes() -> None:
    stored = PICTURE.copy()
    stored.flags.writeable = False
    for view in made(ALL):
        seen = view.picture(stored, 0)
        assert seen.shape == stored.shape and seen.dtype == np.uint8 and (seen != stored).any()
        np.testing.assert_array_equal(seen, pickle.loads(pickle.dumps(view)).picture(stored, 5))


def test_a_picture_of_one_colour_stays_under_every_view() -> None:
    flat = np.full((20, 20, 3), (10, 120, 230), dtype=np.uint8)
    for seen in named(ALL, flat).values():
        np.testing.assert_array_equal(seen, flat)


def test_the_eight_are_the_dihedral_group() -> None:
    views = made({"views": ["eight"]})
    members = {PICTURE.tobytes(), *(view.picture(PICTURE, 0).tobytes() for view in views)}
    assert len(members) == 8
    for first in views:
        images = [second.picture(first.picture(PICTURE, 0), 0).tobytes() for second in views]
        assert set(images) < members, "closed"
        assert PICTURE.tobytes() in images, "each has its inverse"
        assert len(set(images)) == 7


def test_flips_undo_themselves_and_the_flip_is_one_of_the_eight() -> None:
    (flip,) = made({"views": ["flip"]})
    eight = named({"views": ["eight"]})
    np.testing.assert_array_equal(flip.picture(flip.picture(PICTURE, 0), 0), PICTURE)
    np.testing.assert_array_equal(flip.picture(PICTURE, 0), eight["flip"])
    for view in made({"views": ["eight"]}):
        if view.name.startswith("flip"):
            np.testing.assert_array_equal(view.picture(view.picture(PICTURE, 0), 0), PICTURE)


def test_views_without_interpolation_work_on_pictures_that_are_not_square() -> None:
    oblong = np.ascontiguousarray(PICTURE[:20])
    assert all(seen.shape == oblong.shape for seen in named(ALL, oblong).values())


@pytest.mark.parametrize("share", [0.5, 0.75, 0.875])
def test_five_crops_hold_the_corners_and_the_centre(share: float) -> None:
    side = round(32 * share)
    for crop, corner in (
        ("top left", (0, 0)),
        ("top right", (0, 1)),
        ("bottom left", (1, 0)),
        ("bottom right", (1, 1)),
    ):
        marked = np.zeros((32, 32, 3), dtype=np.uint8)
        down, right = (slice(0, 2) if end == 0 else slice(-2, None) for end in corner)
        marked[down, right] = 255
        seen = named({"views": ["five_crops"], "crop": share}, marked)
        assert seen[f"crop {crop}"][-corner[0], -corner[1]].min() == 255
        others = [name for name in seen if name != f"crop {crop}"]
        assert all(not seen[name].any() for name in others), "no other crop reaches into this corner"
    start = 16 - side // 2
    expected = cv2.resize(PICTURE[start : start + side, start : start + side], (32, 32))
    np.testing.assert_array_equal(named({"views": ["five_crops"], "crop": share})["crop centre"], expected)


@settings(max_examples=40, deadline=None)
@given(height=st.integers(4, 40), width=st.integers(4, 40), share=st.sampled_from([0.3, 0.5, 0.66, 0.875]))
def test_five_crops_are_those_of_ttach(height: int, width: int, share: float) -> None:
    """The equations of ttach 0.0.3, also where what a crop leaves over is odd."""
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    h, w = max(1, round(height * share)), max(1, round(width * share))
    top, left = height // 2 - h // 2, width // 2 - w // 2
    wanted = {
        "crop top left": picture[0:h, 0:w],
        "crop top right": picture[0:h, -w:],
        "crop bottom left": picture[-h:, 0:w],
        "crop bottom right": picture[-h:, -w:],
        "crop centre": picture[top : height // 2 + h // 2 + h % 2, left : width // 2 + w // 2 + w % 2],
    }
    seen = named({"views": ["five_crops"], "crop": share}, picture)
    for name, crop in wanted.items():
        np.testing.assert_array_equal(seen[name], augmentation.resized_to(crop, (height, width)))


def test_scales_about_the_centre() -> None:
    seen = named({"views": ["scales"], "scales": [0.5, 2]})
    middle = np.asarray(cv2.resize(PICTURE[8:24, 8:24], (32, 32)), dtype=int)
    assert np.abs(seen["scale 2"][2:-2, 2:-2] - middle[2:-2, 2:-2]).max() <= 2
    halves = PICTURE.reshape(16, 2, 16, 2, 3).mean((1, 3))
    assert np.abs(seen["scale 0.5"][8:24, 8:24] - halves).max() <= 1


def test_rotations_and_shifts_are_those_of_the_names() -> None:
    turned = named({"views": ["rotations"], "rotations": [90, -90]})
    np.testing.assert_array_equal(turned["rotation 90"], np.rot90(PICTURE))
    np.testing.assert_array_equal(turned["rotation -90"], np.rot90(PICTURE, -1))
    shifted = named({"views": ["shifts"], "shift": 0.125})
    np.testing.assert_array_equal(shifted["shift left"][:, :-4], PICTURE[:, 4:])
    np.testing.assert_array_equal(shifted["shift right"][:, 4:], PICTURE[:, :-4])
    np.testing.assert_array_equal(shifted["shift up"][:-4], PICTURE[4:])
    np.testing.assert_array_equal(shifted["shift down"][4:], PICTURE[:-4])


def test_views_of_text_are_refused_for_pictures() -> None:
    with pytest.raises(ConfigError, match=r"views of text \(typos\), and rows are pictures"):
        made({"views": ["typos", "flip"]})


def users(folder: Path, body: str) -> dict[str, Any]:
    path = folder / "mine.py"
    path.write_text(f"import numpy as np\ncalls = []\ndef views(picture):\n    calls.append(0)\n    {body}\n")
    return {"views": ["user"], "function": str(path)}


def test_a_users_views(tmp_path: Path) -> None:
    body = "picture[0, 0] = 0; return [picture, picture[::-1], 255 - picture]"
    seen, before = named(users(tmp_path, body)), PICTURE.copy()
    assert list(seen) == ["user 1", "user 2", "user 3"]
    np.testing.assert_array_equal(seen["user 3"], 255 - seen["user 1"])
    np.testing.assert_array_equal(PICTURE, before)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return picture", "Return a list of pictures"),
        ("return []", "returned no view"),
        ("return [3]", "Return a numpy array of uint8"),
        ("return [picture / 2]", r"a picture of float64 and shape \(32, 32, 3\). Return uint8"),
        ("return [picture[:9]]", r"shape \(9, 32, 3\)"),
        ("return [np.full_like(picture, len(calls))]", "other views when called again"),
        ("return [1 / 0]", "ZeroDivisionError"),
    ],
)
def test_mistakes_of_a_users_views(tmp_path: Path, body: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        made(users(tmp_path, body))


def test_as_many_views_of_every_picture(tmp_path: Path) -> None:
    (view,) = made(users(tmp_path, "return [picture] * (1 if picture.any() else 2)"))
    with pytest.raises(ConfigError, match="the picture of row 7, returned 2 views, but 1 for row 0"):
        view.picture(np.zeros_like(PICTURE), 7)
