"""Features of rows by a backbone as it came: each row's computed once, and kept in the cache folder for every run.

Legend: N rows, D features.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np
import torch

from workbench.config import ModelConfig, model_heads
from workbench.data.images.picture_reader import PictureReader
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.records import RecordSource, RowInputs, RowReader
from workbench.data.text.tokenized import cache_folder
from workbench.evaluation.features import Floats, features
from workbench.models import backbones, classifier, model_files
from workbench.models.classifier import Classifier
from workbench.runs import run_directory
from workbench.training.freezing.hidden_state_store import DiskStore

FORMAT = "1"
"""Raise it when features of the same rows change, or how rows are known."""
AT_ONCE = 4096
"""Rows that are computed before they are kept; what a killed process leaves out is at most so many."""
_NO_LABELS = Labels("one", ("a", "b"))
"""Features are the head's inputs: what the head is for changes nothing."""


def frozen_features(model: ModelConfig, reader: RowReader, sets: Sequence[RowInputs]) -> list[Floats]:
    """Features (N, D) of each set of rows; the backbone is loaded only where some are not known.

    Rows are known by what the model reads, whatever their file or their order. The last bits of features depend on the
    rows that were computed beside them.

    Raises:
        FileError: The cache folder cannot be written.
    """
    store = _store(model, reader)
    keys = [_keys(inputs) for inputs in sets]
    # Each row's place, by its key: what comes twice is computed once.
    missing = [store.missing(each) for each in keys]
    if any(missing):
        computing = _loaded(model, reader)
        for inputs, names, numbers in zip(sets, keys, missing, strict=True):
            for start in range(0, len(numbers), AT_ONCE):
                some = np.asarray(numbers[start : start + AT_ONCE], dtype=np.int64)
                found_ND = torch.from_numpy(features(computing, inputs.take(some)))
                store.put([names[number] for number in some], list(found_ND[:, None]))
        del computing
        gc.collect()  # a model is in cycles
    return [store.get(each, 1)[:, 0].numpy() for each in keys]


def of_sources(model: ModelConfig, reader: RowReader) -> Callable[[Sequence[RecordSource]], Floats]:
    """A function from sources of rows to the features of all their rows together, in their order."""
    return lambda sources: np.concatenate(frozen_features(model, reader, [reader.inputs(each) for each in sources]))


def are_known(model: ModelConfig, reader: RowReader, sets: Sequence[RowInputs]) -> bool:
    """Whether features of all rows are in the cache folder."""
    store = _store(model, reader)
    return not any(store.missing(_keys(inputs)) for inputs in sets)


def _store(model: ModelConfig, reader: RowReader) -> DiskStore:
    return DiskStore(
        cache_folder() / "features",
        fingerprint=_fingerprint(model, reader),
        dtype=torch.float32,
        instead="evaluate.probe=0 and duplicates.features=null",
    )


def _loaded(model: ModelConfig, reader: RowReader) -> Classifier:
    """The backbone as it came, under a head that nothing is read of."""
    task = model_heads.classes(_NO_LABELS.names, seed=0, problem=_NO_LABELS.problem)
    backbone = backbones.load(model, reader.tokenizer, task=task).model
    return classifier.classification_model(backbone, backbone, reader, _NO_LABELS)


def _keys(inputs: RowInputs) -> list[bytes]:
    """A name for each row, made of what the model reads."""
    return [
        hashlib.blake2b(f"{row.dtype}{row.shape}".encode() + row.tobytes(), digest_size=16).digest()
        for row in inputs.arrays()
    ]


def _fingerprint(model: ModelConfig, reader: RowReader) -> str:
    """A name for all that features depend on besides the row."""
    pictures = reader.format.facts if isinstance(reader, PictureReader) else None
    versions = run_directory.versions()
    facts = [FORMAT, model_files.digests(model), model.model_dump(), pictures, backbones.device().type, versions]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
