"""Embeddings of texts by an embedder that an earlier run trained, in place of a frozen backbone's features.

Each text is embedded once, and kept in the cache folder for every run. Legend: N texts, D numbers of an embedding.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.adapters import Full
from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN
from workbench.config.sections.embed_config import EmbedConfig, RerankConfig
from workbench.data.batching import Indices
from workbench.data.embedding import pair_set
from workbench.data.embedding.pair_set import PairSet
from workbench.data.labelled.records import RecordSource, RowReader
from workbench.errors import ConfigError
from workbench.evaluation import frozen_features, retrieval_scores
from workbench.evaluation.frozen_features import Floats
from workbench.losses.ranking_losses import leading
from workbench.models import backbones, embedder, exported
from workbench.models.embedder import Embedder
from workbench.runs import provenance, run_directory
from workbench.runs.trust import Trust
from workbench.training.freezing.hidden_state_store import DiskStore

FORMAT = "1"  # raise it when embeddings of the same texts change
AT_ONCE = 4096  # texts that are computed between two writes to the cache; a killed process loses at most as many
SECTIONS = ("duplicates", "correction", "rerank")  # sections of a configuration that have a key `embedder`


@dataclass(frozen=True)
class RunEmbedder:
    """The embedder of a finished run."""

    run: Path
    config: RunConfig  # the configuration of that run: its backbone, pooling and instructions

    @property
    def files(self) -> dict[str, str]:
        """Digests of all files that embeddings depend on."""
        adapter = provenance.digests(self.run / "adapter", title=f"{self.run}/adapter")
        return adapter if isinstance(self.config.adapter, Full) else adapter | backbones.file_digests(self.config.model)

    @property
    def digest(self) -> str:
        """Hash of everything that the embedding of a text depends on; the place of the run is not part of it."""
        config = self.config
        facts = [sorted(self.files.values()), config.embed.model_dump(), config.data.max_tokens]
        precision = [config.model.values, config.model.compute]
        return hashlib.sha256(json.dumps([*facts, *precision], default=str).encode()).hexdigest()[:32]

    @property
    def sentence(self) -> str:
        """The embedder in words."""
        section = self.config.embed
        before = f", each behind {section.query_prefix!r}" if section.query_prefix else ""
        return f"embeddings of {self.run} ({self.config.model.id}, pooling {section.pooling}{before})"

    def embed(self, texts: Sequence[str], *, passages: bool = False) -> Floats:
        """Embeddings (N, D) of texts. Raises FileError: the cache folder cannot be written. `passages`: put
        `embed.passage_prefix` before each text, else `embed.query_prefix`."""
        section = self.config.embed
        prefix = section.passage_prefix if passages else section.query_prefix
        prefixed = [prefix + text for text in texts]
        keys = [hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest() for text in prefixed]
        store = self._store()
        if missing := store.missing(keys):
            model = self.load()
            for start in range(0, len(missing), AT_ONCE):
                some = missing[start : start + AT_ONCE]
                units = pair_set.units(
                    [prefixed[n] for n in some], model.tokenizer, max_tokens=self.config.data.max_tokens
                )
                found_UD = leading(retrieval_scores.embed_texts(model, units), model.width, normalise=section.normalise)
                store.put([keys[number] for number in some], list(found_UD[:, None]))
            del model
            gc.collect()  # models hold reference cycles
        return np.asarray(store.get(keys, 1)[:, 0].numpy())

    def load(self) -> Embedder:
        """The model that embeds."""
        return embedder.load(self.run, self.config)

    def vectors(self, rows: PairSet, section: EmbedConfig | RerankConfig) -> Floats:
        """Embeddings (U, D) of all texts of rows: of anchors as queries, of all others as passages.

        Args:
            section: The instructions that stand before the texts of the rows, in place of which this has its own.
        """
        query_U = np.zeros(len(rows.units.texts), dtype=bool)
        query_U[rows.anchor_N] = True
        found: list[tuple[Indices, Floats]] = []
        for own_U, prefix, passages in (
            (query_U, section.query_prefix, False),
            (~query_U, section.passage_prefix, True),
        ):
            numbers = np.flatnonzero(own_U)
            if len(numbers):
                texts = [rows.units.texts[number][len(prefix) :] for number in numbers]
                found.append((numbers, self.embed(texts, passages=passages)))
        vectors_UD = np.empty((len(query_U), found[0][1].shape[1]), dtype=np.float32)
        for numbers, own_ND in found:
            vectors_UD[numbers] = own_ND
        return vectors_UD

    def _store(self) -> DiskStore:
        instead = "a configuration without this embedder"
        return frozen_features.vector_store("embeddings", [FORMAT, self.digest], instead=instead)


@dataclass(frozen=True)
class StockEmbedder(RunEmbedder):
    """A model that no run trained; `config` says how it embeds texts."""

    @property
    def files(self) -> dict[str, str]:
        return backbones.file_digests(self.config.model)

    def load(self) -> Embedder:
        tokenizer = backbones.tokenizer(self.config.model)
        backbone = backbones.load(self.config.model, tokenizer, task=HIDDEN).model.eval()
        return embedder.make(backbone, backbone, tokenizer, self.config)


def of(config: RunConfig, section: str) -> RunEmbedder | None:
    """The embedder that a section of a configuration (one of SECTIONS) names; None where it names none. Raises
    WorkbenchError: there is no such run, it has not ended, or it embeds no texts."""
    named = {
        "duplicates": (config.duplicates.embedder, config.duplicates.trust),
        "correction": (config.correction.embedder, config.correction.trust),
        "rerank": (config.rerank.embedder, config.rerank.trust),
    }
    name, trusted = named[section]
    if name is None:
        return None
    key, path = f"{section}.embedder", Path(name).expanduser()
    if cure := run_directory.instead(path):
        raise ConfigError(f"{key}={path} is no run directory.{cure}")
    if (path / "modules.json").is_file():
        raise ConfigError(f"{key}={path} is a model without its run. Write the run directory that it stands in.")
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{key}={path}: not a run directory (no config.yaml). Name a run of recipe=embed.")
    own = run_directory.shipped_config(path, Trust(trusted, f"{section}.trust=true"))
    if own.task.head != "hidden":
        raise ConfigError(
            f"{key}={path}: its run is of recipe={own.recipe}, which embeds no texts. Name a run of recipe=embed, or "
            f"leave {key} out for features of the frozen backbone."
        )
    exported.require_saved(path, own, "tokenizer.json", embedder.MODULES_FILE)
    return RunEmbedder(path, own)


def files(config: RunConfig) -> dict[str, str]:
    """Digests of the files of all embedders that a configuration names."""
    named = (of(config, section) for section in SECTIONS)
    return {name: digest for each in named if each is not None for name, digest in each.files.items()}


def in_words(config: RunConfig) -> list[str]:
    """Sentences on the embedders that a configuration names; raises what `of` raises."""
    uses = {
        "duplicates": "Near-duplicates have like",
        "correction": "Neighbours that correct are near by",
        "rerank": "Negatives are mined by",
    }
    named = {section: of(config, section) for section in SECTIONS}
    return [f"{uses[section]} {each.sentence}." for section, each in named.items() if each is not None]


def of_sources(config: RunConfig, reader: RowReader) -> Callable[[Sequence[RecordSource]], Floats]:
    """A function that gives the features by which near-duplicates are found, of all rows of some sources in order."""
    own = of(config, "duplicates")
    if own is None:
        return frozen_features.of_sources(config.model, reader)
    return lambda sources: own.embed([reader.describe(record) for source in sources for record in source.records])
