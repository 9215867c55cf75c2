"""Section `freeze`: which layers train when. A policy is a file of `workbench/policies`; this is what all have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from workbench.schema import Mistakes, Section, unknown

POLICIES: dict[str, type[FreezeConfig]] = {}
"""Every `freeze.policy` and the section that configures it; `register` fills it."""


class Observation(NamedTuple):
    """Measurements over an interval of a run."""

    step: int
    """Optimizer steps done when it ended."""
    values: tuple[float, ...]
    """Of each layer; NaN where it does not train."""


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


class FreezeConfig(Section):
    """Base of every policy, and the policy `none`: everything trains that the adapter's method lets train.

    A subclass has `policy: Literal[...]`, its settings and `plan`.
    """

    policy: str = "none"
    cache: Literal["auto", "memory", "disk", "off"] = "auto"
    """Where outputs of a frozen prefix are kept, computed once for each row; `auto`: where that pays, and fits."""
    stored: Literal["compute", "bfloat16", "float32"] = "compute"
    """Precision of what is kept; `compute`: the one that it was computed in, which changes no result."""

    def refusal(self, blocks: int) -> str | None:
        """Why this policy does not work on so many blocks, and what to write instead; None where it does."""
        return None

    @property
    def observes(self) -> Literal["gradients", "activations"] | None:
        """The measurement to make at the end of each interval of `interval` steps; None: nothing."""
        return None

    @property
    def interval(self) -> int:
        """Optimizer steps between observations."""
        return 0

    @property
    def fixed(self) -> bool:
        """Whether the plan is the same in every step."""
        return type(self) is FreezeConfig

    @property
    def thaws(self) -> bool:
        """Whether a layer that has trained may freeze and train again."""
        return False

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
    def section_for(cls, values: Any) -> type[Section]:
        if cls is not FreezeConfig:
            return cls
        name = values.get("policy", "none") if isinstance(values, dict) else None
        return POLICIES.get(name, cls) if isinstance(name, str) else cls

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_own_class(cls, values: Any, validate: Callable[[Any], FreezeConfig]) -> FreezeConfig:
        """`freeze: {policy: lisa}` becomes the section that POLICIES has for lisa."""
        section = cls.section_for(values)
        if cls is not FreezeConfig or not isinstance(values, dict):
            return validate(values)
        none = values.get("policy", "none") == "none"
        if section is FreezeConfig and not none:
            raise unknown("policy", values["policy"], known=["none", *POLICIES])
        if mistakes := list(_of_others(section, values)):
            raise Mistakes(mistakes)
        return validate(values) if none else section.model_validate(values)  # type: ignore[return-value]


def _of_others(section: type[Section], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings that other policies have, with place and cure."""
    for key in values:
        able = [name for name, other in POLICIES.items() if key in other.model_fields]
        if able and key not in section.model_fields:
            text = f"is for freeze.policy={'|'.join(able)}, not for {values.get('policy', 'none')}."
            yield f"freeze.{key}", f"{text} Write freeze.policy={able[0]}, or leave freeze.{key} out."


def register(section: type[FreezeConfig]) -> type[FreezeConfig]:
    """Make the policy of `section` known by its name; use it as a decorator."""
    POLICIES[section.model_fields["policy"].default] = section
    return section
