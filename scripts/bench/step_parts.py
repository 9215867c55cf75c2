"""Other ways to compute parts of a LoRA step on a CPU, each beside the one it would replace, as Markdown.

    OMP_NUM_THREADS=1 taskset -c 0 python scripts/bench/step_parts.py [--rounds 5] [--compiled]

Shapes of the model of sft.py, bfloat16: 512 tokens, width 768, an MLP of 2,048, rank 16, 32,000 words; elementwise
operations of 1,920 tokens, forward and backward. Ways are timed
in turn, in processor time; the table has medians, and the pairs of each round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import measuring
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.losses import chunked
from workbench.losses.next_token import CrossEntropy
from workbench.planning.live_bytes import LiveBytes
from workbench.runs import process_memory

TOKENS, WIDTH, MLP, RANK, VOCABULARY = 512, 768, 2048, 16, 32_000
EPS = 1e-6
HEADS, LENGTH, OF_HEAD = 24, 240, 64
"""Attention of two rows of 240 tokens with 12 heads."""

Work = Callable[[], object]


class Part(NamedTuple):
    """Two ways to compute the same."""

    name: str
    present: Work
    other: Work


def main() -> None:
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    found.add_argument("--rounds", type=int, default=5, help="of each way, after one that does not count")
    found.add_argument("--compiled", action="store_true", help="elementwise parts by torch.compile, and no others")
    arguments = found.parse_args()
    rounds = arguments.rounds
    process_memory.keep()  # as `workbench run` does
    torch.manual_seed(0)
    print(measuring.machine("cpu", ("torch",)), "\n")
    print("| part | as it was, ms | the other way, ms | times as fast |\n|---|---|---|---|")
    loss_head = head()
    others = [loss_head, down(), up(), *packed(), scores()]
    for part in elementwise(compiled=True) if arguments.compiled else [*others, *elementwise(compiled=False)]:
        times = [(_ms(part.present), _ms(part.other)) for _ in range(rounds + 1)][1:]
        before, after = zip(*times, strict=True)
        ratio = measuring.ratio(before, after)
        middle = rounds // 2
        print(f"| {part.name} | {sorted(before)[middle]:.2f} | {sorted(after)[middle]:.2f} | {ratio} |", flush=True)
    print(f"\nLoss head, tensors alive: {_live_mb(loss_head.present):.0f} MB and {_live_mb(loss_head.other):.0f} MB.")


def _ms(work: Work) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def head() -> Part:
    """The loss head of 2 chunks, its gradient by autograd and in closed form."""
    hidden, weight = _random(2 * TOKENS, WIDTH).requires_grad_(), _random(VOCABULARY, WIDTH) * 0.02
    labels, criterion = torch.randint(VOCABULARY, (2 * TOKENS,)), CrossEntropy()

    def step(criterion: Callable[..., Tensor]) -> None:
        loss = chunked(
            hidden,
            [labels],
            criterion,
            lambda rows: rows @ weight.T,
            vocabulary=VOCABULARY,
            weights=[],
            scale=1 / TOKENS,
        )
        loss.backward()

    by_autograd = criterion.__call__
    return Part("loss head: gradient in closed form", lambda: step(by_autograd), lambda: step(criterion))


def _live_mb(work: Work) -> float:
    """The most bytes of tensors that it holds at once, in MB."""
    with LiveBytes() as live:
        work()
    return live.peak / 1e6


def down() -> Part:
    """X W^T and X A^T, and one product with A beneath W."""
    x, weight, down_RI = _random(TOKENS, WIDTH), _random(MLP, WIDTH), _random(RANK, WIDTH)
    joined = torch.cat([weight, down_RI])
    return Part("A beneath the frozen weight", lambda: (x @ weight.T, x @ down_RI.T), lambda: x @ joined.T)


def up() -> Part:
    """dY W and dY B, and one product with B beside W."""
    grad, weight, up_OR = _random(TOKENS, MLP), _random(MLP, WIDTH), _random(MLP, RANK)
    joined = torch.cat([weight, up_OR], 1)
    return Part("B beside it, for gradients", lambda: (grad @ weight, grad @ up_OR), lambda: grad @ joined)


def packed() -> list[Part]:
    """Products with frozen weights as they are, and as oneDNN has packed them."""
    found = []
    for inputs, outputs in ((WIDTH, WIDTH), (WIDTH, MLP), (MLP, WIDTH)):
        x, grad, weight = _random(TOKENS, inputs), _random(TOKENS, outputs), _random(outputs, inputs)
        ways = [torch.ops.mkldnn._reorder_linear_weight(each, TOKENS) for each in (weight, weight.T.contiguous())]

        def product(x: Tensor, weight: Tensor) -> Tensor:
            output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            return output

        found.append(
            Part(
                f"packed weights, both ways, {inputs} to {outputs}",
                lambda x=x, grad=grad, weight=weight: (x @ weight.T, grad @ weight),
                lambda x=x, grad=grad, ways=ways: (product(x, ways[0]), product(grad, ways[1])),
            )
        )
    return found


def scores() -> Part:
    """Float32 products of bfloat16 values, and the same by bfloat16 units, which sum in float32."""
    query, key = (_random(HEADS, LENGTH, OF_HEAD).float() for _ in range(2))

    def by_units() -> None:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.bmm(query, key.mT)
        torch.backends.mkldnn.matmul.fp32_precision = "none"

    return Part("scores of attention by bfloat16 units", lambda: torch.bmm(query, key.mT), by_units)


class ClosedNorm(torch.autograd.Function):
    """Llama's norm that keeps its inputs and a number for each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(EPS).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        slope, wide = (grad * weight).float(), x.float()
        along = torch.linalg.vecdot(slope, wide).unsqueeze(-1).mul_(inverse**3).div_(-x.shape[-1])
        return slope.mul_(inverse).addcmul_(wide, along).to(x.dtype), None


class ClosedRotation(torch.autograd.Function):
    """Llama's rotation in three passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    found, half = x * cos, x.shape[-1] // 2
    found[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    found[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return found


class ClosedGate(torch.autograd.Function):
    """SwiGLU that keeps gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def elementwise(*, compiled: bool) -> list[Part]:
    """Norm, rotation and SwiGLU as transformers writes them, beside a closed form or the same compiled."""
    x, weight, heads = _random(1920, WIDTH).requires_grad_(), _random(WIDTH), _random(8, 12, LENGTH, OF_HEAD)
    gate, up = (_random(1920, MLP).requires_grad_() for _ in range(2))
    turn = _random(LENGTH, OF_HEAD)
    inputs = {"norm": (x, weight), "rotation": (heads.requires_grad_(), turn.cos(), turn.sin()), "SwiGLU": (gate, up)}
    ways: dict[str, tuple[Any, Any]] = {
        "norm": (_norm, ClosedNorm.apply),
        "rotation": (_rotation, ClosedRotation.apply),
        "SwiGLU": (_gate, ClosedGate.apply),
    }
    found = []
    for name, (present, closed) in ways.items():
        other = torch.compile(present, dynamic=True) if compiled else closed

        def both(work: Any, name: str = name) -> None:
            output = work(*inputs[name])
            torch.autograd.grad(output, [each for each in inputs[name] if each.requires_grad], output.detach())

        title = f"{name}, {'compiled' if compiled else 'in closed form'}"
        found.append(Part(title, lambda w=present, b=both: b(w), lambda w=other, b=both: b(w)))
    return found


if __name__ == "__main__":
    main()
