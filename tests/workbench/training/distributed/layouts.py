"""Runs one recipe in several layouts, each in a folder of its own; torchrun starts this file in several processes.

layouts.py FOLDER JOBS.json [steps|start|away|clocks|checkpoints]

JOBS: [[name, overrides, name of the run to go on from or null], ...]

A run that goes on from itself, of a bank, is broken off before its fourth step first.

With a third word NAME.RANK.json, beside each run, says how many bytes of tensors a process held at most: before the
first step, or in the step of the later half that held least (the first one lacks the optimizer's state; a thread of
gloo that lets go late of what it has sent can only add). Such a run ends with what is counted: before the first step
or after the last one. `away`: how many bytes of blocks' inputs it copied to a host's memory, for which copies in its
own stand. `checkpoints`: how many bytes it read, hashed and wrote; the run reads its last checkpoint, writes it again,
and ends. `clocks`: time goes on with each look at it, at another speed in each process. `accelerator`, and the bytes
that each process has: as `fake_accelerator` says.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import workbench
from workbench.data.batching import Indices
from workbench.models import backbones, weight_formats
from workbench.planning.counters import LiveBytes, MemoryLedger, storages
from workbench.report import plots
from workbench.runs import deadline, files
from workbench.runs import ranks as rank_module
from workbench.runs.process_memory import importing
from workbench.runs.ranks import joined
from workbench.training import activation_offload, bank_trainer, capacity, checkpoint_parts, step_metrics, trainer
from workbench.training.adapter_trainer import AdapterTrainer
from workbench.training.bank_trainer import BankTrainer, FleetTrainer
from workbench.training.distributed.pipeline import Pipelined
from workbench.training.distributed.zero import ZeroParameters
from workbench.training.master_weights import MasterWeights
from workbench.training.trainer import Trainer


def in_processes(
    folder: Path, jobs: Sequence[tuple[str, list[str], str | None]], *words: str, processes: int = 2
) -> None:
    """Run the folder's recipe.yaml in all layouts, one after the other.

    Args:
        words: Further arguments of this file.
    """
    from tests import forked  # unknown to who runs this file

    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [forked.python(), "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--rdzv-backend=c10d"]
    command += ["--monitor-interval=0.5", "--rdzv-endpoint=localhost:0", __file__]
    command += [str(folder), str(folder / "jobs.json"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-19000:]


def halfway(finished: Path, folder: Path, *, lost: int = 1) -> None:
    """The folder as a run leaves it that was killed after half of its steps, or those of all of its members.

    Args:
        lost: How many of its checkpoints it had not written by then.
    """
    shutil.copytree(finished, folder)
    for checkpoints in folder.rglob("checkpoints"):
        for path in sorted(checkpoints.glob("step-*"), reverse=True)[:lost]:
            shutil.rmtree(path)
    for adapter in folder.rglob("adapter"):
        shutil.rmtree(adapter)
    for outputs in folder.rglob("outputs.safetensors"):
        outputs.unlink()


class _Counted(Exception):
    """What was to be counted is."""


@contextmanager
def counted() -> Iterator[list[int]]:
    """Inside the block, the most bytes of tensors that each step holds; of all layouts but FSDP2's."""
    ledger, peaks = MemoryLedger(), list[int]()
    step, work = Trainer.step, Trainer.work

    def adopting(self: ZeroParameters, *arguments: Any, adopt: Any = ZeroParameters.adopt) -> Any:
        ledger.__enter__()  # type: ignore[no-untyped-call]
        ledger.hold(chain(self._module.parameters(), self._module.buffers()), "weights")
        return adopt(self, *arguments)

    def stepping(self: Trainer, rows: Indices) -> dict[str, Any]:
        if isinstance(self.masters, MasterWeights | Pipelined) and not peaks:
            ledger.__enter__()  # type: ignore[no-untyped-call]
            ledger.hold(chain(self.model.parameters(), self.model.buffers(), self.masters), "weights")
        ledger.restart()
        record = step(self, rows)
        peaks.append(ledger.peak)
        return record

    def working(self: Trainer) -> None:
        work(self)
        ledger.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        raise _Counted

    def waiting(*arguments: Any, reduce: Any = dist.all_reduce, **named: Any) -> Any:
        if (work := reduce(*arguments, **named)) is not None:
            work.wait()  # else what comes after it runs in a thread of gloo, which no mode sees
        return work

    patches = (ZeroParameters, "adopt", adopting), (Trainer, "step", stepping), (Trainer, "work", working)
    patches += ((dist, "all_reduce", waiting),)
    with ExitStack() as stack:
        for patched in patches:
            stack.enter_context(patch.object(*patched))
        with suppress(_Counted):
            yield peaks


class Held(LiveBytes):
    """Knows of storages that were emptied meanwhile, as FSDP2 does with its own."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        """Bytes of each when it was looked at last, which is whenever an operation takes or gives it."""
        self._at_most = 0
        """Their sum; storages that were emptied since count still."""

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super().called(func, args, kwargs)
        for storage in storages((result, *args, *kwargs.values()), "cpu", []):
            if storage._cdata in self._made:
                self._look(storage._cdata, storage)
        if self._at_most > self.most:  # all are looked at only where that may be the most
            for address, one in list(self._made.items()):
                if (each := one()) is not None:  # one that a thread of gloo lets go of meanwhile is forgotten at once
                    self._look(address, each)
            self.most = max(self.most, self._at_most)
        return result

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata
        if address not in self._known and size:
            self._made[address] = weakref.ref(storage)
        super()._see(storage, size)

    def _look(self, address: int, storage: torch.UntypedStorage) -> None:
        change = storage.nbytes() - self._sizes.get(address, 0)
        self._sizes[address] = storage.nbytes()
        self._at_most += change

    def _forget(self, address: int, size: int) -> None:
        super()._forget(address, size)
        self._made.pop(address, None)
        size = self._sizes.pop(address, 0)
        self._at_most -= size


@contextmanager
def counted_shares() -> Iterator[list[int]]:
    """Inside the block, the most bytes of tensors that each step holds; of FSDP2, which empties storages."""
    peaks = list[int]()
    with Held() as held, ExitStack() as stack:

        def stepping(step: Callable[..., Any]) -> Callable[..., Any]:
            def counting(*arguments: Any) -> Any:
                held.most = 0
                result = step(*arguments)
                peaks.append(held.most)
                return result

            return counting

        def working(work: Callable[..., Any]) -> Callable[..., None]:
            def ending(*arguments: Any) -> None:
                work(*arguments)
                raise _Counted

            return ending

        for trainer, step in ((Trainer, "step"), (BankTrainer, "_step")):
            stack.enter_context(patch.object(trainer, step, stepping(getattr(trainer, step))))
            stack.enter_context(patch.object(trainer, "work", working(trainer.work)))
        ending = working(FleetTrainer.work_until_one_ends)
        stack.enter_context(patch.object(FleetTrainer, "work_until_one_ends", ending))
        with suppress(_Counted):
            yield peaks


@contextmanager
def counted_before() -> Iterator[dict[str, int]]:
    """Inside the block, the most bytes of tensors that a run makes and holds before its first step, where it ends; and
    the bytes of weights that this process brings from their files, which are mapped, once for each pass through them.
    """
    others = weakref.WeakSet[torch.nn.Module]()
    found, bringing, standing = {"read": 0}, backbones.bring, weight_formats.stand_in
    with Held() as held:

        def stepping(self: Trainer, rows: Indices) -> dict[str, Any]:
            found["held"] = held.most
            raise _Counted

        def brought(module: Any) -> None:
            if module not in others:
                waits = vars(module).get("unpacked")
                own = [each for each in module.parameters(recurse=False) if waits is None or each is not module.weight]
                found["read"] += sum(each.nbytes for each in (*own, *([] if waits is None else [waits])))
            bringing(module)

        def stood(module: Any, target: torch.device) -> None:
            others.add(module)
            standing(module, target)

        patches: list[tuple[Any, str, Any]] = [(Trainer, "step", stepping), (backbones, "bring", brought)]
        with ExitStack() as stack:
            for patched in (*patches, (weight_formats, "stand_in", stood)):
                stack.enter_context(patch.object(*patched))
            with suppress(_Counted):
                yield found


@contextmanager
def counted_away() -> Iterator[list[int]]:
    """Inside the block, the bytes of blocks' inputs that wait as on a host; a CPU has no other memory."""
    copied = [0]

    class Copies:
        def away(self, tensor: Tensor) -> Tensor:
            copied[0] += tensor.nbytes
            return tensor.clone()

        def back(self, kept: Tensor) -> Tensor:
            return kept.clone()

        def arrived(self) -> None:
            """It is there."""

    able = patch.object(activation_offload, "refusal", lambda _: None)
    with able, patch.object(activation_offload, "PinnedCopies", lambda _: Copies()):
        yield copied


class _Limited(Held):
    """The memory of an accelerator, of which a process has so many bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super().called(func, args, kwargs)
        if self._held() > self._limit:
            raise torch.OutOfMemoryError(f"{self._held():,} bytes of {self._limit:,}")
        return result

    def _held(self) -> int:
        """Bytes; storages that were emptied are looked at only where the sum of all is above the limit."""
        if self._at_most > self._limit:
            for address, one in list(self._made.items()):
                if (each := one()) is not None:
                    self._look(address, each)
        return self._at_most

    def forget(self) -> None:
        """Begin a new peak."""
        self.most = self._held()


@contextmanager
def fake_accelerator() -> Iterator[list[int]]:
    """Inside the block a CPU trains as an accelerator does that has so many bytes for each process; yields the most
    bytes of each pass that was tried, and of the steps."""
    limit, held_bytes = int(sys.argv[4 + joined().rank]), list[int]()
    trial = Trainer._trial

    def working(work: Callable[[Any], None]) -> Callable[[Any], None]:
        def limited(self: Any) -> None:
            with _Limited(limit) as held, ExitStack() as stack:
                for module in (capacity, step_metrics, trainer, bank_trainer):
                    if hasattr(module, "peak_bytes"):
                        stack.enter_context(patch.object(module, "peak_bytes", lambda _: held.most))
                    stack.enter_context(patch.object(module, "forget_peak", lambda _: held.forget()))
                stack.enter_context(patch.object(Trainer, "_trial", lambda *words: trying(held, *words)))
                work(self)
                held_bytes.append(held.most)

        return limited

    def trying(held: _Limited, self: Trainer, rows: Indices) -> None:
        held.forget()
        trial(self, rows)
        held_bytes.append(held.most)

    patches: list[tuple[Any, str, Any]] = [(each, "work", working(each.work)) for each in (Trainer, BankTrainer)]
    patches += [(capacity, "limits_steps", lambda _: True)]
    patches += [(capacity, name, lambda _: limit) for name in ("room", "available")]
    with ExitStack() as stack:
        for patched in patches:
            stack.enter_context(patch.object(*patched))
        yield held_bytes


@contextmanager
def counted_checkpoints() -> Iterator[dict[str, int]]:
    """Inside the block a run that goes on writes what it has read again, and ends; yields the bytes of this process."""
    found = dict.fromkeys(("read", "verified", "written", "hashed"), 0)
    read_box, digest, save_file = checkpoint_parts.read_box, files.digest, checkpoint_parts.save_file
    resume, hashing = AdapterTrainer.resume, "verified"

    def reading(*arguments: Any) -> Tensor:
        box = read_box(*arguments)
        found["read"] += box.nbytes
        return box

    def hashed(path: Path) -> str:
        found[hashing] += path.stat().st_size if path.suffix == ".safetensors" else 0
        return digest(path)

    def writing(tensors: Mapping[str, Tensor], *arguments: Any, **named: Any) -> None:
        found["written"] += sum(each.nbytes for each in tensors.values())
        save_file(dict(tensors), *arguments, **named)

    def resuming(self: AdapterTrainer, **named: Any) -> None:
        nonlocal hashing
        resume(self, **named)
        hashing, self._saved_step = "hashed", None
        self.save(keep=9, last=True)
        raise _Counted

    patches: list[tuple[Any, str, Any]] = [(checkpoint_parts, "read_box", reading), (files, "digest", hashed)]
    patches += [(checkpoint_parts, "save_file", writing), (AdapterTrainer, "resume", resuming)]
    with ExitStack() as stack:
        for patched in patches:
            stack.enter_context(patch.object(*patched))
        with suppress(_Counted):
            yield found


@contextmanager
def own_clocks() -> Iterator[None]:
    """Inside the block, time goes on whenever a process looks at its clock, in each process at another speed."""
    ticks = count(time.monotonic(), 0.05 + 0.02 * joined().rank)
    limited = partial(deadline.Deadline, clock=lambda: next(ticks))
    with patch.object(deadline, "Deadline", limited), patch.object(deadline, "BEAT", 1e9):
        yield


@contextmanager
def broken_off() -> Iterator[None]:
    """Inside the block, a bank ends before its fourth step, whatever it has saved."""
    steps, step = count(1), BankTrainer._step

    def stepping(*arguments: Any) -> None:
        if next(steps) == 4:
            raise _Counted
        step(*arguments)

    with patch.object(BankTrainer, "_step", stepping), suppress(_Counted):
        yield
    assert next(steps) > 4, "it came to its end"


@contextmanager
def one_stands_still() -> Iterator[None]:
    """Inside the block the second process never comes to its second step, and the first waits three seconds for it."""
    steps, step = count(1), Trainer.step

    def stepping(self: Trainer, rows: Indices) -> dict[str, Any]:
        if next(steps) == 2 and self.ranks.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(600)
        return step(self, rows)

    with patch.object(rank_module, "STEP", timedelta(seconds=3)), patch.object(Trainer, "step", stepping):
        yield


COUNTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "steps": counted,
    "shares": counted_shares,
    "start": counted_before,
    "away": counted_away,
    "checkpoints": counted_checkpoints,
    "clocks": own_clocks,
    "accelerator": fake_accelerator,
    "still": one_stands_still,
}


def main() -> None:
    folder, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    again = sys.argv[3:] == ["checkpoints"]
    with importing():
        import deepspeed  # noqa: F401  # else each job searches what it imports for garbage
    ranks = joined()
    plots._drawn = lambda *_, **__: "<svg/>"
    for name, words, origin in jobs:
        if origin == name:
            with broken_off():
                workbench.run(str(folder / "recipe.yaml"), words, out=folder / name, quiet=True)
        elif origin is not None and ranks.first:
            halfway(folder / origin, folder / name, lost=0 if again else 1)
        ranks.wait()
        way = (
            "shares"
            if name.startswith(("fsdp2", "cut blocks")) and sys.argv[3:] == ["steps"]
            else "".join(sys.argv[3:4])
        )
        with COUNTED[way]() if way else nullcontext() as peaks:
            workbench.run(str(folder / "recipe.yaml"), words, out=folder / name, resume=origin is not None, quiet=True)
        if peaks is not None:
            found = peaks if way in ("accelerator", "checkpoints", "start") else min(peaks[len(peaks) // 2 :])
            (folder / f"{name}.{ranks.rank}.json").write_text(json.dumps(found))
        gc.collect()
        gc.freeze()  # else what DeepSpeed keeps of each job is searched in all that follow


if __name__ == "__main__":
    main()
