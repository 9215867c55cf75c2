"""Prefix cache: outputs of the frozen first blocks, computed once for each row where that pays.

It decides whether and where outputs are kept, by the memory and time that they take and save, follows the boundary
between frozen and trained blocks, and fixes the batches in which rows go through the frozen blocks. The last bits of a
product depend on its shape: if a row were computed with whichever rows a step lacks, a resumed run, whose memory starts
empty, would go on with other bits than one that was never stopped.

Legend: B rows, L length, D hidden.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from workbench import adapters
from workbench.adapters import Full, anatomy
from workbench.adapters.banks.bank_layers import Routed
from workbench.adapters.banks.bank_members import MemberParts
from workbench.config import TrainingSections
from workbench.config.sections.image_config import AugmentConfig
from workbench.data.batching import Examples, Indices, micro_batches
from workbench.errors import ConfigError
from workbench.models import classifier
from workbench.runs import run_directory, units
from workbench.runs.files import cache_folder
from workbench.training.distributed import zero_offload
from workbench.training.freezing.cached_prefix import CachedPrefix, UnpaddedRows, parts, reader, rows_of
from workbench.training.freezing.freezer import Freezer
from workbench.training.freezing.hidden_state_store import DiskStore, HiddenStateStore, MemoryStore, fingerprint
from workbench.training.freezing.layer_map import stack

CPU_TOKENS = 1024
"""Padded tokens of a batch on a CPU, where larger batches are not faster."""


@dataclass(frozen=True)
class BatchPlace:
    """Rows that are computed together, and the examples that have them."""

    examples: Examples
    indices: Indices
    keys: frozenset[bytes]

    def chosen(self, rows: UnpaddedRows) -> UnpaddedRows:
        """These rows among `rows`, each once."""
        firsts = {key: number for number, key in reversed(list(enumerate(rows.keys))) if key in self.keys}
        numbers = sorted(firsts.values())
        types = None if rows.types is None else [rows.types[number] for number in numbers]
        return UnpaddedRows([rows.keys[n] for n in numbers], [rows.tokens[n] for n in numbers], types)


class PrefixBatches:
    """The batch, of rows of similar length, in which each different row is computed.

    Args:
        sets: Rows that are the same in every epoch.
        read: Extracts the rows of a model's inputs; see `cached_prefix.reader`.
        tokens: In a batch, padding included; a longer row has a batch of its own. A resumed run needs the same number.
    """

    def __init__(
        self,
        sets: Sequence[Examples],
        read: Callable[[Mapping[str, Tensor]], UnpaddedRows | None],
        *,
        tokens: int = CPU_TOKENS,
    ) -> None:
        self._read = read
        self._places: dict[bytes, BatchPlace] = {}
        for examples in sets:
            for indices in micro_batches(np.arange(len(examples.lengths)), examples.lengths, tokens=tokens):
                self._add(examples, indices)

    def of(self, key: bytes) -> UnpaddedRows | None:
        """The rows that this one is computed with, itself included; None where no set has it."""
        place = self._places.get(key)
        return None if place is None else place.chosen(self._rows(place.examples, place.indices))

    def _add(self, examples: Examples, indices: Indices) -> None:
        keys = self._rows(examples, indices).keys
        new = frozenset(keys) - self._places.keys()
        if len(keys) == len(indices):  # otherwise an example has several rows, such as a preference pair
            firsts = dict(zip(keys[::-1], indices[::-1], strict=True))
            indices = np.array([firsts[key] for key in new], dtype=np.int64)
        self._places.update(dict.fromkeys(new, BatchPlace(examples, np.sort(indices), new)))

    def _rows(self, examples: Examples, indices: Indices) -> UnpaddedRows:
        unpadded = self._read(examples.batch(indices).inputs)
        assert unpadded is not None, "micro-batches are padded on the right"
        return unpadded


MEMORY_SHARE, DISK_SHARE = 0.25, 0.5
"""Shares of available memory and of free disk that a cache may fill."""
WORTHWHILE = 0.05
"""Least share of a training's computation that a cache has to save."""

Where = Literal["memory", "disk", "off"]
_PLACES: dict[Where, str] = {"memory": "in memory", "disk": "on disk"}
_LIMITS: dict[Where, str] = {"memory": "a quarter of what is available", "disk": "half of what is free"}


class DataProfile(NamedTuple):
    """Properties of the data on which the size of a cache depends."""

    rows: int
    """Number of different rows."""
    tokens: int
    """Tokens of these rows, without padding."""
    trailing: int
    """Most zeros at the end of a row without an attention mask; see `CachedPrefix`."""


class CacheEstimate(NamedTuple):
    """Memory that a cache takes and time that it saves."""

    rows: int
    bytes: int
    passes: float
    """How often each row is computed without a cache, on average."""
    saved: float
    """Share of the training's computation that a cache saves, 0 to 1; the prefix is frozen either way."""


class CacheDecision(NamedTuple):
    """Where outputs are kept, and a sentence that says why."""

    where: Where
    sentence: str


def profile(sets: Sequence[Examples], *, causal: bool) -> DataProfile:
    """Read every row once, as in the first epoch.

    Args:
        causal: Whether rows without an attention mask are padded with zeros (`backbone.can_generate()`), so that zeros
            at their end count as padding, as in the cache.
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
    """Memory and time of a cache of the first `depth` blocks' outputs, estimated from numbers of parameters.

    A parameter costs one unit in the forward pass, one for its input's gradient, and one for its own gradient where it
    trains. The prefix costs its forward pass: once with the cache, in each pass without it.

    Args:
        itemsize: Bytes of a stored number.
        passes: How often each row is computed, on average: epochs, times the members that learn from it.
        everything: Whether all values above the frozen blocks train, rather than an adapter.
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
    """Where outputs are kept: where it is `wanted`, if they fit; `auto` prefers memory to disk, and only if it pays.

    Args:
        available_memory: Bytes.
        free_disk: Bytes.
        obstacle: Why a cache would be wrong, as `refusal` and `nondeterministic` say.

    Raises:
        ConfigError: memory or disk is asked for, and there is an obstacle.
    """

    def off(reason: str) -> CacheDecision:
        return CacheDecision("off", f"Outputs of the frozen blocks are not kept: {reason}.")

    if wanted == "off":
        return off("freeze.cache=off")
    if obstacle is not None and wanted != "auto":
        raise ConfigError(
            f"freeze.cache={wanted} cannot be: {obstacle}.\n"
            "  Change that, or write freeze.cache=off; auto keeps outputs only where that changes no result."
        )
    if obstacle is not None:
        return off(obstacle)
    if wanted == "auto" and estimated.passes <= 1:
        return off("each row is seen only once")
    if wanted == "auto" and estimated.saved < WORTHWHILE:
        return off(f"that would save {units.percent(estimated.saved)} of the computing, which is not worth it")
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
    return off(f"they would take {size}, and {room} may be filled. freeze.stored=bfloat16 halves float32")


def nondeterministic(
    model: PreTrainedModel, *, blocks: Sequence[nn.Module], depth: int, changing: str | None = None
) -> str | None:
    """Why the frozen prefix computes other outputs for a row each time; None where it does not.

    Args:
        model: In training mode, as it trains.
        changing: Name of something that changes the rows from epoch to epoch, such as "image.augment".
    """
    if changing is not None:
        return f"{changing} changes the rows in each epoch, so that none comes twice"
    above = {id(module) for block in blocks[depth:] for module in block.modules()}
    below = {id(module) for block in blocks[:depth] for module in block.modules()}
    for path, module in model.base_model.named_modules():
        if id(module) in above or not module.training:
            continue
        if isinstance(module, _DropoutNd):
            chance = module.p
        else:
            # A module around the blocks may hold their rate as an attribute, but uses only that of whole layers.
            names = ("drop", "jitter") if id(module) in below else ("layerdrop",)
            rates = {key: value for key, value in vars(module).items() if isinstance(value, float)}
            chance = max((rate for key, rate in rates.items() if any(name in key for name in names)), default=0.0)
        if chance:
            name = path or type(model.base_model).__name__
            return f"{name} is random in the frozen blocks, with a probability of {units.percent(chance)}"
    return None


def refusal(backbone: PreTrainedModel, *, blocks: Sequence[nn.Module], depth: int) -> str | None:
    """Why outputs of the first `depth` blocks cannot be kept, whatever the rows; None where they can.

    Call it when the blocks are frozen, for a bank inside `Bank.only`: it calls the backbone with a short row or a
    picture.
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
        classifier.widen_last_block(backbone)
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        return _refusal_of_trial(backbone, blocks, depth)
    finally:
        for module, training in modes:
            module.training = training


def _refusal_of_trial(backbone: PreTrainedModel, blocks: Sequence[nn.Module], depth: int) -> str | None:
    """`refusal`, from a trial with a few tokens or a picture."""
    family = type(backbone).__name__
    inputs = anatomy.trial_inputs(backbone)
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
    named = {name: each for name, each in backbone.named_parameters() if each.requires_grad}
    if named and hidden_BLD.requires_grad:
        grads = torch.autograd.grad(hidden_BLD.sum(), list(named.values()), allow_unused=True)
        for name, grad in zip(named, grads, strict=True):
            if grad is not None:
                return f"{name} trains, and the frozen blocks read it"
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


def _head_size(backbone: PreTrainedModel) -> int:
    """Parameters of the output head: a language model's projection, or all that a classifier has above its stack."""
    projection = backbone.get_output_embeddings()
    if projection is not None:
        return adapters.count(projection).total
    inside = {id(parameter) for parameter in backbone.get_submodule(anatomy.body(backbone)).parameters()}
    return sum(each.numel() for each in backbone.parameters() if id(each) not in inside)


_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class PrefixCache:
    """Outputs of the frozen blocks of a run's backbone, for all its trainings and predictions."""

    states: HiddenStateStore | None = None
    depth: int = 0
    trailing: int = 0
    batches: PrefixBatches | None = None
    """The batches in which its rows are computed."""

    def cached_prefix(self, backbone: PreTrainedModel, blocks: Sequence[nn.Module]) -> CachedPrefix:
        """The cached prefix of a backbone with these blocks."""
        assert self.states is not None and self.batches is not None
        return CachedPrefix(
            backbone,
            blocks=blocks,
            depth=self.depth,
            states=self.states,
            trailing=self.trailing,
            batch_of=self.batches.of,
        )


@contextmanager
def reading(kept: PrefixCache, backbone: PreTrainedModel) -> Iterator[None]:
    """Inside the block a backbone reads the cache; it was loaded anew, without adapters in its frozen blocks."""
    if kept.states is None:
        yield
        return
    blocks = [backbone.get_submodule(path) for path in stack(backbone)]
    cached = kept.cached_prefix(backbone, blocks)
    cached.install()
    try:
        yield
    finally:
        cached.remove()


class PrefixForward(NamedTuple):
    """What goes through a model whose prefix is frozen."""

    rows: Sequence[Examples]
    """All sets that the model reads, first those that it trains on."""
    passes: Callable[[], float | None]
    """Returns how many times training computes each row; None while that is unknown."""
    tokens: Callable[[], int]
    """Padded tokens that fit into a forward pass of training; the same in a resumed run."""


class PrefixCacheManager:
    """Caches the outputs of the frozen first blocks of one model that trains, where that pays.

    Args:
        compute: Precision of matrix products.
        folder: Place on disk for outputs that no other run can use.
        say: Shows the decision to the user.
        trial_context: Inside it, the model may be called with trial rows.
        kept: Cache of the same blocks in the same run; outputs are added to it, unless the boundary moves.
    """

    def __init__(
        self,
        freezer: Freezer,
        work: PrefixForward,
        config: TrainingSections,
        *,
        compute: torch.dtype,
        folder: Path,
        say: Callable[[str], None],
        trial_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        kept: PrefixCache | None = None,
    ) -> None:
        self._freezer, self._work, self._config = freezer, work, config
        self._dtype = compute if config.freeze.stored == "compute" else _DTYPES[config.freeze.stored]
        self._compute, self._folder, self._say, self._trial_context = compute, folder, say, trial_context
        self._kept = kept or PrefixCache()
        self.cached: CachedPrefix | None = None
        self._profile: DataProfile | None = None
        self._depth = 0

    def follow(self) -> None:
        """Update the boundary of the frozen blocks; outputs that were cached for another boundary are dropped."""
        passes = self._work.passes()
        # Processes that share weights hold a whole block only in a pass that all of them do.
        config = self._config
        changes = config.freeze.thaws or config.regularise.noisy or config.layer_drop.is_on or config.token_drop.is_on
        never = changes or zero_offload.cuts_weights(config.distributed)
        depth = 0 if never or passes is None else self._freezer.depth
        if depth == self._depth:
            return
        self.close()
        self._depth = depth
        if depth == 0 or passes is None:
            return
        choice = self._chosen(depth, passes)
        self._say(choice.sentence)
        if choice.where == "off":
            return
        assert self._profile is not None, "the choice was made by it"
        kept = self._kept
        if kept.states is None:
            kept.states = MemoryStore(self._dtype) if choice.where == "memory" else self._on_disk(depth)
            kept.depth, kept.trailing = depth, self._profile.trailing
        if kept.batches is None:
            # The set that is read last may be all rows of a run, of which some training sets are a part.
            read = reader(self._freezer.backbone, trailing=kept.trailing)
            kept.batches = PrefixBatches(self._work.rows[::-1], read, tokens=self._tokens)
        self.cached = kept.cached_prefix(self._freezer.backbone, self._freezer.blocks)
        self.cached.install()

    def close(self) -> None:
        """Stop reading the cache."""
        if self.cached is not None:
            self.cached.remove()
            if not self._config.freeze.fixed:
                self._kept.states = None
                shutil.rmtree(self._folder, ignore_errors=True)
        self.cached = None

    def _chosen(self, depth: int, passes: float) -> CacheDecision:
        freezer, config = self._freezer, self._config
        backbone, blocks = freezer.backbone, freezer.blocks
        with self._trial_context():
            obstacle = refusal(backbone, blocks=blocks, depth=depth)
        obstacle = (
            of_recipe(config)
            or obstacle
            or _drawing(config)
            or nondeterministic(backbone, blocks=blocks, depth=depth, changing=_changing(config))
        )
        if self._profile is None:
            self._profile = profile(self._work.rows, causal=backbone.can_generate())
        train = self._work.rows[0]
        estimated = estimate(
            backbone,
            self._profile,
            blocks=blocks,
            depth=depth,
            itemsize=self._dtype.itemsize,
            passes=max(1.0, passes * freezer.lasts()),
            everything=isinstance(config.adapter, Full),
            supervised=min(1.0, float(train.supervised.sum() / train.lengths.sum())),
        )
        return decide(
            estimated,
            config.freeze.cache,
            available_memory=psutil.virtual_memory().available,
            free_disk=shutil.disk_usage(self._folder.parent).free,
            obstacle=obstacle,
        )

    @property
    def _tokens(self) -> int:
        """Padded tokens of a batch that goes through the prefix: as many as fit in training, with gradients."""
        return CPU_TOKENS if self._freezer.backbone.device.type == "cpu" else max(CPU_TOKENS, self._work.tokens())

    def _on_disk(self, depth: int) -> HiddenStateStore:
        freezer, model = self._freezer, self._config.model
        about = {"compute": str(self._compute), "weights": model.weights, "tokens": str(self._tokens)}
        about |= run_directory.versions()
        name = fingerprint(freezer.backbone, blocks=freezer.blocks, depth=depth, dtype=self._dtype, about=about)
        # Other runs can use the outputs too, unless the prefix has trained in this run.
        folder = cache_folder() / "prefixes" if self._config.freeze.fixed else self._folder
        return DiskStore(folder, fingerprint=name, dtype=self._dtype)


def of_recipe(config: TrainingSections) -> str | None:
    """Why outputs of frozen blocks cannot be kept for rows of this recipe; None where they can."""
    return f"recipe={config.recipe} {config.task.uncached}" if config.task.uncached else None


def _drawing(config: TrainingSections) -> str | None:
    """Why adapters that freeze during a run keep sampling numbers; None where they do not."""
    draws = not config.freeze.fixed and config.adapter.facts.draws
    return f"adapter.method={config.adapter.method} draws numbers each time" if draws else None


def _changing(config: TrainingSections) -> str | None:
    """The setting that changes rows from epoch to epoch; None where there is none."""
    if config.reads_pictures and config.image.augment != AugmentConfig():
        return "image.augment"
    if config.reads_sound and config.audio.augment.is_on:
        return "audio.augment"
    if config.data.augment.is_on:
        return "data.augment"
    if config.data.length_warm_up.start is not None:
        return "data.length_warm_up"
    return None
