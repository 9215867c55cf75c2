"""Long documents of raw text become consecutive blocks, of which each token is learnt once and none is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from typer.testing import CliRunner

from tests.conftest import MINILM, STORIES
from tests.run_files import write_lines
from workbench.cli.verbs import app
from workbench.config import DataConfig
from workbench.data.text import tokenized
from workbench.data.text.chat import Block, ChatEncoder, Encoded, blocks
from workbench.data.text.row_encoder import RowEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache for each test."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


@given(
    length=st.integers(2, 120),
    most=st.integers(8, 40),
    share=st.floats(0, 0.5),
    bos=st.booleans(),
    kept=st.integers(0, 1),
)
def test_blocks_hold_every_token_in_order_and_teach_each_once(
    length: int, most: int, share: float, bos: bool, kept: int
) -> None:
    overlap = int(share * most)
    ids = [1] * bos + list(range(10, 10 + length)) + [2] * kept
    body = [True] * (length - 1) + [False]
    document = Encoded(ids, [False] * bos + body + [False] * kept, (len(ids) - 1,) * (1 - kept), bos, kept)
    found = blocks(document, max_tokens=most, overlap=overlap)
    own = [block.encoded.input_ids[bos : len(block.encoded.input_ids) - kept] for block in found]
    assert all(each.encoded.input_ids == [1] * bos + part + [2] * kept for each, part in zip(found, own, strict=True))
    assert all(len(each.encoded.input_ids) == len(each.encoded.supervised) <= most for each in found)
    # What each block adds to the ones before it is the document, and that alone is learnt.
    added = [
        part[-(new.tokens - (bos + kept) * (n == 0)) :] for n, (new, part) in enumerate(zip(found, own, strict=True))
    ]
    assert list(chain(*added)) == list(range(10, 10 + length))
    assert sum(each.tokens for each in found) == len(ids)
    learnt = [token for each in found for token, loss in zip(*_of(each), strict=True) if loss]
    assert learnt == list(range(10, 9 + length))
    assert [each.encoded.end_positions for each in found[:-1]] == [()] * (len(found) - 1)
    for before, after in pairwise(own):
        shared = before[-overlap:] if overlap else []
        assert after[: len(shared)] == shared or (after is own[-1] and len(after) == 2 and after[0] == before[-1])
    assert all(len(part) > 1 or bos for part in own), "a token needs one to be predicted from"


def _of(block: Block) -> tuple[Sequence[int], Sequence[bool]]:
    return block.encoded.input_ids, block.encoded.supervised


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(STORIES))
    return found


def _read(
    rows: list[dict[str, Any]],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    template: RowEncoder | None = None,
    **settings: Any,
) -> TokenizedSet:
    path = write_lines(folder / "docs.jsonl", rows)
    config = DataConfig.model_validate({"train": str(path), "max_tokens": 32, **settings})
    return tokenized.read(str(path), config, tokenizer, template or ChatEncoder(tokenizer))


def _documents(count: int = 6) -> list[dict[str, Any]]:
    return [{"text": " ".join(f"word{n} and story{n * at}" for at in range(4 + 40 * (n % 3)))} for n in range(count)]


def _own(rows: TokenizedSet) -> dict[str, list[int]]:
    """The tokens of each document, from its rows."""
    found: dict[str, list[int]] = {}
    for number, place in enumerate(rows.places()):
        found.setdefault(tokenized.example_of(place), []).extend(rows[number].input_ids.tolist())
    return found


def test_all_tokens_of_raw_text_are_used(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    whole, train = _read(_documents(), tmp_path, tokenizer, max_tokens=4096), _read(_documents(), tmp_path, tokenizer)
    assert train.lengths.max() == 32 and train.truncated == 0
    first, total = tokenizer.bos_token_id, f"{int(whole.lengths.sum()):,}"
    for place, ids in _own(whole).items():
        assert [each for each in _own(train)[place] if each != first] == ids[ids[0] == first :]
    assert train.use_in_words() == [
        f"Long documents: 6, in {len(train):,} blocks.",
        f"{total} of {total} tokens are used (all).",
    ]


@pytest.mark.slow
def test_a_stage_of_pretraining_uses_all_of_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-Factory's `stage: pt` over two long documents, as it is imported and checked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    text = " ".join(f"word{number} story" for number in range(1000))
    (tmp_path / "data/doc.json").write_text(json.dumps([{"text": f"{text} {end}"} for end in ("one", "two")]))
    (tmp_path / "data/dataset_info.json").write_text(
        json.dumps({"doc": {"file_name": "doc.json", "columns": {"prompt": "text"}}})
    )
    (tmp_path / "pt.yaml").write_text(
        "model_name_or_path: starter\nstage: pt\ndo_train: true\nfinetuning_type: lora\nlora_target: all\n"
        "dataset: doc\ncutoff_len: 512\nval_size: 0.4\n"
    )
    assert CliRunner().invoke(app, ["import", "pt.yaml", "--out", "o.yaml"]).exit_code == 0
    shown = CliRunner().invoke(app, ["check", "o.yaml"]).output
    for split in ("train", "held-out"):
        found = re.search(rf"{split}: Long documents: 1, in (\d+) blocks. ([\d,]+) of ([\d,]+) tokens are used", shown)
        assert found is not None and int(found[1]) > 5 and found[2] == found[3], shown


def test_a_document_stands_on_one_side(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_lines(tmp_path / "docs.jsonl", _documents())
    config = DataConfig(train=str(path), max_tokens=32, held_out=0.4)
    data = tokenized.load(config, tokenizer, seed=1)
    assert len({*_own(data.train)}) + len({*_own(data.held_out)}) == 6
    assert not {*_own(data.train)} & {*_own(data.held_out)}
    with pytest.raises(DataError, match=r"1 distinct row.* too few to hold out"):
        tokenized.load(config.model_copy(update={"limit": 1}), tokenizer, seed=1)


def test_a_document_that_fits_stays_one_row(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    train = _read(_documents(), tmp_path, tokenizer, max_tokens=4096)
    assert not any("block" in place for place in train.places()) and train.use_in_words() == []


@pytest.mark.parametrize("overlap", [1, 8, 16])
def test_overlap_is_context_without_loss(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, overlap: int) -> None:
    plain = _read(_documents(), tmp_path, tokenizer)
    train = _read(_documents(), tmp_path, tokenizer, document_overlap=overlap)
    assert len(train) > len(plain) and train.use_in_words()[1] == plain.use_in_words()[1]
    bos = int(train[0].input_ids[0] == tokenizer.bos_token_id)
    (second,) = (
        n
        for n, place in enumerate(train.places())
        if ", block 2 of" in place and place.startswith("docs.jsonl, row 3,")
    )
    assert train[second].input_ids[bos : bos + overlap].tolist() == train[second - 1].input_ids[-overlap:].tolist()
    assert not train[second].supervised[: bos + overlap].any() and train[second].supervised[bos + overlap :].all()


def test_answers_are_cut_and_said_to_be(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A prompt with its completion is no document: it is cut as before, and its share is told."""
    rows = [{"prompt": "Once " * 60 + str(n), "completion": " upon."} for n in range(5)]
    train = _read(rows, tmp_path, tokenizer)
    assert len(train) == train.truncated == 5 and train.lengths.tolist() == [32] * 5
    (sentence,) = train.use_in_words()
    assert sentence.startswith("160 of ") and sentence.endswith("%).")


def test_masked_documents_keep_their_special_tokens(tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(MINILM))
    encoder = MlmEncoder(tokenizer, share=0.15, seed=0)
    train = _read(_documents(), tmp_path, tokenizer, encoder, document_overlap=4)
    ends = {(int(train[n].input_ids[0]), int(train[n].input_ids[-1])) for n in range(len(train))}
    assert ends == {(tokenizer.cls_token_id, tokenizer.sep_token_id)} and train.truncated == 0
    assert any(", block 2 of" in place for place in train.places())
    seen = [encoder.seen(train[n], epoch=0) for n in range(len(train)) if train.lengths[n] == 32]
    hidden = {tuple(np.flatnonzero(row.supervised)) for row in seen}
    assert len(hidden) > len(seen) // 2, "blocks of a document have masks of their own"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"document_overlap": 17},
            "17, more than half of max_tokens=32.*document_overlap=16 or less",
        ),
        ({"document_overlap": -1}, "document_overlap"),
    ],
)
def test_overlap_leaves_room(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataConfig.model_validate({"train": "-", "max_tokens": 32, **settings})
