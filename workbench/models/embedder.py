"""A backbone without a head that embeds texts, its training loss, and where it is saved, for sentence-transformers too.

Legend: B texts or rows, L padded length, N passages, U different texts of a batch, D numbers of an embedding, C rows
that are compared at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench import adapters
from workbench.adapters import Full, anatomy
from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN
from workbench.config.sections.embed_config import EmbedConfig
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.embedding.pair_set import BatchTexts, PairSet, TextUnits
from workbench.data.mixture import MixedRows
from workbench.errors import BackboneError, ConfigError
from workbench.losses import ranking_losses
from workbench.models import backbones, exported
from workbench.runs import files

MODULES_FILE = "modules.json"
_MODES: dict[Literal["mean", "first", "last"], str] = {"mean": "mean", "first": "cls", "last": "lasttoken"}
_MODELS = "sentence_transformers.models"
COMPARED = 2**22  # most similarities that are in memory at a time
Term = Callable[[Tensor], Tensor]  # from embeddings (U, D) of any length to a part of the mean loss


def write_sentence_transformers_files(folder: Path, config: EmbedConfig, *, width: int, max_tokens: int) -> None:
    """Write modules, pooling and prompts into `folder`, beside a model or an adapter and its tokenizer. `width`:
    numbers of an embedding. `max_tokens`: of a text; longer ones are cut."""
    names = ["Transformer", "Pooling", *(["Normalize"] if config.normalise else [])]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": "" if number == 0 else f"{number}_{name}",
            "type": f"{_MODELS}.{name}",
        }
        for number, name in enumerate(names)
    ]
    pooling = {"embedding_dimension": width, "pooling_mode": _MODES[config.pooling], "include_prompt": True}
    files.write_json(folder / MODULES_FILE, modules)
    files.write_json(folder / "1_Pooling" / "config.json", pooling)
    if config.normalise:
        (folder / "2_Normalize").mkdir()
    files.write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    files.write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": config.query_prefix, "document": config.passage_prefix},
            "default_prompt_name": "query" if config.query_prefix else None,
            "similarity_fn_name": "cosine" if config.normalise else "dot",
        },
    )


def read_sentence_transformers_files(folder: Path) -> tuple[EmbedConfig, int | None]:
    """How a folder of sentence-transformers embeds texts, and the longest text that it says it reads.

    Raises:
        ConfigError: It says nothing of that, or has modules or a pooling that recipe embed has not.
    """
    if not (folder / MODULES_FILE).is_file():
        raise ConfigError(f"it does not say how it makes one embedding of a text (no {MODULES_FILE})")

    def read(path: Path) -> dict[str, Any]:
        return files.read_json(path) if path.is_file() else {}

    listed: Any = json.loads((folder / MODULES_FILE).read_text(encoding="utf-8"))
    paths = {str(each["type"]).rpartition(".")[2]: folder / str(each["path"]) for each in listed}
    if odd := sorted(paths.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise ConfigError(f"{MODULES_FILE} has a module {odd[0]}, which recipe embed has not")
    pooling, known = read(paths.get("Pooling", folder / "1_Pooling") / "config.json"), {v: k for k, v in _MODES.items()}
    modes = [pooling.get("pooling_mode"), *(name for name, on in pooling.items() if on is True)]
    found = [str(each).removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for each in modes]
    chosen = [each for each in found if each not in ("None", "include_prompt")]
    if len(chosen) != 1 or chosen[0] not in known:
        raise ConfigError(
            f"it pools tokens by {' and '.join(chosen) or 'nothing'}, and recipe embed by mean|first|last"
        )
    prompts = read(folder / "config_sentence_transformers.json").get("prompts") or {}
    if prompts and pooling.get("include_prompt") is False:
        raise ConfigError("it leaves instructions out of its pooling, which recipe embed does not")
    longest = read(paths.get("Transformer", folder) / "sentence_bert_config.json").get("max_seq_length")
    section = EmbedConfig(
        pooling=known[chosen[0]],
        normalise="Normalize" in paths,
        query_prefix=prompts.get("query", ""),
        passage_prefix=prompts.get("document", prompts.get("passage", "")),
    )
    return section, longest


class EmbeddingForm(Protocol):
    """How embeddings are compared."""

    @property
    def config(self) -> EmbedConfig: ...

    @property
    def width(self) -> int:
        """Numbers of a whole embedding."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that are compared, the largest last."""


@dataclass(frozen=True)
class GivenForm:
    """Embeddings that are there, of one size."""

    config: EmbedConfig
    width: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.width,)


@dataclass(frozen=True)
class Embedder:
    """A model that embeds texts; padding does not matter."""

    model: nn.Module
    backbone: PreTrainedModel  # the model without the adapter around it
    tokenizer: PreTrainedTokenizerBase
    config: EmbedConfig

    @property
    def width(self) -> int:
        """Numbers of a whole embedding."""
        return anatomy.hidden_size(self.backbone.config)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the embeddings that are trained, the largest last."""
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
            return torch.stack([row_TD.mean(0) for row_TD in hidden_BLD[0].split(batch.inputs["row_lengths"].tolist())])
        mask_BL1 = batch.inputs["attention_mask"][..., None].float()
        return (hidden_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)

    def embeddings(self, batch: MicroBatch) -> Tensor:
        """Embeddings (B, D) as they are compared and shipped."""
        return ranking_losses.leading(self.pooled(batch), self.width, normalise=self.config.normalise)


def require_known_form(config: RunConfig) -> None:
    """Refuse, before a row is read, a backbone that cannot embed texts. Raises BackboneError: it reads pictures, or is
    an encoder-decoder; ConfigError: `embed.sizes` are larger than its embeddings, or `embed.pooling` says nothing of
    the text."""
    hub = backbones.of_one_sequence(config.model, recipe="embed", take="an encoder or a causal backbone")
    model = backbones.skeleton(config.model, task=HIDDEN)
    if not anatomy.reads_tokens(model):
        name = f"model.id={config.model.id}: {type(hub).__name__}"
        raise BackboneError(f"{name} reads no tokens, and recipe embed texts. Take another one.")
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
        adapters.save(embedder.model, aside) if adapter is None else adapter(aside)
        save_around(embedder, aside, config)


def save_around(embedder: Embedder, folder: Path, config: RunConfig) -> None:
    """Save everything but the weights: the tokenizer, with a pad token, and the files of sentence-transformers."""
    tokenizer = embedder.tokenizer
    if tokenizer.pad_token is None:  # what pads is masked: any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(folder)
    write_sentence_transformers_files(folder, config.embed, width=embedder.width, max_tokens=config.data.max_tokens)


def load(
    run: Path, config: RunConfig, *, waiting: bool = False, backbone: backbones.Backbone | None = None
) -> Embedder:
    """The embedder that the run at `run` shipped, in evaluation mode. `waiting`: on the host, as `backbones.load` says.
    `backbone`: takes the adapter, instead of one that is loaded; as it came."""
    folder = run / "adapter"
    exported.require_saved(run, config, "tokenizer.json", MODULES_FILE)
    tokenizer = exported.load_tokenizer(run, config)
    under = (backbone or exported.load_backbone(config, folder, tokenizer, task=HIDDEN, waiting=waiting)).model
    model = under if isinstance(config.adapter, Full) else adapters.load(under, folder)
    return make(model, under, tokenizer, config)


@dataclass(frozen=True)
class PairTerms:
    """The loss of rows of a batch, in terms that need few similarities each."""

    rows: PairSet
    batch: Indices
    config: EmbedConfig
    sizes: tuple[int, ...]

    @property
    def texts(self) -> BatchTexts:
        """Texts of the batch."""
        return self.rows.texts(self.batch)

    def __iter__(self) -> Iterator[Term]:
        loss, texts = self.config.loss_of(self.rows.form), self.texts
        own: Callable[[BatchTexts, int], Iterator[Term]] = {
            "contrastive": self._contrastive,
            "triplet": self._triplets,
            "cosent": self._scored,
            "cosine": self._scored,
        }[loss]
        for size in self.sizes:
            yield from own(texts, size)

    @property
    def scale(self) -> float:
        """One over rows and sizes."""
        return 1 / (len(self.batch) * len(self.sizes))

    def _contrastive(self, texts: BatchTexts, size: int) -> Iterator[Term]:
        places = partial(np.searchsorted, texts.every)
        sides = [(texts.anchor_B, texts.passages)]
        sides += [(texts.positive_B, texts.anchor_B)] if self.config.symmetric else []
        for queries, passages in sides:
            rows = max(1, COMPARED // len(passages))
            for first in range(0, len(queries), rows):
                some = np.arange(first, min(first + rows, len(queries)))
                # Positives come first, in the order of their anchors.
                yield partial(
                    self._found,
                    size=size,
                    query_C=torch.from_numpy(places(queries[some])),
                    passage_N=torch.from_numpy(places(passages)),
                    own_C=torch.from_numpy(some),
                    excluded_CN=torch.from_numpy(self.rows.known(queries[some], passages)),
                    scale=self.scale / len(sides),
                )

    def _found(
        self,
        outputs_UD: Tensor,
        *,
        size: int,
        query_C: Tensor,
        passage_N: Tensor,
        own_C: Tensor,
        excluded_CN: Tensor,
        scale: float,
    ) -> Tensor:
        embedded_UD = ranking_losses.leading(outputs_UD, size, normalise=self.config.normalise)
        device = outputs_UD.device
        loss = ranking_losses.contrastive(
            embedded_UD[query_C.to(device)],
            embedded_UD[passage_N.to(device)],
            own_C.to(device),
            excluded_CN.to(device),
            temperature=self.config.temperature,
        )
        return loss * scale

    def _triplets(self, texts: BatchTexts, size: int) -> Iterator[Term]:
        numbers = [texts.anchor_B[texts.owner_M], texts.positive_B[texts.owner_M], texts.negative_M]
        weight_M = torch.from_numpy(1 / np.bincount(texts.owner_M)[texts.owner_M]).float()

        def term(outputs_UD: Tensor) -> Tensor:
            embedded_UD = ranking_losses.leading(outputs_UD, size, normalise=self.config.normalise)
            one_MD, own_MD, other_MD = (
                embedded_UD[torch.from_numpy(np.searchsorted(texts.every, each))] for each in numbers
            )
            weights_M = weight_M.to(outputs_UD.device)
            return ranking_losses.triplet(one_MD, own_MD, other_MD, weights_M, margin=self.config.margin) * self.scale

        yield term

    def _scored(self, texts: BatchTexts, size: int) -> Iterator[Term]:
        score_B = torch.from_numpy(self.rows.score_N[self.batch]).float()

        def term(outputs_UD: Tensor) -> Tensor:
            embedded_UD = ranking_losses.leading(outputs_UD, size, normalise=self.config.normalise)
            one_BD, other_BD = (
                embedded_UD[torch.from_numpy(np.searchsorted(texts.every, each))]
                for each in (texts.anchor_B, texts.positive_B)
            )
            similarity_B, wanted_B = (one_BD * other_BD).sum(1), score_B.to(outputs_UD.device)
            if self.config.loss == "cosine":
                return ranking_losses.squared_difference(similarity_B, wanted_B) * self.scale
            return ranking_losses.cosent(similarity_B, wanted_B, temperature=self.config.temperature) * self.scale

        yield term


@dataclass(frozen=True)
class EmbeddingLoss:
    """The loss of an embedder's rows; see `workbench.training.signal.GlobalLoss`."""

    embedder: Embedder

    def of(self, seen: Examples, rows: Indices) -> tuple[TextUnits, Indices, Callable[[], Iterator[Term]]]:
        """Texts of the rows, and the terms of their loss."""
        pairs = seen.rows if isinstance(seen, MixedRows) else seen
        assert isinstance(pairs, PairSet)
        terms = PairTerms(pairs, rows, self.embedder.config, self.embedder.sizes)
        return pairs.units, terms.texts.every, terms.__iter__

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Embeddings of any length."""
        return self.embedder.pooled(batch)


def mean_loss(form: EmbeddingForm, rows: PairSet, embedded_UD: Tensor, *, size: int) -> float:
    """Mean loss of rows in batches of `size`, from embeddings of all their texts, before they are normalised."""
    total = 0.0
    for first in range(0, len(rows), size):
        some = np.arange(first, min(first + size, len(rows)))
        terms = PairTerms(rows, some, form.config, form.sizes)
        own_UD = embedded_UD[torch.from_numpy(terms.texts.every)]
        total += len(some) * sum(float(term(own_UD)) for term in terms)
    return total / len(rows)
