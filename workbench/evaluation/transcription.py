"""Transcripts of recordings of any length: long ones are read in windows that overlap.

A window has the length that the backbone reads, of which each neighbour reads a sixth as well; transcripts of
neighbours are joined where they agree most, as the pipeline of transformers does. With times, Whisper's own way: the
next window begins where the last segment of the one before ends.

Legend: T samples of a wave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import PeftModel
from transformers import StoppingCriteriaList
from transformers.models.whisper.tokenization_whisper import _find_longest_common_sequence as joined

from workbench.data.batching import Indices
from workbench.data.sound.sound_files import SoundFile, Wave
from workbench.data.sound.sound_format import MASK
from workbench.evaluation import generation
from workbench.evaluation.forward_passes import ModelResults, over_rows
from workbench.models.exported import ExportedModel
from workbench.models.sound_processor import FeatureProcessor

_UNSPACED = ("chinese", "japanese", "thai", "lao", "myanmar", "cantonese")
"""Languages written without spaces between words; transformers' tokenizer of Whisper has the same list."""


class TranscriptSegment(NamedTuple):
    """What is said between two times, in seconds."""

    start: float
    end: float
    text: str
    tokens: list[int]


class Transcription(NamedTuple):
    """What is said in a recording."""

    text: str
    segments: list[TranscriptSegment] | None = None
    """Its parts with their times, where these were asked for."""


def windows(samples: int, *, size: int) -> list[slice]:
    """The windows of a recording of so many samples, in their order; one where it has `size` samples at most."""
    overlap = round(size / 6)
    # None begins where the one before has heard all that is left.
    starts = range(0, max(1, samples - 2 * overlap), size - 2 * overlap)
    return [slice(start, start + size) for start in starts]


def transcribe(
    model: ExportedModel,
    processor: FeatureProcessor,
    recordings: Sequence[tuple[SoundFile, int]],
    *,
    max_new_tokens: int,
    scoring: ModelResults | None = None,
    timed: bool = False,
    halt: Callable[[], bool] = lambda: False,
) -> list[Transcription]:
    """Greedy transcripts of recordings, in order.

    Args:
        processor: Of the model, or for another language.
        recordings: Each with its samples at the backbone's rate, as `processor.wave` reads it.
        max_new_tokens: Of a window.
        scoring: As of `over_rows`.
        timed: Whether their segments are wanted, of a backbone that has tokens of times; a run that has learnt times
            writes them always.
        halt: Called at each token; what it raises ends it all.
    """
    if timed or processor.timed:
        return _timed(model, processor, recordings, max_new_tokens=max_new_tokens, scoring=scoring, halt=halt)
    # Of a long recording many windows follow each other: it is decoded once for them.
    wave = lru_cache(maxsize=1)(lambda number: processor.wave(recordings[number][0]))
    parts = [
        (number, part)
        for number, (_, samples) in enumerate(recordings)
        for part in windows(samples, size=processor.format.samples)
    ]
    device = next(model.model.parameters()).device
    settings = generation.generation_config(model.stop, max_new_tokens=max_new_tokens)
    begin = len(processor.prompt)
    settings.max_length, settings.max_new_tokens = min(processor.most, begin + max_new_tokens), None
    gap = "" if processor.language in _UNSPACED else " "

    def stopping() -> bool:
        return halt() or (scoring is not None and scoring.store.stopping)

    def words(ids: Indices) -> list[int]:
        """Ids of a window's text as they are within a longer one."""
        text = str(model.tokenizer.decode(ids, skip_special_tokens=True)).strip()
        return list(model.tokenizer(gap + text if text else "", add_special_tokens=False)["input_ids"])

    def compute(rows: Indices) -> list[list[int]] | None:
        waves: list[Wave] = [wave(number)[part] for number, part in (parts[row] for row in rows)]
        inputs = {MASK: torch.ones(len(rows), processor.positions, dtype=torch.long)} | processor.of_waves(waves)
        inputs["decoder_input_ids"] = torch.tensor([processor.prompt] * len(rows))
        on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
        output = generation.generate(model.model, on_device, settings, halt=stopping)
        if stopping():
            return None  # the transcripts may be unfinished
        return [words(generation.answer_of(ids, model.stop)) for ids in output[:, begin:].cpu().numpy()]

    lengths = np.full(len(parts), processor.positions + max_new_tokens, dtype=np.int64)
    content = (np.frombuffer(recordings[number][0].digest(), np.uint8) for number, _ in parts)
    written = over_rows(model.model, lengths, compute, scoring=scoring, content=content)
    by_recording: list[list[list[int]]] = [[] for _ in recordings]
    for (number, _), ids in zip(parts, written, strict=True):
        by_recording[number].append(ids)
    return [Transcription(str(model.tokenizer.decode(joined(each))).strip()) for each in by_recording]


def _timed(
    model: ExportedModel,
    processor: FeatureProcessor,
    recordings: Sequence[tuple[SoundFile, int]],
    *,
    max_new_tokens: int,
    scoring: ModelResults | None,
    halt: Callable[[], bool],
) -> list[Transcription]:
    """The segments that stock Whisper's own `generate` finds in each recording, one recording after another."""
    backbone: Any = model.model.get_base_model() if isinstance(model.model, PeftModel) else model.model
    settings = copy.deepcopy(backbone.generation_config)
    settings.max_length, settings.max_new_tokens = None, min(max_new_tokens, processor.most - len(processor.prompt))
    told = {} if processor.language is None else {"language": processor.language, "task": processor.audio.task}
    first: int = settings.no_timestamps_token_id + 1  # of the tokens of times

    def stopping(*_: Any, **__: Any) -> bool:
        return halt() or (scoring is not None and scoring.store.stopping)

    def segment(found: dict[str, Any]) -> TranscriptSegment:
        words = [each for each in found["tokens"].tolist() if each < first]
        text = str(model.tokenizer.decode(words, skip_special_tokens=True))
        return TranscriptSegment(
            round(float(found["start"]), 2), round(float(found["end"]), 2), text, found["tokens"].tolist()
        )

    def compute(rows: Indices) -> list[list[TranscriptSegment]] | None:
        results = []
        for row in rows.tolist():
            features_1MF = processor.whole(processor.wave(recordings[row][0])).to(backbone.device)
            output = backbone.generate(
                features_1MF,
                settings,
                return_timestamps=True,
                return_segments=True,
                stopping_criteria=StoppingCriteriaList([stopping]),
                **told,
            )
            if stopping():
                return None  # the segments may be unfinished
            found = map(segment, output["segments"][0])
            results.append([each for each in found if each.text.strip()])
        return results

    lengths = np.asarray([samples for _, samples in recordings], dtype=np.int64)
    content = (np.frombuffer(file.digest(), np.uint8) for file, _ in recordings)
    written = over_rows(model.model, lengths, compute, scoring=scoring, content=content)
    by_recording = [[TranscriptSegment(*each) for each in segments] for segments in written]
    return [Transcription("".join(each.text for each in own).strip(), own) for own in by_recording]
