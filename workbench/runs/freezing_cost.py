"""What freezing saved or cost a run: its steps with frozen layers against those in which all trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.runs import files, metrics_log, units

NOISE = 0.03
"""Share of a step's time below which a difference is none."""
_LEAST = 3
"""Steps of either kind, the first step of all aside, that can be compared."""


def of_run(folder: Path) -> dict[str, Any]:
    """Steps, seconds for a token and the highest memory until the last of them, of the steps in which `all` layers
    trained and of those with some `frozen`. Times are None where there are too few of either, memory where frozen ones
    came first. Empty for a run that logs no layers."""
    path = folder / "layers.jsonl"
    lines = files.json_lines(path.read_text(encoding="utf-8")) if path.exists() else []
    records = metrics_log.read(folder)
    if not lines or not records:
        return {}
    sides: tuple[list[dict[str, Any]], ...] = ([], [])
    for record in records:
        trains = next(line["trains"] for line in reversed(lines) if line["step"] <= record["step"])
        sides["0" in trains].append(record)
    timed = [[each for each in side if each["step"] > 1 and each["tokens_per_second"]] for side in sides]
    known = min(map(len, timed)) >= _LEAST
    return {
        name: {
            "steps": len(side),
            "seconds_per_token": _seconds(own) / sum(each["tokens"] for each in own) if known else None,
            "peak_bytes": side[-1]["peak_bytes"] if side and records[0] in sides[0] else None,
        }
        for name, side, own in zip(("all", "frozen"), sides, timed, strict=True)
    }


def _seconds(records: Sequence[Mapping[str, Any]]) -> float:
    return sum(float(each["tokens"] / each["tokens_per_second"]) for each in records)


def sentence(policy: str, cost: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether freezing did not pay, and what it saved or cost in words. `cost`: from `of_run`."""
    whole, frozen = cost["all"], cost["frozen"]
    name = f"freeze.policy={policy}"
    if not frozen["steps"]:
        return True, f"{name} froze nothing in {whole['steps']:,} steps, and saved nothing."
    steps = f"{frozen['steps']:,} of {whole['steps'] + frozen['steps']:,} steps"
    if frozen["seconds_per_token"] is None:
        why = "no step trained all layers" if not whole["steps"] else "too few steps are alike"
        return False, (
            f"{name} trained {steps} with frozen layers. What that saved cannot be told from this run, as {why}: "
            "`workbench compare` it with one of freeze.policy=none."
        )
    change = frozen["seconds_per_token"] / whole["seconds_per_token"] - 1
    spent = f"{units.percent(abs(change))} {'more' if change > 0 else 'less'} time"
    spent = "no other time" if abs(change) < NOISE else spent
    text = f"{name} trained {steps} with frozen layers, which took {spent} for a token than those that trained all"
    if (peak := whole["peak_bytes"]) and (last := frozen["peak_bytes"]):
        rose = f"peak memory rose from {units.size(peak)} to {units.size(last)}"
        text += f"; {rose if last > 1.005 * peak else f'the peak of memory, {units.size(peak)}, is of the latter'}"
    return change > -NOISE, f"{text}."
