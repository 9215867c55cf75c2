"""A LoRA adapter as a GGUF file, which llama.cpp and Ollama load over a GGUF file of its backbone.

llama.cpp scales each update by alpha / rank: it takes the rank from the tensors, and one alpha from the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from workbench.adapters.combine import PREFIX
from workbench.models.exporting import lora_limits
from workbench.models.exporting.gguf_layout import GgufLayout, read_array


def write(adapter: Path, config: PretrainedConfig, path: Path, *, name: str) -> None:
    """Write the adapter in a folder, in float32.

    Args:
        config: The backbone's.
        name: For people.
    """
    layout, settings = GgufLayout(config), lora_limits.settings(adapter)
    writer = gguf.GGUFWriter(path, layout.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_name(name)
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(settings["lora_alpha"]))
    for key, tensor in load_file(adapter / "adapter_model.safetensors").items():
        part, target, rows = _place(key, layout)
        ordered = layout.ordered(rows, tensor) if part == "b" else tensor
        writer.add_tensor(f"{target}.lora_{part}", ordered.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def restore(path: Path, config: PretrainedConfig, folder: Path, *, like: Path) -> None:
    """Write the adapter of a GGUF file as PEFT's into `folder`: scale and ranks are the file's.

    Args:
        config: The backbone's.
        like: Folder of the adapter that the file was written from, for the names of the layers alone.
    """
    reader, layout = gguf.GGUFReader(path), GgufLayout(config)
    tensor_by_name: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
    alpha = float(reader.get_field(gguf.Keys.Adapter.LORA_ALPHA).contents())  # type: ignore[union-attr]
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for key in load_file(like / "adapter_model.safetensors"):
        part, target, rows = _place(key, layout)
        tensor = read_array(tensor_by_name[f"{target}.lora_{part}"])
        tensors[key] = (layout.restored(rows, tensor) if part == "b" else tensor).contiguous()
        if part == "a":
            ranks[rows.removesuffix(".weight")] = len(tensor)
    most = max(ranks.values())
    patterns = {layer: rank for layer, rank in ranks.items() if rank != most}
    settings = LoraConfig(r=most, lora_alpha=alpha, target_modules=sorted(ranks), rank_pattern=patterns)  # type: ignore[arg-type]
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _place(key: str, layout: GgufLayout) -> tuple[str, str, str]:
    """Part (a or b), the name in GGUF of the weight that it changes, and that weight's path in transformers."""
    layer, _, part = key.removeprefix(PREFIX).partition(".lora_")
    return part[0].lower(), f"{layout.tensor_name(f'{layer}.weight')}", f"{layer}.weight"
