"""How a student drafts for its teacher, in words, from scores.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.runs import units

COLUMNS = ("drafted at a time", "accepted", "tokens a pass of the teacher", "speed")


class DraftTable(NamedTuple):
    """Rows as COLUMNS has them, and the sentence on how they were measured."""

    rows: list[tuple[str, str, str, str]]
    note: str


def read(drafts: Mapping[str, Any] | None) -> DraftTable | None:
    """The table of an entry `drafts` of scores.json; None where there is none."""
    if not drafts:
        return None
    rows = [
        (
            name,
            units.percent(each["acceptance"]),
            f"{each['tokens_per_pass']:.2f}",
            f"{each['speedup']:.3g} times",
        )
        for name, each in drafts["drafted"].items()
    ]
    best = max(drafts["drafted"], key=lambda name: float(drafts["drafted"][name]["speedup"]))
    faster = drafts["drafted"][best]["speedup"]
    verdict = (
        f"With {best} drafted tokens {drafts['teacher']} writes {faster:.3g} times as fast."
        if faster > 1
        else f"No number of drafted tokens makes {drafts['teacher']} faster here."
    )
    threads = "1 thread" if drafts["threads"] == 1 else f"{drafts['threads']} threads"
    same = "all" if drafts["equal"] == 1 else units.percent(drafts["equal"])
    note = (
        f"{verdict} Greedy answers to {drafts['rows']:,} prompts, {drafts['tokens']:,} tokens, one text at a time, in "
        f"turn on {drafts['device']}, {threads}; the teacher alone writes {units.number(drafts['tokens_per_second'])} "
        f"tokens/s. Answers with and without drafts are the same for {same} of the prompts"
        + (": rounding decides where two tokens are nearly as likely." if drafts["equal"] < 1 else ".")
        + " auto: up to 20 tokens, until the student is unsure, as transformers drafts by itself."
    )
    return DraftTable(rows, note)
