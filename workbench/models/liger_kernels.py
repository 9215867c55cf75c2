"""Norms, gated activations and rotary positions of a backbone by the Triton kernels of Liger-Kernel.

Each kernel reads its operands once and keeps them for the backward pass, and no results in between (Hsu et al. 2024,
arXiv:2410.10989). Its sums are in float32 and its roundings those of the formula it computes, so that results differ
from PyTorch's by the order of sums.

Liger's own patches replace functions of a family for the whole process, and its loss head. Here modules of one model
change their class, and those alone whose forward pass is, instruction by instruction, a formula that a kernel
computes. Their parameters, hooks and the layers inside of them stay, with adapters over any of these.

Legend: B rows, H heads, L tokens of a row, E width of a head.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from workbench.models import activation_recomputation

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 65_536  # values of a row that one kernel can hold

Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries and keys (B, H, L, E), cosines and sines (B or 1, L, E) to queries and keys at their positions."""


@dataclass(frozen=True)
class Kernels:
    """Functions with gradients, of contiguous tensors in one of PRECISIONS."""

    norm: Callable[[Tensor, Tensor, float, float, str], Tensor]
    """Takes values, weight, epsilon, what is added to the weight, and whose roundings: `llama` or `gemma`."""
    silu: Callable[[Tensor, Tensor], Tensor]
    """silu(gate) * up. Its backward pass overwrites both."""
    gelu: Callable[[Tensor, Tensor], Tensor]
    """gelu(gate) * up, by tanh. Its backward pass overwrites both."""
    rotate: Rotation
    """Overwrites queries and keys."""


def refusal(device: torch.device) -> str | None:
    """Why kernels cannot run on a device, with what to do about it; None where they can."""
    if device.type != "cuda":
        return f"Liger's kernels run on GPUs, and this machine computes on its {device.type.upper()}"
    if any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")):
        return "the package liger-kernel is not installed (pip install liger-kernel)"
    return None


def install(model: nn.Module) -> None:
    """Let every module of a model whose formula a kernel computes call that kernel from now on."""
    for module in model.modules():
        if (kind := _with_kernel(module)) is not None:
            module.__class__ = kind


def known(model: nn.Module) -> bool:
    """Whether kernels compute anything of a model, or would."""
    return any(isinstance(module, _ByKernel) or _with_kernel(module) is not None for module in model.modules())


class _ByKernel:
    """Mixed into a module of a backbone."""

    by_kernel = True


class _Norm(_ByKernel):
    """A norm of root mean squares, of a kind that the kernel knows."""

    kind: str
    epsilon: str  # name of the module's attribute
    addend: float  # added to the weight

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        if not _takes(x, layer.weight):
            inner: Any = super()
            plain: Tensor = inner.forward(x)
            return plain
        return _kernels(x).norm(x, layer.weight, getattr(layer, self.epsilon), self.addend, self.kind)


class LlamaNorm(_Norm):
    """x / rms(x), rounded to the precision of x, times the weight."""

    kind, epsilon, addend = "llama", "variance_epsilon", 0.0


class GemmaNorm(_Norm):
    """x / rms(x) times one more than the weight, rounded once."""

    kind, epsilon, addend = "gemma", "eps", 1.0


class GatedMlp(_ByKernel):
    """down(act(gate(x)) * up(x))."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        gate, up = layer.gate_proj(x), layer.up_proj(x)
        if _takes(gate, up) and gate.shape == up.shape:
            kernels = _kernels(gate)
            product = (kernels.silu if _activation(layer) == "silu" else kernels.gelu)(gate, up)
        else:
            product = layer.act_fn(gate) * up
        output: Tensor = layer.down_proj(product)
        return output


def _takes(x: Tensor, other: Tensor) -> bool:
    """Whether a kernel computes from these now: where results are noted to be made again, it would write unseen."""
    one_precision = x.dtype == other.dtype and x.dtype in PRECISIONS
    return one_precision and 0 < x.shape[-1] <= WIDEST and x.numel() > 0 and not activation_recomputation.is_noting()


def _rotated(
    plain: Rotation, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **where: Any
) -> tuple[Tensor, Tensor]:
    """Llama's `apply_rotary_pos_emb`: by a kernel, or as it stands (`plain`)."""
    if where or not (_takes(query, cos) and _takes(key, sin)):
        return plain(query, key, cos, sin, **where)
    return _kernels(query).rotate(query, key, cos, sin)


def _with_kernel(module: nn.Module) -> type[nn.Module] | None:
    """The class of a module that calls kernels; None where none computes what it does, or it does already."""
    if isinstance(module, _ByKernel) or "forward" in module.__dict__:
        return None
    kind = type(module)
    mixed = _mixed(kind)  # type: ignore[arg-type]  # mypy takes no class of modules for hashable
    return None if mixed is not None and issubclass(mixed, GatedMlp) and _activation(module) is None else mixed


@cache
def _mixed(kind: type[nn.Module]) -> type[nn.Module] | None:
    from transformers.models.gemma2 import modeling_gemma2 as gemma
    from transformers.models.llama import modeling_llama as llama

    forward: Any = kind.forward
    if _same(forward, llama.LlamaRMSNorm.forward):
        return _beside(kind, LlamaNorm)
    if _same(forward, gemma.Gemma2RMSNorm.forward) and _same(getattr(kind, "_norm", None), gemma.Gemma2RMSNorm._norm):
        return _beside(kind, GemmaNorm)
    if _same(forward, llama.LlamaMLP.forward):
        return _beside(kind, GatedMlp)
    names = getattr(forward, "__globals__", {})
    rotate: Any = names.get("apply_rotary_pos_emb")
    reads = "apply_rotary_pos_emb" in getattr(getattr(forward, "__code__", None), "co_names", ())
    if reads and _same(rotate, llama.apply_rotary_pos_emb) and _same(names["rotate_half"], llama.rotate_half):
        names = {**names, "apply_rotary_pos_emb": partial(_rotated, rotate)}
        own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        return _beside(kind, _ByKernel, forward=own)
    return None


def _beside(kind: type[nn.Module], mixin: type, **more: Any) -> type[nn.Module]:
    """A class of the same name in the same file, by which others know a family's modules."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, **more})


def _same(function: Any, reference: Any) -> bool:
    """Whether two functions do the same, whatever they call their variables and say about themselves."""
    codes = [getattr(each, "__code__", None) for each in (function, reference)]
    return None not in codes and _instructions(function) == _instructions(reference)


def _instructions(function: FunctionType) -> tuple[Any, ...]:
    code = function.__code__
    return code.co_code, code.co_names, [each for each in code.co_consts if each != function.__doc__]


def _activation(module: Any) -> str | None:
    """`silu` or `gelu`, where a kernel has that of a gated MLP."""
    name = type(getattr(module, "act_fn", None)).__name__
    return {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu"}.get(name)


def _kernels(x: Tensor) -> Kernels:
    return OUTLINES if isinstance(x, FakeTensor) else liger()


@cache
def liger() -> Kernels:
    """Liger's kernels; the first call imports them, and Triton."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction as Gelu
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Norm
    from liger_kernel.ops.rope import LigerRopeFunction as Rotate
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Silu

    # Not in place: gradients of a norm's outputs may be those of a residual stream, too.
    return Kernels(lambda *given: Norm.apply(*given, False), Silu.apply, Gelu.apply, Rotate.apply)


class _NormOutline(torch.autograd.Function):
    """Outputs and kept tensors of the norm's kernel, without values: a plan counts them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[1]
        return torch.empty_like(grad), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _GateOutline(torch.autograd.Function):
    """The same of a gated activation."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        return saved


class _RotationOutline(torch.autograd.Function):
    """The same of a rotation."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _in_rows(query), _in_rows(key)

    @staticmethod
    def backward(ctx: Any, query_grad: Tensor, key_grad: Tensor) -> tuple[Tensor | None, ...]:
        return _in_rows(query_grad), _in_rows(key_grad), None, None


def _in_rows(states_BHLE: Tensor) -> Tensor:
    """The same, whose heads of a token lie beside each other; a copy where they do not."""
    return states_BHLE.transpose(1, 2).contiguous().transpose(1, 2)


OUTLINES = Kernels(
    lambda x, weight, *_: _NormOutline.apply(x, weight),  # type: ignore[no-untyped-call]
    _GateOutline.apply,
    _GateOutline.apply,
    _RotationOutline.apply,
)
