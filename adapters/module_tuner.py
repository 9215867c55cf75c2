"""Bases of our PEFT tuners that put something beside modules, which a configuration names by their whole paths."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from workbench.errors import ConfigError


class ModuleTuner(BaseTuner):
    """Puts layers beside the modules whose whole paths are `target_modules`, and takes them off."""

    @abstractmethod
    def put(self, config: PeftConfig, name: str, target: nn.Module, path: str) -> None:
        """Add the adapter `name` to the layer beside `target`, the module at `path`, and make that layer if need be."""

    def _create_and_replace(
        self,
        peft_config: PeftConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        self.put(peft_config, adapter_name, target, current_key)

    @abstractmethod
    def take_off(self, *, merge: bool) -> None:
        """Leave the backbone without layers of ours.

        Args:
            merge: What the active ones do is to become part of it.
        """

    @staticmethod
    def _check_target_module_exists(peft_config: PeftConfig, key: str) -> bool:
        """Compare whole paths, where PEFT would take the ends of others for them."""
        return key in peft_config.target_modules  # type: ignore[attr-defined]

    def _check_merge_allowed(self) -> None:
        """Allow it, also under tied weights, which layers beside modules leave alone."""

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:  # PEFT returns the model, and says None
        if merge:
            self._check_merge_allowed()
        if adapter_names is not None:
            self.set_adapter(adapter_names)
        self.take_off(merge=merge)
        return super()._unload_and_optionally_merge(merge=False, progressbar=progressbar)


class UnmergeableTuner(ModuleTuner):
    """A tuner whose layers are no update of weights."""

    why: str
    """Why they cannot be merged, and what to do instead."""

    def _check_merge_allowed(self) -> None:
        raise ConfigError(self.why)
