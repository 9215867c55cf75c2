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
from workbench.data.text.transcripts import AUDIO, TEXT
from workbench.errors import DataError
from workbench.schema import did_you_mean

SEGMENTS = "segments"
"""Column of a long recording that says what is said when, as transcribers such as Whisper write it."""


def read_rows(audio: AudioConfig, source: str, config: DataConfig, *, transcribed: bool = True) -> Iterator[RawRow]:
    """Yield recordings with their transcripts, in columns AUDIO and the one that `data.columns` names for TEXT; of one
    with SEGMENTS each as a row. Raises DataError: there is no such column. `transcribed`: whether there must be one;
    else all columns are kept."""
    text, known = config.columns.get(TEXT, TEXT), False
    for row in picture_sources.read_rows(source, audio.column, audio.folder_of(source), config, SOUND):
        columns = row.columns
        if not transcribed:
            yield row
            continue
        if not row.mistake and (segments := columns.get(SEGMENTS)) not in (None, "", []):
            yield from _parts(row, segments, audio.column, text)
            known = True
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


def fingerprint(audio: AudioConfig, source: str, config: DataConfig) -> str:
    """Identifies the content of a source, its recordings included."""
    return picture_sources.fingerprint(source, audio.column, audio.folder_of(source), config, SOUND)
