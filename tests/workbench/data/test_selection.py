"""Selection of rows: its draws obey their law, and importance is the paper's where texts are as the paper's."""

from __future__ import annotations

import itertools
from collections import Counter
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from workbench.config.sections.sampling_config import SelectConfig
from workbench.data import selection
from workbench.data.selection import chosen, gumbel_order, importance, in_turns, most_kept, note, selected, wanted
from workbench.errors import ConfigError, DataError

SUMS = [f"how much is {a} plus {b} ? the sum is {a + b} ." for a in range(12) for b in range(12)]
TALES = [
    f"the {who} went to the {place} and ate {n} apples ."
    for who in ("fox", "hen")
    for place in ("wood", "hut", "well")
    for n in range(24)
]


def never(*_: object) -> Any:
    raise AssertionError("texts are read in vain")


def test_gumbel_top_k_is_sampling_without_replacement() -> None:
    """Every ordered pair of four rows comes as often as by drawing one row after the other (Plackett-Luce)."""
    weight = np.asarray([0.0, 0.7, -1.0, 1.5])
    chance, draws = np.exp(weight), 20_000
    found = Counter(tuple(gumbel_order(weight, seed=seed)[:2].tolist()) for seed in range(draws))
    for first, second in itertools.permutations(range(4), 2):
        wanted = chance[first] / chance.sum() * chance[second] / (chance.sum() - chance[first])
        assert abs(found[first, second] / draws - wanted) < 4.5 * (wanted * (1 - wanted) / draws) ** 0.5


def test_importance_is_the_sum_of_log_ratios_for_texts_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Xie et al. 2023, written a second time with another hash; a large target makes the prior vanish."""
    monkeypatch.setattr(selection, "PRIOR", 1e-9)
    texts = [text for text in SUMS if len(text.split()) == 10][:60] + [f"a b c d e f g h {n} ." for n in range(40)]
    target = SUMS

    def features(text: str) -> Counter[int]:
        words = text.lower().split()
        return Counter(
            int(sha256(gram.encode()).hexdigest(), 16) % 10**9
            for gram in [*words, *map(" ".join, itertools.pairwise(words))]
        )

    raw, aim = sum(map(features, texts), Counter()), sum(map(features, target), Counter())
    known = {gram for gram in raw if aim[gram]}  # the prior is nearly nothing: others have a ratio of minus infinity
    total_raw, total_aim = sum(raw.values()), sum(aim.values())
    found = importance(texts, target)
    for number, text in enumerate(texts):
        own = features(text)
        if own.keys() <= known:
            wanted = sum(n * np.log(aim[g] / total_aim * total_raw / raw[g]) for g, n in own.items())
            assert found[number] == pytest.approx(wanted, rel=0.02, abs=0.05), "buckets may collide"


def test_rows_like_the_target_are_found_among_others_whatever_their_length() -> None:
    texts = [*SUMS[:70], *TALES[:70], "hen .", *(2 * text for text in SUMS[70:80])]
    weight = importance(texts, SUMS[80:])
    assert min(*weight[:70], *weight[141:]) > max(weight[70:141])
    config = SelectConfig(by="importance", rows=80, target="sums.jsonl")
    kept, note = selected(
        config, np.ones(len(texts), dtype=np.int64), seed=0, texts=lambda: texts, target=lambda _: SUMS[80:]
    )
    assert note == "71 rows that data.select did not choose by likeness to sums.jsonl"
    assert len(kept) == 80 and (np.diff(kept) > 0).all()
    assert np.isin(kept, [*range(70), *range(141, 151)]).mean() > 0.95


def test_random_rows_are_a_control_that_reads_no_text() -> None:
    lengths = np.arange(1, 201)
    found = [
        selected(SelectConfig(by="random", rows=share), lengths, seed=seed, texts=never, target=never)[0]
        for seed, share in ((0, 0.25), (0, 50), (1, 50))
    ]
    assert np.array_equal(found[0], found[1]) and len(found[0]) == 50 and not np.array_equal(found[1], found[2])


@pytest.mark.parametrize("tokens", [1, 17, 500])
def test_a_budget_of_tokens_takes_the_first_drawn_rows_that_fit(tokens: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 9, size=300)
    lengths[gumbel_order(np.zeros(300), seed=0)[0]] = 1
    kept, _ = selected(SelectConfig(by="random", tokens=tokens), lengths, seed=0, texts=never, target=never)
    order = gumbel_order(np.zeros(300), seed=0)
    assert set(kept) == set(order[: len(kept)])
    assert lengths[kept].sum() <= tokens < lengths[kept].sum() + lengths[order[len(kept)]]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"rows": 9}, ConfigError, "9 rows in all, so that nothing is chosen"),
        ({"tokens": 100}, ConfigError, "45 tokens in all, so that nothing is chosen"),
        ({"rows": 0.01}, DataError, "keeps no row of 9 rows"),
        ({"tokens": 4}, DataError, "keeps no row of 45 tokens"),
    ],
)
def test_a_budget_that_chooses_nothing_is_refused(words: dict[str, Any], error: type[Exception], message: str) -> None:
    config = SelectConfig(by="random", **words)
    with pytest.raises(error, match=message):
        selected(config, np.full(9, 5), seed=0, texts=never, target=never)


def test_a_target_without_words_is_refused() -> None:
    with pytest.raises(DataError, match=r"t\.csv: holds no word"):
        importance(["a b"], [" "], name="t.csv")


@pytest.mark.parametrize(("band", "low", "high"), [("low", 0.0, 0.25), ("middle", 0.375, 0.625), ("high", 0.75, 1.0)])
def test_a_band_of_perplexity_is_a_range_of_quantiles(band: Any, low: float, high: float) -> None:
    losses = np.random.default_rng(3).gamma(2, size=40)
    config = SelectConfig(by="perplexity", band=band, rows=0.25)
    kept = chosen(config, np.ones(40, dtype=np.int64), losses[:, None])
    said = note(config, losses, kept)
    share = np.argsort(np.argsort(losses))[kept] / 40
    assert len(kept) == 10 and low - 0.03 <= share.min() and share.max() <= high
    assert kept.tolist() == sorted(kept) and f"{losses[kept].max():.3g}" in said and said.startswith("30 rows")


def test_the_most_difficult_rows_that_a_prompt_helps_are_kept() -> None:
    difficulty = np.array([[0.5, 0.99, 1.2, 0.7, 1.0, 0.2]]).T
    config = SelectConfig(by="ifd", rows=3)
    assert wanted(config, difficulty).tolist() == [1, 3, 0, 5]
    assert chosen(config, np.ones(6, dtype=np.int64), difficulty).tolist() == [0, 1, 3]
    with pytest.raises(ConfigError, match="nothing is chosen"):
        chosen(SelectConfig(by="ifd", rows=5), np.ones(6, dtype=np.int64), difficulty)
    with pytest.raises(DataError, match="no prompt helps"):
        chosen(config, np.ones(2, dtype=np.int64), np.array([[1.0], [1.5]]))


def test_a_budget_of_tokens_ends_before_the_row_that_exceeds_it() -> None:
    config = SelectConfig(by="perplexity", band="low", tokens=10)
    lengths = np.array([4, 5, 2, 9])
    assert chosen(config, lengths, np.array([[0.1, 0.2, 0.3, 0.4]]).T).tolist() == [0, 1]
    assert most_kept(config, lengths) == 2, "the two shortest"


def test_parts_of_a_target_take_rows_in_turns() -> None:
    """Each turn written out: the part's best row among those that nobody has taken."""
    score_NG = np.random.default_rng(5).normal(size=(60, 7)) + np.arange(7)  # the last part's scores are the highest
    left, expected = set(range(60)), []
    for turn in range(60):
        best = max(left, key=lambda row: score_NG[row, turn % 7])
        left.remove(best)
        expected.append(best)
    order = in_turns(score_NG)
    assert order.tolist() == expected
    alone = score_NG[:, :1]
    assert in_turns(alone).tolist() == np.argsort(-alone[:, 0]).tolist(), "one part takes its highest scores"
    config = SelectConfig(by="gradient", rows=14, target="t.jsonl")
    assert chosen(config, np.ones(60, dtype=np.int64), score_NG).tolist() == sorted(expected[:14])
