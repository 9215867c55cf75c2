"""Columns are checked on the first row that can be read, whatever comes before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.config import DataConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.data.labelled.records import read
from workbench.errors import DataError


@pytest.mark.parametrize("before", ["", '{"text": \n', '"text"\n'])
def test_a_missing_column_is_named_also_after_a_malformed_row(tmp_path: Path, before: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(before + '{"body": "a", "label": "cat"}\n' * 3)
    config = DataConfig(train=str(path), on_bad_row="skip")
    with pytest.raises(DataError, match=r"has no column `text` among its columns `body`, `label`\. Write data"):
        read(str(path), config, ClassesConfig())
