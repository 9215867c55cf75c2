"""A copy of a run directory at an address, made anew after each checkpoint, from which another machine goes on.

While the run goes on, its files stand in `ADDRESS/unfinished`, each version under a name of its own. `index.json` there
says which of them are the run. It is written after them, so whoever reads it finds a state that was whole. A finished
run is copied as it is, and `unfinished` goes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

from workbench.errors import FileError, ResumeError
from workbench.runs import addresses, files

_LOOK_S = 2.0
"""Seconds between two looks for a new checkpoint."""
_UNFINISHED = "unfinished"
_INDEX = "index.json"


@contextmanager
def kept(folder: Path, address: str, say: Callable[[str], None]) -> Iterator[None]:
    """Keep a copy of a run directory at an address while the block runs; whole when it ends without an error.

    Args:
        folder: Of the run; it need not exist yet.
        address: Where `addresses.require_free` found room, or what `fetch` read.
        say: Told that a copy failed. Training goes on, and the next checkpoint is copied with what failed.

    Raises:
        FileError: The finished run cannot be copied. The run directory is whole.
    """
    copy, ended = _RemoteCopy(folder, address), Event()

    def update() -> None:
        try:
            copy.update()
        except FileError as error:
            say(f"{error} Training goes on, and the next checkpoint is copied there.")

    def follow(seen: list[str]) -> None:
        while not ended.wait(_LOOK_S):
            if (now := _checkpoints(folder)) != seen:
                update()
                seen = now

    thread = Thread(target=follow, args=[_checkpoints(folder)], name="remote copy", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        ended.set()
        thread.join()
        if _checkpoints(folder):  # a machine that is taken away says so before
            update()
        raise
    ended.set()
    thread.join()
    root = address.rstrip("/")
    more = f" The run itself is whole, in {folder}: `--resume --push ADDRESS` copies it."
    addresses.put({path: f"{root}/{name}" for name, path in _listed(folder).items()}, more)
    addresses.remove(f"{root}/{_UNFINISHED}")


def fetch(address: str, folder: Path) -> None:
    """Bring the run at an address into `folder`, where there is none yet; does nothing where none is at the address.

    Raises:
        ResumeError: `folder` holds a run whose checkpoints are older than those at the address.
        FileError: The run cannot be read.
    """
    addresses.require_written(address)
    there = _there(address)
    if (folder / "config.yaml").exists():
        newest, own = max(_steps(there), default=""), max(_steps(_listed(folder)), default="")
        if newest > own:
            raise ResumeError(
                f"{address} holds a later state of this run ({newest}) than {folder} ({own or 'no checkpoint'}). "
                f"Delete {folder} to go on from there, or leave --push out to go on from here."
            )
    elif "config.yaml" in there:
        with files.new_folder(folder) as aside:
            addresses.get({there[name]: aside / name for name in there})


class _RemoteCopy:
    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._base = folder, f"{address.rstrip('/')}/{_UNFINISHED}"
        self._objects: dict[str, tuple[tuple[int, int], str]] = {}
        """Size and time of what stands there, and its name there, by path in the run."""
        self._next: int | None = None

    def update(self) -> None:
        """Copy what is new since the last call; what stands there is a whole state at each moment."""
        if self._next is None:  # names of an earlier process are not used again
            self._next = 1 + max((int(each.partition("-")[0]) for each in _index(self._base).values()), default=0)
        with _still(self._folder) as still:
            objects = {}
            for name, path in _listed(still).items():
                stat = Path(path).stat()
                state, old = (stat.st_size, stat.st_mtime_ns), self._objects.get(name)
                if old is None or old[0] != state:
                    old = state, f"{self._next}-{Path(name).name}"
                    self._next += 1
                    addresses.put({path: f"{self._base}/{old[1]}"})
                objects[name] = old
        names = {name: own for name, (_, own) in objects.items()}
        addresses.write(f"{self._base}/{_INDEX}", json.dumps(names, indent=1).encode())
        addresses.keep_only(self._base, {_INDEX, *names.values()})
        self._objects = objects


@contextmanager
def _still(folder: Path) -> Iterator[Path]:
    """A copy of a run directory at one moment; checkpoints, which are never changed in place, are links."""
    while True:
        before = _states(folder)
        with tempfile.TemporaryDirectory(prefix=".copy.", suffix=".unfinished", dir=folder) as aside:
            try:
                # Steps first: a run goes on from metrics that are newer, as after a kill, never from older ones.
                for name, path in sorted(_listed(folder).items(), key=lambda each: not _step(each[0])):
                    target = Path(aside, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (_linked if "checkpoints" in Path(name).parts else shutil.copy2)(path, target)
            except FileNotFoundError:
                continue  # an old checkpoint went, or a file was replaced
            if _states(folder) == before:
                yield Path(aside)
                return


def _linked(path: str, target: Path) -> None:
    """A second name of a file; a copy where the file system has no links."""
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(path, target)


def _walked(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Folders with the names of their folders and files, but those that one process uses; what goes meanwhile, goes."""
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(top), folders, sorted(name for name in names if name != "run.lock" and not name.startswith("."))


def _states(folder: Path) -> list[tuple[str, int]]:
    """Checkpoints of a run and its members; one that is replaced has another number."""
    paths = [top / name for top, folders, _ in _walked(folder) if top.name == "checkpoints" for name in folders]
    states = []
    for path in paths:
        with suppress(FileNotFoundError):
            states.append((str(path), path.stat().st_ino))
    return states


def _checkpoints(folder: Path) -> list[str]:
    return [path for path, _ in _states(folder) if Path(path).name.startswith("step-")]


def _listed(folder: Path) -> dict[str, str]:
    """Files of a run directory, by path in it."""
    paths = (top / name for top, _, names in _walked(folder) for name in names)
    return {path.relative_to(folder).as_posix(): str(path) for path in paths}


def _there(address: str) -> dict[str, str]:
    """Addresses of the files of the run that stands at an address, by path in the run; of one that is done, too."""
    base = f"{address.rstrip('/')}/{_UNFINISHED}"
    if unfinished := _index(base):
        return {name: f"{base}/{own}" for name, own in unfinished.items()}
    return addresses.found(address)


def _index(base: str) -> Mapping[str, str]:
    content = addresses.read(f"{base}/{_INDEX}")
    return json.loads(content) if content is not None else {}


def _step(name: str) -> str | None:
    """The name of the checkpoint that a file is of, such as `step-00000010`."""
    parts = Path(name).parts
    return next((name for part, name in pairwise(parts) if part == "checkpoints" and "step-" in name), None)


def _steps(names: Mapping[str, str]) -> list[str]:
    return [step for step in map(_step, names) if step is not None]
