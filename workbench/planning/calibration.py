"""What the kernels of a step take on this device, measured within seconds: hence the time of a step."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.planning.compiled import CAPACITY
from workbench.planning.fake_tensors import real_tensors
from workbench.planning.kernels import Kernel, Kernels, Like
from workbench.planning.work import StepWork
from workbench.runs import process_memory

SECONDS = 2.0
"""What a calibration may take, about."""
CALLS = 3
"""Of one kernel, where there is time; the mean of what they take counts, as in a run."""
KEPT = 2**22
"""Bytes of the last results that stay alive, so that new ones are written where nothing has just been written, as in
a run."""
WARM = 2**26
"""Elements in float32 of the heap that is warmed up."""
LARGE = 2**26
"""Bytes that a kernel reads and writes from which on it finds nothing in the caches, wherever it is called."""
MEASURED_ERROR, GUESSED_ERROR = 0.22, 0.5
"""By which a step may take more or less, as a share of the time of what was measured, and of what was guessed from it:
nine in ten of the single calibrations of scripts/bench/step_time.py were within the first."""


@dataclass(frozen=True)
class Timed:
    """The time of an average step."""

    seconds: float
    error: float
    """By which it may take more or less, as a share."""


class Calibration:
    """What kernels take on a device as it is now. What was measured once is known for all later steps.

    Args:
        seconds: For measuring what is new in each step that is asked for, about.
        clock: Seconds of the CPU; accelerators have clocks of their own.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.first: dict[Kernel, float] = {}
        """What each kernel took when it was called for the first time."""
        self._device, self._seconds, self._clock = device, seconds, clock
        self._again: dict[Kernel, float] = {}
        _warm_up(device)
        with _as_in_a_run():
            self._stopwatch = _stopwatch(device, clock)
            self._per_call = {recomputes: self._overhead(recomputes) for recomputes in (False, True)}
            _forget(device)

    def timed(self, work: StepWork) -> Timed:
        """What an average step takes."""
        lists = [part.calls for part in work.parts] + [work.update]
        with _as_in_a_run():
            began = self._clock()
            for number, calls in enumerate(lists, start=1):  # what one leaves of its time is the next one's
                self._measure(calls, began + self._seconds * number / len(lists) - self._clock())
            collating = sum(part.share * self._seconds_of(part.collate) for part in work.parts)
        seconds, guessed = self._sum(work.update, self._per_call[False])
        seconds += collating
        for part in work.parts:
            taken, unknown = self._sum(part.calls, self._per_call[work.recomputes])
            seconds += part.share * (taken + self._preparing(part.new))
            guessed += part.share * unknown
        return Timed(seconds, MEASURED_ERROR + (GUESSED_ERROR - MEASURED_ERROR) * guessed / seconds)

    def _measure(self, calls: Sequence[Kernel], seconds: float) -> None:
        """Call each kernel that is new, what takes most first, and then some of them again in the order of a run."""
        counts = Counter(kernel for kernel in calls if not kernel.is_view and kernel not in self._again)
        self._wake(counts)
        shelf, began = _Shelf(self._device), self._clock()
        for kernel in sorted(counts, key=lambda kernel: -counts[kernel] * _roughly(kernel)):
            if self._clock() > began + seconds / 2:
                break
            self._call_first(kernel, shelf)
        measured = [kernel for kernel in calls if kernel in counts and kernel in self._again]
        self._call_in_order(measured, shelf, until=began + seconds)

    def _wake(self, kernels: Collection[Kernel]) -> None:
        """What a process does once, at its first product of a precision, is no kernel's own."""
        for dtype in {leaf.dtype for kernel in kernels for leaf in kernel.leaves if isinstance(leaf, Like)}:
            if dtype.is_floating_point and dtype.itemsize > 1:
                small = torch.ones(8, 8, dtype=dtype, device=self._device)
                small @ small

    def _call_first(self, kernel: Kernel, shelf: _Shelf) -> None:
        makes = _Shelf(self._device) if kernel.bytes > LARGE else shelf
        try:
            first = self._call(kernel, makes)[0]
            self._again[kernel] = self._call(kernel, makes)[0]
        except (RuntimeError, IndexError):
            return  # not with such numbers, or not with as little memory: it is guessed
        self.first.setdefault(kernel, first)

    def _call_in_order(self, calls: Sequence[Kernel], shelf: _Shelf, *, until: float) -> None:
        found: defaultdict[Kernel, list[float]] = defaultdict(list)
        results: deque[tuple[int, Any]] = deque()
        kept = 0
        for kernel in calls:
            if kernel.bytes > LARGE or len(found[kernel]) == CALLS:
                continue
            if self._clock() > until:
                break
            seconds, result = self._call(kernel, shelf)
            found[kernel].append(seconds)
            if not (kernel.operation.is_view or kernel.operation._schema.is_mutable):
                shelf.put(result)
            results.append((kernel.written, result))
            kept += kernel.written
            while kept > KEPT:
                kept -= results.popleft()[0]
        self._again |= {kernel: mean(seconds) for kernel, seconds in found.items() if seconds}

    def _call(self, kernel: Kernel, shelf: _Shelf) -> tuple[float, Any]:
        """Seconds, and the result."""
        arguments, named = kernel.arguments(shelf)
        results: list[Any] = []
        seconds = self._stopwatch(lambda: results.append(kernel.operation(*arguments, **named)))
        if kernel.operation._schema.is_mutable:  # numbers that grow or vanish make a kernel slow
            for leaf in tree_leaves((arguments, named)):
                if isinstance(leaf, Tensor):
                    _fill(leaf)
        return seconds, results[0]

    def _sum(self, calls: Sequence[Kernel], per_call: float) -> tuple[float, float]:
        """Seconds that calls take, and how many of them are guessed."""
        seconds = guessed = 0.0
        for kernel, count in Counter(calls).items():
            if kernel in self._again:
                seconds += count * self._again[kernel]
            elif not kernel.is_view:
                guessed += count * self._guess(kernel)
        calling = len(calls) * per_call
        together = seconds + guessed
        # An accelerator computes while Python goes on.
        return (together + calling if self._device.type == "cpu" else max(together, calling)), guessed

    def _guess(self, kernel: Kernel) -> float:
        """From the rate of the same operation on others, or of operations of its kind."""
        alike = [each for each in self._again if each.operation is kernel.operation]
        alike = alike or [each for each in self._again if bool(each.flops) == bool(kernel.flops)] or [*self._again]
        work = sum(map(_roughly, alike))
        return _roughly(kernel) * (sum(self._again[each] for each in alike) / work if work else 1.0)

    def _preparing(self, new: Mapping[Kernel, float]) -> float:
        """What making products ready takes, each as often as it is new; oneDNN compiles them."""
        if self._device.type != "cpu":
            return 0.0
        known = [(kernel, share) for kernel, share in new.items() if kernel in self._again]
        return sum(share * max(0.0, self.first[kernel] - self._again[kernel]) for kernel, share in known)

    def _seconds_of(self, call: Callable[[], object]) -> float:
        began = self._clock()
        call()
        return self._clock() - began

    def _overhead(self, recomputes: bool) -> float:
        """Seconds that Python and autograd take for each call of a kernel, in a model too small to compute for long.

        Beside the kernels on a CPU, in all on an accelerator.

        Args:
            recomputes: With gradient checkpointing, which does much in Python for each tensor that is kept.
        """
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**_TINY))
        model.to(self._device).train()
        if recomputes:
            model.activation_checkpointing_enable()
        ids_BL = torch.zeros(1, 4, dtype=torch.int64, device=self._device)

        def step() -> None:
            with torch.enable_grad():
                model(input_ids=ids_BL, use_cache=False).logits.sum().backward()

        with Kernels() as kernels:
            step()
        seconds = median(self._seconds_of(step) for _ in range(10))
        self._measure(kernels.calls, math.inf)
        computing = sum(self._again.get(kernel, 0.0) for kernel in kernels.calls) if self._device.type == "cpu" else 0.0
        self._again.clear()  # nothing can be guessed from what is as small
        return max(0.0, seconds - computing) / len(kernels.calls)


_TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


class _Shelf:
    """Tensors to call kernels with; each kind is made once, and once more where a call needs two of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[Like, int], Tensor] = {}

    def __call__(self, like: Like, number: int) -> Tensor:
        if (like, number) not in self._made:
            made = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
            _fill(made)
            self._made[like, number] = made
        return self._made[like, number]

    def put(self, results: Any) -> None:
        """Let the next calls read what was written last, as those of a run do."""
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                _fill(leaf)
                like = Like.of(leaf)
                if (like, 0) in self._made:
                    self._made[like, 1] = self._made[like, 0]
                self._made[like, 0] = leaf


def _fill(tensor: Tensor) -> None:
    """With numbers that no kernel finds hard, and indices that are in range."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
    whole.fill_(0.5 if tensor.is_floating_point() else 0)


def _roughly(kernel: Kernel) -> float:
    """Seconds on a usual CPU, which say which of two kernels takes longer."""
    return kernel.flops / 2e11 + kernel.bytes / 5e9


def _warm_up(device: torch.device) -> None:
    """Let a CPU's heap be as large as in a run, which meets fresh memory in its first step alone."""
    if device.type == "cpu":
        process_memory.keep()
        for elements in (2**18, 2**22, 2**26):
            together = [torch.ones(elements) for _ in range(WARM // elements)]
            together.clear()


def _forget(device: torch.device) -> None:
    """Let no product of what this process did before be ready."""
    if device.type == "cpu":
        matrix = torch.ones(32, 32, dtype=torch.bfloat16)
        for rows in range(32, 32 + CAPACITY):
            torch.ones(rows, 32, dtype=torch.bfloat16) @ matrix


@contextmanager
def _as_in_a_run() -> Iterator[None]:
    """Real tensors, no graph, and the random numbers of whoever asks stay what they are."""
    with real_tensors(), torch.no_grad(), torch.random.fork_rng():
        yield


def _stopwatch(device: torch.device, clock: Callable[[], float]) -> Callable[[Callable[[], object]], float]:
    """Measures the seconds that a device computes for a call."""

    def on_cpu(call: Callable[[], object]) -> float:
        began = clock()
        call()
        return clock() - began

    def on_accelerator(call: Callable[[], object]) -> float:
        torch.accelerator.synchronize()
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return max(0.0, begin.elapsed_time(end) / 1e3 - launching)

    if device.type == "cpu":
        return on_cpu
    launching = 0.0
    number = torch.zeros(1, device=device)
    launching = median(on_accelerator(lambda: number.add_(1)) for _ in range(20))
    return on_accelerator
