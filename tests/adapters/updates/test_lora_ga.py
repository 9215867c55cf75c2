"""LoRA-GA starts along the gradient of the whole weight, as the paper says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.adapters.updates.test_lora_starts import (
    IDS,
    RANK,
    SCALE,
    _config,
    _layers,
    _live,
    _quantised,
    _train,
    _update,
)
from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import LoraGa
from workbench.adapters.anatomy import dense_weight
from workbench.adapters.updates.lora_start_values import summed_gradients
from workbench.errors import ConfigError, TrainingError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


TOKENS = torch.arange(20, 60)[None]
"""So many that no gradient is of lower rank than what is taken of it."""


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Of the weights (outputs, inputs), by the path that a layer has under LoRA, for the row TOKENS."""
    model.zero_grad()
    model.requires_grad_(True)(input_ids=TOKENS, labels=TOKENS).loss.backward()
    weights = {name.removesuffix(".weight"): each.grad for name, each in model.named_parameters()}
    transposed = {name for name, each in model.named_modules() if type(each).__name__ == "Conv1D"}
    return {
        f"base_model.model.{name}": each.T if name in transposed else each
        for name, each in weights.items()
        if each is not None
    }


def _along_gradients(name: str, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """A model that starts along its gradients, and these."""
    gradients = _gradients(tiny(name))
    config = _config("lora-ga", **settings)
    model: Any = adapters.attach(tiny(name).requires_grad_(False), config, seed=0).eval()
    config.choose(model, (model(input_ids=TOKENS, labels=TOKENS).loss for _ in range(2)))
    return model, gradients


@pytest.mark.parametrize("decomposition", ["exact", "randomised"])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_lora_ga_is_the_algorithm_of_the_paper(name: str, decomposition: str) -> None:
    """Wang et al. 2024, algorithm 1, but for the shift, which stays apart from the frozen weights."""
    model, gradients = _along_gradients(name, decomposition=decomposition, gamma=9)
    assert _layers(model)
    for path, layer in _layers(model).items():
        U, _, Vh = torch.linalg.svd(gradients[path], full_matrices=False)
        length = len(U) ** 0.25 / 9**0.5
        A, B = _live(layer)
        assert A.any() and B.any()
        signs = ((A * Vh[:RANK]).sum(1, keepdim=True).sign(), (B * U[:, RANK : 2 * RANK]).sum(0).sign())
        torch.testing.assert_close(A, signs[0] * length * Vh[:RANK], rtol=0, atol=1e-3)
        torch.testing.assert_close(B, signs[1] * length * U[:, RANK : 2 * RANK], rtol=0, atol=1e-3)
        assert layer.scaling["default"] == pytest.approx(SCALE * RANK / RANK**0.5), "alpha / sqrt(rank)"
    logits = model(input_ids=IDS).logits
    torch.testing.assert_close(logits, tiny(name)(input_ids=IDS).logits, rtol=0, atol=1e-5)
    assert all(each.grad is None for each in model.parameters())
    trains = {path for path, each in model.named_parameters() if each.requires_grad}
    assert trains and all(".lora_" in path for path in trains)


def test_the_first_step_of_lora_ga_moves_weights_as_the_full_gradient_would() -> None:
    """Theorem 3.1: along the nearest matrix of rank 2r to the gradient; plain LoRA is far from it."""
    model, gradients = _along_gradients("Llama")
    plain = adapters.attach(tiny("Llama"), _config("lora"), seed=0)
    cosines: dict[bool, list[float]] = {True: [], False: []}
    for started in (model, plain):
        before = {path: _update(layer) for path, layer in _layers(started).items()}
        optimizer = torch.optim.SGD([each for each in started.parameters() if each.requires_grad], lr=1e-3)
        started(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        for path, layer in _layers(started).items():
            moved, (U, S, Vh) = before[path] - _update(layer), torch.linalg.svd(gradients[path], full_matrices=False)
            nearest = (U[:, : 2 * RANK] * S[: 2 * RANK]) @ Vh[: 2 * RANK]
            cosines[started is model].append(float(torch.cosine_similarity(moved.flatten(), nearest.flatten(), dim=0)))
    assert min(cosines[True]) > 0.999 and max(cosines[False]) < 0.9


def test_what_lora_ga_learns_is_loaded_by_stock_peft_as_plain_lora(tmp_path: Path) -> None:
    model, _ = _along_gradients("Llama")
    losses = _train(model)
    assert losses[-1] < 0.9 * losses[0]
    wanted = model(input_ids=IDS).logits.detach()
    for _ in range(2):
        adapters.save(model, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["r"], written["use_rslora"], written["init_lora_weights"]) == (2 * RANK, False, True)
    stock = PeftModel.from_pretrained(tiny("Llama"), str(tmp_path)).eval()
    torch.testing.assert_close(stock(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    merged = adapters.merge(adapters.load(tiny("Llama"), tmp_path), _config("lora-ga"))
    torch.testing.assert_close(merged(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-4)


def test_lora_ga_without_a_gradient_is_plain_lora() -> None:
    """Before any row was seen, and in a layer that none has reached."""
    model: Any = adapters.attach(tiny("Llama"), (config := _config("lora-ga")), seed=0)
    plain = adapters.attach(tiny("Llama"), _config("rslora"), seed=0)
    for losses in ((), (layer.lora_B["default"].weight.sum() * 0 for layer in _layers(model).values())):
        config.choose(model, losses)
        for layer, wanted in zip(_layers(model).values(), _layers(plain).values(), strict=True):
            assert all(torch.equal(*each) for each in zip(_live(layer), _live(wanted), strict=True))


def test_a_gradient_that_is_not_finite_is_told() -> None:
    config = _config("lora-ga")
    model: Any = adapters.attach(tiny("Llama"), config, seed=0)
    with pytest.raises(TrainingError, match=r"_proj on the first training rows is not finite\. Write model\.compute="):
        config.choose(model, (model(input_ids=TOKENS, labels=TOKENS).loss * float("inf") for _ in range(1)))


def test_lora_ga_needs_twice_its_rank(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"k_proj is only 16 wide\. Write adapter\.rank=8 or less"):
        adapters.attach(llama, LoraGa(rank=9), seed=0)


def test_lora_ga_sees_the_weights_through_their_quantisation(stories: str) -> None:
    """The gradient is that of the dequantised weight, which nothing holds."""
    quantised, _ = _quantised(stories)
    ids = torch.arange(5, 45)[None]
    whole = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32).eval()
    for path, layer in whole.named_modules():
        if isinstance(layer, nn.Linear) and "_proj" in path:
            layer.weight.data = dense_weight(quantised.get_submodule(path)).float()
    whole(input_ids=ids, labels=ids).loss.backward()
    model: Any = adapters.attach(quantised, _config("lora-ga"), seed=0).eval()
    found = summed_gradients(model, (model(input_ids=ids, labels=ids).loss for _ in range(1)))
    assert found
    for path, gradient in found.items():
        wanted = whole.get_submodule(path.removeprefix("base_model.model.")).weight.grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


# LoftQ.
