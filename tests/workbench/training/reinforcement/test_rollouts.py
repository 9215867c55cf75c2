"""Answers of a step as examples: which prompts are answered, what is learnt of each, and what a checkpoint holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.run_files import write_lines
from workbench.config import DataConfig
from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.data.batching import Indices, MicroBatch, global_batch
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.generated_answers import Episode, Floats, SampledAnswer, WriteTurns, answered
from workbench.data.text.prompts import MixedPrompts, PromptEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.losses import policy_losses
from workbench.training.reinforcement.objective import ReinforceObjective
from workbench.training.reinforcement.rollouts import LogProbReader, Rollouts

STOP, COUNT = 2, 8


class Scribe:
    """Writes answers of as many tokens as their first random number says, and ends each where there is room."""

    def begin(self) -> Self:
        return self

    def batches(self, prompts: Sequence[Indices], *, answers: int, tokens: int) -> list[Indices]:
        return [np.asarray([row]) for row in reversed(range(len(prompts)))]

    def answer(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[Indices]]:
        return [[self._one(draws_T) for draws_T in draws_GT] for draws_GT in draws]

    def scored(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[SampledAnswer]]:
        return [[SampledAnswer(ids, -1 - 0.01 * ids) for ids in group] for group in self.answer(prompts, draws)]

    def _one(self, draws_T: Floats) -> Indices:
        length = 1 + int(draws_T[0] * len(draws_T))
        ids = 3 + (draws_T[:length] * 100).astype(np.int64)
        if length < len(draws_T):
            ids[-1] = STOP
        return ids


class Copier(Scribe):
    """Writes each answer twice."""

    def answer(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[Indices]]:
        return [[each[0], each[1], each[1], each[0]] for each in super().answer(prompts, draws)]


class Lengths:
    """Rewards an answer for its length; those to some rows all alike."""

    def __init__(self, dull: Sequence[int] = ()) -> None:
        self.dull = set(dull)
        self.asked: list[int] = []

    def named(self, rows: Sequence[int], answers: Sequence[Indices]) -> dict[str, Floats]:
        self.asked += rows
        pairs = zip(rows, answers, strict=True)
        return {"length": np.asarray([0.0 if row in self.dull else float(len(answer)) for row, answer in pairs])}

    def total(self, named: Mapping[str, Floats]) -> Floats:
        return 2 * named["length"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, stories: str) -> TokenizedSet:
    path = tmp_path_factory.mktemp("prompts") / "rows.jsonl"
    rows = [{"question": f"What is {n}?" + " Please." * (n % 3), "answer": "An answer." * n} for n in range(COUNT)]
    write_lines(path, rows)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    config = DataConfig(train=str(path))
    return tokenized.read(str(path), config, tokenizer, PromptEncoder(ChatEncoder(tokenizer)))


def flat(batch: MicroBatch) -> torch.Tensor:
    return torch.full((len(batch.labels_N),), -1.0)


def rollouts(
    prompts: TokenizedSet | MixedPrompts,
    judge: Lengths | None = None,
    *,
    scribe: Scribe | None = None,
    run: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Rollouts:
    config = ReinforceConfig.model_validate({"answers": 4, "max_new_tokens": 6, "beta": 0, **settings})
    reader = LogProbReader(flat, nullcontext, torch.device("cpu"), width=8)
    sampler, judge = scribe or Scribe(), judge or Lengths()
    return Rollouts(prompts, config, sampler, judge, own=reader, reference=reader, seed=3, stop=[STOP], **(run or {}))


DRAWS = np.asarray([5, 1, 6])


def test_a_prompt_is_a_row_without_its_answer(prompts: TokenizedSet, stories: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    for row in (0, 4, 5):
        ids, supervised = prompts[row].input_ids, prompts[row].supervised
        assert supervised.tolist() == [False] * (len(ids) - 1) + [True] and ids[-1] == STOP
        text = tokenizer.decode(ids[:-1])
        assert f"What is {row}?" in text and text.endswith("Assistant:\n") and "An answer" not in text


def test_answers_are_those_of_seed_step_prompt_and_number(prompts: TokenizedSet) -> None:
    one, other = rollouts(prompts), rollouts(prompts)
    examples = one.sample(DRAWS, epoch=0)
    assert examples.tolist() == [4 * row + answer for row in DRAWS for answer in range(4)]
    other.sample(DRAWS, epoch=1)
    assert not torch.equal(one.now.tokens_ST, other.now.tokens_ST)
    other.sample(DRAWS, epoch=0)
    assert torch.equal(one.now.tokens_ST, other.now.tokens_ST)
    before = one.now
    one.sample(DRAWS, epoch=0)
    assert one.now is before  # a second update is on the same answers


def test_a_batch_has_prompt_and_answer_and_knows_its_place(prompts: TokenizedSet) -> None:
    found = rollouts(prompts)
    examples = found.sample(DRAWS, epoch=0)
    batch = found.batch(examples[[6, 0]])
    for row, (prompt, slot) in enumerate([(1, 6), (5, 0)]):
        asked, answer = prompts[prompt].input_ids[:-1], found.now.answer(slot)
        ids = batch.inputs["input_ids"][row, : len(asked) + len(answer)]
        assert ids.tolist() == [*asked, *answer]
        own = batch.labels_N[batch.labels_N[:, 1] == row]
        assert own[:, 0].tolist() == answer.tolist() and own[:, 2].unique().tolist() == [slot]
        assert own[:, 3].tolist() == list(range(len(answer)))
    assert found.lengths[examples].tolist() == [
        len(prompts[int(prompt)].input_ids) - 1 + len(found.now.answer(slot))
        for slot, prompt in enumerate(np.repeat(DRAWS, 4))
    ]


def test_before_a_step_answers_are_as_long_as_they_may_be(prompts: TokenizedSet) -> None:
    found = rollouts(prompts)
    longest = prompts.lengths - 1 + 6
    assert found.lengths.tolist() == np.repeat(longest, 4).tolist()
    assert found.batch(np.arange(3)).inputs["input_ids"].shape == (3, longest[0])
    assert rollouts(prompts, method="online_dpo").lengths.tolist() == (2 * longest).tolist()


def test_advantages_follow_from_the_rewards_of_each_group(prompts: TokenizedSet) -> None:
    found = rollouts(prompts)
    found.sample(DRAWS, epoch=0)
    total_PG = 2.0 * found.now.counts_S.view(3, 4).double()
    wanted = policy_losses.group_advantages(total_PG, scaled=True).reshape(-1, 1)
    assert found.now.advantage_ST is not None
    torch.testing.assert_close(found.now.advantage_ST, wanted.expand(12, 6))
    assert found.figures["reward[mean]"] == pytest.approx(float(total_PG.mean()))


def test_kl_as_reward_is_taken_off_and_whitened(prompts: TokenizedSet) -> None:
    """The model is the reference here, so that nothing is; advantages are whitened over all tokens."""
    found = rollouts(prompts, method="reinforce++", beta=0.1)
    found.sample(DRAWS, epoch=0)
    mask = found.now.mask_ST
    wanted = policy_losses.whitened(found.now.total_S[:, None].expand(mask.shape), mask)
    assert found.now.advantage_ST is not None
    torch.testing.assert_close(found.now.advantage_ST, wanted)


def test_prompts_without_a_signal_are_replaced_by_others_a_few_times(prompts: TokenizedSet) -> None:
    judge = Lengths(dull=[5, 0, 2])
    found = rollouts(prompts, judge, resample=20)
    found.sample(DRAWS, epoch=0)
    taken = found.now.prompts_P.tolist()
    assert taken[1:] == [1, 6] and taken[0] not in (5, 0, 2) and len(set(taken)) == 3
    assert found.figures["answers[no signal]"] == 0 and found.figures["answers[replaced]"] > 0
    assert found.now.of(DRAWS, 0)  # it is the answer to these draws
    bounded = Lengths(dull=range(COUNT))
    rollouts(prompts, bounded, resample=2).sample(DRAWS, epoch=0)
    assert len(bounded.asked) == 4 * 3 * 3


@pytest.mark.parametrize(("each", "buffer"), [(8, 1), (4, 2), (4, 5), (8, 3), (16, 2)])
def test_answers_that_are_equally_good_are_replaced_before_long_ones_are_punished(
    prompts: TokenizedSet, each: int, buffer: int
) -> None:
    """All answers to all prompts are wrong, and some are long: nothing is left to learn, not even to be short."""
    judge = Lengths(dull=range(COUNT))
    found = rollouts(prompts, judge, method="dapo", answers=each, overlong_buffer=buffer)
    found.sample(DRAWS, epoch=0)
    assert len(judge.asked) > 3 * each and int(found.now.replaced) > 0
    assert (found.now.counts_S > 6 - buffer).any()
    assert found.now.advantage_ST is not None and not found.now.advantage_ST.any()
    assert found.figures["answers[no signal]"] == 1
    kept = rollouts(prompts, judge, method="dapo", answers=each, overlong_buffer=buffer, resample=0)
    kept.sample(DRAWS, epoch=0)
    assert kept.now.advantage_ST is not None and kept.now.advantage_ST.any()  # where none is replaced, all count


def test_answers_that_differ_are_kept_where_the_penalty_makes_them_equal(prompts: TokenizedSet) -> None:
    class Even(Lengths):
        """The longer of two answers is as much better as it will be punished for."""

        def total(self, named: Mapping[str, Floats]) -> Floats:
            return -policy_losses.overlong_penalty(torch.as_tensor(named["length"]), limit=6, buffer=5).numpy()

    judge = Even()
    found = rollouts(prompts, judge, method="dapo", overlong_buffer=5)
    found.sample(DRAWS, epoch=0)
    assert judge.asked == [row for row in DRAWS.tolist() for _ in range(4)] and int(found.now.replaced) == 0


def test_a_prompt_that_a_step_draws_twice_has_answers_of_its_own_each_time(prompts: TokenizedSet) -> None:
    """Of two sources of 6 and 2 prompts, the second of which has all draws but one."""
    named = replace(prompts, sources={"many": 0, "few": 6})
    found = rollouts(MixedPrompts(named, np.asarray([0.1, 0.9]), 10, 3))
    assert len(found) == 10
    examples = found.sample(np.arange(10), epoch=0)
    numbers = found.now.prompts_P.numpy()
    assert len(set(numbers.tolist())) == 10 and np.bincount(numbers % COUNT, minlength=8)[6:].tolist() in (
        [4, 5],
        [5, 4],
    )
    twice = [place for place, number in enumerate(numbers) if number % COUNT == 6][:2]
    tokens_PGT = found.now.tokens_ST.view(10, 4, -1)
    assert not torch.equal(*(tokens_PGT[place] for place in twice))
    batch = found.batch(examples)
    lengths = [int(length) for length in batch.row_tokens] if batch.row_tokens is not None else []
    assert lengths == found.lengths[examples].tolist()


def test_a_prompt_without_a_signal_is_replaced_by_one_of_its_source(prompts: TokenizedSet) -> None:
    named = replace(prompts, sources={"many": 0, "few": 6})
    found = rollouts(MixedPrompts(named, np.asarray([0.5, 0.5]), 4, 3), Lengths(dull=[0, 1, 2, 6, 7]), resample=20)
    for epoch in range(6):
        found.sample(np.arange(4), epoch=epoch)
        rows = found.now.prompts_P.numpy() % COUNT
        assert sorted(rows // 6) == [0, 0, 1, 1] and len(set(rows.tolist())) == 4
        assert set(rows.tolist()) == {6, 7} | set(rows[rows < 6].tolist()) and not {0, 1, 2} & set(rows.tolist())


def test_long_answers_lose_reward_and_cut_ones_loss(prompts: TokenizedSet) -> None:
    found = rollouts(prompts, overlong_buffer=2, drop_cut=True, normalise="token")
    examples = found.sample(DRAWS, epoch=0)
    counts = found.now.counts_S
    assert (counts == 6).any() and (counts < 4).any()
    penalty = policy_losses.overlong_penalty(counts, limit=6, buffer=2)
    torch.testing.assert_close(found.now.total_S, 2.0 * counts + penalty)
    assert torch.equal(found.now.cut_S, counts == 6)
    assert found.supervised[examples].tolist() == (counts * (counts < 6)).tolist()


@pytest.mark.parametrize("method", ["grpo", "online_dpo"])
def test_short_answers_gain_reward_before_they_are_compared(prompts: TokenizedSet, method: str) -> None:
    """An answer of one token or more has a reward of 2 or more, and is right; those to row 5 are not."""
    found = rollouts(prompts, Lengths(dull=[5]), method=method, beta=0.1, length_reward=0.5)
    found.sample(DRAWS, epoch=0)
    counts_PG = found.now.counts_S.view(3, 4).double()
    right_PG = torch.tensor([[False], [True], [True]]).expand(3, 4)
    wanted_PG = 2 * counts_PG * right_PG + 0.5 * policy_losses.length_reward(counts_PG, right_PG)
    torch.testing.assert_close(found.now.total_PG, wanted_PG)
    assert (found.now.total_PG[0] < 0).any()
    resampled = rollouts(prompts, Lengths(dull=range(COUNT)), method=method, beta=0.1, length_reward=0.5, resample=1)
    resampled.sample(DRAWS, epoch=0)
    assert not resampled.now.total_E.any()  # nothing is left to learn, not even to be short


def test_a_success_is_counted_before_length_is_punished(prompts: TokenizedSet) -> None:
    """Each episode has a reward of 1 or more, which the penalty of long ones takes below 1."""

    class OneTurn:
        def play(self, rows: Sequence[int], asked: Sequence[Indices], write: WriteTurns) -> list[Episode]:
            written = write(range(len(asked)), asked, [0] * len(asked))
            return [replace(answered(each.ids, None, stop=[STOP]), counts={"turns": 1}) for each in written]

    class Right(Lengths):
        def of_episodes(self, rows: Sequence[int], episodes: Sequence[Episode]) -> dict[str, Floats]:
            return {"length": np.full(len(rows), 0.5)}

    found = rollouts(prompts, Right(), length_reward=1)
    found._player = OneTurn()
    found.sample(DRAWS, epoch=0)
    assert found.figures["episodes[success]"] == 1 and (found.now.total_E < 1).any()
    resumed = rollouts(prompts)
    resumed.load(found.state())
    assert resumed.figures == found.figures


def test_pairs_are_the_best_and_the_worst(prompts: TokenizedSet) -> None:
    found = rollouts(prompts, method="online_dpo", beta=0.1)
    examples = found.sample(DRAWS, epoch=0)
    assert examples.tolist() == DRAWS.tolist()
    batch = found.batch(examples)
    counts_PG = found.now.counts_S.view(3, 4)
    tokens = np.bincount(batch.labels_N[:, 1].numpy()).reshape(3, 2)
    assert tokens[:, 0].tolist() == counts_PG.amax(1).tolist() and tokens[:, 1].tolist() == counts_PG.amin(1).tolist()


def test_remembers_what_answers_were_drawn_by(prompts: TokenizedSet) -> None:
    found = rollouts(prompts, importance_cap=2)
    found.sample(DRAWS, epoch=0)
    assert found.now.sampled_ST is not None and rollouts(prompts).now.sampled_ST is not None
    for slot, count in enumerate(found.now.counts_S.tolist()):
        told = found.now.sampled_ST[slot].double().numpy()
        assert told[:count] == pytest.approx(-1 - 0.01 * found.now.answer(slot)) and not told[count:].any()
    plain = rollouts(prompts)
    plain.sample(DRAWS, epoch=0)
    assert plain.now.sampled_ST is None and torch.equal(plain.now.tokens_ST, found.now.tokens_ST)


@pytest.mark.parametrize("cap", [0, 2])
def test_goes_on_from_a_checkpoint(prompts: TokenizedSet, cap: float) -> None:
    words: dict[str, Any] = {"updates": 2, "importance_cap": cap}
    found, other = rollouts(prompts, **words), rollouts(prompts, Lengths(dull=range(COUNT)), **words)
    examples = found.sample(DRAWS, epoch=0)
    other.load(found.state())
    assert np.array_equal(other.sample(DRAWS, epoch=0), examples)  # nothing is written or judged again
    for mine, theirs in zip(vars(found.now).values(), vars(other.now).values(), strict=True):
        assert mine is theirs or (isinstance(mine, dict) and mine.keys() == theirs.keys())
    assert found.figures == other.figures and np.array_equal(found.lengths, other.lengths)


class Aging(Scribe):
    """Begins each answer with the number of the rollout whose weights write it."""

    def __init__(self) -> None:
        self.weights, self.asked = 0, list[int]()

    def begin(self) -> Self:
        return copy.copy(self)

    def answer(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[Indices]]:
        self.asked.append(self.weights)
        first = np.asarray([3 + self.weights])
        return [[np.concatenate([first, each[1:]]) for each in group] for group in super().answer(prompts, draws)]


@pytest.mark.parametrize(("staleness", "updates"), [(0, 1), (1, 1), (2, 1), (5, 2)])
def test_answers_are_written_ahead_as_far_as_they_may_be(prompts: TokenizedSet, staleness: int, updates: int) -> None:
    """By weights as old as the bound says, once there are such ones; checkpoints have what waits, to the same bits."""
    last, lead = 7, staleness // updates
    settings: dict[str, Any] = {"updates": updates, "rollouts": {"url": "http://here/v1", "id": "m"}}
    settings["rollouts"]["staleness"] = staleness
    run = {"served": True, "batch": 3, "total": last}

    def taught(found: Rollouts, scribe: Aging, numbers: range) -> list[torch.Tensor]:
        tokens = []
        for number in numbers:
            scribe.weights = number
            for _ in range(updates):
                found.sample(global_batch(number, rows=COUNT, size=3, seed=3), epoch=number // 3)
            tokens.append(found.now.tokens_ST)
            assert {int(each) - 3 for each in found.now.tokens_ST[:, 0]} == {max(0, number - lead)}
            age = found.figures.get("answers[staleness]", 0)
            assert age == min(number, lead) * updates <= staleness
        return tokens

    scribe, again = Aging(), Aging()
    found, resumed = (rollouts(prompts, scribe=each, run=run, **settings) for each in (scribe, again))
    tokens = taught(found, scribe, range(4))
    resumed.load(found.state())
    tokens += taught(found, scribe, range(4, last))
    assert all(map(torch.equal, taught(resumed, again, range(4, last)), tokens[4:]))
    assert len(scribe.asked) == sum(len(global_batch(n, rows=COUNT, size=3, seed=3)) for n in range(last))
    assert min(again.asked, default=4) >= 4, "nothing is written twice"


def test_what_fails_ahead_is_told_where_it_is_needed(prompts: TokenizedSet) -> None:
    class Failing(Lengths):
        def named(self, rows: Sequence[int], answers: Sequence[Indices]) -> dict[str, Floats]:
            if len(self.asked) > 30:
                raise ConfigError("no")
            return super().named(rows, answers)

    settings = {"rollouts": {"url": "http://here/v1", "id": "m", "staleness": 2}}
    found = rollouts(prompts, Failing(), run={"served": True, "batch": 3, "total": 7}, **settings)
    for number in range(3):
        found.sample(global_batch(number, rows=COUNT, size=3, seed=3), epoch=0)
    resumed = rollouts(prompts)
    resumed.load(found.state())
    assert torch.equal(resumed.now.tokens_ST, found.now.tokens_ST)
    with pytest.raises(ConfigError, match="no"):
        found.sample(global_batch(3, rows=COUNT, size=3, seed=3), epoch=1)


@pytest.mark.parametrize("kl", ["loss", "reward"])
def test_beta_follows_the_divergence_of_the_rollout_before_also_over_a_stop(prompts: TokenizedSet, kl: str) -> None:
    """The model finds each token 0.3 nats likelier than the reference does."""
    words: dict[str, Any] = {
        "beta": 0.1,
        "kl": kl,
        "kl_target": 0.04,
        "kl_horizon": 60,
        "updates": 2,
        "overlong_buffer": 2,
    }

    def started() -> Rollouts:
        found = rollouts(prompts, **words)
        found._reference = replace(found._reference, log_probs=lambda batch: flat(batch) - 0.3)
        return found

    found, kl_token, beta = started(), math.exp(-0.3) - 1 + 0.3, 0.1
    for epoch in range(3):
        found.sample(DRAWS, epoch=epoch)
        found.sample(DRAWS, epoch=epoch)  # a second update is on the same answers, with the same beta
        assert found.figures["scale[beta]"] == pytest.approx(beta, rel=1e-6)
        beta *= 1 + max(-0.2, min(0.2, kl_token / 0.04 - 1)) * 12 / 60
    assert kl_token == pytest.approx(0.04, rel=0.1)  # it is not clipped
    resumed = started()
    resumed.load(found.state())
    for each in (found, resumed):
        each.sample(DRAWS, epoch=3)
    assert found.figures["scale[beta]"] == resumed.figures["scale[beta]"] == pytest.approx(beta, rel=1e-6)
    plain = rollouts(prompts, **{**words, "beta": beta, "kl_target": None})
    plain._reference = found._reference
    examples = plain.sample(DRAWS, epoch=3)
    torch.testing.assert_close(gradient(found, examples), gradient(plain, examples), rtol=1e-5, atol=1e-9)


def gradient(rollouts: Rollouts, examples: Indices) -> torch.Tensor:
    """Gradient of the loss of a step by the log-probability of each token, which differs from that before."""
    values = torch.linspace(-0.7, -1.3, 200, dtype=torch.float64, requires_grad=True)
    objective = ReinforceObjective(rollouts.config, rollouts, device=torch.device("cpu"))
    for example in examples:
        batch = rollouts.batch(np.asarray([example]))
        log_p_N = values[batch.labels_N[:, 0]]
        objective(log_p_N, batch.labels_N, rows=1, scale=1 / int(rollouts.supervised[examples].sum())).backward()
    assert values.grad is not None
    return values.grad


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo"])
def test_equal_answers_are_computed_once_and_count_for_all(prompts: TokenizedSet, method: str) -> None:
    found = rollouts(prompts, scribe=Copier(), method=method, beta=0.1, updates=2)
    examples = found.sample(DRAWS, epoch=0)
    by_token = found.config.settings.normalise == "token"
    weights_B = 2 * found.now.counts_S[found.now.copies_S > 0] if by_token else torch.full((6,), 2)
    assert len(examples) == 6 and found.supervised[examples].tolist() == weights_B.tolist()
    once = gradient(found, examples)
    assert once.abs().sum() > 0
    found._use(replace(found.now, first_S=torch.arange(12)))
    torch.testing.assert_close(gradient(found, found.sample(DRAWS, epoch=0)), once)


def test_equal_answers_with_different_rewards_are_learnt_from_one_by_one(prompts: TokenizedSet) -> None:
    class Moody(Lengths):
        def named(self, rows: Sequence[int], answers: Sequence[Indices]) -> dict[str, Floats]:
            return {"mood": np.arange(len(answers), dtype=np.float64)}

        def total(self, named: Mapping[str, Floats]) -> Floats:
            return named["mood"]

    assert len(rollouts(prompts, Moody(), scribe=Copier()).sample(DRAWS, epoch=0)) == 12
