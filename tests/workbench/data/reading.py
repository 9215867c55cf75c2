"""Rows in a file, and the section that says how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.run_files import write_lines
from workbench.config import DataConfig


def write(folder: Path, rows: list[Any]) -> str:
    path = folder / "my.jsonl"
    write_lines(path, rows)
    return str(path)


def config(**data: Any) -> DataConfig:
    return DataConfig.model_validate({"train": "unused", **data})
