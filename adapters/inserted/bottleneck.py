"""Bottleneck adapters of Houlsby, Pfeiffer and He: a small nonlinear network added to hidden states in every block.

The places where they attach are found from the structure of a block rather than from names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from workbench.adapters import anatomy
from workbench.adapters.anatomy import (
    block_width,
    blocks,
    body,
    convolves,
    features,
    is_attention,
    is_linear,
    is_norm,
    reads_tokens,
)
from workbench.adapters.method import ExtraParameters, Method, MethodInfo, register
from workbench.errors import ConfigError
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

NOT_LINEAR = "it is a network with an activation, which no change of the backbone's weights equals"


@register
class Bottleneck(Method):
    """A(x) = scale * up(activation(down(x))), added to the hidden states at one or two places of every block.

    With the residual stream x, and h what attention or MLP adds to it: houlsby adds A(h) to h, at every attention
    and MLP; pfeiffer adds A(s) at the end of the block, s being what the block gives (the input of its last
    normalisation gets it, where the block ends with one); parallel adds A(m) to h, m being what the MLP reads.

    Up-projections start at zero (as in He et al. 2022), so that a fresh adapter changes nothing at all. Houlsby et
    al. 2019 draw both projections from a normal distribution of standard deviation 0.01 instead, and also train the
    layer normalisations, which here stay frozen.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "houlsby": MethodInfo(
            "a bottleneck after attention and one after the MLP",
            "Houlsby et al. 2019, arXiv:1902.00751",
            no_merge=NOT_LINEAR,
            token_rows=True,
        ),
        "pfeiffer": MethodInfo(
            "a bottleneck at the end of each block",
            "Pfeiffer et al. 2021, arXiv:2005.00247",
            no_merge=NOT_LINEAR,
            token_rows=True,
        ),
        "parallel": MethodInfo(
            "a scaled bottleneck beside the MLP",
            "He et al. 2022, arXiv:2110.04366",
            no_merge=NOT_LINEAR,
            token_rows=True,
        ),
    }
    method: Literal["houlsby", "pfeiffer", "parallel"] = "houlsby"
    """houlsby (after attention and after the MLP), pfeiffer (after the MLP) or parallel (beside the MLP)."""
    width: Annotated[PositiveInt | None, Unit("hidden units")] = None
    """Units of the bottleneck; leave it out to set `reduction`."""
    reduction: Annotated[PositiveInt | None, Unit("hidden size / hidden units")] = None
    """Hidden size of the backbone divided by the units of the bottleneck; 16 where neither is set."""
    activation: Literal["relu", "gelu", "gelu_new", "silu", "tanh", "leaky_relu"] = "relu"
    """Activation function between the two projections."""
    scale: PositiveFloat | None = None
    """Factor of what is added; left out 4 for parallel, as in its paper, and 1 for the others."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of what is added that is dropped while training."""

    @model_validator(mode="after")
    def _one_size(self) -> Bottleneck:
        if self.width is not None and self.reduction is not None:
            raise ValueError("width and reduction both say how many units there are. Write one of them.")
        return self

    @property
    def noise(self) -> float:
        return self.dropout

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse backbones whose blocks have no place that is recognised, and bottlenecks without units."""
        try:
            find_places(model, self.method)
            self._width(model)
        except ConfigError as error:
            return str(error)
        return None

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Paths of the modules whose output, or input, it changes."""
        return find_places(model, self.method).changed

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """The configuration of our tuner for this backbone."""
        from workbench.adapters.inserted.bottleneck_tuner import BottleneckConfig

        places = find_places(model, self.method)
        return BottleneckConfig(
            task_type=anatomy.task(model),
            width=self._width(model),
            activation=self.activation,
            scale=self.scale or (4.0 if self.method == "parallel" else 1.0),
            dropout=self.dropout,
            after=places.after,
            within=places.within,
            beside=places.beside,
            modules_to_save=beside.heads or None,
            trainable_token_indices=beside.token_rows,
        )

    def _width(self, model: PreTrainedModel) -> int:
        if self.width is not None:
            return self.width
        hidden = anatomy.hidden_size(model.config)
        reduction = self.reduction or 16
        if reduction > hidden:
            raise ConfigError(
                f"{hidden} hidden units of {type(model).__name__} divided by adapter.reduction={reduction} leave none. "
                "Write adapter.width."
            )
        return hidden // reduction


READS = re.compile(r"(q|k|v|qkv|query|key|value|w[qkv])(_|$)", re.IGNORECASE)
"""Names of projections that read the hidden states, and so are no output projection."""


@dataclass(frozen=True)
class Places:
    """Paths of modules, by what an adapter A does there; y is the module's output and s its input."""

    after: list[str] = field(default_factory=list)
    """y becomes y + A(y)."""
    within: list[str] = field(default_factory=list)
    """Normalisations N that end a block: N(s) becomes N(s + A(N(s)))."""
    beside: dict[str, str] = field(default_factory=dict)
    """y becomes y + A(x), where x is the input of the module that is named second."""

    @property
    def changed(self) -> list[str]:
        return [*self.after, *self.within, *self.beside]


@dataclass(frozen=True)
class Mlp:
    """First and last module of a block's MLP; a mixture of experts is both."""

    first: str
    """The module that reads the MLP's input."""
    last: str
    """The module that gives its output."""


def find_places(model: PreTrainedModel, method: str) -> Places:
    """The places of `houlsby`, `pfeiffer` or `parallel`.

    Raises:
        ConfigError: A block has no such place that can be recognised from its modules.
    """
    paths = [path for stack in blocks(model) for path in stack]
    if not paths:
        raise ConfigError(f"{type(model).__name__} has no repeated blocks. Take another backbone.")
    if method == "houlsby":
        return Places(after=[place for path in paths for place in (*_attentions(model, path), _mlp(model, path).last)])
    mlps = [_mlp(model, path) for path in paths]
    if method == "parallel":
        return Places(beside={mlp.last: mlp.first for mlp in mlps})
    if convolves(model):
        raise ConfigError(
            f"the blocks of {type(model).__name__} give channels before places, which a bottleneck at their end does "
            "not read. Write adapter.method=parallel, which stands beside the MLP, or adapter.method=lora."
        )
    norms = [_norm_beside(model, path, mlp.last) for path, mlp in zip(paths, mlps, strict=True)]
    if all(norms):
        return Places(within=[norm for norm in norms if norm])
    if any(norms) or not all(_has_final_norm(model, stack[0]) for stack in blocks(model)):
        raise ConfigError(
            f"whether the blocks of {type(model).__name__} normalise before or after they add to the residual stream "
            "cannot be told from their modules. Write adapter.method=houlsby, which works for both."
        )
    return Places(after=paths)


def _attentions(model: PreTrainedModel, block: str) -> list[str]:
    """The output projection of every attention of a block; T5's decoder has two."""
    names = [name for name in _linears(model, block) if is_attention(name)]
    last: dict[str, str | None] = {_attention_of(name): None for name in names}
    for name in names:
        # Phi-3 builds its output projection before the others, which are wider.
        if features(model.get_submodule(f"{block}.{name}"))[1] == block_width(model, block):
            last[_attention_of(name)] = name
    projections = [name for name in last.values() if name and not READS.match(name.rpartition(".")[2])]
    if not projections or len(projections) < len(last):
        raise _no_place(model, block, "attention", names)
    return [f"{block}.{name}" for name in projections]


def _attention_of(path: str) -> str:
    """The path down to the first part that is an attention."""
    parts = path.split(".")
    return ".".join(parts[: 1 + next(number for number, part in enumerate(parts) if is_attention(part))])


def _mlp(model: PreTrainedModel, block: str) -> Mlp:
    """The feed-forward part of a block: a mixture of experts, or linear layers of one module (two in BERT's family)."""
    experts = [name for name, _ in model.get_submodule(block).named_modules() if name.endswith(".experts")]
    if experts:
        whole = f"{block}.{experts[0].removesuffix('.experts')}"
        return Mlp(whole, whole)
    names = [name for name in _linears(model, block) if not is_attention(name)]
    parents = {name.rpartition(".")[0] for name in names}
    together = len(parents) == 1 or parents == {"intermediate", "output"}
    if not together or features(model.get_submodule(f"{block}.{names[-1]}"))[1] != block_width(model, block):
        raise _no_place(model, block, "MLP", names)
    return Mlp(f"{block}.{names[0]}", f"{block}.{names[-1]}")


def _linears(model: PreTrainedModel, block: str) -> list[str]:
    """Paths of the linear layers of a block, in the order of their construction: output projections come last."""
    return [name for name, module in model.get_submodule(block).named_modules() if is_linear(module)]


def _norm_beside(model: PreTrainedModel, block: str, projection: str) -> str | None:
    """The norm in the same module as an output projection, as in BERT: it normalises after the residual is added."""
    parent = projection.rpartition(".")[0]
    if parent == block:
        return None  # a flat block such as OPT's, which holds projections and norms alike
    norms = [(name, module) for name, module in model.get_submodule(parent).named_children() if is_norm(module)]
    wide = [name for name, module in norms if module.weight.shape[-1] == block_width(model, block)]  # type: ignore[index]
    return f"{parent}.{wide[0]}" if wide else None


def _has_final_norm(model: PreTrainedModel, block: str) -> bool:
    """Whether a norm follows the stack, so that its blocks do not normalise the residual stream themselves."""
    stack = block.rpartition(".")[0]
    holder = stack.rpartition(".")[0]
    near = {body(model), f"{body(model)}.pooler"} if not reads_tokens(model) else {holder, holder.rpartition(".")[0]}
    near &= {path for path, _ in model.named_modules()}
    children = [child for path in near for child in model.get_submodule(path).named_children()]
    return any(is_norm(module) and not any(part in name for part in ("emb", "pre_")) for name, module in children)


def _no_place(model: PreTrainedModel, block: str, part: str, kinds: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"the output of the {part} of {block} in {type(model).__name__} cannot be told from its linear layers "
        f"({', '.join(kinds) or 'none'}). Write adapter.method=lora, which needs no such place."
    )
