"""Two tokenizers are compared where the same text stands before their tokens, and nowhere else."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.config.sections.distill_config import DistillConfig
from workbench.data import starter
from workbench.data.batching import Indices
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation.teachers import TeacherModel
from workbench.distillation.token_alignment import NOWHERE, Alignment, Reader, UniversalTeacher
from workbench.errors import ConfigError
from workbench.models import output_heads

CONFIG = DistillConfig(loss="universal")
ANSWERS = [
    "Once upon a time there was a cat.",
    "  Two spaces before, and\n\na blank line.",
    "She said “no” — naïve café, 日本の猫, and 😀😀 smiled.",
    "1234 5678, don't stop!",
    "日",
]


@pytest.fixture(scope="module")
def student(stories: str) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories)
    return found


@pytest.fixture(scope="module")
def teacher() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(starter.FOLDER)
    return found


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Questions with plain and strange answers, and those of a real set."""
    rows = [{"question": f"What is {n}?", "answer": answer} for n, answer in enumerate(ANSWERS)]
    with open(starter.FOLDER / "fairytaleqa_held_out.jsonl", encoding="utf-8") as file:
        real = [json.loads(next(file)) for _ in range(20)]
    rows += [{"question": row["question"], "answer": row["answer"]} for row in real]
    return _written(tmp_path / "rows.jsonl", [json.dumps(row) for row in rows])


def _written(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def _read(
    source: str, tokenizer: PreTrainedTokenizerBase, template: str | None = None, limit: int | None = None, **data: Any
) -> TokenizedSet:
    config = DataConfig.model_validate({"train": source, **data})
    return tokenized.read(source, config, tokenizer, ChatEncoder(tokenizer, template), limit=limit)


def _prefixes(rows: TokenizedSet, row: int, tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    """The text before each predicted token of a row with one turn, decoded from the turn's beginning.

    None inside of a character, and for white space before the text.
    """
    found = rows[row]
    ids = found.input_ids[found.supervised].tolist()
    texts = [tokenizer.decode(ids[:stop], skip_special_tokens=False).lstrip() for stop in range(len(ids) + 1)]
    return [None if before.endswith("\ufffd") or not after else before for before, after in pairwise(texts)]


def _expected(mine: list[str | None], theirs: list[str | None]) -> list[int]:
    """For each of `mine` the last of `theirs` that is equal."""
    return [
        max((n for n, other in enumerate(theirs) if other == text and text is not None), default=NOWHERE)
        for text in mine
    ]


def test_one_tokenizer_aligns_with_itself(source: str, student: PreTrainedTokenizerBase) -> None:
    rows = _read(source, student)
    found = Alignment(rows, rows, student, student)
    inside = 0
    for row in range(len(rows)):
        numbers = found.row(row)
        assert len(numbers) == rows.supervised[row]
        inside += int((numbers == NOWHERE).sum())
        assert ((numbers == np.arange(len(numbers))) | (numbers == NOWHERE)).all()
    # Of the bytes of a character that is no token, only the first starts at a point of the text.
    assert inside == sum(text is None for row in range(len(rows)) for text in _prefixes(rows, row, student)) > 0
    plain = Alignment(*[rows.subset(np.asarray([0, 3]))] * 2, student, student)
    assert plain.share == 1.0


@pytest.mark.parametrize("swapped", [False, True])
def test_pairs_have_the_same_text_before_them(
    source: str, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, swapped: bool
) -> None:
    one, other = (teacher, student) if swapped else (student, teacher)
    mine, theirs = _read(source, one), _read(source, other)
    found = Alignment(mine, theirs, one, other)
    pairs = total = 0
    for row in range(len(mine)):
        numbers, before = found.row(row), _prefixes(mine, row, one)
        assert numbers.tolist() == _expected(before, _prefixes(theirs, row, other))
        kept = numbers[numbers != NOWHERE]
        assert (np.diff(kept) > 0).all() and kept[0] >= 0
        assert numbers[-1] == theirs.supervised[row] - 1  # both end the turn after the same text
        pairs, total = pairs + len(kept), total + len(numbers)
    assert found.share == pairs / total > (0.6 if swapped else 0.2)


def test_an_alignment_by_hand(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    def spelled(tokenizer: PreTrainedTokenizerBase, *names: str) -> list[int]:
        return [tokenizer.convert_tokens_to_ids(name) for name in names]

    mine = spelled(student, "▁Once", "▁upon", "▁", "é", "<0xE6>", "<0x97>", "<0xA5>", ".", "</s>")
    theirs = spelled(teacher, "Ġ", "Once", "Ġup", "on", "Ġ", "Ã", "©", "æ", "Ĺ", "¥", ".", "<|endoftext|>")
    assert student.decode(mine[:-1]) == teacher.decode(theirs[:-1]).strip() == "Once upon é日."
    one, other = Reader(student).turn(mine), Reader(teacher).turn(theirs)
    assert one.starts.tolist() == [0, 4, 9, 10, 11, NOWHERE, NOWHERE, 12, 13]
    assert other.starts.tolist() == [NOWHERE, 0, 4, 7, 9, 10, NOWHERE, 11, NOWHERE, NOWHERE, 12, 13]


TEMPLATE = "{% for m in messages %}{{ '<|' + m.role + '|> ' + m.content + eos_token + '\\n' }}{% endfor %}"
GENERATION = "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"


def test_turns_are_aligned_one_by_one(
    tmp_path: Path, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase
) -> None:
    answers = ["A cat.", "It ran away.", "Once there was a big dog."]
    turns = [
        {"role": role, "content": text} for said in answers for role, text in (("user", "Hi"), ("assistant", said))
    ]
    source = _written(tmp_path / "talk.jsonl", [json.dumps({"messages": turns})])
    rows, whole = _read(source, student), _read(source, teacher, TEMPLATE + GENERATION)

    def heard(theirs: TokenizedSet) -> list[list[str]]:
        """What follows of a turn where the teacher is aligned, in its tokens."""
        row, numbers = theirs[0], Alignment(rows, theirs, student, teacher).row(0)
        ids = row.input_ids[1:][row.supervised[1:]]
        lengths = [len(turn.starts) for turn in Reader(student).turns(rows[0])]
        parts = np.split(numbers, np.cumsum(lengths)[:-1])
        return [[teacher.decode(ids[n]).strip() for n in part if n != NOWHERE] for part in parts]

    found = heard(whole)
    assert [turn[0] for turn in found] == ["A", "It", "Once"]
    assert [turn[-1] for turn in found] == ["<|endoftext|>"] * 3 and min(map(len, found)) >= 4
    # Without its first answer, the teacher has two turns, which are the student's last two.
    start = int(np.flatnonzero(whole[0].supervised)[0])
    assert heard(_read(source, teacher, TEMPLATE + GENERATION, loss_on="last")) == [[], [], found[2]]
    cut = _read(source, teacher, TEMPLATE + GENERATION, max_tokens=int(whole.lengths[0]) - start - 6, truncate="left")
    assert heard(cut) == [[], *found[1:]]


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_plain_text_is_aligned_from_its_first_character(
    tmp_path: Path, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, loss_on: str
) -> None:
    source = _written(tmp_path / "text.jsonl", ['{"text": "Once upon a time there was a cat."}'])
    # Only the student's tokenizer writes a beginning of the sequence, from which the first token is predicted.
    mine, theirs = _read(source, student, loss_on=loss_on), _read(source, teacher, loss_on=loss_on)
    assert mine.supervised[0] == mine.lengths[0] - 1 and theirs.supervised[0] == theirs.lengths[0] - 1
    numbers = Alignment(mine, theirs, student, teacher).row(0)
    ids, others = mine[0].input_ids[1:], theirs[0].input_ids[1:]
    pairs = [
        (student.convert_ids_to_tokens(int(ids[at])), teacher.convert_ids_to_tokens(int(others[number])))
        for at, number in enumerate(numbers)
        if number != NOWHERE
    ]
    assert numbers[0] == NOWHERE
    assert pairs[:3] == [("▁upon", "Ġupon"), ("▁a", "Ġa"), ("▁time", "Ġtime")] and pairs[-1][0] == "</s>"


class Pair:
    """A student and a teacher of other tokens, and rows as each reads them."""

    def __init__(self, source: str, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
        self.tokenizers = student, teacher
        self.train, self.teacher_train = _read(source, student), _read(source, teacher)
        self.student: PreTrainedModel = AutoModelForCausalLM.from_pretrained(student.name_or_path)
        self.teacher: PreTrainedModel = AutoModelForCausalLM.from_pretrained(teacher.name_or_path, dtype=torch.float32)
        self.head, self.teacher_head = (
            output_heads.find(self.student, self.student),
            output_heads.find(self.teacher, self.teacher),
        )

    def teaches(self, teacher_train: TokenizedSet | None = None) -> UniversalTeacher:
        return UniversalTeacher(
            TeacherModel(self.teacher, self.teacher_head, nullcontext),
            self.train,
            teacher_train or self.teacher_train,
            *self.tokenizers,
            device=torch.device("cpu"),
        )

    def logits(self, rows: Indices) -> Tensor:
        batch = self.train.batch(rows)
        return self.head.project(self.head.hidden(self.student, batch.inputs).flatten(0, 1)[batch.positions_N])


@pytest.fixture
def pair(source: str, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> Pair:
    return Pair(source, student, teacher)


def _predictions(model: PreTrainedModel, rows: TokenizedSet, row: int) -> Tensor:
    """Logits that predict each supervised token of one row, read alone."""
    ids = torch.from_numpy(rows[row].input_ids)[None]
    return model(input_ids=ids).logits[0, :-1][torch.from_numpy(rows[row].supervised[1:])]


@torch.no_grad()
def test_the_loss_is_the_distance_at_aligned_positions(pair: Pair) -> None:
    temperature, rows = 1.7, np.asarray([3, 0, 2, 11])
    wanted, count = 0.0, 0
    for row in map(int, rows):
        mine, theirs = _predictions(pair.student, pair.train, row), _predictions(pair.teacher, pair.teacher_train, row)
        texts = (
            _prefixes(each, row, tokenizer)
            for each, tokenizer in zip((pair.train, pair.teacher_train), pair.tokenizers, strict=True)
        )
        for position, number in enumerate(_expected(*texts)):
            if number != NOWHERE:
                p, q = (torch.softmax(each.double() / temperature, -1) for each in (mine[position], theirs[number]))
                p = torch.cat([p, p.new_zeros(len(q) - len(p))])
                wanted += float((p.sort().values - q.sort().values).abs().sum()) * temperature
                count += 1
    said = pair.teaches().signal(pair.train.batch(rows), CONFIG, temperature=temperature)
    logits_NV, (hidden_ND, aligned_N) = pair.logits(rows), said.tensors
    assert said.vocabulary == 6144 and len(aligned_N) == len(logits_NV) and int(aligned_N.sum()) == count > 20
    assert not hidden_ND[~aligned_N].any()
    assert float(said.loss(logits_NV, hidden_ND, aligned_N)) == pytest.approx(wanted, rel=1e-5)
    parts = zip(logits_NV.split(7), hidden_ND.split(7), aligned_N.split(7), strict=True)
    assert float(sum(said.loss(*part) for part in parts)) == pytest.approx(wanted, rel=1e-5)


def test_only_the_student_learns(pair: Pair) -> None:
    rows = np.asarray([1, 4])
    said = pair.teaches().signal(pair.train.batch(rows), CONFIG, temperature=1.0)
    said.loss(pair.logits(rows), *said.tensors).backward()
    assert all(parameter.grad is None for parameter in pair.teacher.parameters())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in pair.student.parameters())


def test_the_teacher_says_nothing_of_rows_that_it_lacks(pair: Pair) -> None:
    rows, order = np.asarray([3, 0, 2]), np.random.default_rng(0).permutation(len(pair.train))
    fewer = pair.teaches(pair.teacher_train.subset(order[order != 0]))
    said, whole = (each.signal(pair.train.batch(rows), CONFIG, temperature=1.0) for each in (fewer, pair.teaches()))
    lacking = torch.from_numpy(np.repeat(rows == 0, pair.train.supervised[rows]))
    assert whole.tensors[1][lacking].any() and not said.tensors[1][lacking].any()
    assert torch.equal(said.tensors[1][~lacking], whole.tensors[1][~lacking])
    torch.testing.assert_close(said.tensors[0][~lacking], whole.tensors[0][~lacking])
    assert fewer.share_aligned < pair.teaches().share_aligned

    pair.teacher.bfloat16()
    nothing = fewer.signal(pair.train.batch(rows[1:2]), CONFIG, temperature=1.0)
    loss = nothing.loss(pair.logits(rows[1:2]), *nothing.tensors)
    loss.backward()
    assert float(loss.detach()) == 0.0 and not any(parameter.grad.any() for parameter in pair.student.parameters())


def test_a_teacher_that_is_hardly_heard_is_refused(pair: Pair) -> None:
    template = "{% for m in messages %}{{ m.role + '=' + m.content + eos_token }}{% endfor %}"
    other = _read(pair.train.source, pair.tokenizers[1], template, loss_on="all")
    with pytest.raises(ConfigError, match=r"only 0\.0% of the student's tokens .*data\.loss_on=all"):
        pair.teaches(other)
