"""The loss of answers that the model wrote, as the section `reinforce` says, and log-probabilities of these answers.

Legend: N labels, B answers and P pairs of a micro-batch, T most tokens of an answer, S answers of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from workbench.adapters import anatomy
from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.data.text.preference_pairs import ANSWER, ROW
from workbench.losses import policy_losses, preference_losses
from workbench.models.output_heads import Head
from workbench.models.shared_model import SharedModel
from workbench.training.preference_objective import dense, log_probs
from workbench.training.reinforcement.rollouts import LogProbReader, Rollout, RolloutRows
from workbench.training.step_metrics import StepMeter


class ReinforceObjective:
    """The loss of the answers of a step.

    Args:
        rollouts: The training examples, which hold what the step knows of the answers.
    """

    def __init__(self, config: ReinforceConfig, rollouts: RolloutRows, *, device: torch.device) -> None:
        self._config, self._rollouts, self._device = config, rollouts, device
        self._known: tuple[Rollout, Rollout] | None = None
        """The answers of the step, and the same on the device."""
        self.meter = StepMeter()

    def __call__(
        self, log_p_N: Tensor, labels_N: Tensor, *, rows: int, scale: float, entropy_N: Tensor | None = None
    ) -> Tensor:
        """Summed loss times `scale`, a scalar.

        Args:
            log_p_N: Log-probabilities of the predicted tokens of a micro-batch.
            labels_N: Labels (N, 4) of that micro-batch.
            rows: Its rows, B.
            entropy_N: Entropies of the distributions that those tokens are of, where the section has a bonus for it.
        """
        rollout = self._rollouts.now
        if self._known is None or self._known[0] is not rollout:
            self._known = rollout, rollout.to(self._device)
        now = self._known[1]
        log_p_BT = dense(log_p_N, labels_N, rows=rows, longest=self._config.max_new_tokens)
        slot_B = labels_N.new_zeros(rows).scatter(0, labels_N[:, ROW], labels_N[:, ANSWER])
        entropy_BT = None
        if entropy_N is not None:
            entropy_BT = dense(entropy_N, labels_N, rows=rows, longest=self._config.max_new_tokens)
        if self._config.pairs:
            loss_B = self._of_pairs(now, log_p_BT, slot_B, counted=bool(scale))
        else:
            loss_B = self._of_answers(now, log_p_BT, entropy_BT, slot_B, counted=bool(scale))
        if scale:
            self._tell(now, log_p_BT, entropy_BT, slot_B)
        return loss_B.sum() * scale

    def _of_answers(
        self, now: Rollout, log_p_BT: Tensor, entropy_BT: Tensor | None, slot_B: Tensor, *, counted: bool
    ) -> Tensor:
        """Loss of each answer (B,)."""
        config, settings = self._config, self._config.settings
        assert now.advantage_ST is not None and settings.clip_high is not None
        mask_BT = now.mask_ST[slot_B]
        if config.drop_cut:
            mask_BT = mask_BT & ~now.cut_S[slot_B][:, None]
        old_BT = log_p_BT.detach() if config.updates == 1 else _rows(now.old_ST, slot_B)
        adapted = self._rollouts.now.beta  # on the CPU
        beta = settings.beta if adapted is None else float(adapted)
        in_loss = beta if settings.kl == "loss" else 0.0
        importance = self._importance(now, old_BT, mask_BT, slot_B, counted=counted) if config.corrects else None
        loss_B, clipped_BT = policy_losses.policy_loss(
            log_p_BT,
            old_BT,
            now.advantage_ST[slot_B],
            mask_BT,
            low=settings.clip,
            high=settings.clip_high,
            normalise=settings.normalise,
            longest=config.max_new_tokens,
            beyond=settings.beyond,
            reference_BL=_rows(now.reference_ST, slot_B) if in_loss else None,
            beta=in_loss,
            weight_BL=importance,
            entropy_BL=entropy_BT,
            entropy_bonus=config.entropy_bonus,
        )
        copies_B = now.copies_S[slot_B]
        if counted:
            self.meter.add({"update[clipped]": (clipped_BT.double(), mask_BT * copies_B[:, None])})
        return loss_B * copies_B

    def _importance(self, now: Rollout, old_BT: Tensor, mask_BT: Tensor, slot_B: Tensor, *, counted: bool) -> Tensor:
        """Importance weights (B, T) of tokens, or (B, 1) of answers, for the policy that sampled them."""
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
        return preference_losses.dpo(difference_P, beta=self._config.settings.beta) * differs_P

    @torch.no_grad()
    def _tell(self, now: Rollout, log_p_BT: Tensor, entropy_BT: Tensor | None, slot_B: Tensor) -> None:
        """Means for metrics.jsonl: of the tokens, and of the step."""
        mask_BT = now.mask_ST[slot_B]
        if not self._config.pairs:
            mask_BT = mask_BT * now.copies_S[slot_B][:, None]
        figures = {"update[entropy]": (-log_p_BT if entropy_BT is None else entropy_BT, mask_BT)}
        if now.reference_ST is not None:
            kl_BT = policy_losses.divergence(log_p_BT, _rows(now.reference_ST, slot_B))
            figures["update[kl]"] = (kl_BT, mask_BT)
        one = torch.ones(1)  # float32, so that the mean of equal numbers is exact over any number of micro-batches
        self.meter.add(figures)
        self.meter.add({name: (value * one, one) for name, value in self._rollouts.figures.items()})


def _rows(value_ST: Tensor | None, slot_B: Tensor) -> Tensor:
    assert value_ST is not None, "a rollout reads what the section needs"
    return value_ST[slot_B].double()


def own_reader(model: nn.Module, head: Head, temperature: float, *, device: torch.device) -> LogProbReader:
    """Log-probabilities of softmax(logits / temperature) by the model as it is when it is asked."""
    return _reader(model, model, head, temperature, SharedModel(model).inference, device)


def backbone_reader(
    model: nn.Module, backbone: nn.Module, head: Head, temperature: float, *, device: torch.device
) -> LogProbReader:
    """Log-probabilities by the backbone, with the adapter of `model` switched off."""
    return _reader(model, backbone, head, temperature, SharedModel(model).without_adapters, device)


def snapshot_reader(model: nn.Module, head: Head, temperature: float, *, device: torch.device) -> LogProbReader:
    """Log-probabilities by the model with its present values, whatever it learns later."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    then = [parameter.detach().clone() for parameter in trained]
    shared = SharedModel(model)

    @torch.no_grad()
    def copy(values: Sequence[Tensor]) -> None:
        for value, parameter in zip(values, trained, strict=True):
            parameter.copy_(value)

    @contextmanager
    def active() -> Iterator[None]:
        with shared.inference():
            now = [parameter.detach().clone() for parameter in trained]
            copy(then)
            try:
                yield
            finally:
                copy(now)

    return _reader(model, model, head, temperature, active, device)


def _reader(
    model: nn.Module,
    called: nn.Module,
    head: Head,
    temperature: float,
    active: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> LogProbReader:
    read = partial(log_probs, called, head, temperature=temperature)
    return LogProbReader(read, active, device, width=anatomy.hidden_size(model.config))  # type: ignore[arg-type]
