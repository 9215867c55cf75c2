"""What optimizers do, from their papers, in float64: an implementation of its own for tests to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

Steps = list[dict[str, Tensor]]
"""Gradients of each step."""
Values = dict[str, Tensor]
Formula = Callable[[Values, Steps, Mapping[str, float]], None]
"""Moves the values as an optimizer does in these steps; the last argument is the weight decay of each."""


def rate(step: int) -> float:
    """It moves, as in a run."""
    return 1e-2 * (1 - 0.1 * step)


def adamw(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Loshchilov & Hutter 2019, algorithm 2."""
    for name, theta in values.items():
        m, v = torch.zeros_like(theta), torch.zeros_like(theta)
        for t, found in enumerate(steps, start=1):
            g, lr = found[name].double(), rate(t - 1)
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
            m_hat, v_hat = m / (1 - 0.8**t), v / (1 - 0.95**t)
            theta -= lr * (m_hat / (v_hat.sqrt() + 1e-6) + decay[name] * theta)


def sgd(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Sutskever et al. 2013, with the decay in the gradient."""
    for name, theta in values.items():
        b = torch.zeros_like(theta)
        for t, found in enumerate(steps):
            b = 0.7 * b + found[name].double() + decay[name] * theta
            theta -= rate(t) * b


def lion(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Chen et al. 2023, algorithm 2."""
    for name, theta in values.items():
        m = torch.zeros_like(theta)
        for t, found in enumerate(steps):
            g = found[name].double()
            theta -= rate(t) * (torch.sign(0.9 * m + 0.1 * g) + decay[name] * theta)
            m = 0.99 * m + 0.01 * g


def lamb(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """You et al. 2020, algorithm 2, without bias correction; the norm of the weights counts up to 10.

    Where either norm is zero the trust ratio is 1, as in the authors' code.
    """
    for name, theta in values.items():
        m, v = torch.zeros_like(theta), torch.zeros_like(theta)
        for t, found in enumerate(steps):
            g = found[name].double()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            update = m / (v.sqrt() + 1e-6) + decay[name] * theta
            norms = theta.norm().clamp(max=10), update.norm()
            theta -= rate(t) * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * update


def lars(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """You et al. 2017, equation 6 and algorithm 1; vectors, and weights of norm zero, take plain steps."""
    for name, theta in values.items():
        v = torch.zeros_like(theta)
        for t, found in enumerate(steps):
            g = found[name].double()
            if theta.ndim > 1:
                local = 0.001 * theta.norm() / (g.norm() + decay[name] * theta.norm()) if theta.norm() > 0 else 1.0
                g = local * (g + decay[name] * theta)
            v = 0.9 * v + g
            theta -= rate(t) * v


def adafactor(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Shazeer & Stern 2018, algorithms 4 and 5, with relative steps; eps1 is float32's, as torch has it."""
    for name, theta in values.items():
        rows, columns, v = torch.zeros(()).double(), torch.zeros(()).double(), torch.zeros(()).double()
        for t, found in enumerate(steps, start=1):
            g, keep, lr = found[name].double(), 1 - t**-0.8, rate(t - 1)
            alpha = max(1e-3, float(theta.square().mean().sqrt())) * min(lr, t**-0.5)
            theta -= lr * decay[name] * theta
            if theta.ndim > 1:
                rows = keep * rows + (1 - keep) * g.square().mean(dim=1, keepdim=True)
                columns = keep * columns + (1 - keep) * g.square().mean(dim=0, keepdim=True)
                v = rows * columns / rows.mean()
            else:
                v = keep * v + (1 - keep) * g.square()
            update = g / v.sqrt()
            theta -= alpha * update / max(1.0, float(update.square().mean().sqrt()))


def schedule_free(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Defazio et al. 2024, algorithm 1: gradients at y, weights of the average by the highest rate so far."""
    for name, y in values.items():
        z, x, v, total, highest = y.clone(), y.clone(), torch.zeros_like(y), 0.0, 0.0
        for t, found in enumerate(steps, start=1):
            g, lr = found[name].double(), rate(t - 1)
            v = 0.999 * v + 0.001 * g**2
            highest = max(highest, lr)
            total += highest**2
            z = z - lr * (g / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + decay[name] * y)
            x = (1 - highest**2 / total) * x + highest**2 / total * z
            y.copy_(0.1 * z + 0.9 * x)


def muon(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Jordan et al. 2024 in the size of Liu et al. 2025, 0.2 sqrt(max(A, B)); vectors take AdamW's steps."""
    for name, theta in values.items():
        if theta.ndim == 1:
            adamw_default({name: theta}, steps)
            continue
        b = torch.zeros_like(theta)
        for t, found in enumerate(steps):
            g, lr = found[name].double(), rate(t)
            # torch averages: b is (1 - momentum) times that of the paper, which makes no difference to a direction
            b = 0.9 * b + 0.1 * g
            theta -= lr * decay[name] * theta
            theta -= lr * 0.2 * max(theta.shape) ** 0.5 * _quintic(0.1 * g + 0.9 * b)


def galore(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Zhao et al. 2024, algorithm 2: rank 2, another subspace every 3 steps, alpha 0.25; vectors have AdamW."""
    for name, theta in values.items():
        if theta.ndim == 1:
            adamw_default({name: theta}, steps)
            continue
        m = v = torch.zeros(()).double()
        P = torch.empty(0)
        for t, found in enumerate(steps, start=1):
            G, lr = found[name].double(), rate(t - 1)
            G = G if theta.shape[0] <= theta.shape[1] else G.T
            if (t - 1) % 3 == 0:
                P = torch.linalg.svd(G)[0][:, :2]
            m, v, N = _adam(m, v, P.T @ G, t)
            moved = 0.25 * P @ N
            theta -= lr * (moved if moved.shape == theta.shape else moved.T) + lr * decay[name] * theta


def apollo(values: Values, steps: Steps, decay: Mapping[str, float], *, rank: int = 2) -> None:
    """Zhu et al. 2024, algorithm 1, rank 2 or 1, seed 0, other draws every 3 steps; vectors have AdamW."""
    for number, (name, theta) in enumerate(values.items()):
        if theta.ndim == 1:
            adamw_default({name: theta}, steps)
            continue
        m = v = torch.zeros(()).double()
        last = 0.0
        for t, found in enumerate(steps, start=1):
            G, lr = found[name].double(), rate(t - 1)
            G = G if theta.shape[0] <= theta.shape[1] else G.T
            seed = int(np.random.SeedSequence([0, number, (t - 1) // 3]).generate_state(1)[0])
            P = torch.randn(rank, len(G), generator=torch.Generator().manual_seed(seed)).double() / rank**0.5
            R = P @ G
            m, v, N = _adam(m, v, R, t)
            S = N.norm(dim=0) / R.norm(dim=0) if rank > 1 else N.norm() / R.norm()
            moved = G * S
            if last and moved.norm() > 1.01 * last:
                moved = moved / moved.norm() * 1.01 * last
            last = float(moved.norm())
            moved = moved if rank > 1 else 128**0.5 * moved
            theta -= lr * (moved if moved.shape == theta.shape else moved.T) + lr * decay[name] * theta


def apollo_mini(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """The same with one dimension, one factor a matrix, and alpha the root of 128."""
    apollo(values, steps, decay, rank=1)


def adam_mini(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Zhang et al. 2024, algorithm 1: one second moment a row, or a vector."""
    for name, theta in values.items():
        m = v = torch.zeros(()).double()
        for t, found in enumerate(steps, start=1):
            g, lr = found[name].double(), rate(t - 1)
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * (g**2).mean(dim=-1, keepdim=True)
            theta -= lr * decay[name] * theta
            theta -= lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def _adam(m: Tensor, v: Tensor, g: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Moments after step t, and its direction."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    return m, v, (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def adamw_default(values: Values, steps: Steps) -> None:
    for name, theta in values.items():
        m, v = torch.zeros_like(theta), torch.zeros_like(theta)
        for t, found in enumerate(steps, start=1):
            g = found[name].double()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            theta -= rate(t - 1) * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def _quintic(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps of X <- a X + (b X X' + c (X X')^2) X."""
    x = g / g.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def sophia(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Liu et al. 2024, algorithm 3 with gamma 0.02; the gradients of drawn labels are the steps' own, of 30 labels."""
    for name, theta in values.items():
        m, h = torch.zeros_like(theta), torch.zeros_like(theta)
        for t, found in enumerate(steps):
            g, lr = found[name].double(), rate(t)
            if t % 4 == 0:
                h = 0.99 * h + 0.01 * 30 * g**2
            m = 0.96 * m + 0.04 * g
            theta -= lr * decay[name] * theta
            theta -= lr * (m / torch.maximum(0.02 * h, torch.tensor(1e-12))).clamp(-1, 1)


def _minus_fourth_root(s: Tensor, largest_share: float) -> Tensor:
    values, vectors = np.linalg.eigh(s.numpy())
    return torch.from_numpy(vectors @ np.diag((values.clip(0) + largest_share * values[-1]) ** -0.25) @ vectors.T)


def shampoo(values: Values, steps: Steps, decay: Mapping[str, float]) -> None:
    """Gupta et al. 2018, algorithm 1, of averages, roots every third step, of AdamW's length; vectors have AdamW."""
    for name, theta in values.items():
        m, v = torch.zeros_like(theta), torch.zeros_like(theta)
        left, right = (torch.zeros(size, size).double() for size in (theta.shape * 2)[:2])
        roots = left, right
        for t, found in enumerate(steps, start=1):
            g, lr = found[name].double(), rate(t - 1)
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            adam = m / (1 - 0.8**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-6)
            move = adam
            if theta.ndim == 2:
                left, right = 0.9 * left + 0.1 * g @ g.T, 0.9 * right + 0.1 * g.T @ g
                if t % 3 == 1:
                    roots = tuple(_minus_fourth_root(s / (1 - 0.9**t), 1e-6) for s in (left, right))
                move = roots[0] @ m @ roots[1]
                move = move * adam.norm() / move.norm()
            theta -= lr * decay[name] * theta
            theta -= lr * move
