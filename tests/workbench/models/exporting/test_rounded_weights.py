"""Training rounds weights to the very numbers that the file in 4 bits holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.conftest import tiny
from workbench.models.exporting.onnx_quantisers import quantise
from workbench.models.exporting.rounded_weights import BLOCK, install, rounded

WEIGHTS = {
    "around zero": (0.05, 0.0, 96),
    "all positive": (0.05, 1.0, 64),
    "all negative": (0.05, -1.0, 64),
    "tiny": (1e-4, 0.0, 64),
    "a block that is not full": (0.05, 0.1, 80),
    "zeros": (0.0, 0.0, 64),
}


@pytest.mark.parametrize("scale, shift, inputs", WEIGHTS.values(), ids=WEIGHTS)
def test_products_are_those_of_the_file(scale: float, shift: float, inputs: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight_OI, x_BI = torch.randn(24, inputs) * scale + shift, torch.randn(5, inputs)
    node = helper.make_node("MatMul", ["x", "weight"], ["out"], name="product")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "out")]
    stored = numpy_helper.from_array(weight_OI.T.contiguous().numpy(), "weight")
    graph = helper.make_graph([node], "graph", ends[:1], ends[1:], [stored])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    save(model, tmp_path / "plain.onnx")
    quantise(tmp_path / "plain.onnx", tmp_path / "int4.onnx", "int4")
    session = onnxruntime.InferenceSession(str(tmp_path / "int4.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x_BI.numpy()})
    wanted = x_BI @ rounded(weight_OI).T
    assert np.abs(found - wanted.numpy()).max() <= 1e-5 * max(1e-6, float(wanted.abs().max()))
    if scale:
        assert not torch.allclose(wanted, x_BI @ weight_OI.T, rtol=1e-3), "4 bits change nothing here"


def test_a_block_has_sixteen_values_and_rounding_again_changes_nothing() -> None:
    torch.manual_seed(0)
    once = rounded(torch.randn(8, 2 * BLOCK))
    assert all(len(block.unique()) <= 16 for block in once.view(-1, BLOCK))
    torch.testing.assert_close(rounded(once), once, rtol=0, atol=1e-6)


def test_gradients_pass_straight_through() -> None:
    weight_OI = torch.randn(4, BLOCK, dtype=torch.bfloat16).requires_grad_()
    factor_OI = torch.randn(4, BLOCK).bfloat16()
    (rounded(weight_OI) * factor_OI).sum().backward()
    assert rounded(weight_OI).dtype == torch.bfloat16
    torch.testing.assert_close(weight_OI.grad, factor_OI)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert"])
def test_a_model_multiplies_by_rounded_weights_and_keeps_its_own(family: str) -> None:
    model = tiny(family, head="MaskedLM" if family == "Bert" else "CausalLM", tie_word_embeddings=False)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    layers = {name: each for name, each in model.named_modules() if type(each) in (nn.Linear, Conv1D)}
    assert install(model) == len(layers) > 0 and install(model) == 0
    ids_BL = torch.arange(3, 15).view(2, 6)
    found = model(input_ids=ids_BL).logits
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    other = tiny(family, head="MaskedLM" if family == "Bert" else "CausalLM", tie_word_embeddings=False)
    other.load_state_dict(before)
    for name in layers:
        weight = other.get_submodule(name).weight
        of_outputs = weight.T if isinstance(layers[name], Conv1D) else weight
        new = rounded(of_outputs.detach())
        weight.data.copy_(new.T if isinstance(layers[name], Conv1D) else new)
    torch.testing.assert_close(found, other(input_ids=ids_BL).logits)
