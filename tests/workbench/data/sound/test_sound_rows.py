"""Rows of recordings: the features of the stock extractor, kept once, changed as a function of seed, epoch and row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
from transformers import AutoFeatureExtractor

from tests.sound_backbones import FAMILIES, record, save_sound
from workbench.config import RunConfig
from workbench.config.sections.audio_config import SoundAugmentConfig
from workbench.data.sound import sound_augmentation
from workbench.data.sound.sound_reader import SoundReader, SoundRows
from workbench.errors import BackboneError, DataError
from workbench.models import classifier
from workbench.schema import parse


def reader(model: str, rows: Path, **audio: object) -> SoundReader:
    data = {"format": "audio", "train": str(rows), "held_out": 0.25}
    values = {"recipe": "classify", "model": {"id": model}, "data": data, "audio": audio}
    found = classifier.reader_of_backbone(parse(RunConfig, values, source="test"))
    assert isinstance(found, SoundReader)
    return found


def rows_of(found: SoundReader, rows: Path) -> SoundRows:
    return found.inputs(found.read(str(rows)))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("tones"), 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_the_stock_extractor(family: str, table: Path, tmp_path: Path) -> None:
    model = save_sound(tmp_path / family, family)
    rows = rows_of(reader(model, table), table)
    stock, rate = AutoFeatureExtractor.from_pretrained(model), rows.format.rate
    wave, own = soundfile.read(table.parent / "3.wav", dtype="float32")
    if own != rate:
        wave = soxr.resample(wave, own, rate)
    filled = {"padding": "max_length", "max_length": rows.format.samples} if rows.format.hears_waves else {}
    wanted = stock(wave, sampling_rate=rate, return_tensors="pt", **filled)
    found = rows.batch(np.asarray([3]), epoch=None)
    assert found.inputs.keys() == wanted.keys()
    for name, each in wanted.items():
        assert torch.equal(found.inputs[name], each.to(found.inputs[name].dtype))
    assert found.tokens == rows.format.positions > 0


def test_features_are_computed_once(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    found = reader(save_sound(tmp_path / "whisper", "whisper"), table)
    first = rows_of(found, table)
    (store,) = (each for each in (tmp_path / "cache" / "recordings").iterdir() if each.is_dir())
    before = (store / "pixels.npy").stat().st_mtime_ns
    again = rows_of(found, table)
    assert (store / "pixels.npy").stat().st_mtime_ns == before
    assert not first.differ(again).any()


def test_changes_depend_on_seed_epoch_and_row_alone(table: Path, tmp_path: Path) -> None:
    augment = {"speed": 0.2, "shift": 0.1, "time_masks": 2, "frequency_masks": 1}
    rows = rows_of(reader(save_sound(tmp_path / "hubert", "hubert"), table, augment=augment), table)
    name = rows.format.name
    together = rows.batch(np.arange(6), epoch=3).inputs[name]
    alone = torch.cat([rows.batch(np.asarray([row]), epoch=3).inputs[name] for row in range(6)])
    assert torch.equal(together, alone)
    assert torch.equal(rows.take(np.asarray([4, 1])).batch(np.arange(2), epoch=3).inputs[name], together[[4, 1]])
    for other in (rows.batch(np.arange(6), epoch=4), replace(rows, seed=1).batch(np.arange(6), epoch=3)):
        assert all(not torch.equal(one, two) for one, two in zip(together, other.inputs[name], strict=True))
    again = rows.batch(np.arange(6), epoch=3, repeats=np.ones(6, dtype=np.int64)).inputs[name]
    assert not torch.equal(again, together)
    assert torch.equal(rows.batch(np.arange(6), epoch=None).inputs[name][0], torch.tensor(rows.features(0)[0]))


@pytest.mark.parametrize("family", ["whisper", "wav2vec2", "ast"])
def test_shifts_speeds_and_masks_do_what_they_say(family: str, table: Path, tmp_path: Path) -> None:
    format = (rows := rows_of(reader(save_sound(tmp_path / family, family), table), table)).format
    features, own = rows.features(1)
    time = format.time_axis
    later, ends = sound_augmentation.shifted(features, own, format, 0.1)
    by = round(0.1 * format.frames_a_second)
    assert ends == min(format.frames, own + by)
    count = ends - by
    np.testing.assert_array_equal(np.moveaxis(later, time, 0)[by:ends], np.moveaxis(features, time, 0)[:count])
    back, _ = sound_augmentation.shifted(later, ends, format, -0.1)
    np.testing.assert_array_equal(np.moveaxis(back, time, 0)[:count], np.moveaxis(features, time, 0)[:count])
    same, kept = sound_augmentation.at_speed(features, own, format, 1.0)
    np.testing.assert_allclose(same, features, atol=1e-6)
    assert kept == own
    _, fast = sound_augmentation.at_speed(features, own, format, 2.0)
    assert fast == round(own / 2)
    config = SoundAugmentConfig(time_masks=1, time_mask=0.5)
    shares = []
    for row in range(40):
        masked, _ = sound_augmentation.augment(features, own, config, format, seed=0, epoch=0, row=row)
        changed = np.moveaxis(masked != features, time, 0).reshape(format.frames, -1).any(1)
        shares.append(changed.mean())
        places = np.flatnonzero(changed)
        assert not len(places) or (places[-1] - places[0] + 1 <= own * 0.5 and places[-1] < own)
    assert max(shares) > 0.1


def test_lengths_and_processors_that_do_not_fit(table: Path, tmp_path: Path) -> None:
    whisper = save_sound(tmp_path / "whisper", "whisper")
    with pytest.raises(BackboneError, match=r"audio\.max_seconds=3 is more than its 1 seconds"):
        reader(whisper, table, max_seconds=3)
    with pytest.raises(DataError, match=r"takes 0\.\d+ s, more than the 0\.3 s"):
        rows_of(reader(whisper, table, max_seconds=0.3), table)
    assert rows_of(reader(whisper, table, max_seconds=0.3, on_long="cut"), table).truncated > 0
    (tmp_path / "whisper" / "preprocessor_config.json").unlink()
    with pytest.raises(BackboneError, match=r"has no preprocessor_config\.json with a feature extractor"):
        reader(whisper, table)
