"""A bank: K adapters, with classification heads where the backbone has one, over one frozen backbone.

One forward pass computes rows of all members, each row with its own adapter, as if that adapter were the only one. The
members' methods may differ. PEFT holds plain LoRA by name in one model, so that the low-rank products are computed
together (`bank_layers`); every other member has layers of its own (`bank_members`). Each is saved and loaded like a
single adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora.layer import Conv2d as LoraConv2d
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from workbench import adapters
from workbench.adapters import _without_hints, anatomy, model_card, require_fit
from workbench.adapters.banks import bank_methods
from workbench.adapters.banks.bank_layers import MemberRows, Routed, RoutedConvolution, RoutedLora, Routing
from workbench.adapters.banks.bank_members import ALONE, BankMembers, BareBackbone, RoutedHead, copied
from workbench.adapters.banks.bank_methods import is_plain, refusal
from workbench.adapters.method import ExtraParameters, Method
from workbench.adapters.row_dropout import drop_by_row
from workbench.errors import ConfigError, WorkbenchError

__all__ = ["Bank", "attach", "load", "refusal"]

_MEMBER = "member"


class Bank:
    """K adapters over one backbone. Compute with it inside `route` or `only`.

    Args:
        backbone: What all members share.
        plain: The same with the plain LoRA adapters of members, by name; None where there are none.
        members: Names of all members, in order; `add` brings the adapters of those that are not in `plain`.
        bare: A copy of the backbone without adapters, for members of other methods and for those that begin later.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        plain: PeftModel | None,
        members: Sequence[str],
        *,
        bare: PreTrainedModel | None = None,
    ) -> None:
        self.model: nn.Module = BareBackbone(backbone) if plain is None else plain
        self.members: tuple[str, ...] = tuple(members)
        """Their names, each a part of the names of its parameters."""
        self._plain = plain
        self._routing = Routing(counted=anatomy.reads_tokens(backbone))
        self._training = False
        self._layers: list[Any] = []
        self._route_layers()
        heads: list[Any] = [module for module in self.model.modules() if isinstance(module, ModulesToSaveWrapper)]
        for head in heads:
            head.__class__ = RoutedHead
            head.routing, head.own = self._routing, {}
        self._others = None if bare is None else BankMembers(backbone, bare, self._routing)

    def _route_layers(self) -> None:
        self._layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        for layer in self._layers:
            if not isinstance(layer, Routed):
                layer.__class__ = RoutedConvolution if isinstance(layer, LoraConv2d) else RoutedLora
                layer.routing, layer.own = self._routing, {}

    def add(self, member: str, attached: PeftModel) -> None:
        """Add the adapter of a member with layers of its own, attached to a `copy` of the backbone."""
        assert self._others is not None, "a bank of LoRA alone has no copy of its backbone"
        self._others.add(member, attached)

    def copy(self) -> PreTrainedModel:
        """The backbone's modules without adapters, over the same weights."""
        assert self._others is not None, "a bank of LoRA alone has no copy of its backbone"
        return copied(self._others.bare)

    def join(self, folder: Path) -> str:
        """Load the adapter in `folder` as one more member, frozen; returns its name. Raises as `load` does.

        A bank of plain LoRA takes plain LoRA.
        """
        name = _name(1 + max(int(each.removeprefix(_MEMBER)) for each in self.members))
        if self._others is not None:
            _require_able(folder)
            self.add(name, adapters.load(self.copy(), folder))  # type: ignore[arg-type]
        else:
            plain: Any = self._plain
            if not is_plain(_require_able(folder)):
                raise ConfigError(f"{folder}: no plain LoRA adapter. Load it alone: the others of this bank are.")
            try:
                adapters.load(plain, folder, name=name)
            except WorkbenchError:
                if name in plain.peft_config:
                    plain.delete_adapter(name)
                raise
            self._route_layers()
        self.members = (*self.members, name)
        return name

    def begin(self, config: Method, *, seed: int, number: int) -> str:
        """Add a fresh, trainable adapter with the initial values that it has alone; returns its name.

        Args:
            config: One of `later` of the bank.
            seed: Of the initial values.
            number: Part of its name, other than those of all members.
        """
        name = _name(number)
        assert self._others is not None, "a bank that members join has a copy of its backbone"
        if self._plain is None:
            self.add(name, adapters.attach(self.copy(), config, seed=seed))  # type: ignore[arg-type]
        else:
            peft_config: Any = _peft_config(self._others.bare, config, below=0)
            first: Any = next(iter(self._plain.peft_config.values()))
            peft_config.fan_in_fan_out = first.fan_in_fan_out
            with torch.random.fork_rng(devices=[]), _without_hints():
                torch.manual_seed(seed)
                self._plain.add_adapter(name, peft_config)
            drop_by_row(self._plain)
            self._route_layers()
        self.members = (*self.members, name)
        for parameter in self.parameters_of(name).values():
            parameter.requires_grad_(True)
        return name

    def leave(self, member: str) -> None:
        """Forget a member, one of several."""
        self.members = tuple(each for each in self.members if each != member)
        if self._others is not None and member in self._others.models:
            self._others.leave(member)
            return
        plain: Any = self._plain
        training = {id(each) for each in self.model.parameters() if each.requires_grad}
        rest = [each for each in plain.peft_config if each != member]
        if rest and member in plain.active_adapters:  # PEFT lets only the active one train
            plain.set_adapter(rest[0])
        plain.delete_adapter(member)
        for parameter in self.model.parameters():
            parameter.requires_grad_(id(parameter) in training)

    def give_head(self, member: str, path: str, head: nn.Module) -> None:
        """Replace the member's head at `path` of the backbone by a trainable one."""
        wrapped: Any = self.model.get_submodule(f"base_model.model.{path}")
        own = wrapped.own.get(member)
        heads, key = (wrapped.modules_to_save, member) if own is None else (own.modules_to_save, ALONE)
        heads[key] = head.requires_grad_(True)

    @contextmanager
    def route(self, rows: Sequence[MemberRows], *, length: int | None) -> Iterator[None]:
        """Declare which members the batch's rows belong to, for the forward and the backward pass inside the block.

        Args:
            length: Tokens of each row, padding included; unused for pictures. None: rows are packed.
        """
        self._routing.set(rows, length=length)
        try:
            yield
        finally:
            self._routing.set((), length=1)

    @contextmanager
    def only(self, member: str) -> Iterator[None]:
        """Let every row inside the block go through one member's adapter, in evaluation mode."""
        self._routing.set_all(member)
        self.model.eval()
        try:
            yield
        finally:
            self._routing.set((), length=1)
            if self._training:
                self.train()

    def parameters_of(self, member: str) -> dict[str, nn.Parameter]:
        """The parameters of one member by their names in the model, which do not depend on other members."""
        return {name: each for name, each in self.model.named_parameters() if member in name.split(".")}

    def parameters_alone(self, member: str) -> dict[str, nn.Parameter]:
        """The same by the names that they have in a single adapter."""
        own = self._others is not None and member in self._others.models
        return {
            name.replace(f".{member}", "" if own else f".{ALONE}", 1): each
            for name, each in self.parameters_of(member).items()
        }

    def train(self) -> None:
        """Switch to training mode, but for the backbone's own dropout, whose masks would depend on the other members.

        Linear layers switch, too: bitsandbytes computes int8 layers by other kernels in training.
        """
        self._training = True
        self.model.eval()
        for layer in self._layers:
            layer.get_base_layer().train()
            layer.lora_dropout.train()
        if self._others is not None:
            self._others.train()
        for module in self.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True  # else transformers keeps its activations

    def save(self, member: str, folder: Path | str) -> None:
        """Write one member into `folder` in PEFT's format, as `adapters.save` writes a single adapter."""
        folder = Path(folder)
        if self._others is not None and member in self._others.models:
            adapters.save(self._others.models[member], folder)
            return
        plain = self._plain
        assert plain is not None, "PEFT holds all other members"
        tensors = {name: each for name, each in plain.state_dict().items() if member in name.split(".")}
        plain.save_pretrained(str(folder), selected_adapters=[member], save_embedding_layers=False, state_dict=tensors)
        for path in (folder / member).iterdir():  # PEFT puts every adapter but "default" into a folder of its name
            path.rename(folder / path.name)
        (folder / member).rmdir()
        model_card.write(plain, folder)


def attach(
    model: PreTrainedModel,
    configs: Sequence[Method],
    *,
    seeds: Sequence[int],
    numbers: Sequence[int] | None = None,
    below: int = 0,
    later: Sequence[Method] = (),
) -> Bank:
    """The backbone with K fresh, trainable adapters, each with the initial values that it has alone.

    Args:
        model: A bare backbone; its layers are changed in place.
        configs: One for each member. Methods, ranks, scales and targets may differ.
        seeds: One for each member.
        numbers: Parts of the members' names, for members that come back in another bank; by default 0 to K - 1.
        below: Number of first blocks that never train, and need no adapters.
        later: Configurations of members that may begin later. Unless all are plain LoRA, plain LoRA has layers of its
            own, too: PEFT would match targets inside the others' layers, so that results depended on earlier members.

    Returns:
        The bank: its `model` computes inside `route`, which says whose rows a batch holds, or inside `only`.

    Raises:
        ConfigError: A method does not work on this backbone, or not in a bank.

    Examples:
        >>> import torch, workbench
        >>> from workbench.adapters import Lora
        >>> from workbench.adapters.banks.bank_layers import MemberRows
        >>> from workbench.config import ModelConfig
        >>> section = ModelConfig(id="starter", weights="float32")
        >>> tokenizer = workbench.load_tokenizer(section)
        >>> backbone = workbench.load_backbone(section, tokenizer)
        >>> bank = workbench.attach_bank(backbone.model, [Lora(rank=4, alpha=8), Lora(rank=8, alpha=8)], seeds=[0, 1])
        >>> [sum(each.numel() for each in bank.parameters_of(member).values()) for member in bank.members]
        [112128, 224256]
        >>> ids_BL = torch.tensor([[5, 6, 7], [5, 6, 7], [8, 9, 10]])
        >>> with bank.route([MemberRows(bank.members[0], 1), MemberRows(bank.members[1], 2)], length=3):
        ...     bank.model(input_ids=ids_BL).logits.sum().backward()
        >>> bank.save(bank.members[1], "second")
    """
    for config in [*configs, *later]:
        require_fit(model, config)
        if reason := refusal(config):
            raise ConfigError(f"adapter.method={config.method}: {reason}.")
    names = [_name(number) for number in (range(len(configs)) if numbers is None else numbers)]
    wanted = list(zip(names, configs, seeds, strict=True))
    mixed = not all(map(bank_methods.together, [*configs, *later]))
    together = [] if mixed and later else [each for each in wanted if bank_methods.together(each[1])]
    bare, plain = copied(model) if mixed or later else None, _plain(together, model, below=below)
    bank = Bank(model, plain, names, bare=bare)
    for member in bank.members:
        for parameter in bank.parameters_of(member).values():
            parameter.requires_grad_(True)
    for name, config, seed in wanted:
        if all(name != each for each, _, _ in together):
            attached: Any = adapters.attach(bank.copy(), config, seed=seed, below=below)
            bank.add(name, attached)
    return bank


def _plain(wanted: Sequence[tuple[str, Method, int]], model: PreTrainedModel, *, below: int) -> PeftModel | None:
    """The backbone with the LoRA adapters among the members."""
    # Before anything is attached: target names are those of the bare backbone.
    configs = [_peft_config(model, config, below=below) for _, config, _ in wanted]
    attached: PeftModel | None = None
    for (name, _, seed), peft_config in zip(wanted, configs, strict=True):
        with torch.random.fork_rng(devices=[]), _without_hints():
            torch.manual_seed(seed)
            if attached is None:
                attached = get_peft_model(model, peft_config, adapter_name=name)
            else:
                attached.add_adapter(name, peft_config)
    for peft_config in configs:  # PEFT corrects it (GPT-2) only for the first member
        peft_config.fan_in_fan_out = configs[0].fan_in_fan_out
    if attached is not None:
        drop_by_row(attached)
    return attached


def _peft_config(model: PreTrainedModel, config: Method, *, below: int) -> Any:
    """PEFT's configuration of a member over a bare backbone."""
    peft_config = config.to_peft(model, ExtraParameters(heads=anatomy.fresh_heads(model)))
    anatomy.leave_out(peft_config, model, below=below)
    return peft_config


def load(model: PreTrainedModel, folders: Sequence[Path]) -> Bank:
    """The backbone with the adapters in `folders`, frozen, in evaluation mode.

    Raises:
        BackboneError: an adapter was made for another backbone.
        ConfigError: an adapter is none that a bank holds.
        FileError: a file of an adapter is damaged.
    """
    names = [_name(number) for number in range(len(folders))]
    plain = [is_plain(_require_able(folder)) for folder in folders]
    bare = None if all(plain) else copied(model)
    loaded: Any = model
    for name, folder, together in zip(names, folders, plain, strict=True):
        if together:
            loaded = adapters.load(loaded, folder, name=name)
    bank = Bank(model, loaded if any(plain) else None, names, bare=bare)
    for name, folder, together in zip(names, folders, plain, strict=True):
        if not together:
            other: Any = adapters.load(bank.copy(), folder)
            bank.add(name, other)
    return bank


def _require_able(folder: Path) -> Any:
    """The PEFT configuration of a saved adapter; raises as `load` does."""
    config = adapters.saved_config(folder)
    if reason := bank_methods.refusal_of_saved(config):
        raise ConfigError(f"{folder}: {reason}. Load it alone.")
    return config


def _name(number: int) -> str:
    """The name of a member; all have one length, since PEFT confuses names that contain another one."""
    return f"{_MEMBER}{number:04}"
