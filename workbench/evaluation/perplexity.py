"""Held-out loss and perplexity of a language model, per set and per row, and how two models' predictions differ.

Legend: B rows, L padded length, D hidden, N supervised positions or rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import losses
from workbench.data import named_sets
from workbench.data.batching import Collate, Indices, MicroBatch, Row, collate
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation.forward_passes import ModelResults, over_rows
from workbench.losses.chunked_loss import chunks
from workbench.models.output_heads import Head
from workbench.runs import units

if TYPE_CHECKING:
    from workbench.models.exported import ExportedModel

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Likelihood:
    """Scores of a model's predictions of the supervised tokens of a set."""

    loss: float
    """Mean negative log-likelihood, nats per supervised token."""
    token_accuracy: float
    """Share of supervised tokens that the model finds most likely."""
    by_source: Mapping[str, Likelihood] = field(default_factory=dict, hash=False)
    """The same for each named set, where there are several."""
    rows: SummedLosses | None = field(default=None, hash=False, compare=False, repr=False)
    """Loss of each row."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where it overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def scores(self) -> dict[str, float]:
        """By name."""
        return units.rounded({"loss": self.loss, "perplexity": self.perplexity, "token_accuracy": self.token_accuracy})


@dataclass(frozen=True)
class SummedLosses:
    """Loss of each row, summed over its tokens, in the order of the rows."""

    loss_N: npt.NDArray[np.float64]  # negative log-likelihood in nats, summed over the supervised tokens of a row
    tokens_N: Indices  # number of these tokens


class LikelihoodRows(Protocol):
    """Rows whose tokens have a likelihood, with the tokens of each; a batch of them is padded."""

    @property
    def lengths(self) -> Indices: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...
    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch: ...


def likelihood(
    model: nn.Module, head: Head, tokens: TokenizedSet, *, scoring: ModelResults | None = None
) -> Likelihood:
    """Loss and accuracy over every supervised token of some rows.

    Args:
        model: In evaluation mode, with an adapter or without.
        head: From `output_head`.
        tokens: Rows from `load_rows` or `encode_rows`.
        scoring: Keeps results where the run may be stopped.

    Returns:
        `loss` in nats per supervised token, `perplexity`, `token_accuracy`, and the same `by_source`.

    Examples:
        >>> import workbench
        >>> from workbench.config import ModelConfig
        >>> section = ModelConfig(id="starter", weights="float32")
        >>> tokenizer = workbench.load_tokenizer(section)
        >>> backbone = workbench.load_backbone(section, tokenizer)
        >>> rows = workbench.encode_rows([{"question": "Who?", "answer": "A fox."}], tokenizer)
        >>> head = workbench.output_head(backbone.model, backbone.model)
        >>> workbench.likelihood(backbone.model, head, rows).loss < 9
        True
    """
    every = row_likelihoods(model, head, tokens, scoring=scoring)

    def together(rows: Iterable[int]) -> Likelihood:
        losses, hits, counts = zip(*(every[row] for row in rows), strict=True)
        return Likelihood(math.fsum(losses) / sum(counts), sum(hits) / sum(counts))

    by_source = {name: together(own.tolist()) for name, own in named_sets.rows_by_set(tokens).items()}
    rows = SummedLosses(
        np.fromiter((loss for loss, _, _ in every), np.float64, len(every)),
        np.fromiter((count for _, _, count in every), np.int64, len(every)),
    )
    return replace(together(range(len(every))), by_source=by_source, rows=rows)


def row_likelihoods(
    model: nn.Module, head: Head, tokens: LikelihoodRows, *, scoring: ModelResults | None = None
) -> list[tuple[float, int, int]]:
    """For each row: its summed loss in nats, tokens that the model finds most likely, and supervised tokens."""

    @torch.no_grad()
    def compute(rows: Indices) -> list[tuple[float, int, int]]:
        on_host = tokens.batch(rows)
        batch = on_host.to(next(model.parameters()).device)
        hidden_BLD = head.hidden(model, batch.inputs)
        hidden_ND = hidden_BLD.flatten(0, 1)[batch.positions_N]
        scores = losses.token_scores(hidden_ND, batch.labels_N, head.project, vocabulary=head.vocabulary)
        loss_N, hit_N, row_N = scores[0].double().cpu(), scores[1].cpu(), on_host.positions_N // hidden_BLD.shape[1]
        # One sum per row, in order, so that it does not depend on which rows share a micro-batch; by torch, because in
        # a plan these tensors are fake.
        zero_B = torch.zeros(len(rows), dtype=torch.float64)
        parts = (loss_N, hit_N.double(), torch.ones_like(row_N).double())
        sums = ([sum_.item() for sum_ in zero_B.index_add(0, row_N, part_N)] for part_N in parts)
        return [(float(loss), int(hits), int(count)) for loss, hits, count in zip(*sums, strict=True)]

    content = (
        each
        for row in (tokens[index] for index in range(len(tokens)))
        for each in (row.input_ids, row.supervised, np.asarray([row.source, row.digest], np.uint64))
    )
    return over_rows(model, tokens.lengths, compute, scoring=scoring, content=content)


@dataclass(frozen=True)
class AnswerRows:
    """Answers as token ids, each behind its prompt."""

    rows: Sequence[Row]
    collate: Collate

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> Indices:
        return np.asarray([len(row.input_ids) for row in self.rows], dtype=np.int64)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        return self.collate([self.rows[index] for index in indices], epoch=epoch)


def answer_likelihoods(model: ExportedModel, rows: Sequence[Row]) -> list[float]:
    """Mean log-probability of each answer's tokens behind its prompt, in nats."""
    found = row_likelihoods(model.model, model.head, AnswerRows(rows, model.template.collate))
    return [-loss / count for loss, _, count in found]


@dataclass(frozen=True)
class AnswersAlone:
    """Rows reduced to one start token and the tokens that carry loss. `start`: id of the start token: the tokenizer's
    bos, or its eos where there is no bos."""

    rows: TokenizedSet
    start: int

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> Indices:
        return self.rows.supervised + 1

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        supervised = row.supervised.copy()
        supervised[0] = False  # nothing precedes it in the whole row, so it carries no loss there either
        ids = np.append(self.start, row.input_ids[supervised])
        return Row(ids, np.arange(len(ids)) > 0, digest=row.digest)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        return collate([self[index] for index in indices], epoch=epoch)


def row_scores(
    by: Literal["perplexity", "ifd"],
    model: nn.Module,
    head: Head,
    rows: TokenizedSet,
    *,
    start: int,
    scoring: Callable[[str], ModelResults],
) -> Floats:
    """Score (N,) of each training row by the untrained backbone, by which rows are selected.

    It is the row's mean loss in nats, or its instruction-following difficulty (IFD): the mean loss of its answers after
    their prompts, divided by that of the same tokens without the prompts (Li et al. 2023, arXiv:2308.12032, equation
    4). From 1 on the prompt does not help.

    Args:
        start: Id of the token that begins a text.
        scoring: Gives the store of results, by name, where the run may be stopped.
    """

    def mean_losses(rows: LikelihoodRows, name: str) -> Floats:
        return np.array([loss / count for loss, _, count in row_likelihoods(model, head, rows, scoring=scoring(name))])

    whole_N = mean_losses(rows, "rows")
    if by == "perplexity":
        return whole_N
    return whole_N / np.maximum(mean_losses(AnswersAlone(rows, start), "answers"), 1e-9)


@dataclass(frozen=True)
class Agreement:
    """Difference of model B from model A over N positions."""

    kl: float  # mean KL(A || B) of the next-token distributions, nats per token
    top1: float  # share of positions where both have the same most likely token
    positions: int

    @property
    def sentence(self) -> str:
        """Both measures, as `merge` prints them."""
        return (
            f"On {self.positions:,} held-out tokens: KL divergence {self.kl:.2e} nats per token, "
            f"same first choice {self.top1:.2%}."
        )


def hidden_states(model: nn.Module, head: Head, tokens: TokenizedSet, *, rows: int) -> Tensor:
    """Hidden states (N, D) before the head, at the supervised positions of the first `rows` examples, in order."""
    first = tokens.subset(np.arange(min(rows, len(tokens))))
    device = next(model.parameters()).device

    def compute(numbers: Indices) -> list[Tensor]:
        batch = first.batch(numbers).to(device)
        hidden_BLD = head.hidden(model, batch.inputs)
        supervised_BL = torch.zeros(hidden_BLD.shape[:2], dtype=torch.bool, device=device)
        supervised_BL.view(-1)[batch.positions_N] = True
        return [hidden_LD[supervised_L] for hidden_LD, supervised_L in zip(hidden_BLD, supervised_BL, strict=True)]

    return torch.cat(over_rows(model, first.lengths, compute))


@torch.no_grad()
def agreement(a: Head, hidden_a_ND: Tensor, b: Head, hidden_b_ND: Tensor) -> Agreement:
    """Compare the next-token distributions of two models, from the hidden states of each at the same positions."""
    divergence, same = 0.0, 0
    # In float64, as a very small divergence would round to a negative number.
    for first, second in chunks(4 * a.vocabulary, hidden_a_ND, hidden_b_ND):
        log_a = F.log_softmax(a.project(first).double(), dim=-1)
        log_b = F.log_softmax(b.project(second).double(), dim=-1)
        divergence += float(F.kl_div(log_b, log_a, reduction="sum", log_target=True))
        same += int((log_a.argmax(-1) == log_b.argmax(-1)).sum())
    count = len(hidden_a_ND)
    return Agreement(kl=divergence / count, top1=same / count, positions=count)
