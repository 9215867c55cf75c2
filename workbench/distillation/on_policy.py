"""Answers that the student writes itself while it trains, for a teacher to judge (GKD, Agarwal et al. 2024).

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from peft import PeftModel, PeftType
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.generic import ModelOutput

from workbench import evaluation
from workbench.config import RunConfig
from workbench.config.sections.distill_config import OnPolicyConfig
from workbench.data.batching import Examples, Indices, MicroBatch, Row, micro_batches
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.evaluation import generation
from workbench.losses.next_token import NO_LABEL
from workbench.runs.ranks import Ranks
from workbench.training import preflight
from workbench.training.capacity import FORWARD_TOKENS as TOKENS

AnswerWriter = Callable[..., list[Indices]]
"""From prompts and a seed for each to their continuations, up to and with a token of `stop`; seeds decide alone."""


class OnPolicy:
    """Examples, a share of which have an answer that the student wrote at the time when the step sampled them.

    Which rows those are, and the dice they are written with, is a function of (seed, epoch, row). An answer has no
    labels: there is no right one. The last answer of a conversation is rewritten, and those before it carry no loss.

    Args:
        train: Rows of a causal model.
        write: Writes the answers.
        seed: Of the run.
        stop: Tokens that end an answer.
        drawn: Says which of the rows an epoch draws, such as a mixture of several sources; None: each of them once.
    """

    def __init__(
        self,
        train: TokenizedSet,
        write: AnswerWriter,
        config: OnPolicyConfig,
        *,
        seed: int,
        stop: Sequence[int],
        drawn: Examples | None = None,
    ) -> None:
        self.train, self.write, self.config = train, write, config
        self._drawn: Examples = train if drawn is None else drawn
        self.seed, self.stop = seed, stop
        self._prompts = prompt_lengths(train) if config.share else np.zeros(len(train), dtype=np.int64)
        self._longest = longest(train, self._prompts, config)
        self._step: tuple[bytes, int] | None = None
        self._written: dict[int, Indices] = {}
        self._lengths, self._supervised = self._longest, train.supervised

    def __len__(self) -> int:
        return len(self._drawn)

    @property
    def lengths(self) -> Indices:
        """Tokens of each example: exact for the step that was sampled last, the maximum for all others."""
        return self._lengths

    @property
    def supervised(self) -> Indices:
        """Predicted tokens of each example, in the step that was sampled last."""
        return self._supervised

    @property
    def difficulty(self) -> None:
        """None: answers that are replaced have no known difficulty."""

    def place(self, index: int) -> str:
        return self.train.place(index)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """The examples of some samples; for a new step, answers are written."""
        rows = self._drawn.sample(draws, epoch=epoch)
        step = (rows.tobytes(), epoch)
        if step != self._step:
            # The student's answers for some of these rows, without those that came out empty.
            dice = {int(row): np.random.default_rng([self.seed, 5, epoch, row]) for row in rows if self._prompts[row]}
            chosen = [row for row, die in dice.items() if die.random() < self.config.share]
            prompts = [self.train[row].input_ids[: self._prompts[row]] for row in chosen]
            seeds = [int(dice[row].integers(2**63)) for row in chosen]
            written = self.write(prompts, seeds, stop=self.stop) if chosen else []
            self._written = {row: answer for row, answer in zip(chosen, written, strict=True) if len(answer)}
            self._lengths, self._supervised = self._longest.copy(), self.train.supervised.copy()
            self._lengths[rows] = self.train.lengths[rows]
            for index, answer in self._written.items():
                self._lengths[index] = self._prompts[index] + len(answer)
                self._supervised[index] = len(answer)
            self._step = step
        return rows

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> OnPolicy:
        """The examples themselves, whose answers `sample` has replaced."""
        return self

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The examples `indices`, padded. Before a step is sampled they are as long as they may become."""
        rows = ((self.written(int(index)), int(index)) for index in indices)
        batch = self.train.collate([self.train[index] if row is None else row for row, index in rows], epoch=epoch)
        written_B = torch.tensor([int(index) in self._written for index in indices])
        row_N = batch.positions_N // batch.inputs["input_ids"].shape[1]
        labels_N = batch.labels_N.masked_fill(written_B[row_N], NO_LABEL)
        return replace(batch, labels_N=labels_N, rows_B=indices)

    def written(self, index: int) -> Row | None:
        """The row with the student's own answer, which alone is predicted; None where the row is as it was."""
        row = self.train[index]
        answer = self._written.get(index)
        if answer is None:
            if self._step is not None or self._longest[index] == len(row.input_ids):
                return None
            # A trial of what fits into memory, which must not be shorter than what comes.
            answer = np.zeros(self.config.max_new_tokens, dtype=np.int64)
        prompt = row.input_ids[: self._prompts[index]]
        supervised = np.arange(len(prompt) + len(answer)) >= len(prompt)
        return row._replace(input_ids=np.concatenate([prompt, answer]), supervised=supervised)


def require_causal(hub: PretrainedConfig) -> None:
    """Raise ConfigError where a student of the architecture `hub` cannot write while it trains."""
    if hub.is_encoder_decoder:
        raise ConfigError(
            f"distill.on_policy.share: only a causal student writes while it trains, and {hub.model_type} is an "
            "encoder-decoder. Leave distill.on_policy out, or take a causal backbone."
        )


def require_room(config: RunConfig, train: TokenizedSet, model: PreTrainedModel) -> None:
    """Refuse answers that no row has a prompt for, or that are longer than the model or the memory budget allows.
    Raises ConfigError: says what to write instead. `config`: with its section `distill`. `model`: the student, with
    weights or without."""
    settings = config.distill.on_policy
    if not settings.share:
        return
    prompts = prompt_lengths(train)
    if not prompts.any():
        raise ConfigError(
            f"distill.on_policy.share={settings.share:g}: no row of {train.source} has a prompt to write an answer to. "
            "Leave distill.on_policy out, or data.loss_on=all where it is there."
        )
    lengths = longest(train, prompts, settings)
    row, most = int(lengths.argmax()), int(lengths.max())
    limit, budget = preflight.longest_sequence(model.config), config.batch.tokens_per_device
    room = most if limit is None else limit - config.adapter.extra_positions(model)
    where = (
        f"distill.on_policy.max_new_tokens={settings.max_new_tokens}: with an answer of this length {train.place(row)}"
    )
    if most > room:
        raise ConfigError(
            f"{where} has {most} tokens, but {config.model.id} has room for {room}. Lower it by {most - room}, or "
            "write a smaller data.max_tokens, which cuts longer rows."
        )
    if budget != "auto" and budget < most:
        raise ConfigError(
            f"{where} has {most} tokens, above batch.tokens_per_device={budget}. Raise that to {most}, or write auto."
        )


def longest(train: TokenizedSet, prompts: Indices, config: OnPolicyConfig) -> Indices:
    """Most tokens of each example: its own, or those of its prompt and the longest answer."""
    if not config.share:
        return train.lengths
    most: Indices = np.maximum(train.lengths, np.where(prompts > 0, prompts + config.max_new_tokens, 0))
    return most


def prompt_lengths(train: TokenizedSet) -> Indices:
    """Tokens before the last run of supervised ones, of each example; 0: there is no prompt."""
    # One array of all rows: reading them one by one takes ten times as long.
    rows = train.table.data.column("supervised").combine_chunks()
    stops = np.cumsum(rows.value_lengths().to_numpy())
    marks = np.split(rows.flatten().to_numpy(zero_copy_only=False), stops[:-1])
    starts = []
    for row in train.rows:
        marked = np.flatnonzero(marks[row])
        gaps = np.flatnonzero(np.diff(marked) > 1)
        starts.append(int(marked[gaps[-1] + 1] if len(gaps) else marked[0]))
    return np.asarray(starts, dtype=np.int64)


def writer(model: nn.Module, tokenizer: PreTrainedTokenizerBase, config: OnPolicyConfig) -> AnswerWriter:
    """`model`, a causal one, as the writer of its own answers: sampled from its probabilities as they are by then.

    A sample is the largest of logits / temperature with noise on each (Gumbel 1954), so that an answer is a function of
    the weights, the prompt and the seed. Ids that the tokenizer does not know are never sampled.
    """
    backbone: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    # Beside a prefix, `generate` may take padded rows one after the other, which would share the noise of the first.
    alone = isinstance(model, PeftModel) and model.active_peft_config.peft_type == PeftType.PREFIX_TUNING

    @torch.no_grad()
    def write(prompts: Sequence[Indices], seeds: Sequence[int], *, stop: Sequence[int]) -> list[Indices]:
        settings = evaluation.generation_config(stop, max_new_tokens=config.max_new_tokens)
        settings.use_cache = True
        lengths = np.asarray([len(prompt) + config.max_new_tokens for prompt in prompts], dtype=np.int64)
        written: dict[int, Indices] = {}
        with generation.plain(model, backbone):
            for indices in micro_batches(np.arange(len(prompts)), lengths, tokens=1 if alone else TOKENS):
                inputs = generation.padded_on_the_left([prompts[index] for index in indices], device=backbone.device)
                with _sampling(backbone, [seeds[index] for index in indices], config.temperature, known=len(tokenizer)):
                    output = evaluation.generate(model, inputs, settings)
                answers = output[:, inputs["input_ids"].shape[1] :].cpu().numpy()
                for index, ids in zip(indices, answers, strict=True):
                    written[int(index)] = generation.answer_of(ids, stop)
        return [written[index] for index in range(len(prompts))]

    return write


def shared(write: AnswerWriter, ranks: Ranks) -> AnswerWriter:
    """Writes as `write` does, in each of several processes a part of the answers; all get all of them."""

    def written(prompts: Sequence[Indices], seeds: Sequence[int], *, stop: Sequence[int]) -> list[Indices]:
        own = ranks.share(prompts)
        return ranks.collected(write(own, ranks.share(seeds), stop=stop) if own else [])

    return written


@contextmanager
def _sampling(backbone: nn.Module, seeds: Sequence[int], temperature: float, *, known: int) -> Iterator[None]:
    """Inside, the likeliest token (of the `known` ones) after each row is a sample from the row's distribution.

    Each call of `backbone` gives the noisy logits (B, 1, V) of its last position, with dice of each row's own.
    """
    dice: list[torch.Generator] = []

    def disturb(_: nn.Module, __: tuple[Any, ...], output: ModelOutput) -> ModelOutput:
        logits_BV: Tensor = output["logits"][:, -1].float() / temperature
        if not dice:
            dice.extend(torch.Generator(logits_BV.device).manual_seed(seed) for seed in seeds)
        # -log of an exponential number is a Gumbel one.
        waits_BV = torch.full_like(logits_BV, torch.inf)
        for waits_V, die in zip(waits_BV[:, :known], dice, strict=True):
            waits_V.exponential_(generator=die)
        output["logits"] = (logits_BV - waits_BV.log())[:, None]
        return output

    handle = backbone.register_forward_hook(disturb)
    try:
        yield
    finally:
        handle.remove()
