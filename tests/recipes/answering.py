"""Evaluates runs and predicts rows in this process, or with those that torchrun has started with it.

answering.py FOLDER OUT    # FOLDER/asked.json: [[run, overrides, a file of rows or null], ...]

Scores go to OUT/RUN.json, and predictions to OUT/RUN.parquet.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import predict
from workbench.runs.ranks import joined


def main(folder: Path, out: Path) -> None:
    for name, words, rows in json.loads((folder / "asked.json").read_text()):
        if rows is not None:
            predict(folder / name, rows, out=out / f"{name}.parquet", max_new_tokens=6)
        scores = evaluate(folder / name, words)
        assert all(each == scores for each in joined().gathered(scores))
        if joined().first:
            (out / f"{name}.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
