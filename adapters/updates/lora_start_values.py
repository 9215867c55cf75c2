"""Values that LoRA starts from: parts of weights, gradients or quantisation errors, leading directions of inputs.

Legend: N tokens, I inputs, O outputs, K components, R rank.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import EvaConfig, LoraModel, PeftConfig, PeftModel, initialize_lora_eva_weights
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from workbench.adapters.anatomy import dense_weight
from workbench.adapters.peft_tuners import OwnForm
from workbench.errors import BackboneError, TrainingError

if TYPE_CHECKING:
    from workbench.adapters.updates.lora import Decomposition

EXACT_UP_TO = 1024
"""Shorter side of the largest matrix that `auto` decomposes exactly, which takes one core about a second."""
ITERATIONS = 16
"""Subspace iterations of the randomised decomposition; PEFT recommends as many for PiSSA."""


def leading_parts(matrix_OI: Tensor, rank: int, *, decomposition: Decomposition = "auto") -> tuple[Tensor, Tensor]:
    """A (R, I) and B (O, R) whose product B A is nearest to the matrix; both carry the roots of its singular values."""
    U_OR, S_R, V_RI = singular_parts(matrix_OI, rank, decomposition=decomposition)
    root_R = S_R.sqrt()
    return root_R[:, None] * V_RI, U_OR * root_R


def singular_parts(matrix_OI: Tensor, rank: int, *, decomposition: Decomposition) -> tuple[Tensor, Tensor, Tensor]:
    """The leading left singular vectors (O, R), singular values (R,) and right singular vectors (R, I).

    Args:
        decomposition: A randomised one draws from torch's generator, so that the same seed gives the same parts.
    """
    if decomposition == "exact" or (decomposition == "auto" and min(matrix_OI.shape) <= EXACT_UP_TO):
        U_OR, S_R, V_RI = torch.linalg.svd(matrix_OI, full_matrices=False)
    else:
        # Directions beside the wanted ones sharpen these (Halko et al. 2011).
        more = min(2 * rank + 8, *matrix_OI.shape)
        U_OR, S_R, V_IR = torch.svd_lowrank(matrix_OI, q=more, niter=ITERATIONS)
        V_RI = V_IR.T
    return U_OR[:, :rank], S_R[:rank], V_RI[:rank]


@torch.no_grad()
def start_from_rounding(model: PeftModel, *, decomposition: Decomposition) -> None:
    """Let every LoRA layer over a quantised weight start at the update nearest to its quantisation error.

    Raises:
        BackboneError: the unquantised weights are not where the backbone came from.
    """
    backbone: Any = model.get_base_model()
    originals = _Originals(backbone)
    for path, layer in _lora_layers(backbone):
        base: Any = layer.get_base_layer()
        if not base.weight.is_floating_point():
            original_OI = originals.read(path, transposed=issubclass(getattr(base, "source_cls", object), Conv1D))
            lost_OI = original_OI.to(base.weight.device).float() - dense_weight(base).float()
            factors = leading_parts(lost_OI / layer.scaling["default"], layer.r["default"], decomposition=decomposition)
            layer.lora_A["default"].weight.copy_(factors[0])
            layer.lora_B["default"].weight.copy_(factors[1])


class _Originals:
    """Single tensors of the checkpoint that a backbone was loaded from; no file is read whole."""

    def __init__(self, backbone: Any) -> None:
        self.source: str = backbone.config._name_or_path
        self.prefix: str = backbone.base_model_prefix
        mapping = get_model_conversion_mapping(backbone)
        self.renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        revision = getattr(backbone.config, "_commit_hash", None)
        self.places: dict[str, tuple[Path, str]] = {}
        for name in ("model.safetensors.index.json", "model.safetensors"):
            cached_path = cached_file(self.source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
            if cached_path is not None:
                path = Path(cached_path)
                if path.suffix == ".json":
                    parts = json.loads(path.read_text())["weight_map"]
                    files = {key: Path(str(cached_file(self.source, part))) for key, part in parts.items()}
                else:
                    with safe_open(path, framework="pt") as tensors:
                        files = dict.fromkeys(tensors.keys(), path)
                # By the name that transformers gives it when it loads (ViT's are renamed).
                names = {key: rename_source_key(key, self.renamings, [])[0] for key in files}
                self.places = {names[key]: (file, key) for key, file in files.items()}
                return
        raise BackboneError(f"adapter.method=loftq: {self.source} holds no safetensors. Take adapter.method=lora.")

    def read(self, path: str, *, transposed: bool) -> Tensor:
        """The weight (O, I) of the linear layer at `path`."""
        names = (f"{path}.weight", f"{path.removeprefix(self.prefix + '.')}.weight")
        name = next((name for name in names if name in self.places), None)
        if name is None:
            raise BackboneError(
                f"adapter.method=loftq: {self.source} has no tensor {names[0]}, from which {path} was quantised. "
                "Take adapter.method=lora."
            )
        file, key = self.places[name]
        with safe_open(file, framework="pt") as tensors:
            weight: Tensor = tensors.get_tensor(key)
        return weight.T if transposed else weight


Start = Callable[[Tensor, int, float], tuple[Tensor, Tensor]]
"""A function from a weight (O, I), a rank and a scale to A0 (R, I) and B0 (O, R)."""


class Shift(LoraVariant):
    """A layer that starts at B0 A0 instead of zero and is the identity all the same: W + scale * (B A - B0 A0).

    The papers take B0 A0 out of the frozen weights. Here it stays apart, in buffers that no state dict has. That
    computes the same, leaves the weights as they are (so they may be quantised, and are there again when the adapter is
    off), and makes what is shipped plain LoRA.

    What trains is dA = A - A0 and dB = B - B0, and dB A + B0 dA is computed, which is the same update: in a half
    precision the difference of the two large products would be little more than their rounding.
    """

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight + _shifted_update(module, active_adapter).to(orig_weight)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data += _shifted_update(module, active_adapter).to(orig_weight)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight - _shifted_update(module, active_adapter).to(orig_weight)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Compute the update with dropout and its start without: in the papers the start is a part of the weights."""
        dropped, (down, up) = module.lora_dropout[active_adapter](x), shifted_factors(module, active_adapter)
        update = F.linear(F.linear(dropped, down.to(x.dtype)), up.to(x.dtype))
        if module.training and not isinstance(module.lora_dropout[active_adapter], nn.Identity):
            missing = F.linear(dropped - x, module.start_A_RI.to(x.dtype))
            update = update + F.linear(missing, module.start_B_OR.to(x.dtype))
        shifted: Tensor = result + (update * module.scaling[active_adapter]).to(result.dtype)
        return shifted


def shifted_factors(layer: Any, name: str) -> tuple[Tensor, Tensor]:
    """(A, dA) and (dB, B0), whose product is the whole update, as LoRA of twice the rank."""
    return _factors(layer, layer.lora_A[name].weight, layer.lora_B[name].weight)


def _factors(layer: Any, change_A_RI: Tensor, change_B_OR: Tensor) -> tuple[Tensor, Tensor]:
    start_A_RI, start_B_OR = layer.start_A_RI.to(change_A_RI.device), layer.start_B_OR.to(change_B_OR.device)
    down = torch.cat((start_A_RI + change_A_RI, change_A_RI.to(start_A_RI)))
    return down, torch.cat((change_B_OR.to(start_B_OR), start_B_OR), dim=1)


class ShiftedLora(OwnForm, LoraModel):
    """PEFT's LoRA, shipped with its start taken off: plain LoRA of twice the rank over the original weights."""

    def shipped(self, name: str, tensors: dict[str, Tensor]) -> tuple[PeftConfig, dict[str, Tensor]]:
        """Plain LoRA of twice the rank; the scale stays. PEFT converts PiSSA to (A, A0) and (B, -B0), which cancel."""
        live: Any = self.peft_config[name]
        config = copy.copy(live)
        for path, layer in _lora_layers(self):
            if name in layer.lora_variant:
                down, up = (f"base_model.{path}.lora_{part}.{name}.weight" for part in "AB")
                tensors[down], tensors[up] = _factors(layer, tensors[down], tensors[up])
                stabilised = math.sqrt(layer.r[name]) if live.use_rslora else 1.0
                config.r, config.lora_alpha = 2 * layer.r[name], 2 * layer.lora_alpha[name] * stabilised
                config.use_rslora = False  # which would divide by the root of twice the rank
        return config, tensors


@torch.no_grad()
def shift(model: PeftModel, start: Start) -> None:
    """Let every LoRA layer start where `start` says, given its weight in float32, dequantised."""
    shift_later(model)
    for _, layer in _lora_layers(model):
        weight_OI = dense_weight(layer.get_base_layer()).float()
        start_at(layer, *start(weight_OI, layer.r["default"], layer.scaling["default"]))


@torch.no_grad()
def shift_later(model: PeftModel) -> None:
    """Let every LoRA layer start where it is, until `start_at` says otherwise."""
    for _, layer in _lora_layers(model):
        for name, weight in (
            ("start_A_RI", layer.lora_A["default"].weight),
            ("start_B_OR", layer.lora_B["default"].weight),
        ):
            layer.register_buffer(name, weight.detach().clone(), persistent=False)
            weight.zero_()
        layer.lora_variant["default"] = Shift()
    model.base_model.__class__ = ShiftedLora


@torch.no_grad()
def start_at(layer: Any, A_RI: Tensor, B_OR: Tensor) -> None:
    """Let a shifted layer, of which nothing has trained yet, start with these factors."""
    layer.start_A_RI.copy_(A_RI)
    layer.start_B_OR.copy_(B_OR)


def starts(model: nn.Module) -> dict[str, Tensor]:
    """A0 (R, I) and B0 (O, R) of every shifted layer, by their names in the model."""
    return {
        f"{path}.{name}": getattr(layer, name)
        for path, layer in _lora_layers(model)
        for name in ("start_A_RI", "start_B_OR")
    }


def _lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(path, module) for path, module in model.named_modules() if isinstance(module, LoraLayer)]


def _shifted_update(layer: Any, name: str) -> Tensor:
    """scale * (B A - B0 A0), as the base layer stores its weight."""
    down, up = shifted_factors(layer, name)
    update: Tensor = (up.float() @ down.float()) * layer.scaling[name]
    return update.T if layer.fan_in_fan_out else update


DAMPING = 0.01
"""Added to the variance of each input, in units of their mean: directions without data stay invertible."""


@torch.no_grad()
def covariances(model: PeftModel, sample: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
    """Mean x x' over the inputs x of every LoRA layer (I, I), damped, float64, in the order of the layers.

    Args:
        sample: Model inputs; rows without padding, which would count as data.
    """
    layers = _lora_layers(model)
    sums = {path: torch.zeros(layer.in_features, layer.in_features, dtype=torch.float64) for path, layer in layers}
    counts = dict.fromkeys(sums, 0)

    def see(path: str, x: Tensor) -> None:
        x_NI = x.flatten(0, -2).double()
        sums[path] += (x_NI.T @ x_NI).cpu()
        counts[path] += len(x_NI)

    _show_inputs(model, sample, see)
    for path, sum_II in sums.items():  # in place: of a large backbone they are larger than its weights
        diagonal_I = sum_II.div_(max(counts[path], 1)).diagonal()
        diagonal_I += DAMPING * (float(diagonal_I.mean()) or 1.0)  # 1: all inputs were zero, or none came
    return list(sums.values())


def _show_inputs(model: PeftModel, sample: Iterable[Mapping[str, Tensor]], see: Callable[[str, Tensor], None]) -> None:
    """Compute the sample in evaluation mode, and call `see` with the path and the input (..., I) of each LoRA layer."""
    handles = [
        layer.register_forward_pre_hook(lambda _, arguments, path=path: see(path, arguments[0]))
        for path, layer in _lora_layers(model)
    ]
    training = model.training
    model.eval()
    try:
        for inputs in sample:
            model(**{name: each.to(model.device) for name, each in inputs.items()})
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()


def oriented_parts(weight_OI: Tensor, covariance_II: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A0 (R, I) and B0 (O, R): largest parts of U S V' = W C, with C taken off again (paper, equations 1 to 3)."""
    weight, covariance = weight_OI.double(), covariance_II.to(weight_OI.device)
    U_OK, S_K, V_KI = torch.linalg.svd(weight @ covariance, full_matrices=False)
    root_R = S_K[:rank].sqrt()
    uncovered_RI = torch.linalg.solve(covariance, V_KI[:rank].T).T  # V' C^-1, as C is symmetric
    return (root_R[:, None] * uncovered_RI).to(weight_OI), (U_OK[:, :rank] * root_R).to(weight_OI)


TOGETHER = 256
"""Tokens that are decomposed at a time."""


class Components:
    """The `count` leading principal components of the rows seen so far, by incremental PCA (Ross et al. 2008)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.waiting: list[Tensor] = []
        self.seen = 0
        self.total = 0.0
        self.mean_I = torch.zeros(())
        self.scaled_KI = torch.zeros(0)

    def add(self, x_NI: Tensor) -> None:
        """See more rows; they are kept until there are enough to be worth a decomposition."""
        self.waiting.append(x_NI)
        if sum(map(len, self.waiting)) >= TOGETHER:
            self._decompose()

    def directions(self) -> tuple[Tensor, Tensor]:
        """Unit vectors (K, I), the leading component first, and the share of all variance along each (K,).

        Where the rows vary in fewer than K directions, the rest is random, with a share of zero.
        """
        if self.waiting:
            self._decompose()
        lengths_K = self.scaled_KI.norm(dim=1)
        known_count, inputs = self.scaled_KI.shape
        random_KI = torch.randn(self.count - known_count, inputs).to(self.scaled_KI.device)
        directions_KI = F.normalize(torch.cat((self.scaled_KI, random_KI)))
        return directions_KI, F.pad(lengths_K.square() / max(self.total, 1e-30), (0, self.count - known_count))

    def _decompose(self) -> None:
        x_NI = torch.cat(self.waiting).float()
        self.waiting = []
        mean_I, rows = x_NI.mean(0), len(x_NI)
        centred_NI = x_NI - mean_I
        parts = [centred_NI]
        if self.seen:
            moved_I = (self.seen * rows / (self.seen + rows)) ** 0.5 * (self.mean_I - mean_I)
            parts = [self.scaled_KI, centred_NI, moved_I[None]]
            self.total += float(moved_I.square().sum())
            mean_I = self.mean_I + (mean_I - self.mean_I) * rows / (self.seen + rows)
        self.total += float(centred_NI.square().sum())
        self.mean_I, self.seen = mean_I, self.seen + rows
        _, S_K, V_KI = torch.linalg.svd(torch.cat(parts), full_matrices=False)
        kept = min(self.count, int((S_K / S_K[0] > 1e-6).sum()))
        self.scaled_KI = S_K[:kept, None] * V_KI[:kept]


@torch.no_grad()
def excited_directions(model: PeftModel, sample: Iterable[Mapping[str, Tensor]], count: int) -> dict[str, Components]:
    """Components of the inputs of every LoRA layer, by the layer's path; layers that share inputs share them."""
    by_layer: dict[str, Components] = {}
    last: list[Any] = [None, None]

    def see(path: str, x: Tensor) -> None:
        if x is last[0]:
            by_layer.setdefault(path, last[1])
            return
        components = by_layer.setdefault(path, Components(count))
        components.add(x.flatten(0, -2))
        last[:] = x, components

    _show_inputs(model, sample, see)
    return by_layer


def start_along_inputs(model: PeftModel, sample: Iterable[Mapping[str, Tensor]], *, rank: int, rho: float) -> None:
    """Set every LoRA layer's rank and A from the leading components of its inputs, and B to zero.

    Args:
        sample: Model inputs; rows without padding, which would count as data.
        rho: Times `rank` that a layer may have; a layer that deserves none has no adapter.
    """
    components = excited_directions(model, sample, math.ceil(rho * rank))
    # The components that explain most, `rank` times as many as there are layers, by layer.
    found = {name: each.directions() for name, each in components.items()}
    shares = torch.cat([share_K for _, share_K in found.values()])
    chosen = torch.zeros_like(shares, dtype=torch.bool)
    chosen[shares.argsort(descending=True, stable=True)[: rank * len(components)]] = True
    parts = chosen.split([len(share_K) for _, share_K in found.values()])
    directions = {name: KI[: int(part.sum())] for (name, (KI, _)), part in zip(found.items(), parts, strict=True)}
    config: Any = model.peft_config["default"]
    config.init_lora_weights, config.eva_config = "eva", EvaConfig(rho=rho)
    initialize_lora_eva_weights(model, eva_state_dict=dict(directions))
    kept = (name.removeprefix("base_model.model.") for name, A_KI in directions.items() if len(A_KI))
    config.target_modules = set(kept)  # PEFT shortens the paths to endings that may also mean a layer without ranks
    config.init_lora_weights, config.eva_config = True, None  # what is shipped starts from nothing
    for name, A_KI in directions.items():
        if len(A_KI):
            layer: Any = model.get_submodule(name)
            layer.lora_A["default"].weight.data = A_KI.clone()  # PEFT rounds to the backbone's precision
            layer.lora_B["default"].weight.data = layer.lora_B["default"].weight.data.float()


Call = tuple[str, Tensor, Tensor]
"""Path of a layer, its input (N, I) and its output (..., O), which has a graph."""


def start_along_gradients(
    model: nn.Module, losses: Iterable[Tensor], *, gamma: float, decomposition: Decomposition
) -> None:
    """Let every shifted LoRA layer start along the gradient of its weight (paper, algorithm 1).

    With the gradient's singular vectors U and V, A0 is a multiple of V[:, :R]' and B0 of U[:, R:2R], so that a step
    along -B0 B0' G - G A0' A0 changes the weight by the nearest matrix of rank 2R to G, but for a factor (theorem 3.1).
    A layer through which no gradient came keeps its start.

    Args:
        losses: Of one row after another, each with a graph that is computed when it is asked for.

    Raises:
        TrainingError: a gradient is not finite.
    """
    gradients = summed_gradients(model, losses)
    while gradients:
        path, gradient_OI = gradients.popitem()
        layer: Any = model.get_submodule(path)
        rank = layer.r["default"]
        try:
            U_OK, _, V_KI = singular_parts(gradient_OI, 2 * rank, decomposition=decomposition)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise TrainingError(
                f"adapter.method=lora-ga: the gradient of {path.removeprefix('base_model.model.')} on the first "
                "training rows is not finite. Write model.compute=float32, or adapter.method=lora."
            ) from None
        length = (len(gradient_OI) / gamma**2) ** 0.25
        learns = gradient_OI.any()  # asked of the device alone, so that a plan can follow
        A_RI = torch.where(learns, length * V_KI[:rank], layer.start_A_RI)
        B_OR = torch.where(learns, length * U_OK[:, rank:], layer.start_B_OR)
        start_at(layer, A_RI, B_OR)


def summed_gradients(model: nn.Module, losses: Iterable[Tensor]) -> dict[str, Tensor]:
    """Gradient (O, I) of each LoRA layer's weight, summed over the rows, float32, by the layer's path.

    It is the sum over tokens of the outer product of the output's gradient and the input, so that the weight itself
    needs none and may be quantised; nothing is added to the gradients of parameters.
    """
    layers = _lora_layers(model)
    totals = {
        path: torch.zeros(layer.out_features, layer.in_features, device=layer.lora_A["default"].weight.device)
        for path, layer in layers
    }
    with _watched(layers) as calls:
        for loss in losses:
            seen = tuple(calls)  # blocks that are computed again in the backward pass would add to it
            _add_gradients(totals, loss, seen)
            calls.clear()
            del loss, seen  # so that nothing of a row is there beside the next one
    return totals


def _add_gradients(totals: Mapping[str, Tensor], loss: Tensor, calls: Sequence[Call]) -> None:
    """Add the gradients of one loss, of the layers that it depends on."""
    grads = torch.autograd.grad(loss, [output for _, _, output in calls], allow_unused=True) if calls else ()
    for (path, x_NI, _), gradient in zip(calls, grads, strict=True):
        if gradient is not None:
            totals[path].addmm_(gradient.flatten(0, -2).float().T, x_NI.float())


@contextmanager
def _watched(layers: Iterable[tuple[str, nn.Module]]) -> Iterator[list[Call]]:
    """Inside the block every call of these layers that has a graph is listed."""
    calls: list[Call] = []

    def watch(path: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def see(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            if output.requires_grad:
                calls.append((path, arguments[0].detach().flatten(0, -2), output))

        return see

    handles = [layer.register_forward_hook(watch(path)) for path, layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
