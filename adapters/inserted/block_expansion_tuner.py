"""The PEFT tuner of block expansion: new blocks after those of a backbone, each a child of the block before it.

The backbone's list of blocks stays as it is, so that paths do not change and the adapter can be switched off; a merge
makes one list of all blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from workbench.adapters import anatomy
from workbench.adapters.peft_tuners import ModuleTuner, TunerConfig, register_tuner
from workbench.adapters.weights.partial_tuner import computed

CHILD = "expansion"
"""Name of the child of a block that holds what follows it."""


@dataclass
class BlockExpansionConfig(TunerConfig):
    """Paths of the blocks that are copied, and of their output projections."""

    blocks: list[str] = field(default_factory=list)
    """Blocks that are copied; a copy follows each."""
    outputs: list[str] = field(default_factory=list)
    """Linear layers inside these blocks that are zero in a fresh copy."""
    trainable_token_indices: dict[str, list[int]] | None = None
    """Rows of embeddings that train beside."""

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The blocks. A tuple: PEFT shortens the names in a long list or set."""
        return tuple(self.blocks)


class ExpansionLayer(nn.Module, BaseTunerLayer):
    """The new blocks of all adapters after one block; active ones compute in their order.

    Args:
        block: The block whose child this is.
        index: Index of the new blocks in the key-value cache.
    """

    adapter_layer_names = ("expansion_blocks",)

    def __init__(self, block: nn.Module, index: int) -> None:
        super().__init__()
        self.expansion_blocks = nn.ModuleDict()
        self.index = index
        self.merged_adapters = []
        self.handle = block.register_forward_hook(self._follow, with_kwargs=True)

    def add(self, name: str, block: nn.Module, zeros: list[str], dtype: torch.dtype) -> None:
        """Copy the block for one more adapter, and set the layers at the paths `zeros` to zero."""
        hooks, own = block._forward_hooks.copy(), block._modules.pop(CHILD, None)
        del block._forward_hooks[self.handle.id]
        new = copy.deepcopy(block)
        block._forward_hooks.update({self.handle.id: hooks[self.handle.id]})
        if own is not None:
            block._modules[CHILD] = own
        for parameter in new.parameters():
            if parameter.dtype != torch.float32:  # a half-precision backbone may keep single ones in float32
                parameter.data = parameter.data.to(dtype)
        for path in zeros:
            for parameter in new.get_submodule(path).parameters():
                nn.init.zeros_(parameter)
        _number(new, self.index)
        self.expansion_blocks[name] = new

    def working(self) -> list[nn.Module]:
        """The new blocks that compute now."""
        active = [] if self.disable_adapters else self.active_adapters
        return [self.expansion_blocks[name] for name in active if name in self.expansion_blocks]

    def _follow(self, _: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> Any:
        rest = {name: each for name, each in named.items() if name != "hidden_states"}
        for block in self.working():
            output = block(output[0] if isinstance(output, tuple) else output, *arguments[1:], **rest)
        return output

    def remove(self, block: nn.Module) -> None:
        """Remove the new blocks after this one."""
        self.handle.remove()
        delattr(block, CHILD)


class ExpansionModel(ModuleTuner):
    """Tuner of block expansion."""

    prefix = "expansion_"
    tuner_layer_cls = ExpansionLayer

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """Remove the name from the middle of a key, where PEFT does not look for it."""
        around = key.split(f".expansion_blocks.{adapter_name}.", 1)
        return (
            ".expansion_blocks.".join(around)
            if around[1:]
            else super()._remove_adapter_name_from_key(key, adapter_name)
        )

    def put(self, config: PeftConfig, name: str, target: nn.Module, path: str) -> None:
        assert isinstance(config, BlockExpansionConfig)
        layer = target._modules.get(CHILD)
        if not isinstance(layer, ExpansionLayer):
            body: Any = anatomy.body_config(self.model.config)
            (stack,) = anatomy.blocks(self.model)
            layer = ExpansionLayer(target, body.num_hidden_layers)
            body.num_hidden_layers += 1  # sizes the cache; the model iterates over its list of blocks
            if getattr(body, "layer_types", None) is not None:
                body.layer_types = [*body.layer_types, body.layer_types[stack.index(path)]]
            target.add_module(CHILD, layer)
        inside = f"{path}."
        zeros = [each.removeprefix(inside) for each in config.outputs if each.startswith(inside)]
        layer.add(name, target, zeros, computed(self.model))
        layer.set_adapter(self.active_adapters)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Leave new blocks in the precision of the computation."""

    def _check_tied_modules(self, model: nn.Module, peft_config: PeftConfig) -> None:
        """Skip PEFT's warning about tied heads, which no block is."""

    def take_off(self, *, merge: bool) -> None:
        (stack,) = anatomy.blocks(self.model)
        config: Any = anatomy.body_config(self.model.config)
        types = getattr(config, "layer_types", None)
        whole: list[nn.Module] = []
        kinds: list[Any] = []
        for number, path in enumerate(stack):
            block = self.model.get_submodule(path)
            layer = block._modules.get(CHILD)
            new: list[nn.Module] = []
            if isinstance(layer, ExpansionLayer):
                new = layer.working() if merge else []
                layer.remove(block)
            whole += [block, *new]
            kinds += [] if types is None else [types[number]] * (1 + len(new))
        config.num_hidden_layers = len(whole)
        if types is not None:
            config.layer_types = kinds
        if len(whole) > len(stack):
            for number, block in enumerate(whole):
                _number(block, number)
            self.model.set_submodule(stack[0].rpartition(".")[0], nn.ModuleList(whole))


def _number(block: nn.Module, number: int) -> None:
    """Set the index of a block in its modules, by which they find their keys and values in the cache."""
    for module in block.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx = number  # type: ignore[assignment]


register_tuner("expansion", BlockExpansionConfig, ExpansionModel)
