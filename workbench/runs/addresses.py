"""Files and folders at addresses that fsspec reads and writes, such as s3://bucket/rows.jsonl: fetched and pushed.

The network is used only where an address names it. Packages of single services, such as s3fs, are the user's to
install.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
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


def require_written(address: str) -> None:
    """Raise FileError where what --push names is no address, such as a path or a name on the hub."""
    if not is_address(address):
        raise FileError(
            f"--push {address}: no address. Write one as s3://BUCKET/RUN, hf://OWNER/NAME or file:///FOLDER/RUN."
        )


def require_free(address: str) -> None:
    """Raise FileError where nothing can be pushed to an address, or something is there already."""
    require_written(address)
    with _told(address):
        system, path = _system(address)
        taken = system.exists(path) and bool(system.find(path))
    if taken:
        raise FileError(f"--push {address}: holds files already. Write another address, or delete them first.")


def put(files_to: Mapping[str, str], more: str = "") -> None:
    """Copy files to addresses, whose folders are made. Raises FileError, which ends in `more`: they cannot be."""
    for path, address in files_to.items():
        with _told(address, more):
            system, target = _system(address)
            system.makedirs(target.rpartition("/")[0], exist_ok=True)
            system.put_file(path, target)


def get(files_from: Mapping[str, Path]) -> None:
    """Copy files from addresses to paths, whose folders are made."""
    for address, path in files_from.items():
        with _told(address):
            system, source = _system(address)
            path.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(source, str(path))


def read(address: str) -> bytes | None:
    """The content of a small file; None where there is none."""
    with _told(address):
        system, path = _system(address)
        content: bytes | None = system.cat_file(path) if system.isfile(path) else None
        return content


def write(address: str, content: bytes) -> None:
    """Write a small file, in one go where the service does that."""
    with _told(address):
        system, path = _system(address)
        system.pipe_file(path, content)


def found(address: str) -> dict[str, str]:
    """Addresses of the files under an address, by their path there; empty where there is nothing."""
    with _told(address):
        system, root = _system(address)
        root = root.rstrip("/")
        paths = system.find(root) if system.exists(root) else []
        names = [str(path).removeprefix(root).lstrip("/") for path in paths]
    return {name: f"{address.rstrip('/')}/{name}" for name in names}


def keep_only(address: str, names: Collection[str]) -> None:
    """Delete the files under an address but those with these names."""
    with _told(address):
        for name, each in found(address).items():
            if name not in names:
                system, path = _system(each)
                system.rm_file(path)


def remove(address: str) -> None:
    """Delete a folder at an address, if it is there."""
    with _told(address):
        system, path = _system(address)
        if system.exists(path):
            system.rm(path, recursive=True)


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
