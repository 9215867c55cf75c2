"""The same rows from a folder, an archive, an idx file and tables; every unclear source is refused with its cure."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import pickle
import re
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.workbench.data.images.pictures import encoded, photograph
from workbench.config import DataConfig
from workbench.data.images.picture_sources import PictureFile, fingerprint, read_rows, require_classes
from workbench.data.rows import RawRow, convert_rows
from workbench.errors import DataError

PICTURES = {f"{label}/{number}.png": encoded(photograph(6, 8, seed=ord(label) + number))
            for number in range(3) for label in "ab"}  # fmt: skip
ROWS = [(content, name[0]) for name, content in PICTURES.items()]
"""Classes in turn."""


def filled(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def zipped(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def tarred(path: Path, files: Mapping[str, bytes], kind: Literal["w", "w:gz"] = "w") -> Path:
    with tarfile.open(path, kind) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def read(source: Path | str, column: str = "image") -> list[tuple[bytes, Any]]:
    rows = list(read_rows(str(source), column))
    assert not any(row.mistake for row in rows)
    files = [row.columns[column] for row in rows]
    assert all(isinstance(file, PictureFile) for file in files)
    assert pickle.loads(pickle.dumps(files)) == files
    return [(file.read(), row.columns.get("label")) for file, row in zip(files, rows, strict=True)]


def refused(source: Path | str, **columns: str) -> str:
    with pytest.raises(DataError) as caught:
        list(read_rows(str(source), **columns))
    return str(caught.value)


def test_class_folders(tmp_path: Path) -> None:
    assert read(filled(tmp_path, PICTURES)) == ROWS


def test_classes_come_in_turn_so_that_few_rows_hold_all(tmp_path: Path) -> None:
    counts = {"a": 5, "b": 2, "c": 9}
    files = {f"{label}/{number}.png": b"" for label, count in counts.items() for number in range(count)}
    sources = filled(tmp_path / "tree", files), zipped(tmp_path / "tree.zip", files), tarred(tmp_path / "t.tar", files)
    for source in sources:
        labels = [row.columns["label"] for row in read_rows(str(source))]
        assert {label: labels.count(label) for label in counts} == counts
        for limit in range(len(labels)):
            first = {label: labels[:limit].count(label) for label in counts}
            least = min((count for label, count in first.items() if count < counts[label]), default=9)
            assert max(first.values()) <= least + 1
        names = [row.place for row in read_rows(str(source))]
        assert all(sorted(own) == own for own in ([name for name in names if f"/{label}/" in name] for label in counts))


def test_what_systems_leave_behind_is_ignored(tmp_path: Path) -> None:
    clutter = {"a/.hidden.png": b"", "__MACOSX/a/._0.png": b"", "b/Thumbs.db": b"", ".DS_Store": b"", "LICENSE": b"",
               "readme.md": b"", "a/LICENSE.txt": b"", ".git/config": b""}  # fmt: skip
    assert read(filled(tmp_path / "plants", PICTURES | clutter)) == ROWS
    assert read(zipped(tmp_path / "plants.zip", PICTURES | clutter)) == ROWS
    assert read(tarred(tmp_path / "plants.tar", PICTURES | clutter)) == ROWS


def test_a_class_may_be_named_like_a_licence(tmp_path: Path) -> None:
    files = {f"{'notice' if name[0] == 'b' else name[0]}{name[1:]}": content for name, content in PICTURES.items()}
    expected = [(content, "notice" if label == "b" else label) for content, label in ROWS]
    assert read(filled(tmp_path / "signs", files)) == expected
    assert read(zipped(tmp_path / "signs.zip", files)) == expected


def test_a_damaged_member_of_an_archive_is_refused_by_name(tmp_path: Path) -> None:
    source = tmp_path / "a.zip"
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.png", bytes(1000))
    content = bytearray(source.read_bytes())
    content[40] ^= 255
    source.write_bytes(content)
    (row,) = read_rows(str(source))
    with pytest.raises(DataError, match=r"a\.zip/a/0\.png: cannot be read"):
        row.columns["image"].read()


def test_folders_inside_a_class_belong_to_it(tmp_path: Path) -> None:
    files = {f"{name[0]}/deep/{name[2:]}" if name < "a/2" else name: content for name, content in PICTURES.items()}
    assert sorted(read(filled(tmp_path, files))) == sorted(ROWS)


def test_an_archive_is_read_as_the_folder_that_it_holds(tmp_path: Path) -> None:
    assert read(zipped(tmp_path / "a.zip", PICTURES)) == ROWS
    assert read(zipped(tmp_path / "b.zip", {f"plants/{name}": content for name, content in PICTURES.items()})) == ROWS
    assert read(tarred(tmp_path / "a.tar", PICTURES)) == ROWS
    assert read(tarred(tmp_path / "b.tar", {f"./plants/{name}": content for name, content in PICTURES.items()})) == ROWS


@pytest.mark.parametrize("write", [lambda path, files: filled(path / "data", files),
                                   lambda path, files: zipped(path / "data.zip", files),
                                   lambda path, files: tarred(path / "data.tar", files)])  # fmt: skip
def test_several_splits_are_refused_and_one_can_be_named(tmp_path: Path, write: Any) -> None:
    other = {name: encoded(photograph(5, 5, seed=ord(name[2]))) for name in PICTURES}
    files = {f"train/{name}": content for name, content in PICTURES.items()}
    source = write(tmp_path, files | {f"test/{name}": content for name, content in other.items()})
    assert f"Name one: {source}/test or {source}/train." in refused(source)
    assert read(f"{source}/train") == ROWS
    assert read(f"{source}/test") == [(content, name[0]) for name, content in other.items()]
    assert read(f"{source}/train/a") == [(content, None) for content, label in ROWS if label == "a"]
    assert fingerprint(f"{source}/train") != fingerprint(f"{source}/test")


def test_a_folder_that_an_archive_lacks_is_refused(tmp_path: Path) -> None:
    source = zipped(tmp_path / "a.zip", {f"train/{name}": content for name, content in PICTURES.items()})
    assert "Did you mean `train`?" in refused(f"{source}/trian")


def test_a_flat_folder_has_rows_without_labels(tmp_path: Path) -> None:
    files = {f"{number}.png": content for number, content in enumerate(PICTURES.values())}
    assert read(filled(tmp_path, files)) == [(content, None) for content, _ in ROWS]


def table(rows: list[dict[str, Any]], path: Path) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_table_names_files_from_its_own_folder(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "pictures", PICTURES)
    rows = [{"photo": f"pictures/{name}", "label": name[0]} for name in PICTURES]
    source = table(rows, tmp_path / f"table.{kind}")
    assert read(source, "photo") == ROWS
    monkeypatch.chdir(os.sep)
    assert read(source, "photo") == ROWS


@pytest.mark.parametrize("cell", [lambda content: content,
                                  lambda content: {"bytes": content, "path": "away/from/here.png"},
                                  lambda content: {"bytes": content, "path": None}])  # fmt: skip
def test_a_table_holds_the_bytes_themselves(tmp_path: Path, cell: Any) -> None:
    rows = [{"image": cell(content), "label": label} for content, label in ROWS]
    assert read(table(rows, tmp_path / "t.parquet")) == ROWS


def lines(content: bytes) -> str:
    return base64.encodebytes(content).decode()


WRITTEN = {
    "base64": lambda content: base64.b64encode(content).decode(),
    "of addresses": lambda content: base64.urlsafe_b64encode(content).decode().rstrip("="),
    "data URI": lambda content: f"data:image/png;base64,{base64.b64encode(content).decode()}",
    "with parameters": lambda content: f"DATA:image/png;name=a.png;base64,{base64.b64encode(content).decode()}",
    "as datasets do": lambda content: {"bytes": base64.b64encode(content).decode(), "path": None},
    "in lines": lines,
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [*(("jsonl", how) for how in WRITTEN), *(("csv", how) for how in WRITTEN if how != "as datasets do")],
)
def test_a_table_of_text_holds_the_bytes_in_base64(tmp_path: Path, how: str, kind: str) -> None:
    rows = [{"image": WRITTEN[how](content), "label": label} for content, label in ROWS]
    if kind == "csv":
        rows = [{**row, "image": f'"{row["image"]}"'} for row in rows]
    source = table(rows, tmp_path / f"t.{kind}")
    assert read(source) == ROWS
    assert {row.columns["image"].name for row in read_rows(str(source))} <= {
        row.place for row in read_rows(str(source))
    }


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000"])
def test_each_usual_kind_of_picture_is_known_in_base64(tmp_path: Path, kind: str) -> None:
    content = encoded(photograph(6, 8), kind)
    assert read(table([{"image": base64.b64encode(content).decode()}], tmp_path / "t.jsonl")) == [(content, None)]


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (base64.b64encode(b"no picture" * 2000).decode(), "is neither a path nor a picture in base64"),
        ("data:image/png;base64,####" + "A" * 9000, "is a data URI without whole base64"),
        ("data:image/svg+xml,%3Csvg" + "A" * 9000, "is a data URI without whole base64"),
        ("a\0b.png", "does not exist"),
        ("x" * 3000, "is neither a path"),
        ("deep/" * 300 + "a.png", "does not exist"),
    ],
)
def test_cells_that_are_neither_are_refused_in_a_few_words(tmp_path: Path, cell: str, says: str) -> None:
    (row,) = read_rows(str(table([{"image": cell}], tmp_path / "t.jsonl")))
    assert says in row.mistake and len(row.mistake) < 400


@pytest.mark.parametrize("name", ["Qk1a", "iVBORw0KGgo", "R0lGODlhAQABAIAAAAAAAP"])
def test_a_path_that_could_be_base64_stays_a_path(tmp_path: Path, name: str) -> None:
    filled(tmp_path, {name: b"content"})
    assert read(table([{"image": name}], tmp_path / "t.jsonl")) == [(b"content", None)]


def test_a_data_set_of_pictures_is_read(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    rows = {"image": [content for content, _ in ROWS], "label": [label for _, label in ROWS]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == ROWS


def test_a_data_set_on_the_hub_names_the_files_that_were_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    folder = filled(tmp_path / "download", PICTURES)
    data = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    assert sorted(read("owner/plants")) == sorted(ROWS)
    data = datasets.Dataset.from_dict({"image": ["a/0.png"], "label": ["a"]})
    (row,) = read_rows("owner/plants")
    assert "does not bring along" in (row.mistake or "")


def test_a_compressed_table_of_pictures(tmp_path: Path) -> None:
    filled(tmp_path, PICTURES)
    lines = "".join(f"{name},{name[0]}\n" for name in PICTURES)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(f"image,label\n{lines}".encode()))
    assert [row.columns["label"] for row in read_rows(str(tmp_path / "t.csv.gz"))] == [name[0] for name in PICTURES]


def test_a_table_without_header_in_another_encoding(tmp_path: Path) -> None:
    filled(tmp_path, PICTURES)
    path = tmp_path / "t.csv"
    path.write_bytes("".join(f"{name},Blüte\n" for name in PICTURES).encode("latin1"))
    config = DataConfig(train=str(path), format="image", header=False, encoding="latin1")
    found = list(read_rows(str(path), "1", None, config))
    assert len(found) == len(PICTURES) and {row.columns["2"] for row in found} == {"Blüte"}
    assert fingerprint(str(path), "1", None, config)
    with pytest.raises(DataError, match=r"data\.encoding"):
        list(read_rows(str(path), "1"))


def test_a_missing_file_is_named_with_its_row(tmp_path: Path) -> None:
    filled(tmp_path, PICTURES)
    rows = [{"image": name} for name in [*PICTURES, "a/9.png", "", "https://example.org/1.png", "a"]]
    source = table(rows, tmp_path / "t.jsonl")
    skipped: list[str] = []
    config = DataConfig(train="-", on_bad_row="skip")
    kept = list(convert_rows(str(source), lambda _: _same, config, skipped=skipped, reader=read_rows))
    assert len(kept) == len(PICTURES)
    assert [text.split(":")[0] for text in skipped] == [f"t.jsonl, row {row}" for row in (7, 8, 9, 10)]
    assert "a/9.png does not exist" in skipped[0] and "is empty" in skipped[1]
    assert "Download" in skipped[2] and "is a folder" in skipped[3]


def _same(row: RawRow) -> RawRow:
    return row


def test_a_table_without_pictures_is_refused(tmp_path: Path) -> None:
    source = table([{"imge": "a.png", "label": "a"}], tmp_path / "t.csv")
    assert "no column `image`" in refused(source) and "Did you mean `imge`?" in refused(source)


MISTAKES: dict[str, dict[str, bytes]] = {
    "c: a class folder without pictures": PICTURES | {"c/.keep": b""},
    "`A` and `a` differ only by case or spaces": PICTURES | {"A/0.png": b"1"},
    "`a` and `a ` differ only by case or spaces": PICTURES | {"a /0.png": b"1"},
    "beside the loose file 1.png": PICTURES | {"1.png": b"1"},
    "holds no pictures": {"LICENSE": b""},
    "labels.csv: a table beside pictures": PICTURES | {"labels.csv": b"a,b"},
    "train/metadata.csv: a table beside pictures": {"train/0.png": b"1", "train/metadata.csv": b"file_name\n0.png"},
}


@pytest.mark.parametrize("says", MISTAKES)
def test_unclear_folders_are_refused(tmp_path: Path, says: str) -> None:
    (folder := tmp_path / "plants").mkdir()
    assert says in refused(filled(folder, MISTAKES[says]))
    if "without pictures" not in says:
        assert says in refused(zipped(tmp_path / "plants.zip", MISTAKES[says]))
        assert says in refused(tarred(tmp_path / "plants.tar", MISTAKES[says]))


@pytest.mark.parametrize("stranger", ["notes.txt", "a/1.npy", "b/clip.mp4", "read me.pdf", "a/0.png.part"])
def test_other_files_are_malformed_rows_which_may_be_skipped(tmp_path: Path, stranger: str) -> None:
    source = filled(tmp_path / "plants", PICTURES | {stranger: b"1"})
    (malformed,) = (row for row in read_rows(str(source)) if row.mistake)
    assert malformed.place == f"{source}/{stranger}" and "Move it elsewhere" in malformed.mistake
    with pytest.raises(DataError, match=r"data\.on_bad_row=skip"):
        list(convert_rows(str(source), lambda _: _same, DataConfig(train="-"), skipped=[], reader=read_rows))
    skipped, config = list[str](), DataConfig(train="-", on_bad_row="skip")
    kept = list(convert_rows(str(source), lambda _: _same, config, skipped=skipped, reader=read_rows))
    assert len(kept) == len(PICTURES)
    assert len(skipped) == 1


MASK = encoded(np.eye(8, dtype=np.uint8)[:, :, None].repeat(3, 2) * 255)
PHOTOGRAPH = encoded(photograph(8, 8, seed=0))


@pytest.mark.parametrize(
    "names",
    [
        ("images/0", "images/1", "masks/0"),
        ("images/0", "images/1", "masks/0_mask"),
        ("benign/a", "malignant/b", "masks/a", "masks/b"),
        ("benign/a", "malignant/b", "masks/a_mask", "masks/b_mask"),
    ],
)
def test_masks_beside_their_pictures_are_no_class(tmp_path: Path, names: tuple[str, ...]) -> None:
    cells = {f"{name}.png": MASK if "masks" in name else PHOTOGRAPH for name in names}
    assert "cells/masks: holds masks of the pictures in" in refused(filled(tmp_path / "cells", cells))


def test_a_class_of_drawings_with_the_numbers_of_several_classes_is_one(tmp_path: Path) -> None:
    files = {"cat/0.png": PHOTOGRAPH, "cat/1.png": PHOTOGRAPH, "dog/0.png": PHOTOGRAPH, "dog/2.png": PHOTOGRAPH}
    drawn = {f"drawn/{n}.png": MASK for n in range(3)}
    assert len(read(filled(tmp_path / "beasts", files | drawn))) == 7


@pytest.mark.parametrize("files", [("circles/0.png", MASK), ("images/7.png", PHOTOGRAPH)])
def test_drawings_and_pictures_of_other_names_are_classes(tmp_path: Path, files: tuple[str, bytes]) -> None:
    assert len(read(filled(tmp_path / "shapes", {"squares/0.png": MASK, files[0]: files[1]}))) == 2


def test_missing_and_broken_sources_are_refused(tmp_path: Path) -> None:
    filled(tmp_path, {"plants.zip": b"PK", "dir/x": b""})
    assert "not a zip archive" in refused(tmp_path / "plants.zip")
    for name in ("plant.zip", "plant"):
        assert "no such file or folder. Did you mean `plants.zip`?" in refused(tmp_path / name)
    filled(tmp_path, {"a.tar.gz": b"1", "b.jpg": b"1"})
    assert "Unpack it" in refused(tmp_path / "a.tar.gz")


def test_a_single_picture_is_a_row_without_a_label(tmp_path: Path) -> None:
    content = PICTURES["a/0.png"]
    source = filled(tmp_path, {"b.PNG": content, "c.png": b"other"}) / "b.PNG"
    assert read(source) == [(content, None)]
    before = fingerprint(str(source))
    source.write_bytes(b"changed")
    assert fingerprint(str(source)) not in (before, fingerprint(str(tmp_path / "c.png")))
    (row,) = read_rows(str(source))
    with pytest.raises(DataError, match=r"a single picture, which has no label\. Name its folder"):
        require_classes(str(source), row)


def test_the_fingerprint_follows_contents_and_names(tmp_path: Path) -> None:
    folder = filled(tmp_path / "plants", PICTURES)
    first = fingerprint(str(folder))
    assert first == fingerprint(str(folder)) and len(first) == 64
    os.utime(folder / "a/0.png", (0, 0))
    assert fingerprint(str(folder)) == first
    (folder / "a/0.png").write_bytes(PICTURES["a/1.png"])
    changed = fingerprint(str(folder))
    (folder / "a/0.png").rename(folder / "b/9.png")
    assert len({first, changed, fingerprint(str(folder))}) == 3


def test_a_file_that_cannot_be_read_has_a_fingerprint(tmp_path: Path) -> None:
    folder = filled(tmp_path / "plants", PICTURES)
    whole = fingerprint(str(folder))
    (folder / "a/9.png").symlink_to("gone.png")
    assert fingerprint(str(folder)) == fingerprint(str(folder)) != whole


def test_the_fingerprint_of_a_table_follows_its_files(tmp_path: Path) -> None:
    filled(tmp_path, PICTURES)
    source = str(table([{"image": name, "label": name[0]} for name in PICTURES], tmp_path / "t.csv"))
    before = fingerprint(source)
    (tmp_path / "a/0.png").write_bytes(b"other")
    assert fingerprint(source) != before


def test_names_in_a_folder_of_pictures_are_found_without_suffix(tmp_path: Path) -> None:
    filled(tmp_path / "train_images", {"a1.png": b"1", "b2.JPG": b"2", "deep/c.3.jpeg": b"3", "17.png": b"4"})
    zipped(tmp_path / "t.zip", {f"t/{name}": content for name, content in (("a1.png", b"1"), ("17.png", b"4"))})
    rows = [{"id": name} for name in ("a1", "b2.JPG", "deep/c.3", 17)]
    source = table(rows, tmp_path / "t.jsonl")
    found = [row.columns["id"] for row in read_rows(str(source), "id", "train_images")]
    assert [(file.name, file.read()) for file in found] == [
        *(("a1", b"1"), ("b2.JPG", b"2"), ("deep/c.3", b"3"), ("17", b"4"))
    ]
    archived = read_rows(str(table([rows[0], rows[3]], tmp_path / "u.jsonl")), "id", str(tmp_path / "t.zip"))
    assert [row.columns["id"].read() for row in archived] == [b"1", b"4"]


@pytest.mark.parametrize(
    ("name", "folder", "says"),
    [
        ("twice", "own", "twice is 2 pictures of .*: twice.jpg, twice.png. Write the whole name"),
        ("none", "own", "has no picture none, with or without suffix; it has twice.jpg, twice.png"),
        ("twice", "nowhere", "image.folder: nowhere is neither in"),
        ("twice", "t.jsonl", "is a file. Write the folder"),
        ("twice", "empty", "holds no pictures"),
        ("twice", None, "write image.folder=FOLDER"),
    ],
)
def test_names_that_are_no_picture_or_several_are_refused(
    tmp_path: Path, name: str, folder: str | None, says: str
) -> None:
    filled(tmp_path / "own", {"twice.png": b"1", "twice.jpg": b"2"})
    (tmp_path / "empty").mkdir()
    source = table([{"image": name}], tmp_path / "t.jsonl")
    try:
        message = next(read_rows(str(source), "image", folder)).mistake
    except DataError as error:
        message = str(error)
    assert re.search(says, message)
