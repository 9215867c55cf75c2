"""Capture of tensors inside a model: hidden states of its layers, queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from workbench.adapters import anatomy
from workbench.errors import ConfigError
from workbench.losses.chunked import wide
from workbench.models import first_token

_APART = (
    ("q_proj", "k_proj", "v_proj"),  # Llama, OPT, BART and most
    ("query", "key", "value"),  # BERT, RoBERTa, ELECTRA
    ("query_proj", "key_proj", "value_proj"),  # DeBERTa v2 and v3
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("q", "k", "v"),  # T5, MPNet
)
_JOINED = {"gpt2": "c_attn", "phi3": "qkv_proj", "modernbert": "Wqkv", "mpt": "Wqkv"}
"""Joint projections (queries, then keys, then values), by family."""
_POSITIONS = {"position_embeddings", "embed_positions", "wpe"}
"""Tables of positions that are added to the embeddings, by the last part of their path."""
_RELATIVE = {"relative_attention_bias", "rel_embeddings"}
"""Tables of what attention adds to its scores."""


class CapturePoint(NamedTuple):
    """A tensor inside a model."""

    path: str
    """Path of the module in the model."""
    read: bool = False
    """Capture the module's first input instead of its output."""


Caught = Mapping[CapturePoint, Tensor]


@dataclass(frozen=True)
class Projections:
    """Queries, keys and values of a layer's attention to its own tokens, before anything turns them by position."""

    spots: tuple[CapturePoint, ...]
    """One of each, or one of all."""
    widths: tuple[int, int, int]
    causal: bool
    """Whether no token looks at those after it."""

    def of(self, caught: Caught) -> tuple[Tensor, ...]:
        """Queries, keys and values (B, L, their width)."""
        found = tuple(caught[spot] for spot in self.spots)
        return tuple(torch.split(found[0], list(self.widths), dim=-1)) if len(found) == 1 else found

    def without_values(self) -> Projections:
        """Queries and keys alone, where values need not be caught with them."""
        return replace(self, spots=self.spots[:2])


class ComparedLayers:
    """The layers of a model that another's are compared with; of an encoder-decoder, the decoder's.

    Raises:
        ConfigError: its blocks are not its layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        first_token.widen(model)
        self.family = type(model).__name__
        self.model = model
        self.config = text_config(model.config)
        self.count = layers(model.config)
        self.blocks = (anatomy.blocks(model) or [[]])[-1]
        if len(self.blocks) != self.count:
            raise ConfigError(
                f"distill.match: {self.family} has {self.count} layers in {len(self.blocks)} blocks, so that they "
                "cannot be told apart. Leave distill.match out, or take another backbone."
            )

    @property
    def width(self) -> int:
        """D of its hidden states."""
        width: int = self.config.hidden_size
        return width

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        heads: int = self.config.num_attention_heads
        return heads

    def hidden(self, layer: int) -> CapturePoint:
        """The hidden states that layer `layer` gives, before any normalisation behind the last one; 0: that enter."""
        return CapturePoint(self.blocks[layer - 1]) if layer else CapturePoint(self.blocks[0], read=True)

    def projections(self, layer: int) -> Projections | None:
        """Those of layer `layer`; None where they are not known."""
        block = self.blocks[layer - 1]
        # A block attends to its own tokens before it attends to an encoder's.
        for path, module in self.model.get_submodule(block).named_modules(prefix=block):
            parts = dict(module.named_children())
            for names in (*_APART, (_JOINED.get(self.config.model_type, ""),)):
                linears = [_linear(parts[name]) for name in names if name in parts]
                if len(linears) == len(names) and all(map(anatomy.is_linear, linears)):
                    return Projections(
                        tuple(CapturePoint(f"{path}.{name}") for name in names),
                        self._widths([anatomy.features(linear)[1] for linear in linears]),
                        causal=bool(getattr(module, "is_causal", False)),  # as transformers' own attention asks
                    )
        return None

    def adds_positions(self) -> bool:
        """Whether positions are part of the embeddings, so that attention's scores are queries times keys alone."""
        tables = {
            path.rpartition(".")[2] for path, part in self.model.named_modules() if isinstance(part, nn.Embedding)
        }
        return bool(tables & _POSITIONS) and not tables & _RELATIVE

    def _widths(self, outputs: list[int]) -> tuple[int, int, int]:
        if len(outputs) == 3:
            return outputs[0], outputs[1], outputs[2]
        queries = self.heads * (getattr(self.config, "head_dim", None) or self.width // self.heads)
        rest = (outputs[0] - queries) // 2
        return queries, rest, rest


class ActivationCatcher:
    """Holds what runs past some spots of a model, until it is taken."""

    def __init__(self, model: PreTrainedModel, spots: Iterable[CapturePoint], *, graph: bool) -> None:
        self._model, self._graph = model, graph
        self._caught: dict[CapturePoint, list[Tensor]] = {spot: [] for spot in spots}

    @contextmanager
    def catching(self) -> Iterator[None]:
        """The model runs inside the block; what was caught before is dropped, and also where it fails."""
        self.drop()
        handles = [self._hook(spot) for spot in self._caught]
        try:
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            # Before the backward pass, in which checkpointed blocks run again.
            for handle in handles:
                handle.remove()

    def take(self) -> dict[CapturePoint, Tensor]:
        """Captured tensors, which are released here; of several runs (teachers over one backbone) their mean."""
        assert all(self._caught.values()), "the model runs first"
        taken = {spot: _mean(found) for spot, found in self._caught.items()}
        self.drop()
        return taken

    def drop(self) -> None:
        """Let go of everything."""
        for found in self._caught.values():
            found.clear()

    def _hook(self, spot: CapturePoint) -> RemovableHandle:
        # By path and only now: a method may have put its own layer there.
        module = self._model.get_submodule(spot.path)
        held = self._caught[spot]

        def read(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            keep(arguments[0] if arguments else named["hidden_states"])

        def given(_: nn.Module, __: Any, output: Any) -> None:
            keep(output[0] if isinstance(output, (tuple, list)) else output)

        def keep(tensor: Tensor) -> None:
            held.append(tensor if self._graph else tensor.detach())

        if spot.read:
            return module.register_forward_pre_hook(read, with_kwargs=True)
        return module.register_forward_hook(given)


def layers(config: PretrainedConfig) -> int:
    """How many layers a model has that can be compared."""
    count: int = getattr(config, "num_decoder_layers", None) or text_config(config).num_hidden_layers
    return count


def text_config(config: PretrainedConfig) -> Any:
    """The architecture of what predicts text: the decoder, where there is one."""
    return config.get_text_config(decoder=True)


def scores(queries_BLD: Tensor, keys_BLD: Tensor, *, heads: int) -> Tensor:
    """Attention's scores (B, H, L, L) in front of its softmax, in float32 or wider."""
    both = (each.to(wide(each.dtype)) for each in (queries_BLD, keys_BLD))
    queries, keys = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in both)
    found: Tensor = queries @ keys.mT / math.sqrt(queries.shape[-1])
    return found


def _linear(module: nn.Module) -> nn.Module:
    """The backbone's own layer beneath an adapter's."""
    base: nn.Module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return base


def _mean(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).mean(0)
