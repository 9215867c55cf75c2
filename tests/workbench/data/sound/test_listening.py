"""What a page plays and shows of a recording."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from tests.sound_backbones import tone
from workbench.data.sound import listening


@pytest.mark.parametrize("rate", [8000, 10_000, 16_000])
def test_a_page_plays_the_recording(rate: int) -> None:
    wave = tone(500, seconds=0.7, rate=rate)
    kept = listening.kept(wave, rate)
    again, own = soundfile.read(io.BytesIO(kept), dtype="float32")
    assert own == rate
    np.testing.assert_allclose(again, wave, atol=1 / 30_000)
    played, own = soundfile.read(io.BytesIO(listening.played(kept)), dtype="float32")
    assert len(played) / own == pytest.approx(0.7, abs=0.15)  # MP3 has frames of some hundredths of a second
    power = np.abs(np.fft.rfft(played)) ** 2
    assert np.fft.rfftfreq(len(played), 1 / own)[power.argmax()] == pytest.approx(500, abs=10)


def test_a_spectrum_has_high_frequencies_on_top() -> None:
    for hertz in (500, 3500):
        picture_HW3 = listening.drawn(listening.kept(tone(hertz), 8000))
        loudest = picture_HW3.astype(int).sum(axis=(1, 2)).argmax() / len(picture_HW3)
        assert loudest == pytest.approx(1 - hertz / 4000, abs=0.06)
