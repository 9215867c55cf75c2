"""The runs of a folder as a page shows them: a list, one run, its curves, sample answers and layers.

Legend: N rows.
"""

from __future__ import annotations

import base64
import fcntl
import json
import math
import os
import shlex
import threading
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from workbench import bounds
from workbench.config.yaml_text import read_yaml
from workbench.errors import ConfigError, FileError, WorkbenchError
from workbench.runs import evaluation_request, files, resume_command, run_log, score_files, trust

RECENT = 20
"""The time left is estimated from the mean of so many last steps."""

NOTES = "notes.json"
"""File with the tags and the note that people gave a run; the page alone reads it."""
_MOST_TAGS, _TAG, _NOTE = 10, 40, 2000
"""Tags of a run, and characters of a tag and of a note."""
_SUMMARISED = (
    *("manifest.json", "scores.json", "before.json", "config.yaml", "metrics.jsonl", "report.html", "adapter"),
    NOTES,
)
"""Files that a summary is made of."""

Facts = dict[str, Any]


class RunFolder:
    """A folder of run directories. A run is known by the name of its directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metric_file = lru_cache(_FILES_KEPT)(MetricFile)
        self._configs: dict[Path, tuple[int, Facts]] = {}
        self._ended: dict[str, tuple[object, Facts]] = {}

    def run(self, name: str) -> Path | None:
        """The directory of a run; None where there is none of that name."""
        path = self.path / name
        plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        return path if plain and os.path.isfile(path / "manifest.json") else None

    def curves(self, name: str) -> list[str]:
        """Everything in a run with its own metrics: "" for the run itself, and members by their folders."""
        path = self.path / name
        members = sorted(each.parent.relative_to(path).as_posix() for each in path.glob("members/**/metrics.jsonl"))
        return [*([""] if (path / "metrics.jsonl").exists() or not members else []), *members]

    def metric_path(self, name: str, curve: str) -> Path | None:
        """The metrics.jsonl of a curve; None where there is none of that name."""
        path = self.run(name)
        return path / curve / "metrics.jsonl" if path is not None and curve in ("", *self.curves(name)) else None

    def metrics(self, path: Path) -> MetricFile:
        """A metrics.jsonl, up to its last whole row; raises FileError where it is damaged."""
        file = self._metric_file(path)
        file.refresh()
        return file

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
        """Facts of each run, newest first."""
        run_facts = [self._known(path.parent.name) for path in self.path.glob("*/manifest.json") if path.is_file()]
        return sorted(run_facts, key=lambda run: str(run.get("created") or ""), reverse=True)

    def _known(self, name: str) -> Facts:
        """The summary of a run; cached for runs that have ended, until their files change."""
        files_now = _changed(self.path / name)
        if name in self._ended and self._ended[name][0] == files_now:
            return self._ended[name][1]
        facts = self.summary(name)
        if facts["status"] != "running":
            self._ended[name] = files_now, facts
        return facts

    def summary(self, name: str) -> Facts:
        """Facts of a run for the list: status, recipe, model, scores, progress."""
        path = self.path / name
        try:
            manifest, scores = files.read_json(path / "manifest.json"), files.read_json(path / "scores.json")
            scores = scores or {"before": files.read_json(path / "before.json").get("scores", {})}
            steps = _part(manifest, "batch").get("steps")
            newest: list[dict[str, float]] = []
            for curve in self.curves(name):
                rows = last_rows(self.path / name / curve / "metrics.jsonl", RECENT + 1)
                if rows and (not newest or rows[-1].get("step", 0) > newest[-1].get("step", 0)):
                    newest = rows
            last = newest[-1] if newest else {}
            elapsed = _number(manifest.get("elapsed_s")) or _number(last.get("elapsed_s"))
            progress = {
                "step": _number(last.get("step")),
                "steps": steps,
                "loss": _number(last.get("loss")),
                "tokens_per_second": _number(last.get("tokens_per_second")),
                "peak_bytes": _number(manifest.get("peak_bytes")) or _number(last.get("peak_bytes")),
                "elapsed_s": elapsed,
                "left_s": _left(newest, steps),
            }
        except (WorkbenchError, OSError) as error:
            return {"name": name, "status": "damaged", "reason": str(error)}
        values = self.config(name)
        status = str(manifest.get("status", "unknown"))
        status = "interrupted" if status == "running" and not is_live(path) else status
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
            "score": main_score(values, scores),
            **notes(path),
            "report": (path / "report.html").is_file(),
            "log": (path / run_log.NAME).is_file(),
            "adapter": (path / "adapter").is_dir(),
            "writes": bool(_task_fact(values, "writes_text")),
            "refuses_request": evaluation_request.refusal(values),
            "resumable": status in ("stopped", "interrupted", "failed") and any(path.rglob("checkpoints/step-*")),
            **progress,
        }
        return facts if status == "running" else {**facts, "left_s": None}

    def page(self, name: str) -> Facts:
        """Everything about a run except its curves."""
        path = self.path / name
        text = path / "config.yaml"
        return {
            **self.summary(name),
            "curves": self.curves(name),
            "scores": score_files.of_rows(files.read_json(path / "scores.json")),
            "tasks": score_files.read_tasks(path).get("rows", []),
            "facts": files.read_json(path / "manifest.json"),
            "config": text.read_text(encoding="utf-8", errors="replace") if text.is_file() else "",
            "code": trust.code(self.config(name)),
            "tables": sorted(each.stem for each in path.glob("*.parquet")),
            "no_samples": _no_samples(self.config(name)),
            "members": self.members(name),
            "plays": bool(_part(_part(self.config(name), "reinforce"), "tools")),
            "commands": self.commands(name),
        }

    def members(self, name: str) -> Facts:
        """What a sweep, a search, a fleet or folds say of each adapter: `head` and `rows`, each row with its `curve`
        (None where it has none), whether it is `shipped`, and its `cells`; empty for other runs."""
        from workbench.config.task_facts import over_of

        path, values = self.path / name, self.config(name)
        over = over_of(values)
        table = files.read_json(path / (over.table or "stages.json")) if over is not None else {}
        rows = table.get("members") or table.get("folds")
        rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        curves = {curve.rpartition("/")[2]: curve for curve in self.curves(name)}
        cells = [_member(values, row) for row in rows]
        head = list(dict.fromkeys(column for each in cells for column in each))
        return {
            "head": head,
            "rows": [
                {
                    "curve": curves.get(str(row.get("member"))),
                    "shipped": row.get("member") == table.get("best"),
                    "cells": [_cell(each.get(column)) for column in head],
                }
                for row, each in zip(rows, cells, strict=True)
            ],
        }

    def commands(self, name: str) -> list[str]:
        """Commands of a terminal for everything that can be done with a run as it is."""
        facts, path = self.summary(name), self.path / name
        run, verbs = str(path), list[list[str]]()
        if facts.get("adapter"):
            verbs = [["evaluate", run], ["merge", run, "--out", f"{name}-merged"]]
            verbs += [["generate", run, "What have you learnt?"]] if facts["writes"] else []
            verbs += [["predict", run, "INPUT", "--out", f"{name}.parquet"]] if self._fact(name, "predicts") else []
            verbs += [["serve", run]] if self._fact(name, "serves") else []
        resume = [resume_command.finish(path)] if facts.get("resumable") else []
        return [*resume, *(shlex.join(["workbench", *words]) for words in verbs)]

    def _fact(self, name: str, fact: str) -> Any:
        return _task_fact(self.config(name), fact)

    def annotate(self, name: str, tags: Any, note: Any) -> None:
        """Keep tags and a note for a run, in a file beside it; raises ConfigError where they are malformed."""
        plain = isinstance(tags, list) and all(isinstance(tag, str) and 0 < len(tag.strip()) <= _TAG for tag in tags)
        if not plain or len(tags) > _MOST_TAGS or not isinstance(note, str) or len(note) > _NOTE:
            raise ConfigError(
                f"tags: expected at most {_MOST_TAGS} of at most {_TAG} characters; note: at most {_NOTE:,} characters."
            )
        files.write_json(self.path / name / NOTES, {"tags": list(dict.fromkeys(map(str.strip, tags))), "note": note})

    def samples(self, name: str) -> list[Facts]:
        """The sample answers of a run, each with the `picture` of its row where there is one."""
        prompts = sample_answers(self.path / name)
        pictures = self.pictures(name, {prompt["row"] for prompt in prompts})
        return [{**prompt, "picture": pictures.get(prompt["row"])} for prompt in prompts]

    def pictures(self, name: str, rows: Collection[str]) -> dict[str, str]:
        """Small pictures of some rows, spectrograms of recordings among them, as addresses that hold them."""
        import pyarrow.parquet as pq

        path = self.path / name / "pictures.parquet"
        if not rows or not path.is_file():
            return {}
        with suppress(OSError, ValueError, TypeError):  # rows are worth more than a damaged file of pictures
            known = pq.read_table(path, columns=["row", "kind", "jpeg"]).to_pylist()
            shown = {each["row"]: each["jpeg"] for each in known if each["kind"] == "row" and each["row"] in rows}
            return {row: f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}" for row, jpeg in shown.items()}
        return {}

    def layers(self, name: str) -> Facts:
        """Which layers of a run trained in which steps."""
        return training_layers(self.path / name, files.read_json(self.path / name / "manifest.json"))

    def marks(self, name: str) -> Facts:
        """Sizes of samples.jsonl and layers.jsonl, which show a change, and whether an evaluation is requested."""
        path = self.path / name
        asked = {"asked": True} if evaluation_request.is_open(path) else {}
        return {**step_marks(path), **asked}

    def differences(self, names: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Settings that differ between runs, with their value in each."""
        configs = [flat(self.config(name)) for name in names]
        keys = dict.fromkeys(key for each in configs for key in each)
        rows = [(key, [each.get(key, "") for each in configs]) for key in keys]
        return [(key, values) for key, values in rows if len(set(values)) > 1]

    def table(self, name: str, table: str, *, first: int, count: int) -> Facts | None:
        """Rows of a parquet file of a run, as text and numbers; None where there is none of that name."""
        import pyarrow.parquet as pq

        path = self.path / name / f"{table}.parquet"
        if table not in {each.stem for each in (self.path / name).glob("*.parquet") if each.is_file()}:
            return None
        whole = pq.read_table(path)
        rows = whole.slice(first, count).to_pydict()
        cells = [[_cell(value) for value in column] for column in rows.values()]
        pictures = self.pictures(name, {row for row in rows.get("row", ()) if isinstance(row, str)})
        page = {"columns": list(rows), "rows": list(zip(*cells, strict=True)), "first": first, "of": whole.num_rows}
        return {**page, "pictures": pictures}


def notes(path: Path) -> Facts:
    """The tags and the note of a run; none where the file is damaged or is no plain one."""
    try:
        found = files.read_json(path / NOTES)
    except (WorkbenchError, OSError):
        found = {}
    tags, note = found.get("tags"), found.get("note")
    return {
        "tags": [str(tag)[:_TAG] for tag in tags[:_MOST_TAGS]] if isinstance(tags, list) else [],
        "note": note[:_NOTE] if isinstance(note, str) else "",
    }


def main_score(values: Mapping[str, Any], scores: Mapping[str, Any]) -> Facts | None:
    """The score that a run is judged by, before and after, with its 95 % interval, and whether that is better.

    It is the metric that `evaluate.metric` names, or the score of the task, or, where that is the loss, the first
    score with an interval. None where there is none.

    Returns:
        `name`, `before`, `after`, `low`, `high` (None where unknown) and `better`: True, False, or None where `before`
        lies in the interval or one of the two was not measured.
    """
    from workbench.config.sections.metrics import choice
    from workbench.report import score_titles

    evaluate, before, after = _part(values, "evaluate"), _part(scores, "before"), _part(scores, "after")
    own = [name.removesuffix("_low") for name in {**after, **before} if name.endswith("_low")]
    own, judge = [str(_task_fact(values, "score")), *own], None
    with suppress(ValueError):  # a file of somebody else's may name anything
        if isinstance(metric := evaluate.get("metric"), str):
            judge = choice(metric, evaluate.get("better"))
            own = [judge.name, *own]
    titles = score_titles.of(_task_fact(values, "report") or "text", judge=judge)
    name = next((each for each in own if each != "loss" and each in {**before, **after}), None)
    if name is None:
        return None
    was, now, low, high = (
        *(_number(each.get(name)) for each in (before, after)),
        *(_number((after if name in after else before).get(f"{name}_{end}")) for end in ("low", "high")),
    )
    chance = low is not None and high is not None and was is not None and low <= was <= high
    falls = titles.get(name, ("", "high"))[1] == "low"
    better = None if was is None or now is None or was == now or chance else (now < was) == falls
    return {"name": name, "before": was, "after": now, "low": low, "high": high, "better": better}


def _task_fact(values: Mapping[str, Any], fact: str) -> Any:
    """A fact about the task of a run; None where nobody knows the task."""
    from workbench.config.task_facts import task_of

    return getattr(task_of(values), fact, None)


def _member(values: Mapping[str, Any], row: Mapping[str, Any]) -> Facts:
    """Columns of a member or fold, in words."""
    name = str(row.get("member", ""))
    scores = _part(row, "scores")
    score = main_score(values, {"after": _part(scores, "after") or scores}) or {}
    loss = row.get("held_out_loss", _part(row, "scores").get("loss"))
    cells = {"adapter": name, **{key.rpartition(".")[2]: value for key, value in _part(row, "settings").items()}}
    cells |= {key: row[key] for key in ("repeat", "fold", "seed", "rows", "steps", "status") if key in row}
    cells |= {"held-out loss": loss}
    if score.get("after") is not None:
        bounds_ = "" if None in (score["low"], score["high"]) else f" ({score['low']:.3f} to {score['high']:.3f})"
        cells |= {score["name"]: f"{score['after']:.4g}{bounds_}"}
    return cells


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings by dotted key, such as `train.epochs`, with their value as JSON."""
    flattened: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flattened


def is_live(path: Path) -> bool:
    """Whether a process works on a run, by the directory's lock."""
    try:
        with bounds.opened(path / "run.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _left(rows: Sequence[Mapping[str, float]], steps: Any) -> float | None:
    """Seconds until the last step, at the mean pace of `rows`."""
    if len(rows) < 2 or not isinstance(steps, int):
        return None
    spent = rows[-1].get("elapsed_s", math.nan) - rows[0].get("elapsed_s", math.nan)
    done = rows[-1]["step"] - rows[0]["step"]
    return _number((steps - rows[-1]["step"]) * spent / done if done > 0 else math.nan)


def _changed(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """Modification time and size of the files that a summary depends on."""
    stamps: list[tuple[int, int] | None] = []
    for name in _SUMMARISED:
        try:
            now = (path / name).stat()
            stamps.append((now.st_mtime_ns, now.st_size))
        except OSError:
            stamps.append(None)
    return tuple(stamps)


def _no_samples(values: Mapping[str, Any]) -> str | None:
    """Why a run whose model writes text has no sample answers, and what to write; None for other runs."""
    from workbench.config.task_facts import over_of, task_of  # with every section, which a list need not wait for

    evaluate = _part(values, "evaluate")
    task = task_of(values)
    if task is None or not task.writes_text or over_of(values) is not None or "samples" not in evaluate:
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
    """A value as JSON, floats with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return json.dumps(value, ensure_ascii=False, default=str)


SAMPLES, LAYERS = "samples.jsonl", "layers.jsonl"
STEPS = 200
"""Number of newest steps whose answers are sent."""
CHANGES = 400
"""Most changes of the trained layers that are sent; of more, evenly spaced ones."""
LONGEST_TEXT = 4000
"""Most characters of a text that are sent."""
_STEP_BYTES = 2**23
"""Bytes of the end of a file that are read."""


def step_marks(path: Path) -> dict[str, int]:
    """Sizes of samples.jsonl and layers.jsonl, where they exist; a page reads a file again when its size changes."""
    sizes = {}
    for name in (SAMPLES, LAYERS):
        try:
            sizes[name.partition(".")[0]] = (path / name).stat().st_size
        except OSError:
            continue
    return sizes


def sample_answers(path: Path) -> list[Facts]:
    """The sample prompts of a run, each with its answers, newest first."""
    prompts: dict[str, Facts] = {}
    for line in _step_lines(path / SAMPLES):
        row = str(line.get("row", ""))
        own = prompts.setdefault(row, {"row": row, "prompt": "", "reference": "", "answers": []})
        own |= {"prompt": _cut(line.get("prompt")), "reference": _cut(line.get("reference"))}
        own["answers"].append({"step": line["step"], "answer": _cut(line.get("answer"))})
    for own in prompts.values():
        first, rest = own["answers"][:1], own["answers"][1:]
        own["answers"] = [*rest[: -STEPS - 1 : -1], *first]  # the answer before training stays, for comparison
    return list(prompts.values())


def training_layers(path: Path, manifest: Mapping[str, Any]) -> Facts:
    """The parts of each layer, and which layers train from which step on; empty where a run does not record it.

    Args:
        manifest: Of the run; lists the blocks that progressive stacking adds.
    """
    lines = list(_step_lines(path / LAYERS, whole=True))
    table = lines[0].get("layers") if lines else None
    if not isinstance(table, list):
        return {}
    for each in table:
        if not (isinstance(each, dict) and isinstance(each.get("parts"), dict) and isinstance(each.get("layer"), int)):
            return {}
    changes = [[line["step"], str(line.get("trains", ""))] for line in lines]
    changes = _grown(manifest, len(changes[0][1])) or changes
    thinned = changes[:: -(-len(changes) // CHANGES)]
    changes = thinned if thinned[-1] is changes[-1] else [*thinned, changes[-1]]
    return {"layers": table, "changes": changes}


def _grown(manifest: Mapping[str, Any], count: int) -> list[list[Any]]:
    """The changes of a run with progressive stacking; empty for others."""
    grow = manifest.get("grow")
    if not isinstance(grow, Mapping) or not isinstance(grow.get("first"), int):
        return []
    there = [(0, grow["first"]), *((each["step"] + 1, each["blocks"]) for each in grow.get("stackings", []))]
    return [[step, "1" + ("1" * blocks).ljust(count - 2, "0")[: count - 2] + "1"] for step, blocks in there]


def _cut(value: Any) -> str:
    text = str(value or "")
    return (
        text
        if len(text) <= LONGEST_TEXT
        else f"{text[:LONGEST_TEXT]} ... ({len(text) - LONGEST_TEXT:,} more characters)"
    )


def _step_lines(path: Path, *, whole: bool = False) -> Iterator[Facts]:
    """The JSON objects with a step in the last lines of a file, or with `whole` in all lines."""
    try:
        with bounds.opened(path) as file:
            size = file.seek(0, 2)
            first = 0 if whole else max(0, size - _STEP_BYTES)
            file.seek(first)
            text = file.read()
    except OSError:
        return
    for line in text.split(b"\n")[1 if first else 0 : -1]:  # a live run may be in the middle of its last line
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record


POINTS = 4000
"""Most rows that are sent; of more, each is the mean of several."""
_FILES_KEPT = 64
"""Files that are kept in memory."""
_ROW_BYTES = 1024
"""Upper bound of the bytes of a row."""
_LAST = ("step", "tokens_seen", "elapsed_s")
"""Columns that only grow: of several rows the last value is sent."""

Columns = dict[str, list[float | None]]


class MetricFile:
    """One metrics.jsonl, read incrementally; a file that was replaced, as by a resumed run, is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget(0)

    def _forget(self, inode: int) -> None:
        self._inode = inode
        self._ends = array("q")
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        """Read new rows; raises FileError for a damaged line."""
        with self._lock:
            try:
                with bounds.opened(self._path) as file:
                    self._read(file)
            except FileNotFoundError:
                self._forget(0)

    def _read(self, file: IO[bytes]) -> None:
        file_stat = os.fstat(file.fileno())
        if file_stat.st_ino != self._inode or file_stat.st_size < self._offset:
            self._forget(file_stat.st_ino)
        file.seek(self._offset)
        text = file.read(file_stat.st_size - self._offset)
        lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)  # the last line may be half written
        try:
            columns = _parsed(lines)
            rows = len(lines)
            seen = self._columns.get("tokens_seen")
            tokens_N = np.nan_to_num(columns.get("tokens", np.zeros(rows)))
            columns["tokens_seen"] = (seen[-1] if seen else 0.0) + np.cumsum(tokens_N)
            count, unknown_N = len(self._ends), np.full(rows, math.nan)
            for name in columns.keys() | self._columns.keys():
                column = self._columns.setdefault(name, array("d", [math.nan]) * count)
                column.frombytes(columns.get(name, unknown_N).tobytes())
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(f"{self._path}: damaged ({error}).") from None
        self._ends.extend((self._offset + np.cumsum([len(line) for line in lines], dtype=np.int64)).tolist())

    @property
    def _offset(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def position(self) -> str:
        """How far was read: the file's inode, and the number of bytes."""
        return f"{self._inode:x}.{self._offset}"

    def after(self, position: str | None) -> tuple[bool, Columns]:
        """Whether `position` is in this file, and the rows after it; otherwise all rows."""
        with self._lock:
            inode, _, offset = (position or "").partition(".")
            if inode == f"{self._inode:x}" and offset.isdigit():
                first = bisect_left(self._ends, int(offset))
                if first < len(self._ends) and self._ends[first] == int(offset):
                    return True, self._sent(first + 1)
            return False, self._sent(0)

    def _sent(self, first: int) -> Columns:
        columns = {name: np.array(column[first:]) for name, column in self._columns.items()}
        return {
            name: [float(f"{value:.7g}") if math.isfinite(value) else None for value in values_N.tolist()]
            for name, values_N in thinned(columns).items()
        }


def last_rows(path: Path, rows: int) -> list[dict[str, float]]:
    """At most so many newest rows, read from the end of the file: a list shows many runs."""
    try:
        with bounds.opened(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - rows * _ROW_BYTES))
            text = file.read()
    except FileNotFoundError:
        return []
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    whole = lines[1:] if size > rows * _ROW_BYTES else lines
    try:
        records = [json.loads(line) for line in whole[-rows:]]
        return [{key: value for key, value in row.items() if isinstance(value, (int, float))} for row in records]
    except (ValueError, AttributeError, RecursionError) as error:
        raise FileError(f"{path}: damaged ({error}).") from None


def _parsed(lines: list[bytes]) -> dict[str, npt.NDArray[np.float64]]:
    """The columns of lines that hold a JSON object each, NaN where a row has no number."""
    rows = json.loads(b"[" + b",".join(lines) + b"]")
    if len(rows) != len(lines):
        raise ValueError("a line holds several values")
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row.keys()):  # noqa: SIM118, refuses what is no object
        values = [row.get(name) for row in rows]
        numbers = [value if isinstance(value, (int, float)) else math.nan for value in values]
        columns[name] = np.array(numbers, dtype=np.float64)
    return columns


def thinned(columns: dict[str, npt.NDArray[np.float64]]) -> dict[str, npt.NDArray[np.float64]]:
    """At most POINTS rows: means of several rows each, and for the loss also the lowest and highest of them."""
    rows = len(columns.get("step", ()))
    width = -(-rows // POINTS)
    if width <= 1:
        return columns
    downsampled: dict[str, npt.NDArray[np.float64]] = {}
    starts = np.arange(0, rows, width)
    ends = np.append(starts[1:], rows) - 1
    for name, values_N in columns.items():
        if name in _LAST:
            downsampled[name] = values_N[ends]
            continue
        known = np.isfinite(values_N)
        count = np.add.reduceat(known, starts, dtype=np.int64)
        total = np.add.reduceat(np.where(known, values_N, 0.0), starts)
        downsampled[name] = np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)
        if name == "loss":
            downsampled["loss_low"] = np.fmin.reduceat(values_N, starts)
            downsampled["loss_high"] = np.fmax.reduceat(values_N, starts)
    return downsampled
