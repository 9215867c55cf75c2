"""The verb import: files that are written, checked as any recipe, or refused with nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.workbench.config.foreign import test_axolotl, test_llamafactory
from workbench import recipes
from workbench.cli.verbs import app
from workbench.config.yaml_text import dump_yaml
from workbench.errors import ConfigError
from workbench.recipes.load import load
from workbench.recipes.verbs import translated
from workbench.recipes.verbs.check import check

ROWS = "starter/fairytaleqa_train.jsonl"


def test_a_file_of_each_tool_is_a_recipe_that_check_takes(tmp_path: Path) -> None:
    files: dict[str, dict[str, Any]] = {
        "axolotl": {**test_axolotl.FILE, **test_axolotl.LORA, "base_model": "starter", "datasets": [{"path": ROWS}]},
        "llamafactory": {**test_llamafactory.FILE, "model_name_or_path": "starter"},
    }
    for name, settings in files.items():
        (tmp_path / f"{name}.yml").write_text(dump_yaml(settings))
        out = tmp_path / f"{name}.recipe.yaml"
        done = CliRunner().invoke(app, ["import", str(tmp_path / f"{name}.yml"), "--out", str(out)])
        assert done.exit_code == 0 and f"Next: workbench check {out}" in done.output
        assert out.read_text().partition("\nrecipe:")[0].endswith(recipes.editor_line().rstrip())
        found = check(load(str(out), [f"data.train={ROWS}", "data.limit=40"]))
        assert found is not None
    assert "# - batch.size=8 are the rows of a step on one device" in out.read_text()


@pytest.mark.parametrize(
    "settings,reason",
    [
        ({"some": "thing"}, "neither base_model"),
        ({"model": "owner/model", "train_dataset": "rows.yaml"}, "LLaMA-Factory's v1"),
        ({**test_axolotl.FILE, "rl": "gdpo"}, "reinforce/quickstart"),
        ({**test_axolotl.FILE, **test_axolotl.LORA, "lora_r": 0}, "adapter.rank"),
    ],
)
def test_what_has_no_equivalent_is_refused_and_nothing_is_written(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    (tmp_path / "theirs.yml").write_text(dump_yaml(settings))
    with pytest.raises(ConfigError, match=reason):
        translated.write(tmp_path / "theirs.yml", tmp_path / "ours.yaml")
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.yml"]


def test_a_file_that_stands_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "theirs.yml").write_text(dump_yaml(test_axolotl.FILE))
    (tmp_path / "ours.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        translated.write(tmp_path / "theirs.yml", tmp_path / "ours.yaml")
    assert (tmp_path / "ours.yaml").read_text() == "mine"
