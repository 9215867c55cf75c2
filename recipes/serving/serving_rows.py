"""Runs that write no text, as `workbench serve` answers for them: embedders, classifiers, cross-validations.

Legend: U texts, C outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from workbench.adapters.banks import bank
from workbench.config import RunConfig
from workbench.config.model_heads import WRITING
from workbench.crossval import prediction
from workbench.data.embedding import pair_set
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.records import NamedColumns, RowReader
from workbench.data.rows import RawRow
from workbench.errors import ConfigError, DataError
from workbench.evaluation import classification_scores, retrieval_scores
from workbench.evaluation.serving.served_models import (
    Classified,
    ClassModel,
    Embedded,
    EmbeddingModel,
    ServedModel,
    Turns,
)
from workbench.losses.embedding_losses import leading
from workbench.models import classifier, embedder

Row = str | dict[str, str]


def require_served(config: RunConfig, run: Path) -> None:
    """Raise ConfigError where nothing asks a run over HTTP."""
    if config.recipe not in (*WRITING, "embed", "classify", "crossval"):
        raise ConfigError(
            f"{run}: recipe {config.recipe} is not served. Runs of {', '.join(WRITING)}, embed, classify and crossval "
            "are; `workbench evaluate` and `predict` ask the others."
        )
    if config.reads_pictures:
        raise ConfigError(f"{run}: it reads pictures, and requests hold text. `workbench predict` names their classes.")


def load(run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ServedModel:
    """The model of a run by name; so many requests may wait for it."""
    about = (name, config.model.id, created, Turns(queue))
    if config.recipe == "embed":
        return EmbeddingModel(*about, _embedding(run, config))
    if config.recipe == "classify":
        model = classifier.load(run, config)
        return ClassModel(*about, _classifying(model.reader, model.labels, _outputs(model)), model.labels.names)
    context = replace(prediction.fold_context(run, config), banks={})
    if bank.refusal(config.adapter) is None:
        context.saved(prediction.adapter_folders(run))

    def decided(rows: LabelledSet) -> Floats:
        return prediction.decided(run, context, rows)

    return ClassModel(*about, _classifying(context.reader, context.labels, decided), context.labels.names)


def _embedding(run: Path, config: RunConfig) -> Callable[[Sequence[str], bool, int | None], Embedded]:
    model = embedder.load(run, config)

    def embed(texts: Sequence[str], passages: bool, dimensions: int | None) -> Embedded:
        size = dimensions or model.width
        if size not in model.sizes:
            raise DataError(f"dimensions: {size} was not trained. There are: {', '.join(map(str, model.sizes))}.")
        prefix = config.embed.passage_prefix if passages else config.embed.query_prefix
        numbers = pair_set.numbered(prefix + text for text in texts)
        read = pair_set.units(list(numbers), model.tokenizer, max_tokens=config.data.max_tokens)
        found_UD = leading(retrieval_scores.embed_texts(model, read), size, normalise=config.embed.normalise)
        places = [numbers[prefix + text] for text in texts]
        return Embedded(found_UD[places], int(read.lengths[places].sum()))

    return embed


def _outputs(model: classifier.Classifier) -> Callable[[LabelledSet], Floats]:
    def outputs(rows: LabelledSet) -> Floats:
        return model.labels.values(classification_scores.predict_outputs(model.model, model.outputs, rows))

    return outputs


def _classifying(
    reader: RowReader, labels: Labels, values: Callable[[LabelledSet], Floats]
) -> Callable[[Sequence[Row]], list[Classified]]:
    """Predicts rows of a request.

    Args:
        values: Probabilities of the classes (N, C), or numbers, of rows.
    """

    def classify(rows: Sequence[Row]) -> list[Classified]:
        named = [_named(row, reader.columns, place) for place, row in enumerate(rows, start=1)]
        encoded = labelled_data.encode(reader.reread("the request", "", named), reader, labels)
        values_NC = values(encoded)
        return [Classified(*each) for each in zip(labels.predicted(values_NC), values_NC.tolist(), strict=True)]

    return classify


def _named(row: Row, columns: Sequence[str], place: int) -> NamedColumns:
    if isinstance(row, str) and len(columns) == 1:
        row = {columns[0]: row}
    if isinstance(row, str) or set(row) != set(columns):
        raise DataError(f"input {place}: expected an object with {', '.join(columns)}.")
    return NamedColumns(RawRow(f"input {place}", dict(row)), row)
