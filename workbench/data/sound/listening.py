"""Recordings for people: what is kept of one to be played on a page, the player's file, and a picture of its spectrum.

Legend: T samples, F windows in time, M frequencies.
"""

from __future__ import annotations

import io

import cv2
import numpy as np
import numpy.typing as npt

from workbench.data.images.picture_files import Pixels
from workbench.data.sound.sound_files import Wave, require_libraries

_RATES = (8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
"""Samples a second that MP3 has."""
HEARD = 6
"""Powers of ten below the loudest that a spectrum shows: 60 dB."""
SIZE = (192, 128)  # width and height of a drawn spectrum, in pixels


def kept(wave_T: Wave, rate: int) -> bytes:
    """A recording as FLAC of 16 bits."""
    return _written(wave_T, rate, "FLAC")


def played(flac: bytes) -> bytes:
    """What `kept` wrote as MP3, which every browser plays."""
    soundfile, soxr = require_libraries()
    wave_T, rate = soundfile.read(io.BytesIO(flac), dtype="float32")
    if rate not in _RATES:
        wave_T, rate = soxr.resample(wave_T, rate, 16_000), 16_000
    return _written(wave_T, rate, "MP3")


def drawn(flac: bytes) -> Pixels:
    """The spectrum of what `kept` wrote, up to the highest frequency that is heard: of one that was recorded at half
    the rate, the lower half."""
    soundfile, _ = require_libraries()
    spectrum_FM = spectrum(*soundfile.read(io.BytesIO(flac), dtype="float32"))
    heard = np.flatnonzero(spectrum_FM.max(axis=0) > spectrum_FM.max() - HEARD)
    return coloured(spectrum_FM[:, : heard[-1] + 1])


def spectrum(wave_T: Wave, rate: int) -> npt.NDArray[np.float32]:
    """Logarithm of the power of a wave in windows of 25 ms, each 10 ms after the one before (F, M)."""
    window, hop = max(16, rate // 40), max(1, rate // 100)
    padded = np.pad(wave_T, (0, max(0, window - len(wave_T))))
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop] * np.hanning(window)
    return np.log10(np.abs(np.fft.rfft(windows)) ** 2 + 1e-8).astype(np.float32)


def coloured(spectrum_FM: npt.NDArray[np.float32]) -> Pixels:
    """A spectrum as a picture: time from left to right, low frequencies at the bottom."""
    low, high = np.percentile(spectrum_FM, (2, 99.8))
    shares_MF = np.clip((spectrum_FM.T[::-1] - low) / max(1e-6, high - low), 0, 1)
    colours = cv2.applyColorMap((255 * shares_MF).astype(np.uint8), cv2.COLORMAP_MAGMA)
    return np.asarray(cv2.resize(colours, SIZE, interpolation=cv2.INTER_AREA)[:, :, ::-1], dtype=np.uint8)


def _written(wave_T: Wave, rate: int, format: str) -> bytes:
    soundfile, _ = require_libraries()
    buffer = io.BytesIO()
    soundfile.write(buffer, np.clip(wave_T, -1, 1), rate, format=format)
    return buffer.getvalue()
