"""Published models: each shape is that of the model that it is named after, its page is of them, and `init` writes a
recipe for a tiny one of each family."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.run_files import write_lines
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.first_recipe import Wishes, write

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "bench"))
try:
    from published_models import CARDS, MODELS, write_config
finally:
    sys.path.pop()


def test_the_page_has_whole_models_names_the_others_and_says_that_none_ran_there() -> None:
    page = (ROOT / "recipes" / "models.md").read_text()
    cells = [cell for cell in re.findall(r"^\| `([^`]+)` \| (\w+) \|", page, re.M) if cell[1] in CARDS]
    there = [model for model in MODELS if (model, CARDS[0]) in cells]
    assert there and cells == [(model, card) for model in there for card in CARDS]
    _, _, later = page.partition("Not in the table yet")
    assert re.findall(r"`([^`]+)`", later.partition("\n")[0]) == [model for model in MODELS if model not in there]
    assert re.search(r"on 20\d\d-\d\d-\d\d", page) and "run on these cards" in page


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in MODELS if re.search(r"-[\d.]+[bB]", name)])
def test_a_shape_has_as_many_parameters_as_its_name_says(tmp_path: Path, name: str) -> None:
    write_config(name, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    [billions] = re.findall(r"-([\d.]+)[bB]", name)[:1]
    assert model.num_parameters() / 1e9 == pytest.approx(float(billions), rel=0.25)  # names round: 1B is 1.24


@pytest.mark.nightly(but=["meta-llama/Llama-3.2-1B"])
@pytest.mark.parametrize("name", {MODELS[name].family: name for name in reversed(MODELS)}.values())
def test_init_writes_a_recipe_for_a_tiny_one_of_the_family(tmp_path: Path, name: str) -> None:
    write_config(name, tmp_path / "model", tiny=True)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model")).save_pretrained(tmp_path / "model")
    rows = [{"question": f"How many is {n}?", "answer": "Many."} for n in range(40)]
    write_lines(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "my.yaml"
    write(Wishes(str(tmp_path / "rows.jsonl"), "answers", str(tmp_path / "model"), device="4090"), out)
    assert load(str(out)).model.weights == "bfloat16" and check(load(str(out))).config.recipe == "sft"
