"""Answers whose steps are rated one by one, from rows of a file to training examples with a label for each step.

Rows have `prompt`, `completions` (a list of steps) and `labels`. The text is tokenised as a whole, as generation sees
it. A step ends with the last token in front of the next one: what stands between them belongs to the earlier step. The
last step ends with the row, whose last token a stock model reads.

Legend: B answers of a micro-batch, N its steps, S steps of the data set, R its answers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

from workbench.data import resampling
from workbench.data.batching import Floats, Indices, MicroBatch, Weights, WholeRows
from workbench.data.rows import excerpt
from workbench.data.text import chat
from workbench.data.text.chat import Encoded, LossOn
from workbench.data.text.formats import Conversion, Example, Reader, answered
from workbench.data.text.row_encoder import WrappedEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError, WorkbenchError


def convert(separator: str, labelled: bool, name: str, place: str, columns: Mapping[str, Any]) -> Example:
    """A row of format `name` as an example whose answer is its steps with `separator` between them. Raises DataError:
    the row rates no steps, or a step or a label is none. `labelled`: whether labels are read; otherwise all steps have
    the label 0, which nobody is to look at."""
    if name != "stepwise":
        raise DataError(
            f"data.format {name} rates no steps, which reward.kind=process learns from. Give rows with prompt, "
            "completions (a list of steps) and labels (true or false for each), or leave reward.kind out."
        )
    value = columns["completions"]
    if not isinstance(value, list) or not value:
        raise DataError(f"`completions` must be a list with at least one step, found {excerpt(value)}.")
    for number, step in enumerate(value, start=1):
        if not isinstance(step, str) or not step.strip():
            raise DataError(f"`completions`: step {number} must be a text that is not blank, found {excerpt(step)}.")
    steps = tuple(value)
    labels = _labels(columns.get("labels"), len(steps)) if labelled else (0.0,) * len(steps)
    # Only the first keeps the space in front of it, which may part it from the prompt.
    steps = (steps[0].rstrip(), *(step.strip() for step in steps[1:]))
    whole = answered(place, {**columns, "completion": separator.join(steps)}, prompt="prompt", answer="completion")
    return replace(whole, steps=steps, step_labels=labels)


def parted(answer: str, separator: str) -> tuple[str, ...]:
    """The steps of a generated answer; blank ones are none."""
    return tuple(step for step in answer.split(separator) if step.strip())


def _labels(value: Any, steps: int) -> tuple[float, ...]:
    if value is None:
        raise DataError("`labels` is missing or null. Give a list with true or false for each step.")
    if not isinstance(value, list) or len(value) != steps:
        count = f"a list of {len(value)}" if isinstance(value, list) else excerpt(value)
        raise DataError(f"`labels` must be a list with one label for each of the {steps} steps, found {count}.")
    for number, label in enumerate(value, start=1):
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            raise DataError(
                f"`labels`: that of step {number} must be true, false or a number from 0 to 1, found {excerpt(label)}."
            )
    return tuple(float(label) for label in value)


@dataclass(frozen=True)
class StepEncoder(WrappedEncoder):
    """Writes answers as `base` writes conversations, and marks the last token of each step as supervised."""

    separator: str = "\n"
    """Stands between the steps of a row."""
    labelled: bool = True
    """Whether rows have labels that are read. Without, a step that no token ends belongs to the next one, and none is
    refused: generated answers are what they are."""
    reader: Reader | None = None

    @property
    def conversion(self) -> Conversion:
        return partial(convert, self.separator, self.labelled)

    @property
    def identity(self) -> list[Any]:
        return ["steps", self.separator, self.labelled, *self.base.identity]

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        return chat.outcomes(partial(self.encode, loss_on=loss_on), examples)

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The example's ids, and which of them are the last of a step. Raises DataError: a step is not in what the
        template writes, or shares a token with the next one."""
        encoded = self.base.encode(example, loss_on="last")
        written = self.base.answer_text(example)
        spans, place = list[tuple[int, int]](), written.start
        for number, step in enumerate(example.steps, start=1):
            at = written.tokens.text.find(step.strip(), place)
            if at >= 0:
                place = at + len(step.strip())
                spans.append((at, place))
            elif self.labelled:
                raise DataError(
                    f"{example.place}: the chat template changes step {number} of its answer, so that its end is not "
                    "found. Give another template with model.chat_template=FILE, or write data.on_bad_row=skip."
                )
        marks = [len(encoded.input_ids) - 1]
        for (_, stop), (following, _) in reversed(list(pairwise(spans))):
            last = bisect_right(written.tokens.ends, following) - 1
            if last >= 0 and written.tokens.ends[last] >= stop:
                marks.insert(0, last + written.added)
            elif self.labelled:
                between = excerpt(written.tokens.text[stop - 1 : following + 1])
                raise DataError(
                    f"{example.place}: a token reaches from a step into the next one, {between}, "
                    "so that no token ends the step. Write a reward.separator that is a token of its own, such as a "
                    "line break, or data.on_bad_row=skip."
                )
        supervised = [False] * len(encoded.input_ids)
        for mark in marks:
            supervised[mark] = True
        return replace(encoded, supervised=supervised, end_positions=())


RIGHT = 0.5  # the label, and the probability, from which on a step counts as right


@dataclass(frozen=True)
class StepSet(WholeRows):
    """Answers with a label for each of their steps; those that cutting left."""

    answers: TokenizedSet

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def lengths(self) -> Indices:
        """Tokens of each answer with its prompt."""
        return self.answers.lengths

    @property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest sequence that one stack of the model reads, of each answer."""
        return self.answers.longest_sequences

    @property
    def sources(self) -> Collection[str]:
        """Names of the sets that answers are from; empty where there is one."""
        return self.answers.sources

    @property
    def source_N(self) -> Indices:
        """Number of the set of each answer, where there are several."""
        return self.answers.source_N

    @property
    def steps(self) -> Indices:
        """Steps of each answer (R,)."""
        return self.answers.supervised

    @cached_property
    def supervised(self) -> Weights:
        """Weight of each answer in the mean loss: its steps, times the weight of its row."""
        weight_R = self.answers.weights
        return self.steps if resampling.uniform(weight_R) else self.steps * weight_R

    @cached_property
    def labels(self) -> Floats:
        """How right each step is (S,), answer by answer, from 0 to 1."""
        column = self.answers.table.data.column("step_labels").take(pyarrow.array(self.answers.rows))
        labels: Floats = pyarrow.compute.list_flatten(column).to_numpy()
        return labels

    @cached_property
    def row_of_step(self) -> Indices:
        """The answer of each step (S,)."""
        return np.repeat(np.arange(len(self)), self.steps)

    @cached_property
    def cut_steps(self) -> int:
        """How many steps cutting to `data.max_tokens` left out."""
        return int(self.answers.table.data.column("cut_steps").to_numpy()[self.answers.rows].sum())

    def place(self, index: int) -> str:
        return self.answers.place(index)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The answers `indices`, padded, with the label of each step (N,) float32 at its last token."""
        import torch

        batch = self.answers.batch(indices, epoch=epoch)
        # A model rates a step at its last token, where the collated batch has the one before it, which predicts it.
        labels = torch.from_numpy(self.labels[self.steps_of(indices)].astype(np.float32))
        batch = replace(batch, positions_N=batch.positions_N + 1, labels_N=labels)
        weight_R = self.answers.weights
        return batch if resampling.uniform(weight_R) else batch.weighted(weight_R[indices])

    def steps_of(self, indices: Indices) -> Indices:
        """Numbers of the steps (among S) of some answers, in their order."""
        ends = np.cumsum(self.steps)
        own = [np.arange(ends[row] - self.steps[row], ends[row]) for row in indices.tolist()]
        return np.concatenate(own) if own else np.zeros(0, dtype=np.int64)

    def subset(self, keep: Indices | npt.NDArray[np.bool_]) -> StepSet:
        """The answers that `keep` indexes or marks."""
        return StepSet(self.answers.subset(keep))

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        cut = {"cut_steps": self.cut_steps} if self.cut_steps else {}
        right = int((self.labels >= RIGHT).sum())
        return {**self.answers.facts(), "steps": len(self.labels), "right_steps": right, **cut}
