"""Files and folders at addresses that fsspec reads and writes, such as s3://bucket/rows.jsonl: fetched and pushed.

The network is used only where an address names it. Packages of single services, such as s3fs, are the user's to
install.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.errors import FileError
from workbench.runs import files

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://.+")


def is_address(source: str) -> bool:
    """Whether `source` is written as an address."""
    return _ADDRESS.fullmatch(source) is not None


def fetched(address: str) -> Path:
    """A copy of the file or folder at an address, in the cache: another one once what is there has changed. Raises
    FileError: nothing is there, or it cannot be read."""
    with _told(address):
        system, path = _system(address)
        there = [path] if system.isfile(path) else sorted(system.find(path))
        if not there:
            raise FileNotFoundError
        state = "\n".join([address, *(str(system.info(each)) for each in there)])
        folder = files.cache_folder() / "addresses" / hashlib.sha256(state.encode()).hexdigest()[:32]
        name = Path(path.rstrip("/")).name
        if not folder.exists():
            with files.new_folder(folder, durable=False) as aside:
                if there == [path]:
                    system.get_file(path, str(aside / name))
                else:
                    system.get(path, str(aside / name), recursive=True)
    return folder / name


def require_free(address: str) -> None:
    """Raise FileError where nothing can be pushed to an address, or something is there already."""
    with _told(address):
        system, path = _system(address)
        taken = system.exists(path) and bool(system.find(path))
    if taken:
        raise FileError(f"--push {address}: holds files already. Write another address, or delete them first.")


def push(folder: Path, address: str) -> None:
    """Copy the files of a run directory to an address. Raises FileError: they cannot be written there."""
    with _told(address, f" The run itself is whole, in {folder}: `--resume --push ADDRESS` copies it."):
        system, path = _system(address)
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            target = f"{path.rstrip('/')}/{file.relative_to(folder).as_posix()}"
            system.makedirs(target.rpartition("/")[0], exist_ok=True)
            system.put_file(str(file), target)


def _system(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path there."""
    import fsspec

    system, path = fsspec.core.url_to_fs(address)
    return system, str(path)


@contextmanager
def _told(address: str, more: str = "") -> Iterator[None]:
    """Turn what file systems, drivers and the network raise into FileErrors, which end in `more`."""
    try:
        yield
    except (FileError, KeyboardInterrupt):
        raise
    except ImportError as error:
        from fsspec.registry import known_implementations

        protocol = address.partition("://")[0].rpartition("::")[2]
        package = known_implementations[protocol]["class"].partition(".")[0]
        write = f" Write `pip install {package}`." if package != "fsspec" else ""
        raise FileError(f"{address}: a package for {protocol}:// is not installed: {error}.{write}") from None
    except FileNotFoundError:
        raise FileError(f"{address}: no such file or folder. Write the address of one that is there.") from None
    except Exception as error:  # drivers raise exceptions of their own
        why = " ".join(str(error).split()).rstrip(".") or "no reason given"
        raise FileError(f"{address}: cannot be reached: {type(error).__name__}: {why[:300]}.{more}") from None
