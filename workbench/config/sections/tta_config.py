"""The section `tta`, test-time augmentation: other forms of a row, and how their predictions are merged.

The work is in workbench/data/tta_views.py, workbench/crossval/tta.py and workbench/crossval/run_views.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from workbench.config.sections.classes_config import ClassesConfig, checked_template
from workbench.schema import CodeFile, Section, Unit

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
    "flip",
    "eight",
    "five_crops",
    "scales",
    "rotations",
    "shifts",
    "delays",
    "speeds",
    "user",
]
Share = Annotated[float, Field(gt=0, lt=1)]
Scale = Annotated[float, Field(ge=0.5, le=2)]
Degrees = Annotated[float, Field(ge=-180, le=180)]

PICTURES: tuple[ViewName, ...] = ("flip", "eight", "five_crops", "scales", "rotations", "shifts")
SOUND: tuple[ViewName, ...] = ("delays", "speeds")
VIEWS_OF: Mapping[str, tuple[str, tuple[ViewName, ...]]] = {
    "text": ("text", tuple(each for each in get_args(ViewName) if each not in {*PICTURES, *SOUND})),
    "image": ("pictures", (*PICTURES, "user")),
    "audio": ("sound", SOUND),
}
"""Views by what rows are, with its name: `text`, or the `data.format` of files."""
_ROWS = {"text": "texts", "image": "pictures", "audio": "sound"}

NOISY: tuple[ViewName, ...] = ("typos", "drop_words")
WINDOWS: dict[ViewName, Literal["start", "end", "middle"]] = {"head": "start", "tail": "end", "middle": "middle"}
"""Part of a too long column that a view keeps, in the words of classes.keep."""
MIN_CHANGED_SHARE = 0.01
"""Share of the rows that a view must change, or it is left out."""
_SETTINGS: Mapping[str, ViewName] = {
    "templates": "templates",
    "crop": "five_crops",
    "scales": "scales",
    "rotations": "rotations",
    "shift": "shifts",
    "delays": "delays",
    "speeds": "speeds",
}
"""The view that each setting is for."""


class TtaConfig(Section):
    """Views of a row that are predicted and averaged (test-time augmentation), where that helps."""

    views: tuple[ViewName, ...] = ()
    """Other forms of a row that are read beside the plain one; empty: off.

    Text: columns in `lower` or `upper` case, or with `no_punctuation`; noise: `typos`, `drop_words`; rows that are
    too long cut to the `head`, `tail` or `middle` of each column; the two responses of a pair exchanged: `swap`;
    `templates`; `user`.

    Pictures: `flip` exchanges left and right; `eight`: the seven other symmetries of a square, by quarter turns and
    flips; `five_crops`: the corners and the centre; `scales`; `rotations`; `shifts` to the four sides; `user`.

    Sound: `delays`, which let the recording begin earlier or later; `speeds`.

    A view that changes less than 1 % of the rows is left out, and refused where no other one is named.
    """
    copies: Annotated[PositiveInt, Unit("views")] = 1
    """Views of each kind of noise. Why: each view costs another pass over the rows."""
    noise: Share = 0.05
    """Share of a column's letters and digits that get a typo, or of its words that are dropped; at least one."""
    templates: tuple[str, ...] = ()
    """For view `templates`: further templates of the model's input, of the same columns as classes.text."""
    crop: Share = 0.875
    """For view `five_crops`: share of the picture's side that each crop keeps."""
    scales: tuple[Scale, ...] = (0.9, 1.1)
    """For view `scales`: factors of the picture about its centre, from 0.5 to 2; above 1 is nearer."""
    rotations: Annotated[tuple[Degrees, ...], Unit("degrees")] = (-10.0, 10.0)
    """For view `rotations`: degrees counter-clockwise about the centre."""
    shift: Share = 0.05
    """For view `shifts`: how far to each side, as a share of the picture's side."""
    delays: Annotated[tuple[float, ...], Unit("seconds")] = (-0.05, 0.05)
    """For view `delays`: seconds by which the recording begins later; below 0 it loses its beginning."""
    speeds: tuple[Scale, ...] = (0.95, 1.05)
    """For view `speeds`: how many times as fast the recording is; where the backbone reads waves, as high, too."""
    function: CodeFile | None = None
    """A Python file of yours. For view `user`, views(row: dict[str, str]) -> list[dict[str, str]] gets a row's columns
    and returns as many rows of every one, or views(picture: ndarray (H, W, 3)) -> list[ndarray] gets a picture of uint8
    and returns as many of its size; for merge `user`, merge(p: ndarray (V, N, C)) -> ndarray (N, C), the plain
    row first. Only a file you trust."""
    merge: Literal["mean", "geometric", "max", "vote", "user"] = "mean"
    """How the outputs of a row's views are combined; `vote`: each view has one vote, and their mean one more."""
    uncertain: Share | None = None
    """Share of rows, the most uncertain, that are read in several views; null: all rows.

    Uncertainty is entropy. Its threshold is fitted on the rows that choose, so the share of other rows may differ.
    """
    least_gain: Annotated[NonNegativeFloat, Unit("nats a row")] = 0.0
    """Nats a row by which the merged views must lower the loss of held-out rows, in a cross-validation of those out of
    fold, to be used (numbers: of their variance)."""
    keep: bool | None = None
    """Whether a run of one adapter uses its views; null: where its held-out rows say that they help. A run that is done
    takes another value by --resume."""

    @property
    def wanted(self) -> bool:
        """Whether rows may be read in several views."""
        return bool(self.views) and self.keep is not False

    @field_validator("views", "templates", "scales", "rotations")
    @classmethod
    def _different(cls, given: tuple[str | float, ...]) -> tuple[str | float, ...]:
        if twice := [each for number, each in enumerate(given) if each in given[:number]]:
            raise ValueError(f"duplicate entry {min(twice)!r}. Name it once.")
        return given

    @field_validator("templates")
    @classmethod
    def _readable(cls, templates: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_template(each) for each in templates)

    @model_validator(mode="after")
    def _used(self) -> TtaConfig:
        if not self.views:
            given = [name for name in type(self).model_fields if self.differs(name)]
            if given and "views" not in self.model_fields_set:  # views=[] turns off what a recipe names
                raise ValueError(f"{', '.join(given)}: there are no views. Write views too, or leave this out.")
            return self
        noisy = any(name in NOISY for name in self.views)
        if not noisy and (self.copies != 1 or self.differs("noise")):
            raise ValueError(
                f"copies and noise are for views {' and '.join(NOISY)}. Name one, or leave copies and noise out."
            )
        for setting, view in _SETTINGS.items():
            if view not in self.views and self.differs(setting):
                raise ValueError(f"{setting} is for view `{view}`. Add {view} to views, or leave {setting} out.")
        if "templates" in self.views and not self.templates:
            raise ValueError("view `templates` needs templates, such as templates: ['Question: {text}'].")
        if mistakes := list(self._plain_or_double()):
            raise ValueError(" ".join(mistakes))
        asks = "user" in self.views or self.merge == "user"
        if asks and self.function is None:
            raise ValueError("`user` needs function, the path of your Python file.")
        if self.function is not None and not asks:
            raise ValueError("function is for view `user` or merge `user`. Name one of them, or leave function out.")
        return self

    def _plain_or_double(self) -> Iterator[str]:
        """Views that are the row itself, or the same as another one."""
        if "flip" in self.views and "eight" in self.views:
            yield "view `eight` contains flip. Leave flip out of views."
        for view, plain in (("scales", 1.0), ("rotations", 0.0), ("delays", 0.0), ("speeds", 1.0)):
            values = getattr(self, view)
            if view in self.views and (not values or plain in values):
                known = ", ".join(f"{each:g}" for each in values)
                example = type(self).model_fields[view].default
                yield f"{view}: [{known}] must name others than {plain:g}, the row itself, such as {list(example)}."
        quarters = [each for each in self.rotations if each and each % 90 == 0]
        if quarters and "eight" in self.views and "rotations" in self.views:
            yield f"view `eight` contains the rotation by {quarters[0]:g} degrees. Leave it out of rotations."

    def refusal(self, classes: ClassesConfig, *, rows: str = "text") -> str | None:
        """Why these views do not go with these rows, and what to write; None where they do.

        Args:
            rows: What rows are: `text`, or the `data.format` of files.
        """
        for kind, (what, own) in VIEWS_OF.items():
            wrong = ", ".join(name for name in self.views if name in own and name != "user")
            if wrong and kind != rows:
                what_rows, known = VIEWS_OF[rows]
                cure = f"Views of {what_rows} are {', '.join(known)}."
                if rows == "text":
                    cure = f"Leave them out, or read {what} by data.format={kind}."
                return f"tta.views names views of {what} ({wrong}), and rows are {_ROWS[rows]}. {cure}"
        return (self._refusal_for_texts(classes) if rows == "text" else None) or self._refusal_for_numbers(classes)

    def _refusal_for_texts(self, classes: ClassesConfig) -> str | None:
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
        return None

    def _refusal_for_numbers(self, classes: ClassesConfig) -> str | None:
        if self.views and classes.kind == "number":
            if self.merge in ("geometric", "max", "vote"):
                return f"tta.merge: {self.merge} is for probabilities; classes.kind is number. Write tta.merge=mean."
            if self.uncertain is not None:
                return "tta.uncertain needs probabilities, and classes.kind is number. Leave tta.uncertain out."
        return None
