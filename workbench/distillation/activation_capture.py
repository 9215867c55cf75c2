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
from workbench.adapters.prompts import visual_prompt_tuner
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
_POSITIONS = {"position_embeddings", "position_embedding", "embed_positions", "wpe"}
"""Tables of positions that are added to the embeddings, by the last part of their path."""
_RELATIVE = {
    "relative_attention_bias",
    "rel_embeddings",
    "relative_position_bias_table",  # BEiT, Swin
    "continuous_position_bias_mlp",  # Swin v2
}
"""Parts that say what attention adds to its scores."""


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
        activations = tuple(caught[spot] for spot in self.spots)
        return tuple(torch.split(activations[0], list(self.widths), dim=-1)) if len(activations) == 1 else activations

    def without_values(self) -> Projections:
        """Queries and keys alone, where values need not be caught with them."""
        return replace(self, spots=self.spots[:2])


class ComparedLayers:
    """The layers of a model that another's are compared with; of an encoder-decoder, the decoder's.

    Hidden states are (B, L, D); the L positions of a feature map are its pixels, row by row.

    Args:
        model: The modules that run, with or without an adapter's inside; they may be without weights.
        picture_13HW: One that the model will read, by whose size the positions are counted; by default of its own size.

    Raises:
        ConfigError: its blocks are not its layers.
    """

    def __init__(self, model: PreTrainedModel, picture_13HW: Tensor | None = None) -> None:
        first_token.widen(model)
        self.family = type(model).__name__
        self.model = model
        self.blocks = (anatomy.blocks(model) or [[]])[-1]
        self._sees = anatomy.reads_pictures(model)
        self.config: Any = anatomy.body_config(model.config) if self._sees else text_config(model.config)
        # Numbers of layers mean stages in the configurations of some that read pictures, and in others nothing.
        self.count = len(self.blocks) if self._sees else layers(model.config)
        if len(self.blocks) != self.count or not self.blocks:
            raise ConfigError(
                f"distill.match: {self.family} has {self.count} layers in {len(self.blocks)} blocks, so that they "
                "cannot be told apart. Leave distill.match out, or take another backbone."
            )
        self._virtual = visual_prompt_tuner.virtual_tokens(model)
        self._shapes = self._caught_shapes(picture_13HW) if self._sees else {}

    def width(self, spot: CapturePoint) -> int:
        """D of hidden states."""
        width: int = self._shapes[spot][-1] if self._sees else self.config.hidden_size
        return width

    def positions(self, spot: CapturePoint) -> tuple[int, int] | None:
        """Rows, and L of each, that a picture has in front of or behind a module; None for text, whose L varies.

        They are several rows where attention looks into windows, each a row of its own.
        """
        if not self._sees:
            return None
        rows, length, *_ = self._shapes[spot]
        return rows, length - self._virtual_at(spot)

    @property
    def heads(self) -> int | None:
        """Number of attention heads; None where there is none, or another one in each stage."""
        heads = getattr(self.config, "num_attention_heads", None)
        return heads if isinstance(heads, int) else None

    def own(self, spot: CapturePoint, caught_BLD: Tensor, *, length: int) -> Tensor:
        """Those of a row's own tokens, without the virtual ones: before a text, and behind the patches of a picture.

        Args:
            length: L of texts.
        """
        if self._sees:
            return caught_BLD[:, : caught_BLD.shape[1] - self._virtual_at(spot)]
        return caught_BLD[:, -length:]

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
        parts = [
            (path.rpartition(".")[2], part)
            for path, part in (*self.model.named_modules(), *self.model.named_parameters())
        ]
        tables = {name for name, part in parts if isinstance(part, (nn.Embedding, nn.Parameter))}
        return bool(tables & _POSITIONS) and not {name for name, _ in parts} & _RELATIVE

    def _widths(self, outputs: list[int]) -> tuple[int, int, int]:
        if len(outputs) == 3:
            return outputs[0], outputs[1], outputs[2]
        heads: int = self.config.num_attention_heads
        queries = heads * (getattr(self.config, "head_dim", None) or self.config.hidden_size // heads)
        rest = (outputs[0] - queries) // 2
        return queries, rest, rest

    def _virtual_at(self, spot: CapturePoint) -> int:
        """Virtual tokens there; the last block gives none of them."""
        return 0 if spot == self.hidden(self.count) else self._virtual

    def _caught_shapes(self, picture_13HW: Tensor | None) -> dict[CapturePoint, torch.Size]:
        """Shapes of all that can be compared, by one call of the model."""
        blank = anatomy.blank_picture(self.model)
        picture = blank if picture_13HW is None else picture_13HW.to(blank)
        spots = [self.hidden(layer) for layer in range(self.count + 1)]
        for layer in range(1, self.count + 1):
            layer_projections = self.projections(layer)
            spots += () if layer_projections is None else layer_projections.spots
        catcher = ActivationCatcher(self.model, spots, graph=False)
        with catcher.catching():
            anatomy.compute_picture(self.model, picture)
        return {spot: tensor.shape for spot, tensor in catcher.take().items()}


class ActivationCatcher:
    """Holds what runs past some spots of a model, until it is taken; of a feature map (B, D, H, W) as (B, HW, D)."""

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
        taken = {spot: _mean(activations) for spot, activations in self._caught.items()}
        self.drop()
        return taken

    def drop(self) -> None:
        """Let go of everything."""
        for activations in self._caught.values():
            activations.clear()

    def _hook(self, spot: CapturePoint) -> RemovableHandle:
        # By path and only now: a method may have put its own layer there.
        module = self._model.get_submodule(spot.path)
        held = self._caught[spot]

        def read(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            keep(arguments[0] if arguments else named["hidden_states"])

        def given(_: nn.Module, __: Any, output: Any) -> None:
            keep(output[0] if isinstance(output, (tuple, list)) else output)

        def keep(tensor: Tensor) -> None:
            tensor = tensor.flatten(2).mT if tensor.ndim == 4 else tensor
            held.append(tensor if self._graph else tensor.detach())

        if spot.read:
            return module.register_forward_pre_hook(read, with_kwargs=True)
        return module.register_forward_hook(given)


def layers(config: PretrainedConfig) -> int:
    """How many layers a model of text has that can be compared."""
    count: int = getattr(config, "num_decoder_layers", None) or text_config(config).num_hidden_layers
    return count


def text_config(config: PretrainedConfig) -> Any:
    """The architecture of what predicts text: the decoder, where there is one."""
    return config.get_text_config(decoder=True)


def scores(queries_BLD: Tensor, keys_BLD: Tensor, *, heads: int) -> Tensor:
    """Attention's scores (B, H, L, L) in front of its softmax, in float32 or wider."""
    both = (each.to(wide(each.dtype)) for each in (queries_BLD, keys_BLD))
    queries, keys = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in both)
    scores_BHLL: Tensor = queries @ keys.mT / math.sqrt(queries.shape[-1])
    return scores_BHLL


def _linear(module: nn.Module) -> nn.Module:
    """The backbone's own layer beneath an adapter's."""
    base: nn.Module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return base


def _mean(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).mean(0)
