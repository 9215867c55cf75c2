"""Embeddings of labelled texts by what a run of recipe embed shipped, in the place of a frozen backbone's features.

Each text's is computed once, and kept in the cache folder for every run. Legend: N texts, D numbers of an embedding.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from workbench.adapters import Full
from workbench.config import RunConfig
from workbench.data.embedding import pair_set
from workbench.data.labelled.records import RecordSource, RowReader
from workbench.data.text.tokenized import cache_folder
from workbench.errors import ConfigError
from workbench.evaluation import embeddings, frozen_features
from workbench.evaluation.features import Floats
from workbench.losses.embedding_losses import leading
from workbench.models import backbones, embedder, exported, model_files, sentence_transformers_files
from workbench.models.embedder import Embedder
from workbench.runs import provenance, run_directory
from workbench.runs.trust import Trust
from workbench.training.freezing.hidden_state_store import DiskStore

FORMAT = "1"
"""Raise it when embeddings of the same texts change."""
AT_ONCE = 4096
"""Texts that are computed before they are kept; what a killed process leaves out is at most so many."""
SECTIONS = ("duplicates", "correction", "rerank")
"""Sections of a configuration with a key `embedder`."""


@dataclass(frozen=True)
class RunEmbedder:
    """The embedder of a finished run."""

    run: Path
    config: RunConfig
    """The configuration of that run: its backbone, pooling and instructions."""

    @property
    def files(self) -> dict[str, str]:
        """Digests of all files that embeddings depend on."""
        adapter = provenance.digests(self.run / "adapter", title=f"{self.run}/adapter")
        return adapter if isinstance(self.config.adapter, Full) else adapter | model_files.digests(self.config.model)

    @property
    def digest(self) -> str:
        """A name for all that the embedding of a text depends on, wherever the run's folder is."""
        config = self.config
        facts = [sorted(self.files.values()), config.embed.model_dump(), config.data.max_tokens]
        precision = [config.model.values, config.model.compute]
        return hashlib.sha256(json.dumps([*facts, *precision], default=str).encode()).hexdigest()[:32]

    @property
    def sentence(self) -> str:
        """The embedder for a person."""
        section = self.config.embed
        before = f", each behind {section.query_prefix!r}" if section.query_prefix else ""
        return f"embeddings of {self.run} ({self.config.model.id}, pooling {section.pooling}{before})"

    def embed(self, texts: Sequence[str], *, passages: bool = False) -> Floats:
        """Embeddings (N, D) of texts, each behind an instruction.

        Args:
            passages: That of passages; else that of queries, as rows have that are compared and of one kind.

        Raises:
            FileError: The cache folder cannot be written.
        """
        section = self.config.embed
        prefix = section.passage_prefix if passages else section.query_prefix
        prefixed = [prefix + text for text in texts]
        keys = [hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest() for text in prefixed]
        store = self._store()
        if missing := store.missing(keys):
            model = embedder.load(self.run, self.config)
            for start in range(0, len(missing), AT_ONCE):
                some = missing[start : start + AT_ONCE]
                store.put([keys[number] for number in some], self._computed(model, [prefixed[n] for n in some]))
            del model
            gc.collect()  # a model is in cycles
        return np.asarray(store.get(keys, 1)[:, 0].numpy())

    def _computed(self, model: Embedder, texts: Sequence[str]) -> list[torch.Tensor]:
        units = pair_set.units(texts, model.tokenizer, max_tokens=self.config.data.max_tokens)
        found_UD = leading(embeddings.pooled(model, units), model.width, normalise=self.config.embed.normalise)
        return list(found_UD[:, None])

    def _store(self) -> DiskStore:
        facts = [FORMAT, self.digest, backbones.device().type, run_directory.versions()]
        return DiskStore(
            cache_folder() / "embeddings",
            fingerprint=hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32],
            dtype=torch.float32,
            instead="duplicates.embedder=null and correction.embedder=null",
        )


def of(config: RunConfig, section: str) -> RunEmbedder | None:
    """The embedder that a section of a configuration names; None where it names none.

    Args:
        section: One of SECTIONS.

    Raises:
        WorkbenchError: There is no such run, it has not ended, or it embeds no texts.
    """
    named = {
        "duplicates": (config.duplicates.embedder, config.duplicates.trust),
        "correction": (config.correction.embedder, config.correction.trust),
        "rerank": (config.rerank.embedder, config.rerank.trust),
    }
    name, trusted = named[section]
    if name is None:
        return None
    key, path = f"{section}.embedder", Path(name).expanduser()
    if (path / "modules.json").is_file() or (path / "adapter_config.json").is_file():
        raise ConfigError(f"{key}={path} is a model without its run. Write the run directory that it stands in.")
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{key}={path}: not a run directory (no config.yaml). Write one of a run of recipe=embed.")
    own = run_directory.shipped_config(path, Trust(trusted, f"{section}.trust=true"))
    if own.recipe != "embed":
        raise ConfigError(
            f"{key}={path}: its run is of recipe={own.recipe}, which embeds no texts. Name a run of recipe=embed, or "
            f"leave {key} out for features of the frozen backbone."
        )
    exported.require_saved(path, own, "tokenizer.json", sentence_transformers_files.MODULES)
    return RunEmbedder(path, own)


def files(config: RunConfig) -> dict[str, str]:
    """Digests of the files of all embedders that a configuration names."""
    named = (of(config, section) for section in SECTIONS)
    return {name: digest for each in named if each is not None for name, digest in each.files.items()}


def in_words(config: RunConfig) -> list[str]:
    """Sentences on the embedders that a configuration names; raises what `of` does."""
    uses = {
        "duplicates": "Near-duplicates have like",
        "correction": "Neighbours that correct are near by",
        "rerank": "Negatives are mined by",
    }
    named = {section: of(config, section) for section in SECTIONS}
    return [f"{uses[section]} {each.sentence}." for section, each in named.items() if each is not None]


def of_sources(config: RunConfig, reader: RowReader) -> Callable[[Sequence[RecordSource]], Floats]:
    """A function from sources of rows to what `duplicates.features` compares of all their rows, in their order."""
    own = of(config, "duplicates")
    if own is None:
        return frozen_features.of_sources(config.model, reader)
    return lambda sources: own.embed([reader.describe(record) for source in sources for record in source.records])
