"""Who goes on: the rule of halving written a second time, and what must hold however rounds are cut."""

from __future__ import annotations

import math
import random

import pytest

from workbench.training.search.halving import Halving, Move, Round, leader


def climb(halving: Halving, trials: int, at_once: int, loss: dict[tuple[int, int], float]) -> list[Round]:
    """All rounds of a search whose trial t has `loss[t, rung]`."""
    standings: list[dict[int, float]] = []
    rounds = []
    while trained := halving.next_round(standings, left=trials - len(standings), at_once=at_once):
        rounds.append(trained)
        moves = [*trained.moves, *(Move(len(standings) + new, 0) for new in range(trained.new))]
        standings += [{} for _ in range(trained.new)]
        for trial, rung in moves:
            assert rung == max(standings[trial], default=-1) + 1, "rung by rung, and none twice"
            standings[trial][rung] = loss[trial, rung]
    return rounds


def losses(trials: int, rungs: int, seed: int) -> dict[tuple[int, int], float]:
    chance = random.Random(seed)
    return {(trial, rung): chance.random() for trial in range(trials) for rung in range(rungs + 1)}


@pytest.mark.parametrize("eta", [2, 3, 4])
@pytest.mark.parametrize("trials", [2, 5, 9, 32])
def test_all_at_once_the_best_of_each_rung_go_on(eta: int, trials: int) -> None:
    """Successive halving as in Jamieson & Talwalkar (2016): sort, keep one of eta, train on."""
    loss = losses(trials, 2, seed=trials)
    alive, wanted = list(range(trials)), [set(range(trials))]
    for rung in (0, 1):
        alive = sorted(alive, key=lambda trial: loss[trial, rung])[: max(1, len(alive) // eta)]
        wanted.append(set(alive))
        if len(alive) == 1 and rung == 0:
            break
    rounds = climb(Halving(eta, 2), trials, trials, loss)
    found = [set(range(rounds[0].new)), *({move.trial for move in trained.moves} for trained in rounds[1:])]
    assert found[: len(wanted)] == wanted
    assert rounds[-1].moves[0].rung == 2 and len(found[-1]) == max(1, len(found[-2]) // eta)


@pytest.mark.parametrize("at_once", [1, 4, 7, 20])
def test_waves_of_any_size_promote_only_who_is_among_the_best(at_once: int) -> None:
    """The rule of ASHA (Li et al. 2020): at each moment a trial goes on that is among the best of its rung."""
    halving, trials, loss = Halving(3, 2), 20, losses(20, 2, seed=at_once)
    standings: list[dict[int, float]] = []
    rounds = climb(halving, trials, at_once, loss)
    assert sum(trained.new for trained in rounds) == trials and all(len(w.moves) + w.new <= at_once for w in rounds)
    for trained in rounds:
        for trial, rung in trained.moves:
            better = [each for each in standings if rung - 1 in each and each[rung - 1] < loss[trial, rung - 1]]
            there = [each for each in standings if rung - 1 in each]
            last = trained is rounds[-1] and len(trained.moves) == 1
            assert len(better) < max(len(there) // 3, last)
        for trial, rung in [*trained.moves, *(Move(len(standings) + new, 0) for new in range(trained.new))]:
            if trial == len(standings):
                standings.append({})
            standings[trial][rung] = loss[trial, rung]
    for rung in (0, 1):  # in the end nobody waits who should go on
        there = sorted((each[rung], trial) for trial, each in enumerate(standings) if rung in each)
        assert all(rung + 1 in standings[trial] for _, trial in there[: len(there) // 3])
    assert any(2 in each for each in standings)


def test_who_failed_never_goes_on_and_where_all_did_nobody_does() -> None:
    halving = Halving(2, 2)
    loss = losses(6, 2, seed=1) | {(trial, 0): math.inf for trial in range(4)}
    rounds = climb(halving, 6, 6, loss)
    assert {move.trial for trained in rounds for move in trained.moves} <= {4, 5} and rounds[-1].moves[0].rung == 2
    assert len(climb(halving, 6, 6, {key: math.inf for key in loss})) == 1
    late = {(trial, rung): float(trial) for trial in range(6) for rung in range(3)} | {(0, 2): math.inf}
    assert climb(halving, 6, 6, late)[-1] == Round((Move(1, 2),), 0), "the next best, where the best failed at the end"
    failed = [{0: 0.0, 1: 0.0, 2: math.inf}, {0: 1.0, 1: 1.0}]
    assert halving.within(Round((), 4), failed, trainings=0.2) == Round((Move(1, 2),), 0)
    assert leader([{0: math.inf}, {}]) is None


@pytest.mark.parametrize("eta,rungs,steps", [(3, 3, 62), (2, 5, 32), (7, 2, 98), (4, 1, 4)])
def test_a_rung_is_met_by_the_first_step_that_is_not_before_it(eta: int, rungs: int, steps: int) -> None:
    for rung, share in enumerate(Halving(eta, rungs).shares):
        power = eta ** (rungs - rung)
        assert next(step for step in range(1, steps + 1) if step / steps >= share) == -(-steps // power)


def test_what_a_search_costs_is_what_its_waves_cost() -> None:
    halving, loss = Halving(4, 3), losses(32, 3, seed=0)
    assert halving.everything(32) == [32, 8, 2, 1]
    standings: list[dict[int, float]] = []
    total = 0.0
    for trained in climb(halving, 32, 32, loss):
        total += halving.cost(trained, standings)
        standings += [{0: loss[trial, 0]} for trial in range(trained.new)]
        for trial, rung in trained.moves:
            standings[trial][rung] = loss[trial, rung]
    assert halving.cost_of([32, 8, 2, 1]) == 2.0 and total == pytest.approx(2.0)


def test_time_takes_from_the_end_of_a_wave_and_leaves_one_member_its_way() -> None:
    halving = Halving(2, 2)  # rungs after 1/4, 1/2 and all
    standings = [{0: float(trial)} for trial in range(8)]
    trained = halving.next_round(standings, left=8, at_once=8)
    assert trained == Round((Move(0, 1), Move(1, 1), Move(2, 1), Move(3, 1)), 4)
    assert halving.within(trained, standings, trainings=math.inf) == trained
    # Four go on for 1, four begin for 1, and the way from 1/2 to all costs 0.5.
    assert halving.within(trained, standings, trainings=2.5) == trained
    assert halving.within(trained, standings, trainings=2.1) == Round(trained.moves, 2)
    assert halving.within(trained, standings, trainings=1.0) == Round(trained.moves[:2], 0)
    assert halving.within(trained, standings, trainings=0.2) == Round((Move(0, 2),), 0), "the best goes all the way"
    assert halving.within(trained, [*standings, {2: 3.0}], trainings=0.2) is None, "somebody is there already"
    assert halving.within(None, standings, trainings=9.0) is None
