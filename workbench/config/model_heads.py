"""Tasks that a backbone is loaded for: its head, and transformers' class that has this head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import (
    MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForAudioClassification,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from workbench.config import RunConfig
from workbench.errors import BackboneError

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True)
class ModelHead:
    """The output of a backbone's head: text (causal or sequence to sequence), the transcript of speech, masked tokens,
    classes of a row or of each token; or no head."""

    head: Literal["text", "speech", "masked", "classes", "tokens", "hidden"]
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    seed: int = 0
    """Decides the initial values of a fresh classification head."""
    problem: Problem | None = None
    """Kind of labels by transformers' name, such as multi_label_classification."""

    @property
    def writes_text(self) -> bool:
        """Whether a model with this head writes answers or transcripts."""
        return self.head in ("text", "speech")

    def configured(self, hub: PretrainedConfig) -> PretrainedConfig:
        """`hub` with the classes of this task."""
        if self.labels:
            hub.num_labels = len(self.labels)  # which PVT keeps beside the names
            hub.id2label = dict(enumerate(self.labels))
            hub.label2id = {label: number for number, label in enumerate(self.labels)}
            hub.problem_type = self.problem
        return hub

    def auto_class(self, hub: PretrainedConfig) -> Any:
        """The class of transformers that loads a backbone with this head: of several the one of which the checkpoint
        is, so that one with towers for pictures is loaded whole, and its tensors keep their names.

        Raises:
            BackboneError: the architecture has none.
        """
        key = "pairs" if self.head == "text" and hub.is_encoder_decoder else self.head
        wanted, classes = _CLASSES[key]
        fitting = [
            (mapping, auto)
            for mapping, auto in classes
            if type(hub) in mapping or auto.__name__ in getattr(hub, "auto_map", {})
        ]
        for mapping, auto in fitting if len(fitting) > 1 else ():
            if type(hub) in mapping and mapping[type(hub)].__name__ in (hub.architectures or ()):
                return auto
        for _, auto in fitting:
            return auto
        names = " or ".join(auto.__name__ for _, auto in classes)
        raise BackboneError(f"{type(hub).__name__} has no {wanted}. Take one that {names} loads.")


_CLASSES: dict[str, tuple[str, tuple[tuple[Any, Any], ...]]] = {
    "text": (
        "causal language model",
        (
            (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
            (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
            (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM),  # which hear within a conversation
        ),
    ),
    "pairs": (
        "sequence-to-sequence language model",
        ((MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM),),
    ),
    "speech": (
        "model that writes what it hears",
        ((MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, AutoModelForSpeechSeq2Seq),),
    ),
    "masked": ("masked language model", ((MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM),)),
    "classes": (
        "classification head",
        (
            (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification),
            (MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoModelForImageClassification),
            (MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING, AutoModelForAudioClassification),
        ),
    ),
    "tokens": (
        "token classification head",
        ((MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification),),
    ),
    "hidden": ("model without a head", ((MODEL_MAPPING, AutoModel),)),
}


TEXT, SPEECH, MASKED, HIDDEN = (ModelHead(each) for each in ("text", "speech", "masked", "hidden"))


def classes(labels: Sequence[str], *, seed: int, problem: Problem | None = None) -> ModelHead:
    """To tell `labels` apart, with a head that starts at random."""
    return ModelHead("classes", tuple(labels), seed, problem)


def of(config: RunConfig) -> ModelHead:
    """The head of the task of `config`; a task of labels learns the names of its classes from its data instead."""
    if config.task.output is not None:
        return classes((config.task.output,), seed=config.seed, problem="regression")
    assert config.task.head not in ("classes", "tokens"), "the rows say which classes there are"
    if config.reads_sound:
        return SPEECH
    return {"text": TEXT, "masked": MASKED, "hidden": HIDDEN}[config.task.head]
