"""The files that a backbone is read from, by their digests: what tells it from every other."""

from __future__ import annotations

from pathlib import Path

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
