"""Cards by name, and what a plan takes of them."""

from __future__ import annotations

import pytest

from workbench.errors import ConfigError
from workbench.planning import step_time
from workbench.planning.cards import CARDS, DeviceCard, find
from workbench.planning.step_time import StepWork


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("4090", "4090"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("rtx-5090", "5090"),
        ("Tesla T4", "t4"),
        ("A100 80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_card_is_found_as_people_and_drivers_write_it(name: str, card: str) -> None:
    assert find(name) == CARDS[card]


@pytest.mark.parametrize(
    ("name", "cure"),
    [("a100", "Write a100-40gb or a100-80gb"), ("409", "Write 4090"), ("gpu", "Write one of t4, "), ("", "or cpu")],
)
def test_other_names_are_refused_with_what_to_write(name: str, cure: str) -> None:
    with pytest.raises(ConfigError, match="there is no card") as refused:
        find(name)
    assert cure in str(refused.value)


@pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))
def test_rates_are_of_one_order(card: DeviceCard) -> None:
    """A digit too many shows: memory is read in 0.015 to 0.1 s, and each byte allows 75 to 500 operations."""
    assert 0.015 < card.memory / card.read < 0.1
    assert 75 < card.half / card.read < 500 and 1.9 < card.half / card.single <= 30
    assert 1e10 <= card.link < card.read


def test_a_step_takes_its_products_and_what_it_reads() -> None:
    """By the equation: operations at three shares of the rate, and weights read twice in each pass."""
    card, work = find("4090"), StepWork(tokens=1000, passes=3, weight_bytes=5 * 10**9)
    read = 3 * 2 * 5e9 / card.read
    found = step_time.assumed(work, 2e9, card)
    assert [found.low, found.seconds, found.high] == pytest.approx(
        [2e12 / (share * card.half) + read for share in (0.6, 0.35, 0.2)]
    )
    assert step_time.assumed(work, 2e9, card, single=True).low == pytest.approx(2e12 / (0.6 * card.single) + read)
