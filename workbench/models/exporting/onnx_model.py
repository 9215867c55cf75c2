"""A whole model as one ONNX file, and its outputs by onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from workbench.errors import BackboneError
from workbench.models import output_heads
from workbench.models.output_heads import Head

FILE = "model.onnx"
OUTPUTS = {"text": "logits", "masked": "logits", "classes": "logits", "tokens": "logits", "hidden": "last_hidden_state"}
"""The output of a model, by the head that it has."""

LOOPING = {"hybrid", "linear_attention"}
"""Kinds of layers (transformers' `layer_types`) that loop over chunks of a text."""


class TextOutput(nn.Module):
    """A text model with two named inputs and one output, without a cache."""

    def __init__(self, model: PreTrainedModel, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output
        self.settings = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The output for a batch."""
        model_output = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.settings)
        return getattr(model_output, self.output)  # type: ignore[no-any-return]


class PictureOutput(nn.Module):
    """A picture model with one output."""

    def __init__(self, model: PreTrainedModel, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, pixel_values: Tensor) -> Tensor:
        """The output for a batch."""
        return getattr(self.model(pixel_values=pixel_values), self.output)  # type: ignore[no-any-return]


class OnnxModel(nn.Module):
    """An ONNX file that is called like its original model, computed by onnxruntime on the CPU. `stock`: the original
    model, for its configuration alone."""

    def __init__(self, path: Path, stock: PreTrainedModel, output: str) -> None:
        import onnxruntime

        super().__init__()
        self.stock, self.output = stock, output
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    @property
    def config(self) -> Any:
        """Configuration of the original model."""
        return self.stock.config

    def forward(self, **inputs: Any) -> SimpleNamespace:
        """The output for a batch; no attention mask means that all tokens are real."""
        if "input_ids" in inputs and inputs.get("attention_mask") is None:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        names = [each.name for each in self.session.get_inputs()]
        (output_array,) = self.session.run([self.output], {name: inputs[name].cpu().numpy() for name in names})
        return SimpleNamespace(**{self.output: torch.from_numpy(output_array).to(self.stock.device)})


class LogitsHead(Head):
    """The head of a model without a separate head: its logits take the place of the hidden states."""

    def hidden(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits (B, L, V)."""
        logits_BLV: Tensor = model(**inputs).logits
        return logits_BLV

    def project(self, hidden: Tensor) -> Tensor:
        """The same logits."""
        return hidden


def logits_head(stock: PreTrainedModel) -> LogitsHead:
    """The head of the ONNX model of `stock`."""
    known = output_heads.known(stock)
    return LogitsHead(known.module, known.vocabulary, known.width, None, 1.0)


def require_writable(config: PretrainedConfig) -> None:
    """Raise BackboneError where ONNX would hold the layers for texts of one length alone."""
    kinds = {*(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())}
    if loops := sorted(kinds & LOOPING):
        raise BackboneError(
            f"--to onnx: layers of {loops[0]} read a text in chunks by a loop, which torch writes for the number of "
            "chunks of one example, so that longer texts would fail. Export --to merged, or --to vllm."
        )


def write(model: PreTrainedModel, path: Path, inputs: Mapping[str, Tensor], output: str) -> None:
    """Write a model in float32, for any number and length of rows. Raises BackboneError: torch cannot export it.
    `inputs`: example inputs of two rows. `output`: name of the output."""
    shapes = {name: {0: torch.export.Dim.DYNAMIC} for name in inputs}
    for name in inputs.keys() & {"input_ids", "attention_mask"}:
        shapes[name][1] = torch.export.Dim.DYNAMIC
    wrapped = (PictureOutput if "pixel_values" in inputs else TextOutput)(model, output)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("batched_mm")  # grouped products have no operator of ONNX
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # hides hints about optional packages
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch's own code
            program = torch.onnx.export(
                wrapped.eval(),
                kwargs=dict(inputs),
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=list(inputs),
                output_names=[output],
                verbose=False,
            )
        assert program is not None, "the exporter of torch.export returns its program"
        program.save(path)
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        cause = error.__cause__ or error
        raise BackboneError(
            f"{type(model).__name__} cannot be written as ONNX by this version of torch ({str(cause)[:300]}). Export "
            "--to merged and convert that with optimum."
        ) from error


def text_inputs() -> dict[str, Tensor]:
    """Two rows of tokens, one of them padded."""
    mask_BL = torch.ones(2, 8, dtype=torch.int64)
    mask_BL[1, 5:] = 0
    return {"input_ids": torch.arange(5, 21).reshape(2, 8) * mask_BL, "attention_mask": mask_BL}
