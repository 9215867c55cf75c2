"""An adapter that trains here and answers there: it is saved, and a server is told to load it, in vLLM's form."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from workbench.errors import BackboneError, ConfigError
from workbench.runs import files
from workbench.runs.openai_client import OpenAIClient, reason

LOAD, UNLOAD = "load_lora_adapter", "unload_lora_adapter"
_NOBODY = "workbench-nobody"
"""A name that no adapter has."""
_STARTS = (
    "Start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora, or `workbench serve RUN --load-adapters`."
)


class ServedPolicy:
    """The adapter of a run on a server, by a name that is a function of its values.

    A name never comes again with other values, so that no server answers from what it has cached of older ones, and a
    run that goes on finds what it loaded before.

    Args:
        save: Writes the adapter as it is now into a folder, in PEFT's format.
        folder: Where adapters lie while the server has them; the server reads it at the same path.
        every: Rollouts that are written before weights are loaded again.
    """

    def __init__(self, server: OpenAIClient, save: Callable[[Path], None], folder: Path, *, every: int) -> None:
        self.server, self._save, self._folder, self._every = server, save, folder, every
        self.name = ""
        """By which the server knows the weights that answer now."""
        self._rollouts = 0

    def refresh(self) -> None:
        """Have the weights of now answer, in each `every`-th rollout since the run began or went on.

        Raises:
            BackboneError: The server does not answer.
            ConfigError: It does not load the adapter; says why.
        """
        due = self._rollouts % self._every == 0
        self._rollouts += 1
        if not due:
            return
        aside = self._folder / "next"
        with files.new_folder(aside, durable=False) as unfinished:
            self._save(unfinished)
        name = f"{self._folder.resolve().parent.name}-{_digest(aside)}"
        known = [each for each in _names(self._folder) if each != name]
        if name != self.name:
            shutil.rmtree(self._folder / name, ignore_errors=True)
            aside.rename(self._folder / name)
            self._load(name)
        self.name = name
        for each in known:
            _forget(self.server, self._folder / each)

    def _load(self, name: str) -> None:
        path = (self._folder / name).resolve()
        response = self.server.sent("POST", LOAD, {"lora_name": name, "lora_path": str(path)})
        if response.status_code == 400 and "already been loaded" in reason(response):
            return  # before the run was stopped, with the same values
        if response.status_code != 200:
            self.server.require_permitted(response)
            raise ConfigError(
                f"{self.server.named}: the server does not load {path}: {reason(response)} It must see that folder by "
                "the same path, and take its rank (vLLM: --max-lora-rank) and layers."
            )


def require_loading(server: OpenAIClient) -> None:
    """Raise ConfigError where a server loads no adapters while it answers."""
    response = server.sent("POST", UNLOAD, {"lora_name": _NOBODY})
    if response.status_code == 404 and _NOBODY in response.text:
        return  # it knows the address, and no such adapter
    if response.status_code == 401:
        server.require_permitted(response)
    raise ConfigError(
        f"{server.named} loads no adapters while it answers (POST /{UNLOAD}: status {response.status_code}, "
        f"{reason(response)}), so that new weights would never reach it. {_STARTS}"
    )


def clear(server: OpenAIClient, folder: Path) -> None:
    """Have a server forget all adapters of a folder, and delete it."""
    for name in _names(folder):
        _forget(server, folder / name)
    shutil.rmtree(folder, ignore_errors=True)


def _forget(server: OpenAIClient, path: Path) -> None:
    """Whatever the server says: one that is not there, or does not know the adapter, has forgotten it already."""
    with suppress(BackboneError):
        server.sent("POST", UNLOAD, {"lora_name": path.name}, patient=False)
    shutil.rmtree(path, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    """Adapters that lie in a folder."""
    return sorted(each.parent.name for each in folder.glob("*/adapter_config.json") if each.parent.name != "next")


def _digest(folder: Path) -> str:
    whole = hashlib.sha256(
        str(folder.resolve()).encode()
    )  # another run's adapter with the same values has another name
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        whole.update((folder / name).read_bytes())
    return whole.hexdigest()[:12]
