"""The section `data.curriculum`; workbench/data/row_order.py carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from workbench.schema import Section

Share = Annotated[float, Field(gt=0, le=1)]


class CurriculumConfig(Section):
    """Training begins with the easy rows, and opens the others as it goes on (Bengio et al. 2009).

    Every row is drawn as often as without a curriculum: only when it is drawn changes.
    """

    by: Literal["none", "length"] = "none"
    """Difficulty of a row: its tokens."""
    first: Literal["easy", "hard"] = "easy"
    """Which rows are open from the start; `hard` is the anti-curriculum."""
    pace: Literal["linear", "root", "step"] = "root"
    """How the share of open rows grows: evenly, or by the root of the time, which leaves every newly opened row as long
    to be learned (Platanios et al. 2019), or in `stages` equal steps."""
    start: Share = 0.1
    """Share of the rows that is open from the start."""
    until: Share = 0.5
    """Share of the run after which all rows are open."""
    stages: PositiveInt | None = None
    """Steps of pace=step, which are 4 unless said otherwise."""

    @model_validator(mode="after")
    def _fits(self) -> CurriculumConfig:
        if mistakes := list(self._contradictions()):
            raise ValueError(" ".join(mistakes))
        return self

    def _contradictions(self) -> Iterator[str]:
        unused = sorted(self.model_fields_set - {"by"})
        if self.by == "none" and any(getattr(self, key) != type(self).model_fields[key].default for key in unused):
            told = " and ".join(unused)
            yield f"{told} pace a curriculum, and by=none orders nothing. Write data.curriculum.by=length."
        if self.stages is not None and self.pace != "step":
            yield f"stages are for pace=step, not for pace={self.pace}. Write pace=step, or leave stages out."
        if self.by != "none" and self.start == 1:
            yield "start=1 opens all rows at once, which orders nothing. Write data.curriculum.start=0.1, or by=none."

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
        last, first = ("longest", "shortest") if self.first == "easy" else ("shortest", "longest")
        return (
            f"Curriculum: begins with the {first} {self.start:.0%} of the rows; the {last} are open after "
            f"{self.until:.0%} of the run."
        )
