"""Deep mutual learning: adapters of one bank learn from the labels and from one another (Zhang et al. 2018).

Legend: B rows, D hidden, N supervised positions, K adapters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench import losses
from workbench.adapters.banks.bank import Bank
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.config import RunConfig
from workbench.config.sections.distill_config import DistillConfig, at
from workbench.data.batching import MicroBatch
from workbench.data.packing import in_sequence, join, padded_length
from workbench.distillation.student_loss import arrays, mixed
from workbench.distillation.teacher_signals import TeacherLogits
from workbench.errors import ConfigError
from workbench.models.output_heads import Head
from workbench.training import bank_trainer
from workbench.training.signal import Loss


def require_able(base: RunConfig) -> None:
    """Raise ConfigError where no bank holds such adapters."""
    again = "train.checkpointing: activations that are computed again would not know whose they are"
    recomputes = base.train.checkpointing not in (False, "auto", "elementwise")
    if reason := again if recomputes else bank_trainer.refusal(base):
        raise ConfigError(
            f"distill.peers: {reason}. Adapters teach each other in one bank: "
            "leave that out, or write adapter.method=lora."
        )


def mutual_loss(config: DistillConfig, together: Bank, head: Head, progress: Callable[[], float]) -> Loss:
    """Mean over K adapters of (1 - alpha) * cross-entropy + alpha * divergence from the mean of the others.

    Every adapter reads every row, in one forward pass; none is moved by how it teaches.
    """
    count = len(together.members)

    def loss(batch: MicroBatch, scale: float) -> Tensor:
        alpha, temperature = at(config.alpha, progress()), at(config.temperature, progress())
        packed_B = batch.inputs.get("row_lengths")
        many, tokens = (len(batch.inputs["input_ids"]), 0) if packed_B is None else (len(packed_B), batch.width)
        rows = [MemberRows(member, many, tokens) for member in together.members]
        joined = (join if packed_B is None else in_sequence)([batch] * count)
        with together.route(rows, length=padded_length(joined) if packed_B is None else None):
            hidden_ND = head.supervised(together.model, joined.inputs, joined.positions_N)
        own = hidden_ND.chunk(count)
        total = torch.zeros((), device=hidden_ND.device)
        for number, hidden_nD in enumerate(own):
            others = [each.detach() for other, each in enumerate(own) if other != number]
            signal = TeacherLogits(
                others, [head.project] * len(others), [head.vocabulary] * len(others), config, temperature
            )
            total = total + losses.chunked(
                hidden_nD,
                [batch.labels_N, *signal.tensors],
                mixed(signal, alpha),
                head.project,
                vocabulary=arrays(hidden_nD) * head.vocabulary * count,
                weights=head.trainable(),
                scale=scale / count,
            )
        return total

    return loss
