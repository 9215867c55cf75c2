"""Random changes of training recordings: a pure function of seed, epoch, row and repeat.

SpecAugment (Park et al. 2019) hides spans of time and bands of frequencies; speeds and shifts move a recording in time.
Features of a recording lie in an array of which one dimension is time; behind the recording's own positions is silence.

Legend: F positions in time, M bands of frequencies, S samples of a wave.
"""

from __future__ import annotations

import numpy as np

from workbench.config.sections.audio_config import SoundAugmentConfig
from workbench.data.images.augmentation import row_generator
from workbench.data.sound.sound_format import Features, SoundFormat


def augment(
    features: Features,
    own: int,
    config: SoundAugmentConfig,
    format: SoundFormat,
    *,
    seed: int,
    epoch: int,
    row: int,
    repeat: int = 0,
) -> tuple[Features, int]:
    """The features of a row as a draw of an epoch reads them, and how many positions in time are its own."""
    rng = row_generator("augment", seed=seed, epoch=epoch, row=row, repeat=repeat)
    speed, shift = rng.uniform(-1, 1, 2) * (config.speed, config.shift)
    if config.speed:
        features, own = at_speed(features, own, format, 1 + speed)
    if config.shift:
        features, own = shifted(features, own, format, shift)
    if config.time_masks or config.frequency_masks:
        features = _masked(features, own, config, format, rng)
    return features, own


def at_speed(features: Features, own: int, format: SoundFormat, factor: float) -> tuple[Features, int]:
    """The recording played `factor` times as fast, interpolated linearly; a slower one may lose its end. The pitch of
    waves changes with the speed, that of bands of frequencies stays."""
    moved_F = np.moveaxis(features, format.time_axis, 0)
    frames, silent = len(moved_F), _silence(moved_F, own)
    count = max(1, min(frames, round(own / factor)))
    place_F = np.minimum(np.arange(count) * factor, own - 1)
    low_F = place_F.astype(np.int64)
    share = (place_F - low_F).astype(np.float32).reshape(-1, *[1] * (moved_F.ndim - 1))
    changed = np.empty_like(moved_F)
    changed[:count] = moved_F[low_F] * (1 - share) + moved_F[np.minimum(low_F + 1, own - 1)] * share
    changed[count:] = silent
    return np.ascontiguousarray(np.moveaxis(changed, 0, format.time_axis)), count


def shifted(features: Features, own: int, format: SoundFormat, seconds: float) -> tuple[Features, int]:
    """The recording that begins later by some seconds, or earlier; what leaves it at either end is lost."""
    moved_F = np.moveaxis(features, format.time_axis, 0)
    frames, silent = len(moved_F), _silence(moved_F, own)
    by = round(seconds * format.frames_a_second)
    changed = np.empty_like(moved_F)
    changed[:] = silent
    if by >= 0:
        end = min(frames, own + by)
        changed[by:end] = moved_F[: max(0, end - by)]
    else:
        end = max(0, own + by)
        changed[:end] = moved_F[-by : -by + end]
    return np.ascontiguousarray(np.moveaxis(changed, 0, format.time_axis)), max(1, end)


def _silence(moved_F: Features, own: int) -> Features:
    """What stands where nothing is heard: the filling behind the recording, or else its most silent position."""
    if own < len(moved_F):
        silent: Features = moved_F[-1]
        return silent
    if moved_F.ndim == 1:
        return np.zeros((), np.float32)
    quietest: Features = moved_F[int(moved_F[:own].mean(axis=1).argmin())]
    return quietest


def _masked(
    features: Features, own: int, config: SoundAugmentConfig, format: SoundFormat, rng: np.random.Generator
) -> Features:
    moved_F = np.moveaxis(features, format.time_axis, 0).copy()
    mean = np.float32(0.0 if moved_F.ndim == 1 else moved_F[:own].mean())
    bands = moved_F.shape[1] if moved_F.ndim > 1 else own // 2 + 1
    hidden = [_span(bands, config.frequency_mask, rng) for _ in range(config.frequency_masks)]
    if hidden and moved_F.ndim == 1:  # a wave loses the band's frequencies
        spectrum = np.fft.rfft(moved_F[:own])
        for band in hidden:
            spectrum[band] = 0
        moved_F[:own] = np.fft.irfft(spectrum, n=own)
    else:
        for band in hidden:
            moved_F[:own, band] = mean
    for _ in range(config.time_masks):
        moved_F[_span(own, config.time_mask, rng)] = mean
    return np.ascontiguousarray(np.moveaxis(moved_F, 0, format.time_axis))


def _span(size: int, most: float, rng: np.random.Generator) -> slice:
    """A random part of a dimension, up to a share of it."""
    length = int(rng.integers(0, int(size * most) + 1))
    start = int(rng.integers(0, size - length + 1))
    return slice(start, start + length)
