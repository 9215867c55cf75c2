"""Mistakes with recipe reinforce end in status 2 and a message with place and cure, before a weight is read."""

from __future__ import annotations

from functools import partial

import pytest

from tests.mistakes.cases import AssertRowsRefused, RowsCase

RECIPE = """
recipe: reinforce
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.2, max_tokens: 64}
rewards: [{kind: number}]
reinforce: {answers: 2, max_new_tokens: 4}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null}
"""
ROWS = [{"question": f"What comes after {n}?", "answer": str(n + 1)} for n in range(20)]
URL = "http://127.0.0.1:9/v1"
SERVED = f"reinforce.rollouts.url={URL} reinforce.rollouts.id=m"
Case = partial(RowsCase, rows=ROWS, other=[{"a": "b"}])

CASES = {
    "votes": Case("kind=vote compares several answers", "Leave it out", "'rewards=[{kind: vote}]'"),
    "likelihoods": Case("kind=likelihood reads how likely", "Leave it out", "'rewards=[{kind: likelihood}]'"),
    "no rewards": Case("recipe reinforce learns from rewards, and there are none", "kind: number", "rewards=[]"),
    "one answer": Case("reinforce.answers", "greater than or equal to 2", "reinforce.answers=1"),
    "an unknown method": Case("reinforce.method", "'grpo'", "reinforce.method=ppo"),
    "an unknown key": Case("reinforce.epsilon", "unknown key", "reinforce.epsilon=0.2"),
    "trust of no run": Case("reinforce.trust is for", "Leave it out", "reinforce.trust=true"),
    "no temperature": Case("reinforce.temperature", "greater than 0", "reinforce.temperature=0"),
    "a clip above 1": Case("reinforce.clip", "less than 1", "reinforce.clip=1.5"),
    "all answers are too long": Case(
        "reinforce.overlong_buffer=9 would punish every answer", "max_new_tokens is 4", "reinforce.overlong_buffer=9"
    ),
    "a baseline of pairs": Case(
        "reinforce.method=online_dpo compares two whole answers",
        "leave reinforce.baseline out",
        "reinforce.method=online_dpo reinforce.baseline=group",
    ),
    "a clip of pairs": Case(
        "reinforce.method=online_dpo compares two whole answers",
        "leave reinforce.clip out",
        "reinforce.method=online_dpo reinforce.clip=0.3",
    ),
    "lengths of two kinds": Case(
        "evaluate.max_new_tokens is for answers with a reference",
        "Write reinforce.max_new_tokens",
        "evaluate.max_new_tokens=9",
    ),
    "pairs without beta": Case("needs beta above 0", "Write 0.1", "reinforce.method=online_dpo reinforce.beta=0"),
    "a divergence of nothing": Case(
        "reinforce.kl=reward adds nothing where reinforce.beta is 0",
        "Leave it out",
        "reinforce.method=dapo reinforce.kl=reward",
    ),
    "a target for a beta of 0": Case(
        "reinforce.kl_target multiplies reinforce.beta",
        "Write reinforce.beta=0.04",
        "reinforce.kl_target=0.1 reinforce.method=dapo",
    ),
    "a target for pairs": Case(
        "reinforce.method=online_dpo compares two whole answers",
        "leave reinforce.kl_target out",
        "reinforce.kl_target=0.1 reinforce.method=online_dpo",
    ),
    "an entropy bonus of pairs": Case(
        "reinforce.method=online_dpo compares two whole answers",
        "leave reinforce.entropy_bonus out",
        "reinforce.entropy_bonus=0.01 reinforce.method=online_dpo",
    ),
    "a negative entropy bonus": Case(
        "reinforce.entropy_bonus", "greater than or equal to 0", "reinforce.entropy_bonus=-1"
    ),
    "a reward for long answers": Case(
        "reinforce.length_reward", "greater than or equal to 0", "reinforce.length_reward=-1"
    ),
    "a horizon of nothing": Case("reinforce.kl_horizon is for", "Leave it out", "reinforce.kl_horizon=20"),
    "a horizon below a rollout": Case(
        "reinforce.kl_horizon=7 is less than the 8 answers",
        "Write 8 or more",
        "reinforce.kl_target=0.1 reinforce.kl_horizon=7",
    ),
    "dropout beside a target": Case(
        "noise changes them in each pass",
        "leave reinforce.kl_target out",
        "reinforce.kl_target=0.1 adapter.dropout=0.1",
    ),
    "dropout between updates": Case(
        "noise changes them in each pass", "Write reinforce.updates=1", "reinforce.updates=2 adapter.dropout=0.1"
    ),
    "an adapter that draws, between updates": Case(
        "noise changes them in each pass",
        "a method without noise of its own",
        "reinforce.updates=2 reinforce.beta=0.1 adapter.method=pvera",
    ),
    "mixed values between updates": Case(
        "regularise.mixout moves values in each step",
        "reinforce.updates=1 and reinforce.kl=loss",
        "reinforce.updates=2 regularise.mixout=0.1",
    ),
    "full against itself": Case(
        "adapter.method=full trains the backbone itself", "reinforce.beta=0", "adapter.method=full"
    ),
    "full from an adapter": Case(
        "adapter.method=full has none", "model.id=RUN/adapter", "adapter.method=full reinforce.start=one"
    ),
    "loss on all": Case("learns from the answers that it writes", "leave data.loss_on out", "data.loss_on=all"),
    "a set named as a reward": Case(
        "data.held_out.number: mean rewards of a set and of a reward would have one name",
        "Give the set another one",
        "data.held_out.number=other.jsonl data.held_out.b=other.jsonl",
    ),
    "a set named as the mean": Case(
        "data.test.mean: mean rewards of a set", "Give the set another one", "data.test.mean=other.jsonl"
    ),
    "a curriculum": Case("recipe=reinforce reads prompts", "leave data.curriculum out", "data.curriculum.by=length"),
    "sampled rows": Case("recipe=reinforce reads prompts", "leave data.sampling out", "data.sampling.by=tilted"),
    "new tokens": Case("never drawn before they were learnt", "recipe=sft", "'model.new_tokens=[<a>]'"),
    "smoothed labels": Case(
        "recipe=reinforce compares log-probabilities as they are", "Leave it out", "regularise.label_smoothing=0.1"
    ),
    "kept outputs": Case(
        "new answers in each step",
        "Write freeze.cache=off",
        "freeze.policy=static freeze.layers=2 freeze.cache=disk",
    ),
    "noise scale": Case("answers to one prompt are compared", "Leave it out", "optimizer.noise_scale=2"),
    "ZeRO": Case("writes with the whole model", "Write distributed.zero=2", "distributed.zero=3"),
    "dropped blocks": Case("recipe=reinforce compares them as they are", "Write recipe=sft", "layer_drop.rate=0.2"),
    "section elsewhere": Case(
        "reinforce is for recipe=reinforce", "Leave reinforce out", "recipe=sft rewards=[] reinforce.updates=2"
    ),
    "prefer's section": Case("prefer is for recipe=prefer", "Leave prefer out", "prefer.beta=0.3"),
    "an encoder-decoder": Case("which recipe reinforce does not read", "Take a causal backbone", "model.id=t5"),
    "a start that is none": Case(
        "reinforce.start=nowhere is no run directory", "Name a finished run", "reinforce.start=nowhere"
    ),
    "no name at the address": Case(
        "reinforce.rollouts.url: write the name", "reinforce.rollouts.id", f"reinforce.rollouts.url={URL}"
    ),
    "a name without an address": Case(
        "reinforce.rollouts.id is for reinforce.rollouts.url", "write an address", "reinforce.rollouts.id=m"
    ),
    "turns without an address": Case(
        "reinforce.rollouts.sync_every is for reinforce.rollouts.url", "Leave it out", "reinforce.rollouts.sync_every=2"
    ),
    "no address": Case("reinforce.rollouts.url", "write an address such as", "reinforce.rollouts.url=here:8000"),
    "no turn": Case("reinforce.rollouts.sync_every", "greater than 0", f"{SERVED} reinforce.rollouts.sync_every=0"),
    "staleness without an address": Case(
        "reinforce.rollouts.staleness is for reinforce.rollouts.url", "Leave it out", "reinforce.rollouts.staleness=2"
    ),
    "two bounds of age": Case(
        "sync_every makes them older",
        "Leave one of them out",
        f"{SERVED} reinforce.rollouts.staleness=2 reinforce.rollouts.sync_every=2",
    ),
    "less than a rollout ahead": Case(
        "reinforce.rollouts.staleness=2 is less than the 3 updates",
        "Write 3 or more, or 0",
        f"{SERVED} reinforce.rollouts.staleness=2 reinforce.updates=3",
    ),
    "old answers that are not weighed": Case(
        "answers written by older weights",
        "Leave reinforce.importance_cap out",
        f"{SERVED} reinforce.rollouts.staleness=2 reinforce.importance_cap=0",
    ),
    "all weights to a server": Case(
        "adapter.method=full trains the backbone itself, whose weights it cannot take",
        "Write adapter.method=lora|rslora|lora+",
        f"{SERVED} adapter.method=full reinforce.beta=0",
    ),
    "another adapter to a server": Case(
        "a server loads plain LoRA while it answers, and adapter.method=ia3",
        "or leave reinforce.rollouts out",
        SERVED + " 'adapter={method: ia3}'",
    ),
    "a temperature that a server does not tell": Case(
        "a server tells probabilities at temperature 1",
        "reinforce.importance_cap=0",
        f"{SERVED} reinforce.temperature=1.2",
    ),
    "dropout beside a server": Case(
        "noise changes them in each pass", "importance_cap=0", f"{SERVED} adapter.dropout=0.1"
    ),
    "a server that is not there": Case("reinforce.rollouts.url=http://127.0.0.1:9/v1 does not answer", "Start", SERVED),
    "a negative cap": Case("reinforce.importance_cap", "greater than or equal to 0", "reinforce.importance_cap=-1"),
    "a cap of pairs": Case(
        "reinforce.method=online_dpo compares two whole answers",
        "leave reinforce.importance_cap out",
        "reinforce.method=online_dpo reinforce.importance_cap=2",
    ),
    "no prompt": Case("row 1: `question` is empty", "data.on_bad_row=skip", rows=[{**ROWS[0], "question": ""}, *ROWS]),
    "no column for the reward": Case(
        "row 1: no column `solution`, which the reward",
        "Name another one in rewards",
        "'rewards=[{kind: number, answer: solution}]'",
    ),
    "a prompt that is too long": Case(
        "data.max_tokens=8", "data.truncate=left", "data.max_tokens=8 data.truncate=right"
    ),
    "no room for an answer": Case(
        "made for at most", "Write reinforce.max_new_tokens=480 or less", "reinforce.max_new_tokens=100000"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(case: RowsCase, encoder_decoder: str, assert_rows_refused: AssertRowsRefused) -> None:
    assert_rows_refused(case, t5=encoder_decoder)
