"""Section `prefer`: what follows from its settings."""

from __future__ import annotations

import pytest

from workbench.config.sections.prefer_config import PreferConfig


@pytest.mark.parametrize(("end", "wanted"), [(None, [0.2] * 5), (1.0, [0.2, 0.4, 0.6, 0.8, 1.0]), (0.1, [0.2, 0.1])])
def test_beta_goes_from_its_start_to_its_end_in_a_straight_line(end: float | None, wanted: list[float]) -> None:
    section = PreferConfig(beta=0.2, beta_end=end)
    shares = [place / (len(wanted) - 1) for place in range(len(wanted))]
    assert [section.beta_at(share) for share in shares] == pytest.approx(wanted)


def test_a_loss_adds_what_its_paper_adds_unless_it_is_told() -> None:
    assert PreferConfig(loss="orpo").sft_factor == PreferConfig(loss="cpo").sft_factor == 1
    assert PreferConfig(loss="dpo").sft_factor == PreferConfig(loss="kto").sft_factor == 0
    assert PreferConfig(loss="cpo", alpha=0.0).sft_factor == 0 and PreferConfig(loss="kto", alpha=0.3).sft_factor == 0.3
