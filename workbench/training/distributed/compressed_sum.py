"""A sum over processes whose messages are codes of few bits, with error feedback at both ends.

Legend: N values of the vector, W processes, S values of each one's shard, padded to whole blocks; B bytes of codes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.runs.ranks import Ranks
from workbench.training.distributed.block_codes import BlockCode


class CompressedSum:
    """The sum of a vector over processes, in two messages, the same bits in each (Tang et al. 2021, arXiv:2102.02888,
    figure 3; Zheng et al. 2019, arXiv:1905.10936, algorithm 2).

    Each process adds to its vector what its last codes left out, and sends every other one the codes of that one's
    shard; that one adds them up, adds what its own last codes left out, and sends the codes of the sum to all. So all
    sums so far, with all that waits in the processes, are the sum of all vectors so far.
    """

    def __init__(self, count: int, code: BlockCode, ranks: Ranks, device: torch.device) -> None:
        self.count, self._code, self._ranks = count, code, ranks
        shard = -(-count // (ranks.world * code.block)) * code.block
        self.waiting_N = torch.zeros(shard * ranks.world, device=device)
        """Residual of this process: not sent yet. The end that pads it is zero."""
        self.waiting_S = torch.zeros(shard, device=device)
        """Residual of the sum of this process's shard."""
        self._own = max(0, min(shard, count - ranks.rank * shard))

    @property
    def sent_bytes(self) -> int:
        """Bytes that this process sends to others in one call."""
        return 2 * (self._ranks.world - 1) * self._code.nbytes(len(self.waiting_S))

    def gathered_shards(self) -> Tensor:
        """Residuals of the sum (N,), of all shards; all processes call it together."""
        padded_N = torch.empty_like(self.waiting_N)
        dist.all_gather_into_tensor(padded_N, self.waiting_S)
        return padded_N[: self.count]

    def load(self, waiting_N: Tensor, sum_N: Tensor) -> None:
        """Set the residuals (N,) of this process, and of the sum."""
        start = self._ranks.rank * len(self.waiting_S)
        self.waiting_N[: self.count] = waiting_N
        self.waiting_S[: self._own] = sum_N[start : start + self._own]

    def __call__(self, parts: Iterable[Tensor]) -> Tensor:
        """The sum (N,) over all processes, which call this together, of a vector in parts of any shapes."""
        codes_WB = self.codes(parts)
        received_WB = torch.empty_like(codes_WB)
        dist.all_to_all_single(received_WB, codes_WB)
        codes_B = self.shard_codes(received_WB)
        dist.all_gather_into_tensor(received_WB.view(-1), codes_B)
        return self.decoded(received_WB)

    def codes(self, parts: Iterable[Tensor]) -> Tensor:
        """Codes (W, B) for each process, of the vector and of what waited."""
        at = 0
        for part in parts:
            self.waiting_N[at : at + part.numel()] += part.reshape(-1)
            at += part.numel()
        chunks_WS = self.waiting_N.view(self._ranks.world, -1)
        codes_WB = self._code.encode(chunks_WS)
        chunks_WS -= self._code.decode(codes_WB)
        self.waiting_N[self.count :] = 0
        return codes_WB

    def shard_codes(self, received_WB: Tensor) -> Tensor:
        """Codes (B,) of the sum of this process's shard, by the codes of all processes for it."""
        for codes_B in received_WB:
            self.waiting_S += self._code.decode(codes_B[None])[0]
        self.waiting_S[self._own :] = 0
        codes_1B = self._code.encode(self.waiting_S[None])
        self.waiting_S -= self._code.decode(codes_1B)[0]
        self.waiting_S[self._own :] = 0
        return codes_1B[0]

    def decoded(self, gathered_WB: Tensor) -> Tensor:
        """The sum (N,), by the codes of all shards."""
        return self._code.decode(gathered_WB).view(-1)[: self.count]
