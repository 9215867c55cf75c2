"""Loss of a student language model: labels, divergence from the teacher, and matched layers.

Legend: B rows, L padded length, D hidden, N supervised positions, n of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor, nn

from workbench import losses
from workbench.config.sections.distill_config import DistillConfig, at
from workbench.data.batching import MicroBatch
from workbench.distillation.feature_matching import FeatureMatching
from workbench.distillation.teacher_signals import Teacher, TeacherSignal
from workbench.losses.chunked import Criterion
from workbench.losses.next_token import cross_entropy
from workbench.models.output_heads import Head
from workbench.training.signal import Loss

ARRAYS, CPU_ARRAYS = 2, 4
"""By these, the numbers of a position count more than in the cross-entropy of its labels alone: chunks are smaller.

Forward KL holds 5.3 arrays of a chunk at once, where cross-entropy holds the logits and their gradient. A chunk is over
the teacher's vocabulary too, and so half as long. On a CPU large arrays also leave holes in the memory
of the process: LoRA of a 109 M Llama with 32,000 words, taught by its own backbone, takes 1.90 GB at 1, 1.81 at 2 and
1.58 at 4 (1.66 to 1.70 on labels alone), and the loss of 400 of its positions 0.34, 0.38 and 0.41 s of one core.
"""


def distillation_loss(
    config: DistillConfig,
    model: nn.Module,
    head: Head,
    teacher: Teacher,
    matching: FeatureMatching | None,
    progress: Callable[[], float],
) -> Loss:
    """(1 - alpha) * cross-entropy + alpha * divergence of each supervised token, and the terms of `matching`.

    Where a token has no label (the student wrote it), the divergence stands alone.

    Args:
        progress: Share of the run that is done, for what follows a schedule.
    """

    def loss(batch: MicroBatch, scale: float) -> Tensor:
        with matching.teacher() if matching else nullcontext():
            signal = teacher.signal(batch, config, temperature=at(config.temperature, progress()))
        with matching.student() if matching else nullcontext():
            hidden_BLD = head.hidden(model, batch.inputs)
        total = losses.chunked(
            hidden_BLD.flatten(0, 1)[batch.positions_N],
            [batch.labels_N, *signal.tensors],
            mixed(signal, at(config.alpha, progress())),
            head.project,
            vocabulary=arrays(hidden_BLD) * (head.vocabulary + signal.vocabulary),
            weights=head.trainable(),
            scale=scale,
        )
        return total if matching is None else total + matching.loss(batch) * scale

    return loss


def arrays(hidden: Tensor) -> int:
    """How much more the numbers of these positions count."""
    return CPU_ARRAYS if hidden.device.type == "cpu" else ARRAYS


def mixed(signal: TeacherSignal, alpha: float) -> Criterion:
    """Logits (n, V), labels (n,) and the signal's tensors to (1 - alpha) * cross-entropy + alpha * divergence."""

    def criterion(logits_nV: Tensor, labels_n: Tensor, *teacher: Tensor) -> Tensor:
        terms = []
        # The divergence first: what it takes for a moment is free again before the labels' loss takes its own.
        if alpha > 0:
            terms.append(alpha * signal.loss(logits_nV, *teacher))
        if alpha < 1:
            terms.append((1 - alpha) * cross_entropy(logits_nV, labels_n))
        return sum(terms[1:], terms[0])

    return criterion
