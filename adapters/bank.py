"""A bank: K LoRA adapters, with classification heads where the backbone has one, over one frozen backbone.

One forward pass computes rows of all members, each row with its own adapter, as if its adapter were the only one.
PEFT holds the K adapters by name, so each is saved, loaded and switched on like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Conv2d as LoraConv2d
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from workbench import adapters
from workbench.adapters import _without_hints, anatomy, model_card, require_fit
from workbench.adapters.bank_layers import MemberRows, RoutedConvolution, RoutedHead, RoutedLora, Routing
from workbench.adapters.lora import Lora, LoraPlus
from workbench.adapters.method import ExtraParameters, Method
from workbench.adapters.row_dropout import drop_by_row
from workbench.errors import ConfigError, WorkbenchError

_MEMBER = "member"


class Bank:
    """K adapters over one backbone. Compute with it inside `route` or `only`."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self.members: tuple[str, ...] = tuple(model.peft_config)
        """Names that PEFT knows the adapters by."""
        self._routing = Routing(pictures=anatomy.reads_pictures(model.get_base_model()))
        self._training = False
        self._layers: list[Any] = []
        self._route_layers()
        heads: list[Any] = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
        for head in heads:
            head.__class__ = RoutedHead
            head.routing = self._routing

    def _route_layers(self) -> None:
        self._layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        for layer in self._layers:
            if not isinstance(layer, RoutedLora | RoutedConvolution):
                layer.__class__ = RoutedConvolution if isinstance(layer, LoraConv2d) else RoutedLora
                layer.routing = self._routing

    def join(self, folder: Path) -> str:
        """Load the LoRA adapter in `folder` as one more member, frozen; returns its name. Raises as `load` does."""
        name = _name(1 + max(int(each.removeprefix(_MEMBER)) for each in self.members))
        try:
            adapters.load(self.model, folder, name=name)
            _require_plain(self.model, name, folder)
        except WorkbenchError:
            if name in self.model.peft_config:
                self.model.delete_adapter(name)
            raise
        self._route_layers()
        self.members = (*self.members, name)
        return name

    def leave(self, member: str) -> None:
        """Forget a member, one of several."""
        self.model.delete_adapter(member)
        self.members = tuple(each for each in self.members if each != member)

    @contextmanager
    def route(self, rows: Sequence[MemberRows], *, length: int | None) -> Iterator[None]:
        """Inside, a batch's rows belong to these members, in this order; the backward pass belongs inside too.

        Args:
            length: Tokens of each row, padding included; of no account for pictures. None: rows are packed.
        """
        self._routing.set(rows, length=length)
        try:
            yield
        finally:
            self._routing.set((), length=1)

    @contextmanager
    def only(self, member: str) -> Iterator[None]:
        """Inside, every row goes through one member's adapter, and the model evaluates."""
        self._routing.set_all(member)
        self.model.eval()
        try:
            yield
        finally:
            self._routing.set((), length=1)
            if self._training:
                self.train()

    def parameters_of(self, member: str) -> dict[str, nn.Parameter]:
        """The parameters of one member, by their names in the model."""
        return {name: each for name, each in self.model.named_parameters() if member in name.split(".")}

    def train(self) -> None:
        """Compute as in training, without the backbone's own dropout: its masks would depend on the other members.

        bitsandbytes computes int8 layers by other kernels in training than in evaluation.
        """
        self._training = True
        self.model.eval()
        for layer in self._layers:
            layer.get_base_layer().train()
            layer.lora_dropout.train()
        for module in self.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True  # else transformers keeps its activations

    def save(self, member: str, folder: Path) -> None:
        """Write one member into `folder` in PEFT's format, as `adapters.save` does with an adapter that is alone."""
        self.model.save_pretrained(str(folder), selected_adapters=[member], save_embedding_layers=False)
        for path in (folder / member).iterdir():  # PEFT puts every adapter but "default" into a folder of its name
            path.rename(folder / path.name)
        (folder / member).rmdir()
        model_card.write(self.model, folder)


def refusal(config: Method) -> str | None:
    """Say why adapters of this method cannot share a bank, and train one after the other instead; None if they can."""
    if not isinstance(config, (Lora, LoraPlus)) or config.method == "dora":
        return f"a bank holds lora, rslora and lora+; adapters of {config.method} train one after the other"
    if config.experts:
        return "a bank routes rows to linear layers; adapters of experts train one after the other"
    return None


def attach(
    model: PreTrainedModel,
    configs: Sequence[Method],
    *,
    seeds: Sequence[int],
    numbers: Sequence[int] | None = None,
    below: int = 0,
) -> Bank:
    """The backbone with K fresh, trainable adapters; the initial values of each are those that it has alone.

    Args:
        configs: One for each member. Ranks, scales and targets may differ.
        seeds: One for each member.
        numbers: In the names of the members, for those that come back in another bank; by default their places.
        below: The first so many blocks never train, and need no adapters.

    Raises:
        ConfigError: the method does not work on this backbone, or not in a bank.
    """
    for config in configs:
        require_fit(model, config)
        if reason := refusal(config):
            raise ConfigError(f"adapter.method={config.method}: {reason}.")
    # Before anything is attached: target names are those of the bare backbone.
    wanted: list[Any] = [config.to_peft(model, ExtraParameters(heads=anatomy.fresh_heads(model))) for config in configs]
    for peft_config in wanted:
        anatomy.leave_out(peft_config, model, below=below)
    attached: PeftModel | None = None
    names = map(_name, range(len(configs)) if numbers is None else numbers)
    for name, peft_config, seed in zip(names, wanted, seeds, strict=True):
        with torch.random.fork_rng(devices=[]), _without_hints():
            torch.manual_seed(seed)
            if attached is None:
                attached = get_peft_model(model, peft_config, adapter_name=name)
            else:
                attached.add_adapter(name, peft_config)
    assert attached is not None, "a bank has members"
    for peft_config in wanted:  # PEFT corrects it (GPT-2) where it makes a layer, which only the first member does
        peft_config.fan_in_fan_out = wanted[0].fan_in_fan_out
    drop_by_row(attached)
    bank = Bank(attached)
    for member in bank.members:
        for parameter in bank.parameters_of(member).values():
            parameter.requires_grad_(True)
    return bank


def load(model: PreTrainedModel, folders: Sequence[Path]) -> Bank:
    """The backbone with the LoRA adapters in `folders`, frozen, in evaluation mode.

    Raises:
        BackboneError: an adapter was made for another backbone.
        ConfigError: an adapter is none that a bank holds.
        FileError: a file of an adapter is damaged.
    """
    loaded: Any = model
    for number, folder in enumerate(folders):
        loaded = adapters.load(loaded, folder, name=_name(number))
    assert isinstance(loaded, PeftModel), "a bank has members"
    for name, folder in zip(loaded.peft_config, folders, strict=True):
        _require_plain(loaded, name, folder)
    return Bank(loaded)


def _require_plain(model: PeftModel, name: str, folder: Path) -> None:
    config = model.peft_config[name]
    if not isinstance(config, LoraConfig) or config.use_dora or config.trainable_token_indices:
        raise ConfigError(f"{folder}: no plain LoRA adapter. Load it alone: a bank holds lora, rslora and lora+.")


def _name(number: int) -> str:
    """The name of a member: part of no other member's name, which PEFT would confuse, and of no module's."""
    return f"{_MEMBER}{number:04}"
