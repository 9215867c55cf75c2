"""What a truncated cache loses: the divergence over the whole vocabulary less that over k tokens and all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.workbench.distillation.cached import settings
from workbench.distillation.cache_gap import GapProbe
from workbench.errors import ConfigError

POSITIONS, VOCABULARY = 40, 300


def _probe(**config: Any) -> GapProbe:
    generator = torch.Generator().manual_seed(5)
    student, teacher = (3 * torch.randn(POSITIONS, VOCABULARY + more, generator=generator) for more in (4, 0))
    section = settings(**config)
    return GapProbe(student, (teacher / section.temperature).log_softmax(-1), section)


def _divergence(student_NE: Tensor, teacher_NE: Tensor, loss: str) -> float:
    p, q = teacher_NE, student_NE
    if loss == "forward_kl":
        return float(F.kl_div(q.log(), p, reduction="sum")) / POSITIONS
    if loss == "reverse_kl":
        return float(F.kl_div(p.log(), q, reduction="sum")) / POSITIONS
    return float((p - q).abs().sum()) / 2 / POSITIONS


@pytest.mark.parametrize(
    ("loss", "temperature", "factor"),
    [("forward_kl", 2.0, 4.0), ("reverse_kl", 1.0, 1.0), ("total_variation", 2.0, 2.0)],
)
@pytest.mark.parametrize("k", [1, 7, 64, VOCABULARY])
def test_the_gap_is_the_live_divergence_less_the_cached_one(
    loss: str, temperature: float, factor: float, k: int
) -> None:
    probe = _probe(loss=loss, temperature=temperature)
    teacher = probe.teacher_NV.double().exp()
    student = (probe.student_NV.double()[:, :VOCABULARY] / temperature).softmax(-1)
    order = teacher.argsort(-1, descending=True)
    events = []
    for each in (student, teacher):
        kept = each.gather(1, order[:, :k])
        events.append(torch.cat([kept, each.gather(1, order[:, k:]).sum(-1, keepdim=True)], 1))
    chosen = [each[:, : k + (k < VOCABULARY)] for each in events]
    live, cached = factor * _divergence(student, teacher, loss), factor * _divergence(*chosen, loss)
    found = probe.at(k)
    assert found.k == k and (found.live, found.cached) == (
        pytest.approx(live, rel=1e-6),
        pytest.approx(cached, rel=1e-5),
    )
    assert found.facts["gap"] == pytest.approx(live - cached, abs=1e-6) and found.facts["gap"] > -1e-6
    assert found.share == pytest.approx((live - cached) / live, abs=1e-6)


@pytest.mark.parametrize("loss", ["forward_kl", "jsd", "skew_reverse_kl"])
@pytest.mark.parametrize("share", [0.9, 0.05, 1e-6])
def test_the_chosen_k_is_the_smallest(loss: str, share: float) -> None:
    probe = _probe(loss=loss)
    found = probe.smallest(share)
    assert found.share <= share and (found.k == 1 or probe.at(found.k - 1).share > share)


def test_a_share_below_what_rounding_loses_is_refused() -> None:
    teacher = torch.full((2, 50), -20.0).scatter(1, torch.tensor([[3], [4]]), 0.0).log_softmax(-1)
    student = teacher + 1e-4 * torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    probe = GapProbe(student, teacher + 0.3, settings(dtype="float16"))
    assert probe.at(50).cached < probe.live
    with pytest.raises(ConfigError, match=r"gap=1e-06: a cache of all 50 tokens in float16 loses .*dtype=float32"):
        probe.smallest(1e-6)
