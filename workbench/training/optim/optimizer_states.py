"""Optimizer states as tensors: saved, loaded, evicted to disk, and exchanged for the parameters; and local steps.

`Optimizer.load_state_dict` is not used: it loads all parameters or none and casts each state to its parameter's dtype;
what it loads holds lists and numbers, for which a file would need a pickle.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from workbench.training.checkpoint_parts import Held, SavedTensors
from workbench.training.optim.own_optimizers import FAST_STEPS, SLOW

_COUNTED = ("step", "weight_sum", "lr_max", FAST_STEPS)
"""Counters of a group; its other entries are configured."""
_STEPPED_FROM = "z"
"""The point that schedule-free steps from; no other optimizer's state has one."""
_NUMBER, _IN_COLUMNS = "#", "'"
_FIRST_MOMENT = "state1"
"""bitsandbytes' name of the first moment, which no other optimizer uses."""
_NOT_NEEDED = ("weight_norm", "adam_norm", "trust_ratio", "qmap1", "qmap2")
"""Not saved: what LAMB writes of its last step and never reads, and the constant tables of 8-bit values."""


def state_tensors(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Optimizer state of these parameters, by `name|kind`.

    A kind ends in `.0`, `.1`, ... for the items of a list, in `#` for a number, and in `'` for a matrix that is stored
    by columns and was transposed. Counters of a group, by `group N|kind`, are included if all its parameters are named.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in names.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind not in _NOT_NEEDED:
                tensors.update(_packed(f"{name}|{kind}", value))
    for number, group in _whole_groups(optimizer, names):
        for kind in _COUNTED:
            if kind in group:
                tensors.update(_packed(f"group {number}|{kind}", group[kind]))
    return tensors


def load_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Set the state of these parameters, and of groups that have no others, to what `state_tensors` returned."""
    saved: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("|")
        saved.setdefault(name, {})[kind] = tensor
    for number, group in _whole_groups(optimizer, names):
        group.update(_unpacked(saved.get(f"group {number}", {})))
    name_of = {parameter: name for name, parameter in names.items()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parts := saved.get(name_of.get(parameter, ""), {}):
                optimizer.state[parameter] = {}
                if _FIRST_MOMENT in parts:  # only bitsandbytes can allocate paged memory
                    from bitsandbytes.optim.optimizer import Optimizer8bit

                    assert isinstance(optimizer, Optimizer8bit)
                    optimizer.init_state(group, parameter, number, index)  # type: ignore[no-untyped-call]
                _fill(optimizer.state[parameter], _unpacked(parts), device=parameter.device, group=group)


@contextmanager
def evaluating(optimizer: torch.optim.Optimizer, *, refresh: Callable[[], None]) -> Iterator[None]:
    """Inside the block the parameters hold the values to evaluate and ship; afterwards the same bits as before.

    These are the average of schedule-free and the slow weights of Lookahead; with other optimizers nothing changes.

    Args:
        refresh: Called when the parameters have changed: copies them to where they compute.
    """
    kept = _show(optimizer)
    if not kept:
        yield
        return
    try:
        refresh()
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept.items():
                parameter.copy_(value)
        refresh()


@torch.no_grad()
def _show(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, Tensor]:
    """Put the values to ship into the parameters; returns the previous values of those that changed."""
    kept: dict[nn.Parameter, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if SLOW in state:
                kept[parameter] = parameter.detach().clone()
                parameter.copy_(state[SLOW])
            elif _STEPPED_FROM in state:
                kept[parameter] = parameter.detach().clone()
                # The parameter is y = (1 - beta) z + beta x, and x is the average (Defazio et al. 2024, equation 3).
                parameter.lerp_(state[_STEPPED_FROM], 1 - 1 / group["betas"][0])
    return kept


def _whole_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and group of those whose parameters are all named."""
    named = set(names.values())
    return ((number, group) for number, group in enumerate(optimizer.param_groups) if named.issuperset(group["params"]))


def _packed(key: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        # Files hold rows one after another, and a product of matrices that lie in columns has other last bits.
        in_columns = value.ndim == 2 and not value.is_contiguous() and value.T.is_contiguous()
        return {f"{key}{_IN_COLUMNS}": value.T} if in_columns else {key: value}
    if isinstance(value, list):  # of soap: an empty item is a side that is too long for a basis of its own
        items = [item if isinstance(item, Tensor) else torch.empty(0) for item in value]
        packed = [_packed(f"{key}.{number}", item) for number, item in enumerate(items)]
        return {name: tensor for each in packed for name, tensor in each.items()} or {f"{key}.": torch.empty(0)}
    assert isinstance(value, (int, float)), f"{key} is a {type(value).__name__}"
    return {f"{key}{_NUMBER}": torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)}


def _unpacked(parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """By kind what `_packed` made into `parts`."""
    values: dict[str, Any] = {}
    lists: dict[str, dict[int, Any]] = {}
    for kind, tensor in parts.items():
        value = tensor.item() if kind.endswith(_NUMBER) else tensor.T if kind.endswith(_IN_COLUMNS) else tensor
        stem, dot, number = kind.rstrip(_NUMBER + _IN_COLUMNS).partition(".")
        if dot:
            items = lists.setdefault(stem, {})
            if number:  # an empty list has none
                items[int(number)] = value if tensor.numel() else []
        else:
            values[stem] = value
    return {**values, **{stem: [items[number] for number in range(len(items))] for stem, items in lists.items()}}


def _fill(state: dict[str, Any], values: Mapping[str, Any], *, device: torch.device, group: dict[str, Any]) -> None:
    for kind, value in values.items():
        if isinstance(value, Tensor) and kind in state:
            state[kind].copy_(value)
        elif isinstance(value, Tensor) and kind == "step" and not group.get("fused"):
            state[kind] = value  # torch counts on the host where the kernel does not read it
        elif isinstance(value, Tensor):
            state[kind] = value.to(device, copy=True)  # a file's memory is not aligned, and products depend on that
        elif isinstance(value, list):
            state[kind] = [item.to(device, copy=True) if isinstance(item, Tensor) else item for item in value]
        else:
            state[kind] = value


class OptimizerStep(Protocol):
    """Takes optimizer steps, and reads and loads trainable values and optimizer states."""

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients; returns their norm before that, a scalar which may be on an accelerator."""

    def take(self) -> None:
        """Take the step."""

    def clear(self) -> None:
        """Free the gradients."""

    def values(self) -> Mapping[str, Held]:
        """What this process holds of the trainable parameters, by name, in float32 or wider."""

    def states(self) -> Mapping[str, Held]:
        """What it holds of optimizer states, by name."""

    def read(self, saved: SavedTensors) -> None:
        """Read this process's part of a checkpoint: the parameters, and the optimizer states that it has."""


class LocalStep(OptimizerStep):
    """Optimizer step for unsharded parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._trainable = optimizer, trainable

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(list(self._trainable.values()), max_norm)

    def take(self) -> None:
        self._optimizer.step()

    def clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def values(self) -> Mapping[str, Held]:
        return self._trainable

    def states(self) -> Mapping[str, Held]:
        return state_tensors(self._optimizer, self._trainable)

    def read(self, saved: SavedTensors) -> None:
        saved.fill("trainable", self._trainable)
        load_state(self._optimizer, self._trainable, saved.whole("optimizer"))


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalars; the host waits for an accelerator only once."""
    if len({each.device for each in scalars}) > 1:  # such as norms of gradients in the host's memory
        return [float(each) for each in scalars]
    values: list[float] = torch.stack([each.detach().double() for each in scalars]).cpu().tolist()
    return values


class EvictedStates:
    """Optimizer states of frozen parameters, on disk until these train again. A checkpoint holds them too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}
        self._count = 0  # files that were ever written

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of a parameter."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{self._count}.safetensors"
        # It need not be durable: no other process reads it.
        path.write_bytes(save({key: tensor.detach().contiguous() for key, tensor in tensors.items()}))
        self._files[name] = path
        self._count += 1

    def pop(self, name: str) -> dict[str, Tensor]:
        """The tensors of a parameter, on the CPU; deletes their file."""
        path = self._files.pop(name)
        tensors = load(path.read_bytes())
        path.unlink()
        return tensors

    def state(self) -> dict[str, Tensor]:
        """All tensors, for a checkpoint."""
        return {key: tensor for path in self._files.values() for key, tensor in load(path.read_bytes()).items()}

    def clear(self) -> None:
        """Delete all files."""
        self._files.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
