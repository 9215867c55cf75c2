"""Rows of answers whose steps are rated one by one: `prompt`, `completions` (a list of steps) and `labels`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.data.rows import excerpt
from workbench.data.text.formats import Example, answered
from workbench.errors import DataError


def convert(separator: str, labelled: bool, name: str, place: str, columns: Mapping[str, Any]) -> Example:
    """A row of format `name` as an example whose answer is its steps with `separator` between them.

    Args:
        labelled: Whether labels are read; otherwise all steps have the label 0, which nobody is to look at.

    Raises:
        DataError: The row rates no steps, or a step or a label is none.
    """
    if name != "stepwise":
        raise DataError(
            f"data.format {name} rates no steps, which reward.kind=process learns from. Give rows with prompt, "
            "completions (a list of steps) and labels (true or false for each), or leave reward.kind out."
        )
    steps = _steps(columns["completions"])
    labels = _labels(columns.get("labels"), len(steps)) if labelled else (0.0,) * len(steps)
    # Only the first keeps the space in front of it, which may part it from the prompt.
    steps = (steps[0].rstrip(), *(step.strip() for step in steps[1:]))
    whole = answered(place, {**columns, "completion": separator.join(steps)}, prompt="prompt", answer="completion")
    return replace(whole, steps=steps, step_labels=labels)


def parted(answer: str, separator: str) -> tuple[str, ...]:
    """The steps of a generated answer; blank ones are none."""
    return tuple(step for step in answer.split(separator) if step.strip())


def _steps(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"`completions` must be a list with at least one step, found {excerpt(value)}.")
    for number, step in enumerate(value, start=1):
        if not isinstance(step, str) or not step.strip():
            raise DataError(f"`completions`: step {number} must be a text that is not blank, found {excerpt(step)}.")
    return tuple(value)


def _labels(value: Any, steps: int) -> tuple[float, ...]:
    if value is None:
        raise DataError("`labels` is missing or null. Give a list with true or false for each step.")
    if not isinstance(value, list) or len(value) != steps:
        count = f"a list of {len(value)}" if isinstance(value, list) else excerpt(value)
        raise DataError(f"`labels` must be a list with one label for each of the {steps} steps, found {count}.")
    for number, label in enumerate(value, start=1):
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            raise DataError(
                f"`labels`: that of step {number} must be true, false or a number from 0 to 1, found {excerpt(label)}."
            )
    return tuple(float(label) for label in value)
