"""How far a student's probabilities are from a teacher's, summed over positions, in nats.

An event of no mass on a side has log-probability -inf there; 0 log 0 is 0, in the value and in the gradient.

Legend: N positions, E events (tokens, or k tokens and all others), V vocabulary, k tokens that are kept of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.losses.chunked import wide

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Student's and teacher's log-probabilities (N, E) of the same events to a scalar, summed over the positions."""

Sloped = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same to that scalar and its derivative (N, E) by the student's log-probabilities."""


def log_probs(logits_NV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (N, V) at a temperature, float32 or wider."""
    logits_NV = logits_NV.to(wide(logits_NV.dtype))
    return (logits_NV if temperature == 1 else logits_NV / temperature).log_softmax(-1)


def forward_kl(student_NE: Tensor, teacher_NE: Tensor) -> Tensor:
    """KL(teacher || student): what a student is taught by draws of the teacher (Hinton et al. 2015)."""
    return _differentiable(_forward_kl, student_NE, teacher_NE)


def reverse_kl(student_NE: Tensor, teacher_NE: Tensor) -> Tensor:
    """KL(student || teacher): a student may leave out some of what a teacher says, and is to say nothing else."""
    return _differentiable(_reverse_kl, student_NE, teacher_NE)


def jsd(student_NE: Tensor, teacher_NE: Tensor, *, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) of teacher p, student q, m = beta p + (1 - beta) q.

    Agarwal et al. 2024, arXiv:2306.13649, section 2. That is 0 for all p and q at either end, so that `beta` = 0 is
    forward_kl, the limit of jsd / beta, and 1 is reverse_kl, the limit of jsd / (1 - beta).
    """
    if beta == 0:
        return forward_kl(student_NE, teacher_NE)
    if beta == 1:
        return reverse_kl(student_NE, teacher_NE)
    return _differentiable(partial(_jsd, beta=beta), student_NE, teacher_NE)


def skew_forward_kl(student_NE: Tensor, teacher_NE: Tensor, *, skew: float) -> Tensor:
    """KL(p || skew p + (1 - skew) q) of teacher p, student q; finite for any q (Ko et al. 2024, arXiv:2402.03898)."""
    if skew == 0:
        return forward_kl(student_NE, teacher_NE)
    return _differentiable(partial(_skew_forward_kl, skew=skew), student_NE, teacher_NE)


def skew_reverse_kl(student_NE: Tensor, teacher_NE: Tensor, *, skew: float) -> Tensor:
    """KL(q || (1 - skew) p + skew q) of teacher p, student q; finite for any p (Ko et al. 2024, arXiv:2402.03898)."""
    if skew == 0:
        return reverse_kl(student_NE, teacher_NE)
    return _differentiable(partial(_skew_reverse_kl, skew=skew), student_NE, teacher_NE)


def total_variation(student_NE: Tensor, teacher_NE: Tensor) -> Tensor:
    """Half the sum of |p - q|: no number of nats, but the mass that is elsewhere."""
    return _differentiable(_total_variation, student_NE, teacher_NE)


def scaled(name: str, *, temperature: float, beta: float, skew: float) -> Divergence:
    """The divergence of that name, times the factor that makes its gradient's size independent of the temperature.

    That is T^2 for those of second order in the difference of the logits (Hinton et al. 2015, section 2), and T for
    `total_variation`. The log-probabilities are to be those at `temperature`.
    """
    named: dict[str, Divergence] = {
        "forward_kl": forward_kl,
        "reverse_kl": reverse_kl,
        "jsd": partial(jsd, beta=beta),
        "skew_forward_kl": partial(skew_forward_kl, skew=skew),
        "skew_reverse_kl": partial(skew_reverse_kl, skew=skew),
        "total_variation": total_variation,
    }
    divergence = named[name]
    factor = temperature if name == "total_variation" else temperature**2
    return lambda student_NE, teacher_NE: divergence(student_NE, teacher_NE) * factor


def coarse(logp_NV: Tensor, ids_Nk: Tensor) -> Tensor:
    """Log-probabilities (N, k + 1) of k different tokens and, last, of all others together: -inf where they have none.

    No KL of these events is above that of all tokens; it lacks how the mass of the others is spread among them.
    """
    # Not log(1 - sum of the chosen): what little mass the others have would drown in rounding.
    others_NV = logp_NV.scatter(1, ids_Nk, -torch.inf).clamp(min=_lowest(logp_NV))
    rest_N1 = others_NV.logsumexp(-1, keepdim=True)
    rest_N1 = rest_N1.masked_fill(rest_N1 < _lowest(logp_NV) / 2, -torch.inf)
    return torch.cat([logp_NV.gather(1, ids_Nk), rest_N1], 1)


def sampled_forward_kl(
    student_logp_NV: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, negative_entropy_N: Tensor
) -> Tensor:
    """sum_N(negative entropy of the teacher - sum_k weight log q): forward_kl, without bias where the draws have none.

    Args:
        ids_Nk: Tokens that were drawn; a token may come more than once.
        weights_Nk: p / (k * the probability by which it was drawn); 0 for no draw (Anshumann et al. 2025,
            arXiv:2503.16870).
        negative_entropy_N: sum p log p of all tokens of the teacher.
    """
    logq_Nk = student_logp_NV.gather(1, ids_Nk)
    cross_N = torch.where(weights_Nk > 0, weights_Nk * logq_Nk, 0).sum(-1)
    return (negative_entropy_N - cross_N).sum()


# Values and derivatives together, as few arrays over the vocabulary as they need: autograd would keep twice as many.
# p is the teacher's probability, q the student's, m that of their mixture.


def _forward_kl(student_NE: Tensor, teacher_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Derivative: -p."""
    p_NE = teacher_NE.exp()
    value = _gap(p_NE, teacher_NE, student_NE).mul_(p_NE).sum()
    return value, p_NE.neg_()


def _reverse_kl(student_NE: Tensor, teacher_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Derivative: q (log(q / p) + 1)."""
    q_NE = student_NE.exp()
    parts_NE = _gap(q_NE, student_NE, teacher_NE).mul_(q_NE)
    return parts_NE.sum(), parts_NE.add_(q_NE)


def _jsd(student_NE: Tensor, teacher_NE: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """Derivative: (1 - beta) q log(q / m)."""
    mixed_NE = _mixed(teacher_NE, student_NE, beta)
    teachers = _kl(teacher_NE, mixed_NE).sum()
    parts_NE = _kl(student_NE, mixed_NE).mul_(1 - beta)
    return beta * teachers + parts_NE.sum(), parts_NE


def _skew_forward_kl(student_NE: Tensor, teacher_NE: Tensor, *, skew: float) -> tuple[Tensor, Tensor]:
    """Derivative: -p (1 - skew) q / m."""
    mixed_NE, p_NE = _mixed(teacher_NE, student_NE, skew), teacher_NE.exp()
    value = _gap(p_NE, teacher_NE, mixed_NE).mul_(p_NE).sum()
    return value, _gap(p_NE, student_NE, mixed_NE).exp_().mul_(p_NE).mul_(skew - 1)


def _skew_reverse_kl(student_NE: Tensor, teacher_NE: Tensor, *, skew: float) -> tuple[Tensor, Tensor]:
    """Derivative: q (log(q / m) + 1 - skew q / m)."""
    q_NE = student_NE.exp()
    gap_NE = _gap(q_NE, student_NE, _mixed(student_NE, teacher_NE, skew))
    slope_NE = gap_NE.exp().mul_(-skew).add_(1).mul_(q_NE)
    parts_NE = gap_NE.mul_(q_NE)
    return parts_NE.sum(), slope_NE.add_(parts_NE)


def _total_variation(student_NE: Tensor, teacher_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Derivative: q / 2 where q is above p, -q / 2 where it is below."""
    q_NE = student_NE.exp()
    more_NE = q_NE - teacher_NE.exp()
    return more_NE.abs().sum() / 2, q_NE.mul_(more_NE.sign_()).div_(2)


def _kl(of_NE: Tensor, from_NE: Tensor) -> Tensor:
    """e^of (of - from)."""
    mass_NE = of_NE.exp()
    return _gap(mass_NE, of_NE, from_NE).mul_(mass_NE)


def _gap(mass_NE: Tensor, of_NE: Tensor, from_NE: Tensor) -> Tensor:
    """of - from where there is mass, and 0 elsewhere."""
    return (of_NE - from_NE).masked_fill_(mass_NE == 0, 0)


def _mixed(one_NE: Tensor, other_NE: Tensor, share: float) -> Tensor:
    """log(share e^one + (1 - share) e^other), 0 < share < 1."""
    return torch.logaddexp(one_NE + math.log(share), other_NE + math.log1p(-share))


def _differentiable(sloped: Sloped, student_NE: Tensor, teacher_NE: Tensor) -> Tensor:
    """The scalar of `sloped`. Its gradient reaches the student alone, and has none itself."""
    value: Tensor = _Differentiable.apply(student_NE, teacher_NE, sloped)[0]  # type: ignore[no-untyped-call]
    return value


class _Differentiable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(student_NE: Tensor, teacher_NE: Tensor, sloped: Sloped) -> tuple[Tensor, Tensor]:
        return sloped(student_NE, teacher_NE)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
        (slope_NE,) = ctx.saved_tensors
        return None if grad is None else slope_NE * grad, None, None


def _lowest(logp: Tensor) -> float:
    """In the place of -inf, where several of them alone would be summed: the gradient of that is NaN."""
    return torch.finfo(logp.dtype).min / 4
