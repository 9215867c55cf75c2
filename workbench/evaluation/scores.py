"""Held-out loss of a language model, and its answers to held-out prompts.

Legend: B rows, L padded length, D hidden, N supervised positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from workbench import losses
from workbench.data import named_sets
from workbench.data.batching import Indices, MicroBatch, Row, encoder_inputs, evenly_spaced
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation import bootstrap, text_overlap
from workbench.evaluation.generation import generate, padded_on_the_left
from workbench.evaluation.result_store import ModelResults
from workbench.evaluation.row_passes import over_rows
from workbench.models.output_heads import Head
from workbench.runs import files, units


@dataclass(frozen=True)
class Likelihood:
    """Scores of a model's predictions of the supervised tokens of a set."""

    loss: float
    """Mean negative log-likelihood, nats per supervised token."""
    token_accuracy: float
    """Share of supervised tokens that the model finds most likely."""
    by_source: Mapping[str, Likelihood] = field(default_factory=dict, hash=False)
    """That of each source, where there are several."""
    rows: SummedLosses | None = field(default=None, hash=False, compare=False, repr=False)
    """That of each row, of all rows together."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where it overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def scores(self) -> dict[str, float]:
        """By name."""
        score_by_name = {"loss": self.loss, "perplexity": self.perplexity, "token_accuracy": self.token_accuracy}
        return units.rounded(score_by_name)


@dataclass(frozen=True)
class SummedLosses:
    """Losses of rows in their order, each summed over its tokens."""

    loss_N: npt.NDArray[np.float64]
    """Negative log-likelihood in nats, summed over the supervised tokens of a row."""
    tokens_N: Indices
    """Number of these tokens."""


@dataclass(frozen=True)
class GeneratedAnswer:
    """A prompt with its reference and the model's answer."""

    place: str
    prompt: str
    reference: str
    answer: str
    source: str = ""
    """Name of the set that the prompt is from, where there are several."""

    @property
    def f1(self) -> float:
        """Token F1 against the reference."""
        return text_overlap.token_f1(self.answer, self.reference)

    @property
    def rouge_l(self) -> float:
        """ROUGE-L against the reference."""
        return text_overlap.rouge_l(self.answer, self.reference)


class LikelihoodRows(Protocol):
    """Rows whose tokens have a likelihood."""

    @property
    def lengths(self) -> Indices:
        """Tokens of each row."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int) -> Row:
        """A row."""

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows `indices`, padded."""


def likelihood(
    model: nn.Module, head: Head, tokens: TokenizedSet, *, scoring: ModelResults | None = None
) -> Likelihood:
    """Loss and accuracy over every supervised token of `tokens`, each counted once.

    Args:
        scoring: Results of an earlier process, where this one may be stopped.
    """
    likelihood_by_row = row_likelihoods(model, head, tokens, scoring=scoring)
    by_source = {name: _whole(likelihood_by_row, own.tolist()) for name, own in named_sets.rows_by_set(tokens).items()}
    numbers = range(len(tokens))
    rows = SummedLosses(
        np.fromiter((likelihood_by_row[row][0] for row in numbers), np.float64, len(tokens)),
        np.fromiter((likelihood_by_row[row][2] for row in numbers), np.int64, len(tokens)),
    )
    return replace(_whole(likelihood_by_row, numbers), by_source=by_source, rows=rows)


def _whole(sums: Mapping[int, tuple[float, int, int]], rows: Iterable[int]) -> Likelihood:
    """That of some rows together."""
    losses, hits, counts = zip(*(sums[row] for row in rows), strict=True)
    return Likelihood(math.fsum(losses) / sum(counts), sum(hits) / sum(counts))


def row_likelihoods(
    model: nn.Module, head: Head, tokens: LikelihoodRows, *, scoring: ModelResults | None = None
) -> dict[int, tuple[float, int, int]]:
    """Summed loss in nats, tokens that the model finds most likely, and supervised tokens of each row, by its number.

    Args:
        scoring: Results of an earlier process, where this one may be stopped.
    """

    def compute(rows: Indices) -> list[tuple[float, int, int]]:
        loss_N, hit_N, row_N = _token_losses(model, head, tokens.batch(rows))
        # A sum for each row, in order: so that it does not depend on which rows share a micro-batch. By torch, as a
        # plan has tensors without numbers here.
        zero_B = torch.zeros(len(rows), dtype=torch.float64)
        parts = (loss_N, hit_N.double(), torch.ones_like(row_N).double())
        sums = ([sum_.item() for sum_ in zero_B.index_add(0, row_N, part_N)] for part_N in parts)
        return [(float(loss), int(hits), int(count)) for loss, hits, count in zip(*sums, strict=True)]

    rows = _first(tokens, len(tokens))
    content = (
        each
        for row in rows
        for each in (row.input_ids, row.supervised, np.asarray([row.source, row.digest], np.uint64))
    )
    return over_rows(model, tokens.lengths, compute, scoring=scoring, content=content)


def answers(
    model: nn.Module,
    tokens: TokenizedSet,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    max_new_tokens: int,
    scoring: ModelResults | None = None,
) -> list[GeneratedAnswer]:
    """Greedy answers to the last supervised turn of `count` examples of each set, evenly spaced over it.

    Examples without a prompt (plain text) have no answer to compare and are passed over.
    """
    sets = named_sets.rows_by_set(tokens) or {"": np.arange(len(tokens))}
    spaced = {int(index): name for name, own in sets.items() for index in own[evenly_spaced(len(own), count)]}
    rows = sorted(spaced)
    answer_by_row = answers_to(model, tokens, rows, tokenizer, max_new_tokens=max_new_tokens, scoring=scoring)
    return [replace(answer, source=spaced[row]) for row, answer in answer_by_row.items()]


def answers_to(
    model: nn.Module,
    tokens: TokenizedSet,
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    scoring: ModelResults | None = None,
) -> dict[int, GeneratedAnswer]:
    """Greedy answers to the last supervised turn of those of these rows that have a prompt, in their order."""
    turns = {row: turn for row in rows if (turn := _last_turn(tokens[row])).start > 1}
    prompts = [turn.input_ids[: turn.prompt] for turn in turns.values()]
    written = complete(
        model,
        prompts,
        tokenizer,
        stop=stop_tokens(tokenizer, tokens),
        max_new_tokens=max_new_tokens,
        scoring=scoring,
    )
    return {
        row: GeneratedAnswer(
            place=tokens.place(row),
            prompt=_text(tokenizer, turn.input_ids[: turn.prompt]),
            reference=_text(tokenizer, turn.input_ids[turn.start : turn.stop]).strip(),
            answer=answer,
        )
        for (row, turn), answer in zip(turns.items(), written, strict=True)
    }


def drawn_prompts(tokens: TokenizedSet, count: int, *, seed: int) -> list[int]:
    """Numbers of `count` rows that have a prompt, or of all that have one: the first of the order that `seed` draws."""
    order = np.random.default_rng(seed).permutation(len(tokens)) if count else ()
    return list(islice((int(row) for row in order if _last_turn(tokens[int(row)]).start > 1), count))


def summary(likelihood: Likelihood, answers: Sequence[GeneratedAnswer]) -> dict[str, float]:
    """The scores by name, as scores.json holds them, and those of each set; of answers only where there are any."""
    scores = likelihood.scores | answer_scores(answers)
    for name, own in likelihood.by_source.items():
        of_set = own.scores | answer_scores([answer for answer in answers if answer.source == name])
        scores |= {named_sets.titled(score, name): value for score, value in of_set.items()}
    return scores


def answer_scores(answers: Sequence[GeneratedAnswer]) -> dict[str, float]:
    """Mean F1 and ROUGE-L of answers with their 95 % intervals (bootstrap over answers); empty where there are none."""
    if not answers:
        return {}
    value_AS = np.asarray([(each.f1, each.rouge_l) for each in answers])
    return units.rounded(bootstrap.means(("f1", "rouge_l"), value_AS))


def write_predictions(path: Path, answers: Sequence[GeneratedAnswer], *, before: Mapping[str, str]) -> None:
    """Write a parquet file with a row for each answer.

    Args:
        before: Answers of the backbone before training, by place.
    """
    import pandas as pd

    rows = [
        {
            "row": answer.place,
            "prompt": answer.prompt,
            "reference": answer.reference,
            "before": before[answer.place],
            "after": answer.answer,
            "f1_before": text_overlap.token_f1(before[answer.place], answer.reference),
            "f1_after": answer.f1,
            "rouge_l_before": text_overlap.rouge_l(before[answer.place], answer.reference),
            "rouge_l_after": answer.rouge_l,
        }
        for answer in answers
    ]
    files.write_bytes(path, pd.DataFrame(rows).to_parquet())


def complete(
    model: nn.Module,
    prompts: Sequence[Indices],
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop: Sequence[int],
    max_new_tokens: int,
    scoring: ModelResults | None = None,
) -> list[str]:
    """Greedy continuations of prompts, or a decoder's answers to them, in their order; similar lengths go together."""
    device = next(model.parameters()).device
    encodes: bool = model.config.is_encoder_decoder  # type: ignore[union-attr, assignment]
    settings = generation_config(stop, max_new_tokens=max_new_tokens)

    def stopping() -> bool:
        return scoring is not None and scoring.store.stopping

    def compute(rows: Indices) -> list[str] | None:
        chosen = [prompts[row] for row in rows]
        inputs = encoder_inputs(chosen) if encodes else padded_on_the_left(chosen)
        on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
        output = generate(model, on_device, settings, halt=None if scoring is None else stopping)
        if stopping():
            return None  # they may be unfinished
        begin = 1 if encodes else inputs["input_ids"].shape[1]  # a decoder's own first token is its start token
        return [_text(tokenizer, ids).strip() for ids in output[:, begin:]]

    lengths = np.asarray([len(prompt) + max_new_tokens for prompt in prompts], dtype=np.int64)
    content = map(np.asarray, prompts)
    written = over_rows(model, lengths, compute, scoring=scoring, content=content)
    return [written[row] for row in range(len(prompts))]


def generation_config(stop: Sequence[int], *, max_new_tokens: int) -> GenerationConfig:
    """Greedy decoding that ends at any of the tokens `stop`."""
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop),
        pad_token_id=stop[0] if stop else 0,
    )


def stop_tokens(tokenizer: PreTrainedTokenizerBase, tokens: TokenizedSet) -> list[int]:
    """Tokens that end generation: end of sequence, and special tokens that end a supervised turn in `tokens`."""
    # Tokens added as special, such as a template's end of turn, are not among `all_special_ids`.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    stop_ids = {
        int(row.input_ids[turn.stop - 1]) for row in _first(tokens, 64) for turn in [_last_turn(row)] if turn.stop
    }
    if tokenizer.eos_token_id is not None:
        special.add(tokenizer.eos_token_id)
        stop_ids.add(tokenizer.eos_token_id)
    return sorted(stop_ids & special)


def _text(tokenizer: PreTrainedTokenizerBase, ids: Indices | Tensor) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class _Turn:
    input_ids: Indices
    prompt: int
    """Tokens of the prompt, with which the row begins."""
    start: int
    stop: int


def _last_turn(row: Row) -> _Turn:
    """The last contiguous supervised tokens of a row."""
    marked = np.flatnonzero(row.supervised)
    gaps = np.flatnonzero(np.diff(marked) > 1)
    start = int(marked[gaps[-1] + 1] if len(gaps) else marked[0])
    return _Turn(row.input_ids, row.source or start, start, int(marked[-1]) + 1)


def _first(tokens: LikelihoodRows, count: int) -> Iterator[Row]:
    return (tokens[index] for index in range(min(count, len(tokens))))


@torch.no_grad()
def _token_losses(model: nn.Module, head: Head, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Supervised tokens (N,): negative log-likelihood, whether the model finds it most likely, row in the batch."""
    positions_N, batch = batch.positions_N, batch.to(next(model.parameters()).device)
    hidden_BLD = head.hidden(model, batch.inputs)
    hidden_ND = hidden_BLD.flatten(0, 1)[batch.positions_N]
    loss_N, hit_N = losses.token_scores(hidden_ND, batch.labels_N, head.project, vocabulary=head.vocabulary)
    return loss_N.double().cpu(), hit_N.cpu(), positions_N // hidden_BLD.shape[1]
