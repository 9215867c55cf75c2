"""The modules of a backbone that get an adapter: roles and names, resolved to what PEFT matches on."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from workbench.adapters.anatomy import (
    convolutions,
    features,
    fused_experts,
    inside_stacks,
    is_attention,
    is_convolution,
    is_linear,
    linear_modules,
    task,
    text_modules,
)
from workbench.adapters.method import ExtraParameters, Method
from workbench.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedModel

Targets = (
    Literal["attention", "mlp", "all-linear", "convolutions", "all-layers"]
    | Annotated[tuple[str, ...], Field(min_length=1)]
)
"""A role, or module names such as [q_proj, v_proj]."""


def drawn_seed() -> int:
    """A seed from torch's generator, for tuners that take a seed of their own."""
    import torch

    return int(torch.randint(2**31, ()))


class OnLayers(Method):
    """Base of the methods that change linear layers, and some of them convolutions."""

    changes_convolutions: ClassVar[bool] = False
    """Whether the method works on convolutions, too."""
    changes_transposed: ClassVar[bool] = True
    """Whether the method works on GPT-2's linear layers, which store their weights transposed."""
    tuner: ClassVar[str] = ""
    """Name of PEFT's configuration class."""

    targets: Targets = "all-linear"
    """Layers that are changed: a role, or a list of module names such as [q_proj, v_proj]. `all-linear` means the
    convolutions where the blocks have no linear layers, as in ResNet; `all-layers` is both, and what reads the pixels.
    Depthwise convolutions are left alone, and so are towers for pictures or sound beside a language model."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse targets that do not exist, kinds of layers that the method does not change, and what `misfit` says."""
        try:
            path = next(iter(target_convolutions(model, self.targets)), None)
        except ConfigError as error:
            return str(error)
        if path is not None and not self.changes_convolutions:
            return (
                f"it changes linear layers, and {path} of {type(model).__name__} is a convolution. "
                "Take adapter.method=lora, which changes both, or name linear layers in adapter.targets."
            )
        return (None if self.changes_transposed else self._about_transposed(model)) or self.misfit(model)

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Say which settings of the method do not fit the targets, and what to write instead; None where they fit."""
        return None

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Names of the layers that are changed."""
        return resolve(model, self.targets)

    def common(self, model: PreTrainedModel, beside: ExtraParameters) -> dict[str, Any]:
        """Settings of layers, head and rows of tokens that every tuner of PEFT has."""
        rows = {"trainable_token_indices": beside.token_rows} if self.facts.token_rows else {}
        modules, heads = self.modules(model), beside.heads or None
        return {"task_type": task(model), "target_modules": modules, "modules_to_save": heads, **rows}

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's configuration for this backbone: the class `tuner` with `common` and `settings`."""
        import peft

        config: PeftConfig = getattr(peft, self.tuner)(**self.common(model, beside), **self.settings(model))
        return config

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """The method's settings by PEFT's names, for methods that do not write `to_peft` themselves."""
        return {}

    def sizes(self, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers that are changed, by path."""
        return {path: features(layer) for path, layer in linear_layers(model, self.targets).items()}

    def common_divisor(self, model: PreTrainedModel) -> int:
        """The largest number that divides inputs and outputs of each of these layers."""
        return math.gcd(*itertools.chain(*self.sizes(model).values()))

    def indivisible(self, key: str, value: int, common: int, most: int = 1024) -> str | None:
        """Why a setting has to divide the sizes of all layers; None where it divides `common`, their divisor."""
        if common % value == 0:
            return None
        able = [size for size in range(1, min(common, most) + 1) if common % size == 0]
        return f"adapter.{key}={value} does not divide the sizes of all layers. Write one of {able}."

    def too_few(self, model: PreTrainedModel, share: float) -> str | None:
        """Why a share of each layer's weights is too small; None where it is at least one weight of each."""
        for path, (inputs, outputs) in self.sizes(model).items():
            if int(inputs * outputs * share) < 1:
                return f"{path} has {inputs * outputs:,} weights. Write adapter.share={2 / (inputs * outputs):.1g}."
        return None

    def _about_transposed(self, model: PreTrainedModel) -> str | None:
        from transformers.pytorch_utils import Conv1D

        layers = linear_layers(model, self.targets)
        path = next((path for path, layer in layers.items() if isinstance(layer, Conv1D)), None)
        if path is None:
            return None
        also = ", or model.weights=nf4, which makes it a plain linear layer" if "nf4" in self.facts.weights else ""
        return (
            f"{path} is a {type(layers[path]).__name__}, which PEFT's {self.method} does not change. "
            f"Take adapter.method=lora{also}."
        )


class OnLinear(OnLayers):
    """Base of the methods on layers with dropout of the adapter's inputs."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that is dropped while training."""

    @property
    def noise(self) -> float:
        return self.dropout


def resolve(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Module names for a role (`attention`, `mlp`, `all-linear`, `convolutions`, `all-layers`) or a list of names.

    Leaf names such as `q_proj` where all modules of that name have the role, full paths where only some have it (BERT's
    `dense`). A role names nothing outside the blocks, except that `all-layers` includes the convolution that reads the
    pixels.

    Raises:
        ConfigError: a name matches no such layer (the nearest that exist are listed).
    """
    if isinstance(targets, str):
        linear = [] if targets == "convolutions" else linear_modules(model)
        chosen = [name for name in linear if targets == "all-linear" or is_attention(name) == (targets == "attention")]
        if targets == "convolutions" or (targets == "all-linear" and not linear):
            chosen = convolutions(model)
        if targets == "all-layers":
            chosen = [*linear, *(name for name, module in text_modules(model) if is_convolution(module))]
        forbidden = _forbidden(model, chosen)
        chosen = [path for path in chosen if path not in forbidden]
        if not chosen and (experts := fused_experts(model)):
            raise ConfigError(
                f"adapter.targets: the MLPs of {type(model).__name__} are experts, whose matrices stand in one "
                f"parameter ({_leaf(next(iter(experts)))}) that targets do not name. "
                "Write adapter.experts=true, which lora, rslora and lora+ have, or adapter.targets=attention."
            )
        if not chosen:
            cure = " Write adapter.targets=all-linear." if targets != "all-linear" else ""
            kind = "convolution" if targets == "convolutions" else "linear layer"
            raise ConfigError(f"adapter.targets: {targets} matches no {kind} of {type(model).__name__}.{cure}")
        return short_names(model, chosen)
    everywhere = _by_name(model)
    outside = {path for path, _ in model.named_modules()} - {path for path, _ in text_modules(model)}

    def beside(name: str) -> bool:
        return any(matches(path, name) for path in outside)

    unknown = [name for name in targets if not any(matches(path, name) for path in everywhere)]
    if unknown:
        leaves = {_leaf(name) for name in everywhere}
        near = sorted({match for name in unknown for match in difflib.get_close_matches(name, leaves, n=3, cutoff=0.3)})
        raise ConfigError(
            f"adapter.targets: no linear layer of {type(model).__name__} is called {', '.join(unknown)}. "
            f"Nearest: {', '.join(near or sorted(leaves))}. Roles: attention, mlp, all-linear"
            f"{', convolutions, all-layers' if convolutions(model) else ''}."
            f"{' Rows of text do not run the towers beside the language model.' * any(map(beside, unknown))}"
        )
    named = {name: [path for path in everywhere if matches(path, name)] for name in targets}
    unchanged = _forbidden(model, list(itertools.chain(*named.values())))
    if lost := [name for name, paths in named.items() if unchanged.issuperset(paths)]:
        others = ",".join(name for name in targets if name not in lost)
        raise ConfigError(
            f"adapter.targets: PEFT does not change {', '.join(lost)} of {type(model).__name__}, whose kernels "
            f"read the weight past an adapter. Write adapter.targets={f'[{others}]' if others else 'all-linear'}."
        )
    return list(targets) if not any(map(beside, targets)) else sorted(set(itertools.chain(*named.values())))


def _forbidden(model: PreTrainedModel, paths: Collection[str]) -> set[str]:
    """Layers that PEFT refuses, or whose adapter would change nothing: kernels read the weight past the layer, or it
    belongs to an indexer, through whose choice of tokens nothing is differentiated (DeepSeek, GLM)."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTuner

    config, refused = LoraConfig(), set[str]()
    indexers = tuple(f"{name}." for name, each in model.named_modules() if type(each).__name__.endswith("Indexer"))
    for leaf in {_leaf(path) for path in paths}:
        try:
            BaseTuner._check_target_module_compatiblity(None, config, model, leaf)  # type: ignore[arg-type]
        except ValueError:
            refused.add(leaf)
    return {path for path in paths if _leaf(path) in refused or path.startswith(indexers) or only_read(model, path)}


def only_read(model: nn.Module, path: str) -> bool:
    """Whether the module around a layer multiplies with its weight instead of calling it, such as Mamba's dt_proj."""
    parent, _, leaf = path.rpartition(".")
    kind: Any = type(model.get_submodule(parent))
    return _only_read(kind, leaf)


@cache
def _only_read(kind: type[Any], leaf: str) -> bool:
    try:
        source = "".join(inspect.getsource(each) for each in vars(kind).values() if inspect.isfunction(each))
    except (OSError, TypeError):
        return False
    weight = f"self.{leaf}.weight"
    return f"{weight} @" in source or (weight in source and f"self.{leaf}(" not in source)


def _by_name(model: PreTrainedModel) -> list[str]:
    """Paths of all layers that a name may mean."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in text_modules(model)
        if (is_linear(module) or is_convolution(module)) and module is not head
    ]


def about_targets(model: PreTrainedModel, method: Method) -> str | None:
    """Sentence on layers of the blocks that `all-linear` leaves frozen; None where it leaves none."""
    if not isinstance(method, OnLayers) or method.targets != "all-linear":
        return None
    from torch import nn

    chosen = method.modules(model)
    others = {
        path: module
        for path, module in inside_stacks(model)
        if isinstance(module, nn.Linear) and not any(matches(path, name) for name in chosen)
    }
    forbidden = _forbidden(model, others)
    left = {_leaf(path) for path, module in others.items() if path in forbidden or not is_linear(module)}
    if not left:
        return None
    return (
        f"adapter.targets=all-linear leaves {', '.join(sorted(left))} frozen, which PEFT cannot change in this family."
    )


def about_experts(model: PreTrainedModel, method: Method) -> str | None:
    """Sentences on what a method trains and leaves frozen of a mixture of experts; None for a dense backbone."""
    experts = fused_experts(model)
    if not experts or not isinstance(method, OnLayers):
        return None
    if getattr(method, "experts", False):
        sentences = ["Mixture of experts: each expert has an update of its own; the router stays frozen."]
    else:
        share = sum(each.numel() for each in experts.values()) / sum(each.numel() for each in model.parameters())
        sentences = [
            f"Mixture of experts: {share:.0%} of the weights are experts, whose matrices stand in one "
            f"parameter ({', '.join(sorted({_leaf(name) for name in experts}))}); they stay frozen. "
            "Lora, rslora and lora+ change them with adapter.experts=true."
        ]
    if method.targets == "all-linear" and (lost := sorted({*resolve(model, "all-linear")} - {*method.modules(model)})):
        sentences.append(
            f"{', '.join(lost)} outside of the experts stay frozen: PEFT takes their names for the experts'."
        )
    return "\n  ".join(sentences) or None


def linear_layers(model: PreTrainedModel, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """The linear layers that `targets` names, by path; raises as `resolve` does."""
    return {path: module for path, module in _layers(model, targets).items() if is_linear(module)}


def target_convolutions(model: PreTrainedModel, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """The convolutions that `targets` names, by path; raises as `resolve` does."""
    return {path: module for path, module in _layers(model, targets).items() if is_convolution(module)}


def _layers(model: PreTrainedModel, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    names = resolve(model, targets)
    return {path: model.get_submodule(path) for path in _by_name(model) if any(matches(path, name) for name in names)}


def short_names(model: PreTrainedModel, paths: Collection[str]) -> list[str]:
    """Leaf names where they match the modules at `paths` and no others; otherwise the paths."""
    leaves = {_leaf(path) for path in paths}
    others = {_leaf(name) for name, _ in model.named_modules() if name not in set(paths)}
    return sorted(paths) if leaves & others else sorted(leaves)


def matches(path: str, name: str) -> bool:
    """Whether `name`, a leaf name or the end of a path, matches a module at `path`."""
    return path == name or path.endswith("." + name)


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def taken_for_experts(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Those names of linear layers that PEFT takes for experts, so that LoRA cannot change the layers.

    transformers 5 puts the experts' matrices into one parameter. For older adapters PEFT translates the names that
    these matrices had (gate_proj, up_proj, down_proj), even where dense MLPs or shared experts have them (DeepSeek-V3).
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def translated(name: str) -> bool:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # one half of what stands in one parameter
            return True
        return bool(config.target_parameters)

    return [name for name in names if translated(name)]
