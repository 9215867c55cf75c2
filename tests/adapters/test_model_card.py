"""The model card of a saved adapter: its own lines load it, with the import that they name."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.conftest import tiny
from tests.vision_backbones import pixels, save_vision
from workbench import adapters
from workbench.adapters import BitFit, Boft, Bottleneck, DeepPrompt, Lora, Method, Pissa, Prompt
from workbench.adapters.banks import bank
from workbench.config import ModelConfig, model_heads
from workbench.models import backbones

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def _run(card: str, folder: Path) -> PeftModel:
    """The model that the card's lines load."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace('"folder"', repr(str(folder))), names)
    model: PeftModel = names["model"]
    return model


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (Lora(rank=2), False),
        (Pissa(rank=2), False),
        (Bottleneck(width=2), True),
        (BitFit(), True),
        (Boft(factors=2, block=2), True),
    ],
    ids=lambda value: value.method if isinstance(value, Method) else "",
)
@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification"])
def test_its_lines_load_the_adapter(config: Method, needed: bool, head: str, tmp_path: Path) -> None:
    name = "Bert" if head == "SequenceClassification" else "OPT"
    tiny(name, head=head, num_labels=3).save_pretrained(tmp_path / "base")
    base = _from(tmp_path / "base", head, name)
    model = adapters.attach(base, config, seed=0).eval()
    adapters.save(model, tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert str(tmp_path / "base") in card and "More Information Needed" not in card
    assert ("import workbench.adapters" in card) == needed
    loaded = _run(card, tmp_path / "adapter")
    torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("head", "needed"), [("CausalLM", False), ("SequenceClassification", True)])
def test_a_prefix_needs_the_import_where_it_is_ours(head: str, needed: bool, tmp_path: Path) -> None:
    test_its_lines_load_the_adapter(DeepPrompt(virtual_tokens=3), needed, head, tmp_path)


def _from(folder: Path, head: str, name: str) -> Any:
    import transformers

    found = getattr(transformers, f"{name}For{head}").from_pretrained(folder)
    return found.eval()


def test_new_rows_are_made_room_for(tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path / "base")
    base = _from(tmp_path / "base", "CausalLM", "Llama")
    size = base.get_input_embeddings().weight.shape[0]
    base.resize_token_embeddings(size + 1)
    model = adapters.attach(base, Lora(rank=2), seed=0, new_token_ids=[size]).eval()
    adapters.save(model, tmp_path / "adapter")
    loaded = _run((tmp_path / "adapter" / "README.md").read_text(), tmp_path / "adapter")
    assert loaded.get_base_model().get_input_embeddings().weight.shape[0] == size + 1


def test_a_member_of_a_bank_has_the_card_of_an_adapter_alone(tmp_path: Path) -> None:
    base = tiny("Llama")
    made = bank.attach(copy.deepcopy(base), [Lora(rank=2)] * 2, seeds=range(2))
    made.save(made.members[1], tmp_path / "member")
    adapters.save(adapters.attach(base, Lora(rank=2), seed=0), tmp_path / "alone")
    cards = [(tmp_path / name / "README.md").read_text() for name in ("member", "alone")]
    assert cards[0] == cards[1]


@pytest.mark.parametrize(("config", "needed"), [(Lora(rank=2), False), (Prompt(virtual_tokens=3), True)])
def test_its_lines_load_an_adapter_of_pictures_over_a_head_for_other_classes(
    config: Method, needed: bool, tmp_path: Path
) -> None:
    save_vision(tmp_path / "base", "ViT", labels=10)
    task = model_heads.classes(["a", "b", "c"], seed=0)
    base = backbones.load(ModelConfig(id=str(tmp_path / "base"), weights="float32"), None, task=task).model
    model = adapters.attach(base, config, seed=0).eval()
    adapters.save(model, tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert ("import workbench.adapters" in card) == needed
    loaded = _run(card, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixel_values=pixels()).logits, model(pixel_values=pixels()).logits)
