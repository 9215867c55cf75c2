"""The loss of a micro-batch of preference pairs or rated answers, and its figures for metrics.jsonl.

Legend: N labels, B answers of a micro-batch, S answers of the data set, P examples, L tokens of the longest answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from workbench import losses
from workbench.config.sections.prefer_config import PreferConfig
from workbench.data.batching import MicroBatch
from workbench.data.text.preference_pairs import ANSWER, PLACE, ROW, TOKEN, MismatchedRows, PreferenceSet
from workbench.losses import preference_losses
from workbench.models.output_heads import Head
from workbench.training.step_metrics import StepMeter

Floats = npt.NDArray[np.float64]


def log_probs(model: nn.Module, head: Head, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
    """log p (N,) of the predicted tokens of a micro-batch with labels (N, 4), of softmax(logits / temperature)."""
    return of_hidden(head.supervised(model, batch.inputs, batch.positions_N), batch.labels_N, head, temperature)


def of_hidden(hidden_ND: Tensor, labels_N: Tensor, head: Head, temperature: float = 1.0) -> Tensor:
    """The same from hidden states in front of the head."""
    project = _project(head, temperature)
    return losses.token_log_probs(
        hidden_ND, labels_N[:, TOKEN], project, vocabulary=head.vocabulary, weights=head.trainable()
    )


def entropies(hidden_ND: Tensor, head: Head, temperature: float) -> Tensor:
    """Entropy (N,) of softmax(logits / temperature) from hidden states in front of the head, in nats."""
    project = _project(head, temperature)
    return losses.token_entropies(hidden_ND, project, vocabulary=head.vocabulary, weights=head.trainable())


def _project(head: Head, temperature: float) -> Callable[[Tensor], Tensor]:
    return head.project if temperature == 1 else lambda hidden: head.project(hidden) / temperature


class PreferenceObjective:
    """The loss of preference pairs, or of answers that are rated good or bad.

    Args:
        rows: The training examples.
        reference_S: The reference's log-probabilities of all answers, normalised as in the loss; None: no reference.
        beta: Returns the present beta.
    """

    def __init__(
        self,
        config: PreferConfig,
        rows: PreferenceSet,
        reference_S: Floats | None,
        *,
        beta: Callable[[], float],
        device: torch.device,
    ) -> None:
        self._config, self._beta, self._each = config, beta, rows.each
        self._longest = int(rows.answer_tokens.max())
        self._tokens_S, self._shared_S = _on(device, rows.answer_tokens), _on(device, rows.shared_tokens)
        self._desired_S, self._margin_P = _on(device, rows.desired), _on(device, rows.margins)
        self._weight_P = _on(device, rows.supervised)
        self._tie_P = _on(device, rows.ties) if rows.paired and rows.ties.any() else None
        self._reference_S = None if reference_S is None else _on(device, reference_S)
        self.meter = StepMeter()
        self.baseline = torch.zeros((), dtype=torch.float64, device=device)
        """kto's reference point in this step."""

    def __call__(self, log_p_N: Tensor, labels_N: Tensor, *, rows: int, scale: float) -> Tensor:
        """Summed loss times `scale`, a scalar.

        Args:
            labels_N: Labels (N, 4) of a micro-batch.
            rows: Its rows, B.
        """
        config, beta = self._config, self._beta()
        answer_B = _answers(labels_N, rows)
        log_p_BL = dense(log_p_N, labels_N, rows=len(answer_B), longest=self._longest)
        model = preference_losses.answers(log_p_BL, self._tokens_S[answer_B], self._shared_S[answer_B], self._config)
        desired_B, example_P = self._desired_S[answer_B], answer_B[:: self._each] // self._each
        tie_P = None if self._tie_P is None else self._tie_P[example_P]
        judged = preference_losses.judge(
            model,
            None if self._reference_S is None else self._reference_S[answer_B],
            config,
            beta=beta,
            desired_B=desired_B,
            margin_P=self._margin_P[example_P],
            baseline=self.baseline,
            tie_P=tie_P,
        )
        weight_P = self._weight_P[example_P]
        if scale:
            told_P = weight_P if tie_P is None else weight_P * ~tie_P
            weight_B = told_P.repeat_interleave(self._each)
            good, bad = ("chosen", "rejected") if self._each == 2 else ("good", "bad")
            good_B, bad_B = weight_B * desired_B, weight_B * ~desired_B
            figures = {
                f"reward[{good}]": (judged.reward_B, good_B),
                f"reward[{bad}]": (judged.reward_B, bad_B),
                f"log_p[{good}]": (model.mean_B, good_B),
                f"log_p[{bad}]": (model.mean_B, bad_B),
            }
            if self._each == 2:
                margin_P = judged.reward_B[::2] - judged.reward_B[1::2]
                figures["reward[margin]"] = (margin_P, weight_B[::2])
                figures["reward[accuracy]"] = ((margin_P.sign() + 1) / 2, weight_B[::2])
            elif self._config.loss == "kto":
                figures["reward[reference point]"] = (self._beta() * self.baseline.expand_as(judged.reward_B), weight_B)
            if self._config.beta_end is not None:
                figures["scale[beta]"] = (torch.full_like(judged.reward_B, self._beta()), weight_B)
            self.meter.add(figures)
        return (judged.loss_P * weight_P).sum() * scale


class KtoLook:
    """Measures KTO's reference point of a step, on mismatched answers: those to other prompts.

    Args:
        rows: The training examples, with such answers.
        reference_S: The reference's log-probabilities of those answers.
        read: From a micro-batch to log p (N,) of its predicted tokens.
    """

    def __init__(
        self,
        objective: PreferenceObjective,
        rows: PreferenceSet,
        reference_S: Floats,
        read: Callable[[MicroBatch], Tensor],
    ) -> None:
        self.rows = MismatchedRows(rows)
        self._objective, self._read = objective, read
        self._longest = int(self.rows.rows.supervised.max())
        device = objective.baseline.device
        self._tokens_S, self._reference_S = _on(device, self.rows.rows.supervised), _on(device, reference_S)

    def measure(self, batch: MicroBatch) -> Tensor:
        """Sum of the log-ratios of a micro-batch, and their number (2,)."""
        assert batch.rows_B is not None
        answer_B = _answers(batch.labels_N, len(batch.rows_B))
        log_p_BL = dense(self._read(batch), batch.labels_N, rows=len(answer_B), longest=self._longest)
        tokens_B = self._tokens_S[answer_B]
        model = preference_losses.answers(log_p_BL, tokens_B, tokens_B, self._objective._config)
        ratio_B = model.counted_B - self._reference_S[answer_B]
        return torch.stack([ratio_B.sum(), torch.ones_like(ratio_B).sum()])

    def take(self, sums: Tensor) -> None:
        """Set the reference point of the following losses."""
        self._objective.baseline = preference_losses.kto_baseline(sums[0] / sums[1])


def dense(log_p_N: Tensor, labels_N: Tensor, *, rows: int, longest: int) -> Tensor:
    """Log-probabilities (B, L) by answer and position, 0 where there is no token; differentiable and deterministic."""
    empty_BL = log_p_N.new_zeros((rows, longest), dtype=torch.float64)
    return empty_BL.index_put((labels_N[:, ROW], labels_N[:, PLACE]), log_p_N.double())


def _answers(labels_N: Tensor, rows: int) -> Tensor:
    """Number (B,) in the data set of the answer of each row."""
    return labels_N.new_zeros(rows).scatter(0, labels_N[:, ROW], labels_N[:, ANSWER])


def _on(device: torch.device, values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
