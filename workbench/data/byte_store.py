"""Bytes that are read piece by piece, in memory while they are few and else in a file that goes with the process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from tempfile import SpooledTemporaryFile

from workbench.data.text.tokenized import cache_folder
from workbench.errors import FileError

IN_MEMORY = 2**24
"""Most bytes that are kept in memory."""


class ByteStore:
    """Chunks end to end. A file is read by `pread`, so that what was read takes no memory, as mapped pages would.

    Raises:
        FileError: There is no room for the file.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        folder = cache_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                file = stack.enter_context(SpooledTemporaryFile(IN_MEMORY, dir=str(folder)))
                for chunk in chunks:
                    file.write(chunk)
                self._size = file.tell()
                file.seek(0)
                self._few = file.read() if self._size <= IN_MEMORY else None
                if self._few is None:
                    self._file = file
                    weakref.finalize(self, stack.pop_all().close)
        except OSError as error:
            raise FileError(
                f"{folder}: cannot be written ({error.strerror}). Make room there, or set WORKBENCH_CACHE to another "
                "folder."
            ) from None

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""
        return os.pread(self._file.fileno(), stop - start, start) if self._few is None else self._few[start:stop]

    def chunks(self) -> Iterator[bytes]:
        """All of them, a part at a time."""
        for start in range(0, self._size, IN_MEMORY):
            yield self.read(start, min(start + IN_MEMORY, self._size))
