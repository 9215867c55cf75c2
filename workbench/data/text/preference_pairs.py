"""Preference pairs: a chosen and a rejected answer to one prompt, or one answer that is good or bad.

From rows of a file to examples, tokens and training examples: a pair, or one answer, is one example, whose rows are
computed together.

Legend: N labels (predicted tokens), S rows, P examples.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from workbench.config import DataConfig
from workbench.data import named_sets, resampling
from workbench.data.batching import Indices, MicroBatch, Row, Weights, WholeRows
from workbench.data.held_out_split import Splits
from workbench.data.rows import excerpt, string_of
from workbench.data.text import tokenized
from workbench.data.text.chat import LossOn
from workbench.data.text.formats import PROMPTS, Example, Reader, answered, chat_example, dialogue, judged
from workbench.data.text.messages import Message, last_answer_only, without_loss
from workbench.data.text.row_encoder import WrappedEncoder
from workbench.data.text.tokenized import SCHEMA, Emptied, EncodedChunk
from workbench.data.text.tokenized_set import TokenizedSet, TokenTable
from workbench.errors import DataError
from workbench.runs.files import cache_folder

_SAME = "Remove the row, or write data.on_bad_row=skip to leave out such rows and count them."


def convert(name: str, place: str, columns: Mapping[str, Any]) -> Example:
    """A row of format `name` as an example with a judgement. Raises DataError: the row judges nothing, answers two
    prompts, or has twice the same answer."""
    if name == "stepwise":
        raise DataError("data.format stepwise rates the steps of answers. Write recipe=reward reward.kind=process.")
    if name != "preference":
        raise DataError(
            f"data.format {name} judges no answers. Give rows with chosen and rejected, or with label (true or false); "
            "write data.columns='{chosen: ..., rejected: ...}' where they are called otherwise."
        )
    columns = judged(columns)
    if "chosen" in columns:
        if columns.get("rejected") is None:
            raise DataError("`rejected` is missing or null. A row needs two answers, or one and a label.")
        prompt = next((each for each in PROMPTS if columns.get(each) is not None), None)
        sides = [columns["chosen"], columns["rejected"]]
        if prompt is None and all(isinstance(side, str) for side in sides):
            columns = {**columns, **_split(string_of(columns, "chosen"), string_of(columns, "rejected"))}
        chosen, rejected = (
            answered(place, columns, prompt=prompt or "prompt", answer=answer) for answer in ("chosen", "rejected")
        )
        if prompt is None and chosen.messages and rejected.messages:
            chosen, rejected = _learnt_from_where_they_part(chosen, rejected)
        if bool(chosen.text) != bool(rejected.text):
            raise DataError(
                "`chosen` is text and `rejected` a list of messages, or the other way round. Write both alike."
            )
        if chosen.text:
            if chosen.text[-1][0].strip() == rejected.text[-1][0].strip():
                raise DataError(f"`chosen` and `rejected` are the same answer: there is nothing to prefer. {_SAME}")
        else:
            (before, first), (other, second) = (_parted(each.messages) for each in (chosen, rejected))
            if before != other:
                turns = range(min(len(before), len(other)))
                turn = 1 + next((turn for turn in turns if before[turn] != other[turn]), len(turns))
                raise DataError(
                    f"`chosen` and `rejected` answer different prompts, from message {turn} on, so that they cannot be "
                    "compared. Give both the same turns before the last answer."
                )
            if not first or not second:
                raise DataError(
                    "`chosen` or `rejected` has no answer that carries loss. Leave `loss` out of its last message."
                )
            if first == second:
                raise DataError(f"`chosen` and `rejected` are the same answer: there is nothing to prefer. {_SAME}")
        return replace(chosen, desired=True, rejected=replace(rejected, desired=False), tie=_flag(columns, "tie"))
    if _flag(columns, "tie"):
        raise DataError("it rates one answer, and is a tie (`tie`), which two are. Leave `tie` out.")
    if "completion" in columns:
        rated = answered(place, columns, prompt="prompt", answer="completion")
    else:
        messages = dialogue(columns)
        if messages[-1]["role"] != "assistant":
            raise DataError(f"the last message is rated, and it is the {messages[-1]['role']}'s, not the assistant's.")
        rated = chat_example(place, columns, last_answer_only(messages))
    return replace(rated, desired=_flag(columns, "label", missing=None))


def _flag(columns: Mapping[str, Any], name: str, *, missing: bool | None = False) -> bool:
    """A cell that is true or false. `missing`: its value where there is none; None: it is refused."""
    value = columns.get(name)
    if value is None and missing is not None:
        return missing
    if str(value).lower() not in ("true", "false", "1", "0"):
        raise DataError(f"`{name}` must be true or false, found {excerpt(value)}.")
    return str(value).lower() in ("true", "1")


def _learnt_from_where_they_part(*pair: Example) -> Iterator[Example]:
    """Two whole conversations, all answers of which carry loss from the first that differs; as they are where the
    user's words differ first."""
    bare = [[{key: each[key] for key in each if key != "loss"} for each in side.messages] for side in pair]
    shared = sum(1 for _ in itertools.takewhile(lambda turns: turns[0] == turns[1], zip(*bare, strict=False)))
    if not shared or not all(turns[shared:] and turns[shared]["role"] == "assistant" for turns in bare):
        return iter(pair)
    return (
        replace(side, messages=(*without_loss(turns[:shared]), *turns[shared:]))
        for side, turns in zip(pair, bare, strict=True)
    )


def _parted(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The turns before the first that is learnt, and the others, as far as they can be told apart."""
    learnt = [message["role"] == "assistant" and message.get("loss", True) for message in messages]
    start = learnt.index(True) if True in learnt else len(messages)
    bare = [
        {**{key: each for key, each in message.items() if key != "loss"}, "content": message["content"].strip()}
        for message in messages
    ]
    return bare[:start], bare[start:]


def _split(chosen: str, rejected: str) -> dict[str, str]:
    """Columns of two texts that begin with the same prompt, which ends after the last white space that they share."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    shared = "".join(character for character, _ in alike)
    if chosen == rejected:
        raise DataError(f"`chosen` and `rejected` are the same text: there is nothing to prefer. {_SAME}")
    # Not inside a word, of which one answer has another ending.
    end = next((place for place in range(len(shared), 0, -1) if shared[place - 1].isspace()), 0)
    prompt = shared[:end]
    if not prompt.strip():
        raise DataError(
            "`chosen` and `rejected` begin with no common prompt, and the row has no column `prompt`. "
            "Add one, or write data.columns='{prompt: ...}'."
        )
    return {"prompt": prompt, "chosen": chosen[end:], "rejected": rejected[end:]}


@dataclass(frozen=True)
class PreferenceEncoder(WrappedEncoder):
    """Writes judged answers as `base` writes conversations."""

    conversion = staticmethod(convert)
    reader: Reader | None = None

    @property
    def identity(self) -> list[Any]:
        return ["judged", *self.base.identity]

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The chosen and the rejected answer, or the one that there is. Raises DataError: an answer is several
        messages, and the template drops the reasoning of all but the last."""
        sides = [example] if example.rejected is None else [example, example.rejected]
        examples = []
        for number, side in enumerate(sides, start=1):
            part, *others = self.base.expanded(replace(side, rejected=None), loss_on=loss_on)
            if others:
                raise DataError(
                    f"{example.place}: an answer of several messages has reasoning, of which the chat template writes "
                    "that of the last message alone. Leave the reasoning of the others out, or write "
                    "data.on_bad_row=skip."
                )
            place = example.place if len(sides) == 1 else f"{example.place}, answer {number} of 2"
            examples.append(replace(part, place=place, weight=example.weight, margin=example.margin, tie=example.tie))
        return examples


TOKEN, ROW, ANSWER, PLACE = range(4)
"""Columns of a micro-batch's labels (N, 4): the predicted token; its row in the batch; the number of its answer in the
data set; the token's place among those of its answer, from 0."""
_OF_PAIR = re.compile(r", answer [12] of 2$")


@dataclass(frozen=True)
class PreferenceSet(WholeRows):
    """Pairs of a chosen and a rejected answer, or single answers that are good or bad."""

    answers: TokenizedSet
    """All of them; first the chosen and then the rejected one of each pair."""
    paired: bool
    others: TokenizedSet | None = None
    """For each single answer an answer to another prompt, behind the prompt of this one."""

    def __len__(self) -> int:
        return len(self.answers) // self.each

    @property
    def each(self) -> int:
        """Rows of an example."""
        return 2 if self.paired else 1

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each example, those of both answers."""
        lengths: Indices = self.sequence_lengths.sum(1)
        return lengths

    @property
    def sequence_lengths(self) -> Indices:
        """Tokens of each answer of each example, (examples, answers)."""
        return self.answers.lengths.reshape(-1, self.each)

    @cached_property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest sequence that one stack of the model reads, of each example."""
        longest: Indices = self.answers.longest_sequences.reshape(-1, self.each).max(1)
        return longest

    @cached_property
    def supervised(self) -> Weights:
        weight_P = self.answers.weights[:: self.each]
        return np.ones(len(self), dtype=np.int64) if resampling.uniform(weight_P) else weight_P

    @cached_property
    def desired(self) -> npt.NDArray[np.bool_]:
        """Whether each answer (S,) is the better or a good one."""
        desired: npt.NDArray[np.bool_] = self.answers.table.data.column("desired").to_numpy()[self.answers.rows] > 0
        return desired

    @cached_property
    def margins(self) -> npt.NDArray[np.float64]:
        """By how much the reward of the chosen answer of each example is to be higher."""
        answer_margins: npt.NDArray[np.float64] = self.answers.table.data.column("margin").to_numpy()[self.answers.rows]
        return answer_margins[:: self.each]

    @cached_property
    def ties(self) -> npt.NDArray[np.bool_]:
        """Whether the two answers of each example were judged equally good; the first one then stands for chosen."""
        tie_S = self.answers.table.data.column("tie").to_numpy(zero_copy_only=False)[self.answers.rows]
        ties: npt.NDArray[np.bool_] = tie_S[:: self.each]
        return ties

    @property
    def answer_tokens(self) -> Indices:
        """Predicted tokens of each answer (S,)."""
        return self.answers.supervised

    @cached_property
    def shared_tokens(self) -> Indices:
        """Predicted tokens of the shorter answer of the pair of each answer (S,); of a single answer all."""
        return np.repeat(self.answer_tokens.reshape(-1, self.each).min(1), self.each)

    @property
    def sources(self) -> Collection[str]:
        """Names of the sets that examples are from; empty where there is one."""
        return self.answers.sources

    @property
    def source_N(self) -> Indices:
        """Number of the set of each example, where there are several."""
        return self.answers.source_N[:: self.each]

    @property
    def good(self) -> TokenizedSet:
        """The chosen answers, or the good ones."""
        return self.answers.subset(self.desired)

    def place(self, index: int) -> str:
        return _pair_of(self.answers.place(index * self.each)) if self.paired else self.answers.place(index)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows of the examples `indices`, padded, with labels (N, 4)."""
        return labelled(self.answers, indices, self.each, epoch=epoch)

    def subset(self, keep: Indices | npt.NDArray[np.bool_]) -> PreferenceSet:
        """The examples that `keep` indexes or marks."""
        chosen = np.arange(len(self))[keep]
        others = None if self.others is None else self.others.subset(chosen)
        return replace(self, answers=self.answers.subset(answer_rows(chosen, self.each)), others=others)

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        kind = (
            {"pairs": len(self), **({"ties": int(self.ties.sum())} if self.ties.any() else {})}
            if self.paired
            else {"good": int(self.desired.sum()), "bad": int((~self.desired).sum())}
        )
        return {**self.answers.facts(), **kind}


class RatedPairs(PreferenceSet):
    """Pairs whose batches have one label for each answer, at its last token: what a bank of reward models predicts."""

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows of the examples `indices`, padded, with the number (S, 1) of each answer as its label."""
        import torch

        answers = answer_rows(indices, self.each)
        batch = self.answers.batch(answers, epoch=epoch)
        assert batch.lengths_B is not None, "padded rows say how long they are"
        last_S = torch.arange(len(answers)) * batch.width + batch.lengths_B - 1
        batch = replace(batch, positions_N=last_S, labels_N=torch.from_numpy(answers[:, None]), rows_B=indices)
        return replace(batch, sequences=self.each, row_tokens=self.answers.lengths[answers])


class MismatchedRows:
    """The `others` of a set as examples with the same numbers. `rows`: a set that has them."""

    def __init__(self, rows: PreferenceSet) -> None:
        assert rows.others is not None
        self.rows = rows.others
        self.lengths = rows.others.lengths

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """These rows, with labels (N, 4)."""
        return labelled(self.rows, indices, 1, epoch=epoch)


def preference_set(rows: TokenizedSet, *, pairs: bool) -> PreferenceSet:
    """The examples of a tokenised set. Raises DataError: pairs are wanted, and a row has one answer. `pairs`: whether
    two answers are compared; else each answer of a pair is an example of its own."""
    single = next((place for place in rows.places() if _OF_PAIR.search(place) is None), None) if pairs else None
    if single is not None:
        raise DataError(
            f"{single}: it rates one answer (label), where two are compared. Give each row chosen and rejected; single "
            "answers are learnt from with recipe=prefer prefer.loss=kto."
        )
    return PreferenceSet(rows, paired=pairs)


def without_ties(split: TokenizedSet, *, refuse: bool, loss: str, cure: str) -> TokenizedSet:
    """The answers of a set for what knows no ties: refused where there are some, or left out and counted. Raises
    DataError: there are ties, which are refused, or nothing else.

    Args:
        refuse: Whether `data.on_bad_row` is refuse.
        loss: What has no target for ties.
        cure: What to write instead, as a sentence.
    """
    tie_S = split.table.data.column("tie").to_numpy(zero_copy_only=False)[split.rows]
    if not tie_S.any():
        return split
    first, count = int(np.flatnonzero(tie_S)[0]), len(set(map(_pair_of, split.subset(tie_S).places())))
    if refuse or tie_S.all():
        where = f"{_pair_of(split.place(first))}: is a tie, as {count:,} rows of its file are"
        raise DataError(f"{where}, and {loss} has no target for ties. {cure}")
    return split.subset(~tie_S, f"{count:,} ties, for which {loss} has no target")


def require_preferences(pairs: Splits[PreferenceSet]) -> None:
    """Refuse sets that hold only ties: nothing could be learnt, and no accuracy measured."""
    for name, rows in pairs._asdict().items():
        if rows is not None and rows.paired and rows.ties.all():
            raise DataError(
                f"data.{name}: all of its {len(rows):,} pairs are ties, which nothing is learnt from and no accuracy "
                "measured of. Give it pairs with a better answer as well."
            )


def _pair_of(place: str) -> str:
    return _OF_PAIR.sub("", place)


def labelled(rows: TokenizedSet, indices: Indices, each: int, *, epoch: int) -> MicroBatch:
    """The rows of some examples, `each` of them one after another, with labels (N, 4)."""
    answers = answer_rows(indices, each)
    batch = with_answers(rows.batch(answers, epoch=epoch), answers)
    return replace(batch, rows_B=indices, sequences=each, row_tokens=rows.lengths[answers])


def with_answers(batch: MicroBatch, answers_B: Indices) -> MicroBatch:
    """The same rows with labels (N, 4); `answers_B` are the numbers of their answers."""
    import torch

    row_N = batch.row_of_label.numpy()
    count_B = np.bincount(row_N, minlength=len(answers_B))
    place_N = np.arange(len(row_N)) - np.repeat(np.cumsum(count_B) - count_B, count_B)
    columns = [batch.labels_N.numpy(), row_N, answers_B[row_N], place_N]
    return replace(batch, labels_N=torch.from_numpy(np.stack(columns, axis=1)))


def answer_rows(indices: Indices, each: int) -> Indices:
    """Rows of examples that have `each` of them."""
    rows: Indices = (indices[:, None] * each + np.arange(each)).ravel()
    return rows


_AT_ONCE = 1000  # rows of a record batch


def mismatched_answers(answers: TokenizedSet, config: DataConfig, *, bos: int | None = None) -> TokenizedSet:
    """For each answer its prompt with the answer of the nearest row before (the first follows the last) to another one.

    Which that is depends on the rows alone, so that a reference is asked once. Prompts are cut on the left, behind the
    token that begins a text. Raises DataError: all rows have one prompt; FileError: the rows cannot be written. `bos`:
    that token, where there is one.
    """
    # Each row gets the answer of a row of its own set where there are several.
    partner = np.arange(len(answers))
    for name, own in (named_sets.rows_by_set(answers) or {"": np.arange(len(answers))}).items():
        where = f"{answers.source}, set {name}" if name else answers.source
        digests, count = answers.digests[own], len(own)
        if count < 2 or (digests == digests[0]).all():
            raise DataError(
                f"{where}: prefer.loss=kto compares with answers to other prompts, and these {count} row(s) have "
                "one prompt. Give rows of two prompts at least, or write prefer.loss=dpo for pairs."
            )
        before = np.roll(np.arange(count), 1)
        while (same := digests[before] == digests).any():
            before[same] -= 1
        partner[own] = own[before % count]
    digest = hashlib.sha256(f"2 {config.max_tokens} {bos}".encode())
    for part in (answers.digests, answers.lengths, answers.supervised, partner):
        digest.update(np.ascontiguousarray(part).tobytes())
    digest.update(str(answers.fingerprint).encode() + answers.rows.tobytes() + answers.table.identity.encode())
    path = cache_folder() / "tokens" / f"{digest.hexdigest()[:32]}-mismatched.arrow"
    if not path.exists():
        tokenized.write_chunks(path, _chunks(answers, partner, config.max_tokens, bos), config)
    table = TokenTable.from_file(path)
    return TokenizedSet(
        table,
        np.arange(len(table)),
        answers.source,
        answers.fingerprint,
        chat=answers.chat,
        collate=answers.collate,
        processor=answers.processor,
    )


def _chunks(answers: TokenizedSet, partner: Indices, max_tokens: int, bos: int | None) -> Iterator[EncodedChunk]:
    for start in range(0, len(answers), _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, len(answers)))
        columns = [_columns(answers, number, int(partner[number]), max_tokens, bos) for number in numbers]
        rows = {name: [each[name] for each in columns] for name in SCHEMA.names}
        yield EncodedChunk(pyarrow.RecordBatch.from_pydict(rows, schema=SCHEMA), [], Emptied())


def _columns(answers: TokenizedSet, number: int, partner: int, max_tokens: int, bos: int | None) -> dict[str, object]:
    asked, given = answers[number], answers[partner]
    start, stop = _answer_start(asked), _answer_start(given)
    excess = max(0, start + len(given.input_ids) - stop - max_tokens)
    if excess and asked.pictures:
        raise DataError(
            f"{answers.place(number)}: has a picture, and with the answer of {answers.place(partner)} "
            f"{max_tokens + excess} tokens. Write data.max_tokens={max_tokens + excess} or more."
        )
    first = int(asked.input_ids[0] == bos)
    ids = np.concatenate([asked.input_ids[:first], asked.input_ids[first + excess : start], given.input_ids[stop:]])
    loss = np.concatenate([asked.supervised[:first], asked.supervised[first + excess : start], given.supervised[stop:]])
    return {
        "input_ids": ids,
        "supervised": loss,
        "place": f"{answers.place(number)} with the answer of {answers.place(partner)}",
        "digest": int(answers.digests[number]),
        "length": len(ids),
        "source": max(0, asked.source - excess),
        "targets": int(loss[1:].sum()),
        "ends": 0,
        "whole": len(ids) + excess,
        "block": 0,
        "chat": answers.chat,
        "weight": 1.0,
        "desired": 0,
        "margin": 0.0,
        "tie": False,
        "step_labels": None,
        "cut_steps": 0,
        "pictures": asked.pictures,
        "picture_files": None,
        "picture_count": int(bool(asked.pictures)),
    }


def _answer_start(row: Row) -> int:
    """Tokens of the prompt, with which a row begins."""
    return row.source or int(np.argmax(row.supervised))
