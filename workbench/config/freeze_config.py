"""Section `freeze`: which layers train when. A policy is a class of `freeze_policies.py`; this is what all have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from workbench.schema import Section, Tagged

POLICIES: dict[str, type[FreezeConfig]] = {}
"""Every `freeze.policy` and the section that configures it; `register` fills it."""


class Observation(NamedTuple):
    """Measurements over an interval of a run."""

    step: int
    """Optimizer steps done when it ended."""
    values: tuple[float, ...]
    """Value of each layer; NaN where it does not train."""


class Moment(NamedTuple):
    """Input of a policy's decision: progress of the run, and measurements so far."""

    step: int
    """Optimizer steps done."""
    share: float
    """Share of the run that is done, 0 to 1."""
    seed: int
    seen: tuple[Observation, ...] = ()


class LayerPlan(NamedTuple):
    """Layers that train in the next step: 0 the embeddings, 1 to n the blocks, n + 1 everything after them."""

    trains: tuple[bool, ...]
    rates: tuple[float, ...]
    """Factors on the learning rate; 1 is as configured."""

    @property
    def depth(self) -> int:
        """How many of the first layers are frozen: 0 none, 1 the embeddings, k + 1 the first k blocks too."""
        return next((number for number, trains in enumerate(self.trains) if trains), len(self.trains))


class FreezeConfig(Tagged):
    """Everything trains that the adapter's method lets train: the policy `none`, and the base of every other.

    A subclass has `policy: Literal[...]`, its settings and `plan`.
    """

    observes: ClassVar[Literal["gradients", "activations"] | None] = None
    """The measurement to make at the end of each interval of `interval` steps, by which alone such a policy decides;
    None: nothing."""
    thaws: ClassVar[bool] = False
    """Whether a layer that has trained may freeze and train again."""
    forgets: ClassVar[bool] = False
    """Whether the optimizer's state of a layer is dropped when it freezes, so that it begins anew."""
    tag: ClassVar[str] = "policy"
    untagged: ClassVar[str] = "none"
    choices: ClassVar[Mapping[str, type[Section]]] = POLICIES

    policy: str = "none"
    cache: Literal["auto", "memory", "disk", "off"] = "auto"
    """Where outputs of a frozen prefix are kept, computed once for each row; `auto`: where that pays, and fits."""
    stored: Literal["compute", "bfloat16", "float32"] = "compute"
    """Precision of the cached outputs; `compute`: that of the computation, which changes no result."""

    def refusal(self, blocks: int) -> str | None:
        """Why this policy does not work on so many blocks, and what to write instead; None where it does."""
        return None

    @property
    def interval(self) -> int:
        """Optimizer steps between observations."""
        return 0

    @property
    def judges(self) -> int:
        """Observations that the first decision needs."""
        return 2

    @property
    def fixed(self) -> bool:
        """Whether the plan is the same in every step."""
        return type(self) is FreezeConfig

    def never(self, blocks: int) -> int:
        """How many of the first blocks never train."""
        return max(0, self.plan(Moment(0, 0.0, 0), blocks=blocks).depth - 1) if self.fixed else 0

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        """Layers that train in the next step: a pure function of progress and measurements.

        Args:
            blocks: n, the transformer blocks of the backbone.
        """
        return LayerPlan((True,) * (blocks + 2), (1.0,) * (blocks + 2))

    @classmethod
    def misplaced(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        section = cls.section_for(values)
        for key in values:
            able = [name for name, other in POLICIES.items() if key in other.model_fields]
            if able and key not in section.model_fields:
                text = f"is for freeze.policy={'|'.join(able)}, not for {values.get('policy', 'none')}."
                yield f"freeze.{key}", f"{text} Write freeze.policy={able[0]}, or leave freeze.{key} out."


def register(section: type[FreezeConfig]) -> type[FreezeConfig]:
    """Make the policy of `section` known by its name; use it as a decorator."""
    POLICIES[section.model_fields["policy"].default] = section
    return section
