"""Self-paced learning draws every row as often as without it, and the rows of low measured loss first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workbench.training.sampling.samplers import Tokens, followed, of
from tests.workbench.training.sampling.test_infobatch import Two
from workbench.config import RunConfig
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.data.batching import global_batch
from workbench.errors import ConfigError
from workbench.runs.ranks import ALONE
from workbench.training.sampling.row_orders import SelfPaced, row_order

TOKENS = [5, 1, 9, 2, 7, 3, 4, 6]


def paced(tokens: Any, steps: int, *, size: int = 2, seed: int = 0, ranks: Any = ALONE, **curriculum: Any) -> SelfPaced:
    data = {"train": "rows.jsonl", "curriculum": {"by": "self_paced", **curriculum}}
    train = {"steps": steps}
    config = RunConfig.model_validate(
        {"recipe": "sft", "seed": seed, "data": data, "batch": {"size": size}, "train": train}
    )
    found = row_order(Tokens(np.asarray(tokens)), config, steps, ranks)
    assert isinstance(found, SelfPaced)
    return found


@settings(max_examples=60)
@given(
    count=st.integers(2, 40),
    size=st.integers(1, 9),
    passes=st.floats(1.3, 5),
    start=st.floats(0.01, 0.99),
    until=st.floats(0.01, 1),
    pace=st.sampled_from(["linear", "root", "step"]),
    seed=st.integers(0, 5),
)
def test_every_row_comes_as_often_as_without_it(
    count: int, size: int, passes: float, start: float, until: float, pace: Any, seed: int
) -> None:
    steps = max(-(-count // size) + 1, round(passes * -(-count // size)))
    found = paced([1] * count, steps, size=size, seed=seed, start=start, until=until, pace=pace)
    loss_N = np.random.default_rng(seed).random(count)
    draws = [draw.rows for draw in followed(found, loss_N, 0, steps)]
    plain = [len(global_batch(step, rows=count, size=size, seed=seed)) for step in range(steps)]
    assert [len(rows) for rows in draws] == plain, "steps are as large as without it"
    times = np.bincount(np.concatenate(draws), minlength=count)
    whole, rest = divmod(sum(plain), count)
    assert sorted(times) == [whole] * (count - rest) + [whole + 1] * rest


def test_the_first_pass_is_that_without_a_curriculum() -> None:
    draws = followed(paced(TOKENS, 20, seed=3), [1.0] * 8, 0, 4)
    for step, draw in enumerate(draws):
        assert np.array_equal(draw.rows, global_batch(step, rows=8, size=2, seed=3))


@pytest.mark.parametrize("first", ["easy", "hard"])
def test_rows_open_in_the_order_of_their_loss_at_the_pace_of_the_rest(first: Any) -> None:
    """Without draws to spare no row comes before the share is as large: 10 passes, of which each row has 9 draws."""
    count, steps = 40, 200
    words = {"first": first, "start": 0.2, "until": 0.9, "pace": "linear"}
    found, share = paced([1] * count, steps, **words), CurriculumConfig(by="self_paced", **words).open_share
    loss_N = np.random.default_rng(1).permutation(count).astype(float)
    place_N = loss_N if first == "easy" else count - 1 - loss_N
    followed(found, loss_N, 0, 20)
    spent = np.zeros(count)
    for step in range(20, steps):
        (draw,) = followed(found, loss_N, step, step + 1)
        asked = round(share((step - 20) / (steps - 20)) * count)
        left = 9 - spent
        enough = 1 + np.searchsorted(np.cumsum(left[np.argsort(place_N)]), len(draw.rows))
        assert place_N[draw.rows].max() < max(asked, enough)
        spent += np.bincount(draw.rows, minlength=count)
    assert (spent == 9).all()


def test_open_rows_change_with_what_is_measured() -> None:
    """Rows that become hard while they are open make room for those that seemed hard."""
    found = paced([1] * 40, 80, start=0.25, until=1.0, pace="linear")
    before = np.arange(40.0)
    followed(found, before, 0, 20)
    first = followed(found, before, 20, 21)[0].rows
    assert first.max() < 10
    late = before.copy()
    late[first] = 100.0
    found.rows_done(21, of(first, late))
    assert not set(first) & set(found.rows(21).tolist())


def test_it_goes_on_from_its_state_anywhere() -> None:
    losses = np.random.default_rng(0).random(70)
    whole = followed(paced([1] * 70, 100), losses, 0, 100)
    for at in (1, 35, 36, 38, 61):
        before = paced([1] * 70, 100)
        followed(before, losses, 0, at)
        again = paced([1] * 70, 100)
        again.load({name: each.clone() for name, each in before.state().items()})
        for mine, theirs in zip(followed(again, losses, at, 100), whole[at:], strict=True):
            assert mine.rows.tolist() == theirs.rows.tolist()


def test_two_processes_draw_what_one_does() -> None:
    ranks, losses = Two(), [0.1, 3.0, 0.2, 0.3, 2.0, 0.4, 0.5, 0.6]
    both, alone = paced(TOKENS, 20, ranks=ranks), paced(TOKENS, 20)
    for step, draw in enumerate(followed(alone, losses, 0, 20)):
        rows = both.rows(step)
        assert rows.tolist() == draw.rows.tolist()
        both.rows_done(step + 1, of(rows[:1], losses))
        ranks.other.append(of(rows[1:], losses))


def test_what_comes_next_is_told_ahead_as_far_as_it_is_known() -> None:
    found, known = paced([1] * 96, 150), 0
    for step in range(149):
        followed(found, np.arange(96), step, step + 1)
        ahead = found.ahead(step + 1)
        known += bool(len(ahead))
        assert not len(ahead) or ahead.tolist() == found.rows(step + 1).tolist()
    assert known > 100, "stretches of three steps"
    assert not len(found.ahead(150)), "the run has ended"


def test_a_run_of_one_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the run ends with it .*\n  Write more train.epochs"):
        paced(TOKENS, 4)
