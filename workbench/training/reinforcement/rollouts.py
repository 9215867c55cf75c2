"""Prompts as training examples, whose answers the model writes, as it is, when a step draws them.

What is written, scored and read is a function of (seed, step, prompt, answer) and the weights: a stopped run goes on
with the same bits, from the answers in its checkpoint or from new ones that are equal.

Legend: P prompts, G answers to each, S = P x G answers, T most tokens of an answer, N labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.data.batching import Indices, MicroBatch, Row, micro_batches, padded
from workbench.data.text import generated_answers
from workbench.data.text.generated_answers import Floats, SampledAnswer
from workbench.data.text.preference_pairs import ANSWER, ROW, with_answers
from workbench.data.text.prompts import MixedPrompts
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.losses import policy_losses
from workbench.training import capacity
from workbench.training.checkpoints import Checkpointed
from workbench.training.preference_objective import dense

_REWARD = "reward["


@dataclass(frozen=True)
class Group:
    """The answers to one prompt (G)."""

    prompt: int
    """Number of the prompt in the data."""
    answers: Sequence[Indices]
    rewards: Mapping[str, Floats]
    """Rewards of each answer by their names, without weights."""
    total: Floats
    """Their weighted sum, minus the penalty for long answers."""
    sampled: Sequence[Floats] | None = None
    """Log-probabilities with which the tokens of each answer were sampled; None: not recorded."""
    dull: bool = False
    """Whether all answers have the same reward before that penalty, so that nothing can be learnt."""


@dataclass(frozen=True)
class Rollout:
    """Answers of a step, those to one prompt one after another."""

    epoch: Tensor
    """The pass over the prompts, (1,)."""
    draws_P: Tensor
    """Numbers of the prompts of the step."""
    prompts_P: Tensor
    """Numbers of the prompts that were answered, some of which may replace others."""
    tokens_ST: Tensor
    """Ids of the answers, padded with zeros."""
    counts_S: Tensor
    """Tokens of each."""
    cut_S: Tensor
    """Whether each reached its limit before it ended."""
    total_S: Tensor
    """Total reward, float64."""
    first_S: Tensor
    """The first answer to the same prompt with the same tokens and reward, which is computed for all of them."""
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """Rewards (S,) by their names."""
    replaced: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """Number of groups without signal that were replaced, (1,)."""
    old_ST: Tensor | None = None
    """Log-probabilities before the first update."""
    sampled_ST: Tensor | None = None
    """Log-probabilities with which the tokens were sampled, as the sampler reports them."""
    reference_ST: Tensor | None = None
    """Log-probabilities by the reference."""
    advantage_ST: Tensor | None = None

    @property
    def each(self) -> int:
        """Answers to a prompt, G."""
        return len(self.counts_S) // len(self.prompts_P)

    @property
    def copies_S(self) -> Tensor:
        """How many equal answers each stands for: 0 where an earlier one stands for it."""
        return self.first_S.bincount(minlength=len(self.first_S))

    @property
    def mask_ST(self) -> Tensor:
        """Which tokens there are."""
        return torch.arange(self.tokens_ST.shape[1], device=self.counts_S.device) < self.counts_S[:, None]

    @property
    def total_PG(self) -> Tensor:
        """Rewards by prompt."""
        return self.total_S.view(len(self.prompts_P), -1)

    def answer(self, slot: int) -> Indices:
        """Ids of an answer."""
        ids: Indices = self.tokens_ST[slot, : int(self.counts_S[slot])].numpy().astype(np.int64)
        return ids

    def of(self, draws: Indices, epoch: int) -> bool:
        """Whether it has the answers to these prompts in this pass."""
        return int(self.epoch) == epoch and np.array_equal(self.draws_P.numpy(), draws)

    def to(self, device: torch.device) -> Rollout:
        """Copy to `device`."""
        moved: dict[str, Any] = {name: each.to(device) for name, each in vars(self).items() if torch.is_tensor(each)}
        return replace(self, **moved)

    def state(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "rewards"}
        named = {f"{_REWARD}{name}]": each for name, each in self.rewards.items()}
        return {name: each for name, each in own.items() if each is not None} | named

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Rollout:
        """The rollout whose `state` this is."""
        named = {name[len(_REWARD) : -1]: each for name, each in state.items() if name.startswith(_REWARD)}
        return cls(**{name: each for name, each in state.items() if not name.startswith(_REWARD)}, rewards=named)

    def figures(self) -> dict[str, float]:
        """Figures for metrics.jsonl: rewards, lengths, and signs of reward hacking."""
        dull_P = policy_losses.all_rewards_equal(self.total_PG)
        answers = [self.answer(slot) for slot in range(len(self.counts_S))]
        rewards = {f"reward[{name}]": float(each.mean()) for name, each in self.rewards.items()}
        return {
            "reward[mean]": float(self.total_S.mean()),
            "reward[spread]": float(self.total_S.std(correction=0)),
            **(rewards if len(rewards) > 1 else {}),
            "answers[tokens]": float(self.counts_S.double().mean()),
            "answers[cut]": float(self.cut_S.double().mean()),
            "answers[repetition]": float(np.mean([generated_answers.repeated(each.tolist()) for each in answers])),
            "answers[no signal]": float(dull_P.double().mean()),
            **({"answers[replaced]": int(self.replaced) / len(self.prompts_P)} if int(self.replaced) else {}),
        }


def rolled_out(
    groups: Sequence[Group], draws: Indices, epoch: int, *, limit: int, stop: Sequence[int], replaced: int
) -> Rollout:
    """The groups of a step as tensors.

    Args:
        draws: Numbers of the prompts of the step (P,).
        limit: T.
        stop: Tokens that end an answer.
        replaced: Number of groups without signal that were replaced.
    """
    answers = [each for group in groups for each in group.answers]
    ids = padded([*answers, np.zeros(limit, dtype=np.int64)])[:-1]
    counts = torch.tensor([len(each) for each in answers])
    names = groups[0].rewards
    totals = np.concatenate([group.total for group in groups])
    first: dict[tuple[int, bytes, float], int] = {}
    each = len(answers) // len(groups)
    keys = [(slot // each, own.tobytes(), float(totals[slot])) for slot, own in enumerate(ids)]
    sampled = [np.pad(own, (0, limit - len(own))) for group in groups for own in group.sampled or ()]
    return Rollout(
        epoch=torch.tensor([epoch]),
        draws_P=torch.from_numpy(np.array(draws, dtype=np.int64)),
        prompts_P=torch.tensor([group.prompt for group in groups]),
        tokens_ST=torch.from_numpy(ids),
        counts_S=counts,
        cut_S=torch.tensor([each[-1] not in stop for each in answers]),
        total_S=torch.from_numpy(totals),
        first_S=torch.tensor([first.setdefault(key, slot) for slot, key in enumerate(keys)]),
        rewards={name: torch.from_numpy(np.concatenate([group.rewards[name] for group in groups])) for name in names},
        replaced=torch.tensor([replaced]),
        sampled_ST=torch.tensor(np.stack(sampled), dtype=torch.float32) if sampled else None,
    )


def blank(limit: int) -> Rollout:
    """A rollout of no step, whose one answer is as long as any can be, to measure memory."""
    group = Group(-1, [np.zeros(limit, dtype=np.int64)], {}, np.zeros(1))
    zeros = torch.zeros(1, limit)
    trial_rollout = rolled_out([group], np.asarray([-1]), -1, limit=limit, stop=(), replaced=0)
    return replace(trial_rollout, old_ST=zeros, sampled_ST=zeros, reference_ST=zeros, advantage_ST=zeros.double())


SEED = 7
"""Separates the random numbers of answers from all others of a run."""


class SamplesAnswers(Protocol):
    """Writes answers to prompts from random numbers."""

    def begin(self) -> None:
        """Called before a rollout: weights have changed since the last one."""

    def batches(self, prompts: Sequence[Indices], *, answers: int, tokens: int) -> list[Indices]:
        """Numbers of the prompts that are answered together."""

    def answer(self, prompts: Sequence[Indices], draws: Sequence[Floats]) -> list[list[Indices]]:
        """Answers to each prompt, one for each row of its random numbers (G, T)."""

    def scored(self, prompts: Sequence[Indices], draws: Sequence[Floats]) -> list[list[SampledAnswer]]:
        """The same answers, with the log-probabilities with which they were sampled."""


class Judge(Protocol):
    """Rewards answers to the rows of a table."""

    def named(self, rows: Sequence[int], answers: Sequence[Indices]) -> dict[str, Floats]:
        """Rewards of answers by their names, from each answer's row number and tokens."""

    def total(self, named: Mapping[str, Floats]) -> Floats:
        """The weighted sum of rewards."""


@dataclass(frozen=True)
class LogProbReader:
    """Reads log-probabilities of answers, without gradients."""

    log_probs: Callable[[MicroBatch], Tensor]
    """log p (N,) of the predicted tokens of a micro-batch on the device."""
    active: Callable[[], AbstractContextManager[None]]
    """Inside, the model has the values to read with, in evaluation mode."""
    device: torch.device
    width: int
    """Hidden size of the model."""

    @property
    def tokens(self) -> int:
        """Padded tokens worth trying in one pass."""
        return capacity.forward_tokens(self.device, width=self.width)


class RolloutRows:
    """Answers to prompts as examples: each answer is one, or the best and the worst answer to a prompt together.

    Of equal answers to a prompt only the first is an example, which counts for all of them. Here nothing writes
    answers: they are as long as they may be. `Rollouts` does.

    Args:
        prompts: Rows of a prompt and the token that ends an answer; of several sources, as an epoch mixes them.
    """

    def __init__(self, prompts: TokenizedSet | MixedPrompts, config: ReinforceConfig) -> None:
        self._drawn = prompts
        self.prompts = prompts = prompts.numbered if isinstance(prompts, MixedPrompts) else prompts
        """The prompt of each number."""
        self.config = config
        self.now = blank(config.max_new_tokens)
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
        """Tokens of each example: for the present step as they are, for others the most."""
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
        """Prompts have no rated difficulty."""
        return None

    def place(self, index: int) -> str:
        """File and row of the prompt of example `index`."""
        return self.prompts.place(index if self.config.pairs else index // self.config.answers)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """The examples of the answers to the prompts of some draws."""
        return self._examples(self._drawn.sample(draws, epoch=epoch))

    @property
    def _distinct(self) -> Indices:
        examples = self._examples(self.now.prompts_P.numpy())
        return examples if self.config.pairs else examples[self.now.copies_S.numpy() > 0]

    def _examples(self, prompts: Indices) -> Indices:
        if self.config.pairs:
            return prompts
        each = self.config.answers
        examples: Indices = (prompts[:, None] * each + np.arange(each)).ravel()
        return examples

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Self:
        """The examples themselves, whose answers `sample` has replaced."""
        return self

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows of the examples `indices`, padded, with labels (N, 4) as those of preference pairs.

        The number of an answer is its place in the rollout. Before the first step, answers are as long as they may be.
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
            counted_S = rollout.counts_S * ~rollout.cut_S if self.config.drop_cut else rollout.counts_S
            weight_S: Indices = policy_losses.weights(counted_S, self.config.settings.normalise).numpy()
            weight_S = weight_S if weight_S.any() else np.ones_like(weight_S)
            self._supervised[examples] = weight_S * rollout.copies_S.numpy()
        self.figures = rollout.figures()

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


class Rollouts(RolloutRows, Checkpointed):
    """Answers that a model writes when a step draws their prompts.

    Args:
        prompts: See `RolloutRows`.
        sampler: Writes the answers; `stop` are the tokens that end one.
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
        """The examples of the answers to the prompts of some draws, which are written where the step is new."""
        prompts = self._drawn.sample(draws, epoch=epoch)
        if not self.now.of(prompts, epoch):
            self._use(self._written(prompts, epoch))
        unread = self.now.reference_ST is None and self.config.refers
        if unread or (self.now.advantage_ST is None and not self.config.pairs):
            self._use(self._read(self.now))
        return self._distinct

    def state(self) -> dict[str, Tensor]:
        """The answers of the present step, for a checkpoint."""
        return self.now.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on with these answers."""
        self._use(Rollout.from_state(state))

    def _written(self, draws: Indices, epoch: int) -> Rollout:
        """Answers to the prompts of a step; prompts whose answers all have one reward are replaced, a few times."""
        self._sampler.begin()
        groups = self._groups(draws, key=[epoch, int(draws[0]), 0])
        replaced = 0
        for attempt in range(1, self.config.settings.resample + 1):
            dull = [number for number, group in enumerate(groups) if group.dull]
            taken = [group.prompt for group in groups]
            count, source_N = len(np.unique(self.prompts.rows)), self.prompts.source_N
            order = np.random.default_rng([self._seed, SEED, epoch, int(draws[0]), attempt]).permutation(count)
            free = order[~np.isin(order, np.asarray(taken) % count)]
            of_source = {source: iter(free[source_N[free] == source].tolist()) for source in np.unique(source_N[free])}
            others = {place: next(of_source.get(source_N[taken[place]], iter(())), None) for place in dull}
            others = {place: other for place, other in others.items() if other is not None}
            if not others:
                break
            fresh = self._groups(np.asarray(list(others.values())), key=[epoch, int(draws[0]), attempt])
            for number, group in zip(others, fresh, strict=True):
                groups[number] = group
            replaced += len(fresh)
        limit = self.config.max_new_tokens
        return rolled_out(groups, draws, epoch, limit=limit, stop=self._stop, replaced=replaced)

    def _groups(self, prompts: Indices, *, key: Sequence[int]) -> list[Group]:
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
        total = self._judge.total(named)
        dull_P = policy_losses.all_rewards_equal(torch.from_numpy(total).view(-1, each)).numpy()
        if buffer := self.config.buffer:
            tokens = torch.tensor([len(answer) for answer in answers])
            penalty = policy_losses.overlong_penalty(tokens, limit=limit, buffer=buffer).numpy()
            # A group that should be replaced, and is not, teaches nothing: not length, either.
            total = total + (penalty * ~dull_P.repeat(each) if self.config.settings.resample else penalty)
        return [
            Group(
                int(prompt),
                written[row],
                {name: values[row * each : (row + 1) * each] for name, values in named.items()},
                total[row * each : (row + 1) * each],
                sampled.get(row),
                bool(dull_P[row]),
            )
            for row, prompt in enumerate(prompts)
        ]

    def _read(self, rollout: Rollout) -> Rollout:
        """The answers with their log-probabilities and advantages."""
        config = self.config
        old_ST = self._log_probs(self._own) if config.remembers else None
        reference_ST = self._log_probs(self._reference) if config.refers else None
        read = replace(rollout, old_ST=old_ST, reference_ST=reference_ST)
        return replace(read, advantage_ST=None if config.pairs else advantage(read, config))

    def _log_probs(self, reader: LogProbReader) -> Tensor:
        """Log-probabilities (S, T) of the present answers; 0 where there is no token."""
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
    """Advantage (S, T) of each token, float64, minus the divergence from the reference where `kl` is a reward."""
    settings, mask_ST = config.settings, rollout.mask_ST
    loss_ST = torch.zeros(mask_ST.shape, dtype=torch.float64)
    if settings.kl == "reward" and settings.beta:
        assert rollout.old_ST is not None and rollout.reference_ST is not None
        loss_ST = settings.beta * (rollout.old_ST.double() - rollout.reference_ST.double()).masked_fill(~mask_ST, 0)
    if settings.baseline == "batch":
        return policy_losses.whitened(
            rollout.total_S[:, None] - policy_losses.returns_to_come(loss_ST, mask_ST), mask_ST
        )
    reward_PG = (rollout.total_S - loss_ST.sum(1)).view_as(rollout.total_PG)
    if settings.baseline == "leave_one_out":
        value_PG = policy_losses.leave_one_out(reward_PG)
    else:
        value_PG = policy_losses.group_advantages(reward_PG, scaled=settings.baseline == "group_scaled")
    return value_PG.reshape(-1, 1).expand_as(mask_ST).contiguous()
