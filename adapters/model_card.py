"""The model card of a saved adapter: what it stands on, and the lines that load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import transformers
from peft import PeftModel, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn

from workbench.adapters import anatomy
from workbench.adapters.weights import semi_structured

OURS = "import workbench.adapters  # makes {kind} known to PEFT; pip install peft-workbench"
"""The line that loading one of our tuners needs."""
BUTTERFLIES = "import workbench.adapters  # computes BOFT's factors where PEFT cannot compile its CUDA code"
"""The line that BOFT of several factors needs."""


def write(model: PeftModel, folder: Path) -> None:
    """Write `folder`/README.md from the adapter_config.json that lies there; PEFT's own is an empty template."""
    saved: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    kind, base, backbone = saved["peft_type"], saved["base_model_name_or_path"], model.get_base_model()
    is_sparse = semi_structured.pattern(backbone) is not None
    sparsity = ", pruned to 2:4 sparsity as below: without, it is another model" if is_sparse else ""
    (folder / "README.md").write_text(
        "---\nlibrary_name: peft\n---\n\n"
        f"# {kind} adapter\n\n"
        f"- Base model: `{base}` ({type(backbone).__name__}){sparsity}\n"
        f"- Method: {kind}, in the format of PEFT {peft.__version__}\n\n"
        f"```python\n{_lines(backbone, saved)}\n```\n\n"
        "Trained with peft-workbench.\n",
        encoding="utf-8",
    )


def loading(backbone: nn.Module, folder: Path, *, place: str) -> str:
    """Python that loads the adapter in `folder` over a backbone of this class, once it is kept at `place`."""
    return _lines(backbone, json.loads((folder / "adapter_config.json").read_text()), f"{place!r})")


def _lines(backbone: Any, saved: dict[str, Any], place: str = '"folder")  # the folder of this file') -> str:
    """Python that loads the adapter with stock PEFT; `place` ends the last line."""
    family, base = type(backbone).__name__, saved["base_model_name_or_path"]
    door = family if hasattr(transformers, family) else "AutoModel"
    labels = f", num_labels={backbone.config.num_labels}" if family.endswith("Classification") else ""
    other_head = not (anatomy.reads_tokens(backbone) or backbone.can_generate())  # of other classes
    labels += ", ignore_mismatched_sizes=True" if other_head else ""
    first = needed(saved)
    pruning = semi_structured.reloading(backbone)
    lines = ["import re", "", "import torch"] if pruning else []
    lines += [
        *([first] if first else []),
        "from peft import PeftModel",
        f"from transformers import {door}",
        "",
        f"backbone = {door}.from_pretrained({base!r}{labels})",
    ]
    if saved.get("trainable_token_indices"):
        rows = backbone.get_input_embeddings().weight.shape[0]
        lines.append(f"backbone.resize_token_embeddings({rows})  # the adapter holds the rows of the new tokens")
    return "\n".join([*lines, *pruning, f"model = PeftModel.from_pretrained(backbone, {place}"])


def needed(saved: dict[str, Any]) -> str | None:
    """The import without which PEFT does not know the adapter, or computes another one."""
    kind = saved["peft_type"]
    if saved.get("boft_n_butterfly_factor", 1) > 1:
        return BUTTERFLIES
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(PeftType[kind])
    home = tuner.__module__ if tuner else "peft."  # virtual tokens have no tuner
    if home.startswith("peft."):
        return None
    if home.startswith("workbench.adapters."):
        return OURS.format(kind=kind)
    return f"# First run the plugin that makes {kind} known to PEFT."
