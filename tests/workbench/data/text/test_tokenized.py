"""A tokenised set is what its bytes and settings say: cached by both, split without leaks, written whole or not."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.run_files import read_lines, write_lines
from workbench.config import DataConfig
from workbench.data import ordered_processes
from workbench.data.text import formats, tokenized
from workbench.data.text.chat import DEFAULT_TEMPLATE, ChatEncoder, LossOn
from workbench.data.text.tokenized import hold_out
from workbench.data.text.tokenized_set import TokenizedSet, TokenTable
from workbench.errors import DataError
from workbench.runs import files

Read = Callable[..., TokenizedSet]


@pytest.fixture
def tokenizer(stories: str) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories)
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was really read and tokenised, rather than found in the cache."""
    found: list[str] = []
    original = formats.read

    def counted(source: str, *arguments: Any, **settings: Any) -> Iterator[formats.Example]:
        found.append(source)
        return original(source, *arguments, **settings)

    monkeypatch.setattr(formats, "read", counted)
    return found


def _read(
    source: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    limit: int | None = None,
    **data: Any,
) -> TokenizedSet:
    config = DataConfig.model_validate({"train": str(source), **data})
    return tokenized.read(str(source), config, tokenizer, ChatEncoder(tokenizer, template), limit=limit)


def test_rows_are_what_the_template_makes_of_them(questions: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = _read(questions, tokenizer)
    template = ChatEncoder(tokenizer)
    examples = list(formats.read(str(questions), DataConfig(train=str(questions)), skipped=[]))
    assert len(found) == len(examples) == 120 and found.chat
    for number in (0, 7, 119):
        wanted = template.encode(examples[number], loss_on="assistant")
        row = found[number]
        assert row.input_ids.tolist() == wanted.input_ids and row.supervised.tolist() == wanted.supervised
        assert found.place(number) == f"questions.jsonl, row {number + 1}"
        assert found.lengths[number] == len(wanted.input_ids)
        assert found.supervised[number] == sum(wanted.supervised[1:]) and found.ends[number] == 1
    facts = found.facts()
    assert (facts["rows"], facts["skipped"], facts["chat"], sum(facts["counts"])) == (120, 0, True, 120)
    assert facts["tokens"] == found.lengths.sum() and facts["supervised_tokens"] == found.supervised.sum()


def test_the_same_bytes_and_settings_are_read_once(
    questions: Path, tokenizer: PreTrainedTokenizerBase, reads: list[str], tmp_path: Path
) -> None:
    first = _read(questions, tokenizer)
    elsewhere = tmp_path / "elsewhere" / questions.name
    elsewhere.parent.mkdir()
    shutil.copy(questions, elsewhere)
    # What does not touch the tokens is no reason to make them again.
    for again in (
        _read(questions, tokenizer),
        _read(elsewhere, tokenizer),
        _read(questions, tokenizer, held_out=0.3, overlap="drop", test="x.jsonl"),
    ):
        assert (
            len(again) == len(first)
            and (again.digests == first.digests).all()
            and again.fingerprint == first.fingerprint
        )
    assert reads == [str(questions)]


@pytest.mark.parametrize(
    "changed",
    [
        {"template": "{{ bos_token }}" + DEFAULT_TEMPLATE.replace("Assistant", "Bot")},
        {"max_tokens": 30},
        {"truncate": "right"},
        {"loss_on": "all"},
        {"on_bad_row": "skip"},
        {"format": "question_answer"},
        {"columns": {"answer": "question", "question": "answer"}},
        {"limit": 50},
    ],
    ids=lambda changed: " ".join(changed),
)
def test_other_settings_are_read_anew(
    questions: Path, tokenizer: PreTrainedTokenizerBase, reads: list[str], changed: dict[str, Any]
) -> None:
    _read(questions, tokenizer)
    _read(questions, tokenizer, **changed)
    assert len(reads) == 2
    _read(questions, tokenizer, **changed)
    assert len(reads) == 2


def test_other_bytes_another_name_and_another_vocabulary_are_read_anew(
    questions: Path, tokenizer: PreTrainedTokenizerBase, reads: list[str]
) -> None:
    before = _read(questions, tokenizer)
    text = questions.read_text()
    questions.write_text(text.replace("comes", "comEs", 1))
    assert _read(questions, tokenizer).fingerprint != before.fingerprint
    renamed = questions.rename(questions.with_name("renamed.jsonl"))
    before = _read(renamed, tokenizer)
    assert before.place(0) == "renamed.jsonl, row 1"
    tokenizer.add_tokens(["comes"], special_tokens=True)
    assert 512 in _read(renamed, tokenizer)[1].input_ids and 512 not in before[1].input_ids
    assert len(reads) == 4


def test_another_end_of_sequence_is_read_anew(
    questions: Path, tokenizer: PreTrainedTokenizerBase, reads: list[str]
) -> None:
    """Which token is eos stands beside the vocabulary, not in it."""
    before = _read(questions, tokenizer)[0].input_ids
    tokenizer.eos_token = "<unk>"
    after = _read(questions, tokenizer)[0].input_ids
    assert np.array_equal(after, np.where(before == 2, 0, before)) and 2 in before
    assert len(reads) == 2


def test_a_writer_that_ends_early_leaves_nothing(
    questions: Path, tokenizer: PreTrainedTokenizerBase, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = formats.read

    def interrupted(*arguments: Any, **settings: Any) -> Iterator[formats.Example]:
        for number, example in enumerate(original(*arguments, **settings)):
            # Were the process killed here, nothing in the cache would be taken for a tokenised set.
            assert not list(cache.glob("*.arrow")) and not list(cache.glob("*.json"))
            if number == 60:
                raise KeyboardInterrupt
            yield example

    with monkeypatch.context() as patch:
        patch.setattr(formats, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _read(questions, tokenizer)
    assert list(cache.iterdir()) == []
    assert len(_read(questions, tokenizer)) == 120


def test_a_set_without_its_notes_is_written_again(
    questions: Path, tokenizer: PreTrainedTokenizerBase, cache: Path, reads: list[str]
) -> None:
    """A process killed between the two files leaves the first one alone."""
    _read(questions, tokenizer)
    (notes,) = cache.glob("*.json")
    notes.unlink()
    (arrow,) = cache.glob("*.arrow")
    arrow.write_bytes(b"half")
    assert len(_read(questions, tokenizer)) == 120 and len(reads) == 2


@pytest.mark.parametrize(
    "processes", [pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.slow)]
)
def test_any_number_of_processes_writes_the_same_bytes(
    questions: Path, tokenizer: PreTrainedTokenizerBase, cache: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    lines = questions.read_text().splitlines()
    for row in (5, 61, 62, 110):
        lines[row] = '{"question": "What?", "answer": null}'
    questions.write_text("\n".join([*lines, *lines]) + "\n")
    monkeypatch.setattr(tokenized, "ROWS", 16)
    monkeypatch.setattr(ordered_processes, "OWN", 2)
    written = []
    for count in (1, processes):
        monkeypatch.setenv("WORKBENCH_PROCESSES", str(count))
        found = _read(questions, tokenizer, on_bad_row="skip", max_tokens=40)
        arrow, notes = *cache.glob("*.arrow"), *cache.glob("*.json")
        written.append((arrow.name, arrow.read_bytes(), notes.read_bytes()))
        assert len(found) == 232 and len(found.skipped) == 8
        shutil.rmtree(cache)
    assert written[0] == written[1]


@pytest.mark.slow
def test_the_first_bad_row_is_refused_whatever_the_processes(
    questions: Path, tokenizer: PreTrainedTokenizerBase, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that the template refuses stands before one that is malformed, and before another such row."""
    lines = read_lines(questions)
    lines[50]["answer"] = lines[80]["answer"] = "left out"
    lines[60]["answer"] = None
    write_lines(questions, lines)
    loop = "{%- for message in messages %}"
    refused = "{%- if message.content == 'left out' %}{{ raise_exception('too short') }}{%- endif %}"
    template = DEFAULT_TEMPLATE.replace(loop, loop + refused)
    monkeypatch.setattr(tokenized, "ROWS", 16)
    monkeypatch.setattr(ordered_processes, "OWN", 1)
    for count in (1, 2):
        monkeypatch.setenv("WORKBENCH_PROCESSES", str(count))
        with pytest.raises(DataError, match=r"questions\.jsonl, row 51: .* too short"):
            _read(questions, tokenizer, template)
        assert list(cache.iterdir()) == []


def test_batches_of_rows_are_encoded_as_single_rows_are(questions: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = DataConfig(train=str(questions))
    chats = list(formats.read(str(questions), config, skipped=[]))
    texts = [
        formats.Example("a", text=((f"Once {n}", n % 2 == 0), (" upon a time", True))[: 1 + n % 2]) for n in range(9)
    ]
    examples = [example for pair in zip(chats, texts, strict=False) for example in pair]
    template = ChatEncoder(tokenizer)
    for loss_on in get_args(LossOn):
        single = [ChatEncoder(tokenizer).encode(example, loss_on=loss_on) for example in examples]
        assert template.encode_many(examples, loss_on=loss_on) == single
        assert pickle.loads(pickle.dumps(template)).encode_many(examples, loss_on=loss_on) == single
    assert template.encode_many([], loss_on="all") == []


def test_what_was_left_out_is_remembered(questions: Path, tokenizer: PreTrainedTokenizerBase, reads: list[str]) -> None:
    with questions.open("a") as file:
        file.write('{"question": "What?", "answer": null}\n')
    for _ in range(2):
        found = _read(questions, tokenizer, on_bad_row="skip")
        assert len(found) == 120 and found.facts()["skipped"] == 1
        assert found.skipped == ["questions.jsonl, row 121: `answer` is missing or null."]
    assert len(reads) == 1


def test_truncation_is_counted(questions: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    whole = _read(questions, tokenizer)
    limit = int(np.median(whole.lengths))
    cut = _read(questions, tokenizer, max_tokens=limit)
    assert cut.truncated == int((whole.lengths > limit).sum()) and cut.lengths.max() == limit
    assert (cut.ends == 1).all(), "cutting on the left keeps the end of the answer"


def _tokens(values: list[int]) -> TokenizedSet:
    """A set whose rows are equal where the values are."""
    columns = {"digest": np.array(values, dtype=np.uint64), "picture_count": np.zeros(len(values), np.int32)}
    table = TokenTable(pyarrow.table(columns))
    return TokenizedSet(table, np.arange(len(values)), "rows.jsonl", "0" * 64)


@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 2**31 - 1),
)
def test_holding_out_keeps_duplicates_on_one_side(values: list[int], share: float, seed: int) -> None:
    whole = _tokens(values)
    try:
        train, held_out = hold_out(whole, share=share, seed=seed)
    except DataError:
        biggest = max(values.count(value) for value in values)
        assert len(values) - biggest < max(1, round(share * len(values))), "there was something left to train on"
        return
    assert not np.isin(train.digests, held_out.digests).any()
    assert sorted([*train.rows, *held_out.rows]) == list(range(len(values)))
    wanted = max(1, round(share * len(values)))
    biggest = max(values.count(int(value)) for value in held_out.digests)
    assert wanted <= len(held_out) < wanted + biggest
    again = hold_out(whole, share=share, seed=seed)[1]
    assert np.array_equal(again.rows, held_out.rows)


def test_the_seed_decides_what_is_held_out() -> None:
    sides = {tuple(hold_out(_tokens(list(range(50))), share=0.2, seed=seed)[1].rows) for seed in range(5)}
    assert len(sides) == 5 and all(len(side) == 10 for side in sides)


@pytest.mark.parametrize("overlap", ["refuse", "drop"])
def test_rows_that_stand_in_both_files(
    questions: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, overlap: str
) -> None:
    other = tmp_path / "other.jsonl"
    lines = questions.read_text().splitlines(keepends=True)
    other.write_text(lines[5] + json.dumps({"question": "New?", "answer": "Yes."}) + "\n")
    config = DataConfig.model_validate({"train": str(questions), "held_out": str(other), "overlap": overlap})
    if overlap == "refuse":
        with pytest.raises(DataError, match=r"questions.jsonl, row 6 equals other.jsonl, row 1"):
            tokenized.load(config, tokenizer, ChatEncoder(tokenizer), seed=0)
        return
    splits = tokenized.load(config, tokenizer, ChatEncoder(tokenizer), seed=0)
    assert (len(splits.train), len(splits.held_out), splits.test) == (119, 2, None)
    assert not np.isin(splits.train.digests, splits.held_out.digests).any()
    other.write_text("".join(lines))
    with pytest.raises(DataError, match="nothing is left to train on"):
        tokenized.load(config, tokenizer, ChatEncoder(tokenizer), seed=0)


def test_places_are_in_the_order_of_the_rows(questions: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = _read(questions, tokenizer).subset(np.array([0, 3, 4, 119]))
    assert list(found.places()) == [found.place(number) for number in range(4)]
    assert next(found.places()) == "questions.jsonl, row 1"


def test_raw_text_is_known_as_such(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time.\nThere was a cat.\n")
    found = _read(path, tokenizer)
    assert not found.chat and not found.facts()["chat"] and (found.ends == 1).all()


def test_the_cache_stands_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert files.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("WORKBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_folder() == tmp_path / "xdg" / "peft-workbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder() == Path("~/.cache/peft-workbench").expanduser()


def test_rows_in_memory_are_those_of_a_file(questions: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = read_lines(questions)
    found, wanted = tokenized.encode(rows, tokenizer), _read(questions, tokenizer)
    for column in ("input_ids", "supervised", "digest", "weight"):
        assert found.table.data.column(column).to_pylist() == wanted.table.data.column(column).to_pylist()
    assert list(found.places())[:2] == ["row 1", "row 2"]
    assert found.fingerprint == tokenized.encode(rows, tokenizer).fingerprint != tokenized.encode(rows[1:], tokenizer)
    with pytest.raises(DataError, match=r"row 2: .*answer"):
        tokenized.encode([rows[0], {"question": "What?", "answer": ""}], tokenizer)
    weighed = DataConfig(train="rows", columns={"weight": "often"})
    found = tokenized.encode(
        [{**row, "often": 1 + number} for number, row in enumerate(rows)], tokenizer, config=weighed
    )
    assert list(found.weights[:3]) == [1, 2, 3]
