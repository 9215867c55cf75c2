"""Low-rank factors of matrices, and the weights that a backbone had before it was quantised.

Legend: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from workbench.adapters.anatomy import dense_weight
from workbench.errors import BackboneError

if TYPE_CHECKING:
    from workbench.adapters.updates.lora import Decomposition


EXACT_UP_TO = 1024
"""Shorter side of the largest matrix that `auto` decomposes exactly, which takes one core about a second."""
ITERATIONS = 16
"""Subspace iterations of the randomised decomposition; PEFT recommends as many for PiSSA."""


def leading_parts(matrix_OI: Tensor, rank: int, *, decomposition: Decomposition = "auto") -> tuple[Tensor, Tensor]:
    """A (R, I) and B (O, R) whose product B A is nearest to the matrix; both carry the roots of its singular values."""
    U_OR, S_R, V_RI = singular_parts(matrix_OI, rank, decomposition=decomposition)
    root_R = S_R.sqrt()
    return root_R[:, None] * V_RI, U_OR * root_R


def singular_parts(matrix_OI: Tensor, rank: int, *, decomposition: Decomposition) -> tuple[Tensor, Tensor, Tensor]:
    """The leading left singular vectors (O, R), singular values (R,) and right singular vectors (R, I).

    Args:
        decomposition: A randomised one draws from torch's generator, so that the same seed gives the same parts.
    """
    if decomposition == "exact" or (decomposition == "auto" and min(matrix_OI.shape) <= EXACT_UP_TO):
        U_OR, S_R, V_RI = torch.linalg.svd(matrix_OI, full_matrices=False)
    else:
        # Directions beside the wanted ones sharpen these (Halko et al. 2011).
        more = min(2 * rank + 8, *matrix_OI.shape)
        U_OR, S_R, V_IR = torch.svd_lowrank(matrix_OI, q=more, niter=ITERATIONS)
        V_RI = V_IR.T
    return U_OR[:, :rank], S_R[:rank], V_RI[:rank]


@torch.no_grad()
def start_from_rounding(model: PeftModel, *, decomposition: Decomposition) -> None:
    """Let every LoRA layer over a quantised weight start at the update nearest to its quantisation error.

    Raises:
        BackboneError: the unquantised weights are not where the backbone came from.
    """
    backbone: Any = model.get_base_model()
    originals = _Originals(backbone)
    layers: list[tuple[str, Any]] = [
        (path, module) for path, module in backbone.named_modules() if isinstance(module, LoraLayer)
    ]
    for path, layer in layers:
        base: Any = layer.get_base_layer()
        if not base.weight.is_floating_point():
            original_OI = originals.read(path, transposed=issubclass(getattr(base, "source_cls", object), Conv1D))
            lost_OI = original_OI.to(base.weight.device).float() - dense_weight(base).float()
            factors = leading_parts(lost_OI / layer.scaling["default"], layer.r["default"], decomposition=decomposition)
            layer.lora_A["default"].weight.copy_(factors[0])
            layer.lora_B["default"].weight.copy_(factors[1])


class _Originals:
    """Single tensors of the checkpoint that a backbone was loaded from; no file is read whole."""

    def __init__(self, backbone: Any) -> None:
        self.source: str = backbone.config._name_or_path
        self.prefix: str = backbone.base_model_prefix
        mapping = get_model_conversion_mapping(backbone)
        self.renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        revision = getattr(backbone.config, "_commit_hash", None)
        self.places: dict[str, tuple[Path, str]] = {}
        for name in ("model.safetensors.index.json", "model.safetensors"):
            cached_path = cached_file(self.source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
            if cached_path is not None:
                self._list(Path(cached_path))
                return
        raise BackboneError(f"adapter.method=loftq: {self.source} holds no safetensors. Take adapter.method=lora.")

    def _list(self, path: Path) -> None:
        """File and key of every tensor, by the name that transformers gives it when it loads (ViT's are renamed)."""
        if path.suffix == ".json":
            parts = json.loads(path.read_text())["weight_map"]
            files = {key: Path(str(cached_file(self.source, part))) for key, part in parts.items()}
        else:
            with safe_open(path, framework="pt") as tensors:
                files = dict.fromkeys(tensors.keys(), path)
        self.places = {rename_source_key(key, self.renamings, [])[0]: (file, key) for key, file in files.items()}

    def read(self, path: str, *, transposed: bool) -> Tensor:
        """The weight (O, I) of the linear layer at `path`."""
        names = (f"{path}.weight", f"{path.removeprefix(self.prefix + '.')}.weight")
        name = next((name for name in names if name in self.places), None)
        if name is None:
            raise BackboneError(
                f"adapter.method=loftq: {self.source} has no tensor {names[0]}, from which {path} was quantised. "
                "Take adapter.method=lora."
            )
        file, key = self.places[name]
        with safe_open(file, framework="pt") as tensors:
            weight: Tensor = tensors.get_tensor(key)
        return weight.T if transposed else weight
