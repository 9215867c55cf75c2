"""Texts of rows: each once, with instructions; which are known to belong together; splits without leaks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import STORIES
from tests.run_files import write_lines
from workbench.config import DataConfig, ModelConfig, RunConfig
from workbench.config.sections.embed_config import EmbedConfig
from workbench.data.embedding import pair_data, pair_records, pair_set
from workbench.data.embedding.pair_set import PairSet
from workbench.data.held_out_split import Splits
from workbench.errors import ConfigError
from workbench.models import backbones

TOKENIZER = backbones.tokenizer(ModelConfig(id=str(STORIES)))


def load(folder: Path, rows: Iterable[dict[str, Any]], *, batch: int = 32, **embed: Any) -> Splits[PairSet]:
    path = folder / "rows.jsonl"
    write_lines(path, rows)
    data = {"train": str(path), "held_out": 0.2, "max_tokens": 24}
    model, size = {"id": str(STORIES)}, {"size": batch}
    config = RunConfig.model_validate({"recipe": "embed", "model": model, "data": data, "batch": size, "embed": embed})
    return pair_data.load(config, TOKENIZER)


def every(folder: Path, rows: Iterable[dict[str, Any]], **embed: Any) -> PairSet:
    """All rows, without a split."""
    path = folder / "rows.jsonl"
    write_lines(path, rows)
    source = pair_records.read(str(path), DataConfig(train=str(path)))
    return pair_set.encode(source, TOKENIZER, EmbedConfig(**embed), max_tokens=24)


def pairs(count: int) -> list[dict[str, Any]]:
    return [{"anchor": f"question {n}", "positive": f"answer {n}", "negative": f"answer {n + 1}"} for n in range(count)]


def test_each_text_is_tokenised_once_with_its_instruction(tmp_path: Path) -> None:
    train = load(tmp_path, pairs(20), query_prefix="find: ", passage_prefix="text: ").train
    assert len(train) == 16 and len(set(train.units.texts)) == len(train.units.texts)
    for row in range(len(train)):
        anchor, positive, negative = train.records[row].texts
        units = [train.anchor_N[row], train.positive_N[row], *train.negatives[row]]
        assert [train.units.texts[unit] for unit in units] == [
            f"find: {anchor}",
            f"text: {positive}",
            f"text: {negative}",
        ]
        for unit in units:
            assert train.units.tokens[unit].tolist() == TOKENIZER(train.units.texts[unit])["input_ids"]
        assert train.lengths[row] == sum(train.units.lengths[unit] for unit in units)
        assert train.longest_sequences[row] == max(train.units.lengths[unit] for unit in units)


def test_known_pairs_are_no_negatives(tmp_path: Path) -> None:
    """Another row's positive of the same anchor, and a text that is the anchor itself, whatever the instructions."""
    rows = [*pairs(8), {"anchor": "question 3", "positive": "reply 3"}, {"anchor": "answer 5", "positive": "reply 5"}]
    train = every(tmp_path, rows, query_prefix="find: ")
    texts = train.texts(np.arange(len(train)))
    known_BN = train.known(texts.anchor_B, texts.passages)
    passages = [train.units.texts[unit] for unit in texts.passages]
    for record, known_N in zip(train.records, known_BN, strict=True):
        mine = {other.texts[1] for other in train.records if other.texts[0] == record.texts[0]} | {record.texts[0]}
        assert [text in mine for text in passages] == known_N.tolist()
    assert {"answer 3", "reply 3"} <= {text for text, is_known in zip(passages, known_BN[3], strict=True) if is_known}
    assert passages.count("answer 5") == 2 and known_BN[9].sum() == 3


def test_rows_that_share_a_text_are_held_out_together(tmp_path: Path) -> None:
    rows = [{"anchor": f"question {n}", "positive": f"Answer {n // 4}!"} for n in range(80)]
    found = load(tmp_path, rows)
    sides = [{each.texts[1] for each in split.records} for split in (found.train, found.held_out)]
    assert not sides[0] & sides[1] and len(found.held_out) == 16


def test_labelled_rows_get_another_text_of_their_class_in_each_epoch(tmp_path: Path) -> None:
    names = ("cat", "dog", "cow")
    rows = [{"text": f"{names[n % 3]} {n // 3 % 9}", "label": names[n % 3]} for n in range(60)]
    train = load(tmp_path, rows).train
    drawn = np.stack([train.seen(epoch=epoch, step=0).positive_N for epoch in range(40)])
    assert np.array_equal(drawn[3], train.seen(epoch=3, step=9).positive_N), "a function of the epoch alone"
    assert train.seen(epoch=3, step=9) is train.seen(epoch=3, step=10), "drawn once in a pass"
    class_of = {unit: label for unit, label in zip(train.anchor_N, train.class_N, strict=True)}
    for row in range(len(train)):
        others = {unit for unit, label in class_of.items() if label == train.class_N[row]} - {train.anchor_N[row]}
        assert set(drawn[:, row]) == others, "each of the others, and never itself"
    texts = train.texts(np.arange(len(train)))
    same = train.class_N[:, None] == train.class_N
    assert np.array_equal(train.known(texts.anchor_B, texts.positive_B), same)


def test_a_class_with_one_text_is_left_out_and_told(tmp_path: Path) -> None:
    rows = [{"text": f"{name} {n}", "label": name} for n in range(10) for name in ("cat", "dog")]
    found = load(tmp_path, [*rows, {"text": "a fox", "label": "fox"}])
    assert "1 rows whose class has no other text" in found.train.skipped
    assert {record.label for record in found.train.records} == {"cat", "dog"}


def test_a_text_with_two_labels_is_left_out_and_told(tmp_path: Path) -> None:
    """Also where it differs by case: it would be a negative of itself, and the last label would be its class."""
    rows = [{"text": f"{name} {n}", "label": name} for n in range(10) for name in ("cat", "dog")]
    found = load(tmp_path, [*rows, {"text": "Cat 3", "label": "dog"}, {"text": "cat 4", "label": "cat"}])
    texts = [record.texts[0] for split in (found.train, found.held_out) for record in split.records]
    assert "cat 3" not in texts and "Cat 3" not in texts and texts.count("cat 4") == 2 and len(texts) == 20
    assert [each.partition(" (")[0] for each in found.train.skipped] == [
        "2 rows whose text has several labels, the first rows.jsonl, row 7"
    ]
    assert "(`cat`, `dog`)" in found.train.skipped[0]


def test_a_class_of_two_texts_is_not_split(tmp_path: Path) -> None:
    rows = [{"text": f"{name} {n}", "label": name} for n in range(10) for name in ("cat", "dog")]
    found = load(tmp_path, [*rows, {"text": "a fox", "label": "fox"}, {"text": "the fox", "label": "fox"}])
    assert {record.label for record in found.held_out.records} == {"cat", "dog"} and not found.train.skipped
    assert sum(record.label == "fox" for record in found.train.records) == 2


def test_a_batch_of_one_row_has_mined_negatives(tmp_path: Path) -> None:
    rows = [{"anchor": f"question {n}", "positive": f"answer {n}"} for n in range(20)]
    assert len(load(tmp_path, rows, batch=1, mine=1).train) == 16
    with pytest.raises(ConfigError, match="there is none"):
        load(tmp_path, rows, batch=1)


def test_a_subset_has_its_own_texts_alone(tmp_path: Path) -> None:
    train = load(tmp_path, pairs(20)).train
    part = train.subset(np.arange(4))
    texts, of_whole = part.texts(np.arange(4)), train.texts(np.arange(4))
    assert list(part.units.texts) == [train.units.texts[unit] for unit in of_whole.every]
    assert [part.units.texts[unit] for unit in texts.passages] == [train.units.texts[u] for u in of_whole.passages]
    assert np.array_equal(part.known(texts.anchor_B, texts.positive_B), np.eye(4, dtype=bool))


@pytest.mark.parametrize("size", [3, 16])
def test_a_batch_holds_each_text_once(tmp_path: Path, size: int) -> None:
    train = load(tmp_path, pairs(20)).train
    batch = train.batch(np.arange(size))
    texts = train.texts(np.arange(size))
    assert batch.rows_B is not None and batch.rows_B.tolist() == sorted({*texts.anchor_B, *texts.passages})
    assert batch.tokens == int(batch.inputs["attention_mask"].sum())
    assert [int(batch.inputs["input_ids"].flatten()[at]) for at in batch.positions_N] == [
        int(train.units.tokens[unit][-1]) for unit in batch.rows_B
    ]
