"""A student that is narrower than what it is made of: fewer attention heads, MLP neurons and hidden channels.

Those stay whose activations are largest on training rows (Minitron, Muralidharan et al. 2024, arXiv:2407.14679), or the
squares of value times gradient (Fisher information of a mask, Kwon et al. 2022, arXiv:2204.09656). The smaller
configuration is built first: a family is known by what its tensors' shapes become, not by its name.

Legend: B rows, L padded length, D channels, G structures (groups of heads, neurons, channels), U values of each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from workbench.adapters import anatomy, stock
from workbench.config.sections.distill_config import StudentConfig
from workbench.data.batching import Examples, MicroBatch
from workbench.distillation import layer_importance
from workbench.errors import ConfigError

Structure = Literal["heads", "neurons", "channels"]

_SETTINGS: dict[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads",),
    "shared": ("num_key_value_heads", "num_kv_heads"),
    "neurons": ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "ffn_hidden_size"),
    "channels": ("hidden_size", "word_embed_proj_dim", "pooler_output_size"),
}
"""How families call them in their configurations; the model that is built shows whether that is right."""
_BY_HEAD = ("query_key_value",)
"""Layers that compute queries, keys and values at once, head by head; others have all queries first."""


class _Reader(NamedTuple):
    """The layer of a block that reads all heads, or all neurons, and adds to the hidden states."""

    structure: Structure
    block: int
    path: str
    others: tuple[str, ...]
    """The layers that write the heads or neurons."""


class _Count(NamedTuple):
    """How many structures there are and stay, and how many values each has."""

    whole: int
    kept: int
    values: int = 1
    each: int = 1
    """Values of one head."""


class _Cut(NamedTuple):
    """A dimension of a tensor that becomes smaller: it holds, one after another, `units` values of each structure."""

    structure: Structure
    block: int | None
    dimension: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class WidthPlan:
    """What a model has to lose."""

    config: PretrainedConfig
    skeleton: PreTrainedModel
    counts: dict[Structure, _Count]
    readers: tuple[_Reader, ...]
    cuts: dict[str, list[_Cut]]
    """Of each tensor that becomes smaller."""


Place = tuple[Structure, int | None]
"""A kind of structure and its block; of channels, None."""


def rows_to_read(rows: Examples) -> list[MicroBatch]:
    """The first rows, in batches that need little memory."""
    number = np.cumsum(rows.lengths[: layer_importance.ROWS]) // layer_importance.TOKENS
    return [rows.batch(np.flatnonzero(number == each)) for each in np.unique(number)]


def plan(model: PreTrainedModel, student: StudentConfig) -> WidthPlan:
    """How `model`, which may have no weights, becomes as narrow as `student` says.

    Raises ConfigError: it has no such number of heads, neurons or channels, or its family cannot lose them.
    """
    if len(anatomy.blocks(model)) != 1:
        raise _immutable(model, f"its layers stand in {len(anatomy.blocks(model))} stacks")
    with stock.own_dropout(model):
        config = type(model.config).from_dict(model.config.to_dict())
    body = anatomy.body_config(config)
    settings = {structure: _settings(body, structure) for structure in _SETTINGS}
    if not settings["channels"]:
        raise _immutable(model, "no setting says how wide its hidden states are")
    width = next(iter(settings["channels"].values()))
    readers = tuple(_readers(model, width, {*settings["neurons"].values(), 4 * width}))
    first = {reader.structure: reader for reader in reversed(readers)}
    counts: dict[Structure, _Count] = {"channels": _Count(width, _wanted(student, "channels", width))}
    changes = {name: counts["channels"].kept for name, value in settings["channels"].items() if value == width}
    if "neurons" in first:
        neurons, _ = anatomy.features(model.get_submodule(first["neurons"].path))
        counts["neurons"] = _Count(neurons, _wanted(student, "neurons", neurons))
        said = [name for name, value in settings["neurons"].items() if value == neurons]
        unsaid = [name for name in ("n_inner",) if name in body.to_dict()]  # 4 times the channels
        changes |= dict.fromkeys(said or unsaid, counts["neurons"].kept)
    elif student.neurons != "all":
        raise _immutable(model, "no pair of linear layers is known to be the MLP of a layer")
    if "heads" in first and settings["heads"] and not student.heads == student.channels == "all":
        ((name, heads),) = settings["heads"].items()
        shared_name, shared = next(iter(settings["shared"].items()), (name, heads))
        size, odd = divmod(anatomy.features(model.get_submodule(first["heads"].path))[0], heads)
        if odd or heads % shared:
            raise _immutable(model, f"{first['heads'].path} does not read {heads} heads of one size")
        together = heads // shared if shared > 1 else 1  # where all share the same keys, these stay
        kept = _wanted(student, "heads", heads, together)
        counts["heads"] = _Count(heads // together, kept // together, together * size, size)
        changes |= {shared_name: kept // together if shared > 1 else shared, name: kept}
    elif student.heads != "all":
        raise _immutable(model, "no linear layer is known to read the heads of a layer")
    if counts["channels"].kept != width:
        norms = [module for module in model.modules() if _of_channels(module, width)]
        if not norms:
            raise _immutable(model, "no norm with weights shows how large its channels are")
        # Those that go are small: the mean square of the others is larger than that of all.
        constants = {_epsilon(norm) for norm in norms if not _centred(norm)}
        found = {name: value for name, value in body.to_dict().items() if "eps" in name and value in constants}
        changes |= {name: value * width / counts["channels"].kept for name, value in found.items()}
    size, sized = (counts["heads"].each if "heads" in counts else 0), "head_dim" in body.to_dict()
    misfit: tuple[Structure, str] | None = None
    for more in ({}, {"head_dim": size} if size else {}):  # some families know the size only where it is configured
        try:
            body.update({**changes, **more})
            narrowing = WidthPlan(config, _built(model, config), counts, readers, {})
            misfit = _find_cuts(model, narrowing)
        except (ValueError, IndexError, KeyError, TypeError, RuntimeError, StrictDataclassError) as error:
            misfit = "heads", str(error).splitlines()[-1].strip().removeprefix("ValueError: ")
        if misfit is None:
            return narrowing
    assert misfit is not None
    if misfit[0] == "heads" and size and not sized:
        kept = counts["heads"].kept if student.heads != "all" else max(1, counts["channels"].kept // size)
        raise ConfigError(
            f"distill.student: {type(body).__name__} makes heads as wide as hidden_size / num_attention_heads, {size} "
            f"here, so that heads and channels go together. Write distill.student.heads={kept} and "
            f"distill.student.channels={kept * size}, or take a backbone of another family."
        )
    raise _immutable(model, misfit[1])


def _settings(config: PretrainedConfig, structure: str) -> dict[str, int]:
    """The settings of a configuration that say how many there are."""
    values = config.to_dict()
    names = [config.attribute_map.get(name, name) for name in _SETTINGS[structure]]
    return {name: values[name] for name in names if type(values.get(name)) is int}


def _wanted(student: StudentConfig, of: Structure, whole: int, together: int = 1) -> int:
    try:
        return student.width(of, whole, together)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def narrowed(
    model: PreTrainedModel, student: StudentConfig, batches: Sequence[MicroBatch]
) -> tuple[PreTrainedModel, dict[str, list[list[int]]]]:
    """`model` without the heads, neurons and channels that matter least to the rows of `batches`, and those that stay.

    Of the latter, numbers by layer; channels are the same in all, and heads are counted by groups that share keys.

    Takes the weights of `model`, which is of no use afterwards. Raises ConfigError: as `plan`, and where the student
    does not compute what `model` does with zeros in place of what goes.
    """
    model.eval().requires_grad_(False)
    narrowing, scores = plan(model, student), dict[Place, Tensor]()
    for batch in batches:
        for place, score in importance(model, narrowing, batch.to(model.device), student.importance).items():
            scores[place] = scores.get(place, 0) + score
    kept = {place: score.topk(narrowing.counts[place[0]].kept).indices.sort().values for place, score in scores.items()}
    whole, left, *_ = narrowing.counts["channels"]
    norms = {f"{path}.weight": module for path, module in model.named_modules() if _of_channels(module, whole)}
    state, gone = dict[str, Tensor](), list[tuple[Tensor, int, Tensor]]()
    for name, tensor in model.state_dict().items():
        cuts = narrowing.cuts.get(name, [])
        value = tensor
        for cut in cuts:
            index = _index(cut, kept[cut.structure, cut.block], narrowing.counts[cut.structure].whole)
            value = value.index_select(cut.dimension, index)
            missing = torch.ones(tensor.shape[cut.dimension], dtype=torch.bool, device=tensor.device)
            missing[index] = False
            gone.append((tensor, cut.dimension, missing.nonzero().flatten()))
        if cuts and name in norms and not _centred(norms[name]):
            added = _offset(norms[name])  # Gemma multiplies by 1 + weight
            value = ((value.float() + added) * math.sqrt(whole / left) - added).to(value.dtype)
        state[name] = value
    with torch.random.fork_rng(devices=[]):
        made: PreTrainedModel = type(model)(narrowing.config)
    made.load_state_dict(state, assign=True)
    made.tie_weights()
    made.to(model.device).eval()  # type: ignore[arg-type]
    if model.can_generate():
        made.generation_config = model.generation_config
    for tensor, dimension, missing in gone:
        tensor.index_fill_(dimension, missing, 0)
    channels = kept.get(("channels", None), torch.arange(whole, device=model.device))
    with torch.no_grad(), ExitStack() as hooks:
        for norm in norms.values() if left < whole else ():
            if _centred(norm):
                hooks.enter_context(norm.register_forward_hook(partial(_over, channels)))
        batch = batches[0].to(model.device)
        wanted_ND, found_ND = (
            layer_importance.last_hidden(model, batch)[:, channels],
            layer_importance.last_hidden(made, batch),
        )
    rounding = max(1e-6, 64 * torch.finfo(made.dtype).eps ** 2)
    if float((wanted_ND - found_ND).square().mean() / wanted_ND.square().mean()) > rounding:
        raise _immutable(model, "the smaller model computes something else")
    numbers: dict[str, list[list[int]]] = {}
    for (structure, _), each in kept.items():
        numbers.setdefault(structure, []).append(each.tolist())
    return made, numbers


def importance(
    model: PreTrainedModel, narrowing: WidthPlan, batch: MicroBatch, by: Literal["activations", "fisher"]
) -> dict[Place, Tensor]:
    """How much each structure matters (G,), of those kinds of which some go.

    activations: sum over rows of the L2 norm of what the structure adds to the hidden states, for a channel of the
    outputs of all norms. fisher: sum over rows of the square of its values times their gradients; of the log-likelihood
    of the rows' tokens, or of random projections of the last hidden states where the rows have none.
    """
    found = dict[Place, Tensor]()
    watched, mask_BL = list[tuple[Place, Tensor]](), layer_importance.real_tokens(batch)
    rows = len(next(iter(batch.inputs.values())))

    def values(value: Tensor, count: _Count) -> Tensor:
        value_BLGU = value.detach().float().reshape(rows, -1, count.whole, count.values)
        if mask_BL is None or mask_BL.shape != value_BLGU.shape[:2]:
            return value_BLGU
        return value_BLGU * mask_BL[:, :, None, None]

    def note(place: Place, value: Tensor, weight: Tensor | None) -> None:
        if by == "fisher":
            value.retain_grad()
            watched.append((place, value))
            return
        count = narrowing.counts[place[0]]
        value_BLGU = values(value, count)
        if weight is None:
            energy_BG = value_BLGU.square().sum((1, 3))
        else:
            weight_GUD = weight.float().T.reshape(count.whole, count.values, -1)
            added_BLGU = torch.einsum("blgu,guv->blgv", value_BLGU, weight_GUD @ weight_GUD.mT)
            energy_BG = (added_BLGU * value_BLGU).sum((1, 3)).clamp(min=0)
        found[place] = found.get(place, 0) + energy_BG.sqrt().sum(0)

    fewer = {structure for structure, count in narrowing.counts.items() if count.kept < count.whole}
    with ExitStack() as hooks, torch.set_grad_enabled(by == "fisher"):
        for reader in narrowing.readers:
            if reader.structure in fewer:
                layer = model.get_submodule(reader.path)
                own: Place = (reader.structure, reader.block)

                def read(layer: nn.Module, given: tuple[Any, ...], place: Place = own) -> None:
                    note(place, given[0], anatomy.dense_weight(layer))

                hooks.enter_context(layer.register_forward_pre_hook(read))
        for module in model.modules():
            if "channels" in fewer and _of_channels(module, narrowing.counts["channels"].whole):

                def written(_: nn.Module, given: Any, output: Tensor) -> None:
                    note(("channels", None), output, None)

                hooks.enter_context(module.register_forward_hook(written))
        if by == "fisher":
            embedding = model.get_input_embeddings()
            hooks.enter_context(embedding.register_forward_hook(lambda _, given, output: output.requires_grad_()))
        loss = _surprise(model, batch) if by == "fisher" else layer_importance.last_hidden(model, batch)
        if by == "fisher":
            loss.backward()
    slopes = dict[Place, Tensor]()
    for place, value in watched:
        count = narrowing.counts[place[0]]
        assert value.grad is not None, place
        slopes[place] = slopes.get(place, 0) + (values(value, count) * values(value.grad, count)).sum((1, 3))
    return found | {place: slope_BG.square().sum(0) for place, slope_BG in slopes.items()}


def _surprise(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Negative log-likelihood of the rows' labels, or a random projection of the last hidden states."""
    if batch.labels_N.ndim == 1 and len(batch.labels_N):
        logits = model(**batch.inputs).get("logits")
        if logits is not None and logits.ndim == 3:
            logits_NV = logits.flatten(0, 1)[batch.positions_N].float()
            return F.cross_entropy(logits_NV, batch.labels_N, reduction="sum")
    hidden_ND = layer_importance.last_hidden(model, batch)
    drawn = torch.randn(hidden_ND.shape, generator=torch.Generator().manual_seed(0))
    return (hidden_ND * drawn.to(hidden_ND.device)).sum()


def _readers(model: PreTrainedModel, width: int, neurons: Collection[int]) -> Iterator[_Reader]:
    """Of each block the layers that read its heads and its neurons: the last that write channels."""
    for number, block in enumerate(anatomy.blocks(model)[0]):
        layers = model.get_submodule(block).named_modules()
        sizes = {name: anatomy.features(layer) for name, layer in layers if anatomy.is_linear(layer)}
        attention = [name for name in sizes if anatomy.is_attention(name)]
        mlp = [name for name in sizes if name not in attention]
        found: list[tuple[Structure, list[str], list[str]]] = [
            ("heads", attention, [name for name in attention if sizes[name][1] == width]),
            ("neurons", mlp, [name for name in mlp if sizes[name][0] in neurons and sizes[name][1] == width]),
        ]
        for structure, names, reading in found:
            if reading:
                writing = [name for name in names if name != reading[-1] and sizes[name][0] == width]
                yield _Reader(structure, number, f"{block}.{reading[-1]}", tuple(f"{block}.{name}" for name in writing))


def _find_cuts(model: PreTrainedModel, narrowing: WidthPlan) -> tuple[Structure, str] | None:
    """Find `cuts` by the shapes of the smaller model; returns what does not fit, and why."""
    narrowing.cuts.clear()
    old, new = (
        {name: tuple(tensor.shape) for name, tensor in each.state_dict().items()}
        for each in (model, narrowing.skeleton)
    )
    if odd := sorted(old.keys() ^ new.keys()):
        return "channels", f"{odd[0]} would {'be new' if odd[0] in new else 'be missing'}"
    owners = dict[tuple[str, int], tuple[_Reader, bool]]()
    for reader in narrowing.readers:
        for path in (reader.path, *reader.others):
            transposed, reads = isinstance(model.get_submodule(path), Conv1D), path == reader.path
            owners[f"{path}.weight", int(reads != transposed)] = reader, reads
            if not reads:
                owners[f"{path}.bias", 0] = reader, reads
    for name, shape in old.items():
        for dimension, (was, now) in enumerate(zip(shape, new[name], strict=True)):
            owner = owners.get((name, dimension))
            structure: Structure = "channels" if owner is None else owner[0].structure
            count = narrowing.counts.get(structure, _Count(1, 1))
            if was == now and (owner is None or not owner[1] or count.kept == count.whole):
                continue
            for units in _units(name, structure, count, was):
                if (sum(units) * count.whole, sum(units) * count.kept) == (was, now):
                    block = None if owner is None else owner[0].block
                    narrowing.cuts.setdefault(name, []).append(_Cut(structure, block, dimension, units))
                    break
            else:
                same = f"no setting makes {name} smaller"
                return structure, same if was == now else f"{name} would be {new[name]} in place of {shape}"
    return None


def _units(name: str, structure: Structure, count: _Count, was: int) -> list[tuple[int, ...]]:
    """The ways in which a dimension can be made of structures: of heads their queries, keys, or all at once."""
    if structure != "heads":
        return [(1,) * (was // count.whole)]
    query, key = count.values, count.each
    fused = (query + 2 * key,) if name.split(".")[-2] in _BY_HEAD else (query, key, key)
    return [(query,), (key,), fused]


def _index(cut: _Cut, kept: Tensor, whole: int) -> Tensor:
    """The places of a dimension that stay."""
    starts = [whole * sum(cut.units[:number]) for number in range(len(cut.units))]
    places = [
        (start + kept[:, None] * unit + torch.arange(unit, device=kept.device)).flatten()
        for start, unit in zip(starts, cut.units, strict=True)
    ]
    return torch.cat(places)


def _built(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """The smaller model without values, as transformers will build it from the saved configuration."""
    with torch.device("meta"):
        return type(model)(type(config).from_dict(config.to_dict()))


def _of_channels(module: nn.Module, width: int) -> bool:
    weight = module._parameters.get("weight")
    return anatomy.is_norm(module) and weight is not None and weight.shape == (width,)


def _answer(norm: nn.Module, given_D: Tensor, weight: float) -> Tensor:
    """What a norm makes of `given_D` with this weight and no bias; its own values may be missing."""
    values = {"weight": torch.full_like(given_D, weight), "bias": torch.zeros_like(given_D)}
    own = {name: value for name, value in values.items() if norm._parameters.get(name) is not None}
    return functional_call(norm, own, given_D)  # type: ignore[no-any-return]


def _centred(norm: nn.Module) -> bool:
    """Whether a norm subtracts the mean over all channels."""
    given_D = torch.linspace(1, 2, len(norm.get_parameter("weight")))
    return abs(float(_answer(norm, given_D, 1.0).mean())) < 1e-3


def _over(channels: Tensor, norm: Any, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """As a hook: a norm that subtracts a mean, over some channels alone; the others are 0."""
    made = torch.zeros_like(output)
    weight, bias = (None if each is None else each[channels] for each in (norm.weight, getattr(norm, "bias", None)))
    made[..., channels] = F.layer_norm(given[0][..., channels], (len(channels),), weight, bias, _epsilon(norm) or 1e-5)
    return made


def _epsilon(norm: nn.Module) -> float | None:
    """The constant that a norm adds to the mean square."""
    return next((value for name, value in vars(norm).items() if "eps" in name and isinstance(value, float)), None)


def _offset(norm: nn.Module) -> float:
    """What a norm adds to its weight before it multiplies: Gemma's 1."""
    return round(float(_answer(norm, torch.ones(len(norm.get_parameter("weight"))), 0.0).mean()))


def _immutable(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"distill.student: {type(model.config).__name__} does not allow to leave out heads, neurons or channels like "
        f"this: {reason}. Write distill.student.layers=important-50% in their place, or take a backbone of another "
        "family."
    )
