"""OSF's layers, whose gradients leave the large singular parts of the weight alone.

Nayak et al. 2025, arXiv:2504.07097.

PEFT projects gradients by hooks of the parameters. These are lost where a parameter is converted or cut into shares, as
over half-precision weights and by FSDP2, and they ask for gradients in the precision of the stored parts. Here the
projection is a part of the computation.

Legend: O outputs, I inputs, N either, K singular vectors, R those of small parts, which train.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.osf.layer import Linear
from torch import Tensor
from torch.nn import functional as F


class OsfLinear(Linear):
    """W x + (U S V - U0 S0 V0) x, with small singular parts U (O, R), S (R,) and V (R, I) that began as U0, S0, V0."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *args, **kwargs)
        name = self.active_adapters[0] if self.active_adapters else ""
        if self.disable_adapters or self.merged or name not in self.osf_svd_params:
            return result
        parts: Any = self.osf_svd_params[name]
        U_OR, V_IR = self._osf_U_low_init[name], self._osf_V_low_init[name].T
        # Of a square matrix both parts are a basis, and the large one is not stored.
        stored: tuple[Any, ...] = (self._osf_U_high, self._osf_V_high)
        large_U_OK, large_V_KI = (dict(each.items()).get(name) for each in stored)
        trained_U_OR = _without_large_parts(parts["U_low"], U_OR, large_U_OK)
        trained_V_IR = _without_large_parts(parts["V_low"].T, V_IR, None if large_V_KI is None else large_V_KI.T)
        outputs = torch.cat([trained_U_OR * parts["S_low"], -U_OR * self._osf_S_low_init[name]], dim=1)
        inputs = torch.cat([trained_V_IR, V_IR], dim=1)
        update = F.linear(F.linear(x.to(inputs.dtype), inputs.T), outputs)
        return result + update.to(result.dtype)


def _without_large_parts(trained_NR: Tensor, start_NR: Tensor, large_NK: Tensor | None) -> Tensor:
    """The same values, whose gradient is orthogonal to the large singular vectors.

    Args:
        start_NR: The small singular vectors. Where they and the large ones are a basis, the gradient stays within them.
        large_NK: The large ones; None: they and the small ones are a basis.
    """
    projected: Tensor = _OrthogonalGradient.apply(trained_NR, start_NR, large_NK)  # type: ignore[no-untyped-call]
    return projected


class _OrthogonalGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trained_NR: Tensor, start_NR: Tensor, large_NK: Tensor | None) -> Tensor:
        ctx.save_for_backward(start_NR, large_NK)
        return trained_NR.view_as(trained_NR)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        start_NR, large_NK = ctx.saved_tensors
        grad_NR = grad.to(start_NR.dtype)
        basis = start_NR if large_NK is None else large_NK
        within_NR = basis @ (basis.T @ grad_NR)
        return (within_NR if large_NK is None else grad_NR - within_NR).to(grad.dtype), None, None
