"""Masks are a function of (seed, epoch, row) alone, in the shares of BERT, and the labels are what was there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.conftest import MINILM, STORIES
from tests.run_files import write_lines
from workbench.config import DataConfig
from workbench.data.batching import Row
from workbench.data.text import tokenized
from workbench.data.text.formats import Example
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet, join_sets
from workbench.errors import BackboneError, DataError

TOKENIZER: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MINILM)
CLS, SEP, MASK = 101, 102, 103
masking = MlmEncoder(TOKENIZER, share=0.15, seed=0)


def _row(size: int, digest: int = 0) -> Row:
    ids = np.asarray([CLS, *range(2000, 2000 + size), SEP])
    return Row(ids, (ids != CLS) & (ids != SEP), 0, digest)


@given(st.integers(1, 400), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_a_fixed_share_of_the_words_is_predicted(size: int, digest: int, epoch: int) -> None:
    row = _row(size, digest)
    seen = masking.seen(row, epoch=epoch)
    assert seen.supervised.sum() == max(1, round(0.15 * size))
    assert not seen.supervised[[0, -1]].any(), "special tokens are not predicted"
    assert np.array_equal(seen.input_ids[~seen.supervised], row.input_ids[~seen.supervised])
    again = masking.seen(row, epoch=epoch)
    assert np.array_equal(again.input_ids, seen.input_ids) and np.array_equal(again.supervised, seen.supervised)


def test_rows_epochs_and_seeds_have_masks_of_their_own() -> None:
    other = MlmEncoder(TOKENIZER, share=0.15, seed=1)
    masks = {
        tuple(each.seen(_row(200, number), epoch=epoch).supervised)
        for each in (masking, other)
        for number in range(5)
        for epoch in range(5)
    }
    assert len(masks) == 50


def test_a_row_has_its_masks_wherever_it_stands(tmp_path: Path) -> None:
    """In another order, behind other rows, in a set of its own or joined with others."""
    texts = [f"Once upon a time there were {n} cats, who sat on a mat and told each other stories." for n in range(6)]

    def read(name: str, *numbers: int) -> TokenizedSet:
        path = tmp_path / f"{name}.jsonl"
        write_lines(path, ({"text": texts[n]} for n in numbers))
        return tokenized.read(str(path), DataConfig(train=str(path)), TOKENIZER, masking)

    def masks(rows: TokenizedSet, epoch: int) -> dict[str, str]:
        seen = [(rows[n], masking.seen(rows[n], epoch=epoch)) for n in range(len(rows))]
        return {TOKENIZER.decode(row.input_ids): TOKENIZER.decode(each.input_ids) for row, each in seen}

    whole, first, last = read("whole", *range(6)), read("first", 4, 1), read("last", 5, 0, 3, 2)
    for epoch in (0, 3):
        known = masks(whole, epoch)
        assert masks(first, epoch) | masks(last, epoch) == known and len(set(known.values())) == 6
        assert masks(join_sets({"last": last, "first": first}), epoch) == known
    assert masks(whole, 0) != masks(whole, 3)


def test_eighty_ten_ten() -> None:
    """Of 60,000 predicted tokens: masked, another token, or left; three standard deviations of a binomial."""
    rows = [_row(400, number) for number in range(1000)]
    seen = [masking.seen(row, epoch=0) for row in rows]
    before = np.concatenate([row.input_ids[each.supervised] for row, each in zip(rows, seen, strict=True)])
    after = np.concatenate([each.input_ids[each.supervised] for each in seen])
    assert len(after) == 60_000
    assert (after == MASK).mean() == pytest.approx(0.8, abs=0.005)
    assert (after == before).mean() == pytest.approx(0.1, abs=0.004)
    others = after[(after != MASK) & (after != before)]
    assert not set(others) & set(TOKENIZER.all_special_ids) and len(set(others)) > 4000


def test_a_batch_predicts_what_was_there() -> None:
    rows = [_row(size, number) for number, size in enumerate((5, 40, 12))]
    batch = masking.collate(rows, epoch=3)
    seen = [masking.seen(row, epoch=3) for row in rows]
    wanted = [int(t) for row, each in zip(rows, seen, strict=True) for t in row.input_ids[each.supervised]]
    assert batch.labels_N.tolist() == wanted and batch.tokens == 7 + 42 + 14
    assert batch.inputs["input_ids"].shape == (3, 42)
    assert batch.inputs["attention_mask"].sum(1).tolist() == [7, 42, 14]
    shown = batch.inputs["input_ids"].flatten()[batch.positions_N]
    assert shown.tolist() == [int(t) for each in seen for t in each.input_ids[each.supervised]]
    alone = [masking.collate([row], epoch=3) for row in rows]
    assert torch.equal(torch.cat([each.labels_N for each in alone]), batch.labels_N)


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    texts = ["Once upon a time there was a cat.", "The end."]
    write_lines(path, ({"text": text} for text in texts))

    def read(**settings: object) -> TokenizedSet:
        config = DataConfig.model_validate({"train": str(path), **settings})
        return tokenized.read(str(path), config, TOKENIZER, masking)

    found = read()
    assert [found[number].input_ids.tolist() for number in (0, 1)] == [TOKENIZER(text)["input_ids"] for text in texts]
    assert found.supervised.tolist() == [1, 1] and not found.chat
    assert len(found.batch(np.asarray([0, 1])).labels_N) == found.supervised.sum()
    blocks = read(max_tokens=8)
    shown = [TOKENIZER.decode(blocks[number].input_ids) for number in range(2)]
    assert shown == ["[CLS] once upon a time there was [SEP]", "[CLS] a cat. [SEP]"], "what frames a text is kept"
    assert TOKENIZER.decode(read(max_tokens=8, truncate="right")[0].input_ids).startswith("[CLS] once upon a time")


def test_what_cannot_be_masked_is_refused() -> None:
    with pytest.raises(BackboneError, match=r"has no mask token.*Use an encoder"):
        MlmEncoder(AutoTokenizer.from_pretrained(STORIES), share=0.15, seed=0)
    chat = Example("row 3", messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
    with pytest.raises(DataError, match=r"row 3: is a conversation.*data.format=text data.columns="):
        masking.encode(chat, loss_on="assistant")
