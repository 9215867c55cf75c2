"""Readers of labelled rows for a backbone, or for what a run has saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.image_processing_base import ImageProcessingMixin

from workbench.config import ModelConfig, RunConfig
from workbench.data.images import picture_reader
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.picture_reader import PictureReader, PictureRows, SavedFormat
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import RowReader
from workbench.data.labelled.text_reader import TextReader
from workbench.errors import BackboneError
from workbench.models import backbones, exported, origins

CONVOLUTIONS = 16
"""Side of the squares, in pixels, that count as tokens where a backbone names no patches, as convolutions do."""


def of_backbone(config: RunConfig) -> RowReader:
    """Reads rows for the backbone that `config` names.

    Raises:
        BackboneError: It cannot be found, or does not say how it reads pictures.
    """
    if config.reads_pictures:
        hub = backbones.hub_config(config.model)
        return _pictures(config, hub, SavedFormat(picture_format(config.model, hub, size=config.image.size)))
    return TextReader(backbones.tokenizer(config.model), config.data, config.classes, config.duplicates)


def of_run(run: Path, config: RunConfig) -> RowReader:
    """Reads rows as the run at `run` did, from what it saved beside its adapter."""
    if config.reads_pictures:
        return _pictures(config, backbones.hub_config(config.model), picture_reader.saved_format(run / "adapter"))
    return TextReader(exported.load_tokenizer(run, config), config.data, config.classes, config.duplicates)


def augmented_together(rows: LabelledSet, config: RunConfig, reader: RowReader) -> LabelledSet:
    """Training pictures of several sources, augmented in passes that are as long as those over all of them.

    Some augmentation stops in the last passes, and a source by itself would have more of them.
    """
    if not config.data.sources or not isinstance(reader, PictureReader):
        return rows
    assert isinstance(rows.inputs, PictureRows)
    augmenter = reader.augmenter(config.data.mix.rows or len(rows))
    return replace(rows, inputs=replace(rows.inputs, augmenter=augmenter))


def file(config: RunConfig) -> str:
    """File from which `of_run` makes the reader, beside the adapter."""
    return picture_reader.FILE if config.reads_pictures else "tokenizer.json"


def picture_format(config: ModelConfig, hub: PretrainedConfig, *, size: int | None) -> PictureFormat:
    """The pictures that a backbone was trained on, of another `size` where one is given."""
    try:
        return PictureFormat.read(processor(config), hub.to_dict(), size=size)
    except BackboneError as error:
        raise BackboneError(f"model.id={config.id}: {error}") from None


def processor(config: ModelConfig) -> dict[str, Any]:
    """The backbone's preprocessor_config.json; empty where it has none."""
    try:
        processor_config, _ = ImageProcessingMixin.get_image_processor_dict(
            origins.path(config), **origins.arguments(config)
        )
    except OSError:
        return {}
    return dict(processor_config)


def _pictures(config: RunConfig, hub: PretrainedConfig, known: SavedFormat) -> PictureReader:
    vision = getattr(hub, "vision_config", hub)
    patch = getattr(vision, "patch_size", CONVOLUTIONS)

    def epochs(rows: int) -> float:
        if config.train.steps is None:
            return config.train.epochs or 1.0
        return config.train.steps * config.batch.size / rows

    return PictureReader(
        known.format,
        config.data,
        config.classes,
        config.image,
        config.duplicates,
        patch=patch if isinstance(patch, int) else CONVOLUTIONS,
        seed=config.seed,
        epochs=epochs,
        statistics=known.statistics,
        training=partial(_training_records, config),
        ranges=known.ranges,
    )


def _training_records(config: RunConfig, reader: PictureReader) -> Sequence[LabelledRecord]:
    """Rows that train: without held-out ones; of a cross-validation those of all folds, without what the test holds."""
    if not config.crossvalidates:
        return labelled_data.load(config, reader).train.records
    read = labelled_data.read_training(config.data, reader)
    test = {key for path in config.data.test_files.values() for key in reader.read(path).keys}
    return [record for each in read.values() for record in each.records if record.key not in test]
