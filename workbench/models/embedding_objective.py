"""Training loss of an embedder over a global batch, as its configuration says.

Legend: B rows, N passages, U different texts of a batch, D numbers of an embedding, C rows that are compared at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from workbench.config.sections.embed_config import EmbedConfig
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.embedding.pair_set import BatchTexts, PairSet, TextUnits
from workbench.data.mixture import MixedRows
from workbench.losses import embedding_losses as losses
from workbench.models.embedder import Embedder

COMPARED = 2**22
"""Similarities that are held at a time."""

Term = Callable[[Tensor], Tensor]
"""From embeddings (U, D) of any length to a part of the mean loss."""


@dataclass(frozen=True)
class PairTerms:
    """The loss of rows of a batch, in terms that hold few similarities each."""

    rows: PairSet
    batch: Indices
    config: EmbedConfig
    sizes: tuple[int, ...]

    @property
    def texts(self) -> BatchTexts:
        """Texts of the batch."""
        return self.rows.texts(self.batch)

    def __iter__(self) -> Iterator[Term]:
        loss, texts = self.config.loss_of(self.rows.form), self.texts
        own: Callable[[BatchTexts, int], Iterator[Term]] = {
            "contrastive": self._contrastive,
            "triplet": self._triplets,
            "cosent": self._scored,
            "cosine": self._scored,
        }[loss]
        for size in self.sizes:
            yield from own(texts, size)

    @property
    def scale(self) -> float:
        """One over rows and sizes."""
        return 1 / (len(self.batch) * len(self.sizes))

    def _contrastive(self, texts: BatchTexts, size: int) -> Iterator[Term]:
        places = partial(np.searchsorted, texts.every)
        sides = [(texts.anchor_B, texts.passages)]
        sides += [(texts.positive_B, texts.anchor_B)] if self.config.symmetric else []
        for queries, passages in sides:
            rows = max(1, COMPARED // len(passages))
            for first in range(0, len(queries), rows):
                some = np.arange(first, min(first + rows, len(queries)))
                # Its own is at its own place: positives come first, in the order of their anchors.
                yield partial(
                    self._found,
                    size=size,
                    query_C=torch.from_numpy(places(queries[some])),
                    passage_N=torch.from_numpy(places(passages)),
                    own_C=torch.from_numpy(some),
                    excluded_CN=torch.from_numpy(self.rows.known(queries[some], passages)),
                    scale=self.scale / len(sides),
                )

    def _found(
        self,
        outputs_UD: Tensor,
        *,
        size: int,
        query_C: Tensor,
        passage_N: Tensor,
        own_C: Tensor,
        excluded_CN: Tensor,
        scale: float,
    ) -> Tensor:
        embedded_UD = losses.leading(outputs_UD, size, normalise=self.config.normalise)
        device = outputs_UD.device
        loss = losses.contrastive(
            embedded_UD[query_C.to(device)],
            embedded_UD[passage_N.to(device)],
            own_C.to(device),
            excluded_CN.to(device),
            temperature=self.config.temperature,
        )
        return loss * scale

    def _triplets(self, texts: BatchTexts, size: int) -> Iterator[Term]:
        numbers = [texts.anchor_B[texts.owner_M], texts.positive_B[texts.owner_M], texts.negative_M]
        weight_M = torch.from_numpy(1 / np.bincount(texts.owner_M)[texts.owner_M]).float()

        def term(outputs_UD: Tensor) -> Tensor:
            embedded_UD = losses.leading(outputs_UD, size, normalise=self.config.normalise)
            one_MD, own_MD, other_MD = (
                embedded_UD[torch.from_numpy(np.searchsorted(texts.every, each))] for each in numbers
            )
            weights_M = weight_M.to(outputs_UD.device)
            return losses.triplet(one_MD, own_MD, other_MD, weights_M, margin=self.config.margin) * self.scale

        yield term

    def _scored(self, texts: BatchTexts, size: int) -> Iterator[Term]:
        score_B = torch.from_numpy(self.rows.score_N[self.batch]).float()

        def term(outputs_UD: Tensor) -> Tensor:
            embedded_UD = losses.leading(outputs_UD, size, normalise=self.config.normalise)
            one_BD, other_BD = (
                embedded_UD[torch.from_numpy(np.searchsorted(texts.every, each))]
                for each in (texts.anchor_B, texts.positive_B)
            )
            similarity_B, wanted_B = (one_BD * other_BD).sum(1), score_B.to(outputs_UD.device)
            if self.config.loss == "cosine":
                return losses.squared(similarity_B, wanted_B) * self.scale
            return losses.cosent(similarity_B, wanted_B, temperature=self.config.temperature) * self.scale

        yield term


@dataclass(frozen=True)
class EmbeddingLoss:
    """The loss of an embedder's rows; see `workbench.training.signal.GlobalLoss`."""

    embedder: Embedder

    def of(self, seen: Examples, rows: Indices) -> tuple[TextUnits, Indices, Callable[[], Iterator[Term]]]:
        """Texts of the rows, and the terms of their loss."""
        pairs = seen.rows if isinstance(seen, MixedRows) else seen
        assert isinstance(pairs, PairSet)
        terms = PairTerms(pairs, rows, self.embedder.config, self.embedder.sizes)
        return pairs.units, terms.texts.every, terms.__iter__

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Embeddings of any length."""
        return self.embedder.pooled(batch)

    def mean(self, rows: PairSet, embedded_UD: Tensor, *, size: int) -> float:
        """Mean loss of rows in batches of `size`, from embeddings of all their texts, before they are normalised."""
        total = 0.0
        for first in range(0, len(rows), size):
            some = np.arange(first, min(first + size, len(rows)))
            terms = PairTerms(rows, some, self.embedder.config, self.embedder.sizes)
            own_UD = embedded_UD[torch.from_numpy(terms.texts.every)]
            total += len(some) * sum(float(term(own_UD)) for term in terms)
        return total / len(rows)
