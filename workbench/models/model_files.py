"""The files that a backbone is read from, by their digests: what tells it from every other."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from workbench.config import ModelConfig
from workbench.models import backbones, origins
from workbench.runs import provenance


def digests(model: ModelConfig) -> dict[str, str]:
    """Digests of a folder's files, or the commit of a model on the hub."""
    folder = Path(origins.path(model))
    if folder.is_dir():
        return provenance.digests(folder, title=model.id)
    commit = getattr(backbones.hub_config(model), "_commit_hash", None)
    return {model.id: str(commit or model.revision or "main")}


def are_here(model: ModelConfig) -> bool:
    """Whether its weights are on this machine, so that nothing need be fetched."""
    location = origins.path(model)
    if Path(location).is_dir():
        return any(Path(location).glob("*.safetensors"))
    names = ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(try_to_load_from_cache(location, name, revision=model.revision), str) for name in names)
