"""Published models: each shape is that of the model that it is named after, the page and the recipes are of them, and
what is written for a model trains a tiny one of its family."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import workbench
from tests.run_files import read_losses, write_lines
from tests.vision_families import save
from workbench.config.yaml_text import read_yaml
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.first_recipe import Wishes, write

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "bench"))
try:
    from published_models import MODELS, PAGE, RECIPES, read_page, recipe_name, write_config, write_recipes
finally:
    sys.path.pop()


def test_the_page_has_whole_models_names_the_others_and_says_that_none_ran_there() -> None:
    page, found = PAGE.read_text(), read_page()
    there = [model for model in MODELS if any(key[0] == model for key in found)]
    assert there and list(found) == [(model, card) for model in there for card in MODELS[model].cards]
    _, _, later = page.partition("Not in the table yet")
    assert re.findall(r"`([^`]+)`", later.partition("\n")[0]) == [model for model in MODELS if model not in there]
    assert (
        all(re.fullmatch(r"20\d\d-\d\d-\d\d", cells[-1]) for cells in found.values()) and "run on these cards" in page
    )


def test_the_recipes_are_those_of_the_page(tmp_path: Path) -> None:
    write_recipes(tmp_path / "models", read_page())
    written = {path.name: path.read_text() for path in (tmp_path / "models").iterdir()}
    assert {path.name: path.read_text() for path in RECIPES.iterdir()} == written
    assert len(written) >= 40, "of text, pictures, sound and experts"
    assert {load(f"models/{Path(name).stem}").recipe for name in written} == {"sft"}


def test_a_recipe_says_what_waits_on_the_host_and_leaves_the_layout_to_the_run() -> None:
    for (model, card), (way, *_) in read_page().items():
        name = f"models/{recipe_name(model, card)}"
        config, head = load(name), (RECIPES / f"{Path(name).name}.yaml").read_text().partition("recipe:")[0]
        assert (config.train.offload_activations is True) == ("inputs of blocks to cpu" in way), name
        assert not config.distributed.sharded, name
        assert way.partition("(")[2].strip(")") in head


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in MODELS if re.search(r"-[\d.]+[bB]", name)])
def test_a_shape_has_as_many_parameters_as_its_name_says(tmp_path: Path, name: str) -> None:
    write_config(name, tmp_path)
    auto = AutoModelForImageTextToText if MODELS[name].sees else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.from_pretrained(tmp_path))
    [billions] = re.findall(r"-([\d.]+)[bB]", name)[:1]
    assert model.num_parameters() / 1e9 == pytest.approx(float(billions), rel=0.25)  # names round: 1B is 1.24


OF_CHAT = {shape.family: name for name, shape in reversed(MODELS.items()) if shape.recipe == "sft/chat"}.values()
"""A model of each family that reads text alone."""


@pytest.mark.nightly(but=["meta-llama/Llama-3.2-1B"])
@pytest.mark.parametrize("name", OF_CHAT)
def test_init_writes_a_recipe_for_a_tiny_one_of_the_family(tmp_path: Path, name: str) -> None:
    write_config(name, tmp_path / "model", tiny=True)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model")).save_pretrained(tmp_path / "model")
    rows = [{"question": f"How many is {n}?", "answer": "Many."} for n in range(40)]
    write_lines(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "my.yaml"
    write(Wishes(str(tmp_path / "rows.jsonl"), "answers", str(tmp_path / "model"), device="4090"), out)
    assert load(str(out)).model.weights == "bfloat16" and check(load(str(out))).config.recipe == "sft"


OF_FAMILIES = {
    MODELS[model].family: (model, card) for (model, card), cells in reversed(read_page().items()) if cells[3]
}
"""A recipe of each family, for the smallest card."""


@pytest.mark.nightly(but=["llama", "whisper"])
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_a_recipe_trains_a_tiny_one_of_its_family(tmp_path: Path, family: str) -> None:
    model, card = OF_FAMILIES[family]
    words = ["train.steps=2", "data.limit=40", "data.held_out=0.2", "batch.size=4", "evaluate.answers=2"]
    words += ["evaluate.every=2", "evaluate.max_new_tokens=4"]
    if family == "whisper":
        tiny = "starter/sound"
    elif MODELS[model].sees:
        tiny = save(family, tmp_path / "model")
    else:
        tiny = str(tmp_path / "model")
        write_config(model, tmp_path / "model", tiny=True)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny)).save_pretrained(tiny)
    run = workbench.run(
        f"models/{recipe_name(model, card)}", [*words, f"model.id={tiny}"], out=tmp_path / "run", quiet=True
    )
    assert len(read_losses(run)) == 2 and (run / "adapter" / "adapter_model.safetensors").exists()
    weights = read_yaml(run / "config.yaml")["model"]["weights"]
    assert weights == read_page()[model, card][0].split(",")[0]
