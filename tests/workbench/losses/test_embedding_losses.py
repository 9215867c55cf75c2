"""Losses to a teacher's vectors are the published equations, and those of sentence-transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workbench.losses import embedding_losses

STUDENT, TEACHER = (np.random.default_rng(seed).normal(size=(7, 5)) for seed in (0, 1))
ANGLES = (STUDENT * TEACHER).sum(1) / (np.linalg.norm(STUDENT, axis=1) * np.linalg.norm(TEACHER, axis=1))
ALIKE = [np.corrcoef(np.c_[each, -each]) for each in (STUDENT, TEACHER)]
"""Cosines of every two rows: correlations of what has a mean of 0."""


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mse", ((STUDENT - TEACHER) ** 2).mean()),
        ("cosine", (1 - ANGLES).mean()),
        ("relation", ((ALIKE[0] - ALIKE[1]) ** 2).mean()),
    ],
)
def test_equals_the_equation_written_out(name: str, wanted: float) -> None:
    found = embedding_losses.LOSSES[name](torch.from_numpy(STUDENT), torch.from_numpy(TEACHER))
    assert float(found) == pytest.approx(float(wanted), rel=1e-12)


def test_relations_compare_vectors_of_any_size() -> None:
    wide = torch.nn.functional.pad(torch.from_numpy(TEACHER), (0, 3))
    assert float(embedding_losses.relation(torch.from_numpy(3 * TEACHER), wide)) == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mse", "cosine"])
def test_equals_sentence_transformers(name: str) -> None:
    from sentence_transformers.sentence_transformer.losses.embed_distill import EmbedDistillLoss

    student, teacher = (torch.from_numpy(each).float() for each in (STUDENT, TEACHER))
    as_configured = SimpleNamespace(projection=None, distance_metric=name)
    theirs = EmbedDistillLoss.compute_loss_from_embeddings(as_configured, [student], [teacher])  # type: ignore[arg-type]
    assert float(embedding_losses.LOSSES[name](student, teacher)) == pytest.approx(float(theirs), rel=1e-5)
