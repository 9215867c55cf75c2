"""Run a recipe of ours, and count the bytes of tensors on the CPU that are alive at once.

    python scripts/bench/live_run.py RECIPE OUT [KEY=VALUE ...]

Writes OUT/live.json: `peak`, the most of the whole run; `teacher_pass`, the most that one pass of a live teacher makes
and holds (0 without one); `weights`, the frozen weights, which are mapped from their file and in neither of these. The
run itself is slower than one that nobody counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import workbench
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import MicroBatch
from workbench.distillation.student_loss import TeacherLogits
from workbench.distillation.teachers import LiveTeacher
from workbench.planning.counters import LiveBytes


def main(recipe: str, out: Path, *overrides: str) -> None:
    passes = _watched_passes()
    with LiveBytes() as live:
        workbench.run(recipe, overrides, out=out, quiet=True)
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    weights = manifest["model"]["weight_bytes"]
    found = {"peak": live.peak, "teacher_pass": max(passes, default=0), "weights": weights}
    (out / "live.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


def _watched_passes() -> list[int]:
    """From now on, the peak of every pass of a live teacher."""
    peaks: list[int] = []
    signal = LiveTeacher.signal

    def watched(self: LiveTeacher, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TeacherLogits:
        with LiveBytes() as live:
            said = signal(self, batch, config, temperature=temperature)
        peaks.append(live.peak)
        return said

    LiveTeacher.signal = watched  # type: ignore[method-assign]
    return peaks


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
