"""Log-probabilities of what was written: by the model that trains, and by the one that it started from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from workbench import losses
from workbench.adapters import anatomy
from workbench.data.batching import MicroBatch
from workbench.data.text.preference_pairs import TOKEN
from workbench.models.output_heads import Head
from workbench.models.shared_model import SharedModel
from workbench.training.reinforcement.rollouts import LogProbReader


def read(model: nn.Module, head: Head, temperature: float, batch: MicroBatch) -> Tensor:
    """log p (N,) of the predicted tokens of a micro-batch with labels (N, 4), of softmax(logits / temperature)."""
    hidden_ND = head.supervised(model, batch.inputs, batch.positions_N)

    def project(hidden: Tensor) -> Tensor:
        logits = head.project(hidden)
        return logits if temperature == 1 else logits / temperature

    return losses.token_log_probs(
        hidden_ND, batch.labels_N[:, TOKEN], project, vocabulary=head.vocabulary, weights=head.trainable()
    )


def own(model: nn.Module, head: Head, temperature: float, *, device: torch.device) -> LogProbReader:
    """The model that trains, as it is by then."""
    return LogProbReader(
        partial(read, model, head, temperature), SharedModel(model).inference, device, width=_width(model)
    )


def without_adapter(
    model: nn.Module, backbone: nn.Module, head: Head, temperature: float, *, device: torch.device
) -> LogProbReader:
    """The backbone, with the adapter of `model` switched off."""
    return LogProbReader(
        partial(read, backbone, head, temperature), SharedModel(model).without_adapters, device, width=_width(model)
    )


def as_now(model: nn.Module, head: Head, temperature: float, *, device: torch.device) -> LogProbReader:
    """The model with the values that it has now, whatever it learns later."""
    return LogProbReader(partial(read, model, head, temperature), _kept(model), device, width=_width(model))


def _width(model: nn.Module) -> int:
    return anatomy.hidden_size(model.config)  # type: ignore[arg-type]


@torch.no_grad()
def _copy(values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for value, parameter in zip(values, into, strict=True):
        parameter.copy_(value)


def _kept(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """A context inside which the model has the values that train as they are now."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    then = [parameter.detach().clone() for parameter in trained]
    shared = SharedModel(model)

    @contextmanager
    def active() -> Iterator[None]:
        with shared.inference():
            now = [parameter.detach().clone() for parameter in trained]
            _copy(then, trained)
            try:
                yield
            finally:
                _copy(now, trained)

    return active
