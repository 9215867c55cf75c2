"""Archives of pictures: what they may hold, and what is refused by name."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.data.images.test_picture_sources import PICTURES, ROWS, filled, read, refused, tarred, zipped
from workbench.data.images.picture_sources import read_rows
from workbench.errors import DataError


def special(path: Path, name: str, **changes: Any) -> Path:
    """A tar archive of the pictures and a member that is none."""
    tarred(path, PICTURES)
    with tarfile.open(path, "a") as archive:
        member = tarfile.TarInfo(name)
        for key, value in changes.items():
            setattr(member, key, value)
        archive.addfile(member)
    return path


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("a/9.png", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "a/9.png is a link to /etc/passwd"),
        ("a/9.png", {"type": tarfile.LNKTYPE, "linkname": "a/0.png"}, "a/9.png is a link to a/0.png"),
        ("../9.png", {}, "leads out of the archive"),
        ("/a/9.png", {}, "leads out of the archive"),
        ("a/pipe.png", {"type": tarfile.FIFOTYPE}, "a/pipe.png is no plain file"),
    ],
)
def test_a_tar_archive_with_more_than_files_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], says: str
) -> None:
    assert says in refused(special(tmp_path / "a.tar", name, **changes))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../9.png", "holds ../9.png, a path that leads out of the archive. Pack it again"),
        ("a\\9.png", "with a backslash in place of /, as old programs for Windows write. Unpack it"),
    ],
)
def test_names_that_a_zip_archive_should_not_have_are_refused(tmp_path: Path, name: str, says: str) -> None:
    assert says in refused(zipped(tmp_path / "a.zip", PICTURES | {name: b""}))


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_later_member_of_a_zip_archive_replaces_an_earlier_one(tmp_path: Path) -> None:
    source = zipped(tmp_path / "a.zip", {**PICTURES, "a/0.png": b"old"})
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr("a/0.png", PICTURES["a/0.png"])
    assert read(source) == ROWS


def test_compressed_and_cut_tar_archives_are_refused(tmp_path: Path) -> None:
    assert "Unpack it" in refused(tarred(tmp_path / "a.tgz", PICTURES, "w:gz"))
    assert "must be unpacked" in refused(tarred(tmp_path / "a.tar", PICTURES, "w:gz"))
    whole = tarred(tmp_path / "b.tar", PICTURES)
    rows = list(read_rows(str(whole)))
    whole.write_bytes(whole.read_bytes()[:700])
    assert "not a tar archive that can be read" in refused(whole)
    with pytest.raises(DataError, match=r"b\.tar/.*: cannot be read \(the archive is shorter than it was\)"):
        rows[-1].columns["image"].read()


def test_pictures_of_a_tar_archive_are_known_by_their_contents(tmp_path: Path) -> None:
    folder, archive = filled(tmp_path / "a", PICTURES), tarred(tmp_path / "a.tar", PICTURES)
    loose, packed = ([row.columns["image"] for row in read_rows(str(each))] for each in (folder, archive))
    assert [file.digest() for file in loose] == [file.digest() for file in packed]
    assert [file.size() for file in packed] == [(6, 8)] * len(ROWS)
