"""A backbone without a head that embeds texts, and where it is saved.

Legend: B texts, L padded length, D numbers of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench import adapters
from workbench.adapters import Full, anatomy
from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN
from workbench.config.sections.embed_config import EmbedConfig
from workbench.data.batching import MicroBatch
from workbench.errors import BackboneError, ConfigError
from workbench.losses import embedding_losses
from workbench.models import backbones, exported, sentence_transformers_files
from workbench.runs import files


@dataclass(frozen=True)
class Embedder:
    """A model that gives each text its embedding, whatever the padding."""

    model: nn.Module
    backbone: PreTrainedModel
    """The same, without the adapter around it."""
    tokenizer: PreTrainedTokenizerBase
    config: EmbedConfig

    @property
    def width(self) -> int:
        """Numbers of a whole embedding."""
        return anatomy.hidden_size(self.backbone.config)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the embeddings that are learnt, the largest last."""
        return (*sorted(size for size in self.config.sizes if size != self.width), self.width)

    def pooled(self, batch: MicroBatch) -> Tensor:
        """Embeddings (B, D) float32, of any length; of padded or packed texts."""
        uncached = {"use_cache": False} if is_causal(self.backbone) else {}
        hidden_BLD: Tensor = self.model(**batch.inputs, **uncached).last_hidden_state
        hidden_BLD = hidden_BLD.float()
        packed = "row_lengths" in batch.inputs
        if self.config.pooling == "first":
            return hidden_BLD[0, batch.inputs["row_starts"][:-1]] if packed else hidden_BLD[:, 0]
        if self.config.pooling == "last":
            return hidden_BLD.flatten(0, 1)[batch.positions_N]
        if packed:
            rows = hidden_BLD[0].split(batch.inputs["row_lengths"].tolist())
            return torch.stack([row_TD.mean(0) for row_TD in rows])
        mask_BL1 = batch.inputs["attention_mask"][..., None].float()
        return (hidden_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)

    def embeddings(self, batch: MicroBatch) -> Tensor:
        """Embeddings (B, D) as they are compared and shipped."""
        return embedding_losses.leading(self.pooled(batch), self.width, normalise=self.config.normalise)


def require_known_form(config: RunConfig) -> None:
    """Refuse, before a row is read, a backbone that does not give one text its hidden states.

    Raises:
        BackboneError: It reads pictures, or is an encoder-decoder.
        ConfigError: `embed.sizes` are larger than its embeddings, or `embed.pooling` says nothing of the text.
    """
    hub = backbones.of_one_sequence(config.model, recipe="embed", take="an encoder or a causal backbone")
    model = backbones.skeleton(config.model, task=HIDDEN)
    if anatomy.reads_pictures(model):
        name = f"model.id={config.model.id}: {type(hub).__name__}"
        raise BackboneError(f"{name} reads pictures, and recipe embed texts. Take another one.")
    width = anatomy.hidden_size(model.config)
    if large := [size for size in config.embed.sizes if size > width]:
        raise ConfigError(
            f"embed.sizes: {large[0]} is more than the {width} numbers of {config.model.id}'s embeddings. "
            f"Write sizes up to {width}."
        )
    if config.embed.pooling == "first" and is_causal(model):
        raise ConfigError(
            f"embed.pooling=first: the first token of the causal {type(model).__name__} has seen none of the text. "
            "Write embed.pooling=last or mean."
        )


def is_causal(model: nn.Module) -> bool:
    """Whether a token sees only those before it."""
    return any(getattr(module, "is_causal", False) for module in model.modules())


def make(
    model: nn.Module, backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> Embedder:
    """How `model` embeds texts."""
    return Embedder(model, backbone, tokenizer, config.embed)


def save(embedder: Embedder, folder: Path, config: RunConfig, *, adapter: Callable[[Path], None] | None = None) -> None:
    """Write adapter, tokenizer and what sentence-transformers reads into `folder`, atomically."""
    with files.new_folder(folder) as aside:
        if adapter is None:
            adapters.save(embedder.model, aside)
        else:
            adapter(aside)
        save_around(embedder, aside, config)


def save_around(embedder: Embedder, folder: Path, config: RunConfig) -> None:
    """Everything beside the weights: the tokenizer, with a pad token, and the modules of sentence-transformers."""
    tokenizer = embedder.tokenizer
    if tokenizer.pad_token is None:  # what pads is masked: any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(folder)
    sentence_transformers_files.write(folder, config.embed, width=embedder.width, max_tokens=config.data.max_tokens)


def load(
    run: Path, config: RunConfig, *, waiting: bool = False, backbone: backbones.Backbone | None = None
) -> Embedder:
    """The embedder that the run at `run` shipped, in evaluation mode.

    Args:
        waiting: On the host, as `backbones.load` says.
        backbone: Takes the adapter, instead of one that is loaded; as it came.
    """
    folder = run / "adapter"
    exported.require_saved(run, config, "tokenizer.json", sentence_transformers_files.MODULES)
    tokenizer = exported.load_tokenizer(run, config)
    under = (backbone or exported.load_backbone(config, folder, tokenizer, task=HIDDEN, waiting=waiting)).model
    model = under if isinstance(config.adapter, Full) else adapters.load(under, folder)
    return make(model, under, tokenizer, config)
