"""Answers to the prompts of a step, with all that the losses of its updates depend on.

Legend: P prompts, G answers to each, S = P x G answers, T most tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.data.batching import Indices, padded
from workbench.data.text import generated_answers
from workbench.data.text.generated_answers import Floats
from workbench.losses import advantages

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
    """Their weighted sum, less what an answer's length costs."""
    sampled: Sequence[Floats] | None = None
    """Log-probabilities that the tokens of each answer were drawn by; None: nobody asked."""

    @property
    def dull(self) -> bool:
        """Whether all answers have one reward, so that nothing is to be learnt."""
        return bool((self.total == self.total[0]).all())


@dataclass(frozen=True)
class Rollout:
    """Answers of a step, those to one prompt one after another."""

    epoch: Tensor
    """The pass over the prompts, (1,)."""
    draws_P: Tensor
    """Numbers of the prompts that the step drew."""
    prompts_P: Tensor
    """Numbers of those that were answered: some may stand in for others."""
    tokens_ST: Tensor
    """Ids of the answers, padded with zeros."""
    counts_S: Tensor
    """Tokens of each."""
    cut_S: Tensor
    """Whether each reached its limit before it ended."""
    total_S: Tensor
    """Reward that is learnt from, float64."""
    first_S: Tensor
    """The first answer to its prompt with the same tokens and reward, which is computed for all of them."""
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """Rewards (S,) by their names."""
    replaced: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """Groups that were written in vain, and replaced, (1,)."""
    old_ST: Tensor | None = None
    """Log-probabilities before the first update."""
    sampled_ST: Tensor | None = None
    """Log-probabilities that the tokens were drawn by, as the sampler told them."""
    reference_ST: Tensor | None = None
    """Log-probabilities by the reference."""
    advantage_ST: Tensor | None = None

    @property
    def each(self) -> int:
        """Answers to a prompt, G."""
        return len(self.counts_S) // len(self.prompts_P)

    @property
    def copies_S(self) -> Tensor:
        """How many answers each stands for: 0 where an earlier one stands for it."""
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
        """Whether it was written for these prompts in this pass."""
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
        """Figures for metrics.jsonl: rewards, lengths, and signs that a reward is outwitted."""
        dull_P = advantages.same(self.total_PG)
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
        draws: Numbers of the prompts that the step drew (P,).
        limit: T.
        stop: Tokens that end an answer.
        replaced: Groups that were written in vain.
    """
    answers = [each for group in groups for each in group.answers]
    ids = padded([*answers, np.zeros(limit, dtype=np.int64)])[:-1]
    counts = torch.tensor([len(each) for each in answers])
    names = groups[0].rewards
    totals = np.concatenate([group.total for group in groups])
    return Rollout(
        epoch=torch.tensor([epoch]),
        draws_P=torch.from_numpy(np.array(draws, dtype=np.int64)),
        prompts_P=torch.tensor([group.prompt for group in groups]),
        tokens_ST=torch.from_numpy(ids),
        counts_S=counts,
        cut_S=torch.tensor([each[-1] not in stop for each in answers]),
        total_S=torch.from_numpy(totals),
        first_S=torch.from_numpy(_first_equals(ids, totals, each=len(answers) // len(groups))),
        rewards={name: torch.from_numpy(np.concatenate([group.rewards[name] for group in groups])) for name in names},
        replaced=torch.tensor([replaced]),
        sampled_ST=_sampled(groups, limit),
    )


def _sampled(groups: Sequence[Group], limit: int) -> Tensor | None:
    """Log-probabilities (S, T) of the sampler, 0 behind an answer's end; None where no group has them."""
    log_probs = [each for group in groups for each in group.sampled or ()]
    if not log_probs:
        return None
    return torch.tensor(np.stack([np.pad(each, (0, limit - len(each))) for each in log_probs]), dtype=torch.float32)


def _first_equals(ids_ST: Indices, total_S: Floats, *, each: int) -> Indices:
    """The first answer (S,) of the same prompt with the same tokens and the same reward, of `each` to a prompt."""
    first: dict[tuple[int, bytes, float], int] = {}
    keys = [(slot // each, ids.tobytes(), float(total_S[slot])) for slot, ids in enumerate(ids_ST)]
    return np.asarray([first.setdefault(key, slot) for slot, key in enumerate(keys)], dtype=np.int64)


def blank(limit: int) -> Rollout:
    """A rollout of no step, whose one answer is as long as any, to try how much memory holds."""
    group = Group(-1, [np.zeros(limit, dtype=np.int64)], {}, np.zeros(1))
    zeros = torch.zeros(1, limit)
    trial_rollout = rolled_out([group], np.asarray([-1]), -1, limit=limit, stop=(), replaced=0)
    return replace(trial_rollout, old_ST=zeros, sampled_ST=zeros, reference_ST=zeros, advantage_ST=zeros.double())
