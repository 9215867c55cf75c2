"""Rows of recordings with their transcripts, as files hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from workbench.config import DataConfig
from workbench.config.sections.audio_config import AudioConfig
from workbench.config.sections.basic_sections import WEIGHT
from workbench.data.images import picture_sources
from workbench.data.rows import RawRow, excerpt
from workbench.data.sound.sound_files import SOUND
from workbench.data.text.transcripts import AUDIO, STEP, TEXT, time_token
from workbench.errors import DataError
from workbench.schema import did_you_mean

SEGMENTS = "segments"
"""Column of a long recording that says what is said when, as transcribers such as Whisper write it."""


def read_rows(
    audio: AudioConfig, source: str, config: DataConfig, *, transcribed: bool = True, window: float | None = None
) -> Iterator[RawRow]:
    """Yield recordings with their transcripts, in columns AUDIO and the one that `data.columns` names for TEXT; of one
    with SEGMENTS each as a row. Raises DataError: there is no such column.

    Args:
        transcribed: Whether there must be transcripts; else all columns are kept.
        window: Seconds of the segments that are a row together, with their times in its transcript; None: each is a
            row, without times.
    """
    text, known = config.columns.get(TEXT, TEXT), False
    for row in picture_sources.read_rows(source, audio.column, audio.folder_of(source), config, SOUND):
        columns = row.columns
        if not transcribed:
            yield row
            continue
        if not row.mistake and (segments := columns.get(SEGMENTS)) not in (None, "", []):
            parts = _parts(row, segments, audio.column, text)
            yield from parts if window is None else _windows(row, parts, audio.column, text, window)
            known = True
            continue
        if window is not None and not row.mistake:
            why = f"has no `{SEGMENTS}`, whose times audio.timestamps=true learns. Add them, or leave that out."
            yield replace(row, mistake=why)
            continue
        if not known and not row.mistake and text not in columns:
            named = sorted(name for name in columns if name != audio.column)
            raise DataError(
                f"{source}: has no column `{text}` that holds the transcript of a recording."
                f"{did_you_mean(text, named)} Write data.columns='{{text: NAME}}' with the name of the column; beside "
                f"the recordings it has {', '.join(f'`{name}`' for name in named) or 'none'}."
            )
        known = known or not row.mistake
        weight = config.columns.get(WEIGHT)
        kept = {name: columns[name] for name in (text, weight) if name is not None and name in columns}
        yield replace(row, columns={AUDIO: columns.get(audio.column), **kept})


def _parts(row: RawRow, segments: Any, column: str, text: str) -> Iterator[RawRow]:
    """Each segment of a long recording: what is said between two times."""
    try:
        held = json.loads(segments) if isinstance(segments, str) else list(segments)
        parts = [(float(each["start"]), float(each["end"]), str(each["text"])) for each in held]
    except (TypeError, ValueError, KeyError, AttributeError):
        why = f"`{SEGMENTS}` must be a list of {{start, end, text}}, with times in seconds, found {excerpt(segments)}."
        yield replace(row, mistake=why)
        return
    for number, (start, end, said) in enumerate(parts, start=1):
        place, file, mistake = f"{row.place}, segment {number}", row.columns[column], ""
        if not 0 <= start < end < math.inf:
            mistake = f"begins at {start:g} s and ends at {end:g} s. Write times in seconds from the recording's start."
        yield RawRow(place, {AUDIO: replace(file, part=(start, end)), text: said}, mistake)


def _windows(row: RawRow, parts: Iterator[RawRow], column: str, text: str, seconds: float) -> Iterator[RawRow]:
    """Segments that follow one another within so many seconds as one row, whose transcript has their times."""
    begin = end = 0.0
    first, said, recording = 1, "", row.columns[column]

    def window(last: int) -> RawRow:
        named = f"segment {last}" if first == last else f"segments {first} to {last}"
        return RawRow(f"{row.place}, {named}", {AUDIO: replace(recording, part=(begin, end)), text: said})

    for number, each in enumerate(parts, start=1):
        words, mistake = str(each.columns.get(text, "")).strip(), each.mistake
        start, stop = (0.0, 0.0) if mistake else each.columns[AUDIO].part
        if not mistake and not words:
            mistake = f"its `{text}` is empty. Write what is said there, or take the segment out."
        if not mistake and start < end - STEP / 2:
            mistake = (
                f"begins at {start:g} s, before the segment in front of it ends, at {end:g} s. Write them in order."
            )
        if mistake:
            yield replace(each, mistake=mistake)
            return
        if said and stop > begin + seconds:
            yield window(number - 1)
            first, said, begin = number, "", end
        if not said and stop > begin + seconds:
            begin = start  # the silence in front of it is left out
        said += f"{time_token(start - begin)} {words}{time_token(stop - begin)}"
        end = stop
    if said:
        yield window(number)


def fingerprint(audio: AudioConfig, source: str, config: DataConfig) -> str:
    """Identifies the content of a source, its recordings included."""
    return picture_sources.fingerprint(source, audio.column, audio.folder_of(source), config, SOUND)
