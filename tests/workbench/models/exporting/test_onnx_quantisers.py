"""Quantised ONNX files are what onnxruntime's own quantisers write, and as exact as their number of bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from workbench.errors import BackboneError
from workbench.models.exporting.onnx_quantisers import BLOCK, quantise

WORDS, WIDTH, OUT = 500, 64, 24
RANDOM = np.random.default_rng(0)
TABLE_WD = RANDOM.normal(size=(WORDS, WIDTH)).astype(np.float32)
WEIGHT_DO = RANDOM.normal(size=(WIDTH, OUT)).astype(np.float32)
IDS_BL = RANDOM.integers(0, WORDS, (3, 7))


def _file(path: Path, nodes: list[Any], weights: dict[str, Any], given: tuple[str, int, list[Any]]) -> Path:
    name, kind, shape = given
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, kind, shape)],
        [helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(each, of) for of, each in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Embeddings, and a product with them."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"], name="embed"),
        helper.make_node("MatMul", ["x", "weight"], ["out"], name="product"),
    ]
    weights = {"table": TABLE_WD, "weight": WEIGHT_DO}
    return _file(tmp_path / "plain.onnx", nodes, weights, ("ids", onnx.TensorProto.INT64, ["b", "l"]))


def _outputs(path: Path) -> Any:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"ids": IDS_BL})[0]


def _steps(weights_XO: Any, values: int) -> Any:
    """Distance of the values that a weight can take; zero is one of them."""
    return (np.maximum(weights_XO.max(0), 0) - np.minimum(weights_XO.min(0), 0)) / (values - 1)


def _rounded_table() -> Any:
    step = _steps(TABLE_WD.reshape(-1), 256)
    return np.rint(TABLE_WD / step) * step


def _largest_errors(weights: str) -> Any:
    """A step for each weight: half of one by rounding, and as much at the ends, as zero is one of the values."""
    if weights == "int8":
        return np.broadcast_to(_steps(WEIGHT_DO, 256), WEIGHT_DO.shape)
    return np.stack([_steps(block, 16) for block in WEIGHT_DO.reshape(-1, BLOCK, OUT)]).repeat(BLOCK, 0)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_outputs_are_as_near_as_the_bits_allow(plain: Path, weights: str, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "q.onnx", weights)
    wanted, found, x_BLD = _outputs(plain), _outputs(tmp_path / "q.onnx"), _rounded_table()[IDS_BL]
    bound = np.abs(x_BLD) @ _largest_errors(weights)
    bound += np.abs(x_BLD - TABLE_WD[IDS_BL]) @ np.abs(WEIGHT_DO)
    if weights == "int8":  # inputs of the product, by their range
        bound += (x_BLD.max() - x_BLD.min()) / 255 * np.abs(WEIGHT_DO).sum(0)
    assert (np.abs(found - wanted) <= bound + 1e-3).all()
    error = np.abs(found - wanted).mean() / np.abs(wanted).mean()
    assert 1e-4 < error < {"int8": 0.02, "int4": 0.15}[weights]
    assert (tmp_path / "q.onnx").stat().st_size < plain.stat().st_size / 3


def test_int8_is_the_call_of_onnxruntime(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "q.onnx", "int8")
    quantize_dynamic(plain, tmp_path / "theirs.onnx", per_channel=True, weight_type=QuantType.QUInt8)
    np.testing.assert_array_equal(_outputs(tmp_path / "q.onnx"), _outputs(tmp_path / "theirs.onnx"))


def test_loggers_stay_as_they_are(plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    for weights in ("int8", "int4"):
        quantise(plain, tmp_path / f"{weights}.onnx", weights)
    assert (root.level, root.handlers) == before and capfd.readouterr() == ("", "")


def test_what_the_quantiser_leaves_is_refused_by_its_operator(tmp_path: Path) -> None:
    kernel = RANDOM.normal(size=(8, 3, 3, 3)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "kernel"], ["out"], name="conv")
    path = _file(tmp_path / "c.onnx", [node], {"kernel": kernel}, ("x", onnx.TensorProto.FLOAT, ["b", 3, 9, 9]))
    for weights in ("int8", "int4"):
        with pytest.raises(
            BackboneError, match=r"leaves 100 % of the weights in float32, those of Conv \(216\)\. Write"
        ):
            quantise(path, tmp_path / "q.onnx", weights)
