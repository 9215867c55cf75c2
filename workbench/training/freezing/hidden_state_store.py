"""Stores for outputs of a frozen prefix: in memory, or in files that several runs share.

The key of a row is a digest of its content, 16 bytes. Legend: B rows, L padded length, D hidden, W bytes of D numbers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.errors import FileError

FORMAT = "1"
"""Version of the files and of the rows' keys: raise it when either changes."""

Bytes = npt.NDArray[np.uint8]


class HiddenStateStore(ABC):
    """Hidden states of rows by their keys. The states of a row never change.

    Args:
        dtype: Precision of the stored states.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Places in `keys` of those that are not stored; only the first place of a key that occurs twice."""

    @abstractmethod
    def put(self, keys: Sequence[bytes], rows: Sequence[Tensor]) -> None:
        """Store the states (l, D) of each row; none of them is stored yet."""

    def get(self, keys: Sequence[bytes], length: int) -> Tensor:
        """States (B, `length`, D) of stored rows, on the CPU: cut, or with zeros after their end."""
        row_states = [self._first(key, length) for key in keys]
        found_BLW = np.zeros((len(keys), length, row_states[0].shape[1]), np.uint8)
        for states_LW, row_LW in zip(row_states, found_BLW, strict=True):
            row_LW[: len(states_LW)] = states_LW
        return torch.from_numpy(found_BLW).view(self.dtype)

    @abstractmethod
    def length(self, key: bytes) -> int:
        """l of a stored row."""

    @abstractmethod
    def _first(self, key: bytes, most: int) -> Bytes:
        """The first states of a stored row (l, W), at most `most`."""

    def _bytes(self, row: Tensor) -> Bytes:
        """States (l, D) as they are stored, (l, W)."""
        return row.detach().to("cpu", self.dtype).contiguous().view(torch.uint8).numpy()


class MemoryStore(HiddenStateStore):
    """In the memory of this process."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._rows: dict[bytes, Bytes] = {}

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        return [place for key, place in _firsts(keys).items() if key not in self._rows]

    def put(self, keys: Sequence[bytes], rows: Sequence[Tensor]) -> None:
        for key, row in zip(keys, rows, strict=True):
            self._rows[key] = self._bytes(row).copy()  # without the rest of its batch

    def length(self, key: bytes) -> int:
        return len(self._rows[key])

    def _first(self, key: bytes, most: int) -> Bytes:
        return self._rows[key][:most]


class _Place(NamedTuple):
    """Place of a row's states in the file."""

    start: int
    length: int
    width: int
    checksum: int | None
    """Checksum of their bytes; None once it has been compared."""


_RECORD = struct.Struct("<16sQIII")
"""Key, start, length, width and checksum of the states; a checksum of the record follows."""
_RECORD_BYTES = _RECORD.size + 4


class DiskStore(HiddenStateStore):
    """In two growing files, shared by all runs whose prefix has the same `fingerprint`, also at the same time.

    States are written first, then a record in the index with their place, with checksums of both: whatever a killed
    process, a full disk or a power cut leaves behind is either complete or missing. Files are read rather than mapped:
    truncating a mapped file kills the process, and a mapping cannot grow.

    Args:
        instead: Settings that need no such files, for a message where they cannot be written.

    Raises:
        FileError: the files cannot be read or written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        dtype: torch.dtype,
        instead: str = "freeze.cache=memory or freeze.cache=off",
    ) -> None:
        super().__init__(dtype)
        self._instead = instead
        self.folder = folder / fingerprint
        with self._explained_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            paths = (self.folder / name for name in ("states.bin", "index.bin"))
            self._states, self._index = (os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in paths)
        for descriptor in (self._states, self._index):
            weakref.finalize(self, os.close, descriptor)
        self._places: dict[bytes, _Place] = {}
        self._indexed = 0
        """Bytes of the index that have been read."""

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        firsts = _firsts(keys)
        if any(key not in self._places for key in firsts):
            self._refresh()  # another process may have computed them meanwhile
        return [place for key, place in firsts.items() if not self._holds(key)]

    def put(self, keys: Sequence[bytes], rows: Sequence[Tensor]) -> None:
        with self._explained_errors(), self._locked():
            self._refresh()
            records = [
                self._append(key, self._bytes(row))
                for key, row in zip(keys, rows, strict=True)
                if key not in self._places
            ]
            # A process that was killed here may have left an incomplete record.
            end = os.fstat(self._index).st_size // _RECORD_BYTES * _RECORD_BYTES
            os.ftruncate(self._index, end)
            _write(self._index, b"".join(records), end)

    def _append(self, key: bytes, content: Bytes) -> bytes:
        """Append a row's states; returns their record."""
        start = os.fstat(self._states).st_size
        _write(self._states, content.tobytes(), start)
        self._places[key] = _Place(start, len(content), content.shape[1], None)
        record = _RECORD.pack(key, start, *content.shape, zlib.crc32(content.data))
        return record + zlib.crc32(record).to_bytes(4, "little")

    def _refresh(self) -> None:
        """Read what any process has added to the index."""
        added = os.fstat(self._index).st_size - self._indexed
        content = os.pread(self._index, max(0, added), self._indexed)
        for start in range(0, len(content) - _RECORD_BYTES + 1, _RECORD_BYTES):
            record = content[start : start + _RECORD.size]
            if zlib.crc32(record).to_bytes(4, "little") == content[start + _RECORD.size : start + _RECORD_BYTES]:
                key, *place = _RECORD.unpack(record)
                known = self._places.get(key)
                if known is None or known.checksum is not None:  # a later record replaces a damaged one
                    self._places[key] = _Place(*place)
        self._indexed += len(content) // _RECORD_BYTES * _RECORD_BYTES

    def _holds(self, key: bytes) -> bool:
        """Whether the states of a row are stored; verifies them the first time."""
        place = self._places.get(key)
        if place is None:
            return False
        if place.checksum is not None:
            content = os.pread(self._states, place.length * place.width, place.start)
            if len(content) < place.length * place.width or zlib.crc32(content) != place.checksum:
                del self._places[key]
                return False
            self._places[key] = place._replace(checksum=None)
        return True

    def length(self, key: bytes) -> int:
        return self._places[key].length

    def _first(self, key: bytes, most: int) -> Bytes:
        place = self._places[key]
        count = min(most, place.length)
        content = os.pread(self._states, count * place.width, place.start)
        if len(content) < count * place.width:
            raise FileError(f"{self.folder}: cut while it was in use. Resume; what is lost is computed again.")
        return np.frombuffer(content, np.uint8).reshape(count, place.width)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Inside, no other process writes."""
        fcntl.flock(self._index, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._index, fcntl.LOCK_UN)

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FileError(
                f"{self.folder}: cannot be written ({error.strerror}). Make room there, set WORKBENCH_CACHE to "
                f"another place, or write {self._instead}."
            ) from error


def fingerprint(
    backbone: PreTrainedModel, *, blocks: Sequence[nn.Module], depth: int, dtype: torch.dtype, about: Mapping[str, str]
) -> str:
    """A digest of everything that the outputs of the first `depth` blocks depend on, besides the row.

    It covers the content of every frozen weight in and before these blocks, of adapters too, wherever the backbone came
    from. What trains is left out, because the prefix does not depend on it.

    Args:
        dtype: Precision of the stored states.
        about: What tensors do not show: compute precision, format of the weights, versions of packages.
    """
    above = {id(tensor) for block in blocks[depth:] for tensor in (*block.parameters(), *block.buffers())}
    settings = backbone.config.to_dict() | {"attention": backbone.config._attn_implementation}
    named = {key: value for key, value in settings.items() if key not in _ORIGINS}
    says = [FORMAT, type(backbone).base_model_prefix, depth, str(dtype), dict(about), named]
    hasher = hashlib.sha256(json.dumps(says, sort_keys=True, default=str).encode())
    for name, tensor in (*backbone.base_model.named_parameters(), *backbone.base_model.named_buffers()):
        if id(tensor) not in above and not tensor.requires_grad:
            content = tensor.detach().cpu().contiguous().reshape(-1)
            hasher.update(f"{name} {content.dtype} {tuple(tensor.shape)}".encode())
            hasher.update(content.view(torch.uint8).numpy().data)
    return hasher.hexdigest()[:32]


_ORIGINS = {"_name_or_path", "_commit_hash", "transformers_version", "architectures"}
"""Keys of a configuration that only name its origin."""


def _firsts(keys: Sequence[bytes]) -> dict[bytes, int]:
    first_places: dict[bytes, int] = {}
    for place, key in enumerate(keys):
        first_places.setdefault(key, place)
    return first_places


def _write(descriptor: int, content: bytes, start: int) -> None:
    """Write all of it; the system may take only a part at a time."""
    rest = memoryview(content)
    while rest:
        done = os.pwrite(descriptor, rest, start)
        rest, start = rest[done:], start + done
