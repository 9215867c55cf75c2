"""A model with a classification head, what its outputs mean, and where it is saved.

Legend: B rows, L padded length, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from workbench import adapters
from workbench.adapters import Full, Method, anatomy
from workbench.config import RunConfig, model_heads
from workbench.config.model_heads import ModelHead
from workbench.data.batching import MicroBatch, encoder_inputs
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.records import RowReader
from workbench.errors import BackboneError, FileError
from workbench.losses import r_drop
from workbench.losses.criterion import Objective
from workbench.losses.label_losses import LabelTap
from workbench.models import backbones, exported, first_token, pictures, row_readers
from workbench.runs import files


@dataclass(frozen=True)
class Classifier:
    """A model that gives each row its outputs, whatever the padding."""

    model: nn.Module
    backbone: PreTrainedModel
    """The same, without the adapter around it."""
    reader: RowReader
    labels: Labels
    token_head: str | None
    """The module that gives outputs to each token, of which a row's last real one counts; None for an encoder's."""

    def reads_packed(self, method: Method) -> bool:
        """Whether it finds the outputs of packed rows, which an adapter of this method makes those of padded ones.

        An encoder's head looks at the first token of a sequence, and finds those of packed rows as rows of one token,
        for which a method that draws would draw other numbers.
        """
        if self.token_head is not None:
            return True
        return first_token.reads_packed(self.backbone) and not method.facts.draws

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Logits, or standardised numbers (B, C).

        Transformers finds a row's last token by comparing with a pad token, which a row may hold and a tokenizer may
        lack: here the row's length says it.
        """
        if self.token_head is None:
            outputs_BC: Tensor = self.model(**batch.inputs).logits
            return outputs_BC
        caught: list[Tensor] = []
        handle = self.backbone.get_submodule(self.token_head).register_forward_hook(
            lambda _, __, output: caught.append(output)
        )
        try:
            self.model(**batch.inputs, use_cache=False)
        finally:
            handle.remove()
        return caught[0].flatten(0, 1)[batch.positions_N]

    def row_loss(
        self, objective: Objective, tap: LabelTap | None = None, *, strength: float = 0.0
    ) -> Callable[[MicroBatch, float], Tensor]:
        """The summed loss of a micro-batch, as the engine wants it.

        Args:
            tap: Sees outputs and labels, of the first pass where there are two; it changes nothing.
            strength: Of R-Drop; other than 0 it computes each row twice.
        """
        whole = r_drop.twice(objective, strength, self.labels.kind) if strength else objective

        def loss(batch: MicroBatch, scale: float) -> Tensor:
            outputs_BC = self.outputs(batch.twice() if strength else batch)
            if tap is not None:
                tap.see(outputs_BC[: len(batch.labels_N)], batch.labels_N)
            return whole(outputs_BC, batch.labels_N, scale)

        return loss


def classification_model(model: nn.Module, backbone: PreTrainedModel, reader: RowReader, labels: Labels) -> Classifier:
    """How `model` comes to a row's outputs; for text checked: they must be its own, and no padding may change them.

    Raises:
        BackboneError: they are not, or a longer row in the batch changes them.
    """
    if reader.tokenizer is None:
        return Classifier(model, backbone, reader, labels, None)
    _settle_padding(backbone, reader.tokenizer)
    pad = backbone.config.get_text_config().pad_token_id
    ids = [number for number in range(2, 12) if number != pad]
    short, long = _batch([ids[:3]]), _batch([ids[:3], ids[:6]])
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            own, head = _own_outputs(model, backbone, short)
            classifier = Classifier(model, backbone, reader, labels, head)
            alone, among = (
                classifier.outputs(short.to(backbone.device)),
                classifier.outputs(long.to(backbone.device))[:1],
            )
            if head is None:
                first_token.narrow(model, backbone, long.to(backbone.device).inputs)
    finally:
        model.train(training)
    for other, what in ((own, "is not that of the last token"), (among, "depends on the rows beside it")):
        if not torch.allclose(alone, other, rtol=5e-2, atol=5e-2 * float(alone.abs().max())):
            name = type(backbone).__name__
            if any(each.dtype == torch.int8 for each in backbone.parameters()):
                raise BackboneError(
                    "model.weights=int8: bitsandbytes multiplies inputs with outliers apart, which depend on all rows "
                    f"of a pass: what {name} says of a row {what}. Write model.weights=nf4, or bfloat16."
                )
            raise BackboneError(
                f"{name}: what its classification head says of a row {what}, so padding would "
                "change its classes. Take another backbone."
            )
    return classifier


def task(labels: Labels, *, seed: int) -> ModelHead:
    """To give rows these labels."""
    return model_heads.classes(labels.names, seed=seed, problem=labels.problem)


def require_known_form(config: RunConfig) -> None:
    """Refuse, before a row is read, rows of a form or pictures of a size that the backbone does not read.

    Raises:
        BackboneError: It reads texts and not pictures, or the other way round.
        ConfigError: It does not read pictures of `image.size`, or of the sizes of a curriculum.
    """
    hub, name = backbones.hub_config(config.model), f"model.id={config.model.id}"
    reads_pictures = type(hub) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    reads_text = type(hub) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if reads_pictures and not reads_text and not config.reads_pictures:
        raise BackboneError(
            f"{name}: {type(hub).__name__} reads pictures. Write data.format=image, or take another one."
        )
    if reads_text and not reads_pictures and config.reads_pictures:
        raise BackboneError(
            f"{name}: {type(hub).__name__} reads text, and data.format=image gives it pictures. Take a backbone such "
            "as starter/vision or facebook/dinov2-small, or leave data.format out."
        )
    backbones.of_one_sequence(config.model, recipe=config.recipe, take="an encoder or a causal backbone")
    size, shrinks = config.image.size, config.image.augment.curriculum.resolution.start < 1
    if size is not None or shrinks:
        pictures.require_size(backbones.skeleton(config.model, task=ModelHead("classes")), size, smaller=shrinks)


def save(classifier: Classifier, folder: Path, *, adapter: Callable[[Path], None] | None = None) -> None:
    """Write adapter, reader and the meaning of the outputs into `folder`, atomically.

    Args:
        adapter: Writes the adapter, where the model holds several and only one is meant.
    """
    with files.new_folder(folder) as aside:
        if adapter is None:
            adapters.save(classifier.model, aside)
        else:
            adapter(aside)
        save_reader(classifier, aside)
        files.write_json(aside / "classes.json", classifier.labels.facts)


def save_reader(classifier: Classifier, folder: Path) -> None:
    """The reader; a tokenizer with the pad token that config.json names, so that a stock model finds the last token."""
    tokenizer = classifier.reader.tokenizer
    if tokenizer is not None and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(classifier.backbone.config.get_text_config().pad_token_id)
    classifier.reader.save(folder)


def load(run: Path, config: RunConfig, *, waiting: bool = False) -> Classifier:
    """The classifier that the run at `run` shipped, in evaluation mode.

    Args:
        waiting: On the host, as `backbones.load` says.
    """
    folder = run / "adapter"
    exported.require_saved(run, config, "classes.json", row_readers.file(config))
    labels, reader = read_labels(folder), row_readers.of_run(run, config)
    meant = task(labels, seed=config.seed)
    backbone = exported.load_backbone(config, folder, reader.tokenizer, task=meant, waiting=waiting).model
    model = backbone if isinstance(config.adapter, Full) else adapters.load(backbone, folder)
    return classification_model(model, backbone, reader, labels)


def read_labels(folder: Path) -> Labels:
    """Labels of the classifier in `folder`."""
    fields = files.read_json(folder / "classes.json")
    try:
        return Labels(**{**fields, "names": tuple(fields["names"])})
    except (KeyError, TypeError) as error:
        raise FileError(f"{folder}/classes.json: damaged ({error}). Restore it, or train again.") from None


def _own_outputs(model: nn.Module, backbone: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, str | None]:
    """The model's own outputs for one row, and the name of its head where that gives outputs to each token."""
    caught: dict[str, tuple[int, ...]] = {}

    def catch(name: str) -> Any:
        def hook(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor):
                caught[name] = tuple(output.shape)

        return hook

    handles = [
        backbone.get_submodule(name).register_forward_hook(catch(name)) for name in anatomy.fresh_heads(backbone)
    ]
    try:
        own: Tensor = model(**batch.to(backbone.device).inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    outputs = own.shape[-1]
    heads = [name for name, shape in caught.items() if len(shape) == 3 and shape[-1] == outputs]
    return own, heads[-1] if heads else None


def _batch(rows: list[list[int]]) -> MicroBatch:
    inputs = encoder_inputs([np.asarray(row, dtype=np.int64) for row in rows])
    length = inputs["input_ids"].shape[1]
    last = torch.tensor([number * length + len(row) - 1 for number, row in enumerate(rows)])
    return MicroBatch(inputs, last, torch.zeros(len(rows)), sum(map(len, rows)))


def _settle_padding(backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """The pad token that config.json names is the tokenizer's; any that ends no text, where it has none."""
    config: Any = backbone.config.get_text_config()
    fallback = next((n for n in (config.pad_token_id, tokenizer.eos_token_id) if n is not None), 0)
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else fallback
