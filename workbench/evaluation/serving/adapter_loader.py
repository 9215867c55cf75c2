"""LoRA adapters that join a server while it answers, and leave it: vLLM's /v1/load_lora_adapter and its opposite."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.evaluation.serving.adapter_routes import BankRoutes
from workbench.evaluation.serving.engine import Engine
from workbench.evaluation.serving.refusals import Refusal
from workbench.evaluation.serving.served_models import TextModel

_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter in PEFT's format; nothing else is read."""


class AdapterLoader:
    """Loads adapters into a bank whose engine answers.

    Args:
        bare: The backbone as it is served, whose tokenizer and template its new adapters have.
    """

    def __init__(self, routes: BankRoutes, engine: Engine, bare: TextModel) -> None:
        self._routes, self._engine, self.bare = routes, engine, bare

    def load(self, name: str, folder: Path) -> TextModel:
        """The model of an adapter in `folder`, by a name; no answer is written meanwhile.

        Raises:
            Refusal: There is no LoRA adapter for this backbone.
        """
        if missing := [file for file in _FILES if not (folder / file).is_file()]:
            raise Refusal(
                f"{folder}: there is no {missing[0]} here. Name a folder in PEFT's format that this server can read.",
                param="lora_path",
            )
        try:
            member = self.bare.scheduler.between(lambda: self._joined(folder))
        except WorkbenchError as error:
            raise Refusal(str(error), param="lora_path") from None
        return replace(self.bare, name=name, created=int(time.time()), member=member)

    def unload(self, model: TextModel) -> None:
        """Let an adapter go.

        Raises:
            Refusal: It is writing answers.
        """

        def leave() -> bool:
            if self.bare.scheduler.writes(model.member):
                return False
            self._routes.leave(model.member)
            return True

        if not self.bare.scheduler.between(leave):
            raise Refusal(f"{model.name} is writing answers. Unload it when they have ended.", status=409)

    def _joined(self, folder: Path) -> str:
        member = self._routes.join(folder)
        try:
            self._engine.admit(member)
        except WorkbenchError:
            self._routes.leave(member)
            raise
        return member
