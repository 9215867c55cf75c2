"""The loss of answers that the model wrote, as the section `reinforce` says.

Legend: N labels, B answers and P pairs of a micro-batch, T most tokens of an answer, S answers of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.data.text.preference_pairs import ANSWER, ROW
from workbench.losses import policy_losses, preferences
from workbench.training.preference_objective import dense
from workbench.training.reinforcement.rollout import Rollout
from workbench.training.reinforcement.rollouts import RolloutRows
from workbench.training.step_metrics import StepMeter


class ReinforceObjective:
    """The loss of the answers of a step; what the step knows of them is at hand.

    Args:
        rollouts: The training examples.
    """

    def __init__(self, config: ReinforceConfig, rollouts: RolloutRows, *, device: torch.device) -> None:
        self._config, self._rollouts, self._device = config, rollouts, device
        self._known: tuple[Rollout, Rollout] | None = None
        self.meter = StepMeter()

    def __call__(self, log_p_N: Tensor, labels_N: Tensor, *, rows: int, scale: float) -> Tensor:
        """Summed loss times `scale`, a scalar.

        Args:
            log_p_N: Log-probabilities of the predicted tokens of a micro-batch.
            labels_N: Labels (N, 4) of that micro-batch.
            rows: Its rows, B.
        """
        now = self._now()
        log_p_BT = dense(log_p_N, labels_N, rows=rows, longest=self._config.max_new_tokens)
        slot_B = labels_N.new_zeros(rows).scatter(0, labels_N[:, ROW], labels_N[:, ANSWER])
        of = self._of_pairs if self._config.pairs else self._of_answers
        loss_B = of(now, log_p_BT, slot_B, counted=bool(scale))
        if scale:
            self._tell(now, log_p_BT, slot_B)
        return loss_B.sum() * scale

    def _now(self) -> Rollout:
        """The answers of the step, on the device."""
        rollout = self._rollouts.now
        if self._known is None or self._known[0] is not rollout:
            self._known = rollout, rollout.to(self._device)
        return self._known[1]

    def _of_answers(self, now: Rollout, log_p_BT: Tensor, slot_B: Tensor, *, counted: bool) -> Tensor:
        """Loss of each answer (B,)."""
        config, settings = self._config, self._config.settings
        assert now.advantage_ST is not None and settings.clip_high is not None
        mask_BT = now.mask_ST[slot_B]
        if config.drop_cut:
            mask_BT = mask_BT & ~now.cut_S[slot_B][:, None]
        old_BT = log_p_BT.detach() if config.updates == 1 else _rows(now.old_ST, slot_B)
        in_loss = settings.beta if settings.kl == "loss" else 0.0
        importance = self._importance(now, old_BT, mask_BT, slot_B, counted=counted) if config.corrects else None
        loss_B, clipped_BT = policy_losses.policy_loss(
            log_p_BT,
            old_BT,
            now.advantage_ST[slot_B],
            mask_BT,
            low=config.clip,
            high=settings.clip_high,
            normalise=settings.normalise,
            longest=config.max_new_tokens,
            reference_BL=_rows(now.reference_ST, slot_B) if in_loss else None,
            beta=in_loss,
            weight_BL=importance,
        )
        copies_B = now.copies_S[slot_B]
        if counted:
            self.meter.add({"update[clipped]": (clipped_BT.double(), mask_BT * copies_B[:, None])})
        return loss_B * copies_B

    def _importance(self, now: Rollout, old_BT: Tensor, mask_BT: Tensor, slot_B: Tensor, *, counted: bool) -> Tensor:
        """Weights (B, T) of tokens, or (B, 1) of answers, for who drew them."""
        weights = policy_losses.importance(
            old_BT.double(),
            _rows(now.sampled_ST, slot_B),
            mask_BT,
            cap=self._config.cap,
            normalise=self._config.settings.normalise,
        )
        if counted:
            counts_BT = mask_BT * now.copies_S[slot_B][:, None]
            figures = {"update[importance]": weights.weight, "update[capped]": weights.capped.double()}
            self.meter.add({name: (value.expand_as(counts_BT), counts_BT) for name, value in figures.items()})
        return weights.weight

    def _of_pairs(self, now: Rollout, log_p_BT: Tensor, slot_B: Tensor, *, counted: bool) -> Tensor:
        """Loss of each pair (P,), 0 where both answers have one reward."""
        mask_BT = now.mask_ST[slot_B]
        ratio_B = (log_p_BT - _rows(now.reference_ST, slot_B)).masked_fill(~mask_BT, 0).sum(1)
        difference_P = ratio_B[::2] - ratio_B[1::2]
        total_B = now.total_S[slot_B]
        differs_P = total_B[::2] > total_B[1::2]
        if counted:
            right_P = (difference_P.sign() + 1) / 2
            self.meter.add({"update[accuracy]": (right_P, differs_P)})
        return preferences.dpo(difference_P, beta=self._config.settings.beta) * differs_P

    @torch.no_grad()
    def _tell(self, now: Rollout, log_p_BT: Tensor, slot_B: Tensor) -> None:
        """Means for metrics.jsonl: of the tokens, and of the step."""
        mask_BT = now.mask_ST[slot_B]
        if not self._config.pairs:
            mask_BT = mask_BT * now.copies_S[slot_B][:, None]
        figures = {"update[entropy]": (-log_p_BT, mask_BT)}
        if now.reference_ST is not None:
            kl_BT = policy_losses.divergence(log_p_BT, _rows(now.reference_ST, slot_B))
            figures["update[kl]"] = (kl_BT, mask_BT)
        one = torch.ones(1)  # float32, so that the mean of equal numbers is exact over any number of micro-batches
        self.meter.add(figures)
        self.meter.add({name: (value * one, one) for name, value in self._rollouts.figures.items()})


def _rows(value_ST: Tensor | None, slot_B: Tensor) -> Tensor:
    assert value_ST is not None, "the rollout reads what the section needs"
    return value_ST[slot_B].double()
