"""Prompts as training examples, whose answers the model writes as it is when a step draws them.

What is written, scored and read is a function of (seed, step, prompt, answer) and the weights: a run that was stopped
goes on with the same bits, from the answers that its checkpoint holds or from new ones like them.

Legend: P prompts, G answers to each, S = P x G answers, T most tokens of an answer, N labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.data.batching import Indices, MicroBatch, Row, micro_batches
from workbench.data.text import generated_answers
from workbench.data.text.generated_answers import Floats, SampledAnswer
from workbench.data.text.preference_pairs import ANSWER, ROW, with_answers
from workbench.data.text.prompts import MixedPrompts
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.losses import advantages, policy_losses
from workbench.training import capacity
from workbench.training.preference_objective import dense
from workbench.training.reinforcement import rollout
from workbench.training.reinforcement.rollout import Group, Rollout

SEED = 7
"""Sets random numbers of answers apart from all others of a run."""


class SamplesAnswers(Protocol):
    """Writes answers to prompts from random numbers."""

    def begin(self) -> None:
        """A rollout begins: weights have changed since the last one."""

    def batches(self, prompts: Sequence[Indices], *, answers: int, tokens: int) -> list[Indices]:
        """Numbers of the prompts that are answered together."""

    def answer(self, prompts: Sequence[Indices], draws: Sequence[Floats]) -> list[list[Indices]]:
        """Answers to each prompt, as many as it has rows of random numbers (G, T)."""

    def scored(self, prompts: Sequence[Indices], draws: Sequence[Floats]) -> list[list[SampledAnswer]]:
        """The same answers, with the log-probabilities that they were drawn by."""


class Judge(Protocol):
    """Tells how good answers to the rows of a table are."""

    def named(self, rows: Sequence[int], answers: Sequence[Indices]) -> dict[str, Floats]:
        """Rewards of answers by their names, from the number of each one's row and its tokens."""

    def total(self, named: Mapping[str, Floats]) -> Floats:
        """The weighted sum of rewards."""


@dataclass(frozen=True)
class LogProbReader:
    """Reads log-probabilities of answers, without gradients."""

    log_probs: Callable[[MicroBatch], Tensor]
    """log p (N,) of the predicted tokens of a micro-batch on the device."""
    active: Callable[[], AbstractContextManager[None]]
    """Inside, the model is the one that is asked, in evaluation mode."""
    device: torch.device
    width: int
    """Hidden size of the model."""

    @property
    def tokens(self) -> int:
        """Padded tokens worth trying in one pass."""
        return capacity.forward_tokens(self.device, width=self.width)


class RolloutRows:
    """Answers to prompts, as examples: each answer is one, or the best and the worst one to a prompt together.

    Of equal answers to a prompt the first alone is an example, which counts for all of them.

    Nothing writes them here: they are as long as they may be.

    Args:
        prompts: Rows of a prompt and the token that ends an answer; of several sources, as an epoch draws them.
    """

    def __init__(self, prompts: TokenizedSet | MixedPrompts, config: ReinforceConfig) -> None:
        self._drawn = prompts
        self.prompts = prompts = prompts.numbered if isinstance(prompts, MixedPrompts) else prompts
        """The prompt of each number that a draw may take."""
        self.config = config
        self.now = rollout.blank(config.max_new_tokens)
        """The answers of the present step."""
        self.figures: dict[str, float] = {}
        """Figures of these answers for metrics.jsonl."""
        longest = prompts.lengths - 1 + config.max_new_tokens
        self._longest = longest * 2 if config.pairs else np.repeat(longest, config.answers)
        self._lengths, self._supervised = self._longest, np.ones(len(self._longest), dtype=np.int64)
        self._place: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._drawn)

    @property
    def lengths(self) -> Indices:
        """Tokens of each example: those of the present step as they are, and the most that others take."""
        return self._lengths

    @property
    def longest_sequences(self) -> Indices:
        """The most tokens of an answer and its prompt, of each example."""
        return self._longest // 2 if self.config.pairs else self._longest

    @property
    def supervised(self) -> Indices:
        """Weight of each example in the mean loss."""
        return self._supervised

    @property
    def difficulty(self) -> None:
        """Nobody has said how hard a prompt is."""
        return None

    def place(self, index: int) -> str:
        """File and row of the prompt of example `index`."""
        return self.prompts.place(index if self.config.pairs else index // self.config.answers)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """The examples of the answers to the prompts that some draws take."""
        return self._examples(self._drawn.sample(draws, epoch=epoch))

    @property
    def _distinct(self) -> Indices:
        """The examples of the present answers."""
        examples = self._examples(self.now.prompts_P.numpy())
        return examples if self.config.pairs else examples[self.now.copies_S.numpy() > 0]

    def _examples(self, prompts: Indices) -> Indices:
        """All examples of prompts."""
        if self.config.pairs:
            return prompts
        each = self.config.answers
        examples: Indices = (prompts[:, None] * each + np.arange(each)).ravel()
        return examples

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Self:
        """The examples themselves, whose answers `sample` has replaced."""
        return self

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows of the examples `indices`, padded, with labels (N, 4) as those of judged answers.

        The number of an answer is its place in the rollout. Before a step is drawn, answers are as long as they may be.
        """
        slots = np.asarray([slot for index in indices for slot in self._slots(int(index))], dtype=np.int64)
        each = len(slots) // len(indices)
        prompts = np.repeat(indices if self.config.pairs else indices // self.config.answers, each)
        rows = [self._row(int(prompt), int(slot)) for prompt, slot in zip(prompts, slots, strict=True)]
        return replace(
            with_answers(self.prompts.collate(rows, epoch=epoch), slots),
            rows_B=indices,
            sequences=each,
            row_tokens=np.asarray([len(row.input_ids) for row in rows]),
        )

    def _use(self, rollout: Rollout) -> None:
        """Make these the answers of the present step."""
        self.now = rollout
        if int(rollout.epoch) < 0:  # of no step
            return
        prompts = rollout.prompts_P.numpy()
        self._place = {int(prompt): number for number, prompt in enumerate(prompts)}
        asked = self.prompts.lengths[prompts] - 1
        lengths_S = np.repeat(asked, rollout.each) + rollout.counts_S.numpy()
        self._lengths, self._supervised = self._longest.copy(), np.ones(len(self._longest), dtype=np.int64)
        if self.config.pairs:
            self._lengths[prompts] = lengths_S[self._pairs(rollout)].sum(1)
        else:
            examples = self._examples(prompts)
            self._lengths[examples] = lengths_S
            self._supervised[examples] = self._weights(rollout) * rollout.copies_S.numpy()
        self.figures = rollout.figures()

    def _weights(self, rollout: Rollout) -> Indices:
        """Weight of each answer (S,) in the mean."""
        counted_S = rollout.counts_S * ~rollout.cut_S if self.config.drop_cut else rollout.counts_S
        weight_S: Indices = policy_losses.weights(counted_S, self.config.settings.normalise).numpy()
        return weight_S if weight_S.any() else np.ones_like(weight_S)

    def _pairs(self, rollout: Rollout) -> Indices:
        """Places of the best and the worst answer to each prompt (P, 2), the first of equals."""
        total_PG = rollout.total_PG
        ends_P2 = torch.stack([total_PG.argmax(1), total_PG.argmin(1)], dim=1)
        pairs: Indices = (torch.arange(len(total_PG))[:, None] * rollout.each + ends_P2).numpy()
        return pairs

    def _slots(self, index: int) -> list[int]:
        """Places in the rollout of the answers of an example."""
        each = 2 if self.config.pairs else 1
        if int(self.now.epoch) < 0:
            return [0] * each
        if self.config.pairs:
            slots: list[int] = self._pairs(self.now)[self._place[index]].tolist()
            return slots
        prompt, answer = divmod(index, self.config.answers)
        return [self._place[prompt] * self.config.answers + answer]

    def _row(self, prompt: int, slot: int) -> Row:
        row, answer = self.prompts[prompt], self.now.answer(slot)
        asked = row.input_ids[:-1]
        supervised = np.arange(len(asked) + len(answer)) >= len(asked)
        return row._replace(input_ids=np.concatenate([asked, answer]), supervised=supervised)


class Rollouts(RolloutRows):
    """Answers that a model writes where a step draws their prompts.

    Args:
        prompts: As of `RolloutRows`.
        sampler: Draws the answers; `stop` are the tokens that end one.
        own: Reads their log-probabilities before the first update.
        reference: Reads those of the reference.
        seed: Of the run.
    """

    def __init__(
        self,
        prompts: TokenizedSet | MixedPrompts,
        config: ReinforceConfig,
        sampler: SamplesAnswers,
        judge: Judge,
        *,
        own: LogProbReader,
        reference: LogProbReader,
        seed: int,
        stop: Sequence[int],
    ) -> None:
        super().__init__(prompts, config)
        self._sampler, self._judge, self._own, self._reference = sampler, judge, own, reference
        self._seed, self._stop = seed, stop

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """The examples of the answers to the prompts that some draws take, which are written where the step is new."""
        prompts = self._drawn.sample(draws, epoch=epoch)
        if not self.now.of(prompts, epoch):
            self._use(self._written(prompts, epoch))
        if not self._complete:
            self._use(self._read(self.now))
        return self._distinct

    @property
    def _complete(self) -> bool:
        """Whether the present answers were read."""
        return (self.now.reference_ST is not None or not self.config.refers) and (
            self.now.advantage_ST is not None or self.config.pairs
        )

    def on_gradients(self) -> None:
        """Nothing: gradients stay as they are."""

    def after_step(self, step: int) -> None:
        """Nothing: answers stay what they are until a step has other prompts."""

    def state(self) -> dict[str, Tensor]:
        """The answers of the present step, for a checkpoint."""
        return self.now.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on with these answers."""
        self._use(Rollout.from_state(state))

    def _written(self, draws: Indices, epoch: int) -> Rollout:
        """Answers to the prompts of a step; prompts whose answers have one reward are replaced, a few times."""
        self._sampler.begin()
        groups = self._groups(draws, key=[epoch, int(draws[0]), 0])
        replaced = 0
        for attempt in range(1, self.config.settings.resample + 1):
            dull = [number for number, group in enumerate(groups) if group.dull]
            others = self._others([group.prompt for group in groups], dull, key=[epoch, int(draws[0]), attempt])
            if not others:
                break
            fresh = self._groups(np.asarray(list(others.values())), key=[epoch, int(draws[0]), attempt])
            for number, group in zip(others, fresh, strict=True):
                groups[number] = group
            replaced += len(fresh)
        limit = self.config.max_new_tokens
        return rollout.rolled_out(groups, draws, epoch, limit=limit, stop=self._stop, replaced=replaced)

    def _others(self, taken: Sequence[int], dull: Sequence[int], *, key: Sequence[int]) -> dict[int, int]:
        """In place of each of the `dull` ones of the step's prompts another one of its source, as far as there are any.

        Args:
            taken: The step's prompts.
            dull: Places among them.
        """
        count, source_N = len(np.unique(self.prompts.rows)), self.prompts.source_N
        order = np.random.default_rng([self._seed, SEED, *key]).permutation(count)
        free = order[~np.isin(order, np.asarray(taken) % count)]
        of_source = {source: iter(free[source_N[free] == source].tolist()) for source in np.unique(source_N[free])}
        others = {place: next(of_source.get(source_N[taken[place]], iter(())), None) for place in dull}
        return {place: other for place, other in others.items() if other is not None}

    def _groups(self, prompts: Indices, *, key: Sequence[int]) -> list[Group]:
        """Answers to prompts, with their rewards."""
        each, limit = self.config.answers, self.config.max_new_tokens
        asked = [self.prompts[int(prompt)].input_ids[:-1] for prompt in prompts]
        draws = [
            generated_answers.sampling_numbers([self._seed, SEED, *key, int(prompt)], answers=each, tokens=limit)
            for prompt in prompts
        ]
        written: dict[int, list[Indices]] = {}
        sampled: dict[int, list[Floats]] = {}
        for batch in self._sampler.batches(asked, answers=each, tokens=limit):
            of_batch, draws_of_batch = [asked[row] for row in batch], [draws[row] for row in batch]
            if not self.config.corrects:
                written.update(zip(batch.tolist(), self._sampler.answer(of_batch, draws_of_batch), strict=True))
                continue
            for row, group in zip(batch.tolist(), self._sampler.scored(of_batch, draws_of_batch), strict=True):
                written[row], sampled[row] = [one.ids for one in group], [one.log_probs for one in group]
        answers = [answer for row in range(len(prompts)) for answer in written[row]]
        named = self._judge.named(np.repeat(self.prompts.rows[prompts], each).tolist(), answers)
        total = self._judge.total(named) + self._penalty(answers)
        return [
            Group(
                int(prompt),
                written[row],
                {name: values[row * each : (row + 1) * each] for name, values in named.items()},
                total[row * each : (row + 1) * each],
                sampled.get(row),
            )
            for row, prompt in enumerate(prompts)
        ]

    def _penalty(self, answers: Sequence[Indices]) -> Floats:
        """Reward (S,) that long answers lose, <= 0."""
        tokens = torch.tensor([len(answer) for answer in answers])
        if not self.config.buffer:
            return np.zeros(len(tokens))
        penalty_S: Floats = advantages.overlong(
            tokens, limit=self.config.max_new_tokens, buffer=self.config.buffer
        ).numpy()
        return penalty_S

    def _read(self, rollout: Rollout) -> Rollout:
        """The answers with their log-probabilities and advantages."""
        config = self.config
        old_ST = self._log_probs(self._own) if config.remembers else None
        reference_ST = self._log_probs(self._reference) if config.refers else None
        read = replace(rollout, old_ST=old_ST, reference_ST=reference_ST)
        return replace(read, advantage_ST=None if config.pairs else advantage(read, config))

    def _log_probs(self, reader: LogProbReader) -> Tensor:
        """Log-probabilities (S, T) of the present answers; 0 where there is none or nobody needs it."""
        limit = self.config.max_new_tokens
        found_ST = torch.zeros(len(self.now.counts_S), limit)
        with torch.no_grad(), reader.active():
            for indices in micro_batches(self._distinct, self.lengths, tokens=reader.tokens):
                batch = self.batch(indices).to(reader.device)
                labels_N = batch.labels_N
                rows = len(indices) * batch.sequences
                log_p_BT = dense(reader.log_probs(batch), labels_N, rows=rows, longest=limit)
                slots = torch.zeros(rows, dtype=torch.int64, device=labels_N.device)
                slots = slots.scatter(0, labels_N[:, ROW], labels_N[:, ANSWER])
                found_ST[slots.cpu()] = log_p_BT.float().cpu()
        return found_ST if self.config.pairs else found_ST[self.now.first_S]


def advantage(rollout: Rollout, config: ReinforceConfig) -> Tensor:
    """Advantage (S, T) of each token, float64; the divergence from the reference taken off where it is a reward."""
    settings, mask_ST = config.settings, rollout.mask_ST
    loss_ST = torch.zeros(mask_ST.shape, dtype=torch.float64)
    if settings.kl == "reward" and settings.beta:
        assert rollout.old_ST is not None and rollout.reference_ST is not None
        loss_ST = settings.beta * (rollout.old_ST.double() - rollout.reference_ST.double()).masked_fill(~mask_ST, 0)
    if settings.baseline == "batch":
        return advantages.whitened(rollout.total_S[:, None] - advantages.to_come(loss_ST, mask_ST), mask_ST)
    reward_PG = (rollout.total_S - loss_ST.sum(1)).view_as(rollout.total_PG)
    if settings.baseline == "leave_one_out":
        value_PG = advantages.leave_one_out(reward_PG)
    else:
        value_PG = advantages.of_group(reward_PG, scaled=settings.baseline == "group_scaled")
    return value_PG.reshape(-1, 1).expand_as(mask_ST).contiguous()
