"""Optimizer states of frozen parameters, on disk until these train again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor


class EvictedStates:
    """Tensors by name of a parameter, in a folder. A checkpoint holds them too: the folder is a place, not a record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}
        self._count = 0
        """Files that were ever written."""

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors of a parameter."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{self._count}.safetensors"
        # No need to be durable: it is worth nothing to another process.
        path.write_bytes(save({key: tensor.detach().contiguous() for key, tensor in tensors.items()}))
        self._files[name] = path
        self._count += 1

    def pop(self, name: str) -> dict[str, Tensor]:
        """The tensors of a parameter, on the CPU; they are kept no longer."""
        path = self._files.pop(name)
        tensors = load(path.read_bytes())
        path.unlink()
        return tensors

    def state(self) -> dict[str, Tensor]:
        """All tensors, for a checkpoint."""
        return {key: tensor for path in self._files.values() for key, tensor in load(path.read_bytes()).items()}

    def clear(self) -> None:
        """Forget everything."""
        self._files.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
