"""Published example files of Axolotl and LLaMA-Factory, unchanged: each is a recipe that `check` takes, or refused.

Their rows are those of LLaMA-Factory's own table of data sets where these are here, else shipped ones of the same kind;
the backbone is the shipped one. Nothing else of a file is replaced, but what MORE says.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.cli.verbs import app
from workbench.config.yaml_text import read_yaml
from workbench.errors import ConfigError
from workbench.recipes.load import load
from workbench.recipes.verbs import translated
from workbench.recipes.verbs.check import check

FILES = Path(__file__).parents[1] / "files"
PUBLISHED = {f"{path.parent.name}/{path.stem}": path for path in sorted((FILES / "foreign").glob("*/*.y*ml"))}
REFUSED = {
    "axolotl/gemma3-gemma-3-4b-vision-qlora": "processor_type: 'AutoProcessor'",
    "axolotl/llama-3-qlora-1b-gdpo": "rl: 'gdpo'",
    "llamafactory/train_lora-qwen3vl_lora_sft": "image_max_pixels: 262144",
}
"""Files whose task does not exist here, and the setting that says so."""
LEFT = {
    "axolotl/llama-3-lora-1b-deduplicate-sft": {"dataset_exact_deduplication", "lora_modules_to_save"},
    "axolotl/llama-3-lora-8b": {"lora_modules_to_save"},
}
"""Settings that have no equivalent; of the other files none."""
PAIRS = ("data.train=starter/oasst_pairs_train.jsonl", "data.columns={}", "data.on_bad_row=skip")
ROWS = {
    "sft": ("data.train=starter/fairytaleqa_train.jsonl", "data.columns={}", "data.format=auto"),
    "prefer": PAIRS,
    "reward": PAIRS,
}
"""Rows in place of those of the hub, by recipe; a file that names several sources keeps none of them."""
MORE = {
    "axolotl/llama-3-qlora": ("optimizer.name=adamw8bit",),
    "axolotl/llama-3-qlora-1b-kto": ("data.limit=96",),
    "llamafactory/train_lora-qwen3_lora_pretrain": ("data.max_tokens=1024",),
    "llamafactory/train_lora-qwen3_lora_kto": (*PAIRS, "data.limit=96"),
}
"""Settings that only some files need: an optimizer for a CPU, prompts enough for kto, what the backbone can read."""
INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
}
"""Entries of LLaMA-Factory's own dataset_info.json."""


def test_there_are_ten_of_each_tool_and_more() -> None:
    tools = [name.partition("/")[0] for name in PUBLISHED]
    assert min(tools.count("axolotl"), tools.count("llamafactory")) >= 10
    assert {*REFUSED, *LEFT, *MORE} <= PUBLISHED.keys()


@pytest.fixture
def beside_its_data(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A published file in a folder with LLaMA-Factory's data sets, as in its checkout."""
    (tmp_path / "data").mkdir()
    for each in INFO.values():
        shutil.copy(FILES / "formats" / str(each["file_name"]), tmp_path / "data")
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    return Path(shutil.copy(PUBLISHED[request.param], tmp_path))


@pytest.mark.nightly(
    but=[
        "axolotl/archived-tiny-llama-pretrain",
        "axolotl/gemma2-reward-model",
        "axolotl/llama-2-lisa",
        "axolotl/llama-3-qlora-1b-kto",
        "llamafactory/extras-galore-llama3_full_sft",
        "llamafactory/train_lora-qwen3_lora_dpo",
        "llamafactory/train_qlora-qwen3_lora_sft_otfq",
    ]
)
@pytest.mark.parametrize("beside_its_data", sorted({*PUBLISHED} - {*REFUSED}), indirect=True)
def test_a_published_file_checks_and_says_what_is_left(
    beside_its_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["import", beside_its_data.name, "--out", "ours.yaml"])
    assert done.exit_code == 0, done.output
    name = request.node.callspec.params["beside_its_data"]
    listed = (tmp_path / "ours.yaml").read_text().partition("# No equivalent:\n")[2].partition("\n# yaml")[0]
    assert {line.split(":")[0].removeprefix("# - ") for line in listed.splitlines()} == LEFT.get(name, set())
    recipe = read_yaml(tmp_path / "ours.yaml")
    rows = ROWS[recipe["recipe"]] if name.startswith("axolotl/") else ()
    words = ["model.id=starter", "data.limit=24", *rows, *MORE.get(name, ())]
    assert check(load("ours.yaml", words)) is not None


@pytest.mark.parametrize("beside_its_data", sorted(REFUSED), indirect=True)
def test_a_task_that_does_not_exist_here_is_refused_by_its_setting(
    beside_its_data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ConfigError) as caught:
        translated.write(beside_its_data, tmp_path / "ours.yaml")
    assert REFUSED[request.node.callspec.params["beside_its_data"]] in str(caught.value)
    assert not (tmp_path / "ours.yaml").exists()
