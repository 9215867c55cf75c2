"""Visual prompts: the paper's equations written a second time, and what the tuner leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vision_backbones import pixels, tiny_vision
from workbench import adapters
from workbench.adapters import Prompt
from workbench.adapters.prompts.visual_prompt_tuner import VisualPromptLayer, initial
from workbench.errors import BackboneError, ConfigError

TOKENS = 5


def attached(name: str, depth: str) -> Any:
    config = Prompt.model_validate({"method": "prompt", "virtual_tokens": TOKENS, "depth": depth})
    return adapters.attach(tiny_vision(name).requires_grad_(False), config, seed=1).eval()


def prompts(model: Any) -> list[Tensor]:
    """The tokens (P, D) of each block that has some, in order."""
    layers = [layer for layer in model.modules() if isinstance(layer, VisualPromptLayer)]
    return [each for layer in layers for each in layer.visual_prompt_tokens.values()]


def written_out(model: Any, prompts_P: list[Tensor], pixels_B3HW: Tensor) -> Tensor:
    """Logits of a ViT by equations 4 to 6 of the paper: [x, P, E], with the head on the class token's x."""
    vit = model.vit
    embedded_BND = vit.embeddings(pixels_B3HW)
    class_B1D, patches_BND = embedded_BND[:, :1], embedded_BND[:, 1:]
    for number, block in enumerate(vit.layers):
        if number < len(prompts_P):  # deep: [x_i, _, E_i] = L_i([x_(i-1), P_(i-1), E_(i-1)])
            given_BPD = prompts_P[number].expand(len(pixels_B3HW), -1, -1)
        output_BND = block(torch.cat([class_B1D, given_BPD, patches_BND], dim=1))
        class_B1D, given_BPD, patches_BND = output_BND.split(
            [1, given_BPD.shape[1], patches_BND.shape[1]], dim=1
        )  # shallow: the Z_i that the block made of them go on
    logits: Tensor = model.classifier(vit.layernorm(class_B1D)[:, 0])
    return logits


@pytest.mark.parametrize("depth", ["shallow", "deep"])
def test_it_is_the_papers_equation(depth: str) -> None:
    model, plain = attached("ViT", depth), tiny_vision("ViT")
    tokens = prompts(model)
    assert len(tokens) == {"shallow": 1, "deep": 2}[depth]
    with torch.no_grad():
        head = model.get_base_model().classifier.modules_to_save["default"]
        plain.classifier.load_state_dict(head.state_dict())
        found, wanted = model(pixel_values=pixels()).logits, written_out(plain, tokens, pixels())
        assert float((found - plain(pixel_values=pixels()).logits).abs().max()) > 1e-3
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", ["shallow", "deep"])
@pytest.mark.parametrize("name", ["CLIP", "DeiT", "Dinov2", "Dinov2WithRegisters", "Siglip"])
def test_every_token_learns_beside_any_kind_of_head(name: str, depth: str, tmp_path: Path) -> None:
    model = attached(name, depth)
    model(pixel_values=pixels()).logits.square().sum().backward()
    assert all(each.grad is not None and bool(each.grad.abs().sum(1).all()) for each in prompts(model))
    adapters.save(model, tmp_path)
    with torch.no_grad():
        again = adapters.load(tiny_vision(name), tmp_path)
        assert torch.equal(again(pixel_values=pixels()).logits, model(pixel_values=pixels()).logits)
    with pytest.raises(BackboneError, match="does not fit"):
        adapters.load(tiny_vision("ConvNext"), tmp_path)


def test_initial_values_are_as_wide_as_the_papers() -> None:
    model = attached("ViT", "deep")
    config = model.peft_config["default"]
    bound = (6 / (3 * 8 * 8 + 32)) ** 0.5
    drawn = torch.stack([initial(config) for _ in range(200)])
    assert float(drawn.abs().max()) <= bound
    assert float(drawn.std()) == pytest.approx(bound / 3**0.5, rel=0.02)


@pytest.mark.parametrize("name", ["Beit", "ConvNext", "ResNet", "Swin"])
def test_what_reads_no_further_token_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"adapter\.method=prompt: the blocks of .* Use adapter\.method=lora"):
        attached(name, "shallow")
