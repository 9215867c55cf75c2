"""Loss of a student language model: labels, divergence from a teacher or from its peers, and matched layers.

Legend: B rows, L padded length, D hidden, N supervised positions, n of them, V vocabulary, K adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from workbench import losses
from workbench.adapters.banks import bank as banks
from workbench.adapters.banks.bank import Bank
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.config import RunConfig
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import MicroBatch
from workbench.data.packing import in_sequence, join, padded_length
from workbench.distillation.feature_matching import FeatureMatching
from workbench.errors import ConfigError
from workbench.losses import divergences
from workbench.losses.chunked_loss import Criterion, Follows, Project
from workbench.losses.divergences import Divergence, log_probs
from workbench.losses.next_token import cross_entropy
from workbench.models.output_heads import Head
from workbench.training import bank_trainer
from workbench.training.signal import Loss

ARRAYS, CPU_ARRAYS = 2, 4
"""By these, the numbers of a position count more than in the cross-entropy of its labels alone: chunks are smaller.

Forward KL holds 5.3 arrays of a chunk at once, where cross-entropy holds the logits and their gradient. A chunk is over
the teacher's vocabulary too, and so half as long. On a CPU large arrays also leave holes in the memory
of the process: LoRA of a 109 M Llama with 32,000 words, taught by its own backbone, takes 1.90 GB at 1, 1.81 at 2 and
1.58 at 4 (1.66 to 1.70 on labels alone), and the loss of 400 of its positions 0.34, 0.38 and 0.41 s of one core.
"""


class TeacherSignal(Protocol):
    """The distributions that the student's logits are compared with, position by position."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors whose first axis are the N positions; they are chunked with the student's hidden states."""

    @property
    def vocabulary(self) -> int:
        """Numbers that `loss` makes of each position, besides the student's logits."""

    @property
    def follows(self) -> Follows:
        """Positions that `loss` needs together with the one before them; None: it takes each alone."""

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """Summed distance of the student's logits of some positions from what those chunks of `tensors` say."""


class Teacher(Protocol):
    """A source of targets for a micro-batch: a live model, a cache, or another vocabulary."""

    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TeacherSignal:
        """Teacher signal at the batch's supervised positions; the batch is on the student's device."""


@dataclass(frozen=True)
class TeacherLogits:
    """Hidden states of one or several models; several are one distribution, the mean of theirs."""

    tensors: Sequence[Tensor]  # hidden states (N, D) of each model
    projects: Sequence[Project]  # its output head
    vocabularies: Sequence[int]
    config: DistillConfig
    temperature: float
    shares: Sequence[float] = ()
    """How much each of several models counts; none: alike, or as `config` says."""
    follows: Follows = None

    @property
    def vocabulary(self) -> int:
        """V of all models together."""
        return sum(self.vocabularies)

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """The configured divergence over the tokens that all models know.

        Heads may be padded beyond their tokenizer's tokens, each to another size; what only one has is left out.
        """
        teacher_nV = self.log_probs(tensors, vocabulary=logits_nV.shape[1])
        common = teacher_nV.shape[1]
        return divergence(self.config, self.temperature)(log_probs(logits_nV[:, :common], self.temperature), teacher_nV)

    @torch.no_grad()
    def log_probs(self, tensors: Sequence[Tensor], *, vocabulary: int) -> Tensor:
        """Log-probabilities (n, V) of all models together at a chunk of positions, over the tokens that all know."""
        common = min(vocabulary, *self.vocabularies)
        heads = zip(self.projects, tensors, strict=True)
        # Log of the mean of several distributions, each given by its log-probabilities (..., V).
        each = [log_probs(project(hidden)[:, :common], self.temperature) for project, hidden in heads]
        if len(each) == 1:
            return each[0]
        each_MnV = torch.stack(each)
        if self.config.teacher.shares == "confidence":
            entropies_Mn = torch.special.entr(each_MnV.exp()).sum(-1)
            shares_Mn1 = (-entropies_Mn).log_softmax(0)[..., None]
        else:
            shares_Mn1 = each_MnV.new_tensor(self.shares or [1.0] * len(each)).log()[:, None, None]
            shares_Mn1 = shares_Mn1 - shares_Mn1.logsumexp(0)
        return torch.logsumexp(each_MnV + shares_Mn1, dim=0)


def divergence(config: DistillConfig, temperature: float) -> Divergence:
    """The configured divergence of log-probabilities at a temperature, with its factor."""
    return divergences.scaled(config.loss, temperature=temperature, beta=config.beta, skew=config.skew)


def distillation_loss(
    config: DistillConfig,
    model: nn.Module,
    head: Head,
    teacher: Teacher,
    matching: FeatureMatching | None,
    progress: Callable[[], float],
) -> Loss:
    """(1 - alpha) * cross-entropy + alpha * divergence of each supervised token, and the terms of `matching`.

    Where a token has no label (the student wrote it), the divergence stands alone. `progress`: share of the run that is
    done, for what follows a schedule.
    """

    def loss(batch: MicroBatch, scale: float) -> Tensor:
        with matching.teacher() if matching else nullcontext():
            signal = teacher.signal(batch, config, temperature=config.temperature_at(progress()))
        with matching.student() if matching else nullcontext():
            hidden_BLD = head.hidden(model, batch.inputs)
        total = losses.chunked(
            hidden_BLD.flatten(0, 1)[batch.positions_N],
            [batch.labels_N, *signal.tensors],
            mixed(signal, config.alpha_at(progress())),
            head.project,
            vocabulary=arrays(hidden_BLD) * (head.vocabulary + signal.vocabulary),
            weights=head.trainable(),
            scale=scale,
            follows_N=signal.follows,
        )
        return total if matching is None else total + matching.loss(batch) * scale

    return loss


def arrays(hidden: Tensor) -> int:
    """Factor by which the numbers of these positions count more (ARRAYS or CPU_ARRAYS)."""
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


def require_peers_in_one_bank(base: RunConfig) -> None:
    """Raise ConfigError where such adapters cannot train in one bank."""
    again = "train.checkpointing: activations that are computed again would not know whose they are"
    recomputes = base.train.checkpointing not in (False, "auto", "elementwise")
    if reason := again if recomputes else bank_trainer.refusal(base):
        raise ConfigError(
            f"distill.peers: {reason}. Adapters teach each other in one bank: "
            + ("write adapter.method=lora." if banks.refusal(base.adapter) == reason else "leave that out.")
        )


def mutual_loss(config: DistillConfig, together: Bank, head: Head, progress: Callable[[], float]) -> Loss:
    """Mean over K adapters of (1 - alpha) * cross-entropy + alpha * divergence from the mean of the others.

    Every adapter reads every row, in one forward pass; no gradient flows into a teacher (Zhang et al. 2018, deep mutual
    learning).
    """
    count = len(together.members)

    def loss(batch: MicroBatch, scale: float) -> Tensor:
        alpha, temperature = config.alpha_at(progress()), config.temperature_at(progress())
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
            heads, sizes = [head.project] * len(others), [head.vocabulary] * len(others)
            signal = TeacherLogits(others, heads, sizes, config, temperature)
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
