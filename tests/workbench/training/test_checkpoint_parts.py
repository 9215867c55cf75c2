"""Parts of tensors: they are what they say, and a checkpoint gives any part that is asked for, whoever wrote which."""

from __future__ import annotations

import json
import math
import threading
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from workbench.errors import FileError, ResumeError
from workbench.training import checkpoint_parts, checkpoints
from workbench.training.checkpoint_parts import Background, SavedTensors, TensorPart
from workbench.training.checkpoints import Progress

SHAPES = [(), (7,), (3, 4), (2, 3, 4), (1, 5), (5, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neighbouring_elements_are_boxes_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(math.prod(shape))).view(shape)
    for start, stop in combinations_with_replacement(range(whole.numel() + 1), 2):
        part = TensorPart.flat(whole.flatten()[start:stop], start, whole.shape)
        again = torch.full(shape, -1.0)
        for offsets, box in part.boxes.items():
            again[tuple(slice(at, at + size) for at, size in zip(offsets, box.shape, strict=True))] = box
        assert again.flatten()[start:stop].equal(whole.flatten()[start:stop])
        assert int((again >= 0).sum()) == stop - start


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_cut_is_read_from_any_other_and_nothing_beside_it(
    tmp_path: Path, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, read_box = list[int](), checkpoint_parts.read_box
    monkeypatch.setattr(
        checkpoint_parts, "read_box", lambda *asked: (box := read_box(*asked), read.append(box.numel()))[0]
    )
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    count = whole.numel()
    for number, edges in enumerate(((0, count), (0, count // 2, count), (0, count // 3, count - 1, count))):
        path = tmp_path / str(number)
        boxes = [TensorPart.flat(whole.flatten()[a:b], a, whole.shape).boxes.items() for a, b in pairwise(edges)]
        checkpoints.write(
            path, {"s": {"x": TensorPart(whole.shape, {at: box for each in boxes for at, box in each})}}, Progress()
        )
        assert checkpoints.read_tensors(path, "s")["x"].equal(whole)
        for start, stop in pairwise((0, count // 4, count // 2, count)):
            room = torch.zeros(stop - start)
            read.clear()
            SavedTensors(path).fill("s", {"x": TensorPart.flat(room, start, whole.shape)})
            assert room.equal(whole.flatten()[start:stop]) and sum(read) == stop - start
    with safe_open(tmp_path / "0" / "s.safetensors", "pt") as file:
        assert file.keys() == ["x"], "a tensor that is not cut is a plain entry"


def test_no_more_than_a_volume_is_copied_to_the_host_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, save_file = list[int](), checkpoint_parts.save_file

    def counted(tensors: dict[str, torch.Tensor], *arguments: object, **named: object) -> None:
        copied.append(sum(each.nbytes for each in tensors.values()))
        save_file(tensors, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_parts, "save_file", counted)
    monkeypatch.setattr(checkpoint_parts, "VOLUME", 400)
    wanted = {f"x{number}": torch.full((size,), float(number)) for number, size in enumerate((30, 70, 1, 300, 20, 50))}
    path = tmp_path / "a"
    checkpoints.write(path, {"s": wanted, "t": {"y": torch.ones(2)}}, Progress())
    assert copied == [400, 4, 1200, 280, 8] and sum(copied) == 4 * 471 + 8
    names = ["s.safetensors", *(f"s-00000-{number:05}.safetensors" for number in (1, 2, 3)), "t.safetensors"]
    assert {file.name for file in path.glob("*.safetensors")} == {*names}
    found = checkpoints.read_tensors(path, "s")
    assert found.keys() == wanted.keys() and all(found[key].equal(each) for key, each in wanted.items())
    assert json.loads((path / "state.json").read_text())["sha256"].keys() == {*names}


def test_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "a", {"s": {"x": torch.zeros(2, 3)}}, Progress())
    with pytest.raises(ResumeError, match=r"x is \(2, 3\) there and \(3, 2\) here"):
        SavedTensors(tmp_path / "a").fill("s", {"x": torch.zeros(3, 2)})


def test_what_is_written_in_the_background_does_not_change_with_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes, save_file = threading.Event(), checkpoint_parts.save_file

    def waiting(*arguments: object, **named: object) -> None:
        assert goes.wait(30)
        save_file(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_parts, "save_file", waiting)
    background, trained = Background(), torch.zeros(3)
    first = checkpoints.save(tmp_path, {"s": {"x": trained}}, Progress(step=1), keep=1, background=background)
    trained += 1
    assert not first.exists() and checkpoints.newest(tmp_path) == (None, [])
    goes.set()
    second = checkpoints.save(tmp_path, {"s": {"x": trained}}, Progress(step=2), keep=1, background=background)
    assert first.exists() or second.exists(), "the earlier one stays until the later is whole"
    background.wait()
    assert not first.exists() and checkpoints.read_tensors(second, "s")["x"].tolist() == [1, 1, 1]


def test_a_full_disk_is_told_at_the_next_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    background, tensors = Background(), {"s": {"x": torch.zeros(3)}}
    kept = checkpoints.save(tmp_path, tensors, Progress(step=1), keep=1, background=background)
    background.wait()
    monkeypatch.setattr(checkpoint_parts, "save_file", full)
    checkpoints.save(tmp_path, tensors, Progress(step=2), keep=1, background=background)
    with pytest.raises(FileError, match="No space left"):
        checkpoints.save(tmp_path, tensors, Progress(step=3), keep=1, background=background)
    assert checkpoints.newest(tmp_path) == (kept, [])
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
