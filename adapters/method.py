"""Base of every adapter method: a section of the configuration that knows how to put itself on a backbone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from workbench.schema import Section, Tagged

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel

LORA_OPTIONS: dict[str, str] = {
    "arrow": "it trains nothing, but chooses among trained adapters. Take adapter.method=lora for each, "
    "and add them up with `workbench combine`.",
    "kasa": "it changes the frozen weights themselves. Take adapter.method=pissa.",
    "layer-replication": "it makes another, deeper backbone, which no setting of an adapter does here. "
    "Take adapter.method=lora.",
    "qalora": "PEFT has it for GPTQ weights alone. Take adapter.method=lora with model.weights=nf4.",
}
"""Options of PEFT's LoRA that a user may know as methods, and that are not offered: the reason, and what to write."""

NOT_OFFERED: dict[str, str] = {
    **LORA_OPTIONS,
    "adamss": "it clusters the singular vectors of each weight by k-means, which decides its shapes: sizes are not "
    "known before a run, and another machine's decomposition may not fit what was saved. Take adapter.method=psoft.",
    "adaption-prompt": "PEFT builds it into the attention of three families only, as it computed years ago. "
    "Take adapter.method=prefix, which gives attention keys and values of its own.",
    "cartridge": "it distils a long text into a prefix, from conversations about the text that are not in the rows. "
    "Take adapter.method=prefix.",
    "cpt": "it trains the tokens of examples in front of each row, with a loss of its own that weighs these. "
    "Take adapter.method=prompt.",
    "frod": "it is made of the values of all weights together: sizes are not known before a run, and in half precision "
    "the backbone itself is rounded by 2 %. Take adapter.method=osf or psoft.",
    "lily": "PEFT mixes its matrices by an average over all rows of a forward pass, so that a row's outputs depend on "
    "the rows beside it. Take adapter.method=lora.",
    "multitask-prompt-tuning": "it needs the task of each row, which rows here do not have. "
    "Take adapter.method=prompt for one task, or one of data.sources for each.",
    "poly": "it needs the task of each row, which rows here do not have. Take adapter.method=lora.",
    "shadow": "it trains a second, smaller backbone beside the first, with a loss of its own. "
    "Take adapter.method=parallel, or distil into a student (recipe=distill).",
    "xlora": "it trains no adapter, but what chooses among adapters that are trained already. "
    "Train these with adapter.method=lora, and add them up with `workbench combine`.",
}
"""Methods of PEFT that `adapter.method` does not have: the reason, and what to write instead."""


WEIGHTS = ("float32", "bfloat16", "float16", "int8", "nf4", "fp4", "fp8")
"""Every format that a backbone's weights are stored in."""
HALF_OR_FULL = WEIGHTS[:3]
"""The formats that are not quantised."""

METHODS: dict[str, type[Method]] = {}
"""Every `adapter.method` and the section that configures it; `register` fills it."""


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method, for users who choose one and for the checks that refuse wrong combinations."""

    trains: str
    """The parameters that train, in a few words."""
    paper: str
    """Authors, year and arXiv number."""
    weights: tuple[str, ...] = WEIGHTS
    """Formats of the backbone's weights that it supports."""
    why_weights: str = ""
    """Why it supports no other format; empty where it supports all."""
    no_merge: str = ""
    """Why it cannot be merged into the backbone's weights; empty where it can."""
    starts_elsewhere: str = ""
    """Why a fresh adapter changes the outputs of the backbone; empty where it does not."""
    no_packing: str = ""
    """Why rows cannot be packed with it; empty where they can."""
    draws: bool = False
    """Whether it draws random numbers for each token in training, besides dropout."""
    plans_steps: bool = False
    """Whether it needs the number of optimizer steps in advance."""
    no_freezing: str = ""
    """Why no policy can freeze layers of the backbone with it; empty where one can."""
    token_rows: bool = False
    """Whether embeddings of new tokens can train beside it."""
    plain_lora: bool = False
    """Whether it is LoRA's two matrices and no more: engines cut it, and servers load it, without reading weights."""


@dataclass(frozen=True)
class ExtraParameters:
    """Parameters that train beside the adapter and are saved with it."""

    token_rows: dict[str, list[int]] | None = None
    """Rows of added tokens, by the leaf name of the embedding and of an untied head."""
    heads: list[str] = field(default_factory=list)
    """Leaf names of modules that train whole, such as a fresh classification head."""


Sample = Callable[[], "Iterator[dict[str, Tensor]]"]
"""Yields model inputs of some training rows, one micro-batch at a time, for methods that start from data."""

RowLosses = Iterator["Tensor"]
"""Losses of training rows, one row at a time, each with a graph that is computed when it is asked for."""


class TrainHook(Protocol):
    """A method's own work during training, besides the loss and the optimizer: AdaLoRA reallocates ranks.

    It works on the optimizer's float32 values and gradients, never on the half-precision copies that compute.
    """

    def on_gradients(self) -> None:
        """Called once a step after the backward pass and before clipping; reads the gradients or adds to them."""

    def after_step(self, step: int) -> None:
        """Called after optimizer step `step` (counted from 1), with that step's gradients in place."""

    def state(self) -> dict[str, Tensor]:
        """Its state, for a checkpoint."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from the `state` of a checkpoint."""


class Method(Tagged):
    """Base of every method. A subclass has `method: Literal[...]`, its settings, `about` and `to_peft`."""

    tag: ClassVar[str] = "method"
    untagged: ClassVar[str] = "lora"
    choices: ClassVar[Mapping[str, type[Section]]] = METHODS
    refused: ClassVar[Mapping[str, str]] = NOT_OFFERED

    without_looking: ClassVar[str] = "adapter.method=lora"
    """Settings to write instead where rows have no loss before the first step that `choose` could use."""
    made_of_values: ClassVar[bool] = False
    """Whether PEFT makes it from random numbers of its own, which takes memory even where it is only counted."""
    about: ClassVar[dict[str, MethodInfo]] = {}
    """Facts for each name that `method` may have."""
    method: str

    @classmethod
    def described(cls, name: str) -> str:
        """Parameters that a method trains, and its paper."""
        about = METHODS[name].about[name]
        return f"{about.trains} ({about.paper})"

    @property
    def facts(self) -> MethodInfo:
        """Facts about the method that is configured."""
        return self.about[self.method]

    @property
    def noise(self) -> float:
        """Its dropout rate in training."""
        return 0.0

    def extra_positions(self, model: PreTrainedModel) -> int:
        """Positions that it takes before each row, such as virtual tokens."""
        return 0

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Say why this method does not work on this backbone, and what to write instead; None where it does."""
        return None

    def no_checkpointing(self, model: PreTrainedModel) -> str:
        """Say why it does not work with activation checkpointing on this backbone; empty where it does."""
        return ""

    @property
    def planned(self) -> Method:
        """The method that a plan counts in its place: itself, or one of equal size that needs no training rows."""
        return self

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Names of the modules that it changes, which `check` prints; raises ConfigError where there are none."""
        raise NotImplementedError

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """The PEFT configuration for this backbone."""
        raise NotImplementedError

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Set initial values that need more than shapes; random numbers come from torch's seeded generator."""

    def choose(self, model: PeftModel, losses: RowLosses) -> None:
        """Choose what trains, or its initial values, by gradients of training rows before the first step."""

    def chosen(self, model: PeftModel) -> dict[str, Tensor]:
        """Tensors for a checkpoint that say what trains, such as indices, by name."""
        return {}

    @property
    def looks(self) -> int:
        """Number of training rows that `choose` takes gradients of."""
        return 0

    def rate_factor(self, parameter: str) -> float:
        """Learning rate of a parameter relative to `train.learning_rate`, by its name in the model."""
        return 1.0

    def decays(self, parameter: str) -> bool:
        """Whether weight decay applies to a matrix of this name; not to factors, where 0 would remove an activation."""
        return True

    def train_hook(self, trainable: Mapping[str, nn.Parameter], *, steps: int | None) -> TrainHook | None:
        """The hook of one training; None for most methods.

        Args:
            trainable: The float32 values that train, by the parameter's name in the model.
            steps: Optimizer steps of the run; None where tokens or time end it, which is refused for methods with
                `plans_steps`.
        """
        return None


def register(section: type[Method]) -> type[Method]:
    """Make every name in `section.about` an `adapter.method`; use it as a decorator.

    In a file that `plugins` of a recipe names (`scripts/my_method.py`), every verb knows the method.

    Args:
        section: A subclass of `Method` or of one of ours, with `about`, `method` and `to_peft`.

    Returns:
        The same class.

    Raises:
        ValueError: A name is taken.

    Examples:
        >>> import workbench
        >>> from typing import ClassVar, Literal
        >>> from workbench.adapters import Lora, MethodInfo
        >>> @workbench.register_method
        ... class NarrowLora(Lora):
        ...     about: ClassVar = {"narrow-lora": MethodInfo("factors of rank 2", "-")}
        ...     method: Literal["narrow-lora"] = "narrow-lora"
        ...     rank: int = 2
        >>> workbench.load_recipe("sft/quickstart", ["adapter={method: narrow-lora}"]).adapter.rank
        2
    """
    for name in section.about:
        if name in METHODS and METHODS[name].__qualname__ != section.__qualname__:
            raise ValueError(f"adapter.method {name} exists already. Give your method another name.")
        METHODS[name] = section
    return section


def plain_lora() -> str:
    """Names of the methods that are plain LoRA, for a sentence: lora|rslora."""
    return "|".join(name for name, each in METHODS.items() if each.about[name].plain_lora)
