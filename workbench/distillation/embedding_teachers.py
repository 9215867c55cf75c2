"""Teachers of embedders: runs of recipe embed or folders of sentence-transformers, and their vectors of texts.

Each text is embedded once, and kept in the cache folder for every run: a changed text, or another teacher, is asked
anew. Legend: U texts, E numbers of a teacher's vector, D of a student's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workbench.adapters import anatomy
from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN
from workbench.config.sections.distill_config import TEACHER
from workbench.data.embedding.pair_set import PairSet
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError
from workbench.evaluation.run_embedder import RunEmbedder, StockEmbedder
from workbench.models import backbones, embedder, exported
from workbench.training import preflight

Floats = npt.NDArray[np.float32]


def find(source: TeacherSource, config: RunConfig) -> list[RunEmbedder]:
    """Those who teach together, none of them loaded. Raises ConfigError: one embeds no texts, or otherwise than what
    the student starts with. `config`: the distillation's."""
    teachers = [teacher for each in source.each for teacher in _of_one(each, config)]
    pooling = teachers[0].config.embed.pooling
    if config.model.id == TEACHER and pooling != config.embed.pooling:
        raise ConfigError(
            f"distill.teacher.id={source.name} pools the tokens of a text by `{pooling}`, and the student, which "
            f"starts as it is, by `{config.embed.pooling}`. Write embed.pooling={pooling}."
        )
    return teachers


def _of_one(source: TeacherSource, config: RunConfig) -> list[RunEmbedder]:
    """Adapters over one backbone, or a model."""
    name, teachers = f"distill.teacher.id={source.name}", list[RunEmbedder]()
    for run in [folder.parent for folder in source.adapters] or ([] if source.run is None else [source.run]):
        own = source.config_of(run)
        if own.task.head != "hidden" or own.over is not None:
            raise ConfigError(
                f"{name}: a run of recipe {own.recipe} embeds no texts. Write one of recipe embed, or a folder or hub "
                "id of sentence-transformers."
            )
        exported.require_saved(run, own, "tokenizer.json", embedder.MODULES_FILE)
        teachers.append(RunEmbedder(run, own))
    if not teachers:
        hub, folder = source.hub_config(), backbones.folder_of(source.model, more="*.json")
        try:
            section, longest = embedder.read_sentence_transformers_files(folder)
        except ConfigError as error:
            raise ConfigError(
                f"{name}: {error}. Write a run of recipe embed, or a folder or hub id of sentence-transformers."
            ) from None
        longest = longest or preflight.longest_sequence(hub) or config.data.max_tokens
        data = config.data.model_copy(update={"max_tokens": longest})
        own = config.model_copy(update={"model": source.model, "embed": section, "data": data})
        teachers.append(StockEmbedder(folder, own))
    return teachers


def width(teachers: Sequence[RunEmbedder]) -> int:
    """Numbers of a vector of all teachers together."""
    return sum(anatomy.hidden_size(backbones.skeleton(each.config.model, task=HIDDEN).config) for each in teachers)


def vectors(teachers: Sequence[RunEmbedder], rows: PairSet, config: RunConfig) -> Floats:
    """Vectors (U, E) of all texts of rows; of several teachers side by side, so that similarities are their means.
    `config`: the student's, whose instructions stand before the texts."""
    each_UE = [each.vectors(rows, config.embed) for each in teachers]
    together: Floats = np.concatenate(each_UE, axis=1) / np.float32(len(teachers) ** 0.5)
    return together


def principal_directions(vectors_UE: Floats, size: int) -> tuple[Floats, float]:
    """The `size` orthogonal directions (E, size) on which dot products of the vectors are kept best, and the share of
    their squared length that is kept: uncentred principal components, so that a cosine stays one."""
    wide_UE = vectors_UE.astype(np.float64)
    value_E, direction_EE = np.linalg.eigh(wide_UE.T @ wide_UE)  # ascending
    kept_E = np.maximum(value_E, 0)
    return direction_EE[:, ::-1][:, :size].astype(np.float32), float(kept_E[::-1][:size].sum() / kept_E.sum())
