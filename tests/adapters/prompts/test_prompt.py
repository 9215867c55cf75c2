"""Where a prompt starts: words, noise, a text; and that what trains it is the loop's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Method, Prompt, PTuning
from workbench.config import ModelConfig, RunConfig
from workbench.errors import ConfigError
from workbench.models import backbones
from workbench.schema import parse
from workbench.training import activation_checkpointing

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7], [4, 8, 15, 16, 23, 42, 2]])


def weight(model: PreTrainedModel, config: Method, seed: int = 0) -> Tensor:
    """The embeddings of the virtual tokens."""
    attached: Any = adapters.attach(copy.deepcopy(model), config, seed=seed)
    found: Tensor = attached.prompt_encoder["default"].embedding.weight.detach()
    return found


def test_it_starts_at_rows_of_the_vocabulary_that_the_seed_alone_chooses(llama: PreTrainedModel) -> None:
    rows = llama.get_input_embeddings().weight
    first = weight(llama, Prompt())
    assert all((rows == row).all(1).any() for row in first)
    assert len(first.unique(dim=0)) > 10
    torch.manual_seed(5)
    assert torch.equal(weight(llama, Prompt()), first)
    assert not torch.equal(weight(llama, Prompt(), seed=1), first)


@pytest.mark.parametrize("spread", [0.02, 3.0])
def test_noise_is_as_wide_as_the_vocabulary(llama: PreTrainedModel, spread: float) -> None:
    torch.nn.init.normal_(llama.get_input_embeddings().weight, std=spread)
    noise = weight(llama, Prompt(init="random"))
    assert float(noise.std()) == pytest.approx(spread, rel=0.2)
    assert abs(float(noise.mean())) < 0.2 * spread


def test_a_text_is_its_tokens_repeated(stories: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories)
    ids = AutoTokenizer.from_pretrained(stories)("Once upon a time")["input_ids"]
    found = weight(model, Prompt(init="text", text="Once upon a time", virtual_tokens=len(ids) + 2))
    torch.testing.assert_close(found, model.get_input_embeddings()(torch.tensor(ids + ids[:2])).detach())


def test_a_text_that_would_be_cut_is_refused(stories: str) -> None:
    config = Prompt(init="text", text="Once upon a time", virtual_tokens=3)
    model = backbones.skeleton(ModelConfig(id=stories))
    with pytest.raises(ConfigError, match=r"adapter.text has (\d+) tokens, .*=3. Write adapter.virtual_tokens=\1, or"):
        adapters.require_fit(model, config)


@pytest.mark.parametrize("values", [{"init": "text"}, {"text": "a story"}, {"init": "random", "text": "a story"}])
def test_a_text_goes_with_its_initialisation(values: dict[str, str]) -> None:
    sections = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "adapter": {"method": "prompt", **values}}
    with pytest.raises(ConfigError, match=r"adapter\.text goes with adapter\.init=text, and only with it"):
        parse(RunConfig, sections, source="here")


@pytest.mark.parametrize("encoder", ["mlp", "lstm"])
def test_the_network_of_p_tuning_is_not_saved(llama: PreTrainedModel, encoder: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    bare = copy.deepcopy(llama)
    config = PTuning.model_validate({"encoder": encoder, "virtual_tokens": 5, "encoder_width": 8})
    model = adapters.attach(llama, config, seed=0).eval()
    assert adapters.count(model).trainable > 5 * 32
    adapters.save(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {"prompt_embeddings": (5, 32)}
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        torch.testing.assert_close(adapters.load(bare, tmp_path)(input_ids=IDS).logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [Prompt(virtual_tokens=3), PTuning(virtual_tokens=3)], ids=lambda each: each.method)
def test_recomputed_activations_give_the_same_gradients(config: Method) -> None:
    gradients = []
    for recompute in (False, True):
        model: Any = adapters.attach(tiny("Llama"), config, seed=0).train()
        if recompute:
            activation_checkpointing.keep(model, True)
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append([each.grad for each in model.parameters() if each.requires_grad])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.any()
        torch.testing.assert_close(recomputed, plain)
