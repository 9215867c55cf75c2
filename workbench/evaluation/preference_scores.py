"""Scores of a model on preference pairs: does it find the better answer likelier than the reference does?

Legend: S answers of a set (of a pair first the chosen and then the rejected one), P examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from workbench.config.sections.prefer_config import PreferConfig
from workbench.data.batching import Indices
from workbench.data.text.preference_pairs import PreferenceSet, labelled
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation import metrics
from workbench.evaluation.forward_passes import ModelResults, over_rows
from workbench.losses import preference_losses
from workbench.losses.preference_losses import Answers
from workbench.models.output_heads import Head
from workbench.runs import units
from workbench.training import preference_objective

Floats = npt.NDArray[np.float64]


def read(
    model: nn.Module,
    head: Head,
    rows: TokenizedSet,
    shared_S: Indices,
    config: PreferConfig,
    *,
    scoring: ModelResults | None = None,
) -> tuple[Floats, Floats]:
    """Log-probabilities of answers (S,) as the loss counts them, and means over their tokens (S,), in nats. `shared_S`:
    for each answer, the tokens of the shorter answer of its pair. `scoring`: keeps results where the run may be
    stopped."""
    device = next(model.parameters()).device

    def compute(numbers: Indices) -> list[tuple[float, float]]:
        batch = labelled(rows, numbers, 1, epoch=0)
        tokens_B, shared_B = (torch.from_numpy(each[numbers]).to(device) for each in (rows.supervised, shared_S))
        batch, longest = batch.to(device), int(tokens_B.max())
        log_p_N = preference_objective.log_probs(model, head, batch)
        log_p_BL = preference_objective.dense(log_p_N, batch.labels_N, rows=len(tokens_B), longest=longest)
        log_probs = preference_losses.answers(log_p_BL, tokens_B, shared_B, config)
        return list(zip(log_probs.counted_B.tolist(), log_probs.mean_B.tolist(), strict=True))

    log_probs = over_rows(model, rows.lengths, compute, scoring=scoring, content=_content(rows, shared_S, config))
    counted_S, mean_S = np.asarray(log_probs, dtype=np.float64).T
    return counted_S, mean_S


def _content(rows: TokenizedSet, shared_S: Indices, config: PreferConfig) -> Iterator[np.ndarray[Any, Any]]:
    yield np.frombuffer(config.model_dump_json().encode(), dtype=np.uint8)
    yield shared_S
    for number in range(len(rows)):
        row = rows[number]
        yield from (row.input_ids, row.supervised, np.asarray([row.source]))


def summary(
    config: PreferConfig,
    rows: PreferenceSet,
    counted_S: Floats,
    mean_S: Floats,
    reference_S: Floats | None,
    *,
    drift: float,
) -> dict[str, float]:
    """Scores by name, as scores.json holds them; the loss first, with the value that `prefer.beta` has at the end.

    accuracy is the share of pairs whose chosen answer has the higher reward (equal rewards count half), with Wilson's
    95 % interval; for single answers the share whose reward is on the right side of the reference point. likelier is
    the share of pairs whose chosen answer has the likelier tokens, whatever the reference finds. Ties count in the loss
    alone.

    Args:
        reference_S: Log-probabilities of the reference; None where the loss has none.
        drift: Mean log-ratio of answers to other prompts, kto's reference point; else 0.
    """
    beta = config.beta_at(1.0)
    baseline = float(preference_losses.kto_baseline(torch.tensor(drift, dtype=torch.float64)))
    judged = preference_losses.judge(
        Answers(torch.from_numpy(counted_S), torch.from_numpy(mean_S)),
        None if reference_S is None else torch.from_numpy(reference_S),
        config,
        beta=beta,
        desired_B=torch.from_numpy(rows.desired),
        margin_P=torch.from_numpy(rows.margins),
        baseline=baseline,
        tie_P=torch.from_numpy(rows.ties) if rows.paired and rows.ties.any() else None,
    )
    reward_S = judged.reward_B.numpy()
    score_by_name = {"loss": float(judged.loss_P.mean())}
    if rows.paired:
        margin_P, likelier_P = (reward_S[::2] - reward_S[1::2])[~rows.ties], mean_S[::2] > mean_S[1::2]
        if not len(margin_P):  # a named set of nothing but ties
            return {"loss": round(score_by_name["loss"], 6)}
        score_by_name |= _accuracy(margin_P) | {"margin": float(margin_P.mean())}
        score_by_name["likelier"] = float(likelier_P[~rows.ties].mean())
        names = ("chosen", "rejected")
    else:
        distance_S = reward_S - beta * baseline
        score_by_name |= _accuracy(np.where(rows.desired, distance_S, -distance_S))
        names = ("good", "bad")
    judged_S = ~np.repeat(rows.ties, rows.each)
    for name, own_S in zip(names, (rows.desired & judged_S, ~rows.desired & judged_S), strict=True):
        if own_S.any():
            score_by_name[f"reward_{name}"] = float(reward_S[own_S].mean())
            score_by_name[f"log_p_{name}"] = float(mean_S[own_S].mean())
    return units.rounded(score_by_name)


def _accuracy(margin_P: Floats) -> dict[str, float]:
    """Share of margins above 0, where those equal to 0 count half, with its interval."""
    hits = float((margin_P > 0).sum() + (margin_P == 0).sum() / 2)
    return metrics.accuracy_interval(hits, len(margin_P)).scores("accuracy")
