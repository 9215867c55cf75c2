"""Attention over rows of which each of several processes holds a part: it sees all tokens of some heads.

An all-to-all before attention turns parts of the tokens with all heads into all tokens with a part of the heads, and
one after it turns them back; all else in a block looks at single tokens. Jacobs et al. 2023 (Ulysses),
arXiv:2309.14509.

Legend: B rows, L tokens of them, l of a part, H heads, h of one process, D width of a head, P processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives


@dataclass(frozen=True)
class SequenceGroup:
    """The processes that hold the parts of the same rows."""

    number: int = 0  # which part is this process's, from 0
    size: int = 1  # P: how many there are
    processes: dist.ProcessGroup | None = None  # None: in a plan, where nothing is sent

    def to_heads(self, part_BHlD: Tensor) -> Tensor:
        """All tokens (B, h, L, D) of this process's heads."""
        B, H, tokens, D = part_BHlD.shape
        heads = H // self.size
        sent_PBhlD = part_BHlD.reshape(B, self.size, heads, tokens, D).movedim(1, 0).contiguous()
        return self._exchanged(sent_PBhlD).permute(1, 2, 0, 3, 4).reshape(B, heads, self.size * tokens, D)

    def to_tokens(self, whole_BLhD: Tensor) -> Tensor:
        """All heads (B, l, H, D) of this process's tokens."""
        B, L, heads, D = whole_BLhD.shape
        tokens = L // self.size
        sent_PBlhD = whole_BLhD.reshape(B, self.size, tokens, heads, D).movedim(1, 0).contiguous()
        return self._exchanged(sent_PBlhD).permute(1, 2, 0, 3, 4).reshape(B, tokens, self.size * heads, D)

    def _exchanged(self, sent: Tensor) -> Tensor:
        """Piece p of the result is what process p has sent here; gradients go back the same way."""
        if self.processes is None:
            return sent.clone()
        received: Tensor = collectives.wait_tensor(collectives.all_to_all_single(sent, None, None, self.processes))
        return received
