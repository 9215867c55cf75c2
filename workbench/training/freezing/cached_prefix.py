"""Cached prefix: the frozen first blocks of a backbone compute each row once, and later calls read their outputs.

Legend: B rows, L padded length, D hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.data.batching import Indices, padded
from workbench.errors import BackboneError
from workbench.models import classifier
from workbench.training.capacity import smaller_until_fits
from workbench.training.freezing.hidden_state_store import HiddenStateStore

_TOKENS, _MASK, _TYPES, _PIXELS = "input_ids", "attention_mask", "token_type_ids", "pixel_values"
"""Arguments of a stack of blocks that define its rows."""
_KNOWN = {_TOKENS, _MASK, _TYPES, _PIXELS, "return_dict", anatomy.INTERPOLATE}
_LENGTHS, _SHARED = "row_lengths", "prefix_tokens"
_PACKED = {_LENGTHS, _SHARED, "row_starts", "row_owners", "position_ids", _MASK}
"""Arguments that say how packed rows lie; see `attention_backend.attend`."""


class UnpaddedRows(NamedTuple):
    """The rows of a batch without padding."""

    keys: list[bytes]
    """Digest of each row's inputs, 16 bytes."""
    tokens: list[Any]
    """Ids of each row's tokens, or its pixels (3, H, W)."""
    types: list[Indices] | None
    """Type of each token, where the model reads token types."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [len(row) for row in self.tokens]


class CachedPrefix:
    """Replaces the first `depth` blocks by their stored outputs; computes only the rows that `states` lacks.

    Between `install` and `remove`, calls of the backbone with whole rows of tokens, padded or packed, or with pictures,
    read states.
    Other calls (generation with a cache, embeddings, given positions, other adapters in the frozen blocks than at
    first) compute as usual.

    Args:
        backbone: Without an adapter around it; adapters may be in it.
        blocks: Its whole stack, in order.
        depth: Number of frozen blocks, 1 or more; `prefix_cache.refusal` says where that cannot work.
        trailing: Most zeros at the end of a real row without an attention mask. Zeros also pad such rows, so as many of
            them are stored as if they were real.
        batch_of: Returns the rows with which a row, given by its key, is computed; None: with the missing rows of the
            call.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        *,
        blocks: Sequence[nn.Module],
        depth: int,
        states: HiddenStateStore,
        trailing: int = 0,
        batch_of: Callable[[bytes], UnpaddedRows | None] = lambda _: None,
    ) -> None:
        if depth == len(blocks):
            classifier.widen_last_block(backbone)
        self.states = states
        self.computed = 0
        """Number of rows that were computed because they were not stored."""
        self.read = 0
        """Number of rows in all calls that read states."""
        self.passed = 0
        """Number of calls that computed as usual."""
        self._stack = stack_of(backbone, blocks[0])
        self._prefix = list(blocks[:depth])
        self._tuners = [each for block in self._prefix for each in block.modules() if isinstance(each, BaseTunerLayer)]
        self._switches = self._adapters()
        self._read = reader(backbone, trailing=trailing)
        self._causal = backbone.can_generate()
        self._batch_of = batch_of
        self._names = list(inspect.signature(self._stack.forward).parameters)
        self._more_outputs: dict[int, tuple[None, ...] | None] = {}
        """Further outputs of each block, such as attention weights, by its number: a None for each, as tested by
        `prefix_cache.refusal`; or None where a block returns no tuple."""
        self._dtype = states.dtype
        self._given_BLD: Tensor | None = None
        """States for the running call."""
        self._catching = False
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """From now on, calls read states; blocks above the frozen ones have to be compiled before."""
        assert not self._undo, "it is installed"
        hooks = [
            self._stack.register_forward_pre_hook(self._before, with_kwargs=True),
            self._stack.register_forward_hook(self._after, always_call=True),
        ]
        self._undo = [hook.remove for hook in hooks]
        for number, block in enumerate(self._prefix):
            self._undo.append(_replaced(block, "forward", self._forward(number, block.forward)))
            self._undo.append(_replaced(block, "_compiled_call_impl", None))

    def remove(self) -> None:
        """Restore the backbone."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _before(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        called = dict(zip(self._names, arguments, strict=False)) | named
        call = called if called.get(_LENGTHS) is None else self._apart(called)
        rows = None if call is None else self._rows(call)
        if call is None or rows is None:
            self.passed += 1
            return
        self._fetch(call, rows)
        if len(self._more_outputs) < len(self._prefix):
            self._compute(call, rows, [0])  # which shows the form of the blocks' outputs
        self.read += len(rows.keys)
        read = call.get(_TOKENS, call.get(_PIXELS))
        assert isinstance(read, Tensor), "its rows are known"
        length = self.states.length(rows.keys[0]) if call.get(_PIXELS) is not None else read.shape[1]
        given_BLD = self.states.get(rows.keys, length)
        given_BLD = given_BLD if call is called else _laid(given_BLD, called)
        self._given_BLD = given_BLD.to(device=read.device, dtype=self._dtype)

    def _after(self, *_: object) -> None:
        self._given_BLD = None

    def _apart(self, call: Mapping[str, Any]) -> dict[str, Any] | None:
        """A call with packed rows as one with the same rows padded; None where other processes hold a part of them."""
        tokens_1T, shared, rests_B = call[_TOKENS], _shared(call), call[_LENGTHS].tolist()
        if tokens_1T.shape[1] != shared + sum(rests_B):
            return None
        first, *rests = tokens_1T[0].split([shared, *rests_B])
        ids_BL = pad_sequence([torch.cat([first, rest]) for rest in rests], batch_first=True)
        lengths_B = (call[_LENGTHS] + shared).to(ids_BL.device)
        masked = (
            {} if self._causal else {_MASK: torch.arange(ids_BL.shape[1], device=ids_BL.device) < lengths_B[:, None]}
        )
        return {name: each for name, each in call.items() if name not in _PACKED} | {_TOKENS: ids_BL} | masked

    def _rows(self, call: Mapping[str, Any]) -> UnpaddedRows | None:
        """The rows of a call, if the outputs of the prefix depend on nothing else."""
        if any(not (value is None or value is False) for name, value in call.items() if name not in _KNOWN):
            return None
        if self._adapters() != self._switches:
            return None
        return self._read(call)

    def _fetch(self, call: Mapping[str, Any], rows: UnpaddedRows) -> None:
        for key in [rows.keys[place] for place in self.states.missing(rows.keys)]:
            if self.states.missing([key]) and (batch := self._batch_of(key)) is not None:
                self._keep(call, batch, range(len(batch.keys)))
        if unknown := self.states.missing(rows.keys):
            self._keep(call, rows, unknown)

    def _keep(self, call: Mapping[str, Any], rows: UnpaddedRows, places: Sequence[int]) -> None:
        """Compute some rows together, and store those that are missing."""
        row_states = self._compute(call, rows, places)
        keys = [rows.keys[place] for place in places]
        unknown = self.states.missing(keys)
        self.states.put([keys[number] for number in unknown], [row_states[number] for number in unknown])
        self.computed += len(unknown)

    def _compute(self, call: Mapping[str, Any], rows: UnpaddedRows, places: Sequence[int]) -> list[Tensor]:
        """States (l, D) of some rows of a call; in smaller batches where memory runs out."""
        row_states: list[Tensor] = []

        def remaining(count: int) -> list[Tensor]:
            while len(row_states) < len(places):
                row_states.extend(self._compute_together(call, rows, places[len(row_states) : len(row_states) + count]))
            return row_states

        return smaller_until_fits(remaining, len(places), longest=1, retry=lambda _: None)

    @torch.no_grad()
    def _compute_together(self, call: Mapping[str, Any], rows: UnpaddedRows, places: Sequence[int]) -> list[Tensor]:
        """States (l, D) of some rows of a call, in one forward pass."""
        tokens = [rows.tokens[place] for place in places]
        pictures = call.get(_PIXELS) is not None
        arrays = {_PIXELS: np.stack(tokens)} if pictures else {_TOKENS: padded(tokens)}
        if call.get(_MASK) is not None:
            arrays[_MASK] = padded([np.ones_like(row) for row in tokens])
        if rows.types is not None:
            arrays[_TYPES] = padded([rows.types[place] for place in places])
        inputs = {name: torch.from_numpy(array).to(call[name]) for name, array in arrays.items()}
        self._catching = True
        try:
            self._stack.forward(**{**call, **inputs})
            raise AssertionError("the stack ran past its frozen blocks")
        except _Reached as reached:
            found_BLD = reached.hidden_BLD.cpu()
        finally:
            self._catching = False
        if pictures:
            return list(found_BLD)
        if found_BLD.shape[:2] != arrays[_TOKENS].shape:
            raise BackboneError(
                f"{type(self._stack).__name__} pads long rows by itself, so that outputs of its blocks cannot be kept. "
                "Write freeze.cache=off."
            )
        return [found_LD[: len(row)] for found_LD, row in zip(found_BLD, tokens, strict=True)]

    def _forward(self, number: int, original: Callable[..., Any]) -> Callable[..., Any]:
        """Forward pass that replaces block `number`'s own."""
        last = number == len(self._prefix) - 1

        def forward(*arguments: Any, **named: Any) -> Any:
            if self._given_BLD is not None:
                hidden_BLD = arguments[0] if arguments else named["hidden_states"]
                if last:  # the blocks above compute as usual; free the states
                    hidden_BLD, self._given_BLD = self._given_BLD, None
                more = self._more_outputs[number]
                return hidden_BLD if more is None else (hidden_BLD, *more)
            output = original(*arguments, **named)
            if self._catching:
                hidden_BLD, self._more_outputs[number] = parts(output)
                if last:
                    self._dtype = hidden_BLD.dtype
                    raise _Reached(hidden_BLD)
            return output

        return forward

    def _adapters(self) -> list[tuple[Any, ...]]:
        """The adapters that are active in the frozen blocks."""
        return [(each.disable_adapters, *each.active_adapters, *each.merged_adapters) for each in self._tuners]


class _Reached(Exception):
    """Ends a pass after the frozen blocks: hooks and blocks above do not run."""

    def __init__(self, hidden_BLD: Tensor) -> None:
        super().__init__()
        self.hidden_BLD = hidden_BLD


def reader(backbone: PreTrainedModel, *, trailing: int) -> Callable[[Mapping[str, Any]], UnpaddedRows | None]:
    """`rows_of` for the calls of a backbone.

    Args:
        trailing: See `CachedPrefix`.
    """
    longest = getattr(backbone.config.get_text_config(), "max_position_embeddings", None) or 0
    # Keys of pictures have the precision in which the backbone computes: a hook may have rounded them to it already.
    compute = anatomy.picture_stem(backbone).weight.dtype if anatomy.reads_pictures(backbone) else torch.float32
    return partial(rows_of, causal=backbone.can_generate(), trailing=trailing, longest=longest, compute=compute)


def rows_of(
    inputs: Mapping[str, Any],
    *,
    causal: bool,
    trailing: int = 0,
    longest: int = 0,
    compute: torch.dtype = torch.float32,
) -> UnpaddedRows | None:
    """The rows of a model's inputs; None where they are not padded on the right, so that they cannot be separated.

    Pictures have no padding. The attention mask shows padding. Without one, zeros at the end pad the rows of a causal
    model, of which `trailing` are kept, in rows of at most `longest` tokens; any other model reads everything.

    Args:
        compute: Precision in which a backbone reads pictures: rows that are equal after rounding are the same row.
    """
    tokens, mask, types, pixels = (inputs.get(name) for name in (_TOKENS, _MASK, _TYPES, _PIXELS))
    if pixels is not None:
        rows_3HW = list(pixels.detach().cpu().to(compute).float().numpy())
        return UnpaddedRows([blake2b(row.tobytes(), digest_size=16).digest() for row in rows_3HW], rows_3HW, None)
    if tokens is None or tokens.ndim != 2:
        return None
    if any(each is not None and each.shape != tokens.shape for each in (mask, types)):
        return None
    tokens_BL = tokens.cpu().numpy()
    lengths_B = np.full(len(tokens_BL), tokens_BL.shape[1])
    if mask is not None:
        mask_BL = mask.cpu().numpy() != 0
        lengths_B = mask_BL.sum(-1)
        if not np.array_equal(mask_BL, np.arange(mask_BL.shape[1]) < lengths_B[:, None]):
            return None
    elif causal:
        real_BL = tokens_BL != 0
        real_BL[:, 0] = True  # a row has a token
        lengths_B = lengths_B - real_BL[:, ::-1].argmax(-1)
        lengths_B = np.minimum(lengths_B + trailing, max(tokens_BL.shape[1], longest))
    if not lengths_B.all():
        return None
    kept = _cut(tokens_BL, lengths_B)
    if types is None:
        return UnpaddedRows([blake2b(row.tobytes(), digest_size=16).digest() for row in kept], kept, None)
    kinds = _cut(types.cpu().numpy(), lengths_B)
    # Token ids have eight bytes each, so that no row without types looks like one with them.
    both = (row.tobytes() + b"types" + kind.tobytes() for row, kind in zip(kept, kinds, strict=True))
    return UnpaddedRows([blake2b(each, digest_size=16).digest() for each in both], kept, kinds)


def stack_of(backbone: PreTrainedModel, block: nn.Module) -> nn.Module:
    """The innermost module around a block that reads tokens or pixels; every call of the backbone goes through it. A
    language model beside towers gets embeddings from the module around it."""
    inside = tuple(anatomy.language_model(backbone).split())
    outside: list[nn.Module] = [each for name, each in backbone.named_modules() if not name.startswith(inside)]
    around = [each for each in outside if any(part is block for part in each.modules())]
    read = {_TOKENS, _PIXELS}
    return next(each for each in reversed(around) if read & set(inspect.signature(each.forward).parameters))


def parts(output: Any) -> tuple[Tensor, tuple[None, ...] | None]:
    """Hidden states in a block's output, and None for each further output; None instead where it is no tuple."""
    return (output[0], (None,) * (len(output) - 1)) if isinstance(output, (tuple, list)) else (output, None)


def _shared(call: Mapping[str, Any]) -> int:
    """Tokens at the beginning of a packed sequence that all its rows share."""
    return 0 if call.get(_SHARED) is None else int(call[_SHARED])


def _laid(states_BLD: Tensor, call: Mapping[str, Any]) -> Tensor:
    """The states of padded rows as they lie in a packed call (1, T, D)."""
    shared, lengths_B = _shared(call), call[_LENGTHS] + _shared(call)
    place_L = torch.arange(states_BLD.shape[1])
    rests_TD = states_BLD[(place_L >= shared) & (place_L < lengths_B[:, None])]
    return torch.cat([states_BLD[0, :shared], rests_TD])[None]


def _cut(array_BL: Indices, lengths_B: Indices) -> list[Indices]:
    """Each row in its length of `lengths_B`, filled up with zeros where it was shorter."""
    wide_BL = np.zeros((len(array_BL), max(array_BL.shape[1], int(lengths_B.max()))), array_BL.dtype)
    wide_BL[:, : array_BL.shape[1]] = array_BL
    return [row[:length] for row, length in zip(wide_BL, lengths_B, strict=True)]


def _replaced(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module; returns a function that restores it."""
    own = module.__dict__
    before = own.get(name)
    was_own = name in own
    own[name] = value

    def undo() -> None:
        if was_own:
            own[name] = before
        else:
            del own[name]

    return undo
