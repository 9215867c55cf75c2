"""A cache's files are made once however often that is interrupted, and refused where they are damaged or another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workbench.distillation.cached import SMALL, Desk, Watching, settings
from workbench.distillation import teacher_cache
from workbench.distillation.teacher_cache import CachedTeacher, Shard
from workbench.errors import ConfigError, Stopped


@pytest.fixture
def desk(stories: str, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(teacher_cache, "SHARD_POSITIONS", SMALL)
    return Desk(stories, questions, tmp_path / "cache")


@pytest.mark.parametrize("sampled", [False, True])
def test_a_killed_write_goes_on_to_the_same_bytes(desk: Desk, sampled: bool) -> None:
    config = settings(k=8, sampled=sampled)
    desk.write(config)
    whole, desk.folder = desk.files(), desk.folder.with_name("killed")
    desk.live.asked, desk.live.fails_after = 0, 45
    with pytest.raises(KeyboardInterrupt):
        desk.write(config)
    assert teacher_cache.missing(desk.folder) and 0 < len(desk.files()) < len(whole) - 1
    (desk.folder / ".shard-00009.safetensors.1.unfinished").write_text("half")
    desk.live.asked, desk.live.fails_after = 0, None
    desk.write(config)
    assert not teacher_cache.missing(desk.folder) and 0 < desk.live.asked < 100
    assert desk.files() == whole


def test_positions_are_views_of_the_file(desk: Desk) -> None:
    desk.write(settings(k=8))
    shard = Shard(desk.folder / "shard-00000.safetensors")
    whole, part = shard.read(0, 9), shard.read(3, 5)
    assert set(part) == {"ids", "below", "log_probs", "rest"}
    for name in set(part) - {"below"}:  # empty where all tokens are below 65,536
        assert np.shares_memory(whole[name], part[name]) and np.array_equal(whole[name][3:5], part[name])


def test_a_watcher_may_end_it_between_shards(desk: Desk) -> None:
    callback = Watching(stop=True)
    with pytest.raises(Stopped, match="shard 1 of"):
        desk.write(settings(k=8), callback=callback)
    assert list(desk.files()) == ["shard-00000.safetensors"] and len(callback.said) == 1
    with pytest.raises(ConfigError, match=r"is no finished teacher cache's.*distill\.teacher\.id"):
        desk.open(settings(k=8))


@pytest.mark.parametrize(
    "harm, message", [("lost", "is not there"), ("cut", r"has [\d,]+ bytes instead of"), ("overwritten", "is damaged")]
)
def test_a_shard_that_is_no_more_is_named_and_made_again(desk: Desk, harm: str, message: str) -> None:
    desk.write(settings(k=8))
    before, harmed = desk.files(), desk.folder / "shard-00001.safetensors"
    if harm == "lost":
        harmed.unlink()
    else:
        content = harmed.read_bytes()
        harmed.write_bytes(content[:-5] if harm == "cut" else b"\xff" * len(content))
    with pytest.raises(ConfigError, match=rf"shard-00001.safetensors {message}.*delete .*cache.json and run"):
        desk.open(settings(k=8))
    desk.live.asked = 0
    desk.write(settings(k=8))
    assert desk.files() == before and 0 < desk.live.asked < 60


@pytest.mark.parametrize(
    "there, asked, message",
    [
        ({"k": 8}, {"k": 9}, "k: 8 there, 9 asked for"),
        ({"k": 8}, {"k": 8, "dtype": "float16"}, "dtype: float32 there, float16 asked for"),
        ({"k": 8}, {"k": 8, "temperature": 2.0}, "temperature: 1.0 there, 2.0 asked for"),
        ({"k": 8}, {"k": 8, "sampled": True}, "kind: likeliest there, draws asked for"),
        ({"k": 8, "sampled": True}, {"k": 8}, "dtype: none there, float32 asked for\n  kind: draws there, likeliest"),
    ],
)
def test_another_configurations_cache(desk: Desk, there: dict[str, Any], asked: dict[str, Any], message: str) -> None:
    desk.write(settings(**there))
    before = desk.files()
    with pytest.raises(ConfigError) as reading:
        desk.open(settings(**asked))
    with pytest.raises(ConfigError) as writing:
        desk.write(settings(**asked))
    assert message in str(reading.value) and "Write another distill.cache.folder, or delete" in str(reading.value)
    assert str(reading.value) == str(writing.value) and desk.files() == before


def test_another_teachers_and_another_tokenizers_cache(desk: Desk) -> None:
    config = settings(k=8)
    desk.write(config)
    one = desk.wanted(config)
    told = {
        rf"teacher: the stories \(digest {one.teacher}\) there, b \(digest 12\) asked": {"teacher": "12", "name": "b"},
        rf"tokenizer: digest {one.tokenizer} there, digest 12 asked": {"tokenizer": "12"},
    }
    for said, other in told.items():
        with pytest.raises(ConfigError, match=said):
            CachedTeacher(desk.folder, desk.train, config, one._replace(**other))
    CachedTeacher(desk.folder, desk.train, config, one._replace(name="moved"))


def test_a_folder_that_holds_something_else(desk: Desk) -> None:
    desk.folder.mkdir()
    thesis = desk.folder / "thesis.tex"
    thesis.write_text("")
    for there in (desk.folder, thesis):
        desk.folder = there
        with pytest.raises(ConfigError, match=r"thesis.tex is no part of a cache. Write a new folder"):
            desk.write(settings(k=8))
    assert [*thesis.parent.iterdir()] == [thesis] and desk.live.asked == 0


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"made_by": {}, "shards": 3}'])
def test_an_index_that_is_none(desk: Desk, content: str | None) -> None:
    desk.folder.mkdir()
    if content is not None:
        (desk.folder / "cache.json").write_text(content)
    assert teacher_cache.missing(desk.folder) == (content is None)
    with pytest.raises(ConfigError, match=r"cache.json is no finished teacher cache's"):
        desk.open(settings(k=8))
