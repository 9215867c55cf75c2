"""From the bytes of a sound file to samples of one channel at one rate: right, or refused with the cure.

soundfile (libsndfile) reads wav, flac, mp3, ogg, opus and aiff; soxr resamples. Both belong to the extra `audio`.

Legend: T samples, C channels.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from workbench.data.images.picture_sources import MediaKind
from workbench.data.rows import excerpt
from workbench.data.stored_files import StoredFile
from workbench.errors import ConfigError, DataError

Wave = npt.NDArray[np.float32]

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".au", ".snd", ".w64", ".caf")
_CONVERTED = (".m4a", ".aac", ".wma", ".amr", ".mp4", ".webm")
_SIGNATURES = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")
_AGAIN = "Copy or download it again, or remove it."


def require_libraries() -> tuple[Any, Any]:
    """The modules soundfile and soxr. Raises ConfigError: they are not installed."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # soundfile without libsndfile raises OSError
        raise ConfigError(
            f"data.format=audio reads recordings by soundfile and soxr, which are not there ({error}). "
            "Run: pip install peft-workbench[audio]"
        ) from None
    return soundfile, soxr


class Sound(NamedTuple):
    """A decoded recording."""

    wave_TC: npt.NDArray[np.float32]
    """Samples from -1 to 1."""
    rate: int
    """Samples a second."""


@dataclass(frozen=True, slots=True)
class SoundFile(StoredFile):
    """A recording: a file, a member of an archive, the bytes of a file, or samples with their rate."""

    rate: int = 0  # of samples in `content`, float32 of shape `shape`
    part: tuple[float, float] | None = None  # seconds at which it begins and ends in the file; None: all of it

    @classmethod
    def from_cell(cls, value: Any, place: str) -> Self | None:
        """The samples that `datasets.Audio` decodes a recording to; None of another cell. Raises DataError: they are
        no samples, or have no rate."""
        if not isinstance(value, dict) or "array" not in value:
            return None
        try:
            samples = np.asarray(value["array"], dtype=np.float32)
        except (TypeError, ValueError):
            samples = np.zeros((), np.float32)
        if samples.ndim not in (1, 2):
            raise DataError(f"`array` must be the samples of a recording, found {excerpt(value['array'])}.")
        if samples.ndim == 2 and samples.shape[0] < samples.shape[1]:  # as torch has them
            samples = samples.T
        rate = value.get("sampling_rate")
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
            raise DataError(
                f"`sampling_rate` is {excerpt(rate)}: samples without a rate have no pitch. Write their rate in hertz, "
                "such as 16000."
            )
        samples_TC = np.ascontiguousarray(samples.reshape(len(samples), -1))
        return cls(place, content=samples_TC.tobytes(), shape=samples_TC.shape, rate=round(rate))

    def sound(self, *, longest: float | None = None) -> Sound:
        """The decoded recording. Raises DataError: empty, damaged, cut off, no sound, a rate of 0, or more than
        `longest` seconds, by its header."""
        if self.shape is not None:
            wave_TC = np.frombuffer(self.content, np.float32).reshape(self.shape)
            sound = Sound(wave_TC[slice(*self._samples(self.rate, len(wave_TC)))], self.rate)
        else:
            sound = _decoded(self, longest)
        if not len(sound.wave_TC):
            raise DataError(f"{self.name}: holds no samples: 0 seconds. Record it again, or remove it.")
        if not np.isfinite(sound.wave_TC).all():
            raise DataError(f"{self.name}: holds samples that are not finite. Write it again from its source.")
        return sound

    def _samples(self, rate: int, count: int) -> tuple[int, int]:
        """The first sample of its part and the one behind the last. Raises DataError: it lies behind the end."""
        if self.part is None:
            return 0, count
        start, stop = (round(each * rate) for each in self.part)
        if start >= count or stop > count + rate // 2:
            raise DataError(
                f"{self.name}: a segment from {self.part[0]:g} to {self.part[1]:g} s, and the recording takes "
                f"{count / rate:.2f} s. Write times in seconds, or fetch the whole recording."
            )
        return start, min(stop, count)

    def seconds(self) -> float:
        """How long it is, from its header; 0 where that cannot be read, which decoding explains."""
        if self.part is not None:
            return self.part[1] - self.part[0]
        if self.shape is not None:
            return self.shape[0] / self.rate
        soundfile, _ = require_libraries()
        try:
            info = soundfile.info(io.BytesIO(self.read()))
        except (DataError, RuntimeError, TypeError, ValueError):
            return 0.0
        return float(info.frames / info.samplerate) if info.samplerate > 0 else 0.0

    def wave(
        self,
        rate: int,
        *,
        several: str,
        most: float | None,
        on_long: str,
        longest: float | None = None,
        cure: str = "",
    ) -> Wave:
        """Samples (T,) of one channel at `rate` hertz. Raises DataError: as `sound`; or channels or length are refused.

        Args:
            several: `mix` takes the mean of several channels, `refuse` refuses them.
            most: Longest recording in seconds; None: any.
            on_long: `cut` keeps the beginning of longer ones, `refuse` refuses them.
            longest: Seconds of the longest one that is decoded; None: any.
            cure: What else helps where it is too long.
        """
        _, soxr = require_libraries()
        wave_TC, own = self.sound(longest=longest)
        channels, seconds = wave_TC.shape[1], len(wave_TC) / own
        if channels > 1 and several == "refuse":
            raise DataError(
                f"{self.name}: has {channels} channels, and audio.channels=refuse. Write audio.channels=mix, which "
                "takes their mean, or save the channel that the label is about."
            )
        if most is not None and seconds > most + 0.5 / own:
            if on_long == "refuse":
                raise DataError(
                    f"{self.name}: takes {seconds:.2f} s, more than the {most:g} s that are read. Cut it, or write "
                    "audio.on_long=cut, which reads its beginning, or a larger audio.max_seconds where the backbone "
                    f"reads more.{cure}"
                )
            wave_TC = wave_TC[: max(1, round(most * own))]
        wave_T = wave_TC.mean(axis=1, dtype=np.float32) if channels > 1 else wave_TC[:, 0]
        return np.asarray(wave_T if own == rate else soxr.resample(wave_T, own, rate), dtype=np.float32)


def _decoded(file: SoundFile, longest: float | None) -> Sound:
    soundfile, _ = require_libraries()
    data, name = file.read(), file.name
    if not data:
        raise DataError(f"{name}: the file is empty (0 bytes). Write it again, or remove it.")
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        _require_whole_wave(data, name)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as opened:
            rate = opened.samplerate
            if longest is not None and opened.frames > longest * rate:
                raise DataError(
                    f"{name}: takes {opened.frames / max(rate, 1):,.0f} s, and {longest:,.0f} s are read at most. "
                    "Cut it into parts."
                )
            start, stop = file._samples(rate, opened.frames)
            opened.seek(start)
            wave_TC = opened.read(stop - start, dtype="float32", always_2d=True)
    except (RuntimeError, TypeError, ValueError) as error:  # libsndfile's errors are RuntimeErrors
        raise DataError(f"{name}: {_reason(data, error)}") from None
    if rate <= 0:
        raise DataError(f"{name}: {_NO_RATE}")
    return Sound(wave_TC, int(rate))


_NO_RATE = "its header says 0 samples a second. Write it again with the rate at which it was recorded."


def _require_whole_wave(data: bytes, name: str) -> None:
    """Refuse a wav file without a rate, or that is shorter than it says, which libsndfile reads without a word."""
    place = 12
    while place + 8 <= len(data):
        kind, size = data[place : place + 4], struct.unpack("<I", data[place + 4 : place + 8])[0]
        if kind == b"fmt " and size >= 16 and struct.unpack("<I", data[place + 12 : place + 16])[0] == 0:
            raise DataError(f"{name}: {_NO_RATE}")
        if kind == b"data":
            if size not in (0, 0xFFFFFFFF) and place + 8 + size > len(data):  # these were streamed
                raise DataError(f"{name}: the end is missing: the file was cut off. {_AGAIN}")
            return
        place += 8 + size + size % 2


def _reason(data: bytes, error: Exception) -> str:
    """Why libsndfile reads nothing, and the cure."""
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if data[4:8] == b"ftyp" or data[:4] == b"\x1aE\xdf\xa3" or data[:4] == b"\x30\x26\xb2\x75":
        return "a film or a compressed recording (m4a, webm, wma) that is not read. Export it as wav, flac or mp3."
    if start.startswith((b"<!doctype html", b"<html")):
        return "a web page, not a recording: a download that failed? Download it again, or remove it."
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the recording itself. Fetch it: git lfs pull"
    if looks_like_sound(data):
        return f"the file is damaged and cannot be decoded ({str(error).rstrip('.')}). {_AGAIN}"
    try:
        text = data[:512].decode("utf-8", errors="strict" if len(data) < 512 else "ignore")
        if all(sign.isprintable() or sign.isspace() for sign in text):
            return "text, not a recording, whatever its name says. Remove it, or give the recording."
    except UnicodeDecodeError:
        pass
    return (
        f"no kind of sound that can be read (it begins with {data[:8].hex(' ')}). Save it as wav, flac or mp3, or "
        "remove it."
    )


def looks_like_sound(data: bytes) -> bool:
    """Whether bytes begin as a sound file of a usual kind does."""
    return data.startswith(_SIGNATURES)


SOUND = MediaKind("recording", "recordings", "audio", SUFFIXES, _CONVERTED, SoundFile, looks_like_sound)
