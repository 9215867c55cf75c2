"""Rewards of answers to the rows of a table, which are rated with all the columns that their file has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.config.sections.rewards_config import RewardSource
from workbench.data.batching import Indices
from workbench.data.rows import RawRow
from workbench.data.text import prompts, tokenized
from workbench.data.text.generated_answers import Answer, Floats, answer_to
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation.rewards.reward_sum import RewardSum, require_columns


class RowJudge:
    """The rewards of a run, for answers to the rows of a table.

    Args:
        rows: Some rows of the table.
        files: Each file of the table's rows by name (empty where there is one), and how it is read.
    """

    def __init__(
        self,
        rewards: RewardSum,
        rows: TokenizedSet,
        files: Mapping[str, DataConfig],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        whole = replace(rows, rows=np.arange(len(rows.table)))
        self.table = rows.table
        self._rewards, self._tokenizer = rewards, tokenizer
        prefixes = rows.prefixes or ("",) * max(1, len(rows.sources))
        self._raw: list[tuple[RawRow, DataConfig]] = [
            (replace(raw, place=prefix + raw.place), own)
            for prefix, (part, own) in zip(prefixes, tokenized.of_files(whole, files), strict=True)
            for raw in tokenized.raw_rows(part, own)
        ]
        """Each row of the table, by its place in it, and how its file is read."""

    def require(self, sources: Sequence[RewardSource]) -> None:
        """Raise DataError where a row has no column that a reward reads."""
        require_columns(sources, ((raw.place, raw.columns) for raw, _ in self._raw))

    def named(self, rows: Sequence[int], answers: Sequence[Indices]) -> dict[str, Floats]:
        """Rewards of answers by their names, from the number of each one's row and its tokens.

        Raises:
            WorkbenchError: A reward fails; it is named.
        """
        return self.of_texts(rows, [self.text(ids) for ids in answers])

    def of_texts(self, rows: Sequence[int], texts: Sequence[str]) -> dict[str, Floats]:
        """The same of answers as text."""
        answers = [self._answer(row, text) for row, text in zip(rows, texts, strict=True)]
        return {name: np.asarray(values, dtype=np.float64) for name, values in self._rewards.named(answers).items()}

    def total(self, named: Mapping[str, Floats]) -> Floats:
        """The weighted sum of rewards."""
        listed = {name: values.tolist() for name, values in named.items()}
        count = len(next(iter(listed.values())))
        return np.asarray(self._rewards.total(listed, count), dtype=np.float64)

    def text(self, ids: Indices) -> str:
        """An answer as text, without what ends it."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def _answer(self, row: int, text: str) -> Answer:
        raw, config = self._raw[row]
        question = prompts.question(raw, config)
        assert question is not None, "what is no prompt is no row of the table"
        return answer_to(question, text, raw.columns)
