"""Class folders on disk or in an archive: which files are pictures, and which class each one has."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from workbench.data.images import idx_files, picture_archives
from workbench.data.images.picture_files import PictureFile
from workbench.data.labelled.labels import alike
from workbench.data.rows import RawRow
from workbench.errors import DataError

PICTURES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".tga", ".ico"),
)
_UNREADABLE = (".svg", ".heic", ".heif")
"""Pictures all the same: decoding says how they are converted."""
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
_SPLITS = (
    "train",
    "training",
    "test",
    "testing",
    "val",
    "valid",
    "validation",
    "dev",
    "eval",
    "unlabelled",
    "unlabeled",
)
_DEEPEST = 20
_PERMIT = "Make it readable, or name another folder."


@dataclass(frozen=True)
class _Tree:
    """Files below a folder, and all its folders, as paths from there."""

    name: str
    files: list[PurePosixPath]
    folders: list[PurePosixPath]
    root: Path | PurePosixPath
    """The folder on disk or inside the archive."""
    archive: Path | None = None
    """The archive that holds it."""
    spans: Mapping[PurePosixPath, tuple[int, int]] = field(default_factory=dict)
    """Places of the files in a tar archive."""

    def picture(self, file: PurePosixPath) -> PictureFile:
        name = f"{self.name}/{file}"
        if isinstance(self.root, Path):
            return PictureFile(name, self.root / file)
        member = self.root / file
        return PictureFile(name, self.archive, str(member), span=self.spans.get(member))

    def below(self, folder: str) -> _Tree:
        """The tree of a folder directly below."""

        def inside(paths: list[PurePosixPath]) -> list[PurePosixPath]:
            return [each.relative_to(folder) for each in paths if each.parts[0] == folder and len(each.parts) > 1]

        files, folders = inside(self.files), inside(self.folders)
        return replace(self, name=f"{self.name}/{folder}", files=files, folders=folders, root=self.root / folder)


def is_tree(path: Path) -> bool:
    """Whether a path is an archive, a folder inside one, or a folder that is not one of tables."""
    if picture_archives.archive_of(path) is not None:
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


def read_rows(path: Path, column: str, label: str) -> Iterator[RawRow]:
    """Yield the pictures of a folder or an archive, with their class folders as labels.

    Classes come in turn, the first picture of each by name and then the second ones, so that the first rows hold all
    classes as evenly as they can.

    Raises:
        DataError: It holds no pictures, an empty class folder, two folders for one class, several splits, or files of
            which it is not clear what they are.
    """
    archive = picture_archives.archive_of(path)
    tree = _unwrapped(_tree_of_folder(path) if archive is None else _tree_of_archive(path, archive))
    loose = [file for file in tree.files if len(file.parts) == 1]
    classes = sorted({each.parts[0] for each in (*tree.files, *tree.folders) if each not in loose})
    _require_no_idx(tree)
    _require_known_kinds(tree)
    if not tree.files and not classes:
        raise DataError(f"{tree.name}: holds no pictures. Known: {', '.join(PICTURES)}.")
    _require_no_splits(tree, classes)
    _require_clear_classes(tree, classes, loose)
    files = sorted(tree.files, key=lambda file: file.parts)
    for file in _in_turn(files) if classes else files:
        picture = tree.picture(file)
        yield RawRow(picture.name, {column: picture} if not classes else {column: picture, label: file.parts[0]})


def _in_turn(files: Sequence[PurePosixPath]) -> Iterator[PurePosixPath]:
    """Sorted files: the first one of each class folder, then the second ones; smaller classes end earlier."""
    classes = [list(own) for _, own in itertools.groupby(files, key=lambda file: file.parts[0])]
    for turn in itertools.zip_longest(*classes):
        yield from filter(None, turn)


def nearest(name: str, known: Sequence[str]) -> str:
    """' Did you mean `x`?' for the nearest known name, otherwise the first few."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean `{near[0]}`?" if near else f" There are: {', '.join(known[:8]) or 'none'}."


def _tree_of_folder(folder: Path) -> _Tree:
    tree = _Tree(str(folder), [], [], folder)
    try:
        for place, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
            here = PurePosixPath(Path(place).relative_to(folder).as_posix())
            if len(here.parts) > _DEEPEST:
                raise DataError(f"{place}: folders {_DEEPEST} deep: a link that leads back? Remove it.")
            folders[:] = [name for name in folders if not _left_behind(name)]
            tree.folders.extend(here / name for name in folders)
            tree.files.extend(here / name for name in names if not _ignored(name))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}). {_PERMIT}") from None
    return tree


def _refuse(error: OSError) -> None:
    raise error


def _tree_of_archive(path: Path, archive: Path) -> _Tree:
    chosen = PurePosixPath(path.relative_to(archive).as_posix())
    members = [each for each in picture_archives.members(archive) if _counts(each.path, each.is_folder)]
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


def _unwrapped(tree: _Tree) -> _Tree:
    """The tree below folders that hold a single folder and nothing else, as archives of a folder do."""
    while True:
        tops = {each.parts[0] for each in (*tree.files, *tree.folders)}
        if len(tops) != 1 or not any(len(folder.parts) > 1 for folder in tree.folders):
            return tree
        below = tree.below(*tops)
        if any(len(file.parts) == 1 for file in below.files):
            return tree
        tree = below


def _require_no_idx(tree: _Tree) -> None:
    if idx_names := sorted(str(file) for file in tree.files if idx_files.is_named_so(file)):
        pictures = [file for file in idx_names if "labels" not in file] or ["the file of their pictures"]
        raise DataError(f"{tree.name}: holds idx files. Name one: {tree.name}/{f' or {tree.name}/'.join(pictures)}.")


def _require_known_kinds(tree: _Tree) -> None:
    for file in sorted(tree.files):
        suffix = file.suffix.lower()
        if suffix in _TABLES:
            cure = "Name it to read its rows" if tree.archive is None else "Unpack the archive and name the table"
            raise DataError(
                f"{tree.name}/{file}: a table beside pictures. {cure} (image.column holds the paths), or move it "
                "elsewhere."
            )
        if suffix == ".arrow":
            raise DataError(
                f"{tree.name}/{file}: a data set as `datasets` saves it. Write it as a table, "
                'load_from_disk(FOLDER).to_parquet("rows.parquet"), and name that.'
            )
        if suffix not in ("", *PICTURES, *_UNREADABLE):
            raise DataError(f"{tree.name}/{file}: unknown kind of file `{suffix}` among pictures. Move it elsewhere.")


def _require_no_splits(tree: _Tree, classes: Sequence[str]) -> None:
    if len(classes) > 1 and all(name.lower() in _SPLITS for name in classes):
        choices = " or ".join(f"{tree.name}/{name}" for name in classes)
        raise DataError(f"{tree.name}: holds several splits, {', '.join(classes)}. Name one: {choices}.")


def _require_clear_classes(tree: _Tree, classes: Sequence[str], loose: Sequence[PurePosixPath]) -> None:
    if classes and loose:
        raise DataError(
            f"{tree.name}: holds class folders ({', '.join(classes[:3])}) beside the loose file {loose[0]}. "
            "Move loose pictures into the folder of their class, or elsewhere."
        )
    filled = {file.parts[0] for file in tree.files}
    if empty := [name for name in classes if name not in filled]:
        raise DataError(f"{tree.name}/{empty[0]}: a class folder without pictures. Fill it, or remove it.")
    if (same := alike(classes)) is not None:
        raise DataError(
            f"{tree.name}: the folders `{same[0]}` and `{same[1]}` differ only by case or spaces: one class or two? "
            "Put all their pictures into one, or rename one."
        )
