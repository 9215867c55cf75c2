"""Make the pairs of answers that ship in workbench/data/starter from ranked replies of OpenAssistant.

    python scripts/make_starter_preferences.py PAIRS      # jsonl with tree, messages, chosen, rejected

Held-out pairs are of other conversations than the training pairs. OpenAssistant: Köpf et al. 2023, Apache-2.0.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

LONGEST_PROMPT, LONGEST_ANSWER = 900, 900
"""Characters; keeps the quickstart's rows under about 512 tokens."""
HELD_OUT = 0.3
"""Share of the conversations."""


def main(pairs: Path) -> None:
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    short = [
        row
        for row in rows
        if sum(len(message["content"]) for message in row["messages"]) <= LONGEST_PROMPT
        and max(len(row["chosen"]), len(row["rejected"])) <= LONGEST_ANSWER
    ]
    trees = sorted({row["tree"] for row in short})
    held_out = set(random.Random(0).sample(trees, round(HELD_OUT * len(trees))))
    out = Path(__file__).parent.parent / "workbench" / "data" / "starter"
    for name, wanted in {"train": False, "held_out": True}.items():
        chosen = [row for row in short if (row["tree"] in held_out) == wanted]
        text = "".join(
            json.dumps({key: row[key] for key in ("messages", "chosen", "rejected")}, ensure_ascii=False) + "\n"
            for row in chosen
        )
        (out / f"oasst_pairs_{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"oasst_pairs_{name}.jsonl: {len(chosen)} pairs")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
