"""A function of many items, computed by several processes or threads, with the results in the order of the items.

Other processes are new interpreters rather than forks or multiprocessing's: threads of this process may hold locks, and
nothing of the program that uses the workbench is run or imported again.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from queue import SimpleQueue
from typing import IO, Any, Generic, TypeVar

from workbench.errors import ConfigError, DataError

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

VARIABLE = "WORKBENCH_PROCESSES"
AT_MOST = 16
OWN = 12  # items that this process computes before it starts others, so that little work does not pay for a start
AHEAD = 2  # items that each other process has or that wait for it
KILLED = (
    "A process that prepares rows was killed: for lack of memory? Write WORKBENCH_PROCESSES=1 in front of the command "
    "to do without it."
)


def available() -> int:
    """Processes that prepare data: one for each core that this run may use, or as many as WORKBENCH_PROCESSES says.
    Raises ConfigError: the variable is no positive number."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, min(AT_MOST, len(os.sched_getaffinity(0)) // ranks))
    if not wanted.isdecimal() or int(wanted) == 0:
        raise ConfigError(
            f"{VARIABLE}={wanted}: must be the number of processes that prepare data. Write {VARIABLE}=1 or more, "
            "or leave it out for one on each core."
        )
    return int(wanted)


def results(
    function: Callable[[ItemT], ResultT],
    items: Iterable[ItemT],
    *,
    processes: int | None = None,
    own: int | None = None,
    killed: str = KILLED,
) -> Iterator[ResultT]:
    """Yield `function` of each item, in their order; the same for any number of processes.

    Of errors, that of the first item that has one is raised, or that of `items`, once all results before it are out.
    Raises DataError: one of the processes was killed.

    Args:
        function: Can be pickled, and so can items and results; depends on nothing but its item.
        processes: With this one; None for `available`.
        own: Items that this process computes before it starts others; None for OWN.
        killed: What the error says where a process was killed.
    """
    count = available() if processes is None else processes
    left = iter(items)
    yield from map(function, islice(left, OWN if own is None else own))
    following = list(islice(left, 1))
    left = chain(following, left)
    if not following or count == 1:
        yield from map(function, left)
        return
    with _Others(function, count - 1, killed) as others:
        # Results of this process and others; items are read ahead as far as keeps the others at work.
        pending: deque[Future[ResultT]] = deque()
        unread: Exception | None = None
        while unread is None:
            try:
                item = next(left)
            except StopIteration:
                break
            except Exception as error:  # raised in its turn, after errors of earlier items
                unread = error
                break
            busy = sum(not each.done() for each in pending)
            pending.append(others.submit(item) if busy < AHEAD * others.count else _done(function, item))
            while pending and (pending[0].done() or len(pending) > 2 * AHEAD * (others.count + 1)):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if unread is not None:
            raise unread


def _done(function: Callable[[ItemT], ResultT], item: ItemT) -> Future[ResultT]:
    """The result or error of an item, computed here."""
    future: Future[ResultT] = Future()
    try:
        future.set_result(function(item))
    except Exception as error:
        future.set_exception(error)
    return future


class _Others(Generic[ItemT, ResultT]):
    """Processes that compute a function of items that are sent to them; killed at the end of the block."""

    def __init__(self, function: Callable[[ItemT], ResultT], count: int, killed: str) -> None:
        self.count, self._killed = count, killed
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        one_thread = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENCV_FOR_THREADS_NUM": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | one_thread,
            )
            for _ in range(count)
        ]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="workbench-processes")
        pickled = pickle.dumps(function)
        for process in self._processes:
            self._threads.submit(self._tell, process, pickled)

    def __enter__(self) -> _Others[ItemT, ResultT]:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            with suppress(BrokenPipeError), process:
                pass

    def submit(self, item: ItemT) -> Future[ResultT]:
        """The result of an item, by the first process that is idle."""
        return self._threads.submit(self._ask, item)

    def _tell(self, process: subprocess.Popen[bytes], function: bytes) -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # told when it is asked
            process.stdin.write(function)
            process.stdin.flush()
        self._idle.put(process)

    def _ask(self, item: ItemT) -> ResultT:
        process = self._idle.get()
        assert process.stdout is not None
        try:
            send(process.stdin, item)
            succeeded, result = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise DataError(self._killed) from None
        finally:
            self._idle.put(process)
        if not succeeded:
            raise result
        return result  # type: ignore[no-any-return]


def send(pipe: IO[bytes] | None, value: Any) -> None:
    """Write a pickle of `value` at once."""
    assert pipe is not None
    pickle.dump(value, pipe)
    pipe.flush()


def serve() -> None:
    """Compute items that come through the standard input until it closes; answer with results or errors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints
    with suppress(EOFError, BrokenPipeError):
        function = pickle.load(sys.stdin.buffer)
        while True:
            item = pickle.load(sys.stdin.buffer)
            try:
                answer = True, function(item)
            except Exception as error:  # told where it can be shown
                answer = False, error
            send(answers, answer)


LARGE = 128 * 128
"""Pixels of a picture from which threads save time; with smaller ones they wait for the interpreter's lock: two of them
took 1.6 times as long to augment pictures of 64 x 64."""
PARTS = 2  # parts of a batch for each thread, so that none is idle for long while another one ends


def by_threads(function: Callable[[ItemT], ResultT], items: Sequence[ItemT], *, size: int) -> list[ResultT]:
    """Results of `function`, in the order of the items. `function`: depends on nothing but its item. `size`: pixels or
    bytes of each item."""
    threads = min(available(), len(items))
    if threads < 2 or size < LARGE:
        return [function(item) for item in items]
    parts = min(len(items), PARTS * threads)
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    tasks = [
        _pool(threads).submit(lambda part: [function(item) for item in part], items[start:end])
        for start, end in itertools.pairwise(bounds)
    ]
    return [result for task in tasks for result in task.result()]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="workbench-pictures")
