"""Two tokenizers are compared where the same text stands before their tokens, and nowhere else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
from workbench.data.batching import Indices, Row
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation.teachers import TeacherModel
from workbench.distillation.token_alignment import (
    NOWHERE,
    AlignedTeacher,
    Alignment,
    LiveRows,
    Reader,
    predicted,
    shared_tokens,
)
from workbench.errors import ConfigError
from workbench.losses import chunked_loss
from workbench.losses.divergences import forward_kl, log_probs
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

    def teaches(
        self,
        teacher_train: TokenizedSet | None = None,
        written: Callable[[int], Row | None] | None = None,
    ) -> AlignedTeacher:
        theirs = teacher_train or self.teacher_train
        model = TeacherModel(self.teacher, self.teacher_head, nullcontext)
        alignment = Alignment(self.train, theirs, *self.tokenizers)
        return AlignedTeacher(LiveRows(model, theirs, torch.device("cpu")), alignment, written)

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
    logits_NV, (away_N, *_, hidden_ND) = pair.logits(rows), said.tensors
    assert said.vocabulary == 6144 and len(away_N) == len(logits_NV) and int((away_N == 0).sum()) == count > 20
    assert not hidden_ND[away_N != 0].any() and said.follows is not None and not said.follows.any()
    assert float(said.loss(logits_NV, *said.tensors)) == pytest.approx(wanted, rel=1e-5)
    parts = zip(logits_NV.split(7), *(tensor.split(7) for tensor in said.tensors), strict=True)
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
    assert (whole.tensors[0][lacking] == 0).any() and (said.tensors[0][lacking] == NOWHERE).all()
    assert torch.equal(said.tensors[0][~lacking], whole.tensors[0][~lacking])
    torch.testing.assert_close(said.tensors[-1][~lacking], whole.tensors[-1][~lacking])
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


@pytest.mark.parametrize("swapped", [False, True])
def test_spans_have_one_text_and_cover_the_answer(
    source: str, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, swapped: bool
) -> None:
    one, other = (teacher, student) if swapped else (student, teacher)
    mine, theirs = _read(source, one), _read(source, other)
    found, several = Alignment(mine, theirs, one, other), 0
    for row in range(len(mine)):
        ids, others = predicted(mine[row]), predicted(theirs[row])
        spans = found.spans(row)
        assert (spans[1:, [0, 2]] == spans[:-1, [1, 3]]).all()  # one after the other
        assert (spans[-1, [1, 3]] == [len(ids), len(others)]).all()  # up to the sign that ends the turn
        texts = [
            [tokenizer.decode(all_ids[: int(at)], skip_special_tokens=False).lstrip() for at in edges]
            for tokenizer, all_ids, edges in ((one, ids, spans[:, 0]), (other, others, spans[:, 2]))
        ]
        assert texts[0] == texts[1] and texts[0][0] == ""
        several += int((spans[:, 1] - spans[:, 0] > 1).sum())
    assert several > 10


def _merged(logp: Tensor, ids: Indices, spans: Indices) -> Tensor:
    """The masses of each span: of its first token any, of the others those that stand there."""
    parts = []
    for start, stop in spans.tolist():
        later = sum((logp[at, int(ids[at])] for at in range(start + 1, stop)), torch.zeros((), dtype=logp.dtype))
        parts.append(logp[start] + later)
    return torch.stack(parts)


@torch.no_grad()
@pytest.mark.parametrize("loss", ["gold", "alm"])
def test_the_loss_of_spans_written_out(pair: Pair, loss: str) -> None:
    temperature, rows = 1.7, np.asarray([3, 0, 2, 11])
    alignment = Alignment(pair.train, pair.teacher_train, *pair.tokenizers)
    mine_S, theirs_S, mine_only, theirs_only = shared_tokens(*map(Reader, pair.tokenizers))
    assert len(mine_S) > 200 and len(mine_S) + len(mine_only) == len(pair.tokenizers[0])
    wanted = 0.0
    for row in map(int, rows):
        at = temperature if loss == "gold" else 1.0
        sides = (
            _merged(log_probs(_predictions(model, read, row).double(), at), predicted(read[row]), columns)
            for model, read, columns in (
                (pair.student, pair.train, alignment.spans(row)[:, :2]),
                (pair.teacher, pair.teacher_train, alignment.spans(row)[:, 2:]),
            )
        )
        student, teacher = sides
        if loss == "gold":
            q, p = student.exp(), teacher.exp()
            shared = p[:, theirs_S] * (teacher[:, theirs_S] - student[:, mine_S])
            own, others = (each.sort(descending=True).values for each in (q[:, mine_only], p[:, theirs_only]))
            own = torch.cat([own, own.new_zeros(len(own), others.shape[1] - own.shape[1])], 1)
            wanted += float(shared.sum() * temperature**2 + (own - others).abs().sum() * temperature)
            continue
        for number, (start, _, their_start, _) in enumerate(alignment.spans(row).tolist()):
            firsts = int(predicted(pair.train[row])[start]), int(predicted(pair.teacher_train[row])[their_start])
            q, p = (
                math.exp(float(side[number, first]) / temperature)
                for side, first in zip((student, teacher), firsts, strict=True)
            )
            wanted += temperature * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    config = DistillConfig.model_validate({"loss": loss})
    said = pair.teaches().signal(pair.train.batch(rows), config, temperature=temperature)
    logits_NV = pair.logits(rows)
    assert float(said.loss(logits_NV, *said.tensors)) == pytest.approx(wanted, rel=1e-5)
    # In chunks, none of which cuts a span.
    vocabulary = chunked_loss.CHUNK_ELEMENTS // 5
    parts = chunked_loss.chunks(vocabulary, logits_NV, *said.tensors, follows_N=said.follows)
    assert len(parts) > 8 and all(part[1][0] <= 0 for part in parts)
    assert sum(float(said.loss(*part)) for part in parts) == pytest.approx(wanted, rel=1e-5)


@torch.no_grad()
def test_gold_of_one_tokenizer_is_the_divergence_of_its_tokens(source: str, teacher: PreTrainedTokenizerBase) -> None:
    pair, rows = Pair(source, teacher, teacher), np.asarray([3, 0])
    pair.student.float()
    for parameter in pair.teacher.parameters():
        parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    said = pair.teaches().signal(pair.train.batch(rows), DistillConfig(loss="gold"), temperature=1.3)
    each = [
        (_predictions(pair.student, pair.train, row), _predictions(pair.teacher, pair.train, row))
        for row in rows.tolist()
    ]
    wanted = sum(float(forward_kl(log_probs(one, 1.3), log_probs(two, 1.3))) * 1.3**2 for one, two in each)
    assert float(said.loss(pair.logits(rows), *said.tensors)) == pytest.approx(wanted, rel=1e-5)


@torch.no_grad()
@pytest.mark.slow  # imports TRL
def test_gold_is_trls(pair: Pair) -> None:
    """Its own grouping, merging and hybrid loss, of probabilities that predict the tokens, with weights of 1."""
    gold = pytest.importorskip("trl.experimental.gold.gold_trainer")
    mine_S, theirs_S, *_ = shared_tokens(*map(Reader, pair.tokenizers))
    uld = gold.ULDLoss.__new__(gold.ULDLoss)
    torch.nn.Module.__init__(uld)
    uld.beta, uld.hybrid_matched_weight, uld.hybrid_unmatched_weight = 0.0, 1.0, 1.0
    uld.token_merge_strategy = "observed"
    uld._teacher_matched_ids = set(theirs_S.tolist())
    uld.mapping_tensor = torch.full((int(theirs_S.max()) + 1,), NOWHERE)
    uld.mapping_tensor[torch.from_numpy(theirs_S)] = torch.from_numpy(mine_S)
    alignment = Alignment(pair.train, pair.teacher_train, *pair.tokenizers)
    temperature, compared = 3.0, 0
    for row in range(len(pair.train)):
        if not pair.train.place(row) or row in (1, 2, 4):  # bytes of characters, which its offsets know otherwise
            continue
        sides = []
        for model, read, tokenizer in zip(
            (pair.student, pair.teacher), (pair.train, pair.teacher_train), pair.tokenizers, strict=True
        ):
            (turn,) = Reader(tokenizer).turns(read[row])
            edges = [*turn.starts.tolist(), 10**6]  # where the sign that ends the turn ends is one place for both
            sides.append((list(pairwise(edges)), _predictions(model, read, row), read[row]))
        groups = uld._align_by_byte_offsets(*(offsets for offsets, *_ in sides))
        spans = alignment.spans(row)
        for number, found in enumerate(groups):
            assert [[part[0], part[-1] + 1] for part in found] == spans[:, 2 * number : 2 * number + 2].tolist()
        merged = [
            uld._merge_probabilities_with_alignment_groups(
                (logits.double() / temperature).softmax(-1), found, predicted(own).tolist()
            )
            for found, (_, logits, own) in zip(groups, sides, strict=True)
        ]
        if min(float(each.min()) for each in merged) < 1e-8:  # which TRL takes for 1e-8
            continue
        compared += 1
        uld._compute_hybrid_uld_loss(*merged)
        parts = float(uld.last_matched_loss) * temperature**2 + float(uld.last_unmatched_loss) * temperature
        wanted, rows = parts * len(spans), np.asarray([row])
        said = pair.teaches().signal(pair.train.batch(rows), DistillConfig(loss="gold"), temperature=temperature)
        assert float(said.loss(pair.logits(rows), *said.tensors)) == pytest.approx(wanted, rel=1e-5)
    assert compared > 5


def test_no_span_reaches_into_the_prompt(pair: Pair) -> None:
    """Other questions change what the models say, and not which tokens are compared."""
    rows = np.asarray([3])
    config = DistillConfig(loss="alm")
    logits_NV = pair.logits(rows).detach().requires_grad_()
    said = pair.teaches().signal(pair.train.batch(rows), config, temperature=1.0)
    said.loss(logits_NV, *said.tensors).backward()
    assert len(logits_NV) == pair.train.supervised[3] and logits_NV.grad is not None and logits_NV.grad.any()


@torch.no_grad()
@pytest.mark.parametrize("loss", ["universal", "gold", "alm"])
def test_an_answer_that_the_student_wrote_is_read_in_the_teachers_tokens(pair: Pair, loss: str) -> None:
    """As a row that had it from the start."""
    config, rows = DistillConfig.model_validate({"loss": loss}), np.asarray([0, 5])
    # The same answer as data.
    source = Path(pair.train.source).parent / "new.jsonl"
    asked = {"question": "What is 0?", "answer": "The dog ran up the hill."}
    source.write_text(json.dumps(asked) + "\n", encoding="utf-8")
    data, new = Pair(str(source), *pair.tokenizers), dict[int, Row]()
    answer = predicted(data.train[0])
    for row, ids in zip(rows.tolist(), (answer, answer[:3]), strict=True):  # one of which was cut
        prompt = pair.train[row].input_ids[: int(pair.train[row].supervised.argmax())]
        supervised = np.arange(len(prompt) + len(ids)) >= len(prompt)
        new[row] = pair.train[row]._replace(input_ids=np.concatenate([prompt, ids]), supervised=supervised)
    batch = pair.train.collate(list(new.values()), epoch=0)
    said = pair.teaches(written=new.get).signal(replace(batch, rows_B=rows), config, temperature=1.0)
    logits_NV = pair.head.project(pair.head.hidden(pair.student, batch.inputs).flatten(0, 1)[batch.positions_N])
    assert len(said.tensors[0]) == len(answer) + 3 and (said.tensors[0][len(answer) :] == 0).any()
    first = said.loss(logits_NV[: len(answer)], *(tensor[: len(answer)] for tensor in said.tensors))
    whole = data.teaches().signal(data.train.batch(np.asarray([0])), config, temperature=1.0)
    alone = float(whole.loss(data.logits(np.asarray([0])), *whole.tensors))
    assert float(said.loss(logits_NV, *said.tensors)) > float(first) == pytest.approx(alone, rel=1e-4)
