"""Sound files: what is read, as it should be, and what is refused, with the cure."""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.sound_backbones import tone
from workbench.data.images import picture_sources
from workbench.data.sound.sound_files import SOUND, SoundFile
from workbench.errors import ConfigError, DataError


def encoded(wave: np.ndarray, rate: int = 8000, kind: str = "WAV") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format=kind)
    return buffer.getvalue()


WAV = encoded(tone(440))
PLACE_OF_RATE = WAV.index(b"fmt ") + 12


def read(data: bytes, *, rate: int = 8000, several: str = "mix", most: float | None = None, on_long: str = "refuse"):
    return SoundFile("a.wav", content=data).wave(rate, several=several, most=most, on_long=on_long)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
def test_every_kind_gives_the_samples(kind: str) -> None:
    wave = tone(440)
    found = read(encoded(wave, kind=kind))
    assert abs(len(found) - len(wave)) <= (2500 if kind == "MP3" else 0)
    power = [np.abs(np.fft.rfft(each, 8000)) for each in (wave, found)]
    assert power[0].argmax() == pytest.approx(power[1].argmax(), abs=3)


def test_another_rate_keeps_the_pitch_and_the_length() -> None:
    found = read(encoded(tone(440, seconds=1, rate=44_100), 44_100), rate=16_000)
    assert len(found) == 16_000
    assert np.abs(np.fft.rfft(found)).argmax() == 440


def test_channels_are_mixed_or_refused() -> None:
    left, right = tone(440), tone(900)
    both = encoded(np.stack([left, right], 1))
    np.testing.assert_allclose(read(both), (left + right) / 2, atol=1e-4)
    with pytest.raises(DataError, match=r"has 2 channels, and audio\.channels=refuse.*audio\.channels=mix"):
        read(both, several="refuse")


def test_long_recordings_are_refused_or_cut() -> None:
    with pytest.raises(DataError, match=r"takes 0\.50 s, more than the 0\.25 s that are read.*audio\.on_long=cut"):
        read(WAV, most=0.25)
    np.testing.assert_array_equal(read(WAV, most=0.25, on_long="cut"), read(WAV)[:2000])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "empty (0 bytes)"),
        (encoded(np.zeros(0, np.float32)), "holds no samples"),
        (WAV[:-500], "the file was cut off"),
        (WAV[:PLACE_OF_RATE] + struct.pack("<I", 0) + WAV[PLACE_OF_RATE + 4 :], "0 samples a second"),
        (encoded(tone(440), kind="FLAC")[:60], "damaged"),
        (b"fLaC" + bytes(200), "damaged"),
        (b"hello there, this is no sound\n", "text, not a recording"),
        (b"<!DOCTYPE html><html></html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\0\0\0\x20ftypM4A \0\0\0\0", "Export it as wav, flac or mp3"),
        (bytes(range(128, 256)), "no kind of sound that can be read"),
    ],
)
def test_what_cannot_be_read_is_refused(data: bytes, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        read(data)
    assert sentence in str(caught.value) and str(caught.value).startswith("a.wav: ")


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        ({"array": [0.1, 0.2], "sampling_rate": 0}, "samples without a rate have no pitch"),
        ({"array": [0.1, 0.2]}, "samples without a rate"),
        ({"array": "abc", "sampling_rate": 8000}, "must be the samples of a recording"),
        (7, "must be a path or the bytes of a recording file"),
        ("", "the row has no recording"),
        ("missing.wav", "does not exist"),
        ("https://example.org/a.wav", "Download the recordings"),
    ],
)
def test_cells_that_hold_no_recording(cell: object, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        picture_sources.file_of(cell, "row 1", tmp_path, "audio", SOUND)
    assert sentence in str(caught.value)


def test_samples_as_datasets_decodes_them(tmp_path: Path) -> None:
    wave = tone(440)
    cell = {"array": np.stack([wave, wave]), "sampling_rate": 8000, "path": None}
    file = picture_sources.file_of(cell, "row 1", tmp_path, "audio", SOUND)
    assert isinstance(file, SoundFile) and file.seconds() == 0.5
    np.testing.assert_allclose(file.wave(8000, several="mix", most=None, on_long="refuse"), wave, atol=1e-6)


def test_missing_libraries_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ConfigError, match=r"pip install peft-workbench\[audio\]"):
        read(WAV)


def test_folders_of_classes_and_strangers(tmp_path: Path) -> None:
    for label in ("dog", "cat"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.wav").write_bytes(WAV)
    rows = list(picture_sources.read_rows(str(tmp_path), "audio", kind=SOUND))
    assert [row.columns["label"] for row in rows] == ["cat", "dog"]
    (tmp_path / "cat" / "1.jpg").write_bytes(b"x")
    mistakes = [row.mistake for row in picture_sources.read_rows(str(tmp_path), "audio", kind=SOUND) if row.mistake]
    assert mistakes == ["unknown kind of file `.jpg` among recordings. Move it elsewhere."]
