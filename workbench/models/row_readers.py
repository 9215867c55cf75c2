"""Readers of labelled rows for a backbone, or for what a run has saved."""

from __future__ import annotations

from pathlib import Path

from workbench.config import RunConfig
from workbench.data.labelled.row_reader import RowReader
from workbench.data.labelled.text_reader import TextReader
from workbench.models import backbones, exported


def of_backbone(config: RunConfig) -> RowReader:
    """Reads rows for the backbone that `config` names; raises BackboneError where it cannot be found."""
    return TextReader(backbones.tokenizer(config.model), config.data, config.classes, config.duplicates)


def of_run(run: Path, config: RunConfig) -> RowReader:
    """Reads rows as the run at `run` did, from what it saved beside its adapter."""
    return TextReader(exported.load_tokenizer(run, config), config.data, config.classes, config.duplicates)


def file(config: RunConfig) -> str:
    """File from which `of_run` makes the reader, beside the adapter."""
    return "tokenizer.json"
