"""A cache says what its teacher says of the rows that it knows, whatever batch they are in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workbench.distillation.cached import SMALL, Desk, batch, settings, taught, write
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import MicroBatch
from workbench.distillation import teacher_cache
from workbench.distillation.student_loss import TeacherLogits
from workbench.distillation.teacher_cache import CachedTeacher, CacheIdentity
from workbench.errors import ConfigError
from workbench.losses.divergences import log_probs

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation")


@pytest.fixture
def desk(short_stories: str, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(teacher_cache, "SHARD_POSITIONS", SMALL)
    return Desk(short_stories, questions, tmp_path / "cache")


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_with_all_tokens_it_is_the_live_teacher(
    kind: str, questions: Path, short_stories: str, encoder_decoder: str, tmp_path: Path
) -> None:
    desk = Desk(short_stories if kind == "decoder" else encoder_decoder, questions, tmp_path / "cache")
    rows, seen = desk.train.subset(np.arange(40)), batch(desk.train, 7, 3, 30, 12, 3)
    desk.write(settings(temperature=1.7, k=1000), rows)
    for name in DIVERGENCES:
        config = settings(temperature=1.7, k=1000, loss=name)
        loss, gradient = taught(desk.live.signal(seen, config, temperature=1.7))
        found, found_gradient = taught(desk.open(config, rows).signal(seen, config, temperature=1.7))
        assert found == pytest.approx(loss, rel=1e-5), name
        assert torch.allclose(found_gradient, gradient, atol=1e-5), name


@pytest.mark.parametrize("dtype, off", [("float32", 1e-5), ("float16", 2e-3)])
def test_with_few_tokens_all_others_are_one_event(desk: Desk, dtype: str, off: float) -> None:
    config, seen = settings(temperature=2.0, k=8, dtype=dtype), batch(desk.train, 5, 60)
    desk.write(config)
    said = desk.open(config).signal(seen, config, temperature=2.0)
    spoken = desk.live.signal(seen, config, temperature=2.0)
    teacher = spoken.log_probs(spoken.tensors, vocabulary=512).double().exp()
    logits = 2 * torch.randn(len(seen.labels_N), 512, generator=torch.Generator().manual_seed(1))
    wanted = 0.0
    for p, q in zip(teacher, log_probs(logits.double(), 2.0).exp(), strict=True):
        kept, *others = p.argsort(descending=True).split([8, 504])
        events = [(float(p[token]), float(q[token])) for token in kept]
        events += [(float(p[rest].sum()), float(q[rest].sum())) for rest in others]
        wanted += 4 * sum(a * np.log(a / b) for a, b in events)
    assert float(said.loss(logits, *said.tensors)) == pytest.approx(wanted, rel=off)


def test_many_draws_come_close_to_the_live_teacher(desk: Desk) -> None:
    config = settings(temperature=1.5, k=4096, sampled=True)
    rows = desk.train.subset(np.arange(20))
    desk.write(config, rows)
    seen = batch(rows, *range(20))
    loss, _ = taught(desk.live.signal(seen, config, temperature=1.5))
    found, gradient = taught(desk.open(config, rows).signal(seen, config, temperature=1.5))
    assert found == pytest.approx(loss, rel=0.01)
    assert gradient.sum(-1).abs().max() < 1e-4  # the draws' shares add up to one


def test_a_rows_draws_do_not_depend_on_the_rows_beside_it(desk: Desk) -> None:
    config, count = settings(k=16, sampled=True), int(desk.train.supervised[80])
    desk.write(config)
    both, turned = (
        desk.open(config).signal(seen, config, temperature=1.0).tensors[0]
        for seen in (batch(desk.train, 80, 60), batch(desk.train, 60, 80))
    )
    assert torch.equal(torch.cat([turned[-count:], turned[:-count]]), both)
    assert not torch.equal(both[:3], both[count : count + 3])
    desk.folder = desk.folder.with_name("other")
    rows = desk.train.subset(np.arange(99, 49, -1))
    desk.write(config, rows)
    apart = desk.open(config, rows).signal(batch(rows, 19, 39), config, temperature=1.0).tensors[0]
    assert (apart == both).float().mean() > 0.99  # rounding may move a draw


def test_bytes_of_a_token_at_the_largest_vocabulary(desk: Desk) -> None:
    """Measured on the files, with all that they hold besides."""
    vocabulary = 262_144
    generator = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(vocabulary, 4, generator=generator)

    class Large:
        def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TeacherLogits:
            hidden_ND = torch.randn(len(batch.labels_N), 4, generator=generator)
            return TeacherLogits([hidden_ND], [lambda hidden: hidden @ weight_VD.T], [vocabulary], config, temperature)

    rows, config = desk.train.subset(np.arange(20, 40)), settings(k=64, dtype="float16")
    wanted = CacheIdentity("a", "b", "1.0", "64", "float16", "likeliest")
    write(desk.folder, rows, Large(), config, wanted, vocabulary)
    facts = CachedTeacher(desk.folder, rows, config, wanted).facts
    positions = int(rows.supervised.sum())
    measured = sum(map(len, desk.files().values())) / positions
    assert facts["tokens"] == positions and 64 * 4 < facts["bytes_per_token"] <= measured <= 300


def test_facts(desk: Desk) -> None:
    desk.write(settings(k=8))
    found, positions = desk.open(settings(k=8)).facts, int(desk.train.supervised.sum())
    shards = len(desk.files()) - 1
    assert positions / (SMALL + desk.train.supervised.max()) < shards < positions / SMALL + 1 and shards > 3
    of = {"folder": str(desk.folder), "kind": "likeliest", "k": 8, "dtype": "float32", "tokens": positions}
    assert {name: found[name] for name in of} == of and found["shards"] == shards


def test_rows_may_be_dealt_and_ordered_otherwise(desk: Desk) -> None:
    config, other = settings(k=8), desk.train.subset(np.random.default_rng(0).permutation(100)[:70])
    desk.write(config)
    unnamed = teacher_cache.identity(config, None, desk.live.tokenizer)
    whole, found = desk.open(config), CachedTeacher(desk.folder, other, config, unnamed)
    for number in (0, 33, 69):
        at = int(np.flatnonzero(desk.train.rows == other.rows[number])[0])
        wanted = whole.signal(batch(desk.train, at), config, temperature=1.0)
        said = found.signal(batch(other, number), config, temperature=1.0)
        assert all(torch.equal(a, b) for a, b in zip(said.tensors, wanted.tensors, strict=True))


def test_rows_that_come_twice_are_kept_once(desk: Desk) -> None:
    config, twice = settings(k=8), desk.train.subset(np.asarray([4, 9, 4, 4, 30]))
    desk.write(config, twice)
    found = desk.open(config, twice)
    assert desk.live.asked == 3 and found.facts["tokens"] == desk.train.supervised[[4, 9, 30]].sum()
    first, third = (found.signal(batch(twice, row), config, temperature=1.0).tensors for row in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def test_new_rows_are_told_and_asked_alone(desk: Desk) -> None:
    config = settings(k=8)
    desk.write(config, desk.train.subset(np.arange(60)))
    before = desk.files()
    with pytest.raises(ConfigError, match=r"nothing of 40 of 100 training rows, such as questions.jsonl, row 61:"):
        desk.open(config)
    desk.live.asked = 0
    desk.write(config)
    assert desk.live.asked == 40 and desk.open(config).facts["tokens"] == desk.train.supervised.sum()
    after = desk.files()
    assert all(after[name] == content for name, content in before.items() if name != "cache.json")


def test_a_row_is_another_one_where_other_tokens_carry_loss(desk: Desk) -> None:
    config, other = settings(k=8), desk.read(loss_on="all")
    desk.write(config)
    with pytest.raises(ConfigError, match="nothing of 120 of 120 training rows"):
        desk.open(config, other)


def test_another_temperature_is_no_matter_of_a_step(desk: Desk) -> None:
    config = settings(k=8)
    desk.write(config)
    with pytest.raises(AssertionError):
        desk.open(config).signal(batch(desk.train, 0), config, temperature=2.0)
    with pytest.raises(AssertionError, match="other positions"):
        desk.open(config).signal(replace(batch(desk.train, 0), rows_B=np.asarray([1])), config, temperature=1.0)
