"""Prompts as training examples, whose answers the model writes, as it is, when a step draws them.

What is written, scored and read is a function of (seed, step, prompt, answer) and the weights: a stopped run goes on
with the same bits, from the answers in its checkpoint or from new ones that are equal.

With tools an answer is an episode of several turns, whose rows hold what tools answered between what was drawn.

A server may write the answers of the next steps while this one trains (`staleness`): with the weights of a step that is
always equally far back, so that the clock decides nothing.

Legend: P prompts, G answers to each, E = P x G answers, S rows of them (E but where a template rewrites turns), T most
tokens of an answer, N labels.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from workbench.config.sections.reinforce_config import Baseline, ReinforceConfig
from workbench.data.batching import Indices, MicroBatch, Row, global_batch, micro_batches, padded, steps_per_epoch
from workbench.data.text import generated_answers
from workbench.data.text.generated_answers import Episode, Floats, SampledAnswer, WriteTurns
from workbench.data.text.preference_pairs import ANSWER, ROW, with_answers
from workbench.data.text.prompts import MixedPrompts
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.losses import policy_losses
from workbench.runs.ranks import ALONE, Ranks
from workbench.training import capacity
from workbench.training.checkpoints import Checkpointed
from workbench.training.preference_objective import dense

_NAMED = ("rewards", "played")
"""Fields that hold tensors by their names."""


@dataclass(frozen=True)
class Group:
    """The answers to one prompt (G)."""

    prompt: int
    """Number of the prompt in the data."""
    episodes: Sequence[Episode]
    rewards: Mapping[str, Floats]
    """Rewards of each answer by their names, without weights."""
    total: Floats
    """Their weighted sum, with what their lengths add and take."""
    dull: bool = False
    """Whether all answers have the same reward before that, so that nothing can be learnt."""
    right: Sequence[bool] = ()
    """Whether each has the reward of a right answer before that."""


@dataclass(frozen=True)
class Rollout:
    """Answers of a step, those to one prompt one after another."""

    epoch: Tensor
    """The pass over the prompts, (1,)."""
    draws_P: Tensor
    """Numbers of the prompts of the step."""
    prompts_P: Tensor
    """Numbers of the prompts that were answered, some of which may replace others."""
    episode_S: Tensor
    """Number of the answer that each row is of."""
    tokens_ST: Tensor
    """Ids of the rows behind their prompts, padded with zeros."""
    counts_S: Tensor
    """Tokens of each."""
    cut_S: Tensor
    """Whether each reached its limit before it ended."""
    total_E: Tensor
    """Total reward, float64; NaN of an answer from which nothing is learnt, which has no rows."""
    first_S: Tensor
    """The first row of the same prompt with the same tokens and reward, which is computed for all of them."""
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """Rewards (E,) by their names."""
    played: Mapping[str, Tensor] = field(default_factory=dict)
    """Counts (E,) of episodes by what is counted."""
    drawn_ST: Tensor | None = None
    """Which tokens the model drew; None: all."""
    kept_S: Tensor | None = None
    """Tokens of its prompt that each row stands behind; None: all."""
    replaced: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """Number of groups without signal that were replaced, (1,)."""
    old_ST: Tensor | None = None
    """Log-probabilities before the first update."""
    sampled_ST: Tensor | None = None
    """Log-probabilities with which the tokens were sampled, as the sampler reports them."""
    reference_ST: Tensor | None = None
    """Log-probabilities by the reference."""
    advantage_ST: Tensor | None = None
    turn_ST: Tensor | None = None
    """Number of the turn of each token that carries loss, where turns have rewards."""
    turn_rewards_EK: Tensor | None = None
    """Those rewards, float64, which add up to the total; NaN where an episode has no such turn."""
    state_EK: Tensor | None = None
    """Number of what each of these turns read, where those that read the same are compared."""
    beta: Tensor | None = None
    """Factor of the divergence from the reference where it adapts, (1,), float64; None: that of the settings."""
    stale: Tensor | None = None
    """Updates by which the weights that drew it are older than those it teaches first, (1,); None: 0."""

    @property
    def each(self) -> int:
        """Answers to a prompt, G."""
        return len(self.total_E) // len(self.prompts_P)

    @property
    def total_S(self) -> Tensor:
        """Total reward of each row's answer."""
        return self.total_E[self.episode_S]

    @property
    def learnt_S(self) -> Tensor:
        """Tokens of each row that carry loss."""
        return self.counts_S if self.drawn_ST is None else self.drawn_ST.sum(1)

    @property
    def copies_S(self) -> Tensor:
        """How many equal answers each stands for: 0 where an earlier one stands for it."""
        return self.first_S.bincount(minlength=len(self.first_S))

    @property
    def mask_ST(self) -> Tensor:
        """Which of the T places of tokens that carry loss there are: they are counted without those between them."""
        return torch.arange(self.tokens_ST.shape[1], device=self.counts_S.device) < self.learnt_S[:, None]

    @property
    def total_PG(self) -> Tensor:
        """Rewards by prompt."""
        return self.total_E.view(len(self.prompts_P), -1)

    def answer(self, slot: int) -> Indices:
        """Ids of a row behind its prompt."""
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
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NAMED}
        named = {f"{kind}[{name}]": each for kind in _NAMED for name, each in getattr(self, kind).items()}
        return {name: each for name, each in own.items() if each is not None} | named

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Rollout:
        """The rollout whose `state` this is."""
        own: dict[str, Any] = {name: each for name, each in state.items() if "[" not in name}
        for kind in _NAMED:
            start = f"{kind}["
            own[kind] = {name[len(start) : -1]: each for name, each in state.items() if name.startswith(start)}
        return cls(**own)

    def figures(self) -> dict[str, float]:
        """Figures for metrics.jsonl: rewards, lengths, and signs of reward hacking."""
        dull_P = policy_losses.all_rewards_equal(self.total_PG)
        rows = range(len(self.counts_S))
        masks = [slice(None) if self.drawn_ST is None else self.drawn_ST[n, : int(self.counts_S[n])] for n in rows]
        answers = [self.answer(slot)[masks[slot]] for slot in rows]
        known_E = ~self.total_E.isnan()
        rewards = {f"reward[{name}]": float(each[known_E].mean()) for name, each in self.rewards.items()}
        played = {f"episodes[{name}]": float(each.double().mean()) for name, each in self.played.items()}
        return {
            "reward[mean]": float(self.total_E[known_E].mean()),
            "reward[spread]": float(self.total_E[known_E].std(correction=0)),
            **(rewards if len(rewards) > 1 else {}),
            **played,
            "answers[tokens]": float(self.learnt_S.sum() / known_E.sum()),
            "answers[cut]": float(self.cut_S.double().mean()),
            "answers[repetition]": float(np.mean([generated_answers.repeated(each.tolist()) for each in answers])),
            "answers[no signal]": float(dull_P.double().mean()),
            **({} if self.beta is None else {"scale[beta]": float(self.beta)}),
            **({} if self.stale is None else {"answers[staleness]": int(self.stale)}),
            **({"answers[replaced]": int(self.replaced) / len(self.prompts_P)} if int(self.replaced) else {}),
        }


def rolled_out(
    groups: Sequence[Group], draws: Indices, epoch: int, *, limit: int, replaced: int, by_turn: bool = False
) -> Rollout:
    """The groups of a step as tensors.

    Args:
        draws: Numbers of the prompts of the step (P,).
        limit: T.
        replaced: Number of groups without signal that were replaced.
        by_turn: Whether turns have rewards of their own.
    """
    episodes = [each for group in groups for each in group.episodes]
    rows = [(number, row) for number, each in enumerate(episodes) for row in each.rows]
    ids = padded([*(row.ids for _, row in rows), np.zeros(limit, dtype=np.int64)])[:-1]
    names = groups[0].rewards
    totals = np.concatenate([group.total for group in groups])
    first: dict[tuple[Any, ...], int] = {}
    each = len(episodes) // len(groups)
    keys = [
        (number // each, own.tobytes(), row.drawn.tobytes(), row.kept, float(totals[number]), *one.so_far, *one.states)
        for (number, row), own in zip(rows, ids, strict=True)
        for one in [episodes[number]]
    ]
    drawn = np.stack([np.pad(row.drawn, (0, limit - len(row.drawn))) for _, row in rows])
    logs = [row.log_probs for _, row in rows if row.log_probs is not None]
    sampled = [np.pad(own, (0, limit - len(own))) for own in logs]
    whole = all(row.drawn.all() for _, row in rows)
    kept = [-1 if row.kept is None else row.kept for _, row in rows]
    counted = sorted({name for episode in episodes for name in episode.counts})
    played = {name: torch.tensor([episode.counts[name] for episode in episodes]) for name in counted}
    if played:
        played["success"] = torch.tensor([right for group in groups for right in group.right])
    by_turns: dict[str, Tensor] = {}
    if by_turn:
        rises = [np.diff([0.0, *one.so_far, total]) for one, total in zip(episodes, totals, strict=True)]
        rises = [np.full(1, np.nan) if one.dropped else own for one, own in zip(episodes, rises, strict=True)]
        most = max(map(len, rises))
        padded_EK = np.stack([np.pad(own, (0, most - len(own)), constant_values=np.nan) for own in rises])
        turns = [row.turns for _, row in rows if row.turns is not None]
        turn_ST = np.stack([np.pad(own, (0, limit - len(own))) for own in turns])
        by_turns = {"turn_ST": torch.from_numpy(turn_ST), "turn_rewards_EK": torch.from_numpy(padded_EK)}
        if any(one.states for one in episodes):
            known: dict[str, int] = {}
            states = [[known.setdefault(each, len(known)) for each in one.states[:most]] for one in episodes]
            by_turns["state_EK"] = torch.tensor([[*own, *[-1] * (most - len(own))] for own in states])
    return Rollout(
        epoch=torch.tensor([epoch]),
        draws_P=torch.from_numpy(np.array(draws, dtype=np.int64)),
        prompts_P=torch.tensor([group.prompt for group in groups]),
        episode_S=torch.tensor([number for number, _ in rows]),
        tokens_ST=torch.from_numpy(ids),
        counts_S=torch.tensor([len(row.ids) for _, row in rows]),
        cut_S=torch.tensor([episodes[number].cut for number, _ in rows]),
        total_E=torch.from_numpy(totals),
        first_S=torch.tensor([first.setdefault(key, slot) for slot, key in enumerate(keys)]),
        rewards={name: torch.from_numpy(np.concatenate([group.rewards[name] for group in groups])) for name in names},
        played=played,
        drawn_ST=None if whole else torch.from_numpy(drawn),
        kept_S=None if min(kept) < 0 else torch.tensor(kept),
        replaced=torch.tensor([replaced]),
        sampled_ST=torch.tensor(np.stack(sampled), dtype=torch.float32) if sampled else None,
        **by_turns,
    )


def blank(limit: int) -> Rollout:
    """A rollout of no step, whose one answer is as long as any can be, to measure memory."""
    group = Group(-1, [generated_answers.answered(np.zeros(limit, dtype=np.int64), None, stop=())], {}, np.zeros(1))
    zeros = torch.zeros(1, limit)
    trial_rollout = rolled_out([group], np.asarray([-1]), -1, limit=limit, replaced=0)
    return replace(trial_rollout, old_ST=zeros, sampled_ST=zeros, reference_ST=zeros, advantage_ST=zeros.double())


SEED = 7
"""Separates the random numbers of answers from all others of a run."""


class SamplesAnswers(Protocol):
    """Writes answers to prompts from random numbers."""

    def begin(self) -> Self:
        """What samples with the weights of now. Called before a rollout: weights have changed since the last one."""

    def batches(self, prompts: Sequence[Indices], *, answers: int, tokens: int) -> list[Indices]:
        """Numbers of the prompts that are answered together."""

    def answer(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[Indices]]:
        """Answers to each prompt, one for each row of its random numbers (G, T). `pictures`: names those of each."""

    def scored(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[SampledAnswer]]:
        """The same answers, with the log-probabilities with which they were sampled."""


class PlaysEpisodes(Protocol):
    """Carries out the calls of a model, turn by turn."""

    def play(self, rows: Sequence[int], asked: Sequence[Indices], write: WriteTurns) -> list[Episode]:
        """An episode for each prompt, from its row number and tokens."""


class TurnWriter:
    """Draws answers, and turns of episodes, each token from the random number of its place behind the prompt.

    Args:
        draws: Random numbers (G, T) of the answers to each prompt.
        scored: Whether to tell the log-probabilities of what is drawn.
        ranks: The processes that draw them, each some of the batches of one process, so that they are the same answers.
    """

    def __init__(self, sampler: SamplesAnswers, draws: Sequence[Floats], *, scored: bool, ranks: Ranks = ALONE) -> None:
        self._sampler, self._draws, self._scored, self._ranks = sampler, draws, scored, ranks

    def answers(self, asked: Sequence[Row]) -> list[SampledAnswer]:
        """Answers to the prompts of rows, which end in one more token, those to each one after another."""
        prompts, pictures = [row.input_ids[:-1] for row in asked], [row.pictures for row in asked]
        return self._written(prompts, self._draws, pictures if any(pictures) else ())

    def turns(
        self, numbers: Sequence[int], contexts: Sequence[Indices], taken: Sequence[int]
    ) -> Sequence[SampledAnswer]:
        """The next turns of some of these answers; see `WriteTurns`."""
        each, limit = self._draws[0].shape
        total = each * len(self._draws)
        firsts = [contexts[n - n % each] for n in range(len(contexts))]
        if len(numbers) == total and all(map(np.array_equal, contexts, firsts)):  # a prompt is read once for all
            groups = np.arange(total).reshape(-1, each)
        else:
            groups = np.arange(len(numbers))[:, None]
        width = limit - min(taken)  # turns are drawn together, and cut where there is less room
        wide_EU = np.pad(np.concatenate(self._draws), ((0, 0), (0, limit)))
        own = np.stack([wide_EU[n, start : start + width] for n, start in zip(numbers, taken, strict=True)])
        written = self._written([contexts[group[0]] for group in groups], [own[group] for group in groups])
        return [one.first(limit - start) for one, start in zip(written, taken, strict=True)]

    def _written(
        self, asked: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[SampledAnswer]:
        written: dict[int, list[SampledAnswer]] = {}
        each, tokens = draws[0].shape
        for batch in self._ranks.share(self._sampler.batches(asked, answers=each, tokens=tokens)):
            of_batch, draws_of_batch = [asked[row] for row in batch], [draws[row] for row in batch]
            shown = [pictures[row] for row in batch] if pictures else ()
            if self._scored:
                groups = self._sampler.scored(of_batch, draws_of_batch, shown)
            else:
                plain = self._sampler.answer(of_batch, draws_of_batch, shown)
                groups = [[SampledAnswer(ids, None) for ids in group] for group in plain]
            written.update(zip(batch.tolist(), groups, strict=True))
        written = {row: group for part in self._ranks.gathered(written) for row, group in part.items()}
        return [answer for row in range(len(asked)) for answer in written[row]]


class Judge(Protocol):
    """Rewards answers to the rows of a table."""

    def named(self, rows: Sequence[int], answers: Sequence[Indices]) -> dict[str, Floats]:
        """Rewards of answers by their names, from each answer's row number and tokens."""

    def of_episodes(self, rows: Sequence[int], episodes: Sequence[Episode]) -> dict[str, Floats]:
        """The same of episodes, with the rewards of their environments."""

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
        self._each = config.answers * config.rows
        self._longest = longest * 2 if config.pairs else np.repeat(longest, self._each)
        self._lengths, self._supervised = self._longest, np.ones(len(self._longest), dtype=np.int64)
        self._place: dict[int, int] = {}
        """Place in the rollout of each prompt (pairs), or of each row."""

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
        return self.prompts.place(index if self.config.pairs else index // self._each)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """The examples of the answers to the prompts of some draws."""
        return self._examples(self._drawn.sample(draws, epoch=epoch))

    @property
    def _distinct(self) -> Indices:
        if self.config.pairs:
            return self.now.prompts_P.numpy()
        return self._of_rows(self.now)[self.now.copies_S.numpy() > 0]

    def _examples(self, prompts: Indices) -> Indices:
        if self.config.pairs:
            return prompts
        examples: Indices = (prompts[:, None] * self._each + np.arange(self._each)).ravel()
        return examples

    def _of_rows(self, rollout: Rollout) -> Indices:
        """The example of each row of a rollout (S,)."""
        episode_S = rollout.episode_S.numpy()
        begins_S = np.flatnonzero(np.diff(episode_S, prepend=-1))
        turn_S = np.arange(len(episode_S)) - np.repeat(begins_S, np.diff(begins_S, append=len(episode_S)))
        prompts_S = rollout.prompts_P.numpy()[episode_S // rollout.each]
        examples: Indices = prompts_S * self._each + episode_S % rollout.each * self.config.rows + turn_S
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
        prompts = np.repeat(indices if self.config.pairs else indices // self._each, each)
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
        asked_S = np.repeat(self.prompts.lengths[prompts] - 1, rollout.each)[rollout.episode_S.numpy()]
        lengths_S = (asked_S if rollout.kept_S is None else rollout.kept_S.numpy()) + rollout.counts_S.numpy()
        self._lengths, self._supervised = self._longest.copy(), np.ones(len(self._longest), dtype=np.int64)
        if self.config.pairs:
            self._place = {int(prompt): number for number, prompt in enumerate(prompts)}
            self._lengths[prompts] = lengths_S[self._pairs(rollout)].sum(1)
        else:
            examples = self._of_rows(rollout)
            self._place = {int(example): slot for slot, example in enumerate(examples)}
            self._lengths[examples] = lengths_S
            counted_S = rollout.learnt_S * ~rollout.cut_S if self.config.drop_cut else rollout.learnt_S
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
        return [self._place[index]]

    def _row(self, prompt: int, slot: int) -> Row:
        row, answer = self.prompts[prompt], self.now.answer(slot)
        kept = None if self.now.kept_S is None else int(self.now.kept_S[slot])
        asked = row.input_ids[:-1][:kept]
        supervised = np.arange(len(asked) + len(answer)) >= len(asked)
        if self.now.drawn_ST is not None:
            supervised[len(asked) :] = self.now.drawn_ST[slot, : len(answer)].numpy()
        return row._replace(input_ids=np.concatenate([asked, answer]), supervised=supervised)


class Rollouts(RolloutRows, Checkpointed):
    """Answers that a model writes when a step draws their prompts.

    Args:
        prompts: See `RolloutRows`.
        sampler: Writes the answers; `stop` are the tokens that end one.
        own: Reads their log-probabilities before the first update.
        reference: Reads those of the reference.
        seed: Of the run.
        player: Carries out calls of tools; None: there are none.
        ranks: The processes that write and read the answers of a step, each its part; every one has all of them then.
        served: Another machine writes them, which the first process asks.
        batch: Prompts of a step.
        total: Rollouts of the run; None: nobody knows.
        turn: Held while answers are written ahead: what judges them and carries out calls is not asked twice at once.
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
        player: PlaysEpisodes | None = None,
        ranks: Ranks = ALONE,
        served: bool = False,
        batch: int = 1,
        total: int | None = None,
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__(prompts, config)
        # A server, and the tools of episodes, are asked by the first process alone.
        self._by_first, self._ranks = served or player is not None, ranks
        self._batch, self._total, self._turn = batch, math.inf if total is None else total, turn or nullcontext()
        self._ahead: deque[Future[Rollout]] = deque()
        """Rollouts of the present step, until it begins, and of those after it."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._sampler, self._judge, self._own, self._reference = sampler, judge, own, reference
        self._seed, self._stop, self._player = seed, stop, player

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """The examples of the answers to the prompts of some draws, which are written where the step is new."""
        prompts = self._drawn.sample(draws, epoch=epoch)
        if not self.now.of(prompts, epoch):
            beta = self._next_beta()
            if not self._by_first:
                written = self._written(self._sampler.begin(), prompts, epoch)
            else:
                written = self._ranks.agreed(self._next(prompts, epoch) if self._ranks.first else self.now)
            self._use(replace(written, beta=beta))
        unread = self.now.reference_ST is None and self.config.refers
        if unread or (self.now.advantage_ST is None and not self.config.pairs):
            self._use(self._read(self.now))
        return self._distinct

    def state(self) -> dict[str, Tensor]:
        """The answers of the present step, and those that were written ahead, for a checkpoint."""
        found = self.now.state()
        for place, ahead in enumerate(self._ahead):
            if ahead.exception() is not None:  # raised where the answers are needed
                break
            found |= {f"{place}/{name}": each for name, each in ahead.result().state().items()}
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on with these answers."""
        self._use(Rollout.from_state({name: each for name, each in state.items() if not name[0].isdigit()}))
        self._ahead.clear()
        while own := {name: each for name, each in state.items() if name.startswith(f"{len(self._ahead)}/")}:
            self._ahead.append(Future())
            self._ahead[-1].set_result(Rollout.from_state({n.partition("/")[2]: each for n, each in own.items()}))

    def _next(self, prompts: Indices, epoch: int) -> Rollout:
        """Answers to the prompts of a step; those of later ones are begun, as far as they may be ahead."""
        sampler = self._sampler.begin()
        lead = self.config.rollouts.staleness // self.config.updates
        if not lead:
            return self._written(sampler, prompts, epoch)
        per_epoch = steps_per_epoch(len(self), self._batch)
        of_epoch = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        now = next(number for number in of_epoch if np.array_equal(self._prompts_of(number), prompts))
        while len(self._ahead) <= lead and now + len(self._ahead) < max(self._total, now + 1):
            stale, number = len(self._ahead) * self.config.updates, now + len(self._ahead)
            asked = self._prompts_of(number), number // per_epoch
            self._ahead.append(self._thread.submit(self._written_ahead, sampler, *asked, stale))
        rollout = self._ahead.popleft().result()
        assert rollout.of(prompts, epoch), "rollouts are used in their order"
        return rollout

    def _prompts_of(self, number: int) -> Indices:
        """Prompts of a rollout, counted from the run's first."""
        rows = len(self)
        draws = global_batch(number, rows=rows, size=self._batch, seed=self._seed)
        return self._drawn.sample(draws, epoch=number // steps_per_epoch(rows, self._batch))

    def _written_ahead(self, sampler: SamplesAnswers, prompts: Indices, epoch: int, stale: int) -> Rollout:
        with self._turn:
            return replace(self._written(sampler, prompts, epoch), stale=torch.tensor([stale]))

    def _next_beta(self) -> Tensor | None:
        """Beta of the rollout after the present one, where it adapts to how far this one had diverged."""
        target, before = self.config.kl_target, self.now
        if target is None:
            return None
        beta = self.config.settings.beta
        if before.beta is not None:
            assert before.old_ST is not None and before.reference_ST is not None
            kl_ST = policy_losses.divergence(before.old_ST.double(), before.reference_ST.double())
            beta = policy_losses.adapted_beta(
                float(before.beta),
                float(kl_ST[before.mask_ST].mean()),
                target=target,
                share=int((~before.total_E.isnan()).sum()) / self.config.kl_horizon,
            )
        return torch.tensor([beta], dtype=torch.float64)

    def _written(self, sampler: SamplesAnswers, draws: Indices, epoch: int) -> Rollout:
        """Answers to the prompts of a step; prompts whose answers all have one reward are replaced, a few times."""
        groups = self._groups(sampler, draws, key=[epoch, int(draws[0]), 0])
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
            fresh = self._groups(sampler, np.asarray(list(others.values())), key=[epoch, int(draws[0]), attempt])
            for number, group in zip(others, fresh, strict=True):
                groups[number] = group
            replaced += len(fresh)
        limit = self.config.max_new_tokens
        by_turn = self.config.tools is not None and self.config.tools.credit != "episode"
        return rolled_out(groups, draws, epoch, limit=limit, replaced=replaced, by_turn=by_turn)

    def _groups(self, sampler: SamplesAnswers, prompts: Indices, *, key: Sequence[int]) -> list[Group]:
        each, limit = self.config.answers, self.config.max_new_tokens
        asked = [self.prompts[int(prompt)] for prompt in prompts]
        draws = [
            generated_answers.sampling_numbers([self._seed, SEED, *key, int(prompt)], answers=each, tokens=limit)
            for prompt in prompts
        ]
        rows = np.repeat(self.prompts.rows[prompts], each).tolist()
        ranks = ALONE if self._by_first else self._ranks
        writer = TurnWriter(sampler, draws, scored=self.config.corrects, ranks=ranks)
        episodes: Sequence[Episode]
        if self._player is None:
            written = writer.answers(asked)
            episodes = [generated_answers.answered(*one, stop=self._stop) for one in written]
            named = ranks.agreed(self._judge.named(rows, [one.ids for one in written]) if ranks.first else {})
        else:
            contexts = [one.input_ids[:-1] for one in asked for _ in range(each)]
            episodes = self._player.play(rows, contexts, writer.turns)
            named = self._judge.of_episodes(rows, episodes)
        total = self._judge.total(named)
        total[[one.dropped for one in episodes]] = np.nan
        if np.isnan(total).all():
            raise ConfigError(
                f"reinforce.tools: each of {len(episodes)} episodes failed, the first one: {episodes[0].failure}. "
                "Correct the file, or write a higher limit."
            )
        dull_P = policy_losses.all_rewards_equal(torch.from_numpy(total).view(-1, each)).numpy()
        right, by_length = total >= generated_answers.SUCCESS, np.zeros(len(total))
        if buffer := self.config.buffer:
            tokens = torch.tensor([max((len(row.ids) for row in one.rows), default=0) for one in episodes])
            by_length += policy_losses.overlong_penalty(tokens, limit=limit, buffer=buffer).numpy()
        if factor := self.config.length_reward:
            drawn = np.where(np.isnan(total), np.nan, [one.tokens for one in episodes])
            shape_PG = torch.from_numpy(drawn).view(-1, each), torch.from_numpy(right).view(-1, each)
            by_length += factor * policy_losses.length_reward(*shape_PG).flatten().numpy()
        # A group that should be replaced, and is not, teaches nothing: not length, either.
        total = total + (by_length * ~dull_P.repeat(each) if self.config.settings.resample else by_length)
        return [
            Group(
                int(prompt),
                episodes[row * each : (row + 1) * each],
                {name: values[row * each : (row + 1) * each] for name, values in named.items()},
                total[row * each : (row + 1) * each],
                bool(dull_P[row]),
                right[row * each : (row + 1) * each].tolist(),
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
            parts = list(micro_batches(self._distinct, self.lengths, tokens=reader.tokens))
            for indices in self._ranks.share(parts):
                batch = self.batch(indices).to(reader.device)
                labels_N = batch.labels_N
                rows = len(indices) * batch.sequences
                log_p_BT = dense(reader.log_probs(batch), labels_N, rows=rows, longest=limit)
                slots = torch.zeros(rows, dtype=torch.int64, device=labels_N.device)
                slots = slots.scatter(0, labels_N[:, ROW], labels_N[:, ANSWER])
                found_ST[slots.cpu()] = log_p_BT.float().cpu()
        found_ST = torch.stack(self._ranks.gathered(found_ST)).sum(0)
        return found_ST if self.config.pairs else found_ST[self.now.first_S]


def advantage(rollout: Rollout, config: ReinforceConfig) -> Tensor:
    """Advantage (S, T) of each token, float64, minus the divergence from the reference where `kl` is a reward."""
    settings, mask_ST = config.settings, rollout.mask_ST
    beta = settings.beta if rollout.beta is None else float(rollout.beta)
    loss_ST = torch.zeros(mask_ST.shape, dtype=torch.float64)
    if settings.kl == "reward" and beta:
        assert rollout.old_ST is not None and rollout.reference_ST is not None
        loss_ST = beta * (rollout.old_ST.double() - rollout.reference_ST.double()).masked_fill(~mask_ST, 0)
    if rollout.turn_ST is not None:
        assert rollout.turn_rewards_EK is not None
        scaled, groups = settings.baseline == "group_scaled", rollout.turn_rewards_EK.split(rollout.each)
        tools = config.tools
        if tools is not None and tools.credit == "gigpo":
            assert rollout.state_EK is not None
            how: dict[str, Any] = {"discount": tools.discount, "weight": tools.state_weight, "scaled": scaled}
            pairs = zip(groups, rollout.state_EK.split(rollout.each), strict=True)
            value_EK = torch.cat([policy_losses.gigpo_advantages(*each, **how) for each in pairs])
        else:
            value_EK = torch.cat([policy_losses.turn_advantages(each, scaled=scaled) for each in groups])
        return value_EK[rollout.episode_S].gather(1, rollout.turn_ST).masked_fill(~mask_ST, 0)
    if settings.baseline == "batch":
        return policy_losses.whitened(
            rollout.total_S[:, None] - policy_losses.returns_to_come(loss_ST, mask_ST), mask_ST
        )
    loss_E = torch.zeros_like(rollout.total_E).index_add(0, rollout.episode_S, loss_ST.sum(1))
    reward_PG = (rollout.total_E - loss_E).view_as(rollout.total_PG)
    known_PG = ~reward_PG.isnan()
    if known_PG.all():
        value_PG = _compared(reward_PG, settings.baseline)
    else:  # those that were dropped are as if they had not been drawn
        value_PG = torch.zeros_like(reward_PG)
        for place in known_PG.sum(1).gt(1).nonzero()[:, 0]:
            known_G = known_PG[place]
            value_PG[place, known_G] = _compared(reward_PG[place, known_G][None], settings.baseline)[0]
    return value_PG.reshape(-1, 1)[rollout.episode_S].expand_as(mask_ST).contiguous()


def _compared(reward_PG: Tensor, baseline: Baseline) -> Tensor:
    if baseline == "leave_one_out":
        return policy_losses.leave_one_out(reward_PG)
    return policy_losses.group_advantages(reward_PG, scaled=baseline == "group_scaled")
