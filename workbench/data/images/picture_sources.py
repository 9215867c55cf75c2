"""Rows of pictures or recordings: class folders, zip and tar archives of them, idx files, tables that name them.

A folder `plants/` with `plants/fern/1.jpg` has the row {image: that file, label: "fern"}; folders inside a class folder
belong to the class; so it is with recordings. An archive is read like the folder that it holds; `plants.zip/train` is
its folder `train`. A folder without class folders has rows without labels, for predictions; so has a single picture. A
tar archive must not be compressed, so that each file can be read alone.

idx files are those that MNIST comes in: `NAME-images-idx3-ubyte` with its labels in `NAME-labels-idx1-ubyte` beside.
Colours have a fourth dimension, `NAME-images-idx4-ubyte`. Both files may stand in a zip or tar archive.

Legend: N pictures, H height, W width, 3 the channels red, green and blue.
"""

from __future__ import annotations

import base64
import collections
import difflib
import gzip
import hashlib
import itertools
import math
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar

import numpy as np

from workbench.config import DataConfig
from workbench.data import hub_datasets, rows
from workbench.data.images import picture_files
from workbench.data.images.picture_files import PictureFile, Pixels
from workbench.data.labelled.labels import alike
from workbench.data.rows import RawRow, excerpt, place
from workbench.data.source_files import AS_NAMED, kind_of, local_path
from workbench.data.stored_files import StoredFile
from workbench.errors import DataError
from workbench.schema import did_you_mean

ARCHIVES = (".zip", ".tar")


@dataclass(frozen=True, slots=True)
class Member:
    """A file or a folder in an archive."""

    path: PurePosixPath
    is_folder: bool
    span: tuple[int, int] | None = None
    """Where the content of a file begins in a tar archive, and how many bytes it has."""


def archive_of(path: Path) -> Path | None:
    """The archive that a path names, or that it leads into."""
    return next((each for each in (path, *path.parents) if each.suffix.lower() in ARCHIVES and each.is_file()), None)


def _archive_members(archive: Path) -> list[Member]:
    """All files and folders of an archive. Raises DataError: it is damaged, encrypted or compressed as a whole, or
    holds links or paths that lead out of it."""
    return _of_tar(archive) if archive.suffix.lower() == ".tar" else _of_zip(archive)


def _of_zip(archive: Path) -> list[Member]:
    try:
        with zipfile.ZipFile(archive) as opened:
            # Later ones replace earlier ones of the same name, as in unpacking.
            entries = {info.filename: info for info in opened.infolist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{archive}: not a zip archive that can be read ({error}). Copy or download it again."
        ) from None
    if any(info.flag_bits & 1 for info in entries.values()):
        raise DataError(f"{archive}: is encrypted. Unpack it, and name the folder.")
    if wrong := next((name for name in entries if "\\" in name), None):
        raise DataError(
            f"{archive}: holds {wrong}, with a backslash in place of /, as old programs for Windows write. Unpack it, "
            "and name the folder."
        )
    return [Member(_path_inside(archive, name), info.is_dir()) for name, info in entries.items()]


def _of_tar(archive: Path) -> list[Member]:
    try:
        # Later ones replace earlier ones of the same name, as in unpacking.
        with tarfile.open(archive, "r:") as opened:
            entries = {info.name: info for info in opened.getmembers()}
    except (OSError, tarfile.TarError) as error:
        raise DataError(
            f"{archive}: not a tar archive that can be read ({error}). A compressed one must be unpacked; name the "
            "folder. Else copy or download it again."
        ) from None
    members = []
    for info in entries.values():
        path = _path_inside(archive, info.name)
        if info.issym() or info.islnk():
            raise DataError(
                f"{archive}: {info.name} is a link to {info.linkname}. Pack it again with the files themselves: "
                "tar --dereference --hard-dereference -cf."
            )
        if not info.isdir() and (not info.isfile() or info.issparse()):
            raise DataError(f"{archive}: {info.name} is no plain file. Pack it again without.")
        members.append(Member(path, info.isdir(), None if info.isdir() else (info.offset_data, info.size)))
    return members


def _path_inside(archive: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"{archive}: holds {name}, a path that leads out of the archive. Pack it again without.")
    return path


_NAME = re.compile(r".*[-.]idx[1-4]-ubyte(\.gz)?")
_OTHER_NUMBERS = (b"\x09", b"\x0b", b"\x0c", b"\x0d", b"\x0e")
"""Types of numbers other than unsigned bytes: signed ones, of 16 and 32 bits, floats."""


def is_idx(path: Path) -> bool:
    """Whether a path is named like an idx file, and no folder."""
    return _NAME.fullmatch(path.name) is not None and not path.is_dir()


def _idx_rows(path: Path, column: str, label: str) -> Iterator[RawRow]:
    """Yield the pictures of an idx file, grey or in colour, with labels where their file is beside it. Raises
    DataError: it is missing or damaged, or holds labels, or other than as many labels."""
    if "labels" in path.name:
        of_colours, of_grey = (_renamed(path, "images", dimensions) for dimensions in (4, 3))
        name = (of_colours if _idx_file(of_colours) else of_grey).name
        raise DataError(f"{path}: holds labels without pictures. Name {name} beside it.")
    images = _read_idx(path)
    if images.ndim == 4:
        if images.shape[3] not in (1, 3) and images.shape[1] in (1, 3):
            images = images.transpose(0, 2, 3, 1)
        if images.shape[3] not in (1, 3):
            shape = " x ".join(map(str, images.shape))
            raise DataError(f"{path}: its pictures, {shape}, have other than 1 or 3 channels. Write it again with 3.")
        images = images[:, :, :, 0] if images.shape[3] == 1 else images
    elif images.ndim != 3:
        raise DataError(
            f"{path}: has {images.ndim} dimension(s), and pictures have 3, or 4 in colour. Name another one."
        )
    labels_file = _renamed(path, "labels", 1)
    labels_N = _read_idx(labels_file) if labels_file != path and _idx_file(labels_file) else None
    if labels_N is not None and labels_N.shape != (len(images),):
        raise DataError(
            f"{labels_file}: holds {len(labels_N)} labels, but {path.name} {len(images)} pictures. "
            "Copy both again, or move the labels elsewhere to read pictures only."
        )
    for index, image in enumerate(images):
        location = place(path.name, index + 1)
        columns: dict[str, object] = {column: PictureFile(location, content=image.tobytes(), shape=image.shape)}
        if labels_N is not None:
            columns[label] = str(labels_N[index])
        yield RawRow(location, columns)


def _idx_file(path: Path) -> PictureFile | None:
    """The file, on disk or in an archive; None where there is none."""
    archive = archive_of(path)
    if archive is None:
        return PictureFile(str(path), path) if path.is_file() else None
    inside = path.relative_to(archive).as_posix()
    matches = (each for each in _archive_members(archive) if str(each.path) == inside and not each.is_folder)
    return next((PictureFile(str(path), archive, inside, span=each.span) for each in matches), None)


def _renamed(path: Path, kind: str, dimensions: int) -> Path:
    return path.with_name(re.sub(r"idx\d", f"idx{dimensions}", re.sub(r"images|labels", kind, path.name)))


def _whole_bytes(file: PictureFile) -> bytes:
    if file.path is None or file.member:
        return file.read()
    try:
        return file.path.read_bytes()  # however many pictures it holds
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read ({error.strerror}). Copy or download it again.") from None


def _read_idx(path: Path) -> Pixels:
    """The numbers of an idx file, of as many dimensions as it says."""
    if (file := _idx_file(path)) is None:
        raise DataError(f"{path}: no such file. Name the file of images.")
    content = _whole_bytes(file)
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}). Copy or download it again.") from None
    if content[:2] == b"\0\0" and content[2:3] in _OTHER_NUMBERS:
        raise DataError(f"{path}: holds other numbers than unsigned bytes. Write it again with those.")
    dimensions = content[3] if len(content) > 3 else 0
    header = 4 + 4 * dimensions
    sizes = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    if content[:3] != b"\0\0\x08" or not sizes or len(content) != header + math.prod(sizes):
        raise DataError(f"{path}: not a whole idx file of unsigned bytes. Copy or download it again.")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


PICTURES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".tga", ".ico"),
)
_UNREADABLE = (".svg", ".heic", ".heif")  # pictures all the same: decoding says how they are converted


F = TypeVar("F", bound=StoredFile)


@dataclass(frozen=True)
class MediaKind(Generic[F]):
    """What rows hold in place of texts."""

    one: str
    many: str
    section: str
    """Section of the configuration that says how they are read."""
    suffixes: tuple[str, ...]
    """Of files that can be read."""
    unreadable: tuple[str, ...]
    """Of files that are of this kind all the same: decoding says how they are converted."""
    file: type[F]
    looks_like: Callable[[bytes], bool]
    """Whether bytes begin as a file of a usual kind does."""


PICTURE = MediaKind(
    "picture", "pictures", "image", PICTURES, _UNREADABLE, PictureFile, picture_files.looks_like_picture
)
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
_SPLITS = (
    *("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"),
    *("unlabelled", "unlabeled"),
)
_DEEPEST = 20
_PERMIT = "Make it readable, or name another folder."


@dataclass(frozen=True)
class _Tree:
    """Files below a folder, and all its folders, as paths from there."""

    name: str
    files: list[PurePosixPath]
    folders: list[PurePosixPath]
    root: Path | PurePosixPath  # the folder on disk or inside the archive
    archive: Path | None = None  # the archive that holds it
    spans: Mapping[PurePosixPath, tuple[int, int]] = field(default_factory=dict)  # places of the files in a tar archive

    def stored(self, file: PurePosixPath, kind: MediaKind[F]) -> F:
        name = f"{self.name}/{file}"
        if isinstance(self.root, Path):
            return kind.file(name, self.root / file)
        member = self.root / file
        return kind.file(name, self.archive, str(member), span=self.spans.get(member))

    def below(self, folder: str) -> _Tree:
        """The tree of a folder directly below."""

        def inside(paths: list[PurePosixPath]) -> list[PurePosixPath]:
            return [each.relative_to(folder) for each in paths if each.parts[0] == folder and len(each.parts) > 1]

        files, folders = inside(self.files), inside(self.folders)
        return replace(self, name=f"{self.name}/{folder}", files=files, folders=folders, root=self.root / folder)


def _is_tree(path: Path) -> bool:
    """Whether a path is an archive, a folder inside one, or a folder that is not one of tables."""
    if archive_of(path) is not None:
        return True
    if not path.is_dir():
        return False
    try:
        with os.scandir(path) as entries:
            seen = [entry for entry in entries if _counts(PurePosixPath(entry.name), entry.is_dir())]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {_PERMIT}") from None
    tables = [entry for entry in seen if entry.is_file() and Path(entry.name).suffix.lower() in _TABLES]
    return not tables or len(tables) < len(seen)


def _tree_rows(path: Path, column: str, label: str, kind: MediaKind[Any]) -> Iterator[RawRow]:
    """Yield the pictures or recordings of a folder or an archive, with their class folders as labels.

    Classes come in turn, the first picture of each by name and then the second ones, so that the first rows hold all
    classes as evenly as they can. Raises DataError: it holds no pictures, an empty class folder, two folders for one
    class, several splits, or files of which it is not clear what they are.
    """
    tree = _tree_of(path)
    # Folders that hold a single folder and nothing else, as archives of a folder do, are left out.
    while (below := _only_folder(tree)) is not None:
        if not below.folders or any(len(file.parts) == 1 for file in below.files):
            break
        tree = below
    loose = [file for file in tree.files if len(file.parts) == 1]
    classes = sorted({each.parts[0] for each in (*tree.files, *tree.folders) if each not in loose})
    if idx_names := sorted(str(file) for file in tree.files if _NAME.fullmatch(file.name)):
        pictures = [file for file in idx_names if "labels" not in file] or ["the file of their pictures"]
        raise DataError(f"{tree.name}: holds idx files. Name one: {tree.name}/{f' or {tree.name}/'.join(pictures)}.")
    strangers = dict[PurePosixPath, str]()
    for file in sorted(tree.files):
        suffix = file.suffix.lower()
        if suffix in _TABLES:
            cure = "Name it to read its rows" if tree.archive is None else "Unpack the archive and name the table"
            raise DataError(
                f"{tree.name}/{file}: a table beside {kind.many}. {cure} ({kind.section}.column holds the paths), or "
                "move it elsewhere."
            )
        if suffix == ".arrow":
            raise DataError(
                f"{tree.name}/{file}: a data set as `datasets` saves it. Write it as a table, "
                'load_from_disk(FOLDER).to_parquet("rows.parquet"), and name that.'
            )
        if suffix not in ("", *kind.suffixes, *kind.unreadable):
            strangers[file] = f"unknown kind of file `{suffix}` among {kind.many}. Move it elsewhere."
    tree = replace(tree, files=[file for file in tree.files if file not in strangers])
    loose = [file for file in loose if file not in strangers]
    if strangers and not tree.files:
        file, mistake = next(iter(strangers.items()))
        raise DataError(f"{tree.name}/{file}: {mistake}")
    if not tree.files and not classes:
        raise DataError(f"{tree.name}: holds no {kind.many}. Known: {', '.join(kind.suffixes)}.")
    if len(classes) > 1 and all(name.lower() in _SPLITS for name in classes):
        choices = " or ".join(f"{tree.name}/{name}" for name in classes)
        raise DataError(f"{tree.name}: holds several splits, {', '.join(classes)}. Name one: {choices}.")
    if classes and loose:
        raise DataError(
            f"{tree.name}: holds class folders ({', '.join(classes[:3])}) beside the loose file {loose[0]}. "
            f"Move loose {kind.many} into the folder of their class, or elsewhere."
        )
    filled = {file.parts[0] for file in tree.files}
    if empty := [name for name in classes if name not in filled]:
        raise DataError(f"{tree.name}/{empty[0]}: a class folder without {kind.many}. Fill it, or remove it.")
    if (same := alike(classes)) is not None:
        raise DataError(
            f"{tree.name}: the folders `{same[0]}` and `{same[1]}` differ only by case or spaces: one class or two? "
            f"Put all their {kind.many} into one, or rename one."
        )
    yield from (RawRow(f"{tree.name}/{file}", mistake=mistake) for file, mistake in strangers.items())
    files = sorted(tree.files, key=lambda file: file.parts)
    if kind is PICTURE and (masks := _masks(tree, classes)) is not None:
        raise DataError(
            f"{tree.name}/{masks[0]}: holds masks of the pictures in {' and '.join(masks[1:])} by its looks (the same "
            "names, few colours), and no class. Move it elsewhere."
        )
    if classes:
        own_files = [list(own) for _, own in itertools.groupby(files, key=lambda file: file.parts[0])]
        files = [file for turn in itertools.zip_longest(*own_files) for file in turn if file is not None]
    for file in files:
        stored = tree.stored(file, kind)
        yield RawRow(stored.name, {column: stored} if not classes else {column: stored, label: file.parts[0]})


def _masks(tree: _Tree, classes: Sequence[str]) -> list[str] | None:
    """A folder of masks, and those of their pictures: every mask has the name of a picture, which `_mask` or the like
    may follow, and so few colours that they are marks, where pictures have many. None where there are none."""
    files_of: dict[str, list[PurePosixPath]] = {name: [] for name in classes}
    for file in tree.files if classes else ():
        files_of[file.parts[0]].append(file)
    stems = {name: {file.stem for file in files} for name, files in files_of.items()}
    times, marks = collections.Counter(itertools.chain(*stems.values())), dict[str, int]()

    def colours(name: str) -> int:
        if name not in marks:
            file = tree.stored(min(files_of[name]), PICTURE)
            marks[name] = len(np.unique(file.decode(max_pixels=LARGEST).reshape(-1, 3), axis=0))
        return marks[name]

    try:
        for one, own in stems.items():
            bare = {_MASK.sub("", stem) for stem in own}
            whole = [other for other in classes if other != one and bare <= stems[other]]
            # Of several folders together only where each has pictures of its own names: numbers are in all of them.
            apart = all(times[stem] == 1 + (stem in own) for stem in bare)
            shared = [other for other in classes if apart and other != one and bare & stems[other]]
            for pictures in [*([each] for each in whole), shared]:
                if pictures and colours(one) <= MARKS < min(map(colours, pictures)):
                    return [one, *(f"{tree.name}/{each}" for each in pictures)]
    except DataError:
        pass  # whoever decodes all pictures says so of this one
    return None


def nearest(name: str, known: Sequence[str]) -> str:
    """' Did you mean `x`?' for the nearest known name, otherwise the first few."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean `{near[0]}`?" if near else f" There are: {', '.join(known[:8]) or 'none'}."


def _tree_of(path: Path) -> _Tree:
    archive = archive_of(path)
    return _tree_of_folder(path) if archive is None else _tree_of_archive(path, archive)


def _only_folder(tree: _Tree) -> _Tree | None:
    """The one folder of a tree that holds nothing else."""
    tops = {each.parts[0] for each in (*tree.files, *tree.folders)}
    return tree.below(*tops) if len(tops) == 1 and not any(len(file.parts) == 1 for file in tree.files) else None


def _tree_of_folder(folder: Path) -> _Tree:
    def refuse(error: OSError) -> None:
        raise error

    tree = _Tree(str(folder), [], [], folder)
    try:
        for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
            here = PurePosixPath(Path(place).relative_to(folder).as_posix())
            if len(here.parts) > _DEEPEST:
                raise DataError(f"{place}: folders {_DEEPEST} deep: a link that leads back? Remove it.")
            folders[:] = [name for name in folders if not _left_behind(name)]
            tree.folders.extend(here / name for name in folders)
            tree.files.extend(here / name for name in names if not _ignored(name))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}). {_PERMIT}") from None
    return tree


def _tree_of_archive(path: Path, archive: Path) -> _Tree:
    chosen = PurePosixPath(path.relative_to(archive).as_posix())
    members = [each for each in _archive_members(archive) if _counts(each.path, each.is_folder)]
    files = [each.path for each in members if not each.is_folder]
    folders = {parent for file in files for parent in file.parents if parent.name}
    folders.update(each.path for each in members if each.is_folder and each.path.name)
    if chosen.name and chosen not in folders:
        known = sorted(str(folder) for folder in folders)
        raise DataError(f"{path}: {archive.name} has no folder `{chosen}`.{nearest(str(chosen), known)}")
    files = [file.relative_to(chosen) for file in files if chosen in file.parents]
    below = [folder.relative_to(chosen) for folder in folders if chosen in folder.parents]
    spans = {each.path: each.span for each in members if each.span is not None}
    return _Tree(str(path), files, below, chosen, archive, spans)


def _left_behind(name: str) -> bool:
    """Whether a file or folder is hidden, or what operating systems leave behind."""
    return name.startswith(".") or name.lower() in ("__macosx", "thumbs.db", "desktop.ini")


def _counts(path: PurePosixPath, is_folder: bool) -> bool:
    return not any(map(_left_behind, path.parts)) and (is_folder or not _ignored(path.name))


def _ignored(name: str) -> bool:
    """Whether a file is left behind, or a licence or the like; a folder of such a name may be a class."""
    if _left_behind(name):
        return True
    stem, suffix = os.path.splitext(name.lower())
    return suffix in ("", ".md", ".txt", ".rst") and stem.startswith(
        ("readme", "license", "licence", "notice", "copying")
    )


MARKS = 16  # colours of a mask, at most
_MASK = re.compile(r"[ _.-]?(?:mask|label|seg(?:mentation)?|gt)$", re.IGNORECASE)
LARGEST = 100_000_000  # pixels of a picture that may be a mask
LABEL = "label"  # column of the class that folders and idx files say


def read_rows(
    source: str,
    column: str = "image",
    folder: str | None = None,
    config: DataConfig = AS_NAMED,
    kind: MediaKind[Any] = PICTURE,
) -> Iterator[RawRow]:
    """Yield the rows of a source of pictures or recordings; each has a `StoredFile` of its kind in `column`. Raises
    DataError: the source is missing, holds none, or does not say clearly which class they have.

    Args:
        source: A folder, a zip or tar archive or a folder inside one, an idx file of images, a single picture, a table,
            a folder of tables, or a hub data set.
        column: The picture in a table: a path from the table's folder, the bytes of a file, or both, as `datasets` do;
            in a table of text the bytes in base64, or a data URI.
        folder: The folder or archive whose pictures a table names, with or without their suffix.
        config: How tables are read, as `rows.read_rows` takes it.
    """
    path = _path(source)
    if kind is PICTURE and is_idx(path):
        yield from _idx_rows(path, column, LABEL)
    elif _is_tree(path):
        yield from _tree_rows(path, column, LABEL, kind)
    elif _is_one(path, kind):
        yield RawRow(str(path), {column: kind.file(str(path), path)})
    else:
        suffix = path.suffix.lower()
        if path.is_file() and suffix in _OTHER_ARCHIVES and kind_of(path) is None:
            raise DataError(
                f"{path}: compressed archives of this kind are not read. Unpack it and name the folder; zip and tar "
                "archives are read as they are."
            )
        parent = path.parent
        if not path.exists() and (suffix in ARCHIVES or (parent.name and parent.is_dir())):
            known = sorted(entry.name for entry in parent.iterdir()) if parent.is_dir() else []
            raise DataError(f"{source}: no such file or folder.{nearest(path.name, known)}")
        yield from _rows_of_table(source, path, column, folder, config, kind)


def require_classes(source: str, row: RawRow, kind: MediaKind[Any] = PICTURE) -> None:
    """Refuse a row that has no label: a file alone, or one of a folder or an archive without class folders."""
    path = _path(source)
    if LABEL in row.columns:
        return
    if _is_one(path, kind):
        raise DataError(f"{source}: a single {kind.one}, which has no label. Name its folder.")
    if _is_tree(path):
        raise DataError(
            f"{source}: holds {kind.many} without class folders, so that they have no labels. Name the folder "
            "above, with a folder for each class, or a table of paths and labels."
        )


def fingerprint(
    source: str,
    column: str = "image",
    folder: str | None = None,
    config: DataConfig = AS_NAMED,
    kind: MediaKind[Any] = PICTURE,
) -> str:
    """Identify the content of all files of a source by SHA-256, with their names; of a hub data set, id@commit."""
    path = _path(source)
    if kind is PICTURE and is_idx(path):
        files = (content for each in (path, _renamed(path, "labels", 1)) if (content := _idx_file(each)))
        digests = (hashlib.sha256(_whole_bytes(each)).hexdigest() for each in files)
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()
    hasher = hashlib.sha256()
    if not _is_tree(path) and not _is_one(path, kind):
        table = rows.fingerprint(source, config)
        if not os.path.exists(path):
            return table
        hasher.update(table.encode())
    for row in read_rows(source, column, folder, config, kind):
        file = row.columns.get(column)
        if isinstance(file, StoredFile) and (file.path is not None):
            hasher.update(f"{row.place}\0{row.columns.get(LABEL)}\0".encode())
            hasher.update(file.digest_or_fault())
    return hasher.hexdigest()


def _path(source: str) -> Path:
    path = local_path(source)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):  # a hub data set, or a folder inside an archive
        pass
    except OSError as error:
        raise DataError(
            f"{source}: cannot be read ({error.strerror}). Make it readable, or name another one."
        ) from None
    return path


def _is_one(path: Path, kind: MediaKind[Any]) -> bool:
    return path.suffix.lower() in kind.suffixes and path.is_file()


_OTHER_ARCHIVES = (".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")


def _rows_of_table(
    source: str, path: Path, column: str, named: str | None, config: DataConfig, kind: MediaKind[Any]
) -> Iterator[RawRow]:
    folder = path if path.is_dir() else path.parent
    find = None if named is None else finder(named, folder, column, kind)
    on_hub = not os.path.exists(path) and hub_datasets.is_id(source)
    known: list[str] | None = None
    for row in rows.read_rows(source, config):
        if row.mistake:
            yield row
            continue
        if known is None:
            known = list(row.columns)
            if column not in known:
                raise DataError(
                    f"{source}: has no column `{column}` that holds {kind.many}.{did_you_mean(column, known)} "
                    f"Write {kind.section}.column with the name of the column."
                )
        try:
            cell = row.columns.get(column)
            file = (None if find is None else find(cell)) or file_of(
                cell, row.place, None if on_hub else folder, column, kind
            )
        except DataError as error:
            yield RawRow(row.place, row.columns, str(error))
        else:
            yield RawRow(row.place, {**row.columns, column: file})


def finder(named: str, beside: Path, column: str, kind: MediaKind[F]) -> Callable[[Any], F | None]:
    """What finds the file of a cell that is a name in `image.folder`, with or without suffix; None for other cells.
    A name that is several files, or none, is refused."""
    key, many = f"{kind.section}.folder", kind.many
    places = (beside / named, Path(named).expanduser())
    if (path := next((each for each in places if each.exists() or archive_of(each)), None)) is None:
        raise DataError(
            f"{key}: {named} is neither in {beside} nor in {Path.cwd()}. Write the folder, or the zip or tar "
            f"archive, that holds the {many}."
        )
    if path.is_file() and archive_of(path) is None:
        raise DataError(f"{key}: {path} is a file. Write the folder that holds the {many}.")
    tree = _tree_of(path)
    while not any(len(file.parts) == 1 for file in tree.files) and (below := _only_folder(tree)) is not None:
        tree = below
    pictures = sorted(file for file in tree.files if file.suffix.lower() in (*kind.suffixes, *kind.unreadable))
    if not pictures:
        raise DataError(f"{key}: {path} holds no {many}. Write the folder that does.")
    whole, by_stem = set(pictures), dict[str, list[PurePosixPath]]()
    for file in pictures:
        by_stem.setdefault(str(file.with_suffix("")), []).append(file)

    def find(cell: Any) -> F | None:
        if isinstance(cell, int) and not isinstance(cell, bool):
            cell = str(cell)
        if not isinstance(cell, str) or not (name := cell.strip()) or len(name) > _LONGEST_SHOWN:
            return None
        try:
            files = [file] if (file := PurePosixPath(name)) in whole else by_stem.get(str(file), [])
        except ValueError:
            return None
        if len(files) > 1:
            raise DataError(
                f"`{column}`: {name} is {len(files)} {many} of {path}: {', '.join(map(str, files))}. Write the whole "
                "name of one."
            )
        if files:
            return replace(tree.stored(files[0], kind), name=name)
        if os.path.isabs(name) or (beside / name).is_file() or _of_text(name, column, kind) is not None:
            return None
        some = ", ".join(map(str, pictures[:3]))
        raise DataError(
            f"`{column}`: {path} has no {kind.one} {name}, with or without suffix; it has {some}. Correct the name, or "
            f"write {key} with the folder that has it."
        )

    return find


def file_of(value: Any, place: str, folder: Path | None, column: str, kind: MediaKind[F]) -> F:
    """The picture or recording that a cell holds; a path is taken from `folder`. Raises DataError: it holds none, or a
    path that leads to none."""
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
    if (held := kind.file.from_cell(value, place)) is not None:
        return held
    if isinstance(value, bytes):
        return kind.file(place, content=value)
    if not isinstance(value, str | None):
        raise DataError(f"`{column}` must be a path or the bytes of a {kind.one} file, found {excerpt(value)}.")
    if not value or not value.strip():
        raise DataError(f"`{column}` is empty: the row has no {kind.one}.")
    if value.lower().startswith(("http://", "https://")):
        raise DataError(f"`{column}` is an address, {excerpt(value)}. Download the {kind.many}, and write their paths.")
    if (content := _of_text(value, column, kind)) is not None:
        return kind.file(place, content=content)
    shown = value if len(value) <= _LONGEST_SHOWN else excerpt(value)
    if folder is None and not os.path.isabs(value):  # `datasets` names its downloaded files with their whole path
        raise DataError(f"`{column}` is the path {excerpt(value)}, which a data set on the hub does not bring along.")
    path = (folder or Path()) / os.path.expanduser(value.strip())
    try:
        if path.is_file():
            return kind.file(value.strip(), path)
        fault = "is a folder" if path.is_dir() else "does not exist"
    except (OSError, ValueError):  # longer than a path may be, or with a sign that none has
        raise DataError(f"`{column}`: {shown} is neither a path nor a {kind.one} in base64.") from None
    raise DataError(
        f"`{column}`: {shown} {fault} ({folder or Path()}/{shown}). Paths are taken from the table's folder: write "
        f"{kind.section}.folder=FOLDER where another one holds the {kind.many}, or where names have no suffix."
    )


_LONGEST_SHOWN = 200  # characters of a path that a message shows
_DATA_URI = re.compile(r"data:(?P<kind>[^,]{0,200}),", re.IGNORECASE)


def _of_text(value: str, column: str, kind: MediaKind[Any]) -> bytes | None:
    """The bytes of a file that text holds as a data URI or in base64; None of other text. Raises DataError: a data
    URI that holds no base64."""
    uri = _DATA_URI.match(text := value.strip())
    if uri is None:
        # Whether such a file begins is told by the first signs, so that a path costs nothing.
        start = _from_base64(text[:64])
        content = _from_base64(text) if start is not None and kind.looks_like(start) else None
        return content if content is not None and len(content) > len(start or b"") else None
    content = _from_base64(text[uri.end() :]) if uri["kind"].lower().endswith(";base64") else None
    if content is None:
        raise DataError(f"`{column}`: {excerpt(value)} is a data URI without whole base64. Write it again, or a path.")
    return content


def _from_base64(text: str) -> bytes | None:
    """Bytes of base64, with or without its filling signs and line ends, and also as addresses write it."""
    text = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        return None
