"""The runs of a folder, as a list shows them and as a page about one of them does."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.cli.ui import step_files
from workbench.cli.ui.metric_files import MetricFiles, last_rows
from workbench.config.yaml_text import read_yaml
from workbench.errors import WorkbenchError
from workbench.runs import evaluation_request, files, run_log, task_scores, trust

_WRITING = ("sft", "prefer", "reinforce")
"""Recipes whose models answer prompts."""
RECENT = 20
"""Steps whose mean time tells how long the others will take."""

_SUMMARISED = ("manifest.json", "scores.json", "before.json", "config.yaml", "metrics.jsonl", "report.html", "adapter")
"""Files that a summary is made of."""

Facts = dict[str, Any]


class RunFolder:
    """A folder of run directories. A run is known by the name of its directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricFiles()
        self._configs: dict[Path, tuple[int, Facts]] = {}
        self._ended: dict[str, tuple[object, Facts]] = {}

    def run(self, name: str) -> Path | None:
        """The directory of a run; None where there is none of that name."""
        path = self.path / name
        plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        return path if plain and (path / "manifest.json").is_file() else None

    def curves(self, name: str) -> list[str]:
        """Everything in a run that has metrics of its own: "" for the run, and its members by their folder."""
        path = self.path / name
        members = sorted(each.parent.relative_to(path).as_posix() for each in path.glob("members/**/metrics.jsonl"))
        return [*([""] if (path / "metrics.jsonl").exists() or not members else []), *members]

    def metric_path(self, name: str, curve: str) -> Path | None:
        """The metrics.jsonl of a curve; None where there is none of that name."""
        path = self.run(name)
        return path / curve / "metrics.jsonl" if path is not None and curve in ("", *self.curves(name)) else None

    def config(self, name: str) -> Facts:
        """The values of a run's config.yaml; empty where there are none."""
        path = self.path / name / "config.yaml"
        try:
            changed = path.stat().st_mtime_ns
            if self._configs.get(path, (0,))[0] != changed:
                self._configs[path] = changed, read_yaml(path)
            return self._configs[path][1]
        except (OSError, WorkbenchError):
            return {}

    def summaries(self) -> list[Facts]:
        """A line for each run, the newest first."""
        run_facts = [self._known(path.parent.name) for path in self.path.glob("*/manifest.json")]
        return sorted(run_facts, key=lambda run: str(run.get("created") or ""), reverse=True)

    def _known(self, name: str) -> Facts:
        """The summary of a run; one that has ended is read again only when its files have changed."""
        files_now = _changed(self.path / name)
        if name in self._ended and self._ended[name][0] == files_now:
            return self._ended[name][1]
        facts = self.summary(name)
        if facts["status"] != "running":
            self._ended[name] = files_now, facts
        return facts

    def summary(self, name: str) -> Facts:
        """Facts of a run for a list: how it stands, what it is, how far it came."""
        path = self.path / name
        try:
            manifest, scores = files.read_json(path / "manifest.json"), files.read_json(path / "scores.json")
            scores = scores or {"before": files.read_json(path / "before.json").get("scores", {})}
            progress = self._progress(name, manifest)
        except (WorkbenchError, OSError) as error:
            return {"name": name, "status": "damaged", "reason": str(error)}
        values = self.config(name)
        status = _status(path, manifest)
        facts = {
            "name": name,
            "status": status,
            "reason": manifest.get("reason"),
            "created": manifest.get("created"),
            "recipe": values.get("recipe"),
            "model": _part(values, "model").get("id"),
            "method": _part(values, "adapter").get("method"),
            "before": _number(_part(scores, "before").get("loss")),
            "after": _number(_part(scores, "after").get("loss")),
            "report": (path / "report.html").is_file(),
            "log": (path / run_log.NAME).is_file(),
            "adapter": (path / "adapter").is_dir(),
            "refuses_request": evaluation_request.refusal(values),
            "resumable": status in ("stopped", "interrupted", "failed") and any(path.rglob("checkpoints/step-*")),
            **progress,
        }
        return facts if status == "running" else {**facts, "left_s": None}

    def _progress(self, name: str, manifest: Mapping[str, Any]) -> Facts:
        """Steps, speed and memory; of members, of the one that came farthest."""
        steps = _part(manifest, "batch").get("steps")
        newest: list[dict[str, float]] = []
        for curve in self.curves(name):
            rows = last_rows(self.path / name / curve / "metrics.jsonl", RECENT + 1)
            if rows and (not newest or rows[-1].get("step", 0) > newest[-1].get("step", 0)):
                newest = rows
        last = newest[-1] if newest else {}
        elapsed = _number(manifest.get("elapsed_s")) or _number(last.get("elapsed_s"))
        return {
            "step": _number(last.get("step")),
            "steps": steps,
            "loss": _number(last.get("loss")),
            "tokens_per_second": _number(last.get("tokens_per_second")),
            "peak_bytes": _number(manifest.get("peak_bytes")) or _number(last.get("peak_bytes")),
            "elapsed_s": elapsed,
            "left_s": _left(newest, steps),
        }

    def page(self, name: str) -> Facts:
        """Everything about a run but its curves."""
        path = self.path / name
        text = path / "config.yaml"
        return {
            **self.summary(name),
            "curves": self.curves(name),
            "scores": task_scores.without(files.read_json(path / "scores.json")),
            "tasks": task_scores.read(path).get("rows", []),
            "facts": files.read_json(path / "manifest.json"),
            "config": text.read_text(encoding="utf-8", errors="replace") if text.is_file() else "",
            "code": trust.code(self.config(name)),
            "tables": sorted(each.stem for each in path.glob("*.parquet")),
            "no_samples": _no_samples(self.config(name)),
        }

    def samples(self, name: str) -> list[Facts]:
        """The sample answers of a run."""
        return step_files.samples(self.path / name)

    def layers(self, name: str) -> Facts:
        """Which layers of a run train, and trained when."""
        return step_files.layers(self.path / name, files.read_json(self.path / name / "manifest.json"))

    def marks(self, name: str) -> Facts:
        """Sizes of these files, by which a page knows that they changed, and whether an evaluation is asked for."""
        path = self.path / name
        asked = {"asked": True} if evaluation_request.is_open(path) else {}
        return {**step_files.marks(path), **asked}

    def differences(self, names: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Settings that are not the same in all of some runs, with their value in each."""
        configs = [flat(self.config(name)) for name in names]
        keys = dict.fromkeys(key for each in configs for key in each)
        rows = [(key, [each.get(key, "") for each in configs]) for key in keys]
        return [(key, values) for key, values in rows if len(set(values)) > 1]

    def table(self, name: str, table: str, *, first: int, count: int) -> Facts | None:
        """Rows of a parquet file of a run, as text and numbers; None where there is none of that name."""
        import pyarrow.parquet as pq

        path = self.path / name / f"{table}.parquet"
        if table not in {each.stem for each in (self.path / name).glob("*.parquet")}:
            return None
        whole = pq.read_table(path)
        rows = whole.slice(first, count).to_pydict()
        cells = [[_cell(value) for value in column] for column in rows.values()]
        return {"columns": list(rows), "rows": list(zip(*cells, strict=True)), "first": first, "of": whole.num_rows}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings by their key, such as `train.epochs`, with their value as JSON."""
    flattened: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flattened


def is_live(path: Path) -> bool:
    """Whether a process works on a run: it holds the directory's lock."""
    try:
        with (path / "run.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _status(path: Path, manifest: Mapping[str, Any]) -> str:
    status = str(manifest.get("status", "unknown"))
    return "interrupted" if status == "running" and not is_live(path) else status


def _left(rows: Sequence[Mapping[str, float]], steps: Any) -> float | None:
    """Seconds of the steps that are left, each as long as the last ones were on average."""
    if len(rows) < 2 or not isinstance(steps, int):
        return None
    spent = rows[-1].get("elapsed_s", math.nan) - rows[0].get("elapsed_s", math.nan)
    done = rows[-1]["step"] - rows[0]["step"]
    return _number((steps - rows[-1]["step"]) * spent / done if done > 0 else math.nan)


def _changed(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """Time and size of the files that a summary is made of."""
    stamps: list[tuple[int, int] | None] = []
    for name in _SUMMARISED:
        try:
            now = (path / name).stat()
            stamps.append((now.st_mtime_ns, now.st_size))
        except OSError:
            stamps.append(None)
    return tuple(stamps)


def _no_samples(values: Mapping[str, Any]) -> str | None:
    """Why a run whose model writes text has no sample answers, and what to write; None for another."""
    evaluate = _part(values, "evaluate")
    if values.get("recipe") not in _WRITING or "samples" not in evaluate:
        return None
    if evaluate["samples"] == 0:
        return "evaluate.samples=3 has the model answer three held-out prompts at each evaluation."
    if evaluate.get("every") is None:
        return "Held-out prompts are answered at each evaluation, and evaluate.every=null asks for none."
    return None


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _cell(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return json.dumps(value, ensure_ascii=False, default=str)
