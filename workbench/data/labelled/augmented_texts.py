"""Labelled texts as passes over the training rows rewrite them: a function of seed, pass and text alone.

A text is rewritten in the same way wherever its row stands, in any micro-batch, on any device and after any restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from workbench.config.sections.text_augment_config import NOISY, OperatorName, TextAugmentConfig
from workbench.data.batching import Indices
from workbench.data.labelled.encoded_texts import EncodedTexts
from workbench.data.labelled.text_fields import FieldTokenizer
from workbench.data.text import rewriting

Fields: TypeAlias = tuple[str, ...]
KEPT = 2
"""Passes whose tokens are kept: the present one, and the next where a step is looked ahead to."""

_PLAIN: Mapping[OperatorName, Callable[[str], str]] = {
    "lower": str.lower,
    "upper": str.upper,
    "no_punctuation": rewriting.without_punctuation,
}
_NOISE: Mapping[OperatorName, Callable[..., str]] = {
    "drop_words": rewriting.with_words_dropped,
    "swap_words": rewriting.with_words_swapped,
    "insert_words": rewriting.with_words_inserted,
    "punctuation": rewriting.with_punctuation,
    "typos": rewriting.with_typos,
}


def rewritten(texts: Fields, config: TextAugmentConfig, *, seed: int, epoch: int) -> Fields:
    """The columns of a row as pass `epoch` reads them; as they are where chance leaves them, or nothing would be left.

    One operator rewrites all columns, which are drawn from on their own.
    """
    rng = rewriting.noise_rng(seed, "augment", epoch, texts)
    if rng.random() >= config.probability:
        return texts
    name = config.operators[rng.integers(len(config.operators))]
    change = partial(_NOISE[name], rng=rng, share=config.noise) if name in NOISY else _PLAIN[name]
    augmented = tuple(map(change, texts))
    emptied = any(before.strip() and not after.strip() for before, after in zip(texts, augmented, strict=True))
    return texts if emptied else augmented


@dataclass(frozen=True, eq=False)
class AugmentedTexts:
    """Texts of rows, and their tokens in each pass."""

    texts: tuple[Fields, ...]
    """The columns of each row."""
    places: tuple[str, ...]
    config: TextAugmentConfig
    seed: int
    encoder: FieldTokenizer
    _known: dict[int, EncodedTexts] = field(default_factory=dict)
    """Tokens of the last passes."""

    def tokens(self, epoch: int) -> EncodedTexts:
        """Tokens of each row in a pass."""
        if epoch not in self._known:
            while len(self._known) >= KEPT:
                del self._known[min(self._known)]
            self._known[epoch] = self.encoder.encode(self.rewritten(epoch), self.places)
        return self._known[epoch]

    def rewritten(self, epoch: int) -> list[Fields]:
        """The columns of each row in a pass."""
        return [rewritten(texts, self.config, seed=self.seed, epoch=epoch) for texts in self.texts]

    def take(self, indices: Indices) -> AugmentedTexts:
        """The rows `indices`."""
        return self._with([self.texts[each] for each in indices], [self.places[each] for each in indices])

    def concatenated(self, other: AugmentedTexts) -> AugmentedTexts:
        """These rows, followed by those of `other`."""
        return self._with([*self.texts, *other.texts], [*self.places, *other.places])

    def alone(self, operator: OperatorName) -> AugmentedTexts:
        """The same rows, all of which `operator` rewrites in each pass."""
        return replace(
            self, config=self.config.model_copy(update={"operators": (operator,), "probability": 1.0}), _known={}
        )

    def changed(self, epoch: int) -> Indices:
        """Numbers of the rows that a pass rewrites."""
        pairs = zip(self.texts, self.rewritten(epoch), strict=True)
        return np.flatnonzero([before != after for before, after in pairs])

    def _with(self, texts: Sequence[Fields], places: Sequence[str]) -> AugmentedTexts:
        return replace(self, texts=tuple(texts), places=tuple(places), _known={})
