"""A run directory read back: whatever of it is there, also of a run that lives, was stopped or failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.config.sections.metrics import Choice, choice
from workbench.config.task_facts import OverFacts, over_of, task_of
from workbench.errors import ConfigError, FileError
from workbench.evaluation import held_out_losses
from workbench.report import score_titles
from workbench.runs import files, run_directory, score_files, units

COLUMNS = (
    *("step", "loss", "held_out_loss", "learning_rate", "grad_norm"),
    *("tokens", "supervised_tokens", "tokens_per_second", "data_wait", "peak_bytes", "elapsed_s"),
)
"""Keys of a line of metrics.jsonl; `tokens` and `supervised_tokens` are those of that step alone."""
OPENED = "open_share"
"""Key of the share of the rows that a curriculum has opened, where there is one."""
ASKED = "asked"
"""Key that marks an evaluation that a person asked for."""
_ADDED = ["tokens", "supervised_tokens"]
_HIGHEST = ["peak_bytes", "elapsed_s"]


@dataclass(frozen=True)
class RunRecord:
    """Content of a run directory. A part that is not there yet is empty."""

    folder: Path
    name: str
    config_text: str
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    metrics: pd.DataFrame
    """One row per step with COLUMNS, all float64; NaN where a line lacks the value. Of a cross-validation:
    `together` of `members`."""
    scores: Mapping[str, Mapping[str, float]]
    predictions: pd.DataFrame
    costs: Mapping[str, Any] = field(default_factory=dict)
    """Of a student and its teacher, as in scores.json."""
    drafts: Mapping[str, Any] = field(default_factory=dict)
    """How a student drafts for its teacher, as in scores.json."""
    freezing: Mapping[str, Any] = field(default_factory=dict)
    """Steps before and after layers froze, as in scores.json."""
    members: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """Metrics of each adapter of a cross-validation or sweep, by its folder: round-0/repeat-0-fold-1-seed-0."""
    stages: Mapping[str, Any] = field(default_factory=dict)
    """The stages of a cross-validation, its folds and duplicates, as in stages.json."""
    out_of_fold: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Predictions for each training row by an adapter that did not train on it, one row for each repeat."""
    pictures: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Small pictures of rows, as in pictures.parquet."""
    neighbours: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Training rows nearest to rows worth looking at, as in neighbours.parquet."""
    probe: Mapping[str, Any] = field(default_factory=dict)
    """Scores of the frozen backbone alone, as in probe.json."""
    dynamics: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Losses of training rows over time, as in dynamics.parquet."""
    suspects: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Rows whose label is probably wrong, as in suspects.parquet."""

    @property
    def over(self) -> OverFacts | None:
        """Facts about the recipe, where it is one over tasks."""
        return over_of(self.config)

    @property
    def judge(self) -> Choice | None:
        """The metric that `evaluate.metric` names."""
        evaluate = self.config.get("evaluate")
        with suppress(ValueError):  # a foreign file may name anything
            if isinstance(evaluate, dict) and isinstance(text := evaluate.get("metric"), str):
                return choice(text, evaluate.get("better"))
        return None

    @property
    def _pages(self) -> str:
        """Kind of pages; members of a sweep, search or fleet have pages of their own."""
        task = task_of(self.config)
        return "text" if task is None or (self.over is not None and not self.over.folds) else task.report

    @property
    def titles(self) -> score_titles.Titles:
        """Title and better direction of each score, that of `evaluate.metric` among them; the loss is left out."""
        judge = self.judge if self.classifies else None
        return score_titles.of(self._pages, judge=judge, steps=self.rates_steps)

    @property
    def crossvalidates(self) -> bool:
        """Whether the run scored every training row by a model that did not train on it."""
        return self.over is not None and self.over.folds

    @property
    def classifies(self) -> bool:
        """Whether the run gave rows labels, rather than writing text."""
        return self._pages == "classes"

    @property
    def embeds(self) -> bool:
        """Whether the run embedded texts."""
        return self._pages == "retrieval"

    @property
    def prefers(self) -> bool:
        """Whether the run learnt which answers are better."""
        return self._pages == "preferences"

    @property
    def rewards(self) -> bool:
        """Whether the run rates answers."""
        return self._pages == "rewards"

    @property
    def rates_steps(self) -> bool:
        """Whether the run rates the steps of answers."""
        return self.rewards and self.config.get("reward", {}).get("kind") == "process"

    @property
    def tags(self) -> bool:
        """Whether the run tags words."""
        return self._pages == "tags"

    @property
    def reinforces(self) -> bool:
        """Whether the run learnt from rewards of its own answers."""
        return self._pages == "reinforcement"

    @property
    def reads_pictures(self) -> bool:
        """Whether the rows are pictures, which a backbone cuts into patches instead of tokens."""
        return self._format == "image"

    @property
    def equally_long(self) -> bool:
        """Whether all rows are as many patches or positions, as pictures and recordings are."""
        return self._format in ("image", "audio")

    @property
    def _format(self) -> str:
        return str(self.config.get("data", {}).get("format"))

    @property
    def unit_of_length(self) -> str:
        """Plural of the unit that a page counts in: of what is seen, and a second."""
        return {"image": "pictures", "audio": "recordings"}.get(self._format, "tokens")

    @property
    def tokens_of_unit(self) -> float:
        """The tokens of a unit: all pictures are cut into as many patches, which count as tokens."""
        rows = self.manifest.get("data", {}).get("train") or {}
        return rows["tokens"] / rows["rows"] if self.equally_long and rows.get("rows") else 1

    @property
    def labelled(self) -> pd.DataFrame:
        """The rows that show what the run can do: each once, with its label and what was predicted."""
        if not self.crossvalidates:
            return self.predictions
        rows = self.out_of_fold
        for name in ("repeat", "seed"):
            rows = rows[rows[name] == rows[name].min()] if name in rows else rows
        return rows.reset_index(drop=True)

    @property
    def unit(self) -> str:
        """Unit of the losses."""
        if self.rates_steps:
            return "nats per step"
        if self.embeds or self.rewards:
            return "per row"
        if self.reinforces:
            return "minus the reward"
        if self.prefers:
            return "per example"
        if self.tags:
            return "nats per word"
        if not self.classifies:
            return "nats per token"
        number = self.config.get("classes", {}).get("kind") == "number"
        return "squared error in label variances" if number else "nats per row"

    @property
    def held_out(self) -> pd.DataFrame:
        """The rows of `metrics` after which the held-out loss was measured."""
        return self.metrics.dropna(subset=["held_out_loss"])

    @property
    def held_out_sets(self) -> list[str]:
        """Names of the held-out sets that have a loss of their own."""
        return self.named("held_out_loss")

    def named(self, measure: str) -> list[str]:
        """The names in columns `measure[name]`."""
        known = (name.partition("[") for name in self.metrics.columns)
        return [rest.removesuffix("]") for first, bracket, rest in known if bracket and first == measure]

    @property
    def judged(self) -> pd.DataFrame:
        """The evaluations that decide something: without those that a person asked for."""
        measurements = self.held_out
        return measurements[measurements[ASKED].isna()] if ASKED in measurements else measurements

    @property
    def best_step(self) -> tuple[int, float] | None:
        """Step and value of the lowest held-out loss measured while training, but where a person asked for it."""
        measurements = self.judged
        if measurements.empty:
            return None
        row = measurements.loc[measurements["held_out_loss"].idxmin()]
        return int(row["step"]), float(row["held_out_loss"])

    @property
    def elapsed_s(self) -> float | None:
        """Training time in seconds, so far where the run has not ended."""
        return self._so_far("elapsed_s")

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory in bytes, so far where the run has not ended."""
        return self._so_far("peak_bytes")

    @property
    def clipped(self) -> float | None:
        """Share of the steps whose gradient was longer than train.max_grad_norm."""
        courses = (self.crossvalidates and list(self.members.values())) or [self.metrics]
        norms = pd.concat([each["grad_norm"] for each in courses]).dropna()
        limit = self.config.get("train", {}).get("max_grad_norm")
        return None if norms.empty or limit is None else float((norms > limit).mean())

    @property
    def data_wait(self) -> float | None:
        """Share of the time of the steps that they waited for data."""
        courses = (self.crossvalidates and list(self.members.values())) or [self.metrics]
        known = pd.concat(courses).dropna(subset=["data_wait", "tokens_per_second"])
        took_s = known["tokens"] / known["tokens_per_second"]
        return float(np.average(known["data_wait"], weights=took_s)) if took_s.sum() > 0 else None

    def difference(self, score: str) -> float | None:
        """Score after minus score before, where both were measured."""
        before, after = (self.scores.get(when, {}).get(score) for when in ("before", "after"))
        return None if before is None or after is None else after - before

    def chance(self, score: str) -> float | None:
        """Half the 95 % interval of the difference of the loss or of an answer's score, paired over the rows."""
        if score == "loss":
            learnt = held_out_losses.learnt(self.folder)
            return None if learnt is None or learnt.interval is None else (learnt.interval[1] - learnt.interval[0]) / 2
        if f"{score}_after" not in self.predictions or len(self.predictions) < 2:
            return None
        paired = self.predictions[f"{score}_after"] - self.predictions[f"{score}_before"]
        return float(1.96 * paired.std(ddof=1) / np.sqrt(len(paired)))

    def interval(self, score: str) -> str:
        """The 95 % interval of a score after training, in words; empty where it has none."""
        low, high = self._bounds(score)
        return "" if low is None or high is None else f"{units.number(low)} to {units.number(high)}"

    def may_be_chance(self, score: str) -> bool:
        """Whether a score's 95 % interval after training holds what it was before, or that of its paired change 0."""
        change, chance = self.difference(score), self.chance(score)
        if change is None or chance is not None:
            return change is not None and chance is not None and abs(change) <= chance
        low, high = self._bounds(score)
        return low is not None and high is not None and low <= self.scores["before"][score] <= high

    def _bounds(self, score: str) -> tuple[float | None, float | None]:
        name, bracket, of = score.partition("[")
        low, high = (self.scores.get("after", {}).get(f"{name}_{end}{bracket}{of}") for end in ("low", "high"))
        return low, high

    def _so_far(self, fact: str) -> float | None:
        recorded = self.manifest.get(fact)
        if recorded is None and self.metrics[fact].notna().any():
            return float(self.metrics[fact].max())
        return recorded


def read(folder: Path) -> RunRecord:
    """A run directory as it is now, also while the run lives; raises ConfigError where it is none."""
    missing = [name for name in ("config.yaml", "manifest.json") if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder}: not a run directory, it has no {' and no '.join(missing)}.\n"
            "  A run directory is the folder that `workbench run` writes, such as runs/quickstart.\n"
            "  `workbench ls runs` lists yours."
        )
    manifest = files.read_json(folder / "manifest.json")
    # scores.json comes last; what the backbone scored is on disk from the start.
    scores = files.read_json(folder / "scores.json")
    before = {"before": files.read_json(folder / "before.json").get("scores", {})}
    metric_paths = {
        path.parent.relative_to(folder / "members"): path for path in (folder / "members").glob("**/metrics.jsonl")
    }
    # The rounds in their order, and after them the adapter of all rows.
    order = sorted(metric_paths, key=lambda member: ("refit" in member.parts, member))
    members = {member.as_posix(): _read(metric_paths[member], _metrics) for member in order}
    config = _config(folder)
    return RunRecord(
        folder=folder,
        name=manifest.get("name") or folder.resolve().name,
        config_text=(folder / "config.yaml").read_text(encoding="utf-8"),
        config=config,
        manifest=manifest,
        metrics=merged_records(members)
        if members and (over := over_of(config)) is not None and over.folds
        else _read(folder / "metrics.jsonl", _metrics),
        scores=score_files.of_rows(scores) or before,
        costs=scores.get(score_files.COSTS, {}),
        drafts=scores.get(score_files.DRAFTS, {}),
        freezing=scores.get(score_files.FREEZING, {}),
        predictions=_table(folder / "predictions.parquet"),
        members=members,
        stages=files.read_json(folder / "stages.json"),
        out_of_fold=_table(folder / "out_of_fold.parquet"),
        pictures=_table(folder / "pictures.parquet"),
        neighbours=_table(folder / "neighbours.parquet"),
        probe=files.read_json(folder / "probe.json"),
        dynamics=_table(folder / "dynamics.parquet"),
        suspects=_table(folder / "suspects.parquet"),
    )


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of the adapter that is shipped, from a config.yaml that another version may have written."""
    try:
        return run_directory.shipped_values(folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise run_directory.written_otherwise(folder, f"{type(error).__name__}: {error}.") from None


def rounds(members: Mapping[str, pd.DataFrame]) -> dict[str, list[pd.DataFrame]]:
    """The members' metrics by the round that they trained in."""
    by_round: dict[str, list[pd.DataFrame]] = {}
    for name, own in members.items():
        by_round.setdefault(name.partition("/")[0], []).append(own)
    return by_round


def averaged(metrics: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Metrics of adapters that trained at once, as those of one: the mean of each step, but tokens are added up."""
    grouped = pd.concat(metrics).groupby("step", as_index=False)
    mean = grouped.mean()
    mean[_ADDED] = grouped[_ADDED].sum(min_count=1)[_ADDED]
    mean[_HIGHEST] = grouped[_HIGHEST].max()[_HIGHEST]
    return mean[[*COLUMNS, *([OPENED] if OPENED in mean else [])]]


def merged_records(members: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The rounds of a cross-validation one after another, each `averaged`."""
    parts: list[pd.DataFrame] = []
    done = {"step": 0.0, "elapsed_s": 0.0}
    for own in rounds(members).values():
        part = averaged(own)
        for name in done:
            part[name] += done[name]
            done[name] = float(np.nanmax([done[name], *part[name]]))
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _table(path: Path) -> pd.DataFrame:
    return _read(path, pd.read_parquet) if path.exists() else pd.DataFrame()


def _read(path: Path, reader: Callable[[Path], pd.DataFrame]) -> pd.DataFrame:
    try:
        return reader(path)
    except ValueError as error:  # JSON, numbers and Arrow files that are damaged
        raise FileError(f"{path}: damaged ({error}). Restore it, or delete it: the report does without.") from None


def _metrics(path: Path) -> pd.DataFrame:
    rows = files.whole_lines(path)
    named = dict.fromkeys(name for row in rows for name in row if "[" in name or name in (OPENED, ASKED))
    return pd.DataFrame(rows).reindex(columns=[*COLUMNS, *named]).astype(float)
