"""Divergences between a student's and a teacher's probabilities, summed over positions, in nats.

An event of probability 0 has log-probability -inf; 0 log 0 is 0, in the value and in the gradient. `universal`,
`gold` and `binary_kl` compare models with different vocabularies.

Legend: N positions, V (student's) vocabulary, W teacher's vocabulary, k tokens kept of each position, E events (V
tokens, or k and all others together).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.losses.chunked_loss import wide

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Student's and teacher's log-probabilities (N, E) of the same events to a scalar, summed over the positions."""
WithGradient = Callable[..., tuple[Tensor, Tensor]]
"""The same arguments, and settings, to that scalar and its derivative (N, E) by the student's log-probabilities."""


def _differentiable(with_gradient: WithGradient) -> Callable[..., Tensor]:
    """The scalar of `with_gradient`, differentiable once, by the student's log-probabilities alone."""

    @wraps(with_gradient)
    def divergence(student_NE: Tensor, teacher_NE: Tensor, **settings: float) -> Tensor:
        computed = partial(with_gradient, **settings)
        value: Tensor = _Differentiable.apply(student_NE, teacher_NE, computed)[0]  # type: ignore[no-untyped-call]
        return value

    return divergence


def log_probs(logits_NV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (N, V) at a temperature, float32 or wider."""
    logits_NV = logits_NV.to(wide(logits_NV.dtype))
    return (logits_NV if temperature == 1 else logits_NV / temperature).log_softmax(-1)


def _forward_kl(student_NE: Tensor, teacher_NE: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || student): the student covers all that the teacher finds likely (Hinton et al. 2015).

    Derivative: -p.
    """
    p_NE = teacher_NE.exp()
    value = _log_ratio(p_NE, teacher_NE, student_NE).mul_(p_NE).sum()
    return value, p_NE.neg_()


def _reverse_kl(student_NE: Tensor, teacher_NE: Tensor) -> tuple[Tensor, Tensor]:
    """KL(student || teacher): the student concentrates on some of what the teacher finds likely.

    Derivative: q (log(q / p) + 1).
    """
    q_NE = student_NE.exp()
    terms_NE = _log_ratio(q_NE, student_NE, teacher_NE).mul_(q_NE)
    return terms_NE.sum(), terms_NE.add_(q_NE)


forward_kl, reverse_kl = _differentiable(_forward_kl), _differentiable(_reverse_kl)


@_differentiable
def jsd(student_NE: Tensor, teacher_NE: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """beta KL(p || m) + (1 - beta) KL(q || m) of teacher p, student q, m = beta p + (1 - beta) q.

    Agarwal et al. 2024, arXiv:2306.13649, section 2. At `beta` = 0 and 1 it would be 0 for all p and q, and so is
    replaced by the limits of jsd / beta, forward_kl, and of jsd / (1 - beta), reverse_kl.

    Derivative: (1 - beta) q log(q / m).
    """
    if beta in (0, 1):
        return (_reverse_kl if beta else _forward_kl)(student_NE, teacher_NE)
    mixture_NE = _log_mixture(teacher_NE, student_NE, beta)
    teachers = _kl(teacher_NE, mixture_NE).sum()
    terms_NE = _kl(student_NE, mixture_NE).mul_(1 - beta)
    return beta * teachers + terms_NE.sum(), terms_NE


@_differentiable
def skew_forward_kl(student_NE: Tensor, teacher_NE: Tensor, *, skew: float) -> tuple[Tensor, Tensor]:
    """KL(p || skew p + (1 - skew) q) of teacher p, student q; finite for any q (Ko et al. 2024, arXiv:2402.03898).

    Derivative: -p (1 - skew) q / m.
    """
    if skew == 0:
        return _forward_kl(student_NE, teacher_NE)
    mixture_NE, p_NE = _log_mixture(teacher_NE, student_NE, skew), teacher_NE.exp()
    value = _log_ratio(p_NE, teacher_NE, mixture_NE).mul_(p_NE).sum()
    return value, _log_ratio(p_NE, student_NE, mixture_NE).exp_().mul_(p_NE).mul_(skew - 1)


@_differentiable
def skew_reverse_kl(student_NE: Tensor, teacher_NE: Tensor, *, skew: float) -> tuple[Tensor, Tensor]:
    """KL(q || (1 - skew) p + skew q) of teacher p, student q; finite for any p (Ko et al. 2024, arXiv:2402.03898).

    Derivative: q (log(q / m) + 1 - skew q / m).
    """
    if skew == 0:
        return _reverse_kl(student_NE, teacher_NE)
    q_NE = student_NE.exp()
    ratio_NE = _log_ratio(q_NE, student_NE, _log_mixture(student_NE, teacher_NE, skew))
    gradient_NE = ratio_NE.exp().mul_(-skew).add_(1).mul_(q_NE)
    terms_NE = ratio_NE.mul_(q_NE)
    return terms_NE.sum(), gradient_NE.add_(terms_NE)


@_differentiable
def total_variation(student_NE: Tensor, teacher_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Half the sum of |p - q|: a share of the probability mass, not in nats.

    Derivative: q / 2 where q is above p, -q / 2 where it is below.
    """
    q_NE = student_NE.exp()
    difference_NE = q_NE - teacher_NE.exp()
    return difference_NE.abs().sum() / 2, q_NE.mul_(difference_NE.sign_()).div_(2)


def scaled(name: str, *, temperature: float, beta: float, skew: float) -> Divergence:
    """The divergence of that name, times a factor that makes the scale of its gradient independent of the temperature.

    The factor is T^2 for divergences of second order in the difference of the logits (Hinton et al. 2015, section 2),
    and T for `total_variation`. Both log-probabilities have to be those at `temperature`.
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


def top_k_and_rest(logp_NV: Tensor, ids_Nk: Tensor) -> Tensor:
    """Log-probabilities (N, k + 1) of k different tokens and, last, of all others together, which may be -inf.

    The KL divergence of these events is at most that of all tokens.
    """
    # Not log(1 - sum of the k), in which a small rest would be lost to rounding.
    others_NV = logp_NV.scatter(1, ids_Nk, -torch.inf).clamp(min=lowest(logp_NV))
    rest_N1 = others_NV.logsumexp(-1, keepdim=True)
    rest_N1 = rest_N1.masked_fill(rest_N1 < lowest(logp_NV) / 2, -torch.inf)
    return torch.cat([logp_NV.gather(1, ids_Nk), rest_N1], 1)


def sampled_forward_kl(
    student_logp_NV: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, negative_entropy_N: Tensor
) -> Tensor:
    """Estimate of forward_kl from sampled tokens: sum_N(negative entropy of the teacher - sum_k weight log q).

    Args:
        ids_Nk: Sampled tokens, with repetitions.
        weights_Nk: p / (k * sampling probability), which makes the estimate unbiased; 0 for no sample (Anshumann et
            al. 2025, arXiv:2503.16870).
        negative_entropy_N: The teacher's sum of p log p over all tokens.
    """
    logq_Nk = student_logp_NV.gather(1, ids_Nk)
    cross_N = torch.where(weights_Nk > 0, weights_Nk * logq_Nk, 0).sum(-1)
    return (negative_entropy_N - cross_N).sum()


def _kl(of_NE: Tensor, from_NE: Tensor) -> Tensor:
    """e^of (of - from), the terms of KL(of || from)."""
    mass_NE = of_NE.exp()
    return _log_ratio(mass_NE, of_NE, from_NE).mul_(mass_NE)


def _log_ratio(mass_NE: Tensor, of_NE: Tensor, from_NE: Tensor) -> Tensor:
    """of - from, and 0 where the mass is 0."""
    return (of_NE - from_NE).masked_fill_(mass_NE == 0, 0)


def _log_mixture(one_NE: Tensor, other_NE: Tensor, share: float) -> Tensor:
    """log(share e^one + (1 - share) e^other), 0 < share < 1."""
    return torch.logaddexp(one_NE + math.log(share), other_NE + math.log1p(-share))


class _Differentiable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(student_NE: Tensor, teacher_NE: Tensor, with_gradient: WithGradient) -> tuple[Tensor, Tensor]:
        return with_gradient(student_NE, teacher_NE)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
        (gradient_NE,) = ctx.saved_tensors
        return None if grad is None else gradient_NE.detach() * grad, None, None


def lowest(logp: Tensor) -> float:
    """Stands for -inf in sums of several of them, whose gradient would be NaN."""
    return torch.finfo(logp.dtype).min / 4


def universal(student_logits_NV: Tensor, teacher_logits_NW: Tensor, *, temperature: float) -> Tensor:
    """Sum of |p - q| over the sorted probabilities of both models, times the temperature.

    Tokens are not matched; the smaller vocabulary is padded with probabilities of 0. The factor keeps the scale of the
    gradient independent of the temperature. Boizard et al. 2024, arXiv:2402.12030.

    Returns:
        Tensor (N,), float32 or wider.
    """
    probs = (log_probs(logits, temperature).exp() for logits in (student_logits_NV, teacher_logits_NW))
    return _sorted_distance(*probs) * temperature


def _sorted_distance(p_NV: Tensor, q_NW: Tensor) -> Tensor:
    """Sum of |p - q| over the sorted masses of each position, the fewer padded with 0; (N,)."""
    size = max(p_NV.shape[1], q_NW.shape[1])
    p_NE, q_NE = (F.pad(each.sort(-1, descending=True).values, (0, size - each.shape[1])) for each in (p_NV, q_NW))
    return (p_NE - q_NE).abs().sum(-1)


def gold(
    student_NV: Tensor, teacher_NW: Tensor, rest_N: Tensor | None, shared: SharedTokens, *, temperature: float
) -> Tensor:
    """Forward KL of the tokens that both vocabularies have, and the distance of the sorted masses of all others (GOLD).

    The KL is multiplied by the square of the temperature and the distance by it, as alone. Of a teacher that is known
    by its likeliest tokens, all shared ones that it does not name are one event, and the others have no mass.

    Args:
        student_NV: Log-masses at the temperature; where a position stands for several tokens, the probability of its
            first one times that of those after it, as they are in the text.
        teacher_NW: The same of the teacher; -inf of a token that it does not name.
        rest_N: The log-mass of the tokens that it does not name; None: it names all.
        shared: Which tokens are the same.
        temperature: Dimensionless.

    Returns:
        Scalar, float32 or wider.
    """
    mine_NS, theirs_NS = student_NV[:, shared.mine_S], teacher_NW[:, shared.theirs_S]
    if rest_N is not None:
        others_N1 = mine_NS.masked_fill(theirs_NS > -torch.inf, lowest(mine_NS)).logsumexp(-1, keepdim=True)
        mine_NS, theirs_NS = torch.cat([mine_NS, others_N1], 1), torch.cat([theirs_NS, rest_N[:, None]], 1)
    value = forward_kl(mine_NS, theirs_NS) * temperature**2
    if not len(shared.mine_only) or not len(shared.theirs_only):
        return value
    p_NE, q_NE = student_NV[:, shared.mine_only].exp(), teacher_NW[:, shared.theirs_only].exp()
    return value + _sorted_distance(p_NE, q_NE).sum() * temperature


class SharedTokens(NamedTuple):
    """The numbers of the tokens that two vocabularies both have, and of those that only one of them has."""

    mine_S: Tensor
    theirs_S: Tensor
    mine_only: Tensor
    theirs_only: Tensor


def binary_kl(student_N: Tensor, teacher_N: Tensor, *, temperature: float) -> Tensor:
    """KL of whether a text is written or not: of p^(1/T) from q^(1/T), times T, of each text (N,).

    A text's probability has no further events to compare where its tokens differ; a root of it keeps long texts from
    counting for nothing (Minixhofer et al. 2025, arXiv:2503.20083, section 3). The factor keeps the scale of the
    gradient: at a high temperature the KL falls with it, and not with its square.

    Args:
        student_N: Log-likelihoods of the texts in nats, at temperature 1.
        teacher_N: The teacher's.
        temperature: T, dimensionless.
    """
    # A probability of 1 would leave nothing for the other event.
    q_N, p_N = ((each.to(wide(each.dtype)) / temperature).clamp(max=-1e-6) for each in (student_N, teacher_N))
    other_q_N, other_p_N = (torch.log(-torch.expm1(each)) for each in (q_N, p_N))
    return (p_N.exp() * (p_N - q_N) - torch.expm1(p_N) * (other_p_N - other_q_N)) * temperature
