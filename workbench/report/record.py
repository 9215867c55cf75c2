"""A run directory read back: whatever of it is there, also of a run that lives, was stopped or failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench import files
from workbench.errors import ConfigError, FileError
from workbench.schema import read_yaml

COLUMNS = (
    "step",
    "loss",
    "held_out_loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "supervised_tokens",
    "tokens_per_second",
    "peak_bytes",
    "elapsed_s",
)
"""What a line of metrics.jsonl may hold; `tokens` and `supervised_tokens` are those of that step alone."""


@dataclass(frozen=True)
class Record:
    """What a run directory holds. A part that is not there yet is empty."""

    folder: Path
    name: str
    config_text: str
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    metrics: pd.DataFrame
    """One row per step with COLUMNS, all float64; NaN where a line lacks the value."""
    scores: Mapping[str, Mapping[str, float]]
    predictions: pd.DataFrame

    @property
    def classifies(self) -> bool:
        """Whether the run gave rows labels, rather than writing text."""
        return self.config.get("recipe") == "classify"

    @property
    def unit(self) -> str:
        """Of the losses."""
        if not self.classifies:
            return "nats per token"
        number = self.config.get("classes", {}).get("kind") == "number"
        return "squared error in label variances" if number else "nats per row"

    @property
    def held_out(self) -> pd.DataFrame:
        """The rows of `metrics` after which the held-out loss was measured."""
        return self.metrics.dropna(subset=["held_out_loss"])

    @property
    def best_step(self) -> tuple[int, float] | None:
        """Step and value of the lowest held-out loss measured while training."""
        if self.held_out.empty:
            return None
        row = self.held_out.loc[self.held_out["held_out_loss"].idxmin()]
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
        norms = self.metrics["grad_norm"].dropna()
        limit = self.config.get("train", {}).get("max_grad_norm")
        return None if norms.empty or limit is None else float((norms > limit).mean())

    def difference(self, score: str) -> float | None:
        """Score after minus score before, where both were measured."""
        before, after = (self.scores.get(when, {}).get(score) for when in ("before", "after"))
        return None if before is None or after is None else after - before

    def chance(self, score: str) -> float | None:
        """Half the 95 % interval of the difference of an answer score, paired over the answered rows."""
        if f"{score}_after" not in self.predictions or len(self.predictions) < 2:
            return None
        paired = self.predictions[f"{score}_after"] - self.predictions[f"{score}_before"]
        return float(1.96 * paired.std(ddof=1) / np.sqrt(len(paired)))

    def _so_far(self, fact: str) -> float | None:
        found = self.manifest.get(fact)
        if found is None and self.metrics[fact].notna().any():
            return float(self.metrics[fact].max())
        return found


def read(folder: Path) -> Record:
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
    before = {"before": files.read_json(folder / "before.json").get("scores", {})}
    metrics, predictions = folder / "metrics.jsonl", folder / "predictions.parquet"
    return Record(
        folder=folder,
        name=manifest.get("name") or folder.resolve().name,
        config_text=(folder / "config.yaml").read_text(encoding="utf-8"),
        config=read_yaml(folder / "config.yaml"),
        manifest=manifest,
        metrics=_read(metrics, _metrics),
        scores=files.read_json(folder / "scores.json") or before,
        predictions=_read(predictions, pd.read_parquet) if predictions.exists() else pd.DataFrame(),
    )


def _read(path: Path, reader: Callable[[Path], pd.DataFrame]) -> pd.DataFrame:
    try:
        return reader(path)
    except ValueError as error:  # JSON, numbers and Arrow files that are damaged
        raise FileError(f"{path}: damaged ({error}). Restore it, or delete it: the report does without.") from None


def _metrics(path: Path) -> pd.DataFrame:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # A live run may be in the middle of its last line: only what ends in a line break is whole.
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return pd.DataFrame(rows).reindex(columns=list(COLUMNS)).astype(float)
