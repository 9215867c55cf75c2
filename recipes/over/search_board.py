"""The state of a search, kept in search.json for a resumed run and the report: trials, waves, and what they gave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.config import RunConfig
from workbench.config.expansions import search_expansion
from workbench.config.expansions.member_runs import Trial
from workbench.recipes.over import member_results
from workbench.runs import files, metrics_log
from workbench.runs.run_directory import Run
from workbench.training import early_stopping
from workbench.training.search import optuna_proposals
from workbench.training.search.halving import Halving, Move, Round, Standing

TABLE = "search.json"


@dataclass
class WaveRecord:
    """Members that trained at once."""

    trials: list[int]
    rungs: list[int]
    """Where each is compared."""
    begun: list[int]
    """Steps that each had done before."""
    losses: list[float | None] | None = None
    """Held-out loss of each, null where it failed; null while the wave trains."""
    seconds: float = 0.0


@dataclass
class Board:
    """The state of a search, a function of its configuration and of what its members gave."""

    config: RunConfig
    run: Run
    settings: list[dict[str, Any]] = field(default_factory=list)
    """Settings of each trial so far."""
    waves: list[WaveRecord] = field(default_factory=list)

    @property
    def halving(self) -> Halving:
        """The rule of the search."""
        return Halving(self.config.search.eta, self.config.search.rungs)

    @property
    def trials(self) -> list[Trial[RunConfig]]:
        """The run of each trial so far."""
        return search_expansion.trials(self.config, self.settings)

    @property
    def standings(self) -> list[Standing]:
        """Losses of each trial at the rungs that it reached."""
        rung_losses: list[dict[int, float]] = [{} for _ in self.settings]
        for wave in self.waves:
            for trial, rung, loss in zip(wave.trials, wave.rungs, wave.losses or (), strict=False):
                rung_losses[trial][rung] = math.inf if loss is None else loss
        return list(rung_losses)

    @property
    def trained(self) -> float:
        """Steps that all waves took, in whole trainings."""
        return sum(map(self.halving.reached, self.standings))

    @property
    def seconds(self) -> float:
        """Time that all waves took."""
        return sum(wave.seconds for wave in self.waves)

    def next_wave(self, trainings: float) -> WaveRecord | None:
        """The wave that trains now: one that was interrupted, or another one; None where the search is over.

        Args:
            trainings: Whole trainings that there is time for.
        """
        if self.waves and self.waves[-1].losses is None:
            return self.waves[-1]
        search, standings = self.config.search, self.standings
        at_once = search.most_at_once
        if not self.waves and trainings < math.inf:  # how long a step takes, the first few tell
            at_once = min(at_once, search.eta)
        wave = self.halving.next_round(standings, left=search.trials - len(self.settings), at_once=at_once)
        if self.waves:
            wave = self.halving.within(wave, standings, trainings=trainings)
        if wave is None:
            return None
        self.waves.append(self._begun(wave))
        self.write()
        return self.waves[-1]

    def done(self, wave: WaveRecord, losses: Sequence[float], seconds: float) -> None:
        """Note what a wave gave."""
        wave.losses = [loss if math.isfinite(loss) else None for loss in losses]
        self.paused(wave, seconds)

    def paused(self, wave: WaveRecord, seconds: float) -> None:
        """Note the time that a wave took, which may go on in another process."""
        wave.seconds = round(wave.seconds + seconds, 3)
        self.write()

    def best(self) -> int | None:
        """The trial with the lowest loss at its end; None where none came to it."""
        top = self.halving.top
        ended = [
            (each[top], trial) for trial, each in enumerate(self.standings) if math.isfinite(each.get(top, math.inf))
        ]
        return min(ended)[1] if ended else None

    def member(self, trial: Trial[RunConfig]) -> Run:
        """The run directory of a trial, which goes on where an earlier wave or process left it."""
        ranks = self.run.ranks
        path, home = (folder / "members" / trial.name for folder in (self.run.path, self.run.home))
        there = ranks.agreed(home.exists())
        path.mkdir(parents=True, exist_ok=True)
        files.remove_unfinished(path, path / "checkpoints")
        return Run(path, None, resumed=there, ranks=ranks, home=home)

    def write(self, *, importances: Mapping[str, float] | None = None) -> None:
        """Write search.json."""
        if not self.run.ranks.first:
            return
        trials, standings, best = self.trials, self.standings, self.best()
        table = {
            "best": None if best is None else trials[best].name,
            "ship": self.config.save.ship,
            "by": early_stopping.criterion_name(self.config.evaluate),
            "eta": self.config.search.eta,
            "shares": self.halving.shares,
            "rows": self.config.search.rows,
            "sampler": self.config.search.sampler,
            "trained": self.trained,
            "importances": dict(importances or {}),
            "members": [
                self._row(trial, settings, standing)
                for trial, settings, standing in zip(trials, self.settings, standings, strict=True)
            ],
            "waves": [asdict(wave) for wave in self.waves],
        }
        files.write_json(self.run.path / TABLE, table)

    def write_importances(self) -> None:
        """Write search.json with what each setting explains."""
        search = self.config.search
        shares = optuna_proposals.importances(search, self.settings, self.standings, seed=self.config.seed)
        self.write(importances=shares)

    def _row(self, trial: Trial[RunConfig], settings: Mapping[str, Any], standing: Standing) -> dict[str, Any]:
        row = member_results.row(trial, Run(self.run.path / "members" / trial.name, None, resumed=True))
        top = self.halving.top
        losses = [standing.get(rung) for rung in range(top + 1)]
        status = row["status"]
        if standing and status == "training":
            status = "stopped"
        return {
            **row,
            "settings": dict(settings),
            "status": status,
            "losses": [loss if loss is not None and math.isfinite(loss) else None for loss in losses],
        }

    def _begun(self, wave: Round) -> WaveRecord:
        """The record of a wave, with settings proposed for its new trials."""
        first, search = len(self.settings), self.config.search
        proposed = optuna_proposals.propose(
            search, self.settings, self.standings, count=wave.new, seed=self.config.seed
        )
        trials = self.trials
        moves = [*wave.moves, *(Move(first + place, 0) for place in range(len(proposed)))]
        done = self.run.ranks.agreed(
            [len(metrics_log.read(self.member(trials[trial]).path)) for trial, _ in wave.moves]
        )
        self.settings += proposed
        return WaveRecord([each.trial for each in moves], [each.rung for each in moves], [*done, *[0] * len(proposed)])


def read(config: RunConfig, run: Run) -> Board:
    """The state of a search that goes on, or of one that begins."""
    board = Board(config, run)
    table = run.ranks.agreed(files.read_json(run.home / TABLE) if run.resumed else {})
    board.settings = [each["settings"] for each in table.get("members", ())]
    board.waves = [WaveRecord(**each) for each in table.get("waves", ())]
    return board
