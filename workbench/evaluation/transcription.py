"""Transcripts of recordings of any length: long ones are read in windows that overlap.

A window has the length that the backbone reads, of which each neighbour reads a sixth as well; transcripts of
neighbours are joined where they agree most, as the pipeline of transformers does.

Legend: T samples of a wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
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
) -> list[str]:
    """Greedy transcripts of recordings, in order.

    Args:
        processor: Of the model, or for another language.
        recordings: Each with its samples at the backbone's rate, as `processor.wave` reads it.
        max_new_tokens: Of a window.
        scoring: As of `over_rows`.
    """
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
        return scoring is not None and scoring.store.stopping

    def words(ids: Indices) -> list[int]:
        """Ids of a window's text as they are within a longer one."""
        text = str(model.tokenizer.decode(ids, skip_special_tokens=True)).strip()
        return list(model.tokenizer(gap + text if text else "", add_special_tokens=False)["input_ids"])

    def compute(rows: Indices) -> list[list[int]] | None:
        waves: list[Wave] = [wave(number)[part] for number, part in (parts[row] for row in rows)]
        inputs = {MASK: torch.ones(len(rows), processor.positions, dtype=torch.long)} | processor.of_waves(waves)
        inputs["decoder_input_ids"] = torch.tensor([processor.prompt] * len(rows))
        on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
        output = generation.generate(model.model, on_device, settings, halt=None if scoring is None else stopping)
        if stopping():
            return None  # the transcripts may be unfinished
        return [words(generation.answer_of(ids, model.stop)) for ids in output[:, begin:].cpu().numpy()]

    lengths = np.full(len(parts), processor.positions + max_new_tokens, dtype=np.int64)
    content = (np.frombuffer(recordings[number][0].digest(), np.uint8) for number, _ in parts)
    written = over_rows(model.model, lengths, compute, scoring=scoring, content=content)
    by_recording: list[list[list[int]]] = [[] for _ in recordings]
    for (number, _), ids in zip(parts, written, strict=True):
        by_recording[number].append(ids)
    return [str(model.tokenizer.decode(joined(each))).strip() for each in by_recording]
