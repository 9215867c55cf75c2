"""The processes that train together (ranks): which one this is, and what all of them agree on."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from workbench.errors import ConfigError, TrainingError
from workbench.runs import units

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

T = TypeVar("T")
_Tensor = TypeVar("_Tensor", bound="Tensor")

WAIT = timedelta(days=1)
"""How long a process waits between steps for another one that lives, and may score or save. That one has died, or came
to another line, is noticed at once."""
STEP = timedelta(minutes=30)
"""How long it waits within an optimizer step, to which all come together."""
LOOK = 1.0
"""Seconds between two checks that the launcher still lives."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. Of these fields only `world` is equal in all processes."""

    rank: int = 0
    world: int = 1
    """Number of processes."""
    local: int = 0
    """Rank on this machine."""
    here: int = 1
    """Number of processes on this machine."""

    @property
    def first(self) -> bool:
        """Whether this is the process that writes, scores and reports."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is only this process."""
        return self.world == 1

    def agreed(self, value: T) -> T:
        """The first process's value, in every process."""
        import torch.distributed as dist

        if self.alone:
            return value
        self._met(None)
        payload = [value]
        dist.broadcast_object_list(payload, src=0)
        return payload[0]

    def gathered(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        return [value] if self.alone else self._met(value)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set in any process."""
        return any(self.gathered(flag))

    def share(self, members: Sequence[T]) -> Sequence[T]:
        """This process's shard of several trainings; `collected` puts the results in order again."""
        return members[self.rank :: self.world]

    def collected(self, gathered: Sequence[T]) -> list[T]:
        """The shards of all processes, joined in the order of the whole."""
        parts = self.gathered(gathered)
        return [parts[number % self.world][number // self.world] for number in range(sum(map(len, parts)))]

    def wait(self) -> None:
        """Wait until all processes are here."""
        if not self.alone:
            self._met(None)

    def _met(self, value: Any) -> list[Any]:
        """What each process brings to this line of whoever calls.

        Raises:
            TrainingError: One of them came to another line: they would take each other's values for their own.
        """
        import torch.distributed as dist

        caller = sys._getframe(1)
        while caller.f_code.co_filename == __file__ and caller.f_back is not None:
            caller = caller.f_back
        by_rank: list[Any] = [None] * self.world
        dist.all_gather_object(by_rank, (f"{caller.f_globals['__name__']}, line {caller.f_lineno}", value))
        lines = [line for line, _ in by_rank]
        if len({*lines}) > 1:
            met = "; ".join(f"process {rank} to {line}" for rank, line in enumerate(lines))
            raise TrainingError(
                f"The processes came to different lines, where all have to meet: {met}.\n  They ran into different "
                "branches, from files or settings that differ between machines. The last checkpoint is whole: write "
                "--resume."
            )
        return [each for _, each in by_rank]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside the block, which all processes enter together, none waits longer than STEP for another one.

        Raises:
            TrainingError: It did. NCCL ends the process instead, and says which operation was never finished.
        """
        from torch.distributed import distributed_c10d

        if self.alone:
            yield
            return
        groups = list(distributed_c10d._world.pg_map)  # those that this process is in

        def limit(waiting: timedelta) -> None:
            for group in groups:
                distributed_c10d._set_pg_timeout(waiting, group)

        limit(STEP)
        try:
            yield
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise TrainingError(
                f"Process {self.rank} waited {units.duration(STEP.total_seconds())} for another one, which lives and "
                "did not come to the same operation: it may hang, or compute something else.\n  Look for it with "
                "`py-spy dump --pid PID`; the last checkpoint is whole: write --resume."
            ) from error
        finally:
            limit(WAIT)

    def add_up(self, tensors: Sequence[Tensor], *, bucket_bytes: int, group: dist.ProcessGroup | None = None) -> None:
        """Replace each tensor by its sum over all processes, or those of a group, `bucket_bytes` at a time.

        The sums are bit for bit equal in all processes.
        """
        import torch
        import torch.distributed as dist

        if self.alone:
            return
        for bucket in buckets(tensors, bucket_bytes):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(summed.view_as(tensor))


ALONE = Ranks()


def joined() -> Ranks:
    """This process among those that a launcher started, connected to the others; ALONE without a launcher.

    torchrun, accelerate and deepspeed set RANK, WORLD_SIZE and LOCAL_RANK.

    Raises:
        ConfigError: There are fewer devices than processes.
    """
    import torch
    import torch.distributed as dist

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return ALONE
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    ranks = Ranks(int(os.environ["RANK"]), world, int(os.environ.get("LOCAL_RANK", "0")), here)
    if torch.cuda.is_available():
        if ranks.local >= torch.cuda.device_count():
            raise ConfigError(
                f"Process {ranks.local} of this machine has no device: there are {torch.cuda.device_count()}. "
                f"Start no more processes than that, such as with --devices {torch.cuda.device_count()}."
            )
        torch.cuda.set_device(ranks.local)
    if not dist.is_initialized():
        parent = os.getppid()

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(LOOK)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=WAIT)
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return ranks


def restarted() -> bool:
    """Whether torchrun has restarted this process after one of the processes had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launched() -> float:
    """When the launcher of this process began, in seconds since 1970."""
    return float(psutil.Process(os.getppid()).create_time())


def require_same(ranks: Ranks, digest: str) -> None:
    """Raise ConfigError in every process where they were given different configurations."""
    digests = ranks.gathered(digest)
    others = [number for number, each in enumerate(digests) if each != digests[0]]
    if others:
        raise ConfigError(
            f"Process {others[0]} was given another configuration than process 0: every one needs the same recipe, "
            "the same key=value words and the same files."
        )


def buckets(tensors: Sequence[_Tensor], size: int) -> list[list[_Tensor]]:
    """Neighbouring tensors of one dtype in buckets of at most `size` bytes, or of one larger tensor."""
    cut: list[list[_Tensor]] = []
    room = 0
    for tensor in tensors:
        if not cut or tensor.nbytes > room or tensor.dtype != cut[-1][-1].dtype:
            cut.append([])
            room = size
        cut[-1].append(tensor)
        room -= tensor.nbytes
    return cut
