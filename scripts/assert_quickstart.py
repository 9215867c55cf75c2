"""Hold the quickstart to what the README says of it.

python scripts/assert_quickstart.py runs/sft-quickstart
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(run: Path) -> None:
    scores = json.loads((run / "scores.json").read_text())
    before, after = scores["before"], scores["after"]
    for name, value in after.items():
        print(f"quickstart: {name} {before[name]:.3f} -> {value:.3f}")
    if before["loss"] - after["loss"] < 1.0:
        sys.exit("the held-out loss fell by less than 1 nat per token")
    if after["f1"] <= before["f1"] or after["rouge_l"] <= before["rouge_l"]:
        sys.exit("the answers did not improve")
    if not (run / "report.html").exists():
        sys.exit("there is no report")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
