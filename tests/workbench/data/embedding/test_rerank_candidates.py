"""Candidates of a query: its own passage, given ones, and others that are not known to belong to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import MINILM
from tests.run_files import write_lines
from workbench.config import ModelConfig, RunConfig
from workbench.data.embedding import rerank_candidates
from workbench.data.embedding.rerank_candidates import CandidateSet
from workbench.errors import DataError
from workbench.models import backbones

ROWS = [
    {"anchor": f"who is {n // 2}?", "positive": f"this is {n}", "negatives": [f"not {n}", f"nor {n}"]}
    for n in range(12)
]


def made(tmp_path: Path, rows: list[dict[str, Any]] = ROWS, *, max_tokens: int = 64, **rerank: Any) -> CandidateSet:
    """Rows as training reads them; a file of its own is held out."""
    other = [{"anchor": "a b", "positive": "c", "negatives": list("defgh")}]
    for name, own in {"train": rows, "other": other}.items():
        write_lines(tmp_path / f"{name}.jsonl", own)
    values = {
        "recipe": "rerank",
        "data": {"train": f"{tmp_path}/train.jsonl", "held_out": f"{tmp_path}/other.jsonl", "max_tokens": max_tokens},
        "rerank": rerank,
    }
    tokenizer = backbones.tokenizer(ModelConfig(id=MINILM))
    return rerank_candidates.load(RunConfig.model_validate(values), tokenizer).train


def texts(rows: CandidateSet) -> list[list[str]]:
    return [[rows.pairs.units.texts[unit] for unit in row] for row in rows.passage_NC]


def test_candidates_are_the_positive_given_negatives_and_others_that_nobody_knows(tmp_path: Path) -> None:
    rows = made(tmp_path, negatives=5)
    for number, (positive, *negatives) in enumerate(texts(rows)):
        assert positive == f"this is {number}" and {f"not {number}", f"nor {number}"} < set(negatives)
        assert len({positive, *negatives}) == 6, "each once"
        other = f"this is {number ^ 1}"
        assert other not in negatives, "another row says that it belongs to the same query"


def test_fewer_are_drawn_from_the_given_ones_alone(tmp_path: Path) -> None:
    rows = made(tmp_path, negatives=1)
    assert all(negative[-len(f" {n}") :] == f" {n}" for n, (_, negative) in enumerate(texts(rows)))
    seen = {texts(rows.seen(epoch=epoch, step=0))[0][1] for epoch in range(8)}
    assert seen == {"not 0", "nor 0"}, "another one in another pass"


def test_a_pass_draws_anew_and_always_the_same(tmp_path: Path) -> None:
    rows, again = (made(tmp_path, negatives=5) for _ in range(2))
    first, second = (rows.seen(epoch=epoch, step=9 * epoch) for epoch in (0, 1))
    assert first is rows and rows.seen(epoch=1, step=3) is second
    np.testing.assert_array_equal(again.seen(epoch=1, step=0).passage_NC, second.passage_NC)
    assert (second.passage_NC != first.passage_NC).any()
    some = second.subset(np.asarray([7, 2]))
    np.testing.assert_array_equal(some.passage_NC, second.passage_NC[[7, 2]])
    assert some.place(0) == second.place(7) and some.seen(epoch=5, step=0) is some


def test_a_batch_holds_the_pairs_as_the_tokenizer_joins_them(tmp_path: Path) -> None:
    rows = made(tmp_path, negatives=3)
    batch, tokenizer = rows.batch(np.asarray([4, 1])), rows.joins.tokenizer
    assert batch.sequences == 4 and batch.inputs["input_ids"].shape[0] == 8
    ask = ["who is 2?"] * 4 + ["who is 0?"] * 4
    wanted = tokenizer(ask, texts(rows)[4] + texts(rows)[1])
    for number, (ids, types) in enumerate(zip(wanted["input_ids"], wanted["token_type_ids"], strict=True)):
        assert batch.inputs["input_ids"][number, : len(ids)].tolist() == ids
        assert batch.inputs["token_type_ids"][number, : len(ids)].tolist() == types and 1 in types
        assert batch.inputs["attention_mask"][number].sum() == len(ids)
    last = batch.inputs["input_ids"].flatten()[batch.positions_N]
    assert set(last.tolist()) == {tokenizer.sep_token_id}
    lengths = np.asarray([len(ids) for ids in wanted["input_ids"]])
    np.testing.assert_array_equal(lengths.reshape(2, 4).sum(1), rows.lengths[[4, 1]])
    np.testing.assert_array_equal(batch.row_tokens, lengths)
    np.testing.assert_array_equal(rows.sequence_lengths[[4, 1]].ravel(), lengths)
    assert batch.tokens == lengths.sum()


def test_the_passage_is_cut_and_never_the_query(tmp_path: Path) -> None:
    long = [{**row, "positive": f"{row['positive']} " + "word " * 80} for row in ROWS]
    rows = made(tmp_path, long, negatives=1, max_tokens=24)
    ids = rows.batch(np.arange(3)).inputs["input_ids"]
    assert ids.shape[1] == 24 and rows.longest_sequences.max() == 24
    decoded = rows.joins.tokenizer.decode(ids[0])
    assert decoded.startswith("[CLS] who is 0? [SEP] this is 0 word") and decoded.endswith("word [SEP]")
    assert rows.truncated == len(long)


def test_a_query_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    long = [*ROWS, {"anchor": "why " * 30, "positive": "so"}]
    with pytest.raises(DataError, match=r"has 30 tokens, which data\.max_tokens=32 .* data\.max_tokens=41 or more"):
        made(tmp_path, long, max_tokens=32)


def test_a_ranking_holds_what_belongs_what_is_given_and_others(tmp_path: Path) -> None:
    rows = made(tmp_path, negatives=2)
    order = rerank_candidates.ranking(rows, candidates=9)
    assert len(order.row_Q) == 6, "queries, each of two rows"
    for row, passages, relevant in zip(order.row_Q, order.passages, order.relevant, strict=True):
        named = [rows.pairs.units.texts[unit] for unit in passages]
        number = int(row) // 2
        assert len(named) == len(set(named)) == 9
        assert {text for text, own in zip(named, relevant, strict=True) if own} == {
            f"this is {2 * number}",
            f"this is {2 * number + 1}",
        }
        assert {f"not {2 * number}", f"nor {2 * number + 1}"} < set(named)
    small = rerank_candidates.ranking(rows, candidates=2)
    assert all(len(each) == 6 for each in small.passages), "what is given is ranked, however many are asked for"
