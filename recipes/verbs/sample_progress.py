"""The file in which `sample` keeps what it has, so that a run that was killed goes on with an equal result."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, FileError


class SampleProgress:
    """Answers and rewards by batch, a line each, written to disk before the next one begins.

    Args:
        out: The file that is to be written in the end; progress stands beside it.
        identity: All that answers depend on, of which a JSON file keeps the difference apart.

    Raises:
        ConfigError: Answers of another command are there.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.path = out.with_name(f".{out.name}.unfinished.jsonl")
        self.answers: dict[int, Any] = {}
        self._rewards: dict[str, dict[int, Any]] = {}
        if self.path.exists():
            self._read(json.loads(json.dumps(identity)))
        else:
            self._append({"identity": identity})

    def keep_answers(self, batch: int, answers: Any) -> None:
        """Keep the answers to the prompts of a batch, which no other one has the number of."""
        self.answers[batch] = answers
        self._append({"batch": batch, "answers": answers})

    def rewards(self, scores: str) -> dict[int, Any]:
        """Rewards by batch that were given by the reward of this fingerprint."""
        return self._rewards.setdefault(scores, {})

    def keep_rewards(self, scores: str, batch: int, rewards: Any) -> None:
        """Keep the rewards of the answers of a batch."""
        self.rewards(scores)[batch] = rewards
        self._append({"batch": batch, "rewards": rewards, "by": scores})

    def done(self) -> None:
        """Delete the file: its result is written."""
        self.path.unlink(missing_ok=True)

    def _read(self, identity: Mapping[str, Any]) -> None:
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:  # a line that was not finished
            os.truncate(self.path, self.path.stat().st_size - len(lines[-1]))
        try:
            first, *others = (json.loads(line) for line in lines[:-1])
        except ValueError:
            raise FileError(f"{self.path}: damaged. Delete it, and begin again.") from None
        changed = sorted(key for key in identity if first["identity"].get(key) != identity[key])
        if changed:
            raise ConfigError(
                f"{self.path}: holds answers of a command that was stopped, with other {', '.join(changed)}. Repeat "
                "that command to go on, name another --out, or delete the file."
            )
        for line in others:
            if "answers" in line:
                self.answers[line["batch"]] = line["answers"]
            else:
                self.rewards(line["by"])[line["batch"]] = line["rewards"]

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(f"{self.path}: cannot be written ({error.strerror}). Make room there.") from error
