"""fleet.json: who trains in a fleet, who has left and who waits, from which a killed one goes on; and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.adapters.banks import bank_methods
from workbench.config import RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.errors import ResumeError
from workbench.recipes.over import member_results
from workbench.runs import files, score_files
from workbench.runs.run_directory import Run
from workbench.training.distributed.placement import Placement

TABLE = "fleet.json"


@dataclass
class FleetBoard:
    """The members of a fleet as they stand."""

    run: Run
    trials: Sequence[Trial[RunConfig]]
    at_once: int | None
    """Members that train at the same time; None: not decided yet."""
    bank: dict[str, int] = field(default_factory=dict)
    """Members that train now, in the order of the bank, with the step of each when the last one joined or left."""
    left: list[str] = field(default_factory=list)
    """Members that came to their end or failed."""

    @classmethod
    def of(cls, run: Run, trials: Sequence[Trial[RunConfig]], at_once: int | str) -> FleetBoard:
        """As it was written; of a new run nobody has begun."""
        table = run.ranks.agreed(files.read_json(run.home / TABLE))
        before, now = [row["member"] for row in table.get("members", [])], [trial.name for trial in trials]
        if before != now[: len(before)]:
            raise ResumeError(
                f"{run.path} began with the members {', '.join(before)} in this order. Write new ones behind them."
            )
        if table.get("bank") and _plain(trials[: len(before)]) and not _plain(trials):
            other = ", ".join(trial.name for trial in trials if not _plain([trial]))
            raise ResumeError(
                f"{run.path} has members of plain LoRA alone, whose products are computed together: {other} must wait "
                "until these have ended. Leave it out, resume the run, and then resume it again with it."
            )
        known = table.get("at_once") or (None if at_once == "auto" else int(at_once))
        return cls(run, trials, known, dict(table.get("bank", {})), list(table.get("left", [])))

    @property
    def waiting(self) -> list[str]:
        """Members that have not begun, in their order."""
        return [trial.name for trial in self.trials if trial.name not in self.bank and trial.name not in self.left]

    @property
    def rest(self) -> list[Trial[RunConfig]]:
        """Members that have not ended."""
        return [trial for trial in self.trials if trial.name not in self.left]

    def run_of(self, trial: Trial[RunConfig]) -> Run:
        """The directory of a member."""
        return Placement(trial.config.distributed, self.run.ranks).own(self.run, f"members/{trial.name}")

    def is_over(self, trial: Trial[RunConfig]) -> bool:
        """Whether nothing is left to do for a member: it is scored, or failed."""
        own = self.run_of(trial)
        over = trial.name in self.left and bool(own.manifest.get("ended") or not own.adapter.exists())
        return self.run.ranks.agreed(over)

    def change(self, ended: Sequence[str], steps: Mapping[str, int]) -> list[str]:
        """Let members leave, and take those that have waited longest in their place; returns who came.

        Args:
            steps: Of all that train.
        """
        self.left += ended
        self.bank = {name: steps[name] for name in self.bank if name not in ended}
        return self.take()

    def take(self) -> list[str]:
        """Take members that wait as long as there is room; returns who came."""
        assert self.at_once is not None, "decided before anybody trains"
        came = self.waiting[: max(0, self.at_once - len(self.bank))]
        self.bank |= dict.fromkeys(came, 0)
        return came

    def write(self) -> None:
        """Write fleet.json."""
        if not self.run.ranks.first:
            return
        files.write_json(
            self.run.path / TABLE,
            {"at_once": self.at_once, "bank": self.bank, "left": self.left, "members": self.rows()},
        )

    def rows(self) -> list[dict[str, Any]]:
        """Every member so far, with its rows and its loss before and after."""
        rows = []
        for trial in self.trials:
            own = self.run_of(trial)
            scores = files.read_json(own.path / "scores.json")
            before, after = (scores.get(when, {}).get("loss") for when in ("before", "after"))
            data = own.manifest.get("data", {}).get("train") or {}
            rank = getattr(trial.config.adapter, "rank", None)
            more = {"rows": data.get("rows"), "rank": rank, "before": before, "after": after}
            rows.append({**member_results.row(trial, own), **more})
        return rows

    def scores(self) -> dict[str, dict[str, float]]:
        """Scores before and after: each member's loss by its name, and means of those scores that all have."""
        read = {trial.name: files.read_json(self.run_of(trial).path / "scores.json") for trial in self.trials}
        scored = {name: each for name, each in read.items() if each}
        together: dict[str, dict[str, float]] = {}
        for when in ("before", "after"):
            each = {name: scores[when] for name, scores in scored.items()}
            shared = [key for key in next(iter(each.values()), {}) if all(key in own for own in each.values())]
            shared = [key for key in shared if not score_files.is_bound(key)]  # those of each member are none of a mean
            means = {key: sum(own[key] for own in each.values()) / len(each) for key in shared}
            together[when] = means | {f"loss[{name}]": own["loss"] for name, own in each.items() if "loss" in own}
        return together


def _plain(trials: Sequence[Trial[RunConfig]]) -> bool:
    return all(bank_methods.together(trial.config.adapter) for trial in trials)
