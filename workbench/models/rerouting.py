"""Forward passes of modules that are replaced for a while, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

_OWN: WeakKeyDictionary[nn.Module, Callable[..., Any] | None] = WeakKeyDictionary()
"""The forward pass of each block that has another one now; None: that of its class."""
HIDDEN = "hidden_states"
"""Name of a block's first argument, where it is named."""


def hidden_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a block."""
    hidden_states: Tensor = arguments[0] if arguments else named[HIDDEN]
    return hidden_states


def reroute(block: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a block, or another module, another forward pass, inside of its hooks, until it is restored."""
    restore(block)
    _OWN[block] = block.__dict__.get("forward")
    block.forward = forward


def restore(block: nn.Module) -> None:
    """Give a block its own forward pass back, if it has another one."""
    if block not in _OWN:
        return
    own = _OWN.pop(block)
    if own is None:
        del block.forward
    else:
        block.forward = own
