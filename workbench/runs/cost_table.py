"""The costs of a student and its teacher in words, from scores.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from workbench.runs import units


class Cost(NamedTuple):
    """How a cost is named and written, and which direction is better."""

    title: str
    shown: Callable[[float], str]
    better: Literal["low", "high"] = "low"


COSTS = {
    "parameters": Cost("parameters", units.count),
    "bytes": Cost("bytes on disk", units.size),
    "flops_row": Cost("operations a row", units.count),
    "seconds_1": Cost("time for a row", units.step),
    "seconds_32": Cost("time for 32 rows", units.step),
    "first_token_s": Cost("time to the first token", units.step),
    "tokens_per_second_1": Cost("tokens/s, one text", units.count, "high"),
    "tokens_per_second_32": Cost("tokens/s, 32 texts", units.count, "high"),
}
TIMES = tuple(COSTS)[3:]
"""Those that a clock tells."""
COLUMNS = ("cost", "teacher", "student", "gain")


class CostTable(NamedTuple):
    """Rows as COLUMNS has them, and the sentence on how they were measured."""

    rows: list[tuple[str, str, str, str]]
    note: str


def read(costs: Mapping[str, Any] | None) -> CostTable | None:
    """The table of an entry `costs` of scores.json; None where there is none."""
    if not costs:
        return None
    student, teacher = costs["student"], costs.get("teacher") or {}
    rows = []
    for name, cost in COSTS.items():
        mine, theirs = student.get(name), teacher.get(name)
        if mine is not None or theirs is not None:
            less = mine and theirs and (theirs / mine if cost.better == "low" else mine / theirs)
            before, after = (units.NOTHING if each is None else cost.shown(each) for each in (theirs, mine))
            rows.append((cost.title, before, after, f"{less:.3g} times" if less else ""))
    threads = "1 thread" if costs["threads"] == 1 else f"{costs['threads']} threads"
    taught = f", the teacher's in {teacher['weights']}" if teacher else ""
    note = (
        f"Measured as saved, adapters not merged, in turn on {costs['device']}, {threads}, the student's weights in "
        f"{student['weights']}{taught}; a row alone has "
        f"{costs['tokens']:,} tokens."
    )
    if not teacher:
        note += " No teacher was in memory to be measured."
    return CostTable(rows, note)
