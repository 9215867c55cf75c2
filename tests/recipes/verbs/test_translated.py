"""The verb import: files that are written, checked as any recipe, or refused with nothing left behind."""

from __future__ import annotations

import json
import math
import re
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


ODD_AXOLOTL = [
    ("seed", math.inf, "seed: expected a number, found inf"),
    ("warmup_steps", {"low": math.nan}, "warmup_steps: expected a number, found {"),
    ("num_epochs", 10**400, "num_epochs: expected a number"),
    ("rl", 0.0, "rl: '0.0': expected dpo"),
    ("test_datasets", math.inf, "test_datasets: expected a list of data sets"),
    ("datasets", [None], "datasets: expected a list of data sets"),
    ("bf16", "@x", "bf16: expected true or false"),
    ("neftune_noise_alpha", "off", "neftune_noise_alpha: expected a number, found 'off'"),
    ("datasets", [{"path": ["a"]}], r"datasets\[0\].path: expected a text, found"),
]
ODD_LLAMAFACTORY = [
    ("dataset", True, "dataset: expected a text or a list of texts, found True"),
    ("lora_target", True, "lora_target: expected a text or a list of texts"),
    ("save_steps", math.nan, "save_steps: expected a number, found nan"),
    ("dataset_dir", "x" * 300, "can be read: File name too long"),
    ("quantization_bit", [4], "quantization_bit: expected a number"),
    ("lora_rank", 2.5, "lora_rank: expected a whole number, found 2.5"),
    ("use_dora", "yes", "use_dora: expected true or false, found 'yes'"),
]
"""Values that ended in a traceback, and others of their kinds."""


@pytest.mark.parametrize(
    "settings,reason",
    [
        ({"some": "thing"}, "neither base_model"),
        ({"model": "owner/model", "train_dataset": "rows.yaml"}, "LLaMA-Factory's v1"),
        ({**test_axolotl.FILE, "rl": "gdpo"}, "reinforce/quickstart"),
        ({**test_axolotl.FILE, **test_axolotl.LORA, "lora_r": 0}, "adapter.rank"),
        ({**test_axolotl.FILE, "processor_type": "P", "qat": {"a": 1}}, "processor_type: 'P': (.|\n)*qat: {'a': 1}: "),
        *(({**test_axolotl.FILE, key: value}, reason) for key, value, reason in ODD_AXOLOTL),
        *(({**test_llamafactory.FILE, key: value}, reason) for key, value, reason in ODD_LLAMAFACTORY),
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


def test_columns_and_turns_that_a_table_of_llamafactory_names_reach_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    columns = {"prompt": "q", "query": "extra", "response": "a", "system": "s", "history": "past"}
    table = {"mine": {"file_name": "mine.json", "columns": columns}}
    rows = [
        {"q": f"Q{n}", "extra": f"E{n}", "a": f"A{n}", "s": "SYSTEM", "past": [["BEFORE", "SAID"]]} for n in range(20)
    ]
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(table))
    (tmp_path / "data/mine.json").write_text(json.dumps(rows))
    (tmp_path / "theirs.yaml").write_text(dump_yaml({**test_llamafactory.FILE, "model_name_or_path": "starter"}))
    for words in (["import", "theirs.yaml", "--out", "ours.yaml"], ["check", "ours.yaml"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert re.search(r"SYSTEM.*?BEFORE.*?SAID.*?Q(\d+).*?E\1.*?A\1", done.output, re.DOTALL)


def test_long_documents_of_stage_pt_become_blocks_and_none_of_them_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    table = {"mine": {"file_name": "d.json", "columns": {"prompt": "content"}}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(table))
    documents = [{"content": " ".join(f"word{n} of story {story}" for n in range(400))} for story in range(2)]
    (tmp_path / "data/d.json").write_text(json.dumps(documents))
    settings = {**test_llamafactory.FILE, "model_name_or_path": "starter", "stage": "pt", "val_size": 0.5}
    (tmp_path / "theirs.yaml").write_text(dump_yaml(settings))
    for words in (["import", "theirs.yaml", "--out", "ours.yaml"], ["check", "ours.yaml"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert "block 1 of 6" in done.output and "tokens are used (all)" in " ".join(done.output.split())


def test_a_name_that_no_file_may_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs.yml").write_text(dump_yaml(test_axolotl.FILE))
    with pytest.raises(ConfigError, match=r"File name too long\. Name another file"):
        translated.write(tmp_path / "theirs.yml", tmp_path / ("x" * 260))


def test_a_value_that_moves_the_cursor_stays_in_its_comment(tmp_path: Path) -> None:
    odd = {"note\x1b[2J\n": "a\x85b\u2028- c: d\x00"}
    (tmp_path / "theirs.yml").write_text(dump_yaml({**test_axolotl.FILE, **odd}))
    translated.write(tmp_path / "theirs.yml", tmp_path / "ours.yaml")
    text = (tmp_path / "ours.yaml").read_text()
    assert "# - 'note\\x1b[2J\\n': a b - c: d\\x00\n" in text
    assert load(str(tmp_path / "ours.yaml"), []).recipe == "sft"
