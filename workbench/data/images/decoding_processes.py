"""Decoding and preparing pictures into a mapped file: in this process, or in others that are fed through pipes.

They are new interpreters rather than forks or multiprocessing's: threads of this process may hold locks, and nothing
of the program that uses the workbench is run or imported again.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import cv2
import numpy as np

from workbench.data.images import preparation
from workbench.data.images.deep_pictures import NO_RANGES, ValueRanges
from workbench.data.images.picture_files import PictureFile
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.preparation import PictureStatistics
from workbench.data.ordered_processes import send
from workbench.errors import DataError

if TYPE_CHECKING:  # other processes start four times as fast without the configuration
    from workbench.config.sections.picture_prepare_config import PrepareConfig

Mistakes = dict[int, str]
"""Why pictures cannot be read, by their index, without the pictures' names."""


@dataclass(frozen=True)
class Work:
    """The steps that each picture goes through, and the file of pixels that it is written to."""

    path: Path
    """A .npy file of shape (N, H, W, 3)."""
    offset: int
    """Bytes of the file before the first picture."""
    format: PictureFormat
    prepare: PrepareConfig
    max_pixels: int
    statistics: PictureStatistics | None
    ranges: ValueRanges = NO_RANGES


def fill(chunk: range, files: Sequence[PictureFile], work: Work) -> Mistakes:
    """Write the prepared pictures of a chunk to their places."""
    mistakes = {}
    # Written rather than assigned to a mapped array: a page that is first touched costs more than its copy.
    with work.path.open("r+b", buffering=0) as pixels:
        for index, file in zip(chunk, files, strict=True):
            try:
                image = file.image(max_pixels=work.max_pixels, ranges=work.ranges)
                prepared = preparation.prepare(image, work.prepare, work.format, work.statistics)
            except DataError as error:
                mistakes[index] = str(error).removeprefix(f"{file.name}: ")
            else:
                pixels.seek(work.offset + index * prepared.nbytes)
                pixels.write(np.ascontiguousarray(prepared).data)
    return mistakes


def fill_by_several(chunks: Sequence[range], files: Sequence[PictureFile], work: Work, *, others: int) -> Mistakes:
    """Write the prepared pictures of all chunks, by this process and `others` beside it.

    Args:
        files: All pictures; chunks are of their indices.

    Raises:
        DataError: One of the processes was killed.
    """
    todo: SimpleQueue[range] = SimpleQueue()
    for chunk in chunks:
        todo.put(chunk)
    processes = [_started(work) for _ in range(min(others, len(chunks) - 1))]
    ready: set[int] = set()
    try:
        with ThreadPoolExecutor(max(1, len(processes))) as pool:
            try:
                parts = [pool.submit(_feed, process, ready, todo, files) for process in processes]
                mistakes: Mistakes = {}
                while (own := _next(todo)) is not None and not any(part.done() for part in parts):
                    mistakes |= fill(own, files[own.start : own.stop], work)
                for process in processes:
                    if own is None and process.pid not in ready:
                        process.kill()  # nothing is left for it
                for part in parts:
                    mistakes |= part.result()
                return mistakes
            except BaseException:
                for process in processes:
                    process.kill()
                raise
    finally:
        for process in processes:
            _end(process)


def _next(todo: SimpleQueue[range]) -> range | None:
    try:
        return todo.get_nowait()
    except Empty:
        return None


def _started(work: Work) -> subprocess.Popen[bytes]:
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    settings = cast("PrepareConfig", SimpleNamespace(**work.prepare.model_dump()))
    send(process.stdin, replace(work, prepare=settings))
    return process


def _feed(
    process: subprocess.Popen[bytes], ready: set[int], todo: SimpleQueue[range], files: Sequence[PictureFile]
) -> Mistakes:
    """Hand chunks to a process, from when it is `ready`, until none is left."""
    mistakes: Mistakes = {}
    assert process.stdout is not None
    try:
        pickle.load(process.stdout)
        ready.add(process.pid)
        while (chunk := _next(todo)) is not None:
            send(process.stdin, (chunk, files[chunk.start : chunk.stop]))
            reply = pickle.load(process.stdout)
            if isinstance(reply, Exception):
                raise reply
            mistakes |= reply
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        if process.pid in ready or not todo.empty():
            raise DataError(
                "A process that decodes pictures was killed: for lack of memory? Write image.workers=0, or lower "
                "image.max_pixels."
            ) from None
    return mistakes


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that has nothing left to do; Python's own end takes as long as a dozen pictures."""
    process.kill()
    with suppress(BrokenPipeError), process:
        pass


def serve() -> None:
    """Fill chunks that come through the standard input until it closes; answer with mistakes or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints
    cv2.setNumThreads(1)
    work: Work = pickle.load(sys.stdin.buffer)
    send(answers, "ready")
    while True:
        try:
            chunk, files = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply: Mistakes | Exception = fill(chunk, files, work)
        except Exception as error:  # told where it can be shown
            reply = error
        try:
            send(answers, reply)
        except BrokenPipeError:
            return
