"""LoRA over Llamas of 1, 3 and 8 B parameters on one GPU: this workbench, TRL, Unsloth, a raw torch loop.

    python scripts/bench/gpu.py [CASE ...] [--seconds 500] [--out FOLDER] [--rehearse]

A case is SHAPE-WEIGHTS-ROWS, such as 8b-nf4-2k: 1b, 3b, 8b; bf16, nf4; 2k, ragged (64 to 512 tokens), near (384 to
512), 8k. Weights and tokens are random, made on the device; every token has loss. Every side is a process of its own
(gpu_sides.py), whose temporary files are in one folder, which goes with the call.
Where memory runs out a side is tried again with fewer rows at once, and at last with checkpointing; the workbench finds
that itself. Results are written as they come, to gpu.jsonl and gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import gpu_cases
import torch
from gpu_cases import Case
from gpu_sides import SIDES

HERE = Path(__file__).parent
LONGEST = 110
"""Seconds that one process may take."""
WARM = 12.0
"""Seconds of warm steps."""
GIVEN = ("Liger", "packed", "checkpointing", "rows at once", "expandable segments")
"""What a side was given."""
COLUMNS = ("case", "side", *GIVEN, "real tokens/s", "peak GB", "reserved GB", "model FLOPs")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def main() -> None:
    arguments = _arguments()
    out, ends = arguments.out, time.monotonic() + arguments.seconds
    out.mkdir(parents=True, exist_ok=True)
    peak = matmul_rate(rehearsed=arguments.rehearse)
    machine = {"machine": _machine(), "bf16 matrix product, TFLOP/s": peak / 1e12}
    _write(out, machine)
    print(machine, flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for name in arguments.cases or gpu_cases.names():
            case = gpu_cases.case(name, rehearsed=arguments.rehearse)
            for side in arguments.sides:
                if SIDES[side].packed and case.shortest == case.longest:
                    continue  # there is no padding
                found = {"case": name, "side": side, **_measured(case, side, arguments, ends, scratch)}
                if "rates" in found:
                    found |= _figures(case, found, peak)
                _write(out, found)
                print(_row(found), flush=True)


def _measured(case: Case, name: str, arguments: argparse.Namespace, ends: float, scratch: str) -> dict[str, Any]:
    """Figures of a side, or why there are none."""
    side, told = SIDES[name], "not tried"
    if missing := [each for each in side.needs if importlib.util.find_spec(each) is None]:
        return {"skipped": f"{missing[0]} is not installed here"}
    environment = {**os.environ, "TMPDIR": scratch, **side.environment}
    for rows, checkpointing in side.ways(case.rows) if side.ways else [(case.rows, False)]:
        left = min(LONGEST, ends - time.monotonic())
        if left < (5 if arguments.rehearse else 30):
            return {"skipped": f"no time left ({told}); run this case alone"}
        words = [name, case.name, str(0.5 if arguments.rehearse else WARM), str(rows), str(int(checkpointing))]
        command = [sys.executable, str(HERE / "gpu_sides.py"), *words, *(["rehearse"] if arguments.rehearse else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, env=environment)
        except subprocess.TimeoutExpired:
            return {"skipped": f"longer than {left:.0f} s"}
        if done.returncode:
            return {"skipped": f"status {done.returncode}", "told": done.stderr[-3000:]}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "rates" in found:
            return {"rows_at_once": rows, "checkpointing": checkpointing, **found}
        told = found["out_of_memory"]
    return {"skipped": f"out of memory: {told}"}


def _figures(case: Case, measured: dict[str, Any], peak: float) -> dict[str, float]:
    rate = median(measured["rates"])
    return {"tokens_per_second": rate, "flop_share": rate * gpu_cases.flops_per_token(case, case.row_lengths) / peak}


def matmul_rate(*, rehearsed: bool) -> float:
    """Operations a second of a large bfloat16 matrix product here: that of which shares are told."""
    device, size = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 256 if rehearsed else 2048)
    square = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(4):
        _settle()
        began = time.perf_counter()
        for _ in range(5):
            square @ square
        _settle()
        best = min(best, (time.perf_counter() - began) / 5)
    return 2 * size**3 / best


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _machine() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}"


def _write(out: Path, result: dict[str, Any]) -> None:
    with (out / "gpu.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    lines = [json.loads(line) for line in (out / "gpu.jsonl").read_text(encoding="utf-8").splitlines()]
    heads = [
        f"{line['machine']}: {line['bf16 matrix product, TFLOP/s']:.3g} TFLOP/s" for line in lines if "machine" in line
    ]
    rows = {(line["case"], line["side"]): _row(line) for line in lines if "case" in line}  # the last of each
    (out / "gpu.md").write_text("\n".join([*dict.fromkeys(heads), "", HEADER, *rows.values()]) + "\n", encoding="utf-8")


def _row(result: dict[str, Any]) -> str:
    cells = [result["case"], result["side"]]
    if "skipped" in result:
        cells += [*[""] * len(GIVEN), result["skipped"]]
    else:
        facts = (result[name.lower().replace(" ", "_")] for name in GIVEN)
        cells += [{True: "yes", False: "no"}[each] if isinstance(each, bool) else str(each) for each in facts]
        cells += [f"{result['tokens_per_second']:,.0f}"]
        cells += [f"{result[name] / 1e9:.1f}" for name in ("peak_bytes", "reserved_bytes")]
        cells += [f"{result['flop_share']:.1%}"]
    return f"| {' | '.join(cells + [''] * (len(COLUMNS) - len(cells)))} |"


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("cases", nargs="*", metavar="CASE", choices=[*gpu_cases.names(), []], default=[])
    found.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    found.add_argument("--seconds", type=float, default=500, help="after so many no other process is begun")
    found.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    found.add_argument("--rehearse", action="store_true", help="tiny shapes")
    return found.parse_args()


if __name__ == "__main__":
    main()
