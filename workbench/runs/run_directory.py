"""A run directory: one configuration, its lock, its metrics and what it produced."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import psutil
import torch
import yaml

from workbench.config import RunConfig, plugins, sweep_expansion
from workbench.errors import ConfigError, ResumeError, WorkbenchError
from workbench.runs import files
from workbench.runs.ranks import ALONE, Ranks
from workbench.runs.timing import Timer
from workbench.schema import parse, read_yaml

FREE = ("batch.tokens_per_device", "trackers", "save.keep", "budget.time")
"""What another process may be told otherwise when it goes on with a run, besides section `distributed`."""
PACKAGES = ("peft-workbench", "torch", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "safetensors")


class Run:
    """The directory of one run, locked for this process. Layout: see the attributes.

    Where several processes train together the first one writes there. What the others write goes to a folder that is
    removed in the end; what they read of earlier processes is the run's.
    """

    def __init__(
        self, path: Path, lock: IO[str] | None, *, resumed: bool, ranks: Ranks = ALONE, home: Path | None = None
    ) -> None:
        self.path = path
        self.home = home or path
        """Where the run is; `path` is where this process writes."""
        self.ranks = ranks
        """The processes that train together."""
        self.resumed = resumed
        """Whether the directory held a run that this process continues."""
        self.adapter = path / "adapter"
        self.timer: Timer | None = None
        """Its clock, where wall clock limits it."""
        self.checkpoints = self.home / "checkpoints"
        self.best = self.checkpoints / "best"
        self._lock = lock
        self._manifest: dict[str, Any] = files.read_json(self.home / "manifest.json") if resumed else {}
        self._children: dict[str, Run] = {}

    def close(self) -> None:
        """Give the directory back."""
        if self._lock is not None:
            self._lock.close()
        if self.path != self.home:
            shutil.rmtree(self.path, ignore_errors=True)

    def child(self, name: str) -> Run:
        """A directory inside this one, under its lock: a member's own metrics, checkpoints and manifest.

        It is resumed where this process resumes the run and it is there; what another run left there is removed.
        """
        first, _, rest = name.partition("/")
        if rest:
            return self.child(first).child(rest)
        if name not in self._children:
            self._children[name] = self._opened(name, self.path, self.ranks)
        return self._children[name]

    def own(self, name: str) -> Run:
        """A child that this process alone trains, whichever it is: it writes where the run is."""
        if self.ranks.alone:
            return self.child(name)
        if name not in self._children:
            self._children[name] = self._opened(name, self.home, ALONE)
        return self._children[name]

    def _opened(self, name: str, folder: Path, ranks: Ranks) -> Run:
        path, home = folder / name, self.home / name
        resumed = self.resumed and home.exists()
        if not resumed and path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        files.remove_unfinished(path)
        files.remove_unfinished(path / "checkpoints")
        return Run(path, None, resumed=resumed, ranks=ranks, home=home)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What is known about the run besides its configuration."""
        return self._manifest

    def note(self, **facts: Any) -> None:
        """Add `facts` to manifest.json."""
        self._manifest.update(facts)
        files.write_json(self.path / "manifest.json", self._manifest)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the metrics of steps after `step`, which will be done again."""
        path = self.path / "metrics.jsonl"
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the last line of a killed process may be half written
                break
            if record["step"] <= step:
                kept.append(line)
        files.write_bytes(path, "".join(line + "\n" for line in kept).encode())

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def start(path: Path, config: RunConfig, *, resume: bool, ranks: Ranks = ALONE) -> Run:
    """Lock `path` for this run and write its config.yaml and manifest.

    Raises:
        ConfigError: the directory cannot be written.
        ResumeError: another process works in it, it holds another run, or there is nothing to resume.
    """
    path = path.expanduser()
    if not resume and (path / "config.yaml").exists() and not _failed_before_a_checkpoint(path):
        raise ResumeError(f"{path} already holds a run. Write --resume to continue it, or another --out.")
    if resume and not (path / "config.yaml").exists():
        raise ResumeError(f"{path} holds no run to resume. Leave --resume out, or name the run with --out.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "run.lock").open("a")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}). Write another folder as --out.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ResumeError(f"{path}: another process works on this run. Wait for it, or write another --out.") from None
    try:
        if resume:
            _require_same(config, read_config(path), path)
        files.remove_unfinished(path)
        files.remove_unfinished(path / "checkpoints")
        run = Run(path, lock, resumed=resume, ranks=ranks)
    except WorkbenchError:
        lock.close()
        raise
    if not resume:
        for stale in ("metrics.jsonl", "before.json", "report.html", "clock.json"):
            (path / stale).unlink(missing_ok=True)
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        run.note(name=path.name, created=datetime.now(timezone.utc).isoformat(timespec="seconds"))
        files.write_bytes(path / "config.yaml", text.encode())
    run.note(status="running", reason=None, versions=versions(), git_commit=git_commit(), hardware=hardware())
    own = [*config.plugins, *([config.tta.function] if config.tta.function else [])]
    run.note(plugins=plugins.fingerprints(own))
    return run


def follow(path: Path, *, resume: bool, ranks: Ranks) -> Run:
    """The run that the first of several processes started, for another one of them."""
    scratch = Path(tempfile.mkdtemp(prefix=f"workbench-rank-{ranks.rank}-"))
    return Run(scratch, None, resumed=resume, ranks=ranks, home=path.expanduser())


def read_config(path: Path) -> RunConfig:
    """The configuration of a run directory."""
    if not (path / "config.yaml").exists():
        raise ConfigError(f"{path}: not a run directory (no config.yaml). `workbench ls runs` lists the runs here.")
    return parse(RunConfig, read_yaml(path / "config.yaml"), source=f"{path}/config.yaml")


def shipped_config(path: Path) -> RunConfig:
    """The configuration of the adapter that a run directory ships: of a sweep, that of its best member."""
    read_config(path)
    return parse(RunConfig, shipped_values(path), source=f"{path}/config.yaml")


def shipped_values(path: Path) -> dict[str, Any]:
    """The values of config.yaml as those of the run whose adapter the directory ships: of a sweep, its best member."""
    values = read_yaml(path / "config.yaml")
    members = files.read_json(path / "sweep.json") if values.get("recipe") == "sweep" else {}
    return sweep_expansion.shipped_values(values, path, members)


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the working directory, marked where files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """The device that computes, in words and bytes."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return {"device": "cuda", "name": found.name, "cores": os.cpu_count(), "memory_bytes": found.total_memory}
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    memory = psutil.virtual_memory().total
    return {"device": "cpu", "name": (names or ["CPU"])[0], "cores": os.cpu_count(), "memory_bytes": memory}


def _failed_before_a_checkpoint(path: Path) -> bool:
    """Whether a run ended in a mistake with nothing to keep, so that the mended one may take its place."""
    failed = files.read_json(path / "manifest.json").get("status") == "failed"
    return failed and not any(path.rglob("checkpoints/step-*"))  # its own, or of a member inside it


def _require_same(wanted: RunConfig, found: RunConfig, path: Path) -> None:
    """Refuse to continue a run under another configuration; what never changes the result may differ."""
    differing = [
        f"{key}: {_shown(old)} there, {_shown(new)} asked for"
        for key, old, new in _differences(found.model_dump(mode="json"), wanted.model_dump(mode="json"))
        if key not in FREE and not key.startswith("distributed.")
    ]
    if differing:
        raise ResumeError(
            "\n  ".join([f"{path} was started with another configuration:", *differing])
            + "\n  Resume with the same configuration, or start a new run with another --out."
        )


def _differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [(prefix, old, new)]
    keys = list(dict.fromkeys([*old, *new]))
    pairs = ((f"{prefix}.{key}" if prefix else key, old.get(key), new.get(key)) for key in keys)
    return [difference for key, a, b in pairs for difference in _differences(a, b, key)]


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)
