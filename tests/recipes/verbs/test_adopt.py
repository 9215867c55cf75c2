"""Adapters of other programs: adopted, they compute what stock PEFT computes, train further and merge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import workbench
from workbench.errors import ConfigError, WorkbenchError
from workbench.recipes.single import start_adapter

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj))|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))"
)
IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7, 200, 300]])


class Foreign(NamedTuple):
    """An adapter as another program makes it."""

    config: Callable[[], PeftConfig]
    tokens: int = 0
    """Tokens that it adds to the tokenizer, which it saves beside the adapter."""
    rows: Callable[[int], int] = lambda tokens: tokens
    """Rows of the resized embedding, by the tokens of the tokenizer."""
    method: str = "lora"
    keeps: bool | str = "auto"
    """PEFT's save_embedding_layers."""


def lora(**settings: Any) -> Callable[[], PeftConfig]:
    return lambda: LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **settings}
    )


def by_64(tokens: int) -> int:
    return -(-tokens // 64) * 64


SAVED = ["embed_tokens", "lm_head"]
FOREIGN = {
    "llamafactory": Foreign(lora(r=8, lora_alpha=16, lora_dropout=0.0)),
    "llamafactory resize_vocab": Foreign(lora(modules_to_save=SAVED), 3, by_64),
    "llamafactory use_dora": Foreign(lora(use_dora=True), method="dora"),
    "llamafactory use_rslora": Foreign(lora(use_rslora=True), method="rslora"),
    "llamafactory additional_target": Foreign(lora(target_modules=["q_proj", "v_proj"], modules_to_save=["norm"])),
    "axolotl": Foreign(lora(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["v_proj", "q_proj"])),
    "axolotl lora_modules_to_save": Foreign(lora(modules_to_save=SAVED), 2),
    "axolotl peft_layers_to_transform": Foreign(lora(layers_to_transform=[1])),
    "axolotl resized, all rows saved": Foreign(lora(), 5, keeps=True),
    "axolotl lora_fan_in_fan_out off": Foreign(lora(bias="lora_only")),
    "unsloth": Foreign(lora(target_modules=UNSLOTH)),
    "unsloth embeddings": Foreign(
        lora(target_modules=UNSLOTH, modules_to_save=SAVED, use_rslora=True), method="rslora"
    ),
    "unsloth init": Foreign(lora(init_lora_weights=True, loftq_config={}, lora_dropout=0)),
    "rank pattern": Foreign(
        lora(rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6}, alpha_pattern={"q_proj": 3})
    ),
    "trainable tokens": Foreign(lora(trainable_token_indices=[5, 60])),
    "new trainable tokens": Foreign(lora(trainable_token_indices={"embed_tokens": [5], "lm_head": [5]})),
    "embedding": Foreign(lora(target_modules=[*LINEAR, "embed_tokens"])),
    "head": Foreign(lora(target_modules=[*LINEAR, "lm_head"])),
    "embedding and head tied": Foreign(lora(target_modules=[*LINEAR, "embed_tokens"], ensure_weight_tying=True)),
    "bias": Foreign(lora(bias="all")),
    "excluded": Foreign(lora(exclude_modules=["down_proj"])),
    "ia3": Foreign(lambda: IA3Config(task_type="CAUSAL_LM"), method="ia3"),
    "loha": Foreign(lambda: LoHaConfig(r=2, target_modules=["q_proj"]), method="loha"),
    "prefix": Foreign(lambda: PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), method="prefix"),
}
OUTSIDE = ("embedding", "head", "embedding and head tied")
TRAINED = [name for name, each in FOREIGN.items() if each.method not in ("loha", "prefix") and name not in OUTSIDE]
"""Those that train further: their tensors are all of them, and change layers of blocks."""
FAST = ["llamafactory resize_vocab", "unsloth"]


def base(folder: str, tokens: int) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if tokens:
        torch.manual_seed(1)
        model.resize_token_embeddings(tokens)
    return model


def made(name: str, stories: str, folder: Path) -> tuple[Path, int]:
    """The folder that another program saved, and the rows of its embedding, 0 where they are the backbone's."""
    each = FOREIGN[name]
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.add_tokens([f"<|{number}|>" for number in range(each.tokens)])
    rows = each.rows(len(tokenizer)) if each.tokens else 0
    model = get_peft_model(base(stories, rows), each.config())
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(str(folder), save_embedding_layers=each.keeps)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/a/machine/far/away"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, rows


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def params(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", params(list(FOREIGN)))
def test_what_stock_peft_loads_is_adopted_with_equal_logits(name: str, stories: str, tmp_path: Path) -> None:
    folder, rows = made(name, stories, tmp_path / "theirs")
    wanted = logits(PeftModel.from_pretrained(base(stories, rows), str(folder)))
    adopted = workbench.adopt(folder, ["model.weights=float32"], model=stories, out=tmp_path / "run")
    assert adopted.method == FOREIGN[name].method
    found = logits(workbench.load_run(tmp_path / "run").model)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[..., :100], logits(base(stories, 0))[..., :100], atol=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.nightly(but=["unsloth", "llamafactory use_dora"])
@pytest.mark.parametrize("name", TRAINED)
def test_an_adopted_adapter_trains_further_and_merges(name: str, stories: str, questions: Path, tmp_path: Path) -> None:
    """The run that goes on has the same form, starts where the adapter was, and stock PEFT loads what it saves."""
    folder, rows = made(name, stories, tmp_path / "theirs")
    mine = [f"data.train={questions}", "data.held_out=0.3", "data.test=null", "model.weights=float32"]
    workbench.adopt(folder, mine, model=stories, out=tmp_path / "run")
    words = [f"model.id={stories}", *mine, f"train.start={tmp_path / 'run'}", "train.steps=2", "train.epochs=null"]
    words += ["batch.size=4", "evaluate.answers=0", "train.learning_rate=0.01"]
    with pytest.raises(ConfigError, match=r"Write adapter='(.*)', or merge") as refused:
        workbench.run("sft/quickstart", words, out=tmp_path / "other", quiet=True)
    told = str(refused.value).split("Write adapter='")[1].split("', or merge")[0]
    further = workbench.run("sft/quickstart", [*words, f"adapter={told}"], out=tmp_path / "further", quiet=True)
    before = json.loads((further / "scores.json").read_text())["before"]["loss"]
    assert before == pytest.approx(workbench.evaluate(tmp_path / "run")["loss"], rel=1e-4)
    found = logits(workbench.load_run(further).model)
    stock = logits(PeftModel.from_pretrained(base(stories, rows), str(further / "adapter")))
    torch.testing.assert_close(found, stock, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, logits(workbench.load_run(tmp_path / "run").model), atol=1e-3)
    for run in (tmp_path / "run", further):
        merged = workbench.merge(run, out=tmp_path / f"merged-{run.name}", weights="float32")
        assert merged.agreement.kl < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_adapter_of_the_embedding_or_the_head_is_merged_and_not_trained_further(
    name: str, stories: str, tmp_path: Path
) -> None:
    """The backbone ties the two, so that one update must not reach both."""
    folder, _ = made(name, stories, tmp_path / "theirs")
    workbench.adopt(folder, ["model.weights=float32"], model=stories, out=tmp_path / "run")
    assert workbench.merge(tmp_path / "run", out=tmp_path / "merged", weights="float32").agreement.kl < 1e-6
    found = logits(workbench.load_run(tmp_path / "run").model)
    torch.testing.assert_close(logits(base(str(tmp_path / "merged"), 0)), found, rtol=1e-5, atol=3e-5)
    with pytest.raises(ConfigError, match=r"outside of the blocks.*Leave train.start out"):
        start_adapter.require(
            workbench.load_recipe("sft/quickstart", [f"model.id={stories}", f"train.start={tmp_path / 'run'}"])
        )


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle": (lambda at: (at / "adapter_model.safetensors").rename(at / "adapter_model.bin"), "a pickle, which"),
    "no weights": (lambda at: (at / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors there"),
    "no configuration": (lambda at: (at / "adapter_config.json").unlink(), "no adapter_config.json there"),
    "damaged weights": (lambda at: (at / "adapter_model.safetensors").write_bytes(b"{"), "damaged"),
    "damaged configuration": (lambda at: (at / "adapter_config.json").write_text("{"), "damaged"),
    "another task": (lambda at: edit(at, task_type="SEQ_CLS"), "task_type=SEQ_CLS"),
    "another backbone": (lambda at: edit(at, target_modules=["c_attn"]), "does not fit the backbone"),
    "an unknown method": (lambda at: edit(at, peft_type="NEVER"), "damaged"),
}


def edit(folder: Path, **values: object) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | values))


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_adapter_of_text_is_refused_by_name(stories: str, tmp_path: Path) -> None:
    theirs, _ = made("unsloth", stories, tmp_path / "theirs")
    with pytest.raises(WorkbenchError, match=r"its backbone, /a/machine/far/away, is not to be had.*--model FOLDER"):
        workbench.adopt(theirs, out=tmp_path / "run")
    for name, (damage, why) in REFUSED.items():
        folder = shutil.copytree(theirs, tmp_path / name)
        damage(folder)
        with pytest.raises(WorkbenchError, match=why):
            workbench.adopt(folder, model=stories, out=tmp_path / "run")
        assert not (tmp_path / "run").exists(), name
