"""The sections `data.curriculum`, which data/row_order.py carries out, and `data.length_warm_up`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from workbench.schema import CodeFile, ConsistentSection, Section, Unit

Share = Annotated[float, Field(gt=0, le=1)]


class CurriculumConfig(ConsistentSection):
    """Training begins with the easy rows, and opens the others as it goes on (Bengio et al. 2009).

    Every row is drawn as often as without a curriculum: only when it is drawn changes.
    """

    by: Literal["none", "length", "perplexity", "loss", "column", "function", "self_paced"] = "none"
    """Difficulty of a row: its tokens; its mean loss by the backbone before it trains (`perplexity`, recipe sft); the
    `loss` of its class by a linear probe of the frozen backbone's features that was fitted to other rows (recipe
    classify; transfer scoring of Hacohen and Weinshall 2019, arXiv:1904.03626); a number in a `column` of the rows;
    what a `function` of yours says; or `self_paced`, the loss that the run itself has measured last (Kumar et al.
    2010): a first pass takes all rows, and the pace is that of the rest of the run. Why: no order gained
    at equal compute on each set of rows that was tried (scripts/bench/README.md)."""
    column: str | None = Field(default=None, min_length=1)
    """by=column: name of the column in the file. Each training row has a number in it, higher where it is harder."""
    function: CodeFile | None = None
    """by=function: a Python file of yours with difficulty(row: dict[str, Any]) -> float. It gets the columns of a row
    as they stand in the file; higher is harder. Only a file you trust."""
    first: Literal["easy", "hard"] = "easy"
    """Which rows are open from the start; `hard` is the anti-curriculum."""
    pace: Literal["linear", "root", "step"] = "root"
    """How the share of open rows grows: evenly, or by the root of the time, which leaves every newly opened row as long
    to be learned (Platanios et al. 2019), or in `stages` equal steps."""
    start: Share = 0.1
    """Share of the rows that is open from the start."""
    until: Share = 0.5
    """Share of the run after which all rows are open; by=self_paced: of what comes after the first pass."""
    stages: Annotated[PositiveInt | None, Unit("steps of the pace")] = None
    """Steps of pace=step, which are 4 unless said otherwise."""

    def _contradictions(self) -> Iterator[str]:
        unused = sorted(self.model_fields_set - {"by"})
        if self.by == "none" and any(self.differs(key) for key in unused):
            unused_keys = " and ".join(unused)
            yield f"{unused_keys} pace a curriculum, and by=none orders nothing. Write data.curriculum.by=length."
        for key, example in (("column", "NAME"), ("function", "my_difficulty.py")):
            given = getattr(self, key) is not None
            if self.by == key and not given:
                yield f"by={key} needs its name. Write data.curriculum.{key}={example}."
            if given and self.by not in (key, "none"):
                yield f"{key} is for by={key}, not for by={self.by}. Leave {key} out."
        if self.stages is not None and self.pace != "step":
            yield (
                f"stages are for pace=step, not for pace={self.pace}. Write "
                "data.curriculum.pace=step, or leave stages "
                "out."
            )
        if self.by != "none" and self.start == 1:
            yield (
                "start=1 opens all rows at once, which orders nothing. Write "
                "data.curriculum.start=0.1, or data.curriculum.by=none."
            )

    @property
    def graded(self) -> bool:
        """Whether each row has a difficulty of its own, beside its length."""
        return self.measured or self.by in ("column", "function")

    @property
    def measured(self) -> bool:
        """Whether the backbone says before the training how difficult each row is."""
        return self.by in ("perplexity", "loss")

    @property
    def direction(self) -> int:
        """Sign of the difficulty by which rows are sorted: those of the lowest product come first."""
        return 1 if self.first == "easy" else -1

    def open_share(self, progress: float) -> float:
        """Share of the rows that is open after `progress`, a share of the run: from `start` to 1."""
        grown = min(progress / self.until, 1.0)
        if grown == 1:
            return 1.0
        if self.pace == "root":
            root: float = (self.start**2 + (1 - self.start**2) * grown) ** 0.5
            return root
        if self.pace == "step":
            stages = self.stages or 4
            grown = int(grown * stages + 1e-9) / stages  # rounding must not hold back a step that is due
        return self.start + (1 - self.start) * grown

    def in_words(self) -> str:
        """One sentence on what it does."""
        begins, last = ("lowest", "highest") if self.first == "easy" else ("highest", "lowest")
        if self.by == "self_paced":
            return (
                f"Curriculum: after a first pass over all rows it goes on with the {self.start:.0%} of them of "
                f"the {begins} loss so far; those of the {last} are open after {self.until:.0%} of the rest of the run."
            )
        return (
            f"Curriculum: begins with the {self.start:.0%} of the rows of the {begins} {self.measure}; those of the "
            f"{last} are open after {self.until:.0%} of the run."
        )

    @property
    def measure(self) -> str:
        """The measure of difficulty, in words."""
        measures = {
            "length": "number of tokens",
            "perplexity": "loss by the backbone before training",
            "loss": "loss by a linear probe of the frozen backbone",
            "column": f"`{self.column}`",
            "function": f"difficulty by {self.function}",
        }
        return measures[self.by]


MULTIPLE = 8
"""Lengths are multiples of it, which matrix units of accelerators want (Li et al. 2022)."""


class LengthWarmUpConfig(Section):
    """Rows are cut to a length that grows early in the run (Li, Zhang and He, NeurIPS 2022, arXiv:2108.06084).

    What is cut is not trained on in that step; it is as soon as the row comes again when rows are longer.
    """

    start: Annotated[Annotated[int, Field(ge=MULTIPLE)] | None, Unit("tokens")] = None
    """First tokens of a row that the first step reads; null: all of them in every step."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the run after which rows are whole."""

    @model_validator(mode="after")
    def _used(self) -> LengthWarmUpConfig:
        if self.start is None and self.differs("until"):
            raise ValueError("until ends what start begins. Write data.length_warm_up.start=64, or leave until out.")
        return self

    def limit(self, step: int, *, steps: int, longest: int) -> int | None:
        """Most tokens of a row in step `step` (from 0) of so many; None where all rows are whole.

        It grows linearly from `start` to the longest row, in multiples of MULTIPLE.
        """
        if self.start is None or step >= self.until * steps:
            return None
        grown = self.start + (longest - self.start) * step / (self.until * steps)
        max_length = max(self.start, int(grown) // MULTIPLE * MULTIPLE)
        return max_length if max_length < longest else None
