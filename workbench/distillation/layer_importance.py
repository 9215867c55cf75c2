"""Which layers a student keeps: those without which its teacher's last hidden states change most.

Layers go one at a time. Of those that change least what they are given (one minus the cosine, the block influence of
ShortGPT, Men et al. 2024, arXiv:2403.03853) a few are skipped in turn, and that one goes without which the last hidden
states of some training rows stay closest to the whole model's. The first and the last layer stay. What was found is
kept below WORKBENCH_CACHE, for these weights and rows, so that a run need not look again for what `check` has found.

Legend: B rows, L padded length, D width, N tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from workbench.data.batching import Examples, MicroBatch
from workbench.models import backbones, forward_hooks
from workbench.runs import files

RULE = 1
"""Raise it when other layers would be chosen."""
ROWS, TOKENS = 64, 1024
"""Training rows that are read, and their tokens together, but for the first row."""
TRIED = 6
"""Layers that are skipped in turn before one goes. SmolLM2-135M with 15 of its 30 layers begins at 4.77 nats a token on
GSM8K, with every second one at 13.06."""


class Layers(NamedTuple):
    """The layers of a stack that stay, and how it was decided."""

    kept: list[int]
    changes: list[float]
    """Mean squared change of the last hidden states with each layer that went, one after another, as a share of their
    mean square."""


def rows_to_read(rows: Examples) -> MicroBatch:
    """The first rows, as many as are read."""
    few = int(np.searchsorted(np.cumsum(rows.lengths[:ROWS]), TOKENS, side="right"))
    return rows.batch(np.arange(max(1, few)))


def known(model: PreTrainedModel, stack: Sequence[str], kept: Sequence[int], count: int, batch: MicroBatch) -> Layers:
    """`choose`, or what it found the last time for these weights and rows."""
    hasher = hashlib.sha256(repr([RULE, TRIED, *stack, *kept, count]).encode())
    for name, tensor in sorted([*model.state_dict().items(), *batch.inputs.items()]):
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        hasher.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    path = files.cache_folder() / "layers" / f"{hasher.hexdigest()[:32]}.json"
    if found := files.read_json(path):
        return Layers(**found)
    read = deepcopy(model).float() if backbones.emulates(model) else model  # the model itself keeps its precision
    layers = choose(read, stack, kept, count, batch)
    files.write_json(path, layers._asdict())
    return layers


@torch.no_grad()
def choose(model: PreTrainedModel, stack: Sequence[str], kept: Sequence[int], count: int, batch: MicroBatch) -> Layers:
    """The `count` layers of a stack that stay.

    Args:
        stack: Paths of its layers.
        kept: Layers that stay in any case.
        batch: Of the training rows.
    """
    left, changes, batch = list(range(len(stack))), [], batch.to(next(model.parameters()).device)
    whole_ND = last_hidden(model, batch)
    tails = dict[nn.Module, Any]()

    def change(gone: set[int], number: int, given: Mapping[int, Tensor]) -> float:
        """Without `number` as well; what stands before it computes what it did, `given`, and is not asked again."""
        before, hidden = {*range(number)} if number in given else gone, given.get(number)
        with _skipping(model, [stack[each] for each in gone | before | {number}], tails, {stack[number]: hidden}):
            return float((last_hidden(model, batch) - whole_ND).square().mean() / whole_ND.square().mean())

    while len(left) > max(count, len(kept)):
        gone = {*range(len(stack))} - {*left}
        with _skipping(model, [stack[number] for number in gone], tails):
            influence, given = _influence(model, stack, left, batch, tails)
        free = sorted(set(left) - set(kept), key=lambda number: influence[number])
        found = {number: change(gone, number, given) for number in free[:TRIED]}
        worst = min(found, key=lambda number: found[number])
        left.remove(worst)
        changes.append(round(found[worst], 6))
    return Layers(left, changes)


def last_hidden(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Last hidden states of all real tokens (N, D) in float32, or of whole pictures."""
    hidden = model.base_model(**batch.inputs)[0].float()
    mask_BL = real_tokens(batch)
    if mask_BL is None or mask_BL.shape != hidden.shape[:2]:
        return hidden.flatten(0, 1)  # type: ignore[no-any-return]
    return hidden[mask_BL]  # type: ignore[no-any-return]


def real_tokens(batch: MicroBatch) -> Tensor | None:
    """Which tokens (B, L) are not padding; None for pictures."""
    mask_BL = batch.inputs.get("decoder_attention_mask", batch.inputs.get("attention_mask"))
    if mask_BL is None and batch.lengths_B is not None:
        return torch.arange(batch.width, device=batch.lengths_B.device) < batch.lengths_B[:, None]
    return None if mask_BL is None else mask_BL.bool()


def _influence(
    model: PreTrainedModel, stack: Sequence[str], left: Sequence[int], batch: MicroBatch, tails: dict[nn.Module, Any]
) -> tuple[dict[int, float], dict[int, Tensor]]:
    """How much each layer changes what it is given, and that, where all are given hidden states of one shape. Notes in
    `tails` what a layer returns beside hidden states."""
    found, states = dict[int, float](), dict[int, Tensor]()

    def watch(number: int) -> Callable[..., None]:
        def seen(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            before, after = forward_hooks.hidden_of(given, named), output[0] if isinstance(output, tuple) else output
            states[number] = before.clone()
            same = before.shape == after.shape  # a layer that halves a picture changes it altogether
            found[number] = 1 - float(F.cosine_similarity(before.float(), after.float(), dim=-1).mean()) if same else 2
            tails.setdefault(layer, output[1:] if isinstance(output, tuple) else None)

        return seen

    layers = {number: model.get_submodule(stack[number]) for number in left}
    handles = [layer.register_forward_hook(watch(number), with_kwargs=True) for number, layer in layers.items()]
    model.base_model(**batch.inputs)
    for handle in handles:
        handle.remove()
    alike = len({each.shape for each in states.values()}) == 1
    return found, states if alike else {}


@contextmanager
def _skipping(
    model: PreTrainedModel,
    paths: Sequence[str],
    tails: dict[nn.Module, Any],
    instead: Mapping[str, Tensor | None] = MappingProxyType({}),
) -> Iterator[None]:
    """Inside it, these layers hand on the hidden states that they are given, or those that `instead` has."""
    layers = {path: model.get_submodule(path) for path in paths}
    for path, layer in layers.items():

        def handed_on(*given: Any, path: str = path, tail: Any = tails[layer], **named: Any) -> Any:
            own = instead.get(path)
            hidden = forward_hooks.hidden_of(given, named) if own is None else own
            return hidden if tail is None else (hidden, *tail)

        forward_hooks.reroute(layer, handed_on)
    try:
        yield
    finally:
        for layer in layers.values():
            forward_hooks.restore(layer)
