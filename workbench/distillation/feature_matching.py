"""Terms of the loss that make layers of a student like layers of its teacher, and the capture of what they compare.

Layer k >= 1 is the k-th block: its hidden states are what the block gives, without the normalisation that may stand
behind the last one. Layer 0 is what enters the first block.

Legend: B rows, L padded length (of pictures, the positions of a layer), D student's width, E teacher's width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from workbench.adapters import anatomy
from workbench.adapters.prompts import visual_prompt_tuner
from workbench.config.sections.distill_config import MatchConfig
from workbench.data.batching import MicroBatch
from workbench.data.packing import padded_length
from workbench.errors import ConfigError
from workbench.losses import feature_losses
from workbench.losses.chunked_loss import wide
from workbench.models import classifier

_APART = (
    ("q_proj", "k_proj", "v_proj"),  # Llama, OPT, BART and most
    ("query", "key", "value"),  # BERT, RoBERTa, ELECTRA
    ("query_proj", "key_proj", "value_proj"),  # DeBERTa v2 and v3
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("q", "k", "v"),  # T5, MPNet
)
_JOINED = {"gpt2": "c_attn", "phi3": "qkv_proj", "modernbert": "Wqkv", "mpt": "Wqkv"}
"""Joint projections (queries, then keys, then values), by family."""
_POSITIONS = {"position_embeddings", "position_embedding", "embed_positions", "wpe"}
"""Tables of positions that are added to the embeddings, by the last part of their path."""
_RELATIVE = {
    "relative_attention_bias",
    "rel_embeddings",
    "relative_position_bias_table",  # BEiT, Swin
    "continuous_position_bias_mlp",  # Swin v2
}  # parts that say what attention adds to its scores


class CapturePoint(NamedTuple):
    """A tensor inside a model."""

    path: str  # path of the module in the model
    read: bool = False  # capture the module's first input instead of its output


Caught = Mapping[CapturePoint, Tensor]


class Projections(NamedTuple):
    """Queries, keys and values of a layer's self-attention, before rotary positions are applied."""

    spots: tuple[CapturePoint, ...]  # one of each, or one of all
    widths: tuple[int, int, int]
    causal: bool  # whether no token looks at those after it

    def of(self, caught: Caught) -> tuple[Tensor, ...]:
        """Queries, keys and values (B, L, their width)."""
        activations = tuple(caught[spot] for spot in self.spots)
        return tuple(torch.split(activations[0], list(self.widths), dim=-1)) if len(activations) == 1 else activations


class ComparedLayers:
    """The layers of a model that another's are compared with; of an encoder-decoder, the decoder's.

    Hidden states are (B, L, D); the L positions of a feature map are its pixels, row by row. Raises ConfigError: its
    blocks are not its layers.

    Args:
        model: The modules that run, with or without an adapter's inside; they may be without weights.
        picture_13HW: One that the model will read, by whose size the positions are counted; by default of its own size.
    """

    def __init__(self, model: PreTrainedModel, picture_13HW: Tensor | None = None) -> None:
        classifier.widen_last_block(model)
        self.family = type(model).__name__
        self.model = model
        self.blocks = (anatomy.blocks(model) or [[]])[-1]
        self._sees = anatomy.reads_pictures(model)
        self.config: Any = anatomy.body_config(model.config) if self._sees else text_config(model.config)
        # Numbers of layers mean stages in the configurations of some that read pictures, and in others nothing.
        self.count = len(self.blocks) if self._sees else layers(model.config)
        if len(self.blocks) != self.count or not self.blocks:
            raise ConfigError(
                f"distill.match: {self.family} has {self.count} layers in {len(self.blocks)} blocks, so that they "
                "cannot be told apart. Leave distill.match out, or take another backbone."
            )
        self._virtual = visual_prompt_tuner.virtual_tokens(model)
        self._shapes: dict[CapturePoint, torch.Size] = {}
        if self._sees:  # of all that can be compared, by one call of the model
            blank = anatomy.blank_picture(model)
            spots = [self.hidden(layer) for layer in range(self.count + 1)]
            for layer in range(1, self.count + 1):
                if found := self.projections(layer):
                    spots += found.spots
            catcher = ActivationCatcher(model, spots, graph=False)
            with catcher.catching():
                anatomy.compute_picture(model, blank if picture_13HW is None else picture_13HW.to(blank))
            self._shapes = {spot: tensor.shape for spot, tensor in catcher.take().items()}

    def width(self, spot: CapturePoint) -> int:
        """D of hidden states."""
        width: int = self._shapes[spot][-1] if self._sees else self.config.hidden_size
        return width

    def positions(self, spot: CapturePoint) -> tuple[int, int] | None:
        """Rows, and L of each, that a picture has in front of or behind a module; None for text, whose L varies.

        They are several rows where attention looks into windows, each a row of its own.
        """
        if not self._sees:
            return None
        rows, length, *_ = self._shapes[spot]
        return rows, length - self._virtual_at(spot)

    @property
    def heads(self) -> int | None:
        """Number of attention heads; None where there is none, or another one in each stage."""
        heads = getattr(self.config, "num_attention_heads", None)
        return heads if isinstance(heads, int) else None

    def own(self, spot: CapturePoint, caught_BLD: Tensor, *, length: int) -> Tensor:
        """Those of a row's own tokens, without the virtual ones: before a text, and behind the patches of a picture.
        `length`: L of texts."""
        if self._sees:
            return caught_BLD[:, : caught_BLD.shape[1] - self._virtual_at(spot)]
        return caught_BLD[:, -length:]

    def hidden(self, layer: int) -> CapturePoint:
        """The hidden states that layer `layer` gives, before any normalisation behind the last one; 0: that enter."""
        return CapturePoint(self.blocks[layer - 1]) if layer else CapturePoint(self.blocks[0], read=True)

    def projections(self, layer: int) -> Projections | None:
        """Those of layer `layer`; None where they are not known."""
        block = self.blocks[layer - 1]
        # A block attends to its own tokens before it attends to an encoder's.
        for path, module in self.model.get_submodule(block).named_modules(prefix=block):
            parts = dict(module.named_children())
            for names in (*_APART, (_JOINED.get(self.config.model_type, ""),)):
                found = [parts[name] for name in names if name in parts]
                # The backbone's own layer beneath an adapter's.
                linears = [each.get_base_layer() if isinstance(each, BaseTunerLayer) else each for each in found]
                if len(linears) == len(names) and all(map(anatomy.is_linear, linears)):
                    widths = [anatomy.features(linear)[1] for linear in linears]
                    if len(widths) == 1:
                        heads: int = self.config.num_attention_heads
                        queries = heads * (getattr(self.config, "head_dim", None) or self.config.hidden_size // heads)
                        widths = [queries, *[(widths[0] - queries) // 2] * 2]
                    return Projections(
                        tuple(CapturePoint(f"{path}.{name}") for name in names),
                        (widths[0], widths[1], widths[2]),
                        causal=bool(getattr(module, "is_causal", False)),  # as transformers' own attention asks
                    )
        return None

    def adds_positions(self) -> bool:
        """Whether positions are part of the embeddings, so that attention's scores are queries times keys alone."""
        everything = (*self.model.named_modules(), *self.model.named_parameters())
        parts = [(path.rpartition(".")[2], part) for path, part in everything]
        tables = {name for name, part in parts if isinstance(part, (nn.Embedding, nn.Parameter))}
        return bool(tables & _POSITIONS) and not {name for name, _ in parts} & _RELATIVE

    def _virtual_at(self, spot: CapturePoint) -> int:
        """Virtual tokens there; the last block gives none of them."""
        return 0 if spot == self.hidden(self.count) else self._virtual


class ActivationCatcher:
    """Holds what runs past some spots of a model, until it is taken; of a feature map (B, D, H, W) as (B, HW, D)."""

    def __init__(self, model: PreTrainedModel, spots: Iterable[CapturePoint], *, graph: bool) -> None:
        self._model, self._graph = model, graph
        self._caught: dict[CapturePoint, list[Tensor]] = {spot: [] for spot in spots}

    @contextmanager
    def catching(self) -> Iterator[None]:
        """The model runs inside the block; what was caught before is dropped, and also where it fails."""
        self.drop()
        handles = [self._hook(spot) for spot in self._caught]
        try:
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            # Before the backward pass, in which checkpointed blocks run again.
            for handle in handles:
                handle.remove()

    def take(self) -> dict[CapturePoint, Tensor]:
        """Captured tensors, which are released here; of several runs (teachers over one backbone) their mean."""
        assert all(self._caught.values()), "the model runs first"
        taken = {
            spot: tensors[0] if len(tensors) == 1 else torch.stack(tensors).mean(0)
            for spot, tensors in self._caught.items()
        }
        self.drop()
        return taken

    def drop(self) -> None:
        """Let go of everything."""
        for activations in self._caught.values():
            activations.clear()

    def _hook(self, spot: CapturePoint) -> RemovableHandle:
        # By path and only now: a method may have put its own layer there.
        module = self._model.get_submodule(spot.path)
        held = self._caught[spot]

        def keep(tensor: Tensor) -> None:
            tensor = tensor.flatten(2).mT if tensor.ndim == 4 else tensor
            held.append(tensor if self._graph else tensor.detach())

        if spot.read:
            return module.register_forward_pre_hook(
                lambda _, given, named: keep(given[0] if given else named["hidden_states"]), with_kwargs=True
            )
        return module.register_forward_hook(
            lambda _, __, output: keep(output[0] if isinstance(output, (tuple, list)) else output)
        )


def layers(config: PretrainedConfig) -> int:
    """How many layers a model of text has that can be compared."""
    count: int = getattr(config, "num_decoder_layers", None) or text_config(config).num_hidden_layers
    return count


def text_config(config: PretrainedConfig) -> Any:
    """The architecture of what predicts text: the decoder, where there is one."""
    return config.get_text_config(decoder=True)


def scores(queries_BLD: Tensor, keys_BLD: Tensor, *, heads: int) -> Tensor:
    """Attention's scores (B, H, L, L) in front of its softmax, in float32 or wider."""
    both = (each.to(wide(each.dtype)) for each in (queries_BLD, keys_BLD))
    queries, keys = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in both)
    scores_BHLL: Tensor = queries @ keys.mT / math.sqrt(queries.shape[-1])
    return scores_BHLL


class FeatureMatching(nn.Module):
    """Compares what runs inside of two models; trains beside the student and is never shipped. Raises ConfigError: a
    term names a layer that is not there, or cannot be computed of these models.

    Args:
        student, teacher: Backbones without an adapter's wrapper, the modules that run. They may be one object.
        seed: Decides how the projections between different widths start.
        picture_13HW: A picture of the size that both will read, where they read pictures.
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
        own = {spot for _, pair in self._terms for spot in pair.student}
        other = {spot for _, pair in self._terms for spot in pair.teacher}
        self._student = ActivationCatcher(student, own, graph=True)
        self._teacher = ActivationCatcher(teacher, other, graph=False)

    def student(self) -> AbstractContextManager[None]:
        """The student runs inside, once."""
        return self._student.catching()

    def teacher(self) -> AbstractContextManager[None]:
        """The teacher runs inside; no gradient flows there. Of several over one backbone the mean is caught."""
        return self._teacher.catching()

    def loss(self, batch: MicroBatch) -> Tensor:
        """Sum over rows, weighted by supervised tokens or the label's weight, of terms; a term is a mean over layers.

        Call after the models ran; what was caught is let go.

        Returns:
            Scalar, float32 or wider. Times 1 / supervised tokens of the global batch it is a weighted mean over rows.
        """
        length = padded_length(batch)
        student, teacher = (
            {spot: end.own(spot, tensor, length=length) for spot, tensor in catcher.take().items()}
            for end, catcher in zip(self._ends, (self._student, self._teacher), strict=True)
        )

        def real_tokens(caught_BLD: Tensor) -> Tensor:
            """mask_BL: True for tokens, False for padding (of the decoder, if there is one); all True for pictures."""
            mask_BL = batch.inputs.get("attention_mask")
            if mask_BL is not None and "decoder_input_ids" not in batch.inputs:
                return mask_BL.bool()
            rows, length = caught_BLD.shape[:2]
            if batch.lengths_B is None:
                assert "row_lengths" not in batch.inputs, "packed rows would be taken for one"
                return torch.ones(rows, length, dtype=torch.bool, device=caught_BLD.device)
            return torch.arange(length, device=batch.lengths_B.device) < batch.lengths_B[:, None]

        terms = [weight * pair(student, teacher, real_tokens(student[pair.student[0]])) for weight, pair in self._terms]
        total_B = torch.stack(terms).sum(0)
        if batch.labels_N.is_floating_point():
            weight_B = batch.labels_N[:, 0]
        else:
            rows = len(next(iter(batch.inputs.values())))
            weight_B = torch.bincount(batch.positions_N // length, minlength=rows)
        return (total_B * weight_B.to(total_B.dtype)).sum()


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
    """Raise ConfigError where a term names no layer, or one beyond the layers of the models."""
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
    row_shapes = [end.positions(end.hidden(layer)) for end, layer in zip((student, teacher), layers, strict=True)]
    if row_shapes[0] != row_shapes[1] and None not in row_shapes:  # positions are compared one by one
        counts = [each[1] for each in row_shapes if each is not None]
        fitting = [
            f"{own}: {other}"
            for own in range(1, student.count + 1)
            for other in range(1, teacher.count + 1)
            if student.positions(student.hidden(own)) == teacher.positions(teacher.hidden(other))
        ]
        cure = "No layers of theirs have as many. Take"
        if fitting:
            cure = f"Write layers that fit, such as {where}.layers={{{fitting[-1]}}}, or take"
        raise ConfigError(
            f"{where}.layers: layer {layers[0]} of the student, {student.family}, has {counts[0]} positions (patches "
            f"and other tokens, or pixels of a feature map), and layer {layers[1]} of the teacher, {teacher.family}, "
            f"{counts[1]}. {cure} a teacher that cuts pictures as the student does, or leave distill.match out."
        )
    if _compares_hidden(term):
        mine, theirs = student.hidden(layers[0]), teacher.hidden(layers[1])
        return _Hidden(term.what, mine, theirs, widths=(student.width(mine), teacher.width(theirs)))
    ends = (_projections(term, student, layers[0], where), _projections(term, teacher, layers[1], where))
    if term.what == "relation":
        heads = term.heads or teacher.heads
        if heads is None:
            raise ConfigError(
                f"{where}.what=relation: {teacher.family} has other numbers of attention heads in each stage. Write "
                f"{where}.heads, into how many queries, keys and values are cut."
            )
        widths = sorted({width for end in ends for width in end.widths})
        if any(width % heads for width in widths):
            common = math.gcd(*widths)
            numbers = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
            raise ConfigError(
                f"{where}.heads: queries, keys and values are {', '.join(map(str, widths))} wide, which {heads} heads "
                f"do not cut evenly. Write one of {numbers}."
            )
        return _Projected(*ends, partial(_relation, heads=heads))
    for model in (student, teacher):
        if not model.adds_positions():
            raise ConfigError(
                f"{where}.what=attention: {model.family} turns queries and keys by position or adds to their scores, "
                "so that no product of theirs is what it attends by. Write {what: relation} there."
            )
    if student.heads != teacher.heads:
        raise ConfigError(
            f"{where}.what=attention: the student has {student.heads} attention heads and the teacher {teacher.heads}, "
            "so that there is no telling which is like which. Write {what: relation} there."
        )
    assert student.heads is not None, "positions are added to the embeddings of no backbone with stages"
    compare = partial(_attention, heads=student.heads, causal=any(end.causal for end in ends))
    queries_and_keys = [end._replace(spots=end.spots[:2]) for end in ends]  # values need not be caught with them
    return _Projected(queries_and_keys[0], queries_and_keys[1], compare)


def _relation(student: Sequence[Tensor], teacher: Sequence[Tensor], mask_BL: Tensor, *, heads: int) -> Tensor:
    """Loss on similarities between the queries of a row's tokens, between their keys and between their values."""
    each = zip(student, teacher, strict=True)
    return torch.stack([feature_losses.relation(*both, mask_BL, heads=heads) for both in each]).sum(0)


def _attention(
    student: Sequence[Tensor], teacher: Sequence[Tensor], mask_BL: Tensor, *, heads: int, causal: bool
) -> Tensor:
    """Attention's scores in front of its softmax; those of tokens that a causal model does not see count as equal."""
    student_BHLL, teacher_BHLL = (scores(each[0], each[1], heads=heads) for each in (student, teacher))
    if causal:
        student_BHLL, teacher_BHLL = student_BHLL.tril(), teacher_BHLL.tril()
    return feature_losses.attention(student_BHLL, teacher_BHLL, mask_BL)


def _projections(term: MatchConfig, model: ComparedLayers, layer: int, where: str) -> Projections:
    found = model.projections(layer)
    if found is None:
        raise ConfigError(
            f"{where}.what={term.what}: layer {layer} of {model.family} computes no queries, keys and values, or where "
            "is not known. Write what=hidden_mse or what=hidden_cosine."
        )
    if model.positions(found.spots[0]) != model.positions(model.hidden(layer)):
        raise ConfigError(
            f"{where}.what={term.what}: layer {layer} of {model.family} attends inside of windows, so that most "
            "positions of a picture are never compared with one another. Write what=hidden_mse or what=hidden_cosine."
        )
    return found
