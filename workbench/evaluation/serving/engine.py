"""A causal model that goes on with many rows at once, each as if it were alone.

Legend: T tokens of a pass, W tokens after which logits are computed, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.prompts import virtual_tokens
from workbench.errors import BackboneError
from workbench.evaluation.serving.adapter_routes import AdapterRoutes
from workbench.evaluation.serving.passes import Chunk, Pass, Sharing, Sizes, laid_out, least
from workbench.models.cached_rows import RowCache, room
from workbench.models.output_heads import Head

SIZES: Sizes = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens of a pass or of one adapter in it that are tried."""
CHUNK = 64
"""Tokens of a prompt that are read at once: boundaries depend on the prompt alone."""
_CHECKED = 24
"""Tokens on which the engine is compared with the model itself."""


class Engine:
    """Computes the next token's logits of rows that go through different adapters.

    Raises:
        BackboneError: The model attends in a way that rows of their own keys and values do not compute.
    """

    def __init__(self, routes: AdapterRoutes, backbone: PreTrainedModel, head: Head) -> None:
        with routes.stock(routes.members[0]):
            _require_known(backbone)
        self._routes, self._backbone, self._head = routes, backbone, head
        # How many tokens an expert gets depends on all rows of a pass.
        experts = bool(anatomy.fused_experts(backbone))
        self._sharing: Sharing = "none" if experts else "all" if routes.mixes else "member"
        self.sizes: Sizes = SIZES
        """Numbers of tokens at which every row comes out, bit for bit, as in the largest."""
        self.token_bytes = 0
        """Memory that one token of a row takes until its answer ends."""
        for member in routes.members:
            self._require_same(member)
        self.sizes = self._proven()

    @property
    def members(self) -> tuple[str, ...]:
        """Adapters, by name."""
        return self._routes.members

    def admit(self, member: str) -> None:
        """Take a member that has joined the routes; raises BackboneError where it does not compute as it does alone."""
        self._require_same(member)
        if member in self._routes.shapes:
            known, self.sizes = self.sizes, SIZES
            self.sizes = tuple(size for size in self._proven() if size in known)

    def step(self, chunks: Sequence[Chunk]) -> list[tuple[Chunk, Tensor]]:
        """Chunks that end or are scored, with logits (W, V); all are behind their rows' tokens then.

        They are those after a chunk's last token, or after each of its tokens where it is scored.
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
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(laid.ids, device=device)[:, None],
            "position_ids": torch.tensor(laid.positions, device=device)[:, None],
            "cached_rows": laid.parts,
        }
        with self._routes.rows(laid.rows):
            hidden_T1D = self._head.hidden(self._routes.model, inputs)
            if not laid.wanted:
                return hidden_T1D.new_empty(0, self._head.vocabulary)
            padded = laid.wanted + laid.wanted[:1] * (least(len(laid.wanted), self.sizes) - len(laid.wanted))
            return self._head.project(hidden_T1D[padded, 0])[: len(laid.wanted)]

    def _alone(self, ids: list[int], member: str) -> Tensor:
        """Logits (T, V) after each of some tokens, as many rows of one token."""
        return self._logits(Pass(ids, [0] * len(ids), [MemberRows(member, len(ids))], [], list(range(len(ids))), []))

    def _proven(self) -> Sizes:
        """Sizes at which rows are as in the largest, wherever they stand; found with random tokens."""
        largest, proven_sizes = SIZES[-1], list(SIZES)
        ids = torch.randint(self._head.vocabulary, (largest,), generator=torch.Generator().manual_seed(0)).tolist()
        for member in self._routes.shapes:
            wanted_TV = self._alone(ids, member)
            for size in proven_sizes[:-1]:
                same = [torch.equal(self._alone(ids[some], member), wanted_TV[some]) for some in _ends(size)]
                if not all(same):
                    proven_sizes.remove(size)
        return tuple(proven_sizes)

    def _require_same(self, member: str) -> None:
        """Raise BackboneError where a row in chunks does not get the logits that the model itself gives."""
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
            raise _unknown(self._backbone, "a row beside others does not come out as it does alone")


def _ends(size: int) -> tuple[slice, slice]:
    return slice(0, size), slice(SIZES[-1] - size, None)


def _require_known(backbone: PreTrainedModel) -> None:
    if backbone.config.is_encoder_decoder:
        raise _unknown(backbone, "it is an encoder-decoder")
    if backbone.config._attn_implementation != "sdpa":
        raise _unknown(backbone, f"its attention is {backbone.config._attn_implementation}, not sdpa")
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise _unknown(backbone, "its positions cannot be given")
    if virtual_tokens.cache_sizes(backbone) is None:
        raise _unknown(backbone, "it keeps something else than alike keys and values in every layer")


def _unknown(backbone: PreTrainedModel, why: str) -> BackboneError:
    return BackboneError(
        f"{type(backbone).__name__} cannot be served here: {why}. `workbench generate` and `predict` answer one after "
        "the other; `workbench merge` writes a model that other servers load."
    )
