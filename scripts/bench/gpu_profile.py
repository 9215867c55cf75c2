"""Kernels of two warm steps of this workbench on a GPU, by the time that they take: where a case of gpu.py is spent.

    python scripts/bench/gpu_profile.py CASE [--out FOLDER] [--rehearse]

Writes profile-CASE.md: the kernels that take longest, and the share of the steps in which none ran, when the GPU waited
for its host.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import gpu_cases
import torch
from gpu_cases import WARM_UP
from gpu_sides import DEVICE, Clock, ours
from torch.profiler import ProfilerActivity, profile

STEPS = 2
LONGEST = 30
"""Kernels of the table."""


class Profiler(Clock):
    """Profiles some steps after the warm-up."""

    def __init__(self) -> None:
        super().__init__(float("inf"))
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE.type == "cuda" else [])]
        self.profile = profile(activities=kinds)
        self.steps, self.began, self.seconds = 0, 0.0, 0.0

    def mark(self) -> bool:
        """Begin after the warm-up, and end some steps later."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        self.steps += 1
        if self.steps == WARM_UP:
            self.profile.start()
            self.began = time.perf_counter()
        if self.steps == WARM_UP + STEPS:
            self.seconds = time.perf_counter() - self.began
            self.profile.stop()
        return self.steps < WARM_UP + STEPS


def main() -> None:
    arguments = _arguments()
    clock = Profiler()
    tokens = ours(gpu_cases.case(arguments.case, rehearsed=arguments.rehearse), clock, 0, False)
    events = clock.profile.key_averages()
    kernels = [each for each in events if each.device_type.name == "CUDA" and not each.is_user_annotation]
    if DEVICE.type == "cpu":
        kernels = list(events)
    cost = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    busy = sum(getattr(each, cost) for each in kernels) / 1e6
    lines = [
        f"{arguments.case}: {STEPS} steps of {tokens[-1]:,} tokens took {clock.seconds:.3f} s under the profiler; "
        f"kernels {busy:.3f} s.",
        "",
        "| kernel | calls | share | ms a call |",
        "|---|---|---|---|",
    ]
    for each in sorted(kernels, key=lambda each: -getattr(each, cost))[:LONGEST]:
        taken = getattr(each, cost) / 1e6
        name = each.key[:140].replace("|", "/")
        lines.append(f"| `{name}` | {each.count} | {taken / busy:.1%} | {1e3 * taken / each.count:.3f} |")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"profile-{arguments.case}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("case", metavar="CASE", choices=gpu_cases.names())
    found.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    found.add_argument("--rehearse", action="store_true", help="tiny shapes")
    return found.parse_args()


if __name__ == "__main__":
    main()
