"""A run directory: one configuration, its lock, its manifest and what it produced."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from time import sleep
from typing import IO, Any

import psutil

from workbench.config import RunConfig
from workbench.config.expansions import fleet_expansion, sweep_expansion
from workbench.config.task_facts import over_of
from workbench.config.yaml_text import dump_yaml, read_yaml
from workbench.errors import ConfigError, ResumeError, WorkbenchError
from workbench.runs import evaluation_request, files, metrics_log, run_log, trust
from workbench.runs.deadline import Deadline
from workbench.runs.ranks import ALONE, Ranks
from workbench.runs.resume_command import finish, resume_command
from workbench.runs.trust import Trust
from workbench.schema import parse

_LOCK_TRIES = 10
"""`workbench ui` holds the lock for a moment while it looks whether the run lives."""
FREE = (
    *("batch.tokens_per_device", "batch.packing", "trackers", "save.keep", "save.asynchronous", "budget.time"),
    *("train.checkpointing", "train.offload_activations"),
)
"""Settings that may change when a run is resumed, besides section `distributed`."""
CHOICES = ("folds.keep", "ensemble.merge", "tta.keep")
"""Settings of what is done with the results of training; a run that is resumed, or done, takes new ones."""
_UNKNOWN = re.compile("unknown (method|policy|recipe|task)")
"""Message about an adapter, policy or task that a plugin may define."""
PACKAGES = ("peft-workbench", "torch", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "safetensors")


class Run:
    """The directory of one run, locked for this process. Layout: see the attributes.

    Where several processes train together, only the first one writes to the run's directory. The others write to a
    temporary folder that is removed in the end, and read earlier checkpoints from the run's directory.
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
        self.deadline = Deadline()
        """Its clock, with a limit where `budget` sets one."""
        self.checkpoints = self.home / "checkpoints"
        self.best = self.checkpoints / "best"
        self.before: dict[str, Any] = {}
        """Status and reason in the manifest before this process began."""
        self.hardware_before: Mapping[str, Any] = {}
        """The device that the process before trained on (`hardware`); empty but in the first of a resumed run."""
        self._lock = lock
        self._manifest: dict[str, Any] = files.read_json(self.home / "manifest.json") if resumed else {}
        self._children: dict[str, Run] = {}

    def close(self) -> None:
        """Give the directory back."""
        if self._lock is not None:
            self._lock.close()
        if self.path != self.home:
            shutil.rmtree(self.path, ignore_errors=True)

    def child(self, name: str, *, of: str | None = None) -> Run:
        """A directory inside this one, under its lock: a member's own metrics, checkpoints and manifest.

        It is resumed if it exists and this process resumes the run; otherwise anything left there is removed.

        Args:
            of: What it is made from, such as a digest of its rows; what was made from another one is removed.
        """
        first, _, rest = name.partition("/")
        return self.child(first).child(rest, of=of) if rest else self._opened(name, self.path, self.ranks, of)

    def own(self, name: str) -> Run:
        """A child that this process trains alone: it writes to the run's directory, whichever rank this is."""
        return self.child(name) if self.ranks.alone else self._opened(name, self.home, ALONE)

    def _opened(self, name: str, folder: Path, ranks: Ranks, of: str | None = None) -> Run:
        if name in self._children:
            return self._children[name]
        path, home = folder / name, self.home / name
        # The first process makes it where it is not there.
        resumed = ranks.agreed(
            self.resumed and home.exists() and (of is None or files.read_json(home / "manifest.json").get("of") == of)
        )
        if not resumed and path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        files.remove_unfinished(path, path / "checkpoints")
        child = self._children[name] = Run(path, None, resumed=resumed, ranks=ranks, home=home)
        child.hardware_before = self.hardware_before
        if of is not None and not resumed:
            child.note(of=of)
        return child

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Facts about the run besides its configuration."""
        return self._manifest

    def note(self, **facts: Any) -> None:
        """Add `facts` to manifest.json."""
        self._manifest.update(facts)
        files.write_json(self.path / "manifest.json", self._manifest)

    def evaluation_asked(self) -> bool:
        """Whether a user has asked for an evaluation since the last call; always False but in the first process."""
        return self.ranks.first and evaluation_request.withdrawn(self.path)


def start(path: Path, config: RunConfig, *, resume: bool, ranks: Ranks = ALONE) -> Run:
    """Lock `path` for this run and write its config.yaml and manifest.

    Raises:
        ConfigError: the directory cannot be written.
        ResumeError: another process works in it, it holds another run, or there is nothing to resume.
    """
    path = path.expanduser()
    require_free(path, resume=resume)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    lock = _locked(path)
    try:
        if resume:
            _go_on_with(config, path)
        files.remove_unfinished(path, path / "checkpoints")
        run = Run(path, lock, resumed=resume, ranks=ranks)
    except WorkbenchError:
        lock.close()
        raise
    if not resume:
        for stale in (
            *metrics_log.STEPPED,
            "before.json",
            "held_out_losses_before.parquet",
            "report.html",
            "clock.json",
            "scored_rows.json",
            "decision.json",
            run_log.NAME,
        ):
            (path / stale).unlink(missing_ok=True)
        run.note(name=path.name, created=datetime.now(UTC).isoformat(timespec="seconds"))
        _write_config(config, path)
    evaluation_request.withdrawn(path)
    run.before = {name: run.manifest.get(name) for name in ("status", "reason")}
    run.hardware_before = run.manifest.get("hardware") or {}
    run.note(status="running", reason=None, versions=versions(), git_commit=git_commit(), hardware=hardware())
    return run


def require_free(path: Path, *, resume: bool) -> None:
    """Refuse a directory that a run cannot begin, or resume, in; raises what `start` does, and writes nothing."""
    try:
        if (path / "run.lock").exists():
            _locked(path).close()  # that another process works on it is said first
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=next(each for each in path.parents if each.exists())):
                pass
    except OSError as error:
        raise _unwritable(path, error) from None
    if not resume and (path / "config.yaml").exists() and not failed_at_once(path):
        raise ResumeError(
            f"{path} already holds a run. Write `{resume_command(path)}` to continue it, or another --out."
        )
    if resume and whole(path) != path:
        raise ResumeError(f"{path} trains with others. Resume them together: {finish(whole(path))}")
    if resume and not (path / "config.yaml").exists():
        raise ResumeError(f"{path} holds no run to resume. Leave --resume out, or name the run with --out.")


def failed_at_once(path: Path) -> bool:
    """Whether the run at `path` failed before its first checkpoint, or a member's: there is nothing to keep."""
    failed = files.read_json(path / "manifest.json").get("status") == "failed"
    return failed and not any(path.rglob("checkpoints/step-*"))


def began_since(path: Path, time: float) -> bool:
    """Whether a directory holds a run that began at this time (seconds since 1970) or later."""
    if not (path / "config.yaml").exists():
        return False
    created = files.read_json(path / "manifest.json").get("created")
    return isinstance(created, str) and datetime.fromisoformat(created).timestamp() >= int(time)


def _locked(path: Path) -> IO[str]:
    """The lock of a run directory, held until it is closed."""
    try:
        lock = (path / "run.lock").open("a")
    except OSError as error:
        raise _unwritable(path, error) from None
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            sleep(0.02)
    lock.close()
    raise ResumeError(f"{path}: another process works on this run. Wait for it, or write another --out.")


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be written ({error.strerror}). Write another folder as --out.")


def follow(path: Path, *, resume: bool, ranks: Ranks) -> Run:
    """The run that the first of several processes started, as another of them sees it."""
    scratch = Path(tempfile.mkdtemp(prefix=f"workbench-rank-{ranks.rank}-"))
    return Run(scratch, None, resumed=resume, ranks=ranks, home=path.expanduser())


def begun(path: Path, config: RunConfig) -> RunConfig:
    """The configuration that the run at `path` was started with, to resume it with `config`.

    Raises:
        ResumeError: They name different Python code. Code that both name was executed when `config` was read.
    """
    values = _values(path)
    _require_same(trust.code(config.model_dump(mode="json")), trust.code(values), path)
    return _parsed(values, path, values, Trust())


def read_config(path: Path, trusted: Trust | None = None) -> RunConfig:
    """The configuration of a run directory, without the Python code that it names unless that is trusted."""
    given = trusted or Trust()
    values = _values(path)
    if given.given:
        return _parsed(values, path, values, given)
    config = _parsed(trust.without(values, path, given), path, values, given)
    trust.say(values, path, given)
    return config


def shipped_config(path: Path, trusted: Trust | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """As `read_config`, for the adapter that a run ships: of a sweep, the configuration of its best member.

    Args:
        overrides: `model.id=FOLDER`, where the backbone has moved since.
    """
    given = trusted or Trust()
    over = read_config(path, given).over
    if over is not None and not over.ships:
        names = sorted(each.parent.name for each in (path / "members").glob("*/config.yaml"))
        shown = f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        hint = f"Name one of them, as {path / 'members' / names[0]} ({shown})." if names else "None has begun yet."
        raise ConfigError(f"{path}: a fleet ships no adapter; each of its members does. {hint}")
    values = shipped_values(path)
    config = _parsed(values if given.given else trust.without(values, path, given), path, values, given)
    for word in overrides:
        key, _, place = word.partition("=")
        if key != "model.id" or not place:
            raise ConfigError(
                f"{word}: {path} is read as it was trained. Write model.id=FOLDER where its backbone has moved; leave "
                "everything else out."
            )
        config = config.model_copy(update={"model": config.model.model_copy(update={"id": place, "revision": None})})
    return config


def whole(path: Path) -> Path:
    """The run directory whose member the run at `path` is; `path` itself where it is no member."""
    above = path.parent.parent
    return above if path.parent.name == "members" and (above / "config.yaml").exists() else path


def fold_members(path: Path) -> list[Path]:
    """The run directories of the folds of a cross-validation, each with an adapter; else the run directory itself."""
    if kept := files.read_json(path / "decision.json").get("folds"):
        return [path / "members" / name for name in kept]
    members = sorted((path / "members").glob("repeat-*/adapter"), key=lambda each: (len(str(each)), str(each)))
    return [each.parent for each in members] or [path]


def reads_views(path: Path, config: RunConfig) -> bool:
    """Whether the run at `path`, or the cross-validation, decided to read rows in several views (`tta`)."""
    return config.tta.wanted and files.read_json(path / "decision.json").get("tta") is not None


def require_read_once(path: Path, config: RunConfig) -> None:
    """Raise ConfigError where a run of one adapter answers by several views of a row."""
    if config.over is None and reads_views(path, config):
        student = ", or name it as distill.teacher.id: a student says at once what the views say together"
        cure = f"`{finish(path)} tta.keep=false`{student if config.task.students else ''}"
        raise ConfigError(
            f"{path}: it answers by several views of a row (tta), which its adapter alone does not. Let it read rows "
            f"once, without training again, by {cure}."
        )


def instead(path: Path) -> str:
    """What to write in place of a PEFT adapter that stands where a run is wanted; empty where none stands there."""
    if not (path / "adapter_config.json").is_file():
        return ""
    if (path.parent / "config.yaml").is_file():
        return f" It is the adapter of a run. Write {shlex.quote(str(path.parent))}."
    return f" It is a PEFT adapter. Write `workbench adopt {shlex.quote(str(path))} --out RUN`, then RUN in its place."


def _values(path: Path) -> dict[str, Any]:
    if not (path / "config.yaml").exists():
        cure = instead(path) or " `workbench ls runs` lists the runs here."
        raise ConfigError(f"{path}: not a run directory (no config.yaml).{cure}")
    return read_yaml(path / "config.yaml")


def shipped_values(path: Path) -> dict[str, Any]:
    """The values of config.yaml; of a sweep or search, those of its best member, whose adapter it ships."""
    values = _values(path)
    over = over_of(values)
    if over is not None and not over.ships:
        return values
    members = files.read_json(path / over.table) if over is not None and over.table is not None else {}
    return sweep_expansion.shipped_values(values, path, members)


def _parsed(values: Mapping[str, Any], path: Path, written: Mapping[str, Any], trusted: Trust) -> RunConfig:
    """`values` as a configuration.

    Args:
        written: The same, including the Python code that they name.

    Raises:
        ConfigError: They need that code, or another version with other keys wrote config.yaml.
    """
    try:
        return parse(RunConfig, values, source=f"{path}/config.yaml")
    except ConfigError as error:
        if values is not written and "plugins" in trust.code(written) and _UNKNOWN.search(str(error)):
            why = f"it cannot be read without plugins={trust.code(written)['plugins']}"
            raise trust.refused(path, why, trusted) from None
        first = str(error).partition("\n  ")[2].partition("\n")[0] or str(error)
        raise written_otherwise(path, first) from None


def written_otherwise(path: Path, why: str) -> ConfigError:
    """The error of a run directory of another version, which knows other keys."""
    manifest = files.read_json(path / "manifest.json")
    versions, commit = manifest.get("versions"), manifest.get("git_commit")
    version = versions.get("peft-workbench", "") if isinstance(versions, dict) else ""
    return ConfigError(
        f"{path}: this version of the workbench does not read its config.yaml, which peft-workbench"
        f"{version and f' {version}'}{f' (commit {commit})' if commit else ''} wrote: {why} Use that version, or train "
        "again."
    )


@cache
def versions() -> Mapping[str, str]:
    """Versions of what a result depends on."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def git_commit() -> str | None:
    """The commit of the working directory, marked where files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """The device that computes, in words and bytes."""
    import torch

    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        return {"device": "cuda", "name": gpu.name, "cores": os.cpu_count(), "memory_bytes": gpu.total_memory}
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    memory = psutil.virtual_memory().total
    return {"device": "cpu", "name": (names or ["CPU"])[0], "cores": os.cpu_count(), "memory_bytes": memory}


def _write_config(config: RunConfig, path: Path) -> None:
    """Write config.yaml without what this run does not read, whose defaults another version may change."""
    values = config.model_dump(mode="json", exclude=set(config.sections_of_others))
    files.write_bytes(path / "config.yaml", dump_yaml(values).encode())


def _go_on_with(config: RunConfig, path: Path) -> None:
    """Refuse to go on with another configuration; a fleet may have new members, and CHOICES may change."""
    wanted, values = config.model_dump(mode="json"), begun(path, config).model_dump(mode="json")
    grown = fleet_expansion.grown(values, wanted)
    _require_same(wanted, {**values, "fleet": wanted["fleet"]} if grown else values, path)
    if grown or any(key in CHOICES for key, _, _ in _differences(values, wanted)):
        _write_config(config, path)


def _require_same(wanted: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> None:
    """Refuse to continue a run under another configuration; settings that never change the result may differ."""
    differing = [
        f"{key}: {'nothing' if old is None else repr(old)} there, {'nothing' if new is None else repr(new)} asked for"
        for key, old, new in _differences(values, wanted)
        if key not in (*FREE, *CHOICES) and not key.startswith("distributed.")
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
