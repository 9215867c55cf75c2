"""An ONNX file gives a model's outputs for any number of rows and any length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import text_families
from tests.conftest import tiny
from tests.vision_backbones import SIZE, TRANSFORMER
from workbench.errors import BackboneError
from workbench.models.exporting import onnx_model
from workbench.models.exporting.onnx_model import OnnxModel

pytestmark = pytest.mark.slow


@pytest.mark.nightly(but=["Bert-SequenceClassification-logits"])
@pytest.mark.parametrize(
    ("name", "head", "output"),
    [
        ("Llama", "CausalLM", "logits"),
        ("Mixtral", "CausalLM", "logits"),
        ("Bert", "SequenceClassification", "logits"),
    ],
)
def test_texts_of_any_number_and_length(name: str, head: str, output: str, tmp_path: Path) -> None:
    model = tiny(name, head=head)
    onnx_model.write(model, tmp_path / "m.onnx", onnx_model.text_inputs(), output)
    found = OnnxModel(tmp_path / "m.onnx", model, output)
    for rows, length in ((1, 1), (3, 19)):
        ids = torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(rows))
        mask = torch.ones_like(ids)
        mask[-1, (length + 1) // 2 :] = 0
        with torch.no_grad():
            wanted = model(input_ids=ids, attention_mask=mask).logits
        real = mask[..., None].bool() if head == "CausalLM" else torch.ones_like(wanted).bool()
        got = found(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(got * real, wanted * real, rtol=1e-4, atol=1e-4)
    whole = found(input_ids=ids).logits
    torch.testing.assert_close(whole, model(input_ids=ids).logits.detach(), rtol=1e-4, atol=1e-4)


def test_pictures_of_any_number(tmp_path: Path) -> None:
    model = tiny("ViT", head="ImageClassification", **TRANSFORMER)
    onnx_model.write(model, tmp_path / "m.onnx", {"pixel_values": torch.zeros(2, 3, SIZE, SIZE)}, "logits")
    found = OnnxModel(tmp_path / "m.onnx", model, "logits")
    pixels = torch.randn(5, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(pixel_values=pixels).logits
    assert float(wanted.std()) > 1e-3
    torch.testing.assert_close(found(pixel_values=pixels).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "loops"), [("qwen3_5", "linear_attention"), ("falcon_h1", "hybrid"), ("llava", None)])
def test_layers_that_loop_over_a_text_are_refused_before_minutes_of_export(name: str, loops: str | None) -> None:
    with torch.device("meta"):
        config = text_families.build(name).config
    if loops is None:
        onnx_model.require_writable(config)
        return
    with pytest.raises(BackboneError, match=f"layers of {loops} read a text in chunks .* Export --to merged"):
        onnx_model.require_writable(config)
