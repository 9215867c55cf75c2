"""Checkpoints: what is damaged is named and passed over; what fails half-way leaves the old one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench.errors import FileError, ResumeError
from workbench.runs import files
from workbench.training import checkpoint_parts, checkpoints
from workbench.training.checkpoints import Progress

TENSORS = {"trainable": {"a": torch.arange(6.0).reshape(2, 3)}, "optimizer": {"a|exp_avg": torch.ones(2, 3)}}


def _save(folder: Path, step: int, keep: int = 3) -> Path:
    return checkpoints.save(folder, TENSORS, Progress(step=step, best_loss=1.5), keep=keep)


def test_round_trip_and_retention(tmp_path: Path) -> None:
    paths = [_save(tmp_path, step, keep=2) for step in (1, 2, 10)]
    assert [path.exists() for path in paths] == [False, True, True]
    newest, damaged = checkpoints.newest(tmp_path)
    assert newest == paths[-1] and not damaged
    assert checkpoints.read_progress(newest) == Progress(step=10, best_loss=1.5)
    assert torch.equal(checkpoints.read_tensors(newest, "trainable")["a"], TENSORS["trainable"]["a"])


def test_going_back_to_an_earlier_step(tmp_path: Path) -> None:
    paths = [_save(tmp_path, step) for step in (1, 2, 10)]
    found = [checkpoints.newest(tmp_path, at_most=step)[0] for step in (0, 1, 9, 10)]
    assert found == [None, paths[0], paths[1], paths[2]]
    (paths[2] / "state.json").unlink()  # damaged ones go as well
    checkpoints.drop_after(tmp_path, 1)
    assert [path.exists() for path in paths] == [True, False, False]


@pytest.mark.parametrize("harm", ["truncate", "flip", "missing", "state"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, harm: str) -> None:
    good, bad = _save(tmp_path, 1), _save(tmp_path, 2)
    file = bad / ("state.json" if harm == "state" else "trainable.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 255
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if harm in ("truncate", "state") else content)
    newest, damaged = checkpoints.newest(tmp_path)
    assert newest == good
    assert len(damaged) == 1 and bad.name in damaged[0] and "damaged" in damaged[0]
    with pytest.raises(ResumeError):
        checkpoints.verify(bad)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = _save(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_parts, "save_file", full)
    for step in (1, 2):
        with pytest.raises(FileError, match="No space left"):
            _save(tmp_path, step)
    assert checkpoints.newest(tmp_path) == (good, [])
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    assert {path.suffix for path in _save(tmp_path, 1).iterdir()} == {".safetensors", ".json"}


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-1.77.unfinished").mkdir()
    (tmp_path / ".scores.json.77.unfinished").write_text("{")
    files.remove_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())
