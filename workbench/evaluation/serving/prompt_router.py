"""Chooses the adapter for a prompt: a linear classifier of what the frozen backbone makes of it.

Legend: N prompts, K adapters, L tokens, D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save
from torch import nn

from workbench.errors import FileError
from workbench.evaluation.comparison import Floats
from workbench.models.output_heads import Head
from workbench.runs import files

FILE = "router.safetensors"
"""In the run directory of a fleet."""


def feature(model: nn.Module, head: Head, ids: Sequence[int]) -> Floats:
    """Mean of the last hidden states (D,) over the tokens of a prompt, of a model without adapters."""
    ids_1L = torch.tensor([[max(0, each) for each in ids]], device=next(model.parameters()).device)
    with torch.inference_mode():
        hidden_1LD = head.hidden(model, {"input_ids": ids_1L})
    return np.asarray(hidden_1LD[0].double().mean(0).cpu().numpy(), dtype=np.float64)


class PromptRouter(NamedTuple):
    """Logistic regression over features of prompts."""

    names: Sequence[str]
    """The K adapters."""
    weight_KD: Floats
    bias_K: Floats

    @staticmethod
    def fitted(features_ND: Floats, names_N: Sequence[str]) -> PromptRouter:
        """The classifier of prompts, each with the name of its adapter; two names or more."""
        from workbench.evaluation.frozen_features import linear_probe  # more than a server needs

        scaler, regression = (step for _, step in linear_probe(features_ND, np.asarray(names_N)).steps)
        weight, bias = regression.coef_ / scaler.scale_, regression.intercept_
        if len(weight) == 1:  # of two names, the logit of the second
            weight, bias = np.vstack([0 * weight, weight]), np.append(0.0, bias)
        return PromptRouter(regression.classes_.tolist(), weight, bias - weight @ scaler.mean_)

    def chosen(self, features_ND: Floats) -> list[str]:
        """The adapter for each prompt."""
        return [self.names[place] for place in (features_ND @ self.weight_KD.T + self.bias_K).argmax(-1)]

    def write(self, folder: Path) -> None:
        """Write FILE."""
        tensors = {"weight": np.ascontiguousarray(self.weight_KD), "bias": self.bias_K}
        files.write_bytes(folder / FILE, save(tensors, metadata={"names": json.dumps(self.names)}))

    @staticmethod
    def read(folder: Path) -> PromptRouter:
        """The router of a fleet; raises FileError where FILE is none."""
        try:
            with safe_open(folder / FILE, framework="np") as file:
                names = json.loads(file.metadata()["names"])
                return PromptRouter(names, file.get_tensor("weight"), file.get_tensor("bias"))
        except Exception as error:
            cure = f"Write it again: workbench router {folder}"
            raise FileError(f"{folder / FILE} cannot be read ({error}). {cure}") from None
