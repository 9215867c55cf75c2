"""Rows in a file, and the section that says how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.config import DataConfig


def write(folder: Path, rows: list[Any]) -> str:
    path = folder / "my.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config(**data: Any) -> DataConfig:
    return DataConfig.model_validate({"train": "unused", **data})
