"""Views of tokenised conversations for test-time augmentation: the text between special tokens in other letters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config.sections.tta_config import TtaConfig
from workbench.data.batching import Indices, MicroBatch, Row
from workbench.data.text import rewriting
from workbench.data.text.tokenized_set import TokenizedSet


@dataclass(frozen=True)
class ConversationView:
    """Rows of a set with their text rewritten. One that would be longer than `max_tokens` stays as it is."""

    name: str
    rows: TokenizedSet
    change: Callable[[str], str]
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self._rewritten_rows[index]

    @cached_property
    def _rewritten_rows(self) -> list[Row]:
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        return [self._rewritten_row(self.rows[index], special) for index in range(len(self))]

    def _rewritten_row(self, row: Row, special: set[int]) -> Row:
        ids = list[int]()
        for kept, part in itertools.groupby(row.input_ids.tolist(), special.__contains__):
            text = list(part)
            ids += text if kept else self.tokenizer.encode(self._rewritten(text), add_special_tokens=False)
        if len(ids) > self.max_tokens:
            return row
        return Row(
            np.asarray(ids, dtype=np.int64),
            np.arange(len(ids)) == len(ids) - 1,
            digest=row.digest,
            pictures=row.pictures,
        )

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each row."""
        return np.asarray([len(row.input_ids) for row in self._rewritten_rows], dtype=np.int64)

    def batch(self, indices: Indices) -> MicroBatch:
        """Some of the rows, padded."""
        return self.rows.collate([self[int(index)] for index in indices], epoch=0)

    def _rewritten(self, ids: list[int]) -> str:
        return self.change(str(self.tokenizer.decode(ids)))


def views(
    rows: TokenizedSet, tta: TtaConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, max_tokens: int
) -> Iterator[ConversationView]:
    """The rows in each view that `tta` names."""

    def with_typos(copy: int, text: str) -> str:
        return rewriting.with_typos(text, rewriting.noise_rng(seed, "typos", copy, [text]), share=tta.noise)

    cases = {"lower": str.lower, "upper": str.upper}
    for name in tta.views:
        typos = [partial(with_typos, copy) for copy in range(1, tta.copies + 1)]
        for change in [cases[name]] if name in cases else typos:
            yield ConversationView(name, rows, change, tokenizer, max_tokens)
