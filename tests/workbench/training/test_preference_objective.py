"""The loss of micro-batches of judged answers against its equation by the standard library, from single tokens on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.run_files import write_lines
from workbench.config import DataConfig
from workbench.config.sections.prefer_config import PreferConfig
from workbench.data.batching import Indices, MicroBatch
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.preference_pairs import (
    ANSWER,
    PLACE,
    PreferenceEncoder,
    PreferenceSet,
    mismatched_answers,
    preference_set,
)
from workbench.runs.ranks import ALONE
from workbench.training.preference_objective import KtoLook, PreferenceObjective

BETA = 0.4


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, stories: str) -> PreferenceSet:
    """Ten pairs with weights and margins."""
    path = tmp_path_factory.mktemp("pairs") / "rows.jsonl"
    rows = [
        {
            "prompt": f"{n} men",
            "chosen": " sat" * (1 + n % 3),
            "rejected": " ran" * (1 + n % 4),
            "w": 1 + n % 2,
            "m": n / 4,
        }
        for n in range(12)
    ]
    write_lines(path, rows)
    config = DataConfig(train=str(path), held_out=0.2, columns={"weight": "w", "margin": "m"})
    tokenizer = AutoTokenizer.from_pretrained(stories)
    return preference_set(
        tokenized.load(config, tokenizer, PreferenceEncoder(ChatEncoder(tokenizer)), seed=0).train, pairs=True
    )


def objective(pairs: PreferenceSet, reference_S: Any, **section: Any) -> PreferenceObjective:
    config = PreferConfig(beta=BETA, **section)
    own = reference_S if config.compares else None
    return PreferenceObjective(config, pairs, own, beta=lambda: BETA, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def token_log_p(pairs: PreferenceSet) -> list[list[float]]:
    """Log-probabilities of the tokens of each answer."""
    generator = np.random.default_rng(0)
    return [(-generator.exponential(2.0, count)).tolist() for count in pairs.answer_tokens]


@pytest.fixture(scope="module")
def reference(pairs: PreferenceSet) -> Any:
    return -np.random.default_rng(1).exponential(8.0, 2 * len(pairs))


def values(batch: MicroBatch, token_log_p: list[list[float]]) -> Tensor:
    """Log-probabilities of a micro-batch's labels."""
    places = zip(batch.labels_N[:, ANSWER].tolist(), batch.labels_N[:, PLACE].tolist(), strict=True)
    return torch.tensor([token_log_p[answer][place] for answer, place in places], dtype=torch.float64)


def loss(
    objective: PreferenceObjective, pairs: PreferenceSet, token_log_p: list[list[float]], examples: Indices
) -> float:
    batch = pairs.batch(examples)
    return objective(values(batch, token_log_p), batch.labels_N, rows=2 * len(examples), scale=0.5).item()


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def by_hand(pairs: PreferenceSet, token_log_p: list[list[float]], reference: Any, section: dict[str, Any]) -> float:
    """Half of the summed loss of all pairs."""
    total, name = 0.0, section.get("loss", "dpo")
    for example in range(len(pairs)):
        chosen, rejected = token_log_p[2 * example], token_log_p[2 * example + 1]
        shared = min(len(chosen), len(rejected))

        def counted(tokens: list[float], shared: int = shared) -> float:
            if section.get("length", "mean" if name in ("ipo", "orpo", "simpo") else "sum") == "mean":
                return sum(tokens) / len(tokens)
            if section.get("length") == "desensitised":
                return sum(tokens[:shared]) + 0.3 * sum(tokens[shared:])
            return sum(tokens)

        c, r = counted(chosen), counted(rejected)
        h = c - reference[2 * example] - r + reference[2 * example + 1]
        odds = [math.exp(each) / (1 - math.exp(each)) for each in (c, r)] if name == "orpo" else [1.0, 1.0]
        margin = float(pairs.margins[example])
        nll = -sum(chosen) / len(chosen)
        own = {
            "dpo": lambda h=h, m=margin: -log_sigmoid(BETA * h - m),
            "ipo": lambda h=h: (h - 1 / (2 * BETA)) ** 2,
            "hinge": lambda h=h, m=margin: max(0.0, 1 + m - BETA * h),
            "cdpo": lambda h=h: -0.9 * log_sigmoid(BETA * h) - 0.1 * log_sigmoid(-BETA * h),
            "robust": lambda h=h: (-0.9 * log_sigmoid(BETA * h) + 0.1 * log_sigmoid(-BETA * h)) / 0.8,
            "orpo": lambda o=odds, n=nll: n - BETA * log_sigmoid(math.log(o[0] / o[1])),
            "simpo": lambda c=c, r=r: -log_sigmoid(BETA * (c - r) - BETA / 2),
            "cpo": lambda c=c, r=r, n=nll: n - log_sigmoid(BETA * (c - r)),
        }[name]()
        total += float(pairs.supervised[example]) * (own + section.get("alpha", 0.0) * nll)
    return total / 2


SECTIONS: list[dict[str, Any]] = [
    *({"loss": name} for name in ("dpo", "ipo", "hinge", "cdpo", "robust", "orpo", "simpo", "cpo")),
    {"length": "mean"},
    {"loss": "ipo", "length": "sum"},
    {"length": "desensitised", "ld_alpha": 0.3},
    {"alpha": 0.7},
]


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_equals_its_equation_in_any_micro_batches(
    section: dict[str, Any], pairs: PreferenceSet, token_log_p: list[list[float]], reference: Any
) -> None:
    wanted = by_hand(pairs, token_log_p, reference, section)
    found = objective(pairs, reference, **section)
    everyone = np.arange(len(pairs))
    assert loss(found, pairs, token_log_p, everyone) == pytest.approx(wanted, rel=1e-9)
    parts = [loss(found, pairs, token_log_p, part) for part in np.array_split(everyone[::-1], 4)]
    assert sum(parts) == pytest.approx(wanted, rel=1e-9)


def margin(objective: PreferenceObjective) -> float:
    return objective.meter.means(ALONE)["reward[margin]"]


def test_swapping_the_answers_flips_the_margin(
    pairs: PreferenceSet, token_log_p: list[list[float]], reference: Any
) -> None:
    found, everyone = objective(pairs, reference), np.arange(len(pairs))
    loss(found, pairs, token_log_p, everyone)
    swap = np.arange(2 * len(pairs)).reshape(-1, 2)[:, ::-1].ravel()
    order = pairs.answers.subset(swap)
    other = objective(PreferenceSet(order, paired=True), reference[swap])
    loss(other, PreferenceSet(order, paired=True), [token_log_p[answer] for answer in swap], everyone)
    assert margin(other) == pytest.approx(-margin(found), rel=1e-12) and margin(found) != 0


def test_what_depends_on_the_prompt_alone_cancels(
    pairs: PreferenceSet, token_log_p: list[list[float]], reference: Any
) -> None:
    """A score of each prompt on top of both answers, as the partition function of Rafailov et al. 2023 is."""
    everyone = np.arange(len(pairs))
    shift = np.repeat(np.linspace(-5, 5, len(pairs)), 2)
    shifted = [[tokens[0] + float(more), *tokens[1:]] for tokens, more in zip(token_log_p, shift, strict=True)]
    for section in ({"loss": "dpo"}, {"loss": "ipo", "length": "sum"}, {"loss": "cpo", "alpha": 0.0}):
        found = objective(pairs, reference, **section)
        assert loss(found, pairs, shifted, everyone) == pytest.approx(loss(found, pairs, token_log_p, everyone))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, stories: str) -> PreferenceSet:
    """Single answers with weights, and beside each an answer to another prompt, of another length."""
    path = tmp_path_factory.mktemp("single") / "rows.jsonl"
    rows = [
        {"prompt": f"{n} men", "completion": " sat" * (1 + n % 5), "label": n % 3 > 0, "w": 1 + n % 2}
        for n in range(12)
    ]
    write_lines(path, rows)
    config = DataConfig(train=str(path), held_out=0.2, columns={"weight": "w"})
    tokenizer = AutoTokenizer.from_pretrained(stories)
    answers = tokenized.load(config, tokenizer, PreferenceEncoder(ChatEncoder(tokenizer)), seed=0).train
    return PreferenceSet(answers, paired=False, others=mismatched_answers(answers, config, bos=tokenizer.bos_token_id))


def drawn(counts: Indices, *, seed: int, mean: float) -> list[list[float]]:
    """Log-probabilities of the tokens of answers."""
    generator = np.random.default_rng(seed)
    return [(-generator.exponential(mean, count)).tolist() for count in counts]


@pytest.mark.parametrize("likelier", [1.0, -1.0], ids=["above the reference", "below it"])
@pytest.mark.parametrize("section", [{}, {"alpha": 0.7}, {"length": "mean", "desirable": 1.3, "undesirable": 0.6}])
def test_kto_equals_its_equation_over_the_global_batch(
    section: dict[str, Any], likelier: float, single: PreferenceSet
) -> None:
    """Its reference point is that of all mismatched rows of the step, however a step is cut, and never below 0."""
    config = PreferConfig(loss="kto", beta=BETA, **section)
    assert single.others is not None
    tokens = drawn(single.answer_tokens, seed=0, mean=2.0)
    others = drawn(single.others.supervised, seed=1, mean=1.0)

    def counted(own: list[float]) -> float:
        return sum(own) / (len(own) if config.length == "mean" else 1)

    known = -np.random.default_rng(2).exponential(6.0, len(single))
    known_others = np.asarray([counted(own) for own in others]) - likelier * np.linspace(0, 0.5, len(others))
    found = PreferenceObjective(config, single, known, beta=lambda: BETA, device=torch.device("cpu"))
    look = KtoLook(found, single, known_others, lambda batch: values(batch, others))
    step = np.arange(len(single))[::-1]
    parts = np.array_split(step, 4)
    look.take(torch.stack([look.measure(look.rows.batch(part)) for part in parts]).sum(0))

    z = max(0.0, sum(counted(others[row]) - known_others[row] for row in step) / len(step))
    assert (z > 0) == (likelier > 0)
    wanted = 0.0
    for row in step:
        ratio, good = counted(tokens[row]) - known[row], bool(single.desired[row])
        distance = ratio - z if good else z - ratio
        own = (config.desirable if good else config.undesirable) * (1 - 1 / (1 + math.exp(-BETA * distance)))
        own -= config.sft_factor * sum(tokens[row]) / len(tokens[row]) if good else 0.0
        wanted += float(single.supervised[row]) * own / 2
    losses = []
    for part in parts:
        batch = single.batch(part)
        losses.append(found(values(batch, tokens), batch.labels_N, rows=len(part), scale=0.5).item())
    assert sum(losses) == pytest.approx(wanted, rel=1e-12)


def test_an_even_reference_gives_kto_half_of_lambda(single: PreferenceSet) -> None:
    config = PreferConfig(loss="kto", beta=BETA, desirable=1.4, undesirable=0.8)
    tokens = drawn(single.answer_tokens, seed=3, mean=2.0)
    known = np.asarray([sum(own) for own in tokens])
    found = PreferenceObjective(config, single, known, beta=lambda: BETA, device=torch.device("cpu"))
    batch = single.batch(np.arange(len(single)))
    wanted = sum(single.supervised * np.where(single.desired, 0.7, 0.4))
    assert found(values(batch, tokens), batch.labels_N, rows=len(single), scale=1.0).item() == pytest.approx(wanted)
