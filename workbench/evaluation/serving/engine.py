"""A causal model that continues many rows at once, each as if it were alone, through the same or different adapters.

A matrix product may sum in another order when it has another number of rows. So the tokens of each adapter are padded
to a size at which, as the engine has found, every row comes out bit for bit as in the largest size.

Legend: T tokens of a pass, W tokens after which logits are computed, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.adapters.banks.bank import Bank
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.multi_adapter import BARE
from workbench.adapters.prompts import virtual_tokens
from workbench.errors import BackboneError
from workbench.evaluation.comparison import Floats
from workbench.evaluation.serving import prompt_router
from workbench.models.attention_backend import RowCache, RowPart, room
from workbench.models.output_heads import Head
from workbench.models.picture_processor import PictureProcessor
from workbench.models.shared_model import SharedModel

OWN = "own"  # member name of a model's only adapter, or of a fully trained model
Sizes = tuple[int, ...]  # numbers of tokens, ascending
_PADDING = 0  # a token that is in every vocabulary
SIZES: Sizes = (1, 2, 4, 8, 16, 32, 64, 128)  # candidate sizes, in tokens, of a pass and of one adapter's part of it
CHUNK = 64  # tokens of a prompt that are read at once, so that chunk boundaries depend on the prompt alone
_CHECKED = 24  # tokens on which the engine is compared with the model itself


class PictureToken(int):
    """A token of a picture in a prompt: below 0, and equal where picture and place are."""

    embedding_D: Tensor
    """What the tower says there, in place of a token's embedding."""

    @classmethod
    def at(cls, place: int, key: str, embedding_D: Tensor) -> PictureToken:
        """The token at a place of the pictures that a hexadecimal `key` names."""
        token = cls(-1 - place - (int(key[:10], 16) << 16))
        token.embedding_D = embedding_D
        return token


def _shown(ids: Sequence[int], places: Sequence[int], key: str, embedding_ND: Tensor) -> list[int]:
    tokens = list(ids)
    for number, place in enumerate(places):
        tokens[place] = PictureToken.at(number, key, embedding_ND[number])
    return tokens


class AdapterRoutes(Protocol):
    """A model whose rows go through adapters."""

    model: nn.Module
    members: tuple[str, ...]  # names of the adapters that rows may go through; BARE means the backbone alone
    shapes: tuple[str, ...]  # one member for each distinct set of matrix sizes
    mixes: bool  # whether one pass may have rows of several members

    def rows(self, rows: Sequence[MemberRows]) -> AbstractContextManager[None]:
        """Inside, the rows of a batch, one token each, go through these members in this order."""

    def stock(self, member: str) -> AbstractContextManager[None]:
        """Inside, whole texts go through one member, as PEFT computes it."""


class BankRoutes:
    """A bank of LoRA adapters over one backbone, all in one pass.

    Args:
        served: Those of its members that rows may go through; None: all.
    """

    mixes = True

    def __init__(self, bank: Bank, served: Sequence[str] | None = None) -> None:
        self.model: nn.Module = bank.model
        self._bank, self._served = bank, served
        self.name_members()

    def name_members(self) -> None:
        """Read which members the bank has."""
        served = tuple(self._bank.members if self._served is None else self._served)
        self.members: tuple[str, ...] = (*served, BARE)
        own: dict[str, list[torch.Size]] = {name: [] for name in served}
        for path, each in self._bank.model.named_parameters():
            for name in own.keys() & path.split("."):
                own[name].append(each.shape)
        sizes: dict[tuple[torch.Size, ...], str] = {}
        for name, shapes in own.items():
            sizes.setdefault(tuple(shapes), name)
        self.shapes: tuple[str, ...] = tuple(sizes.values())

    def join(self, folder: Path) -> str:
        """Add the adapter in `folder` as a member; raises as `bank.load`."""
        member = self._bank.join(folder)
        self.name_members()
        return member

    def leave(self, member: str) -> None:
        """Remove a member."""
        self._bank.leave(member)
        self.name_members()

    @contextmanager
    def rows(self, rows: Sequence[MemberRows]) -> Iterator[None]:
        with torch.inference_mode(), self._bank.route(rows, length=1):
            yield

    @contextmanager
    def stock(self, member: str) -> Iterator[None]:
        with torch.inference_mode(), self._bank.only(member):
            yield


class SingleRoutes:
    """One adapter of any kind, or none; rows with and without it go into separate passes.

    Args:
        model: In evaluation mode.
        bare: Whether its backbone is served as well, without the adapter.
    """

    mixes = False

    def __init__(self, model: nn.Module, *, bare: bool) -> None:
        self.model = model
        self.members: tuple[str, ...] = (OWN, BARE) if bare else (OWN,)
        self.shapes: tuple[str, ...] = self.members
        self._shared = SharedModel(model)

    @contextmanager
    def rows(self, rows: Sequence[MemberRows]) -> Iterator[None]:
        with self.stock(rows[0].member):
            yield

    @contextmanager
    def stock(self, member: str) -> Iterator[None]:
        with self._shared.inference() if member == OWN else self._shared.without_adapters():
            yield


@dataclass(frozen=True)
class Chunk:
    """Tokens that continue one row."""

    cache: RowCache
    ids: Sequence[int]
    member: str  # the adapter that they go through
    ends: bool = True  # whether the logits after them are needed
    scored: bool = False  # whether the logits after each of them are needed

    @property
    def wanted(self) -> int:
        """Number of its last tokens after which logits are computed."""
        return len(self.ids) if self.scored else int(self.ends)


@dataclass(frozen=True)
class Pass:
    """One forward pass."""

    ids: list[int]
    positions: list[int]
    rows: list[MemberRows]  # members that the tokens belong to, in order, padding included
    parts: list[RowPart]
    wanted: list[int]  # places of the tokens after which logits are computed
    chunks: list[Chunk]  # the chunks of these tokens, in order


Sharing = Literal["all", "member", "none"]  # chunks that may share a pass: all of them, those of one member, or none


def laid_out(chunks: Sequence[Chunk], sizes: Sizes, *, sharing: Sharing) -> Iterator[Pass]:
    """All chunks in as few passes as `sizes` and `sharing` allow."""
    groups: list[list[Chunk]] = []
    for group in [[each] for each in chunks] if sharing == "none" else _groups(chunks, sizes[-1]):
        if groups and (sharing != "all" or sum(_size(each, sizes) for each in (*groups, group)) > sizes[-1]):
            yield _pass(groups, sizes)
            groups = []
        groups.append(group)
    if groups:
        yield _pass(groups, sizes)


def smallest_size(tokens: int, sizes: Sizes) -> int:
    """The smallest of `sizes` that can hold so many tokens."""
    return next(size for size in sizes if size >= tokens)


def _groups(chunks: Sequence[Chunk], most: int) -> Iterator[list[Chunk]]:
    """Groups of chunks of one member with at most `most` tokens."""
    for _, members in groupby(sorted(chunks, key=lambda chunk: chunk.member), key=lambda chunk: chunk.member):
        group: list[Chunk] = []
        for chunk in members:
            if group and sum(len(each.ids) for each in (*group, chunk)) > most:
                yield group
                group = []
            group.append(chunk)
        yield group


def _size(group: Sequence[Chunk], sizes: Sizes) -> int:
    return smallest_size(sum(len(chunk.ids) for chunk in group), sizes)


def _pass(groups: Sequence[Sequence[Chunk]], sizes: Sizes) -> Pass:
    laid = Pass([], [], [], [], [], [])
    for group in groups:
        start = len(laid.ids)
        for chunk in group:
            first = len(laid.ids)
            laid.ids.extend(chunk.ids)
            laid.positions.extend(range(chunk.cache.length, chunk.cache.length + len(chunk.ids)))
            laid.parts.append(RowPart(chunk.cache, slice(first, len(laid.ids))))
            if chunk.wanted:
                laid.wanted.extend(range(len(laid.ids) - chunk.wanted, len(laid.ids)))
                laid.chunks.append(chunk)
        _pad(laid, start, _size(group, sizes), group[0].member)
    if rest := smallest_size(len(laid.ids), sizes) - len(laid.ids):
        _pad(laid, len(laid.ids), rest, BARE)
    return laid


def _pad(laid: Pass, start: int, size: int, member: str) -> None:
    """Pad one member's tokens from `start` on to `size` tokens."""
    more = size - (len(laid.ids) - start)
    laid.ids.extend([_PADDING] * more)
    laid.positions.extend([0] * more)
    laid.rows.append(MemberRows(member, size))


class Engine:
    """Computes the next token's logits of rows that go through different adapters. Raises BackboneError: the model's
    attention cannot be computed with separate caches for each row."""

    def __init__(self, routes: AdapterRoutes, backbone: PreTrainedModel, head: Head) -> None:
        with routes.stock(routes.members[0]):
            if backbone.config.is_encoder_decoder:
                raise _unservable(backbone, "it is an encoder-decoder")
            if backbone.config._attn_implementation != "sdpa":
                raise _unservable(backbone, f"its attention is {backbone.config._attn_implementation}, not sdpa")
            if "position_ids" not in inspect.signature(backbone.forward).parameters:
                raise _unservable(backbone, "its positions cannot be given")
            if virtual_tokens.cache_sizes(backbone) is None:
                raise _unservable(backbone, "it keeps something else than alike keys and values in every layer")
        self._routes, self._backbone, self._head = routes, backbone, head
        # The number of tokens that an expert gets depends on all rows of a pass.
        experts = bool(anatomy.fused_experts(backbone))
        self._sharing: Sharing = "none" if experts else "all" if routes.mixes else "member"
        self.sizes: Sizes = SIZES  # numbers of tokens at which every row comes out, bit for bit, as in the largest
        self.token_bytes = 0  # bytes of the cache per token
        for member in routes.members:
            self._require_same(member)
        self.sizes = self._proven()

    @property
    def members(self) -> tuple[str, ...]:
        """Adapters, by name."""
        return self._routes.members

    def admit(self, member: str) -> None:
        """Check a member that has joined; raises BackboneError where rows do not come out as they do alone."""
        self._require_same(member)
        if member in self._routes.shapes:
            known, self.sizes = self.sizes, SIZES
            self.sizes = tuple(size for size in self._proven() if size in known)

    def step(self, chunks: Sequence[Chunk]) -> list[tuple[Chunk, Tensor]]:
        """Append the chunks to their rows; returns those that end or are scored, each with its logits (W, V).

        The logits are those after a chunk's last token, or after each of its tokens where it is scored.
        """
        chunk_logits = []
        for laid in laid_out(chunks, self.sizes, sharing=self._sharing):
            each_WV = self._logits(laid).split([chunk.wanted for chunk in laid.chunks])
            chunk_logits += list(zip(laid.chunks, each_WV, strict=True))
        for chunk in chunks:
            chunk.cache.length += len(chunk.ids)
        return chunk_logits

    def _logits(self, laid: Pass) -> Tensor:
        device = self._backbone.device
        shown = [(place, each) for place, each in enumerate(laid.ids) if isinstance(each, PictureToken)]
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([max(0, each) for each in laid.ids], device=device)[:, None],
            "position_ids": torch.tensor(laid.positions, device=device)[:, None],
            "cached_rows": laid.parts,
        }
        with self._routes.rows(laid.rows), self._showing(shown):
            hidden_T1D = self._head.hidden(self._routes.model, inputs)
            if not laid.wanted:
                return hidden_T1D.new_empty(0, self._head.vocabulary)
            padded = laid.wanted + laid.wanted[:1] * (smallest_size(len(laid.wanted), self.sizes) - len(laid.wanted))
            return self._head.project(hidden_T1D[padded, 0])[: len(laid.wanted)]

    @contextmanager
    def _showing(self, shown: Sequence[tuple[int, PictureToken]]) -> Iterator[None]:
        """Inside, tokens at these places have the embeddings of pictures."""
        if not shown:
            yield
            return
        places = torch.tensor([place for place, _ in shown], device=self._backbone.device)

        def put(_: nn.Module, __: object, embedded_T1D: Tensor) -> Tensor:
            embedding_ND = torch.stack([each.embedding_D for _, each in shown]).to(embedded_T1D)
            return embedded_T1D.index_put((places,), embedding_ND[:, None])

        handle = self._backbone.get_input_embeddings().register_forward_hook(put)
        try:
            yield
        finally:
            handle.remove()

    def feature(self, ids: Sequence[int]) -> Floats:
        """What a router reads of a prompt: `prompt_router.feature` of the backbone without an adapter."""
        with self._routes.stock(BARE):
            return prompt_router.feature(self._routes.model, self._head, ids)

    def pictured(self, ids: Sequence[int], key: str, processor: PictureProcessor, member: str) -> list[int]:
        """A prompt whose tokens of pictures or recordings have what the tower says of them.

        Args:
            key: Names these, as `processor` keeps them.
            member: The adapter that they go through.

        Raises:
            BackboneError: The tower says of another number of tokens.
        """
        backbone: Any = self._backbone
        places = [place for place, each in enumerate(ids) if each in set(processor.token_ids.tolist())]
        if not hasattr(backbone, "get_image_features"):
            with self._routes.stock(member):
                return _shown(ids, places, key, self._heard(ids, processor.arrays([key]))[places])
        takes = inspect.signature(backbone.get_image_features).parameters
        arrays = {name: each.to(backbone.device) for name, each in processor.arrays([key]).items() if name in takes}
        with self._routes.stock(member):
            found = backbone.get_image_features(**arrays, return_dict=True).pooler_output
        embedding_ND = (found if isinstance(found, Tensor) else torch.cat(list(found))).flatten(0, -2)
        if len(places) != len(embedding_ND):
            raise BackboneError(
                f"{type(backbone).__name__}: its tower says of {len(embedding_ND)} tokens, and the prompt has "
                f"{len(places)} for its pictures. `workbench generate RUN PROMPT --picture FILE` answers."
            )
        return _shown(ids, places, key, embedding_ND)

    def _heard(self, ids: Sequence[int], arrays: Mapping[str, Tensor]) -> Tensor:
        """What the language model is given for each token of a prompt with recordings (L, D)."""

        class Given(Exception):
            """Carries it out of the model, whose other layers need not run."""

            def __init__(self, embedded_1LD: Tensor) -> None:
                self.embedded_1LD = embedded_1LD

        def caught(_: nn.Module, __: object, named: dict[str, Any]) -> None:
            raise Given(named["inputs_embeds"])

        inside = self._backbone.get_submodule(anatomy.language_model(self._backbone))
        handle = inside.register_forward_pre_hook(caught, with_kwargs=True)
        ids_1L = torch.tensor([list(ids)], device=self._backbone.device)
        given = {name: each.to(self._backbone.device) for name, each in arrays.items()}
        try:
            self._backbone(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), **given)
        except Given as found:
            return found.embedded_1LD[0]
        finally:
            handle.remove()
        raise AssertionError("the language model is called")

    def _alone(self, ids: list[int], member: str) -> Tensor:
        """Logits (T, V) after each of some tokens, each as a row of its own."""
        return self._logits(Pass(ids, [0] * len(ids), [MemberRows(member, len(ids))], [], list(range(len(ids))), []))

    def _proven(self) -> Sizes:
        """Sizes at which rows come out as in the largest, at any place; tested with random tokens."""
        largest, proven_sizes = SIZES[-1], list(SIZES)
        ids = torch.randint(self._head.vocabulary, (largest,), generator=torch.Generator().manual_seed(0)).tolist()
        for member in self._routes.shapes:
            wanted_TV = self._alone(ids, member).nan_to_num()
            for size in proven_sizes[:-1]:
                ends = slice(0, size), slice(largest - size, None)
                if not all(torch.equal(self._alone(ids[some], member).nan_to_num(), wanted_TV[some]) for some in ends):
                    proven_sizes.remove(size)
        return tuple(proven_sizes)

    def _require_same(self, member: str) -> None:
        """Raise BackboneError where a row in chunks does not get the logits that the model itself computes."""
        ids = [(7 * number + 3) % self._head.vocabulary for number in range(_CHECKED)]
        with self._routes.stock(member):
            whole: Any = self._routes.model(
                input_ids=torch.tensor([ids], device=self._backbone.device), **self._head.settings
            )
        cache, chunk_logits = RowCache(), []
        for chunk in [ids[: _CHECKED // 2], *([each] for each in ids[_CHECKED // 2 :])]:
            chunk_logits.append(self.step([Chunk(cache, chunk, member)])[0][1][0].float())
        self.token_bytes = -(-cache.bytes // room(_CHECKED))
        wanted = whole.logits[0, _CHECKED // 2 - 1 :].float()
        tolerance = 1e-3 if whole.logits.dtype == torch.float32 else 5e-2
        if not torch.allclose(
            torch.stack(chunk_logits), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())
        ):
            raise _unservable(self._backbone, "a row beside others does not come out as it does alone")


def _unservable(backbone: PreTrainedModel, why: str) -> BackboneError:
    return BackboneError(
        f"{type(backbone).__name__} cannot be served here: {why}. `workbench generate` and `predict` answer one after "
        "the other; `workbench merge` writes a model that other servers load."
    )
