"""The section `tta`, test-time augmentation: other ways to write a row, and how the predictions are merged.

The work is in workbench/data/views/text_views.py and workbench/crossval/tta.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from workbench.config.classes_config import ClassesConfig, checked_template
from workbench.schema import Section

ViewName = Literal[
    "lower",
    "upper",
    "no_punctuation",
    "typos",
    "drop_words",
    "head",
    "tail",
    "middle",
    "swap",
    "templates",
    "user",
]
Share = Annotated[float, Field(gt=0, lt=1)]

NOISY: tuple[ViewName, ...] = ("typos", "drop_words")
WINDOWS: dict[ViewName, Literal["start", "end", "middle"]] = {"head": "start", "tail": "end", "middle": "middle"}
"""Part of a too long column that a view keeps, in the words of classes.keep."""
MIN_CHANGED_SHARE = 0.01
"""Share of the rows that a view must change, or it is left out."""


class TtaConfig(Section):
    views: tuple[ViewName, ...] = ()
    """Rewritten forms of a row that are read beside the plain one; empty: off.

    Columns in `lower` or `upper` case, or with `no_punctuation`; noise: `typos`, `drop_words`; rows that are too long
    cut to the `head`, `tail` or `middle` of each column; the two responses of a pair exchanged: `swap`; `templates`;
    `user`. One that changes less than 1 % of the rows is left out, and
    refused where no other one is named.
    """
    copies: PositiveInt = 1
    """Views of each kind of noise."""
    noise: Share = 0.05
    """Share of a column's letters and digits that get a typo, or of its words that are dropped; at least one."""
    templates: tuple[str, ...] = ()
    """For view `templates`: further templates of the model's input, of the same columns as classes.text."""
    function: Path | None = None
    """A Python file of yours. For view `user`, views(row: dict[str, str]) -> list[dict[str, str]] gets a row's columns
    and returns as many rows of every one; for merge `user`, merge(p: ndarray (V, N, C)) -> ndarray (N, C), the plain
    row first. Only a file you trust."""
    merge: Literal["mean", "geometric", "max", "learned", "user"] = "mean"
    """How the outputs of a row's views are combined; `learned` is a mean with weights fitted on out-of-fold rows."""
    uncertain: Share | None = None
    """Share of rows, the most uncertain, that are read in several views; null: all rows.

    Uncertainty is entropy. Its threshold is fitted on out-of-fold rows, so the share of other rows may differ.
    """
    least_gain: NonNegativeFloat = 0.0
    """Nats a row by which the merged views must lower the out-of-fold loss to be used (numbers: of their variance)."""

    @field_validator("views", "templates")
    @classmethod
    def _different(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({each for each in given if given.count(each) > 1}):
            raise ValueError(f"duplicate entry {twice[0]!r}. Name it once.")
        return given

    @field_validator("templates")
    @classmethod
    def _readable(cls, templates: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_template(each) for each in templates)

    @model_validator(mode="after")
    def _used(self) -> TtaConfig:
        if not self.views:
            return self
        noisy = any(name in NOISY for name in self.views)
        if not noisy and (self.copies != 1 or self.noise != type(self).model_fields["noise"].default):
            raise ValueError(
                f"copies and noise are for views {' and '.join(NOISY)}. Name one, or leave copies and noise out."
            )
        if self.templates and "templates" not in self.views:
            raise ValueError("templates are for view `templates`. Add templates to views, or leave them out.")
        if "templates" in self.views and not self.templates:
            raise ValueError("view `templates` needs templates, such as templates: ['Question: {text}'].")
        asks = "user" in self.views or self.merge == "user"
        if asks and self.function is None:
            raise ValueError("`user` needs function, the path of your Python file.")
        if self.function is not None and not asks:
            raise ValueError("function is for view `user` or merge `user`. Name one of them, or leave function out.")
        return self

    def refusal(self, classes: ClassesConfig) -> str | None:
        """Why these views do not go with these rows, and what to write; None where they do."""
        if "swap" in self.views and classes.kind != "pair":
            return f"tta.views: swap exchanges two responses, and classes.kind is {classes.kind}. Leave swap out."
        for name, keep in WINDOWS.items():
            if name in self.views and keep == classes.keep:
                return f"tta.views: {name} is how classes.keep={keep} cuts rows already. Leave {name} out."
        for template in self.templates if "templates" in self.views else ():
            if template == classes.template:
                return f"tta.templates: {template!r} is what classes.text says already. Leave it out."
            columns = set(ClassesConfig(text=template).fields)
            if columns != set(classes.fields):
                return (
                    f"tta.templates: {template!r} must name the columns that classes.text names: "
                    f"{', '.join(classes.fields)}; found {', '.join(sorted(columns))}."
                )
        if self.views and classes.kind == "number":
            if self.merge in ("geometric", "max"):
                return f"tta.merge: {self.merge} is for probabilities; classes.kind is number. Write tta.merge=mean."
            if self.uncertain is not None:
                return "tta.uncertain needs probabilities, and classes.kind is number. Leave tta.uncertain out."
        return None
