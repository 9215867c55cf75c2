"""Published example files of Axolotl and LLaMA-Factory: each is a recipe that `check` takes, or refused.

Their rows are those of LLaMA-Factory's own table of data sets where these are here, else shipped ones of the same kind;
the backbone is the shipped one. Nothing else of a file is replaced, but what MORE says.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from workbench.cli.verbs import app
from workbench.config.foreign import shared_settings
from workbench.config.yaml_text import dump_yaml, read_yaml
from workbench.errors import ConfigError, WorkbenchError
from workbench.recipes.load import load
from workbench.recipes.verbs import translated
from workbench.recipes.verbs.check import check

FILES = Path(__file__).parents[1] / "files"
PUBLISHED: dict[str, dict[str, Any]] = dict(
    map(json.loads, gzip.decompress((FILES / "foreign/examples.jsonl.gz").read_bytes()).decode().splitlines())
)
"""Settings of every YAML file in the two projects' folders of examples, and of dataset_info.json, by its path there."""
SETS = PUBLISHED.pop("llamafactory/data/dataset_info.json")
INFO = {name: SETS[name] for name in ("identity", "alpaca_en_demo", "dpo_en_demo", "kto_en_demo", "c4_demo")}
"""Entries of LLaMA-Factory's own dataset_info.json whose rows are here."""
REFUSED = {
    "axolotl/examples/gemma3/gemma-3-4b-vision-qlora.yml": "processor_type: 'AutoProcessor'",
    "axolotl/examples/llama-3/qlora-1b-gdpo.yaml": "rl: 'gdpo'",
    "llamafactory/examples/train_lora/qwen3vl_lora_sft.yaml": "image_max_pixels: 262144",
    "llamafactory/examples/extras/nlg_eval/llama3_lora_predict.yaml": "do_predict: this file computes",
    "llamafactory/examples/inference/qwen3.yaml": "infer_backend: 'huggingface'",
    "llamafactory/examples/v1/train_lora/train_lora_sft.yaml": "LLaMA-Factory's v1",
    "axolotl/examples/cloud/modal.yaml": "neither base_model",
}
"""Files whose task does not exist here, and what says so."""
PAIRS = ("data.train=starter/oasst_pairs_train.jsonl", "data.columns={}", "data.on_bad_row=skip")
ROWS = {
    "sft": ("data.train=starter/fairytaleqa_train.jsonl", "data.columns={}", "data.format=auto"),
    "prefer": PAIRS,
    "reward": PAIRS,
}
"""Rows in place of those of the hub, by recipe; a file that names several sources keeps none of them."""
MORE = {
    "axolotl/examples/llama-3/qlora.yml": ("optimizer.name=adamw8bit",),
    "axolotl/examples/llama-3/qlora-1b-kto.yaml": ("data.limit=96",),
    "llamafactory/examples/train_lora/qwen3_lora_pretrain.yaml": ("data.max_tokens=1024",),
    "llamafactory/examples/train_lora/qwen3_lora_kto.yaml": (*PAIRS, "data.limit=96"),
}
"""Settings that only some files need: an optimizer for a CPU, prompts enough for kto, what the backbone can read."""


def test_there_are_ten_of_each_tool_and_more() -> None:
    tools = [name.partition("/")[0] for name in PUBLISHED]
    assert min(tools.count("axolotl"), tools.count("llamafactory")) >= 10
    assert {*REFUSED, *MORE} <= PUBLISHED.keys()


@pytest.fixture
def beside_its_data(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A published file in a folder with LLaMA-Factory's data sets, as in its checkout."""
    (tmp_path / "data").mkdir()
    for each in INFO.values():
        shutil.copy(FILES / "formats" / each["file_name"], tmp_path / "data")
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    path = tmp_path / "theirs.yaml"
    path.write_text(dump_yaml(PUBLISHED[request.param]))
    return path


CHECKED = [
    *("axolotl/examples/archived/tiny-llama/pretrain.yml", "axolotl/examples/gemma2/reward-model.yaml"),
    *("axolotl/examples/llama-2/lisa.yml", "axolotl/examples/llama-3/qlora-1b-kto.yaml"),
    *(
        "llamafactory/examples/extras/galore/llama3_full_sft.yaml",
        "llamafactory/examples/train_lora/qwen3_lora_dpo.yaml",
    ),
    "llamafactory/examples/train_qlora/qwen3_lora_sft_otfq.yaml",
]
"""Files that `check` reads with rows at each change; the other ones below nightly."""
ALSO = [
    *(f"axolotl/examples/llama-3/{name}.yml" for name in ("instruct-dpo-lora-8b", "lora-8b", "qlora")),
    *("axolotl/examples/llama-2/loftq.yml", "axolotl/examples/llama-3/lora-1b-deduplicate-sft.yml"),
    *(f"llamafactory/examples/extras/{name}.yaml" for name in ("llama_pro/llama3_freeze_sft", "pissa/llama3_lora_sft")),
    *(f"llamafactory/examples/train_lora/qwen3_lora_{name}.yaml" for name in ("kto", "pretrain", "reward", "sft")),
]


@pytest.mark.nightly(but=CHECKED)
@pytest.mark.parametrize("beside_its_data", [*CHECKED, *ALSO], indirect=True)
def test_a_published_file_checks(
    beside_its_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["import", beside_its_data.name, "--out", "ours.yaml"])
    assert done.exit_code == 0, done.output
    recipe = read_yaml(tmp_path / "ours.yaml")
    name = request.node.callspec.params["beside_its_data"]
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


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every setting, however deep."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            name = key if re.fullmatch(r"[^\W\d][\w-]*", key) else repr(key)
            yield from leaves(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        for number, each in enumerate(value):
            yield from leaves(each, f"{path}[{number}]")
    else:
        yield path, value


def lost(settings: dict[str, Any], out: Path) -> tuple[Counter[str], list[str]]:
    """How many settings the recipe in `out` names as what, and those that it does not name, or puts nowhere."""
    comments, _, _ = out.read_text().partition("# yaml-language-server")
    recipe = read_yaml(out)
    parts = {"No equivalent": "told", "Look at": "told", "Decided here": "idle", "Translated": "translated"}
    count, missing, kind = Counter[str](), [], ""
    lines = dict[str, str]()
    for line in comments.splitlines():
        kind = next((ours for title, ours in parts.items() if line.startswith(f"# {title}")), kind)
        lines[kind] = f"{lines.get(kind, '')} {line.removeprefix('# - ')}\n"
    listed = ("datasets", "pretraining_dataset", "test_datasets") if "base_model" in settings else ()
    for path, value in leaves(shared_settings.mappings(settings, *listed)):
        named = re.compile(rf"(?<![\w.\]]){re.escape(path)}(: | -> (\S+?)[,\n]|[,\n])")
        found = {kind: match for kind, text in lines.items() if (match := named.search(text))}
        place = recipe
        if "translated" in found:
            for key in str(found["translated"][2]).split("."):
                place = place.get(key) if isinstance(place, dict) else None
        if not found or place is None:
            missing.append(f"{path}: {value!r}")
        count[next(iter(found), "lost")] += 1
    return count, missing


def imported(settings: dict[str, Any], folder: Path, info: dict[str, Any] | None = None) -> Path | None:
    """The recipe of a file with these settings; None where it is refused in words."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/dataset_info.json").write_text(json.dumps(SETS if info is None else info))
    (folder / "in.yaml").write_text(dump_yaml(settings))
    out = folder / "out.yaml"
    out.unlink(missing_ok=True)
    try:
        translated.write(folder / "in.yaml", out)
    except WorkbenchError as error:
        assert str(error)
        assert not out.exists()
        return None
    return out


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_every_setting_of_every_published_file_is_named(tmp_path: Path, every: int) -> None:
    total, refused = Counter[str](), 0
    for name in list(PUBLISHED)[::every]:
        out = imported(PUBLISHED[name], tmp_path)
        refused += out is None
        if out is not None:
            count, missing = lost(PUBLISHED[name], out)
            assert not missing, name
            total += count
    if every == 1:
        assert (len(PUBLISHED), refused) == (352, 112)
        assert total == {"translated": 4107, "told": 1003, "idle": 4756}


SIDES = {"images", "videos", "audios"}
STAGES = {
    "rm": lambda entry: entry.get("ranking"),
    "kto": lambda entry: "kto_tag" in entry.get("columns", {}),
    "pt": lambda entry: entry.get("columns", {}).keys() == {"prompt"},
    "sft": lambda entry: True,
}
"""The stage that a data set of LLaMA-Factory's table is for: the first that fits."""


@pytest.mark.parametrize("stage", STAGES)
def test_every_setting_of_every_published_data_set_is_named(tmp_path: Path, stage: str) -> None:
    texts = {name: entry for name, entry in SETS.items() if not SIDES & entry.get("columns", {}).keys()}
    of = {name: next(each for each, fits in STAGES.items() if fits(entry)) for name, entry in texts.items()}
    chosen = {name: texts[name] for name, each in of.items() if each == stage}
    out = imported({"model_name_or_path": "x", "stage": stage, "dataset": ",".join(chosen)}, tmp_path)
    assert out is not None and chosen
    _, missing = lost({"dataset_info": {"json": chosen}}, out)
    assert not missing


def test_data_sets_of_pictures_and_sound_are_refused_by_name(tmp_path: Path) -> None:
    sides = [name for name, entry in SETS.items() if SIDES & entry.get("columns", {}).keys()]
    assert len(sides) == 13
    for name in sides:
        assert imported({"model_name_or_path": "x", "dataset": name}, tmp_path) is None


ODD: list[Any] = [
    *(None, True, False, 0, -1, 0.0, 1e308, -0.5, float("inf"), float("nan"), 10**400, [], {}, "", " ", "a,b"),
    *("12:30:45", "off", "@x", "\\", "file:///etc/passwd", "é\x85\x1b[2J\n- a: b", "auto", "none", "x" * 300),
    *("1e-4", "train[:9]", ["a", {}], [[1]], [None], ["q_proj", 1], [{"path": "a"}], {"a": {"b": 1}}),
    {"": 1, "a.b": 2, "c d": [{"x": 1}]},
]
"""Values that no key expects."""
NEW = ["surprise", "lora_r2", "columns", "split", "tags", "type", "a.b", "a b", "0", "datasets[0]", "é", ""]


def mutated(settings: dict[str, Any], random: random.Random) -> dict[str, Any]:
    """The settings with up to six of them changed, renamed, dropped, or new, at any depth."""
    settings = copy.deepcopy(settings)
    for _ in range(random.randint(1, 6)):
        place: Any = settings
        while random.random() < 0.6:
            below = list(place.values()) if isinstance(place, dict) else place
            place = random.choice([each for each in below if each and isinstance(each, (dict, list))] or [place])
        value = copy.deepcopy(random.choice(ODD))
        if isinstance(place, list):
            place[random.randrange(len(place))] = value
            continue
        key = random.choice([*place, random.choice(NEW)])
        if random.random() < 0.2:
            place.pop(key, None)
        else:
            place[key] = value
    return settings


@pytest.mark.parametrize("cases", [30, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_mutated_files_are_refused_in_words_or_nothing_of_them_disappears(tmp_path: Path, cases: int) -> None:
    chance, written = random.Random(cases), 0
    files = [settings for settings in PUBLISHED.values() if {"base_model", "model_name_or_path"} & settings.keys()]
    for _ in range(cases):
        settings, sets = chance.choice(files), chance.sample(list(SETS), 2)
        info = mutated({name: SETS[name] for name in sets}, chance)
        settings = mutated({**settings, "dataset": sets} if "stage" in settings else settings, chance)
        if (out := imported(settings, tmp_path, info)) is not None:
            written += 1
            named = "dataset_dir" not in settings and settings.get("dataset") == sets
            used = {name: info[name] for name in sets if named and info.get(name)}
            assert not lost({**settings, "dataset_info": {"json": used}} if used else settings, out)[1]
    assert written > cases / 10
