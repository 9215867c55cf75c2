"""A cache says what its teacher says of the rows that it knows, whatever batch they are in.

A teacher is what its weights are, wherever they stand; a tokenizer is what it does.
What is kept of a position comes back as it was, and is what a teacher says, on average where it is drawn.
A cache's files are made once however often that is interrupted, and refused where they are damaged or another's.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.workbench.distillation.cached import SMALL, Desk, Watching, batch, settings, taught, write
from workbench.config import ModelConfig
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import MicroBatch
from workbench.distillation import teacher_cache
from workbench.distillation.student_loss import TeacherLogits
from workbench.distillation.teacher_cache import CachedTeacher, CacheIdentity, SampledTokens, Shard, TopTokens, identity
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError, Stopped
from workbench.losses.divergences import forward_kl, log_probs

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


@pytest.fixture
def tokenizer(stories: str) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories)
    return found


def test_a_folders_teacher_is_what_its_files_hold(
    stories: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    def teacher(folder: Path, *adapters: Path, weights: str = "float32") -> str | None:
        model = ModelConfig.model_validate({"id": str(folder), "weights": weights})
        return identity(settings(), TeacherSource(str(folder), model, adapters), tokenizer).teacher

    same = Path(shutil.copytree(stories, tmp_path / "copy"))
    first, second = (tmp_path / name for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(folder.name.encode())
    plain, adapted = teacher(Path(stories)), teacher(same, first)
    assert teacher(same) == plain
    assert teacher(same, first, second) == teacher(same, second, first)
    (same / "README.md").write_text("Not a weight.")
    assert teacher(same) == plain
    different = [plain, adapted, teacher(same, second), teacher(same, first, second), teacher(same, weights="nf4")]
    (first / "adapter_model.safetensors").write_bytes(b"trained on")
    different.append(teacher(same, first))
    (same / "config.json").write_text("{}")
    different.append(teacher(same))
    assert len(set(different)) == len(different) and None not in different


def test_a_hubs_teacher_is_its_commit(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    def teacher(name: str, commit: str | None, revision: str | None = None) -> str | None:
        hub = SimpleNamespace(_commit_hash=commit)
        monkeypatch.setattr("workbench.models.backbones.hub_config", lambda _: hub)
        return identity(settings(), TeacherSource(name, ModelConfig(id=name, revision=revision)), tokenizer).teacher

    assert teacher("owner/one", "abc") == teacher("owner/one", "abc", "main")
    found = [teacher("owner/one", "abc"), teacher("owner/one", "abd"), teacher("owner/two", "abc")]
    found += [teacher("owner/one", None), teacher("owner/one", None, "v2")]
    assert len(set(found)) == 5


def test_the_starter_is_a_folder(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(teacher_cache.backbones, "hub_config")
    assert identity(settings(), TeacherSource("starter", ModelConfig(id="starter")), tokenizer).teacher


def test_what_is_asked_for(stories: str, tokenizer: PreTrainedTokenizerBase) -> None:
    found = identity(settings(k=1000), None, tokenizer)
    assert found.teacher is None and found.k == "512" and found.kind == "likeliest" and found.temperature == "1.0"
    drawn = identity(settings(k=1000, sampled=True), None, tokenizer)
    assert drawn.dtype is None and drawn.k == "1000" and drawn.kind == "draws"
    other: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories)
    assert identity(settings(), None, other).tokenizer == found.tokenizer
    other.eos_token = other.bos_token
    assert identity(settings(), None, other).tokenizer != found.tokenizer


VOCABULARIES = (300, 65_536, 65_537, 70_000, 262_144)


def _said(positions: int, vocabulary: int, *, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(positions, vocabulary, generator=generator)).log_softmax(-1)


def _uniform(positions: int, k: int) -> Tensor:
    return torch.rand(positions, k, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@given(st.sampled_from(VOCABULARIES), st.data())
def test_tokens_come_back_as_they_were(vocabulary: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 40))
    row = st.lists(st.integers(0, vocabulary - 1), min_size=k, max_size=k).map(sorted)
    ids = np.asarray(data.draw(st.lists(row, min_size=1, max_size=5)))
    packed = teacher_cache.pack_ids(ids, vocabulary)
    assert np.array_equal(teacher_cache.unpack_ids(packed), ids)
    boundaries = math.ceil(vocabulary / 65_536) - 1
    assert sum(array.nbytes for array in packed.values()) == ids.shape[0] * (2 * k + boundaries)


def test_every_token_of_a_large_vocabulary_comes_back() -> None:
    ids = np.arange(70_000)[None]
    assert np.array_equal(teacher_cache.unpack_ids(teacher_cache.pack_ids(ids, 70_000)), ids)


def test_the_likeliest_tokens_and_the_mass_of_the_others() -> None:
    said = _said(6, 300)
    ids, found = teacher_cache.unpack_likeliest(teacher_cache.pack_likeliest(said, k=5, dtype="float32"))
    for row, tokens, numbers in zip(said.double().exp().tolist(), ids.tolist(), found.tolist(), strict=True):
        chosen = sorted(sorted(range(300), key=lambda token, row=row: -row[token])[:5])  # type: ignore[misc]
        assert tokens == chosen
        wanted = [row[token] for token in chosen]
        assert np.exp(numbers) == pytest.approx([*wanted, 1 - sum(wanted)], rel=1e-5)


@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_half_precision_still_adds_up_to_one(spread: float) -> None:
    said = _said(50, 1000, spread=spread)
    ids, found = teacher_cache.unpack_likeliest(teacher_cache.pack_likeliest(said, k=64, dtype="float16"))
    assert found.exp().sum(-1).tolist() == pytest.approx([1] * 50, abs=1e-6)
    exact = said.gather(1, ids)
    assert torch.allclose(found[:, :-1], exact, rtol=2**-10, atol=2e-3)
    assert (found[:, :-1] - exact).abs().max() > 1e-5  # it is kept in half precision


def test_more_tokens_than_there_are() -> None:
    said = _said(3, 20)
    ids, found = teacher_cache.unpack_likeliest(teacher_cache.pack_likeliest(said, k=64, dtype="float32"))
    assert ids.tolist() == [list(range(20))] * 3
    assert torch.allclose(found[:, :-1], said, atol=1e-6) and bool((found[:, -1] == -torch.inf).all())


def test_draws_weigh_one_and_name_each_token_once() -> None:
    packed = teacher_cache.pack_draws(_said(30, 300), _uniform(30, 40))
    ids, weights, negative_entropy = teacher_cache.unpack_draws(packed)
    assert weights.sum(-1).tolist() == pytest.approx([1] * 30, abs=1e-6)
    for tokens, shares in zip(ids, weights, strict=True):
        weighing = tokens[shares > 0].tolist()
        assert len(weighing) == len(set(weighing)) and set(weighing) == set(tokens.tolist())
        counted = [(tokens == token).sum().item() / 40 for token in weighing]
        assert shares[shares > 0].tolist() == pytest.approx(counted)
    wanted = [sum(p * math.log(p) for p in row) for row in _said(30, 300).double().exp().tolist()]
    assert negative_entropy.tolist() == pytest.approx(wanted, rel=1e-5)


def test_draws_are_as_frequent_as_their_probability() -> None:
    said = _said(2, 12)
    k = 20_000
    ids, weights, _ = teacher_cache.unpack_draws(teacher_cache.pack_draws(said, _uniform(2, k)))
    found = torch.zeros(2, 12).scatter_add(1, ids, weights)
    p = said.exp()
    assert bool(((found - p).abs() <= 5 * (p * (1 - p) / k).sqrt() + 1e-6).all())


def test_tokens_that_cannot_be_are_not_drawn() -> None:
    logits = torch.zeros(1, 6)
    logits[0, [0, 3, 5]] = -torch.inf
    ends = torch.tensor([[0.0, 1 / 3, 2 / 3, 1 - 2**-53]], dtype=torch.float64)
    ids, _, negative_entropy = teacher_cache.unpack_draws(teacher_cache.pack_draws(logits.log_softmax(-1), ends))
    assert set(ids.flatten().tolist()) == {1, 2, 4}
    assert negative_entropy.item() == pytest.approx(-math.log(3))


def test_draws_estimate_the_divergence_and_its_gradient_without_bias() -> None:
    """1,000 teachers that say the same, 8 draws each: their mean is within five standard errors."""
    temperature, times, vocabulary = 1.7, 1000, 40
    logits = 2 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1))
    teacher = _said(1, vocabulary)
    packed = teacher_cache.pack_draws(teacher.expand(times, -1), _uniform(times, 8))
    said = SampledTokens(teacher_cache.unpack_draws(packed), vocabulary, temperature)
    student = logits.expand(times, -1).clone().requires_grad_()
    estimates = torch.stack(
        [said.loss(student[i : i + 1], *(t[i : i + 1] for t in said.tensors)) for i in range(times)]
    )
    (gradients,) = torch.autograd.grad(estimates.sum(), student)
    own = logits.clone().requires_grad_()
    wanted = forward_kl(log_probs(own, temperature), teacher) * temperature**2
    (gradient,) = torch.autograd.grad(wanted, own)
    error = estimates.detach().std() / times**0.5
    assert abs(estimates.mean() - wanted) < 5 * error and error < 0.1 * wanted
    p = teacher[0].exp()
    assert bool(((gradients.mean(0) - gradient[0]).abs() <= 5 * temperature * (p * (1 - p) / 8 / times).sqrt()).all())


def test_a_head_that_is_padded_beyond_the_known_tokens() -> None:
    teacher, k = _said(4, 50), 6
    packed = teacher_cache.pack_likeliest(teacher, k=k, dtype="float32")
    likeliest = TopTokens(teacher_cache.unpack_likeliest(packed), 50, DistillConfig(), 1.0)
    drawn = SampledTokens(teacher_cache.unpack_draws(teacher_cache.pack_draws(teacher, _uniform(4, k))), 50, 1.0)
    logits = _said(4, 64, seed=3)
    for signal in (likeliest, drawn):
        short = signal.loss(logits[:, :50], *signal.tensors)
        assert float(signal.loss(logits, *signal.tensors)) == float(short) > 0


@pytest.fixture
def desk_of_teacher_cache_shards(
    stories: str, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Desk:
    monkeypatch.setattr(teacher_cache, "SHARD_POSITIONS", SMALL)
    return Desk(stories, questions, tmp_path / "cache")


@pytest.mark.parametrize("sampled", [False, True])
def test_a_killed_write_goes_on_to_the_same_bytes(desk_of_teacher_cache_shards: Desk, sampled: bool) -> None:
    config = settings(k=8, sampled=sampled)
    desk_of_teacher_cache_shards.write(config)
    whole, desk_of_teacher_cache_shards.folder = (
        desk_of_teacher_cache_shards.files(),
        desk_of_teacher_cache_shards.folder.with_name("killed"),
    )
    desk_of_teacher_cache_shards.live.asked, desk_of_teacher_cache_shards.live.fails_after = 0, 45
    with pytest.raises(KeyboardInterrupt):
        desk_of_teacher_cache_shards.write(config)
    assert (
        teacher_cache.missing(desk_of_teacher_cache_shards.folder)
        and 0 < len(desk_of_teacher_cache_shards.files()) < len(whole) - 1
    )
    (desk_of_teacher_cache_shards.folder / ".shard-00009.safetensors.1.unfinished").write_text("half")
    desk_of_teacher_cache_shards.live.asked, desk_of_teacher_cache_shards.live.fails_after = 0, None
    desk_of_teacher_cache_shards.write(config)
    assert (
        not teacher_cache.missing(desk_of_teacher_cache_shards.folder)
        and 0 < desk_of_teacher_cache_shards.live.asked < 100
    )
    assert desk_of_teacher_cache_shards.files() == whole


def test_positions_are_views_of_the_file(desk_of_teacher_cache_shards: Desk) -> None:
    desk_of_teacher_cache_shards.write(settings(k=8))
    shard = Shard(desk_of_teacher_cache_shards.folder / "shard-00000.safetensors")
    whole, part = shard.read(0, 9), shard.read(3, 5)
    assert set(part) == {"ids", "below", "log_probs", "rest"}
    for name in set(part) - {"below"}:  # empty where all tokens are below 65,536
        assert np.shares_memory(whole[name], part[name]) and np.array_equal(whole[name][3:5], part[name])


def test_a_watcher_may_end_it_between_shards(desk_of_teacher_cache_shards: Desk) -> None:
    callback = Watching(stop=True)
    with pytest.raises(Stopped, match="shard 1 of"):
        desk_of_teacher_cache_shards.write(settings(k=8), callback=callback)
    assert list(desk_of_teacher_cache_shards.files()) == ["shard-00000.safetensors"] and len(callback.said) == 1
    with pytest.raises(ConfigError, match=r"is no finished teacher cache's.*distill\.teacher\.id"):
        desk_of_teacher_cache_shards.open(settings(k=8))


@pytest.mark.parametrize(
    "harm, message", [("lost", "is not there"), ("cut", r"has [\d,]+ bytes instead of"), ("overwritten", "is damaged")]
)
def test_a_shard_that_is_no_more_is_named_and_made_again(
    desk_of_teacher_cache_shards: Desk, harm: str, message: str
) -> None:
    desk_of_teacher_cache_shards.write(settings(k=8))
    before, harmed = (
        desk_of_teacher_cache_shards.files(),
        desk_of_teacher_cache_shards.folder / "shard-00001.safetensors",
    )
    if harm == "lost":
        harmed.unlink()
    else:
        content = harmed.read_bytes()
        harmed.write_bytes(content[:-5] if harm == "cut" else b"\xff" * len(content))
    with pytest.raises(ConfigError, match=rf"shard-00001.safetensors {message}.*delete .*cache.json and run"):
        desk_of_teacher_cache_shards.open(settings(k=8))
    desk_of_teacher_cache_shards.live.asked = 0
    desk_of_teacher_cache_shards.write(settings(k=8))
    assert desk_of_teacher_cache_shards.files() == before and 0 < desk_of_teacher_cache_shards.live.asked < 60


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
def test_another_configurations_cache(
    desk_of_teacher_cache_shards: Desk, there: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    desk_of_teacher_cache_shards.write(settings(**there))
    before = desk_of_teacher_cache_shards.files()
    with pytest.raises(ConfigError) as reading:
        desk_of_teacher_cache_shards.open(settings(**asked))
    with pytest.raises(ConfigError) as writing:
        desk_of_teacher_cache_shards.write(settings(**asked))
    assert message in str(reading.value) and "Write another distill.cache.folder, or delete" in str(reading.value)
    assert str(reading.value) == str(writing.value) and desk_of_teacher_cache_shards.files() == before


def test_another_teachers_and_another_tokenizers_cache(desk_of_teacher_cache_shards: Desk) -> None:
    config = settings(k=8)
    desk_of_teacher_cache_shards.write(config)
    one = desk_of_teacher_cache_shards.wanted(config)
    told = {
        rf"teacher: the stories \(digest {one.teacher}\) there, b \(digest 12\) asked": {"teacher": "12", "name": "b"},
        rf"tokenizer: digest {one.tokenizer} there, digest 12 asked": {"tokenizer": "12"},
    }
    for said, other in told.items():
        with pytest.raises(ConfigError, match=said):
            CachedTeacher(
                desk_of_teacher_cache_shards.folder, desk_of_teacher_cache_shards.train, config, one._replace(**other)
            )
    CachedTeacher(
        desk_of_teacher_cache_shards.folder, desk_of_teacher_cache_shards.train, config, one._replace(name="moved")
    )


def test_a_folder_that_holds_something_else(desk_of_teacher_cache_shards: Desk) -> None:
    desk_of_teacher_cache_shards.folder.mkdir()
    thesis = desk_of_teacher_cache_shards.folder / "thesis.tex"
    thesis.write_text("")
    for there in (desk_of_teacher_cache_shards.folder, thesis):
        desk_of_teacher_cache_shards.folder = there
        with pytest.raises(ConfigError, match=r"thesis.tex is no part of a cache. Write a new folder"):
            desk_of_teacher_cache_shards.write(settings(k=8))
    assert [*thesis.parent.iterdir()] == [thesis] and desk_of_teacher_cache_shards.live.asked == 0


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"made_by": {}, "shards": 3}'])
def test_an_index_that_is_none(desk_of_teacher_cache_shards: Desk, content: str | None) -> None:
    desk_of_teacher_cache_shards.folder.mkdir()
    if content is not None:
        (desk_of_teacher_cache_shards.folder / "cache.json").write_text(content)
    assert teacher_cache.missing(desk_of_teacher_cache_shards.folder) == (content is None)
    with pytest.raises(ConfigError, match=r"cache.json is no finished teacher cache's"):
        desk_of_teacher_cache_shards.open(settings(k=8))
