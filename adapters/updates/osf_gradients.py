"""Gradients of OSF: orthogonal to the large singular parts of the weight (Nayak et al. 2025, arXiv:2504.07097, eq. 5).

PEFT's own hooks stay behind where it converts what trains to float32, so over weights in half precision they never act;
and where they are called they need gradients in the precision of the stored parts.

Legend: O outputs, I inputs, K singular parts that stay, R small ones that train.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from peft.tuners.osf.layer import OSFLayer
from torch import Tensor


def keep_orthogonal(layer: OSFLayer) -> None:
    """Project every gradient of the layer's U (O, R) and V (R, I) from now on."""
    layer._detach_hooks()
    for name, parts in layer.osf_svd_params.items():
        low_U, high_U = layer._osf_U_low_init[name], layer._osf_U_high
        low_V, high_V = layer._osf_V_low_init[name], layer._osf_V_high
        # Of a square matrix the small parts span all that the large ones leave; else these are stored.
        outputs = partial(_without, high_U[name]) if name in high_U else partial(_within, low_U)
        inputs = partial(_without, high_V[name].T) if name in high_V else partial(_within, low_V.T)
        layer.hook_handles += [
            parts["U_low"].register_hook(_in_precision_of(low_U, outputs)),
            parts["V_low"].register_hook(_in_precision_of(low_V, lambda grad, inputs=inputs: inputs(grad.T).T)),
        ]


def _without(basis_OK: Tensor, grad_OR: Tensor) -> Tensor:
    return grad_OR - basis_OK @ (basis_OK.T @ grad_OR)


def _within(basis_OR: Tensor, grad_OR: Tensor) -> Tensor:
    return basis_OR @ (basis_OR.T @ grad_OR)


def _in_precision_of(stored: Tensor, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    dtype = stored.dtype
    return lambda grad: project(grad.to(dtype)).to(grad.dtype)
