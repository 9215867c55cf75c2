"""Layer dropping and token dropping: blocks that whole steps skip, and tokens that the middle blocks skip.

**Layer dropping** (progressive layer dropping, Zhang & He 2020, arXiv:2010.13369, algorithm 1; LayerDrop, Fan et al.
2020, arXiv:1909.11556). A skipped block is not computed: it returns its input, for every row of the step. A block that
computes adds its part times 1 / (1 - chance), so that in expectation it adds what it adds in evaluation, which uses all
blocks. With a chance of 0 nothing is scaled. A skipped block has a gradient of zero, on one device and on several.

**Token dropping** (random-LTD, Yao et al. 2022, arXiv:2211.11586, section 3; for patches PatchDropout, Liu et al. 2022,
arXiv:2208.07220). A middle block computes ceil(share * n) of a row's n tokens, and returns the others as they are.
Tokens that compute keep their order, their rotary positions and their entries of the attention mask. Each block chooses
anew, by a hash of seed, step, row, block and the token's place, so that padding and micro-batches change nothing. The
first and the last blocks compute all tokens, so that every position has logits. With a share of 1 nothing changes.

Legend: B rows, L padded tokens, K tokens that compute, Q queries of a mask (1 or L), H heads of a mask, D width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.adapters.row_dropout import row_hash, row_keys
from workbench.config import TrainingSections
from workbench.config.sections.layer_and_token_drop_config import LayerDropConfig, TokenDropConfig
from workbench.data.batching import Indices
from workbench.errors import BackboneError
from workbench.models import forward_hooks
from workbench.models.forward_hooks import hidden_of
from workbench.training.freezing.layer_map import stack


class BlockCall(NamedTuple):
    """Inputs and outputs of a block."""

    before: Tensor
    """Hidden states that go in."""
    after: Tensor
    """Hidden states that come out."""
    more: tuple[Any, ...] | None
    """The rest of the output; None where a block returns no tuple."""
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def adds(self) -> bool:
        """Whether the block only returns hidden states of its input's shape, so that its input can replace them."""
        return self.before.shape == self.after.shape and not any(isinstance(each, Tensor) for each in self.more or ())


def like(output: Any, hidden: Tensor) -> Any:
    """The output of a block with these hidden states in their place."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def skipped(before: Tensor, more: tuple[Any, ...] | None) -> Any:
    """The output of a block that is skipped."""
    return before if more is None else (before, *more)


def survey(backbone: PreTrainedModel, blocks: Sequence[nn.Module]) -> list[BlockCall]:
    """The call of each block in one pass, in evaluation mode, over a short row or a picture."""
    calls: dict[int, BlockCall] = {}

    def seen(number: int, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        after, more = (output[0], tuple(output[1:])) if isinstance(output, tuple) else (output, None)
        calls[number] = BlockCall(hidden_of(arguments, named), after, more, arguments, named)

    training = backbone.training
    backbone.eval()
    with ExitStack() as stack, torch.no_grad():
        stack.callback(backbone.train, training)
        for number, block in enumerate(blocks):
            stack.callback(block.register_forward_hook(partial(seen, number), with_kwargs=True).remove)
        backbone(**anatomy.trial_inputs(backbone))
    return [calls[number] for number in range(len(blocks))]


class LayerDrop:
    """Skips blocks of a backbone during steps, as `layer_drop` says.

    Args:
        seed: Of the run.
    """

    def __init__(
        self, backbone: PreTrainedModel, blocks: Sequence[nn.Module], config: LayerDropConfig, *, seed: int
    ) -> None:
        self._backbone, self._blocks, self._config, self._seed = backbone, blocks, config, seed
        self._more: list[tuple[Any, ...] | None] = []
        self._able: list[bool] = []
        """Whether each block adds to its input, so that it can be skipped."""
        self._factors: list[float] | None = None
        """Factor of each block's part in this step, 0 for a skipped one; None outside of steps."""

    def install(self) -> None:
        """Reroute the blocks' calls through this; nothing where it is off.

        Raises:
            BackboneError: No block can be skipped.
        """
        if not self._config.is_on:
            return
        calls = surveyed(self._backbone, self._blocks)
        self._more, self._able = [each.more for each in calls], [each.adds for each in calls]
        for number, block in enumerate(self._blocks):
            forward_hooks.reroute(block, partial(self._forward, number, block.forward))

    @contextmanager
    def during(self, step: int, share: float, masters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Inside, the blocks that step `step` (from 0) skips are not computed; afterwards their gradients are zero.

        Args:
            share: Share of the run that is done.
            masters: The values that train.
        """
        if not self._config.is_on:
            yield
            return
        drawn = self._config.left_out(step, share, blocks=len(self._blocks), seed=self._seed)
        chances = self._config.chances(share, blocks=len(self._blocks))
        self._factors = [0.0 if out else 1 / (1 - each) for out, each in zip(drawn, chances, strict=True)]
        try:
            yield
        finally:
            self._factors = None
        for master in masters:
            if master.requires_grad and master.grad is None:
                master.grad = torch.zeros_like(master)

    def _forward(self, number: int, own: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        factor = self._factors[number] if self._factors is not None and self._able[number] else 1.0
        if factor == 1:
            return own(*arguments, **named)
        before = hidden_of(arguments, named)
        if not factor:
            return skipped(before, self._more[number])
        output = own(*arguments, **named)
        after = output[0] if isinstance(output, tuple) else output
        return like(output, before + (after - before) * factor)


def surveyed(backbone: PreTrainedModel, blocks: Sequence[nn.Module], *, key: str = "layer_drop") -> list[BlockCall]:
    """The call of each block; the backbone is called once, and one for pictures may be without weights.

    Args:
        key: The setting that skips blocks.

    Raises:
        BackboneError: No block can be skipped.
    """
    calls = survey(backbone, blocks)
    if not any(each.adds for each in calls):
        raise BackboneError(
            f"{type(backbone).__name__}: no block gives hidden states alone, of the shape that it gets, so that "
            f"{key} could leave none out. Leave {key} out."
        )
    return calls


def always_computed(config: TrainingSections, backbone: PreTrainedModel) -> Iterator[str]:
    """Yield a sentence on blocks for pictures that can never be skipped, where a setting skips others.

    Raises:
        BackboneError: No block can be skipped.
    """
    on = {"layer_drop": config.layer_drop.is_on, "regularise.stochastic_depth": config.regularise.stochastic_depth > 0}
    keys = [key for key, is_on in on.items() if is_on] if config.media else []
    for key in keys:
        calls = surveyed(backbone, [backbone.get_submodule(path) for path in stack(backbone)], key=key)
        if whole := sum(not each.adds for each in calls):
            yield (
                f"{key}: {whole} of {len(calls)} blocks change the resolution or the width of what they read, so "
                "that nothing could stand for what they give: every step computes them for all rows."
            )


_PLACE = 1 << 20
"""Place of the first block in a hash; other noise of a step has other places."""
_MASK, _POSITIONS, _ROTATIONS = "attention_mask", "position_ids", "position_embeddings"
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_SETTINGS = ("use_cache", "output_attentions", "output_router_logits", *_CACHES)
"""Arguments of a block that do not depend on tokens; caches are empty in training."""
_KERNELS = ("flash_attention_2", "flex_attention")
"""Attention backends that build their mask by counting tokens."""


class TokenDrop:
    """Lets the middle blocks of a backbone skip tokens during steps, as `token_drop` says."""

    def __init__(self, backbone: PreTrainedModel, blocks: Sequence[nn.Module], config: TokenDropConfig) -> None:
        self._backbone, self._config = backbone, config
        self._blocks = blocks
        self._pictures = anatomy.reads_pictures(backbone)
        self._share = 1.0
        self._lengths_B: Indices | None = None

    def install(self) -> None:
        """Reroute the middle blocks' calls through this; nothing where it is off. Raises as `middle` does."""
        for number, block in enumerate(middle(self._backbone, self._blocks, self._config)):
            forward_hooks.reroute(block, partial(self._forward, number, block, block.forward))

    @contextmanager
    def during(self, share: float) -> Iterator[None]:
        """Inside, tokens are skipped as they are after a share of the run."""
        self._share = self._config.share(share)
        try:
            yield
        finally:
            self._share = 1.0

    @contextmanager
    def of(self, lengths_B: Indices | None) -> Iterator[None]:
        """Inside, rows of so many tokens compute; None for pictures, whose rows have as many as the block reads."""
        self._lengths_B = lengths_B
        try:
            yield
        finally:
            self._lengths_B = None

    def _forward(self, number: int, block: nn.Module, own: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The forward pass of a block over some of the tokens."""
        keys_B = row_keys()
        if self._share == 1 or keys_B is None:
            return own(*arguments, **named)
        bound = _bound(block, arguments, named)
        before_BLD: Tensor = bound[forward_hooks.HIDDEN]
        rows, length, width = before_BLD.shape
        assert rows == len(keys_B) and self._lengths_B is not None, "rows are not laid out one by one"
        lengths_B = np.full(rows, length) if self._pictures else np.resize(self._lengths_B, rows)
        hash_BL = row_hash(keys_B, _PLACE + number, tokens=length, units=1)[..., 0]
        index_BK = chosen(hash_BL, lengths_B, share=self._share)
        output = own(**{name: _thinned(name, value, index_BK) for name, value in bound.items()})
        after_BKD = output[0] if isinstance(output, tuple) else output
        places_BKD = index_BK[..., None].expand(-1, -1, width)
        return like(output, before_BLD.scatter(1, places_BKD, after_BKD.to(before_BLD.dtype)))


def middle(backbone: PreTrainedModel, blocks: Sequence[nn.Module], config: TokenDropConfig) -> Sequence[nn.Module]:
    """The blocks that skip tokens; none where it is off. The backbone is called once, as by `survey`.

    Raises:
        BackboneError: There is none, or one reads an argument whose parts cannot be assigned to tokens.
    """
    if not config.is_on:
        return []
    if reason := config.refusal(len(blocks)):
        raise BackboneError(reason)
    inner_blocks, name = blocks[config.outer : len(blocks) - config.outer], type(backbone).__name__
    if (kernel := getattr(backbone.config, "_attn_implementation", "")) in _KERNELS:
        raise BackboneError(f"token_drop needs sdpa, and {kernel} counts tokens. Write model.attention=sdpa.")
    for block, call in zip(inner_blocks, survey(backbone, inner_blocks), strict=True):
        bound = _bound(block, call.arguments, call.named)
        unknown = [
            name for name in bound if name not in (forward_hooks.HIDDEN, _MASK, _POSITIONS, _ROTATIONS, *_SETTINGS)
        ]
        in_rows = call.adds and call.before.ndim == 3
        if unknown or not in_rows:
            why = f"reads `{unknown[0]}`" if in_rows else "has no tokens in rows"
            raise BackboneError(
                f"{name}: its {type(block).__name__} {why}, so that token_drop cannot leave tokens out. "
                "Leave token_drop out, or take layer_drop.rate=0.5, which leaves out blocks."
            )
    return inner_blocks


def chosen(hash_BL: Tensor, lengths_B: Indices, *, share: float) -> Tensor:
    """Places (B, K) of the tokens that compute, in their order; shorter rows are filled up with padding.

    Args:
        hash_BL: A uniform random number of each token, which decides.
        lengths_B: Tokens of each row; at least one has L.
    """
    device, length = hash_BL.device, hash_BL.shape[1]
    kept_B = [max(1, math.ceil(share * int(each) - 1e-9)) for each in lengths_B]
    count_B1 = torch.tensor(kept_B, device=device)[:, None]
    length_B1 = torch.as_tensor(lengths_B, device=device)[:, None]
    place_L = torch.arange(length, device=device)
    order_BL = (hash_BL.long() << 20) + place_L  # ties go to the earlier token
    order_BL = torch.where(place_L < length_B1, order_BL, 1 << 60).index_fill(1, place_L[:1], -(1 << 60))
    rank_BL = order_BL.argsort(1).argsort(1)
    # In shorter rows there is padding enough: ceil(s L) - ceil(s n) <= L - n.
    later_BL = torch.where(place_L < length_B1, 2 * length, length)
    return torch.where(rank_BL < count_B1, place_L, place_L + later_BL).argsort(1)[:, : max(kept_B)]


def _bound(block: nn.Module, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a block by name, without those that are None."""
    names = list(inspect.signature(type(block).forward).parameters)[1:]
    bound = {**dict(zip(names, arguments, strict=False)), **named}
    return {name: each for name, each in bound.items() if each is not None}


def _thinned(name: str, value: Any, index_BK: Tensor) -> Any:
    """An argument of a block, restricted to the tokens that compute."""
    rows, count = index_BK.shape
    if name == forward_hooks.HIDDEN:
        return value.gather(1, index_BK[..., None].expand(-1, -1, value.shape[-1]))
    if name == _POSITIONS:
        return value.expand(rows, -1).gather(1, index_BK)
    if name == _ROTATIONS:
        return tuple(
            each.expand(rows, -1, -1).gather(1, index_BK[..., None].expand(-1, -1, each.shape[-1])) for each in value
        )
    if name == _MASK:
        mask_BHQL = value.expand(rows, -1, -1, -1)
        heads, queries = mask_BHQL.shape[1:3]
        if queries > 1:
            picked = index_BK[:, None, :, None].expand(-1, heads, -1, mask_BHQL.shape[-1])
            mask_BHQL = mask_BHQL.gather(2, picked)
        return mask_BHQL.gather(3, index_BK[:, None, None].expand(-1, heads, mask_BHQL.shape[2], count))
    assert name in _SETTINGS, f"a block reads `{name}`"
    assert name not in _CACHES or not value.get_seq_length(), "a training step keeps no cache"
    return value
