"""Whether outputs of a frozen prefix can be cached, the memory and time of that, and where they go.

Legend: B rows, L length, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from workbench import adapters
from workbench.adapters import anatomy
from workbench.adapters.banks.bank_layers import Routed
from workbench.adapters.banks.bank_members import MemberParts
from workbench.data.batching import Examples
from workbench.errors import ConfigError
from workbench.models import first_token
from workbench.runs import units
from workbench.training.freezing.cached_prefix import CachedPrefix, parts, rows_of
from workbench.training.freezing.hidden_state_store import MemoryStore
from workbench.training.freezing.layer_map import trial_inputs

MEMORY_SHARE, DISK_SHARE = 0.25, 0.5
"""Shares of available memory and of free disk that may be filled."""
WORTHWHILE = 0.05
"""Share of a training's computing that a cache has to save."""

Where = Literal["memory", "disk", "off"]
_PLACES: dict[Where, str] = {"memory": "in memory", "disk": "on disk"}
_LIMITS: dict[Where, str] = {"memory": "a quarter of what is available", "disk": "half of what is free"}


class DataProfile(NamedTuple):
    """Properties of the data that decide about a cache."""

    rows: int
    """Different ones."""
    tokens: int
    """Tokens of these rows, without padding."""
    trailing: int
    """Most zeros that a row ends with whose padding no mask tells; `CachedPrefix` asks for it."""


class CacheEstimate(NamedTuple):
    """Memory that a cache takes and time that it saves."""

    rows: int
    bytes: int
    passes: float
    """How often each row is computed without it, on average."""
    saved: float
    """Share of the training's computing, 0 to 1, with the prefix frozen in either case."""


class CacheDecision(NamedTuple):
    """Where outputs are kept, and why, for a person."""

    where: Where
    sentence: str


def profile(sets: Sequence[Examples], *, causal: bool) -> DataProfile:
    """Read every row once, as in the first epoch.

    Args:
        causal: Whether rows without an attention mask are padded with zeros (`backbone.can_generate()`).

    Returns:
        Zeros at the end of such rows count as padding, as in the cache.
    """
    row_lengths: dict[bytes, int] = {}
    trailing = 0
    for examples in sets:
        for indices in np.array_split(np.arange(len(examples.lengths)), -(-len(examples.lengths) // 256)):
            batch = examples.batch(indices)
            rows = rows_of(batch.inputs, causal=causal)
            assert rows is not None, "micro-batches are padded on the right"
            # A picture has as many patches as its row is long.
            lengths = examples.lengths[indices].tolist() if "pixel_values" in batch.inputs else rows.lengths
            row_lengths.update(zip(rows.keys, lengths, strict=True))
            if causal and batch.lengths_B is not None:
                trailing = max(trailing, int((batch.lengths_B - torch.tensor(rows.lengths)).max()))
    return DataProfile(len(row_lengths), sum(row_lengths.values()) + trailing * len(row_lengths), trailing)


def estimate(
    backbone: PreTrainedModel,
    profile: DataProfile,
    *,
    blocks: Sequence[nn.Module],
    depth: int,
    itemsize: int,
    passes: float,
    everything: bool,
    supervised: float = 1.0,
) -> CacheEstimate:
    """Memory and time of a cache of the first `depth` blocks' outputs, by parameters.

    A parameter costs a unit forward, one for its input's gradient, and where it trains one for its own. The prefix
    costs its forward pass alone: with the cache once, without it in each pass.

    Args:
        itemsize: Bytes of a number as it is kept.
        passes: How often each row is computed, on average: epochs, times the members that learn from it.
        everything: Whether all above the line trains, rather than an adapter.
        supervised: Share of the tokens that go through the head.
    """
    sizes = [adapters.count(block).total for block in blocks]
    below, above = sum(sizes[:depth]), sum(sizes[depth:]) + supervised * _head_size(backbone)
    uncached = below + (3 if everything else 2) * above
    return CacheEstimate(
        rows=profile.rows,
        bytes=profile.tokens * anatomy.hidden_size(backbone.config) * itemsize,
        passes=passes,
        saved=(1 - 1 / passes) * below / uncached,
    )


def decide(
    estimated: CacheEstimate,
    wanted: Where | Literal["auto"],
    *,
    available_memory: int,
    free_disk: int,
    obstacle: str | None = None,
) -> CacheDecision:
    """Where outputs are kept: where it is `wanted`, if they fit there; `auto` takes memory before disk, where it pays.

    Args:
        available_memory: Bytes.
        free_disk: Bytes.
        obstacle: Why it cannot be right at all, as `refusal` and `nondeterministic` say.

    Raises:
        ConfigError: memory or disk is asked for, and there is an obstacle.
    """
    if wanted == "off":
        return _off("freeze.cache=off")
    if obstacle is not None and wanted != "auto":
        raise ConfigError(
            f"freeze.cache={wanted} cannot be: {obstacle}.\n"
            "  Change that, or write freeze.cache=off; auto keeps outputs only where that changes no result."
        )
    reason = obstacle or (_hardly_pays(estimated) if wanted == "auto" else None)
    if reason is not None:
        return _off(reason)
    size = units.size(estimated.bytes)
    limits: dict[Where, float] = {"memory": MEMORY_SHARE * available_memory, "disk": DISK_SHARE * free_disk}
    asked: list[Where] = ["memory", "disk"] if wanted == "auto" else [wanted]
    for where in asked:
        if estimated.bytes <= limits[where]:
            return CacheDecision(
                where,
                f"Outputs of the frozen blocks are kept {_PLACES[where]}, {size} of {estimated.rows:,} rows: that "
                f"saves {units.percent(estimated.saved)} of the computing.",
            )
    room = ", and ".join(f"{_PLACES[where]} at most {units.size(limits[where])} ({_LIMITS[where]})" for where in asked)
    return _off(f"they would take {size}, and {room} may be filled. freeze.stored=bfloat16 halves float32")


def _off(reason: str) -> CacheDecision:
    return CacheDecision("off", f"Outputs of the frozen blocks are not kept: {reason}.")


def _hardly_pays(estimated: CacheEstimate) -> str | None:
    """Reason why computing them each time is as good; None where it is not."""
    if estimated.passes <= 1:
        return "each row is seen only once"
    if estimated.saved < WORTHWHILE:
        return f"that would save {units.percent(estimated.saved)} of the computing, which is not worth it"
    return None


def nondeterministic(
    model: PreTrainedModel, *, blocks: Sequence[nn.Module], depth: int, changing: str | None = None
) -> str | None:
    """Reason why the frozen prefix gives a row other outputs each time; None where it does not.

    Args:
        model: In the modes that it trains in.
        changing: Name of something that changes the rows from epoch to epoch, such as "image.augment".
    """
    if changing is not None:
        return f"{changing} changes the rows in each epoch, so that none comes twice"
    above = {id(module) for block in blocks[depth:] for module in block.modules()}
    below = {id(module) for block in blocks[:depth] for module in block.modules()}
    for path, module in model.base_model.named_modules():
        if id(module) in above or not module.training:
            continue
        if chance := max(_chances(module, in_block=id(module) in below), default=0.0):
            name = path or type(model.base_model).__name__
            return f"{name} draws by lot below the line, with a chance of {units.percent(chance)}"
    return None


def _chances(module: nn.Module, *, in_block: bool) -> list[float]:
    """Probabilities of dropout and other noise."""
    if isinstance(module, _DropoutNd):
        return [module.p]
    # What holds the blocks may keep their share as an attribute, but uses only that of whole layers.
    names = ("drop", "jitter") if in_block else ("layerdrop",)
    attributes = ((key, value) for key, value in vars(module).items() if isinstance(value, float))
    return [value for key, value in attributes if any(name in key for name in names)]


def refusal(backbone: PreTrainedModel, *, blocks: Sequence[nn.Module], depth: int) -> str | None:
    """Reason why outputs of the first `depth` blocks cannot be kept, whatever the rows; None where they can.

    Call it when the blocks are frozen. The backbone is tried with a short row or a picture, in a bank
    inside `Bank.only`.
    """
    family = type(backbone).__name__
    if depth == 0:
        return "no block is frozen"
    if backbone.config.is_encoder_decoder:
        return f"{family} is an encoder-decoder, whose blocks read two sequences"
    if backbone.main_input_name not in ("input_ids", "pixel_values"):
        return f"{family} reads neither tokens nor pictures"
    if any(isinstance(module, (Routed, MemberParts)) for block in blocks[:depth] for module in block.modules()):
        return "each member of a bank has an adapter of its own in the frozen blocks"
    if depth == len(blocks):
        first_token.widen(backbone)
    with _evaluating(backbone):
        return _refusal_of_trial(backbone, blocks, depth)


def _refusal_of_trial(backbone: PreTrainedModel, blocks: Sequence[nn.Module], depth: int) -> str | None:
    """`refusal`, from a trial with a few tokens, or a picture."""
    family = type(backbone).__name__
    inputs = trial_inputs(backbone)
    seen: list[tuple[int, Any]] = []
    hooks = [
        block.register_forward_hook(lambda _, __, output, number=number: seen.append((number, output)))
        for number, block in enumerate(blocks)
    ]
    try:
        with torch.enable_grad():
            wanted = backbone(**inputs)[0].detach()
    finally:
        for hook in hooks:
            hook.remove()
    if [number for number, _ in seen] != list(range(len(blocks))):
        return f"{family} does not run its blocks one after the other, each once"
    hidden_BLD, _ = parts(seen[depth - 1][1])
    if "input_ids" in inputs and hidden_BLD.shape[:-1] != inputs["input_ids"].shape:
        return f"the blocks of {family} give other positions than those of the tokens"
    if hidden_BLD.ndim != 3:
        return f"the blocks of {family} give no rows of patches"
    if names := _trained(backbone, hidden_BLD):
        return f"{names[0]} trains, and the frozen blocks read it"
    cached = CachedPrefix(backbone, blocks=blocks, depth=depth, states=MemoryStore(hidden_BLD.dtype))
    cached.install()
    try:
        with torch.no_grad():
            actual = backbone(**inputs)[0]
    except (LookupError, TypeError, AttributeError):
        return f"the upper blocks of {family} read more of the lower ones than hidden states"
    finally:
        cached.remove()
    if not cached.read or not torch.allclose(actual, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max())):
        return f"{family} gives something else with outputs of its frozen blocks that were kept"
    return None


def _trained(backbone: PreTrainedModel, hidden_BLD: Tensor) -> list[str]:
    """Names of the parameters that train and that these hidden states depend on."""
    named = {name: each for name, each in backbone.named_parameters() if each.requires_grad}
    if not named or not hidden_BLD.requires_grad:
        return []
    grads = torch.autograd.grad(hidden_BLD.sum(), list(named.values()), allow_unused=True)
    return [name for name, grad in zip(named, grads, strict=True) if grad is not None]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, everything is in evaluation mode; afterwards each module is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _head_size(backbone: PreTrainedModel) -> int:
    """Parameters of the output head: a language model's projection, or all that a classifier has above its stack."""
    projection = backbone.get_output_embeddings()
    if projection is not None:
        return adapters.count(projection).total
    inside = {id(parameter) for parameter in backbone.get_submodule(anatomy.body(backbone)).parameters()}
    return sum(each.numel() for each in backbone.parameters() if id(each) not in inside)
