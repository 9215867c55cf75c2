"""The law by the figures of its paper."""

from __future__ import annotations

import pytest

from workbench.planning import plan


@pytest.mark.parametrize(
    ("parameters", "tokens", "operations"),
    # Hoffmann et al. 2022, table 3: compute-optimal sizes by the first approach.
    [(400e6, 8.0e9, 1.92e19), (1e9, 20.2e9, 1.21e20), (10e9, 205.1e9, 1.23e22), (67e9, 1.5e12, 5.76e23)],
)
def test_it_is_the_table_of_the_paper(parameters: float, tokens: float, operations: float) -> None:
    found = plan.compute_optimal(operations)
    assert found == (pytest.approx(parameters, rel=0.12), pytest.approx(tokens, rel=0.12))
    assert 6 * found[0] * found[1] == pytest.approx(operations)


def test_the_sentence_says_what_it_is_about() -> None:
    text = plan.scaling_advice(operations=1.2e14, parameters=6_000_000, tokens=1_000_000)
    assert text.startswith("Scaling law of pretraining, which fine-tuning does not follow")
    assert "1.0 M parameters" in text and "20.0 M tokens; this run has 6.0 M, and 1.0 M tokens" in text
