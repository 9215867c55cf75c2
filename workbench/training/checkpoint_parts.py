"""Tensors of a checkpoint, of which each process writes and reads its own part (torch.distributed.checkpoint).

A checkpoint has safetensors files for each kind of state and process: `trainable.safetensors` of the first process,
`trainable-00001.safetensors` of the second. What is larger than VOLUME goes on in `trainable-00001-00001.safetensors`,
so that no more than that is copied to the host at once. A tensor that several processes hold whole is written by one of
them. A part is a set of boxes; the header of its file says which. Any other number of processes, in any layout, reads
the boxes that it needs.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from workbench.errors import ResumeError
from workbench.runs import files
from workbench.runs.ranks import Ranks

VOLUME = 1 << 30
"""Bytes of tensors in a file at most, but for one that is larger."""
Offsets = tuple[int, ...]
_BOXES = "boxes"
"""Key of a file's header: name, offsets and shape of the whole tensor, of each entry that is a part of one."""


@dataclass(frozen=True)
class TensorPart:
    """What this process holds of a tensor."""

    shape: torch.Size
    """Of the whole tensor."""
    boxes: Mapping[Offsets, Tensor]
    """By the position of their first element."""

    @staticmethod
    def of(held: Held) -> TensorPart:
        """The part that a tensor is, or that this process holds of a distributed one."""
        if isinstance(held, TensorPart):
            return held
        if not isinstance(held, DTensor):
            return TensorPart(held.shape, {(0,) * held.ndim: held.detach()})
        chunks, own = held.__create_chunk_list__(), held.detach().to_local()  # type: ignore[attr-defined]
        return TensorPart(held.shape, {tuple(each.offsets): own for each in chunks if math.prod(each.sizes)})

    @staticmethod
    def flat(held: Tensor, start: int, shape: torch.Size) -> TensorPart:
        """The boxes of neighbouring elements (a 1-D tensor), of which the first has number `start` in the whole."""
        boxes, used = dict[Offsets, Tensor](), 0
        for offsets, sizes in _boxes(tuple(shape), start, start + held.numel()):
            count = math.prod(sizes)
            boxes[offsets] = held[used : used + count].view(sizes)
            used += count
        return TensorPart(shape, boxes)


Held = Tensor | TensorPart
Tensors = Mapping[str, Mapping[str, Held]]
"""File stem (`trainable`, `optimizer`) to what this process holds of named tensors."""


def _boxes(shape: Offsets, start: int, stop: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Offsets and sizes of the boxes that elements `start` to `stop` of a tensor are, in the order of its elements."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        number, begin = divmod(start, row)
        rows = (stop - start) // row
        if begin == 0 and rows:
            yield (number, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
        else:
            end = min(row, begin + stop - start)
            yield from (((number, *box), (1, *sizes)) for box, sizes in _boxes(shape[1:], begin, end))
            start += end - begin


class SavedTensors:
    """A checkpoint on disk; nothing is read but what is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stored(self, stem: str) -> dict[str, TensorStorageMetadata]:
        """Shape, dtype and boxes of each tensor of a kind; empty where the checkpoint has no such file."""
        return {name: each for name, (each, _) in self._found(stem).items()}

    def fill(self, stem: str, held: Mapping[str, Held]) -> None:
        """Read what this process holds of these tensors into their memory."""
        found = self._found(stem)
        for name, each in held.items():
            whole, places = found[name]
            part = TensorPart.of(each)
            if part.shape != whole.size:
                raise ResumeError(f"{self.path}: {name} is {tuple(whole.size)} there and {tuple(part.shape)} here.")
            for offsets, target in part.boxes.items():
                own = [ChunkStorageMetadata(torch.Size(offsets), target.shape)]
                for item in create_read_items_for_chunk_list(name, whole, own):
                    file, key = places[item.storage_index.index or 0]
                    box = read_box(file, key, item.storage_offsets, item.lengths)
                    target[_slices(item.dest_offsets, item.lengths)].copy_(box)

    def whole(self, stem: str) -> dict[str, Tensor]:
        """All tensors of a kind, on the host."""
        tensors = {
            name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in self.stored(stem).items()
        }
        self.fill(stem, tensors)
        return tensors

    def _found(self, stem: str) -> dict[str, tuple[TensorStorageMetadata, list[tuple[Path, str]]]]:
        found: dict[str, tuple[TensorStorageMetadata, list[tuple[Path, str]]]] = {}
        for path in sorted({*self.path.glob(f"{stem}.safetensors"), *self.path.glob(f"{stem}-[0-9]*.safetensors")}):
            with safe_open(path, "pt") as file:
                boxes = json.loads((file.metadata() or {}).get(_BOXES, "{}"))
                for key in file.keys():  # noqa: SIM118
                    entry = file.get_slice(key)
                    sizes = torch.Size(entry.get_shape())
                    name, offsets, size = boxes.get(key, (key, [0] * len(sizes), sizes))
                    properties = TensorProperties(dtype=_DTYPES[entry.get_dtype()])
                    fresh = TensorStorageMetadata(properties, torch.Size(size), [])
                    whole, places = found.setdefault(name, (fresh, []))
                    whole.chunks.append(ChunkStorageMetadata(torch.Size(offsets), sizes))
                    places.append((path, key))
        return found


def read_box(path: Path, key: str, offsets: torch.Size, sizes: torch.Size) -> Tensor:
    """A box of an entry of a safetensors file."""
    with safe_open(path, "pt") as file:
        entry = file.get_slice(key)
        if list(sizes) == entry.get_shape():
            whole: Tensor = file.get_tensor(key)
            return whole
        box: Tensor = entry[_slices(offsets, sizes)]
        return box


def _slices(offsets: torch.Size, sizes: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By safetensors' names."""


class _Planner(DefaultSavePlanner):
    """Plans boxes; torch leaves out all but one of those that several processes hold."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for key, part in self.state_dict.items() for item in _items(key, part)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        box: Tensor = self.state_dict[index.fqn].boxes[tuple(index.offset)]
        return box


def _items(key: str, part: TensorPart) -> Iterator[WriteItem]:
    for offsets, box in part.boxes.items():
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), box.shape),
            properties=TensorProperties.create_from_tensor(box),
            size=part.shape,
        )
        yield WriteItem(MetadataIndex(key, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


class _Writer(StorageWriter):
    """Writes this process's boxes, and completes the folder in the first process when all have written theirs.

    Args:
        path: Of the checkpoint.
        complete: As `save` has it.
    """

    def __init__(self, path: Path, ranks: Ranks, complete: Complete) -> None:
        self._path, self._ranks, self._complete = path, ranks, complete
        self._aside = path.with_name(f".{path.name}.unfinished")

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        if is_coordinator:
            with files.explained_errors(self._path):
                files.begin(self._aside)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        by_stem: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            by_stem.setdefault(item.index.fqn.partition("/")[0], []).append(item)
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                self._write(f"{stem}{self._suffix(number)}.safetensors", items, planner)
                for stem, own in by_stem.items()
                for number, items in enumerate(_volumes(own))
            ]
        )
        return written

    def _suffix(self, volume: int) -> str:
        rank = f"-{self._ranks.rank:05}" if volume or not self._ranks.first else ""
        return f"{rank}-{volume:05}" if volume else rank

    def _write(self, name: str, items: Sequence[WriteItem], planner: Any) -> WriteResult:
        tensors, boxes = dict[str, Tensor](), dict[str, tuple[str, list[int], list[int]]]()
        for item in items:
            assert item.index.offset is not None and item.tensor_data is not None
            box, size, key = planner.resolve_data(item), item.tensor_data.size, item.index.fqn.partition("/")[2]
            if box.shape != size:
                whole, key = key, f"{key}@{','.join(map(str, item.index.offset))}"
                boxes[key] = (whole, list(item.index.offset), list(size))
            tensors[key] = box.contiguous()
        file = self._aside / name
        with files.explained_errors(self._path):
            save_file(tensors, file, metadata={_BOXES: json.dumps(boxes)} if boxes else None)
            files.fsync(file)
            return WriteResult(MetadataIndex(file.name), file.stat().st_size, files.digest(file))

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        with files.explained_errors(self._path):
            digests = {each.index.fqn: each.storage_data for of_rank in results for each in of_rank}
            self._complete(self._aside, digests)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Raises the error of the first process that has one, instead of torch's account of all, and leaves no file."""
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
        finally:
            if self._ranks.first:
                shutil.rmtree(self._aside, ignore_errors=True)


def _volumes(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Cut items, in their order, into files of at most VOLUME bytes, or of one item."""
    volume, size = list[WriteItem](), 0
    for item in items:
        assert item.tensor_data is not None
        own = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if volume and size + own > VOLUME:
            yield volume
            volume, size = [], 0
        volume.append(item)
        size += own
    if volume:
        yield volume


Complete = Callable[[Path, Mapping[str, str]], None]
"""Called in the first process with a folder, and the digest of each file in it by name; makes it the checkpoint."""


class Background:
    """Writes the checkpoints of a run while it goes on, one after the other."""

    def __init__(self) -> None:
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: futures.Future[None] | None = None
        self._group: dist.ProcessGroup | None = None
        """Through which the threads that write agree, apart from the processes' steps."""

    def start(self, state: Mapping[str, TensorPart], writer: _Writer, ranks: Ranks) -> None:
        """Copy what this process holds, and begin to write it when the checkpoint before is written."""
        self.wait()
        if self._group is None and not ranks.alone:
            self._group = dist.new_group(backend="gloo")
        staged = {
            key: TensorPart(part.shape, {at: box.to("cpu", copy=True) for at, box in part.boxes.items()})
            for key, part in state.items()
        }
        self._pending = self._thread.submit(_write, staged, writer, ranks, self._group)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete, and raise the error that it ended with."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def save(
    path: Path, tensors: Tensors, ranks: Ranks, complete: Complete, *, background: Background | None = None
) -> None:
    """Write a checkpoint, each process its own part; all call it together. An older one stays until `complete` is done.

    Raises:
        FileError: In every process, where one of them cannot write.
    """
    state = {f"{stem}/{name}": TensorPart.of(held) for stem, named in tensors.items() for name, held in named.items()}
    writer = _Writer(path, ranks, complete)
    if background is None:
        _write(state, writer, ranks)
    else:
        background.start(state, writer, ranks)


def _write(
    state: Mapping[str, TensorPart], writer: _Writer, ranks: Ranks, group: dist.ProcessGroup | None = None
) -> None:
    planner = _Planner()
    with writer.own_errors():
        if not ranks.alone:
            state_dict_saver.save(dict(state), storage_writer=writer, planner=planner, process_group=group)
            return
        planner.set_up_planner(dict(state), is_coordinator=True)  # torch would warn that there is one process
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer.set_up_storage_writer(True)
        writer.finish(metadata, [writer.write_data(planner.finish_plan(plans[0]), planner).value()])
