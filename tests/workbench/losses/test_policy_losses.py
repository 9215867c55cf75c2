"""Advantages equal their formulas, written out for each answer."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.config.sections.reinforce_config import Normalise
from workbench.losses import policy_losses
from workbench.losses.policy_losses import policy_loss

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [-2.0, 3.0, 0.25, 1.0]]
REWARD = torch.tensor(REWARDS, dtype=torch.float64)
LENGTHS, LONGEST = [3, 1, 4], 6
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
LOW, HIGH = 0.2, 0.3
NORMALISE: tuple[Normalise, ...] = ("answer", "token", "constant", "whole", "mean_ratio")


def test_of_group_and_leave_one_out_equal_their_formulas() -> None:
    plain, scaled = (policy_losses.group_advantages(REWARD, scaled=each).tolist() for each in (False, True))
    alone = policy_losses.leave_one_out(REWARD).tolist()
    for row, rewards in enumerate(REWARDS):
        mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
        for at, reward in enumerate(rewards):
            assert plain[row][at] == pytest.approx(reward - mean, abs=1e-12)
            assert scaled[row][at] == pytest.approx((reward - mean) / (spread + 1e-4), abs=1e-12)
            others = [*rewards[:at], *rewards[at + 1 :]]
            assert alone[row][at] == pytest.approx(reward - statistics.mean(others), abs=1e-12)


def test_a_group_without_a_difference_teaches_nothing() -> None:
    assert policy_losses.all_rewards_equal(REWARD).tolist() == [False, True, False]
    for found in (policy_losses.group_advantages(REWARD, scaled=True), policy_losses.leave_one_out(REWARD)):
        assert found[1].abs().max() == 0


def test_whitened_over_all_tokens() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    value = torch.tensor([[1.0, 2.0, 99.0], [4.0, 99.0, 99.0]], dtype=torch.float64)
    mean, spread = 7 / 3, statistics.pstdev([1.0, 2.0, 4.0])
    wanted = [[(1 - mean) / (spread + 1e-4), (2 - mean) / (spread + 1e-4), 0], [(4 - mean) / (spread + 1e-4), 0, 0]]
    torch.testing.assert_close(policy_losses.whitened(value, mask), torch.tensor(wanted, dtype=torch.float64))
    assert policy_losses.whitened(torch.full((1, 3), 2.0), torch.ones(1, 3, dtype=torch.bool)).abs().max() == 0


def test_to_come_adds_what_follows() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    found = policy_losses.returns_to_come(torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 99.0]]), mask)
    assert found.tolist() == [[7.0, 6.0, 4.0], [3.0, 2.0, 0.0]]


def test_long_answers_are_punished_in_a_straight_line() -> None:
    tokens = torch.tensor([0, 60, 80, 90, 100])
    assert policy_losses.overlong_penalty(tokens, limit=100, buffer=20).tolist() == [0, 0, 0, -0.5, -1]


def test_short_answers_are_rewarded_as_kimi_has_it() -> None:
    tokens = torch.tensor([[10, 30, 50, 20], [7, 7, 7, 7], [4, math.nan, 8, 4]], dtype=torch.float64)
    right = torch.tensor([[True, True, True, False], [True, False, True, True], [False, False, False, True]])
    found = policy_losses.length_reward(tokens, right).tolist()
    for row, lengths in enumerate(tokens.tolist()):
        known = [each for each in lengths if not math.isnan(each)]
        for place, length in enumerate(lengths):
            if math.isnan(length):
                assert math.isnan(found[row][place])
                continue
            spread = max(known) - min(known)
            rate = 0.5 - (length - min(known)) / spread if spread else 0.0
            assert found[row][place] == pytest.approx(rate if right[row, place] else min(0.0, rate))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_turn_is_worth_what_it_and_later_ones_earn_above_the_mean_turn(scaled: bool) -> None:
    rewards = [[1.0, 0.0, 2.0], [0.5], [0.0, -1.0]]
    padded = torch.tensor([each + [math.nan] * (3 - len(each)) for each in rewards], dtype=torch.float64)
    every = [reward for each in rewards for reward in each]
    mean, spread = statistics.mean(every), statistics.stdev(every) + 1e-4 if scaled else 1.0
    found = policy_losses.turn_advantages(padded, scaled=scaled)
    for row, each in enumerate(rewards):
        wanted = [sum((reward - mean) / spread for reward in each[turn:]) for turn in range(len(each))]
        assert found[row, : len(each)].tolist() == pytest.approx(wanted)
    padded[1:] = math.nan  # one episode alone
    assert not policy_losses.turn_advantages(padded, scaled=scaled).any()


@pytest.mark.parametrize("scaled", [False, True])
def test_gigpo_compares_episodes_and_turns_in_one_state(scaled: bool) -> None:
    """Written out as the paper has it: episodes, and within each state the discounted rewards from there on."""
    rewards, states = [[1.0, 0.0, 2.0], [0.5], [0.0, -1.0]], [[0, 1, 2], [0], [0, 1]]
    padded = torch.tensor([each + [math.nan] * (3 - len(each)) for each in rewards], dtype=torch.float64)
    numbers = torch.tensor([each + [-1] * (3 - len(each)) for each in states])

    def compared(values: list[float], own: float) -> float:
        if len(values) < 2:
            return 0.0
        return (own - statistics.mean(values)) / (statistics.stdev(values) + 1e-4 if scaled else 1.0)

    def found(**how: float) -> Tensor:
        settings: dict[str, Any] = {"discount": 0.9, "weight": 0.5, "scaled": scaled, **how}
        return policy_losses.gigpo_advantages(padded, numbers, **settings)

    to_come = [[sum(0.9**n * each for n, each in enumerate(own[turn:])) for turn in range(len(own))] for own in rewards]
    every = [pair for own, values in zip(states, to_come, strict=True) for pair in zip(own, values, strict=True)]
    for row, own in enumerate(rewards):
        of_episode = compared([sum(each) for each in rewards], sum(own))
        wanted = [
            of_episode + 0.5 * compared([value for other, value in every if other == state], value)
            for state, value in zip(states[row], to_come[row], strict=True)
        ]
        assert found()[row, : len(own)].tolist() == pytest.approx(wanted)
    assert all(len({*found(weight=0)[row, : len(own)].tolist()}) == 1 for row, own in enumerate(rewards))
    padded[1:] = math.nan  # one episode alone
    assert not found().any()


def test_beta_follows_the_divergence_as_ziegler_et_al_have_it() -> None:
    adapted = [policy_losses.adapted_beta(0.1, kl, target=0.05, share=0.5) for kl in (0.0, 0.045, 0.05, 0.055, 9.0)]
    assert adapted == pytest.approx([0.1 * factor for factor in (0.9, 0.95, 1, 1.05, 1.1)])


@pytest.fixture
def numbers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = MASK.shape
    log_p = -torch.rand(shape, dtype=torch.float64, generator=generator) * 3
    return {
        "log_p": log_p,
        "old": log_p + torch.randn(shape, dtype=torch.float64, generator=generator) * 0.4,
        "advantage": torch.tensor([1.3, -0.7, -2.0], dtype=torch.float64)[:, None].expand(shape),
        "reference": log_p + torch.randn(shape, dtype=torch.float64, generator=generator),
    }


def found(numbers: dict[str, Tensor], normalise: Normalise, **settings: Any) -> tuple[Tensor, Tensor]:
    return policy_loss(
        numbers["log_p"],
        numbers["old"],
        numbers["advantage"],
        MASK,
        low=LOW,
        high=HIGH,
        normalise=normalise,
        longest=LONGEST,
        **settings,
    )


def surrogate(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)


def of_actions(ratios: list[float], normalise: Normalise) -> list[float]:
    """Ratios of what counts as one action: of a token, or of the whole answer."""
    whole = math.prod(ratios)
    return {"whole": [whole], "mean_ratio": [whole ** (1 / len(ratios))]}.get(normalise, ratios)


def of_answer(losses: list[float], kl: list[float], normalise: Normalise) -> float:
    """The loss of an answer, from those of its actions, and from the divergences of its tokens."""
    tokens = len(kl)
    actions = {"answer": tokens, "constant": LONGEST}.get(normalise, 1)
    return sum(losses) / actions + 0.05 * sum(kl) / (tokens if normalise == "mean_ratio" else actions)


@pytest.mark.parametrize("normalise", NORMALISE)
def test_equals_the_formula(numbers: dict[str, Tensor], normalise: Normalise) -> None:
    loss_B, _ = found(numbers, normalise, reference_BL=numbers["reference"], beta=0.05)
    values = {name: each.tolist() for name, each in numbers.items()}
    for row, length in enumerate(LENGTHS):
        log_p, old, reference = (values[name][row][:length] for name in ("log_p", "old", "reference"))
        advantage = values["advantage"][row][0]
        kl = [math.exp(r - p) - (r - p) - 1 for p, r in zip(log_p, reference, strict=True)]
        ratios = [math.exp(p - o) for p, o in zip(log_p, old, strict=True)]
        wanted = of_answer([surrogate(each, advantage) for each in of_actions(ratios, normalise)], kl, normalise)
        assert loss_B[row].item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("normalise", NORMALISE)
def test_entropy_is_taken_off_over_the_tokens_of_the_divergence(
    numbers: dict[str, Tensor], normalise: Normalise
) -> None:
    entropy = torch.rand(MASK.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    plain, with_bonus = (
        found(numbers, normalise, **each)[0] for each in ({}, {"entropy_BL": entropy, "entropy_bonus": 0.3})
    )
    for row, length in enumerate(LENGTHS):
        tokens = {"answer": length, "mean_ratio": length, "constant": LONGEST}.get(normalise, 1)
        bonus = 0.3 * sum(entropy[row, :length].tolist()) / tokens
        assert with_bonus[row].item() == pytest.approx(plain[row].item() - bonus, rel=1e-12)


def test_the_mean_over_tokens_is_that_of_dapo(numbers: dict[str, Tensor]) -> None:
    loss_B, _ = found(numbers, "token")
    ratio = (numbers["log_p"] - numbers["old"]).exp()
    tokens = [
        surrogate(ratio[row, at].item(), numbers["advantage"][row, 0].item())
        for row, length in enumerate(LENGTHS)
        for at in range(length)
    ]
    mean = loss_B.sum() / policy_losses.weights(torch.tensor(LENGTHS), "token").sum()
    assert mean.item() == pytest.approx(sum(tokens) / len(tokens), rel=1e-12)
    assert policy_losses.weights(torch.tensor(LENGTHS), "answer").tolist() == [1, 1, 1]


@pytest.mark.parametrize("normalise", NORMALISE)
def test_without_an_update_the_gradient_is_that_of_reinforce(numbers: dict[str, Tensor], normalise: Normalise) -> None:
    log_p = numbers["log_p"].clone().requires_grad_()
    numbers = {**numbers, "log_p": log_p, "old": log_p.detach()}
    loss_B, clipped_BL = found(numbers, normalise)
    loss_B.sum().backward()  # type: ignore[no-untyped-call]
    lengths = torch.tensor(LENGTHS)[:, None]
    divisor = {"answer": lengths, "mean_ratio": lengths, "constant": LONGEST}.get(normalise, 1)
    assert log_p.grad is not None
    torch.testing.assert_close(log_p.grad, (-numbers["advantage"] / divisor).masked_fill(~MASK, 0))
    assert not clipped_BL.any()


def test_clipped_tokens_are_those_without_a_gradient(numbers: dict[str, Tensor]) -> None:
    log_p = numbers["log_p"].clone().requires_grad_()
    loss_B, clipped_BL = found({**numbers, "log_p": log_p}, "token")
    loss_B.sum().backward()  # type: ignore[no-untyped-call]
    assert log_p.grad is not None
    assert clipped_BL.any() and not clipped_BL.all()
    assert torch.equal(log_p.grad != 0, MASK & ~clipped_BL)


@pytest.mark.parametrize("normalise", ["token", "mean_ratio"])
def test_a_capped_ratio_weighs_the_gradient_and_cuts_none(numbers: dict[str, Tensor], normalise: Normalise) -> None:
    log_p = numbers["log_p"].clone().requires_grad_()
    loss_B, capped_BL = found({**numbers, "log_p": log_p}, normalise, beyond="cap")
    loss_B.sum().backward()  # type: ignore[no-untyped-call]
    assert log_p.grad is not None
    ratio = (numbers["log_p"] - numbers["old"]).exp()
    for row, length in enumerate(LENGTHS):
        actions = of_actions(ratio[row, :length].tolist(), normalise)
        wanted = [-min(each, 1 + HIGH) * numbers["advantage"][row, 0].item() for each in actions]
        wanted = wanted if normalise == "token" else wanted * length
        of_one = 1 if normalise == "token" else length
        assert (log_p.grad[row, :length] * of_one).tolist() == pytest.approx(wanted, rel=1e-12)
        assert not log_p.grad[row, length:].any()
        cut = [each > 1 + HIGH for each in actions] * (length if normalise == "mean_ratio" else 1)
        assert capped_BL[row, :length].tolist() == cut
    assert capped_BL.any() or normalise == "mean_ratio"  # of long answers it is never far from 1


@pytest.mark.parametrize("normalise", NORMALISE)
def test_gradients(numbers: dict[str, Tensor], normalise: Normalise) -> None:
    """By finite differences, in float64, away from the corners of the clipping."""
    leaf = numbers["log_p"].clone().requires_grad_()

    def of(log_p: Tensor) -> Tensor:
        return found({**numbers, "log_p": log_p}, normalise, reference_BL=numbers["reference"], beta=0.1)[0]

    assert torch.autograd.gradcheck(of, leaf)


CAP = 1.5


@pytest.fixture
def sampled(numbers: dict[str, Tensor]) -> Tensor:
    """Log-probabilities by who drew the tokens: some weights are above the cap, of tokens and of whole answers."""
    noise = torch.randn(MASK.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    return numbers["old"] + noise * 0.5


@pytest.mark.parametrize("normalise", NORMALISE)
def test_who_drew_the_tokens_is_weighed_as_the_formula_says(
    numbers: dict[str, Tensor], sampled: Tensor, normalise: Normalise
) -> None:
    """min(pi / mu, cap) times the loss of each token, or of the whole answer; the divergence has no weight."""
    cap = 1.1 if normalise == "mean_ratio" else CAP
    weight, capped = policy_losses.importance(numbers["old"], sampled, MASK, cap=cap, normalise=normalise)
    loss_B, _ = found(numbers, normalise, reference_BL=numbers["reference"], beta=0.05, weight_BL=weight)
    values = {name: each.tolist() for name, each in {**numbers, "sampled": sampled}.items()}
    cut = []
    for row, length in enumerate(LENGTHS):
        log_p, old, mu, reference = (values[name][row][:length] for name in ("log_p", "old", "sampled", "reference"))
        advantage = values["advantage"][row][0]
        kl = [math.exp(r - p) - (r - p) - 1 for p, r in zip(log_p, reference, strict=True)]
        ratios = [math.exp(p - o) for p, o in zip(log_p, old, strict=True)]
        drawn = [math.exp(o - m) for o, m in zip(old, mu, strict=True)]
        ratios, drawn = of_actions(ratios, normalise), of_actions(drawn, normalise)
        terms = [min(w, cap) * surrogate(each, advantage) for each, w in zip(ratios, drawn, strict=True)]
        assert loss_B[row].item() == pytest.approx(of_answer(terms, kl, normalise), rel=1e-12)
        cut += [w > cap for w in drawn]
    assert capped[MASK[:, : capped.shape[1]]].tolist() == cut and 0 < sum(cut) < len(cut)


@pytest.mark.parametrize("normalise", NORMALISE)
def test_gradients_of_weighed_tokens(numbers: dict[str, Tensor], sampled: Tensor, normalise: Normalise) -> None:
    leaf = numbers["log_p"].clone().requires_grad_()

    def of(log_p: Tensor) -> Tensor:
        weight, _ = policy_losses.importance(numbers["old"], sampled, MASK, cap=CAP, normalise=normalise)
        return found({**numbers, "log_p": log_p}, normalise, weight_BL=weight)[0]

    assert torch.autograd.gradcheck(of, leaf)
    first, _ = policy_losses.importance(leaf, sampled, MASK, cap=CAP, normalise=normalise)
    assert not first.requires_grad  # in a first update, where the model now is the model then


def test_who_drew_as_the_model_does_weighs_nothing(numbers: dict[str, Tensor]) -> None:
    for normalise in NORMALISE:
        weight, capped = policy_losses.importance(numbers["old"], numbers["old"], MASK, cap=CAP, normalise=normalise)
        assert (weight == 1).all() and not capped.any()
        assert torch.equal(found(numbers, normalise, weight_BL=weight)[0], found(numbers, normalise)[0])


def test_the_divergence_is_unbiased_and_never_below_0() -> None:
    """Its mean under p is the KL divergence, exactly, over all outcomes."""
    p = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    q = torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64)
    each = policy_losses.divergence(p.log(), q.log())
    assert (each >= 0).all()
    torch.testing.assert_close((p * each).sum(), (p * (p / q).log()).sum())
    assert policy_losses.divergence(p.log(), p.log()).abs().max() == 0


def test_padding_does_not_matter(numbers: dict[str, Tensor]) -> None:
    wild = {name: each.masked_fill(~MASK, 30.0) for name, each in numbers.items()}
    for normalise in NORMALISE:
        settings = {"reference_BL": numbers["reference"], "beta": 0.1}
        assert torch.equal(found(numbers, normalise, **settings)[0], found(wild, normalise, **settings)[0])
