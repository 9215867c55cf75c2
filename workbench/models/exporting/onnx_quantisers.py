"""An ONNX file with weights in 8 or 4 bits, written by onnxruntime's own quantisers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import BackboneError
from workbench.models.exporting.rounded_weights import BLOCK
from workbench.runs import units

LARGEST = 2**31
"""Bytes from which weights stand in a second file."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what the quantisers log about each node, and keeps them from configuring the root logger."""
    root, nothing = logging.getLogger(), logging.NullHandler()
    root.addHandler(nothing)
    try:
        yield
    finally:
        root.removeHandler(nothing)


def _int8(plain: Path, path: Path, operators: list[str]) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # A scale for each column: of MiniLM's embeddings the least cosine is 0.979, with one for each matrix 0.940. Weights
    # in uint8, as inputs are: sums of uint8 and int8 products saturate on x86 processors without VNNI or AMX.
    quantize_dynamic(
        plain,
        path,
        op_types_to_quantize=operators,
        per_channel=True,
        weight_type=QuantType.QUInt8,
        use_external_data_format=plain.stat().st_size > LARGEST,
    )


def _int8_products(plain: Path, path: Path) -> None:
    _int8(plain, path, ["MatMul", "Gather"])


def _int4_products(plain: Path, path: Path) -> None:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    _int8(plain, path, ["Gather"])
    graph = ONNXModel(onnx.load(path))
    graph.replace_gemm_with_matmul()
    quantiser = MatMulNBitsQuantizer(graph.model, bits=4, block_size=BLOCK, is_symmetric=False)
    quantiser.process()
    path.unlink()
    Path(f"{path}.data").unlink(missing_ok=True)
    quantiser.model.save_model_to_file(path, use_external_data_format=plain.stat().st_size > 4 * LARGEST)


@dataclass(frozen=True)
class Quantiser:
    """How a format of weights is written."""

    write: Callable[[Path, Path], None]
    """Reads the first file and writes the second."""
    sentence: str
    """What it stores, for a card."""
    limits: tuple[str, ...]


QUANTISERS = {
    "int8": Quantiser(
        _int8_products,
        "Weights of products and embeddings in uint8; a product reads its inputs so, by their range at each pass "
        "(onnxruntime's quantize_dynamic).",
        (),
    ),
    "int4": Quantiser(
        _int4_products,
        f"Weights of products in 4 bits by blocks of {BLOCK} (onnxruntime's MatMulNBits), embeddings in int8; sums are "
        "in float32.",
        ("MatMulNBits is an operator of onnxruntime: other programs that read ONNX may not have it.",),
    ),
}


def quantise(plain: Path, path: Path, weights: str) -> None:
    """Write the float32 model at `plain` as `path`, in `int8` or `int4`.

    Raises:
        BackboneError: Most weights belong to operators that the quantiser leaves in float32.
    """
    with _quiet():
        QUANTISERS[weights].write(plain, path)
    before, after = _float32(plain), _float32(path)
    if 2 * after.total() > before.total():
        left = ", ".join(f"{name} ({units.count(count)})" for name, count in after.most_common(2))
        share = units.percent(after.total() / before.total())
        raise BackboneError(
            f"--weights {weights}: onnxruntime's quantiser leaves {share} of the weights in float32, those of {left}. "
            "Write --weights float32."
        )


def _float32(path: Path) -> Counter[str]:
    """Weights in float32 of an ONNX file, by the operator that reads them."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    sizes = {each.name: _count(each) for each in graph.initializer if each.data_type == onnx.TensorProto.FLOAT}
    found = Counter[str]()
    for node in graph.node:
        for name in node.input:
            found[node.op_type] += sizes.pop(name, 0)
    return +found


def _count(tensor: Any) -> int:
    count = 1
    for each in tensor.dims:
        count *= int(each)
    return count
