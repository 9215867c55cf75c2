"""Each divergence against its definition over probabilities, its limits, and what becomes of events without mass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from workbench.losses import divergences
from workbench.losses.divergences import (
    SharedTokens,
    binary_kl,
    forward_kl,
    gold,
    jsd,
    log_probs,
    reverse_kl,
    sampled_forward_kl,
    scaled,
    top_k_and_rest,
    universal,
)
from workbench.planning.counters import LiveBytes

BETA, SKEW, T = 0.3, 0.1, 1.7
T_UNIVERSAL_LOGIT = 1.7


def _kl(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def _mix(share: float, p: Sequence[float], q: Sequence[float]) -> list[float]:
    return [share * a + (1 - share) * b for a, b in zip(p, q, strict=True)]


# The same of a teacher's p and a student's q, with the factor that takes the temperature out.
DEFINED: dict[str, Callable[[list[float], list[float]], float]] = {
    "forward_kl": lambda p, q: T**2 * _kl(p, q),
    "reverse_kl": lambda p, q: T**2 * _kl(q, p),
    "jsd": lambda p, q: T**2 * (BETA * _kl(p, _mix(BETA, p, q)) + (1 - BETA) * _kl(q, _mix(BETA, p, q))),
    "skew_forward_kl": lambda p, q: T**2 * _kl(p, _mix(SKEW, p, q)),
    "skew_reverse_kl": lambda p, q: T**2 * _kl(q, _mix(1 - SKEW, p, q)),
    "total_variation": lambda p, q: T * sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
}


each = pytest.mark.parametrize("name", DEFINED)


def _distance(name: str, student_NV: Tensor, teacher_NV: Tensor, temperature: float = T) -> Tensor:
    divergence = scaled(name, temperature=temperature, beta=BETA, skew=SKEW)
    return divergence(log_probs(student_NV, temperature), log_probs(teacher_NV, temperature))


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _student(*shape: int) -> Tensor:
    return random_logits(*shape, seed=1).requires_grad_()


@each
def test_equals_its_definition(name: str) -> None:
    student, teacher = random_logits(4, 9, seed=1), random_logits(4, 9)
    rows = [[[math.exp(x / T) for x in row] for row in side.tolist()] for side in (teacher, student)]
    p, q = ([[x / sum(row) for x in row] for row in side] for side in rows)
    wanted = sum(DEFINED[name](*pair) for pair in zip(p, q, strict=True))
    assert wanted > 0.1
    assert float(_distance(name, student, teacher)) == pytest.approx(wanted, rel=1e-12)


@each
def test_gradient(name: str) -> None:
    teacher = random_logits(3, 5)
    assert torch.autograd.gradcheck(lambda student: _distance(name, student, teacher), _student(3, 5))


@each
def test_gradient_by_log_probabilities_that_do_not_add_up(name: str) -> None:
    divergence = scaled(name, temperature=T, beta=BETA, skew=SKEW)
    teacher_NV = log_probs(random_logits(3, 5), T)
    assert torch.autograd.gradcheck(lambda student: divergence(student, teacher_NV), _student(3, 5))


@each
def test_few_arrays_are_alive_at_once(name: str) -> None:
    """Beside the logits of both: the student's log-probabilities, and what value and gradient need."""
    logits, teacher = _student(8, 1000), log_probs(random_logits(8, 1000), T)
    with LiveBytes() as live:
        _distance(name, logits, teacher.exp().log()).backward()
    assert live.peak / teacher.nbytes < (5.2 if name == "forward_kl" else 7.2)


@each
def test_zero_where_they_agree_and_nowhere_below(name: str) -> None:
    student = _student(4, 9)
    value = _distance(name, student, student.detach().clone())
    (gradient,) = torch.autograd.grad(value, student)
    torch.testing.assert_close(
        (value, gradient), (torch.zeros_like(value), torch.zeros_like(gradient)), atol=1e-14, rtol=0
    )
    for seed in range(20):
        assert float(_distance(name, random_logits(1, 4, seed=seed), random_logits(1, 4, seed=seed + 100))) > 0


@each
def test_the_gradients_size_does_not_depend_on_the_temperature(name: str) -> None:
    student, teacher = _student(4, 9), random_logits(4, 9)
    at = {t: torch.autograd.grad(_distance(name, student, teacher, t), student)[0] for t in (50.0, 200.0)}
    assert float((at[50.0] - at[200.0]).norm() / at[200.0].norm()) < 0.05


@each
def test_events_without_mass(name: str) -> None:
    """They change nothing where both sides have none there, in the value and in the gradient."""
    student, teacher = _student(3, 6), random_logits(3, 5)
    outside = torch.tensor([False] * 5 + [True])
    found = _distance(
        name, student.masked_fill(outside, -torch.inf), torch.cat([teacher, teacher[:, :1] - torch.inf], 1)
    )
    wanted = _distance(name, student[:, :5], teacher)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, student), torch.autograd.grad(wanted, student))


def test_limits_of_jsd() -> None:
    student, teacher = log_probs(random_logits(4, 9, seed=1), T), log_probs(random_logits(4, 9), T)
    assert torch.equal(jsd(student, teacher, beta=0), forward_kl(student, teacher))
    assert torch.equal(jsd(student, teacher, beta=1), reverse_kl(student, teacher))
    torch.testing.assert_close(jsd(student, teacher, beta=1e-6) / 1e-6, forward_kl(student, teacher), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        jsd(student, teacher, beta=1 - 1e-6) / 1e-6, reverse_kl(student, teacher), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(jsd(student, teacher, beta=0.5), jsd(teacher, student, beta=0.5))


def test_without_skew_they_are_plain() -> None:
    student, teacher = log_probs(random_logits(4, 9, seed=1), T), log_probs(random_logits(4, 9), T)
    assert torch.equal(divergences.skew_forward_kl(student, teacher, skew=0), forward_kl(student, teacher))
    assert torch.equal(divergences.skew_reverse_kl(student, teacher, skew=0), reverse_kl(student, teacher))


@pytest.mark.parametrize(("name", "whose"), [("skew_forward_kl", "student"), ("skew_reverse_kl", "teacher")])
def test_skewed_ones_are_finite_where_one_side_has_no_mass(name: str, whose: str) -> None:
    student, teacher = _student(2, 4), random_logits(2, 4)
    first = torch.tensor([True, False, False, False])
    sides = {"student": student, "teacher": teacher}
    sides[whose] = sides[whose].masked_fill(first, -torch.inf)
    value = _distance(name, sides["student"], sides["teacher"])
    assert 0 < value.item() < math.inf
    assert torch.autograd.grad(value, student)[0].isfinite().all()


def test_low_precision_is_widened() -> None:
    logits = random_logits(2, 6)
    assert log_probs(logits.bfloat16(), T).dtype == torch.float32 and log_probs(logits, T).dtype == torch.float64
    assert torch.equal(log_probs(logits.bfloat16(), T), log_probs(logits.bfloat16().float(), T))


IDS = torch.tensor([[4, 0, 7], [1, 2, 8]])


def test_coarse_adds_up_the_others() -> None:
    probabilities = log_probs(random_logits(2, 9), T).exp()
    found = top_k_and_rest(probabilities.log(), IDS).exp()
    for row, ids in enumerate(IDS.tolist()):
        others = sum(float(probabilities[row, token]) for token in range(9) if token not in ids)
        assert found[row].tolist() == pytest.approx([*probabilities[row, ids].tolist(), others], rel=1e-12)


def test_coarse_keeps_the_digits_of_what_little_is_left() -> None:
    logits = torch.tensor([[0.0, -60.0, -61.0]])
    wanted = math.log(math.exp(-60) + math.exp(-61))
    assert float(top_k_and_rest(log_probs(logits, 1), torch.tensor([[0]]))[0, 1]) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "name", ["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation"]
)
@pytest.mark.parametrize("k", [3, 8, 9])
def test_coarse_never_tells_them_further_apart(name: str, k: int) -> None:
    student, teacher = log_probs(random_logits(2, 9, seed=1), T), log_probs(random_logits(2, 9), T)
    ids = teacher.topk(k, -1).indices
    divergence = scaled(name, temperature=1, beta=BETA, skew=SKEW)
    less, whole = (
        float(divergence(top_k_and_rest(student, ids), top_k_and_rest(teacher, ids))),
        float(divergence(student, teacher)),
    )
    assert less == pytest.approx(whole, rel=1e-12) if k >= 8 else 0 < less < whole  # k = 8: the rest is one token


@each
@pytest.mark.parametrize("k", [3, 9])
def test_gradient_of_coarse(name: str, k: int) -> None:
    ids = random_logits(2, 9).topk(k, -1).indices
    teacher = top_k_and_rest(log_probs(random_logits(2, 9), T), ids)
    divergence = scaled(name, temperature=T, beta=BETA, skew=SKEW)
    assert torch.autograd.gradcheck(
        lambda student: divergence(top_k_and_rest(log_probs(student, T), ids), teacher), _student(2, 9)
    )


@each
def test_coarse_of_others_that_are_ruled_out(name: str) -> None:
    """As with k = V: no mass, -inf, and no NaN of it."""
    student = _student(2, 4)
    ruled_out, ids = torch.tensor([False, False, True, True]), torch.tensor([[0, 1], [1, 0]])
    events = top_k_and_rest(log_probs(student.masked_fill(ruled_out, -torch.inf), T), ids)
    assert (events[:, 2] == -torch.inf).all()
    teacher = top_k_and_rest(log_probs(random_logits(2, 4).masked_fill(ruled_out, -torch.inf), T), ids)
    (gradient,) = torch.autograd.grad(scaled(name, temperature=T, beta=BETA, skew=SKEW)(events, teacher), student)
    assert gradient.isfinite().all() and gradient[:, :2].all() and not gradient[:, 2:].any()


def test_draws_estimate_forward_kl_without_bias() -> None:
    """The mean over all pairs of draws, each as often as it comes, is the divergence itself; so is its gradient."""
    student, teacher = _student(1, 4), log_probs(random_logits(1, 4), 1)
    p, entropy = teacher.exp()[0], -(teacher.exp() * teacher).sum(-1)
    proposal = (p**0.5 / (p**0.5).sum()).tolist()
    mean = torch.zeros((), dtype=torch.float64)
    for one in range(4):
        for other in range(4):
            ids = torch.tensor([[one, other]])
            weights = p[ids] / (2 * torch.tensor([[proposal[one], proposal[other]]], dtype=torch.float64))
            drawn = sampled_forward_kl(log_probs(student, 1), ids, weights, -entropy)
            mean = mean + proposal[one] * proposal[other] * drawn
    wanted = forward_kl(log_probs(student, 1), teacher)
    torch.testing.assert_close(mean, wanted)
    torch.testing.assert_close(torch.autograd.grad(mean, student), torch.autograd.grad(wanted, student))


def test_gradient_of_draws() -> None:
    weights, entropy = torch.tensor([[0.5, 0.2, 0.3], [0.4, 0.6, 0.0]]).double(), torch.tensor([-1.0, -0.5]).double()
    assert torch.autograd.gradcheck(
        lambda student: sampled_forward_kl(log_probs(student, T), IDS, weights, entropy), _student(2, 9)
    )


def test_no_draw_does_not_count() -> None:
    student = _student(2, 9)
    ruled_out = torch.arange(9) == 8  # the last id of the second row
    weights, entropy = torch.tensor([[0.5, 0.2, 0.3], [0.4, 0.6, 0.0]]).double(), torch.tensor([-1.0, -0.5]).double()
    value = sampled_forward_kl(log_probs(student.masked_fill(ruled_out, -torch.inf), T), IDS, weights, entropy)
    assert value.isfinite() and torch.autograd.grad(value, student)[0].isfinite().all()


def _universal(student_NV: Tensor, teacher_NW: Tensor, *, temperature: float) -> Tensor:
    return universal(student_NV, teacher_NW, temperature=temperature).sum()


def _probabilities(logits: list[float]) -> list[float]:
    raised = [math.exp(logit / T_UNIVERSAL_LOGIT) for logit in logits]
    return sorted((each / sum(raised) for each in raised), reverse=True)


@pytest.mark.parametrize(("ours", "theirs"), [(5, 5), (4, 7), (7, 4)])
def test_equals_its_definition_universal_logit(ours: int, theirs: int) -> None:
    student, teacher = random_logits(3, ours, seed=1), random_logits(3, theirs)
    wanted = 0.0
    for q, p in zip(student.tolist(), teacher.tolist(), strict=True):
        q, p = _probabilities(q), _probabilities(p)
        size = max(ours, theirs)
        wanted += sum(abs(a - b) for a, b in zip(q + [0] * (size - ours), p + [0] * (size - theirs), strict=True))
    assert float(_universal(student, teacher, temperature=T_UNIVERSAL_LOGIT)) == pytest.approx(
        T_UNIVERSAL_LOGIT * wanted, rel=1e-12
    )


def test_gradient_universal_logit() -> None:
    student, teacher = random_logits(3, 5, seed=1).requires_grad_(), random_logits(3, 7)
    assert torch.autograd.gradcheck(lambda logits: _universal(logits, teacher, temperature=T_UNIVERSAL_LOGIT), student)


def test_which_token_it_is_does_not_matter() -> None:
    student, teacher = random_logits(3, 5, seed=1), random_logits(3, 7)
    wanted = _universal(student, teacher, temperature=T_UNIVERSAL_LOGIT)
    torch.testing.assert_close(_universal(student[:, [3, 0, 4, 1, 2]], teacher, temperature=T_UNIVERSAL_LOGIT), wanted)
    torch.testing.assert_close(
        _universal(student, teacher[:, [6, 0, 2, 5, 1, 3, 4]], temperature=T_UNIVERSAL_LOGIT), wanted
    )


def test_tokens_without_mass_do_not_matter() -> None:
    student, teacher = random_logits(3, 5, seed=1), random_logits(3, 5)
    more = torch.cat([torch.full((3, 4), -torch.inf), teacher], 1)
    torch.testing.assert_close(
        _universal(student, more, temperature=T_UNIVERSAL_LOGIT),
        _universal(student, teacher, temperature=T_UNIVERSAL_LOGIT),
    )


def test_zero_where_they_agree() -> None:
    student = random_logits(3, 5).requires_grad_()
    value = _universal(student, student.detach().clone(), temperature=T_UNIVERSAL_LOGIT)
    (gradient,) = torch.autograd.grad(value, student)
    torch.testing.assert_close(
        (value, gradient), (torch.zeros_like(value), torch.zeros_like(gradient)), atol=1e-14, rtol=0
    )
    assert _universal(student, random_logits(3, 5, seed=1), temperature=T_UNIVERSAL_LOGIT) > 0.1


def test_the_gradients_size_does_not_depend_on_the_temperature_universal_logit() -> None:
    student, teacher = random_logits(3, 5, seed=1).requires_grad_(), random_logits(3, 5)
    at = {t: torch.autograd.grad(_universal(student, teacher, temperature=t), student)[0] for t in (50.0, 200.0)}
    assert float((at[50.0] - at[200.0]).norm() / at[200.0].norm()) < 0.05


def _shared(mine: int, theirs: int, *pairs: tuple[int, int]) -> SharedTokens:
    """So many tokens of either, of which `pairs` are the same."""
    own, others = (torch.tensor(each, dtype=torch.long) for each in zip(*pairs, strict=True))
    alone = (torch.tensor([n for n in range(size) if n not in used]) for size, used in ((mine, own), (theirs, others)))
    return SharedTokens(own, others, *alone)


SHARED = _shared(6, 7, (0, 3), (2, 1), (5, 6))


def test_gold_is_kl_of_shared_tokens_and_distance_of_the_others() -> None:
    student, teacher = (log_probs(random_logits(4, size, seed=size), T) for size in (6, 7))
    wanted = 0.0
    for q, p in zip(student.exp().tolist(), teacher.exp().tolist(), strict=True):
        wanted += T**2 * sum(p[b] * math.log(p[b] / q[a]) for a, b in ((0, 3), (2, 1), (5, 6)))
        others = sorted((p[n] for n in (0, 2, 4, 5)), reverse=True)
        own = [*sorted((q[n] for n in (1, 3, 4)), reverse=True), 0.0]
        wanted += T * sum(abs(a - b) for a, b in zip(own, others, strict=True))
    assert float(gold(student, teacher, None, SHARED, temperature=T)) == pytest.approx(wanted, rel=1e-12)
    all_of_it = student.new_full((4,), -torch.inf)
    assert float(gold(student, teacher, all_of_it, SHARED, temperature=T)) == pytest.approx(wanted, rel=1e-12)


def test_gold_of_one_vocabulary_is_forward_kl() -> None:
    student, teacher = (log_probs(random_logits(4, 6, seed=seed), T) for seed in (0, 1))
    same = _shared(6, 6, *((n, n) for n in range(6)))
    wanted = forward_kl(student, teacher) * T**2
    torch.testing.assert_close(gold(student, teacher, None, same, temperature=T), wanted)
    # Of the likeliest tokens alone, all others being one event.
    ids = teacher.topk(3).indices
    known = top_k_and_rest(teacher, ids)
    few = torch.full_like(teacher, -torch.inf).scatter(1, ids, known[:, :-1])
    bound = forward_kl(top_k_and_rest(student, ids), known) * T**2
    torch.testing.assert_close(gold(student, few, known[:, -1], same, temperature=T), bound)


def test_gradient_gold() -> None:
    logits, teacher = random_logits(3, 6, seed=1).requires_grad_(), log_probs(random_logits(3, 7), T)
    known = top_k_and_rest(teacher, teacher.topk(3).indices)
    few = torch.full_like(teacher, -torch.inf).scatter(1, teacher.topk(3).indices, known[:, :-1])
    for said, rest in ((teacher, None), (few, known[:, -1])):
        # The derivative of forward_kl is that of the student's probabilities, which add up to one.
        assert torch.autograd.gradcheck(
            lambda x, said=said, rest=rest: gold(log_probs(x, T), said, rest, SHARED, temperature=T), logits
        )


def test_the_likelihood_of_texts() -> None:
    mine, theirs = torch.tensor([-0.3, -5.0, -40.0]).double(), torch.tensor([-2.0, -0.1, -90.0]).double()
    for temperature in (1.0, 7.0):
        q, p = ([math.exp(each / temperature) for each in side.tolist()] for side in (mine, theirs))
        wanted = [temperature * _kl([b, 1 - b], [a, 1 - a]) for a, b in zip(q, p, strict=True)]
        torch.testing.assert_close(
            binary_kl(mine, theirs, temperature=temperature), torch.tensor(wanted).double(), rtol=1e-6, atol=1e-12
        )
    assert not binary_kl(mine, mine, temperature=3.0).any()
    assert torch.autograd.gradcheck(lambda x: binary_kl(x, theirs, temperature=2.0), mine.requires_grad_())
    # A text that is certain, or that cannot be.
    edges = torch.tensor([0.0, -1e4], requires_grad=True)
    value = binary_kl(edges, edges.detach().flip(0), temperature=1.0)
    assert value.isfinite().all() and torch.autograd.grad(value.sum(), edges)[0].isfinite().all()


def test_the_gradients_size_does_not_depend_on_the_temperature_of_texts() -> None:
    mine, theirs = torch.tensor([-4.0], requires_grad=True), torch.tensor([-6.0])
    at = [torch.autograd.grad(binary_kl(mine, theirs, temperature=t).sum(), mine)[0] for t in (200.0, 800.0)]
    torch.testing.assert_close(*at, rtol=0.02, atol=0)
