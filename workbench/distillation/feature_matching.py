"""Terms of the loss that make layers of a student like layers of its teacher.

Layer k >= 1 is the k-th block: its hidden states are what the block gives, without the normalisation that may stand
behind the last one. Layer 0 is what enters the first block.

Legend: B rows, L padded length (of pictures, the positions of a layer), D student's width, E teacher's width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.config.sections.distill_config import MatchConfig
from workbench.data.batching import MicroBatch
from workbench.data.packing import padded_length
from workbench.distillation.activation_capture import (
    ActivationCatcher,
    CapturePoint,
    Caught,
    ComparedLayers,
    Projections,
    scores,
)
from workbench.errors import ConfigError
from workbench.losses import feature_losses


class FeatureMatching(nn.Module):
    """Compares what runs inside of two models; trains beside the student and is never shipped.

    Args:
        student, teacher: Backbones without an adapter's wrapper, the modules that run. They may be one object.
        seed: Decides how the projections between different widths start.
        picture_13HW: A picture of the size that both will read, where they read pictures.

    Raises:
        ConfigError: a term names a layer that is not there, or cannot be computed of these models.
    """

    def __init__(
        self,
        terms: Sequence[MatchConfig],
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        *,
        seed: int,
        picture_13HW: Tensor | None = None,
    ) -> None:
        super().__init__()
        ends = ComparedLayers(student, picture_13HW), ComparedLayers(teacher, picture_13HW)
        require_layers(terms, ends[0].count, ends[1].count)
        self._ends = ends
        self._terms: list[tuple[float, _Pair]] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for number, term in enumerate(terms):
                chosen = _layers(term, ends[0].count, ends[1].count)
                pairs = [_pair(term, *ends, both, where=f"distill.match.{number}") for both in chosen.items()]
                self._terms += [(term.weight / len(pairs), pair) for pair in pairs]
        self.pairs = nn.ModuleList(pair for _, pair in self._terms).to(student.device)
        self._student = ActivationCatcher(
            student, {spot for _, pair in self._terms for spot in pair.student}, graph=True
        )
        self._teacher = ActivationCatcher(
            teacher, {spot for _, pair in self._terms for spot in pair.teacher}, graph=False
        )

    def student(self) -> AbstractContextManager[None]:
        """The student runs inside, once."""
        return self._student.catching()

    def teacher(self) -> AbstractContextManager[None]:
        """The teacher runs inside; no gradient flows there. Of several over one backbone the mean is caught."""
        return self._teacher.catching()

    def loss(self, batch: MicroBatch) -> Tensor:
        """Sum over rows, weighted as in the loss of their labels, and over terms; a term is a mean over its layers.

        Call after the models ran; what was caught is let go.

        Returns:
            Scalar, float32 or wider. Times 1 / supervised tokens of the global batch it is a weighted mean over rows.
        """
        length = padded_length(batch)
        student, teacher = (
            {spot: end.own(spot, tensor, length=length) for spot, tensor in catcher.take().items()}
            for end, catcher in zip(self._ends, (self._student, self._teacher), strict=True)
        )
        terms = [
            weight * pair(student, teacher, _real_tokens(batch, student[pair.student[0]]))
            for weight, pair in self._terms
        ]
        total_B = torch.stack(terms).sum(0)
        return (total_B * _row_weights(batch, length).to(total_B.dtype)).sum()


class _Hidden(nn.Module):
    """Hidden states, through a learned projection where their widths differ."""

    def __init__(self, what: str, student: CapturePoint, teacher: CapturePoint, *, widths: tuple[int, int]) -> None:
        super().__init__()
        self.student, self.teacher = (student,), (teacher,)
        self.projection = nn.Identity() if widths[0] == widths[1] else nn.Linear(*widths)
        self._compare = {"hidden_mse": feature_losses.hidden_mse, "hidden_cosine": feature_losses.hidden_cosine}[what]

    def forward(self, student: Caught, teacher: Caught, mask_BL: Tensor) -> Tensor:
        hidden_BLD = student[self.student[0]]
        if isinstance(self.projection, nn.Linear):
            hidden_BLD = self.projection(hidden_BLD.to(self.projection.weight.dtype))
        return self._compare(hidden_BLD, teacher[self.teacher[0]], mask_BL)


class _Projected(nn.Module):
    """Queries, keys and values."""

    def __init__(self, student: Projections, teacher: Projections, compare: Callable[..., Tensor]) -> None:
        super().__init__()
        self.student, self.teacher = student.spots, teacher.spots
        self._ends = (student, teacher)
        self._compare = compare

    def forward(self, student: Caught, teacher: Caught, mask_BL: Tensor) -> Tensor:
        loss: Tensor = self._compare(self._ends[0].of(student), self._ends[1].of(teacher), mask_BL)
        return loss


_Pair = _Hidden | _Projected
"""A layer of each. What was caught of student and teacher, and mask_BL of real tokens, to one number a row (B,)."""


def require_layers(terms: Sequence[MatchConfig], student: int, teacher: int) -> None:
    """Raise ConfigError where a term names no layer, or one that a model of so many does not have."""
    counts = student, teacher
    for number, term in enumerate(terms):
        first = 0 if _compares_hidden(term) else 1
        chosen = _layers(term, *counts)
        if not chosen:
            raise ConfigError(f"distill.match.{number}.layers: names no layer. Write last, uniform, or {{1: 2}}.")
        for who, count, asked in zip(("student", "teacher"), counts, ([*chosen], [*chosen.values()]), strict=True):
            if odd := [layer for layer in asked if not first <= layer <= count]:
                meaning = ", 0 being what enters the first" if first == 0 else f"; {term.what} looks inside of one"
                raise ConfigError(
                    f"distill.match.{number}.layers: the {who} has no layer {odd[0]} for {term.what}. "
                    f"Write {first} to {count}{meaning}."
                )


def _layers(term: MatchConfig, student: int, teacher: int) -> dict[int, int]:
    """The student's layers and those of the teacher that they are compared with."""
    if term.layers == "last":
        return {student: teacher}
    if term.layers == "uniform":
        # Rounded half up.
        spread = {layer: max(1, (2 * layer * teacher + student) // (2 * student)) for layer in range(1, student + 1)}
        return {0: 0, **spread} if _compares_hidden(term) else spread
    return term.layers


def _compares_hidden(term: MatchConfig) -> bool:
    return term.what in ("hidden_mse", "hidden_cosine")


def _pair(
    term: MatchConfig, student: ComparedLayers, teacher: ComparedLayers, layers: tuple[int, int], *, where: str
) -> _Pair:
    """One layer of each, as the term compares them."""
    _require_positions(student, teacher, layers, where)
    if _compares_hidden(term):
        own, other = student.hidden(layers[0]), teacher.hidden(layers[1])
        return _Hidden(term.what, own, other, widths=(student.width(own), teacher.width(other)))
    ends = (_projections(term, student, layers[0], where), _projections(term, teacher, layers[1], where))
    if term.what == "relation":
        heads = term.heads or teacher.heads
        if heads is None:
            raise ConfigError(
                f"{where}.what=relation: {teacher.family} has other numbers of attention heads in each stage. Write "
                f"{where}.heads, into how many queries, keys and values are cut."
            )
        _require_cuts(ends, heads, where)
        return _Projected(*ends, partial(_relation, heads=heads))
    for model in (student, teacher):
        if not model.adds_positions():
            raise ConfigError(
                f"{where}.what=attention: {model.family} turns queries and keys by position or adds to their scores, "
                "so that no product of theirs is what it attends by. Write what=relation."
            )
    if student.heads != teacher.heads:
        raise ConfigError(
            f"{where}.what=attention: the student has {student.heads} attention heads and the teacher {teacher.heads}, "
            "so that there is no telling which is like which. Write what=relation."
        )
    assert student.heads is not None, "positions are added to the embeddings of no backbone with stages"
    compare = partial(_attention, heads=student.heads, causal=any(end.causal for end in ends))
    return _Projected(ends[0].without_values(), ends[1].without_values(), compare)


def _relation(student: Sequence[Tensor], teacher: Sequence[Tensor], mask_BL: Tensor, *, heads: int) -> Tensor:
    """How alike the queries of a row's tokens are to one another, and their keys, and their values."""
    each = zip(student, teacher, strict=True)
    return torch.stack([feature_losses.relation(*both, mask_BL, heads=heads) for both in each]).sum(0)


def _attention(
    student: Sequence[Tensor], teacher: Sequence[Tensor], mask_BL: Tensor, *, heads: int, causal: bool
) -> Tensor:
    """Attention's scores in front of its softmax; those of tokens that a causal model does not see count as equal."""
    student_BHLL, teacher_BHLL = (
        scores(projections[0], projections[1], heads=heads) for projections in (student, teacher)
    )
    if causal:
        student_BHLL, teacher_BHLL = student_BHLL.tril(), teacher_BHLL.tril()
    return feature_losses.attention(student_BHLL, teacher_BHLL, mask_BL)


def _projections(term: MatchConfig, model: ComparedLayers, layer: int, where: str) -> Projections:
    layer_projections = model.projections(layer)
    if layer_projections is None:
        raise ConfigError(
            f"{where}.what={term.what}: layer {layer} of {model.family} computes no queries, keys and values, or where "
            "is not known. Write what=hidden_mse or what=hidden_cosine."
        )
    if model.positions(layer_projections.spots[0]) != model.positions(model.hidden(layer)):
        raise ConfigError(
            f"{where}.what={term.what}: layer {layer} of {model.family} attends inside of windows, so that most "
            "positions of a picture are never compared with one another. Write what=hidden_mse or what=hidden_cosine."
        )
    return layer_projections


def _require_positions(student: ComparedLayers, teacher: ComparedLayers, layers: tuple[int, int], where: str) -> None:
    """Raise ConfigError where two layers have not the same positions, which are compared one by one."""
    row_shapes = [end.positions(end.hidden(layer)) for end, layer in zip((student, teacher), layers, strict=True)]
    if row_shapes[0] == row_shapes[1] or None in row_shapes:
        return
    counts = [each[1] for each in row_shapes if each is not None]
    fitting = [
        f"{own}: {other}"
        for own in range(1, student.count + 1)
        for other in range(1, teacher.count + 1)
        if student.positions(student.hidden(own)) == teacher.positions(teacher.hidden(other))
    ]
    cure = (
        f"Write layers that fit, such as {where}.layers={{{fitting[-1]}}}, or take"
        if fitting
        else "No layers of theirs have as many. Take"
    )
    raise ConfigError(
        f"{where}.layers: layer {layers[0]} of the student, {student.family}, has {counts[0]} positions (patches and "
        f"other tokens, or pixels of a feature map), and layer {layers[1]} of the teacher, {teacher.family}, "
        f"{counts[1]}. {cure} a teacher that cuts pictures as the student does, or leave distill.match out."
    )


def _require_cuts(ends: Sequence[Projections], heads: int, where: str) -> None:
    """Raise ConfigError where some queries, keys or values cannot be cut into `heads` equal parts."""
    widths = sorted({width for end in ends for width in end.widths})
    if any(width % heads for width in widths):
        common = math.gcd(*widths)
        fitting = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise ConfigError(
            f"{where}.heads: queries, keys and values are {', '.join(map(str, widths))} wide, which {heads} heads do "
            f"not cut evenly. Write one of {fitting}."
        )


def _real_tokens(batch: MicroBatch, caught_BLD: Tensor) -> Tensor:
    """mask_BL: what is no padding, of a decoder's tokens where there is one; of pictures, everything."""
    mask_BL = batch.inputs.get("attention_mask")
    if mask_BL is not None and "decoder_input_ids" not in batch.inputs:
        return mask_BL.bool()
    rows, length = caught_BLD.shape[:2]
    if batch.lengths_B is None:
        assert "row_lengths" not in batch.inputs, "packed rows would be taken for one"
        return torch.ones(rows, length, dtype=torch.bool, device=caught_BLD.device)
    return torch.arange(length, device=batch.lengths_B.device) < batch.lengths_B[:, None]


def _row_weights(batch: MicroBatch, length: int) -> Tensor:
    """Weight of each row (B,): its supervised tokens, or the weight of its label."""
    if batch.labels_N.is_floating_point():
        return batch.labels_N[:, 0]
    rows = len(next(iter(batch.inputs.values())))
    return torch.bincount(batch.positions_N // length, minlength=rows)
