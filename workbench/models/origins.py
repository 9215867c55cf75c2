"""Where backbones come from: a folder, the hub or the shipped starter; and what to do where one cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workbench.config import ModelConfig
from workbench.data import starter
from workbench.errors import BackboneError, WorkbenchError, out_of_memory


def path(config: ModelConfig) -> str:
    """A folder, or an id on the hub; raises BackboneError where neither can be meant."""
    location = starter.resolve(config.id)
    looks_local = location.startswith((".", "/", "~")) or location.count("/") > 1
    if looks_local and not Path(location).expanduser().is_dir():
        raise BackboneError(
            f"model.id: no folder {config.id}. Write an existing folder, a hub id such as "
            "Qwen/Qwen3-0.6B, or `starter`."
        )
    if config.revision is not None and Path(location).expanduser().is_dir():
        raise BackboneError(
            f"model.revision={config.revision} names a branch, tag or commit on the hub, but model.id={config.id} is a "
            "folder. Leave model.revision out."
        )
    return str(Path(location).expanduser()) if looks_local else location


def arguments(config: ModelConfig) -> dict[str, Any]:
    """Further arguments of transformers' `from_pretrained`."""
    return {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}


OTHER_SHAPES = (
    "its weights do not have the shapes that its config.json asks for. Fetch weights and config.json that belong "
    "together."
)


class loading_errors:
    """Turns what transformers, safetensors and the hub raise while loading into a BackboneError that says what to do.

    Args:
        part: What is loaded, in a word.
        patterns: The files of a folder that hold it; one of them is enough.
    """

    def __init__(self, config: ModelConfig, part: str, *patterns: str) -> None:
        self.id = config.id
        self.part = part
        self.patterns = patterns

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Foreign code over foreign files: whatever it raises, the backbone cannot be loaded.
        if isinstance(error, Exception) and not isinstance(error, WorkbenchError):
            raise BackboneError(f"model.id={self.id} cannot be loaded: {self._why(error)}") from error

    def _why(self, error: Exception) -> str:
        text = " ".join(str(error).split())
        folder = Path(starter.resolve(self.id)).expanduser()
        if isinstance(error, torch.OutOfMemoryError):
            return "it does not fit into the device's memory. Write model.weights=nf4, or take a smaller one."
        if out_of_memory(error):
            return (
                "the machine's memory is exhausted. End other programs, write model.weights=nf4, or take a smaller one."
            )
        for words, cure in (_CURES if folder.is_dir() else _CURES | _HUB_CURES).items():
            if any(word in text for word in words):
                return cure.format(id=self.id)
        if not folder.is_dir():
            return f"{type(error).__name__}: {text[:300]}"
        if not any(path for pattern in self.patterns for path in folder.glob(pattern)):
            return f"the folder holds no {self.part} ({', '.join(self.patterns)}). Save or fetch all of it."
        return f"damaged {self.part} ({type(error).__name__}: {text[:300].rstrip('.')}). Save or fetch all of it again."


_CURES = {
    ("trust_remote_code",): "it brings its own Python code. If you trust its authors, write "
    "model.trust_remote_code=true, or --trust to read a run that had it.",
    ("does not recognize this architecture",): "this version of transformers does not know its architecture. Update "
    "transformers, or take another backbone.",
    ("ignore_mismatched_sizes",): OTHER_SHAPES,
    ("requires the timm library",): "it is a model of timm, which is not installed. Run: pip install timm, with the "
    "torchvision of this build of torch.",
    ("torchvision::nms",): "timm needs torchvision, and the one that is installed was made for another build of torch. "
    "Install that of this one.",
}
_HUB_CURES = {
    ("couldn't connect", "offline mode"): "the hub cannot be reached and the files are not cached. Write a folder as "
    "model.id, use the shipped `starter`, or fetch it where there is a network: hf download {id}",
    ("gated", "401"): "it is gated or private: accept its terms on the hub, then run: hf auth login",
    (
        "not a valid model identifier",
        "404",
    ): "no such folder, and no such id on the hub. Check the spelling: owner/name",
}
"""Words of an error message to what a person should do about it; the first that fits is told."""
