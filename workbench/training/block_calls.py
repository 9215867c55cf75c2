"""How the blocks of a backbone are called: what goes in, and what comes out beside hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.models.rerouting import hidden_of
from workbench.training.freezing.layer_map import trial_inputs


class BlockCall(NamedTuple):
    """A call of a block."""

    before: Tensor
    """Hidden states that go in."""
    after: Tensor
    """Hidden states that come out."""
    more: tuple[Any, ...] | None
    """The rest of the output; None where a block gives no tuple."""
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def adds(self) -> bool:
        """Whether a block gives hidden states of the shape that it gets, so that its input can stand for its output."""
        return self.before.shape == self.after.shape and not any(isinstance(each, Tensor) for each in self.more or ())


def like(output: Any, hidden: Tensor) -> Any:
    """The output of a block with other hidden states in it."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def survey(backbone: PreTrainedModel, blocks: Sequence[nn.Module]) -> list[BlockCall]:
    """The call of each block in one pass over a short row, or a picture; nothing is drawn at random."""
    calls: dict[int, BlockCall] = {}

    def hook(number: int) -> Callable[..., None]:
        def seen(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            after, more = (output[0], tuple(output[1:])) if isinstance(output, tuple) else (output, None)
            calls[number] = BlockCall(hidden_of(arguments, named), after, more, arguments, named)

        return seen

    training = backbone.training
    backbone.eval()
    with ExitStack() as stack, torch.no_grad():
        stack.callback(backbone.train, training)
        for number, block in enumerate(blocks):
            stack.callback(block.register_forward_hook(hook(number), with_kwargs=True).remove)
        backbone(**trial_inputs(backbone))
    return [calls[number] for number in range(len(blocks))]
