"""Labels: cells of a file become targets of the loss, and outputs of a head become labels again.

Legend: N rows, C outputs: one for each class, or 1 for a number.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

from workbench.config.sections.classes_config import ClassesConfig, Kind
from workbench.config.sections.metrics import Choice
from workbench.data.rows import excerpt, finite
from workbench.errors import DataError
from workbench.schema import did_you_mean

if TYPE_CHECKING:
    from workbench.config.model_heads import Problem

Label: TypeAlias = str | float | tuple[str, ...]  # a class, a number, or several classes
Floats: TypeAlias = npt.NDArray[np.float64]

SCALE = 21
"""Different numbers that labels may be and still name classes, as the steps of a scale from 0 to 10 by halves do."""
WINNERS = ("a", "b", "tie")
_WINNERS = {
    **{name: "a" for name in ("a", "model_a", "response_a")},
    **{name: "b" for name in ("b", "model_b", "response_b")},
    **{name: "tie" for name in ("tie", "tie (bothbad)")},
}
_PROBLEMS: dict[Kind, Problem] = {
    "one": "single_label_classification",
    "pair": "single_label_classification",
    "several": "multi_label_classification",
    "number": "regression",
}


@dataclass(frozen=True)
class Labels:
    """Meaning of the outputs of a classification head."""

    kind: Kind
    names: tuple[str, ...]  # names of the classes; `value` for a number
    mean: float = 0.0  # mean of the numbers in training; the head learns (number - mean) / scale
    scale: float = 1.0  # standard deviation of the numbers in training
    metric: Choice | None = None  # the score of `evaluate.metric`, by which outputs are judged
    shift: tuple[float, ...] = ()  # moves log-probabilities (of several classes log-odds) before a class is chosen

    @property
    def problem(self) -> Problem:
        """Name of the task in transformers, for config.json."""
        return _PROBLEMS[self.kind]

    @property
    def facts(self) -> dict[str, Any]:
        """For a JSON file."""
        left_out = {"metric"} if self.shift else {"metric", "shift"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def targets(self, labels: Sequence[Label | None]) -> npt.NDArray[np.float32]:
        """Targets of the loss (N, C); zeros where a row has no label."""
        if self.kind == "number":
            values = [0.0 if label is None else (float(label) - self.mean) / self.scale for label in labels]  # type: ignore[arg-type]
            return np.asarray(values, dtype=np.float32)[:, None]
        number = {name: index for index, name in enumerate(self.names)}
        targets_NC = np.zeros((len(labels), len(self.names)), dtype=np.float32)
        for row, label in enumerate(labels):
            for name in classes_of(label):
                targets_NC[row, number[name]] = 1
        return targets_NC

    def true(self, targets_NC: npt.NDArray[Any]) -> Floats:
        """Numbers in their unit; of classes the targets as they are."""
        true_NC = targets_NC.astype(np.float64)
        if self.kind != "number":
            return true_NC
        digits = int(np.ceil(np.log10(self.scale + abs(self.mean))))  # of float32, in which targets are kept
        return np.round(self.values(true_NC), 6 - digits)

    def values(self, outputs_NC: Floats) -> Floats:
        """Convert outputs to probabilities of the classes (N, C), or to numbers (N, 1)."""
        if self.kind == "number":
            return outputs_NC * self.scale + self.mean
        values_NC: Floats = special.expit(outputs_NC) if self.kind == "several" else special.softmax(outputs_NC, axis=1)
        return values_NC

    def moved(self, values_NC: Floats, shift: Sequence[float]) -> Floats:
        """Probabilities (N, C) whose logarithms, or log-odds of several classes, are moved so far; all for no shift."""
        if not len(shift):
            return values_NC
        p_NC = np.clip(values_NC, np.finfo(np.float64).tiny, 1 - 2.0**-53)
        return self.values((special.logit(p_NC) if self.kind == "several" else np.log(p_NC)) + np.asarray(shift))

    def predicted(self, values_NC: Floats) -> list[Label]:
        """Labels of the rows: the likeliest class; every class of probability 0.5 or more; or the number. Classes are
        as `shift` moves them."""
        values_NC = self.moved(values_NC, self.shift)
        if self.kind == "number":
            return [float(value) for value in values_NC[:, 0]]
        if self.kind == "several":
            return [tuple(n for n, p in zip(self.names, row, strict=True) if p >= 0.5) for row in values_NC]
        return [self.names[number] for number in values_NC.argmax(1)]


def fit(kind: Kind, labels: Sequence[Label], *, source: str) -> Labels:
    """Collect the classes, or the mean and standard deviation of the numbers, of the training rows. Raises DataError:
    all rows have the same label, so there is nothing to learn."""
    if kind == "number":
        values = np.asarray(labels, dtype=np.float64)
        if not values.std() > 0:
            raise DataError(f"{source}: every label is {values[0]:g}, so there is nothing to learn. Give other rows.")
        return Labels(kind, ("value",), mean=float(values.mean()), scale=float(values.std()))
    class_names = set(counts(labels))
    if len(class_names) < (1 if kind == "several" else 2):
        only = f"every label is `{next(iter(class_names))}`" if class_names else "no row has a class"
        raise DataError(
            f"{source}: {only}, so there is nothing to learn. Give rows of another class, or name the column of "
            "the label with data.columns={label: NAME}."
        )
    if kind == "several" and not any(set(classes_of(label)) != class_names for label in labels):
        raise DataError(f"{source}: every row has all classes, so there is nothing to learn. Give other rows.")
    if kind == "pair":
        return Labels(kind, tuple(name for name in WINNERS if name in class_names))
    # Class 2 comes before class 10.
    integers = all(name.removeprefix("-").isdecimal() for name in class_names)
    return Labels(kind, tuple(sorted(class_names, key=int if integers else str)))


def require_classes(kind: Kind, labels: Sequence[Label | None], *, source: str) -> None:
    """Raise DataError where labels that are to be one class each are numbers: more of them than a scale of ratings
    has if some have decimals, else more than half as many as there are rows."""
    names = list(dict.fromkeys(label for label in labels if isinstance(label, str)))
    if kind != "one" or not all(finite(name) is not None for name in names):
        return
    decimals = [name for name in names if not name.removeprefix("-").isdecimal()]
    if len(names) > max(SCALE, 0 if decimals else len(labels) // 2):
        raise DataError(
            f"{source}: the labels are {len(names)} different numbers, such as `{(decimals or names)[0]}`, in "
            f"{len(labels)} rows. Write classes.kind=number to predict numbers. For classes, give them names."
        )


def require_known(labels: Labels, given: Sequence[Label | None], places: Iterable[str]) -> None:
    """Raise DataError where a row has a class that no training row has."""
    known = set(labels.names)
    if labels.kind == "number":
        return
    for label, place in zip(given, places, strict=True):
        for name in classes_of(label):
            if name not in known:
                raise DataError(
                    f"{place}: no training row has the class `{name}`.{did_you_mean(name, labels.names)} "
                    "Correct it, give training rows of that class, or leave the row out."
                )


def counts(labels: Sequence[Label]) -> Counter[str]:
    """Rows of each class."""
    return Counter(name for label in labels for name in classes_of(label))


def classes_of(label: Label | None) -> tuple[str, ...]:
    """The classes of a label; none for a number."""
    if isinstance(label, tuple):
        return label
    return (label,) if isinstance(label, str) else ()


def read(value: Any, config: ClassesConfig) -> Label | None:
    """Convert a cell to a label; None where it is empty. Raises DataError: the cell holds no label of this kind."""
    if value is None or value != value or (isinstance(value, str) and not value.strip() and config.kind != "several"):
        return None
    if config.kind == "number":
        if (number := finite(value)) is None:
            raise DataError(f"`label` must be a number, found {excerpt(value)}. For classes, write classes.kind=one.")
        return number
    if config.kind == "several":
        if isinstance(value, str):
            if config.separator is None:
                raise DataError(
                    f"`label` is the text {excerpt(value)}, not a list. Write classes.separator=';' with the sign "
                    "between its classes."
                )
            value = [part for part in value.split(config.separator) if part.strip()]
        if not isinstance(value, list):
            raise DataError(f"`label` must be a list of classes, found {excerpt(value)}. Write [{excerpt(value)}].")
        return tuple(dict.fromkeys(_name(each) for each in value))
    name = _name(value)
    if config.kind == "pair":
        if name.lower() not in _WINNERS:
            raise DataError(f"`winner` must be a, b or tie, found {excerpt(value)}.")
        return _WINNERS[name.lower()]
    return name


def read_columns(columns: Mapping[str, Any], config: ClassesConfig) -> Label | None:
    """Convert the cells of `classes.columns` to a label; None where all are empty. Raises DataError: one is neither 0
    nor 1, or a row that is to have one class has none or several."""
    cells = {name: columns.get(name) for name in config.columns}
    if all(cell is None or cell != cell or cell == "" for cell in cells.values()):
        return None
    known = {"0": False, "1": True, "false": False, "true": True}
    for name, cell in cells.items():
        number = finite(cell)
        cells[name] = known.get(f"{number:g}" if number is not None else str(cell).strip().lower())
        if cells[name] is None:
            raise DataError(f"`{name}` must be 1 in a row that has this class and 0 elsewhere, found {excerpt(cell)}.")
    names = tuple(name for name, has in cells.items() if has)
    if config.kind == "several":
        return names
    if len(names) != 1:
        found = (
            f"none of {', '.join(cells)} is 1" if not names else f"{' and '.join(f'`{each}`' for each in names)} are 1"
        )
        raise DataError(f"{found}, and a row has one class. Correct it, or write classes.kind=several.")
    return names[0]


def _name(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, float):
        raise DataError(f"`label` is {value!r}, which names no class. For numbers, write classes.kind=number.")
    if isinstance(value, list):
        raise DataError(f"`label` is a list, {excerpt(value)}. For several classes, write classes.kind=several.")
    raise DataError(f"`label` must be a string or a number, found {excerpt(value)}. Map your classes to names.")


def alike(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two names that differ only by case, spaces or how Unicode writes them; None where none do."""
    known: dict[str, str] = {}
    for name in names:
        plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        if (other := known.setdefault(plain, name)) != name:
            return other, name
    return None
