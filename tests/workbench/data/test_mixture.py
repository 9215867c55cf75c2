"""Several sources: exact counts by the largest remainder, no row twice before all others once, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.run_files import read_lines, write_lines
from workbench.config import ModelConfig, RunConfig
from workbench.config.sections.sources_config import MixConfig, SourceConfig
from workbench.data import mixture, selection
from workbench.data.batching import Examples, global_batch
from workbench.data.held_out_split import Splits
from workbench.data.mixture import MixedRows, OneSourceBatches, counts, mixed, shares
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError, DataError
from workbench.models import backbones

SIZES = {"sums": 30, "tales": 12, "notes": 7}


@given(
    weights=st.lists(st.floats(0.01, 9), min_size=2, max_size=6), draws=st.integers(1, 60), epochs=st.integers(1, 12)
)
def test_counts_are_whole_and_owe_each_source_less_than_a_row_over_any_number_of_epochs(
    weights: list[float], draws: int, epochs: int
) -> None:
    share_S = np.asarray(weights) / sum(weights)
    total_S = np.zeros(len(weights), dtype=np.int64)
    for epoch in range(epochs):
        before_S, count_S = counts(share_S, draws, epoch)
        assert np.array_equal(before_S, total_S)
        assert count_S.sum() == draws and (count_S >= 0).all()
        total_S += count_S
        assert (np.abs(total_S - (epoch + 1) * draws * share_S) <= 1 + 1e-6).all()


class Numbers:
    """Rows that have a source and nothing to read."""

    def __init__(self, *sizes: int) -> None:
        self.source_N = np.repeat(np.arange(len(sizes)), sizes)


@given(
    weights=st.lists(st.floats(0.1, 9), min_size=3, max_size=3),
    draws=st.integers(5, 60),
    size=st.integers(1, 9),
    epochs=st.integers(1, 6),
)
def test_a_batch_of_one_source_has_no_row_of_another_and_batches_have_exact_counts(
    weights: list[float], draws: int, size: int, epochs: int
) -> None:
    rows, share_S = Numbers(30, 12, 7), np.asarray(weights) / sum(weights)
    train: Any = OneSourceBatches(rows, share_S, draws, 5, size=size)  # type: ignore[type-var]
    steps, seen, batches_S = -(-draws // size), np.zeros(49, dtype=np.int64), np.zeros(3, dtype=np.int64)
    for epoch in range(epochs):
        taken = []
        for step in range(steps):
            dealt = global_batch(epoch * steps + step, rows=draws, size=size, seed=5)
            batch = train.sample(dealt, epoch=epoch)
            (source,) = set(rows.source_N[batch].tolist())
            batches_S[source] += 1
            taken.append(batch)
        seen += np.bincount(np.concatenate(taken), minlength=49)
        assert all(np.ptp(seen[rows.source_N == source]) <= 1 for source in range(3))
        assert (np.abs(batches_S - (epoch + 1) * steps * share_S) <= 1 + 1e-6).all()
    assert seen.sum() == epochs * draws


def test_first_epoch_is_the_largest_remainder() -> None:
    """Hare's quotas 4.7, 3.2, 2.1: one more for the largest remainder."""
    _, count_S = counts(np.asarray([0.47, 0.32, 0.21]), 10, 0)
    assert count_S.tolist() == [5, 3, 2]


def test_chances_follow_sizes_weights_and_temperature() -> None:
    two = [SourceConfig(path="a"), SourceConfig(path="b", weight=2)]
    size_S, token_S = np.asarray([100, 900]), np.asarray([10_000.0, 18_000.0])
    assert shares(two, MixConfig(), size_S, token_S) == pytest.approx([100 / 1900, 1800 / 1900])
    assert shares(two, MixConfig(by="weight"), size_S, token_S) == pytest.approx([1 / 3, 2 / 3])
    assert shares(two, MixConfig(temperature=2), size_S, token_S) == pytest.approx([10 / 70, 60 / 70])
    rows_S = shares(two, MixConfig(by="weight", unit="tokens"), size_S, token_S)
    drawn_S = rows_S * token_S / size_S
    assert drawn_S / drawn_S.sum() == pytest.approx([1 / 3, 2 / 3]), "shares of the tokens that are drawn"
    assert shares(two, MixConfig(unit="tokens"), size_S, token_S) == pytest.approx([100 / 1900, 1800 / 1900])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        rows = [{"question": f"{name} {n}?", "answer": f"{name} says {n * n}."} for n in range(size)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


def loaded(folder: Path, stories: str, **data: Any) -> tuple[RunConfig, Splits[TokenizedSet], Examples]:
    sources = {name: {"path": str(folder / f"{name}.jsonl")} for name in SIZES}
    own = data.pop("sources", {})
    sources = {name: {**source, **own.get(name, {})} for name, source in sources.items()}
    values = {"recipe": "sft", "model": {"id": stories}, "data": {"sources": sources, "held_out": 0.2, **data}}
    config = RunConfig.model_validate(values)
    tokenizer = backbones.tokenizer(ModelConfig(id=stories))
    splits = tokenized.load(config.data, tokenizer, ChatEncoder(tokenizer), seed=0)
    return config, splits, mixed(splits.train, config)


def test_each_source_holds_out_its_share_and_rows_keep_their_place(folder: Path, stories: str) -> None:
    _, splits, _ = loaded(folder, stories)
    assert list(splits.train.sources) == list(splits.held_out.sources) == list(SIZES)
    for rows, wanted in ((splits.held_out, [6, 2, 1]), (splits.train, [24, 10, 6])):
        assert np.bincount(rows.source_N).tolist() == wanted
        names = list(SIZES)
        assert all(names[number] in rows.place(row) for row, number in enumerate(rows.source_N))
        assert [len(rows[row].input_ids) for row in range(len(rows))] == rows.lengths.tolist()
    assert splits.train.facts()["sources"] == {"sums": 24, "tales": 10, "notes": 6}
    assert splits.held_out.subset(np.asarray([0, 8])).source_N.tolist() == [0, 2]


def test_an_epoch_has_its_counts_and_no_row_comes_twice_before_all_others_of_its_source_once(
    folder: Path, stories: str
) -> None:
    config, splits, train = loaded(folder, stories, sources={"notes": {"weight": 3}}, mix={"rows": 25})
    assert isinstance(train, MixedRows) and len(train) == 25
    wanted_S = 25 * np.asarray([24, 10, 18]) / 52
    seen = np.zeros(len(splits.train), dtype=np.int64)
    for epoch in range(9):
        rows = train.sample(np.arange(25), epoch=epoch)
        seen += np.bincount(rows, minlength=len(seen))
        for number in range(3):
            own = seen[splits.train.source_N == number]
            assert np.ptp(own) <= 1
            assert abs(own.sum() - (epoch + 1) * wanted_S[number]) <= 1
    again = mixed(splits.train, config)
    assert np.array_equal(again.sample(np.asarray([3, 24, 0]), epoch=8), rows[[3, 24, 0]]), "whatever was asked before"
    other = mixed(splits.train, config.model_copy(update={"seed": 1}))
    assert not np.array_equal(other.sample(np.arange(25), epoch=0), train.sample(np.arange(25), epoch=0))


def test_a_source_has_columns_and_a_limit_of_its_own(folder: Path, stories: str) -> None:
    rows = [{"q": f"note {n}?", "a": f"{n}."} for n in range(9)]
    write_lines(folder / "notes.jsonl", rows)
    own = {"notes": {"columns": {"question": "q", "answer": "a"}, "limit": 5}}
    _, splits, _ = loaded(folder, stories, sources=own)
    assert (splits.train.source_N == 2).sum() + (splits.held_out.source_N == 2).sum() == 5


def test_rows_of_one_source_that_another_holds_out_are_refused_or_dropped(folder: Path, stories: str) -> None:
    (folder / "tales.jsonl").write_text("".join((folder / "sums.jsonl").read_text().splitlines(keepends=True)[:12]))
    with pytest.raises(DataError, match=r"training rows are also in .*\n  Write data\.overlap=drop"):
        loaded(folder, stories)
    _, splits, _ = loaded(folder, stories, overlap="drop")
    assert not set(splits.train.digests) & set(splits.held_out.digests)


def test_too_many_passes_are_refused_with_those_that_would_be_made(folder: Path, stories: str) -> None:
    config, _, train = loaded(folder, stories, sources={"notes": {"weight": 4, "passes": 5}})
    mixture.require_passes(train, config, steps=2)
    with pytest.raises(ConfigError, match=r"data\.sources\.notes\.passes=5: .* which is 26\.48 passes over 6 rows"):
        mixture.require_passes(train, config, steps=6 * 2)
    with pytest.raises(ConfigError, match=r"nobody knows .*\n  Write train\.epochs or train\.steps"):
        mixture.require_passes(train, config, steps=None)


def test_rows_are_compared_with_the_share_that_any_source_holds_out(folder: Path, stories: str) -> None:
    """Rows of one source stand in another one too, in capitals: what either holds out is dropped from the other."""
    rows = read_lines(folder / "sums.jsonl")
    other = [{key: value.upper().replace("?", " !") for key, value in row.items()} for row in rows]
    write_lines(folder / "tales.jsonl", other)
    _, splits, _ = loaded(folder, stories, decontaminate={"action": "drop", "ngram": 3, "share": 1.0})
    held = [place.replace("tales", "sums") for place in splits.held_out.places() if "notes" not in place]
    kept = {place.replace("tales", "sums") for place in splits.train.places() if "notes" not in place}
    assert not kept & set(held) and len(kept | set(held)) == 30, "no other row holds its text"
    found = splits.train.contamination
    assert found is not None and found.rows == 24 + 24 + 6
    assert found.sets == {"data.held_out.sums": 6, "data.held_out.tales": 6, "data.held_out.notes": 1}
    places = [*(f"sums.jsonl, row {n + 1}" for n in range(30)), *(f"tales.jsonl, row {n + 1}" for n in range(30))]
    assert {match.train for match in found.matches} == set(places) - set(splits.train.places()) - set(
        splits.held_out.places()
    )


def test_a_choice_is_made_among_the_rows_of_all_sources(folder: Path, stories: str) -> None:
    (folder / "target.jsonl").write_text(json.dumps({"text": "tales says tales says tales"}) + "\n")
    chosen = {"by": "importance", "target": str(folder / "target.jsonl"), "rows": 24}
    config, splits, train = loaded(folder, stories, select=chosen)
    _, every, _ = loaded(folder, stories)
    wanted, _ = selection.selected(
        config.data.select,
        every.train.lengths,
        seed=0,
        texts=lambda: [text_of(place) for place in every.train.places()],
        target=lambda _: ["tales says tales says tales"],
    )
    assert list(splits.train.places()) == [every.train.place(int(row)) for row in wanted]
    kept_S = np.bincount(splits.train.source_N, minlength=3)
    drawn = train.sample(np.arange(24), epoch=0)
    assert np.bincount(splits.train.source_N[drawn], minlength=3).tolist() == kept_S.tolist()


def text_of(place: str) -> str:
    name, _, row = place.partition(".jsonl, row ")
    return f"{name} {int(row) - 1}?\n {name} says {(int(row) - 1) ** 2}.\n"
