"""`sample`: several answers of a run to each prompt, scored, as rows to train on.

An answer is a function of the run, its prompt, `seed`, the number of its row and its own number.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.config import reward_words
from workbench.config.sections.rewards_config import RewardSource
from workbench.data.batching import Indices
from workbench.data.rows import fingerprint
from workbench.data.text import generated_answers
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import answer_to
from workbench.data.text.prompts import read_questions
from workbench.errors import ConfigError, FileError
from workbench.evaluation import rewards
from workbench.evaluation.generation import AnswerSampler
from workbench.evaluation.rewards import SPREAD
from workbench.models import backbones, exported
from workbench.models.exported import ExportedModel
from workbench.recipes.tasks.sft.task import question_ids
from workbench.recipes.verbs import generate
from workbench.recipes.verbs.asked_config import asked_config
from workbench.runs import files, provenance


class SampleProgress:
    """Answers and rewards by batch, a line each, written to disk before the next one begins.

    Args:
        out: The file that is to be written in the end; progress stands beside it.
        identity: All that answers depend on, of which a JSON file keeps the difference apart.

    Raises:
        ConfigError: Answers of another command are there.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.path = out.with_name(f".{out.name}.unfinished.jsonl")
        self.answers: dict[int, Any] = {}
        self._rewards: dict[str, dict[int, Any]] = {}
        if self.path.exists():
            self._read(json.loads(json.dumps(identity)))
        else:
            self._append({"identity": identity})

    def keep_answers(self, batch: int, answers: Any) -> None:
        """Keep the answers to the prompts of a batch, which no other one has the number of."""
        self.answers[batch] = answers
        self._append({"batch": batch, "answers": answers})

    def rewards(self, scores: str) -> dict[int, Any]:
        """Rewards by batch that were given by the reward of this fingerprint."""
        return self._rewards.setdefault(scores, {})

    def keep_rewards(self, scores: str, batch: int, rewards: Any) -> None:
        """Keep the rewards of the answers of a batch."""
        self.rewards(scores)[batch] = rewards
        self._append({"batch": batch, "rewards": rewards, "by": scores})

    def done(self) -> None:
        """Delete the file: its result is written."""
        self.path.unlink(missing_ok=True)

    def _read(self, identity: Mapping[str, Any]) -> None:
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:  # a line that was not finished
            os.truncate(self.path, self.path.stat().st_size - len(lines[-1]))
        try:
            first, *others = (json.loads(line) for line in lines[:-1])
        except ValueError:
            raise FileError(f"{self.path}: damaged. Delete it, and begin again.") from None
        changed = sorted(key for key in identity if first["identity"].get(key) != identity[key])
        if changed:
            raise ConfigError(
                f"{self.path}: holds answers of a command that was stopped, with other {', '.join(changed)}. Repeat "
                "that command to go on, name another --out, or delete the file."
            )
        for line in others:
            if "answers" in line:
                self.answers[line["batch"]] = line["answers"]
            else:
                self.rewards(line["by"])[line["batch"]] = line["rewards"]

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(f"{self.path}: cannot be written ({error.strerror}). Make room there.") from error


Questions = Sequence[tuple[Example, Mapping[str, Any]]]
"""Prompts with the columns of their rows."""


@dataclass(frozen=True)
class SampleSettings:
    """Settings of `sample`."""

    to: str = "best"
    """Kind of rows; see `rows`."""
    n: int = 8
    """Answers to a prompt."""
    temperature: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    least: float | None = None
    """The lowest reward that is kept."""
    margin: float = 0.0
    """By how much the rewards of a pair differ at least."""


@dataclass(frozen=True)
class SampledRows:
    """Facts about what was sampled."""

    prompts: int
    answers: int
    finished: float
    """Share of answers that ended by themselves."""
    reward: float
    """Mean of all answers."""
    best: float | None
    """Mean of the best finished answer to each prompt."""
    rows: int
    """Written."""
    signals: dict[str, float]
    """Words and repetition of all answers, of the best ones, and the correlation of length and reward."""
    left_out: Sequence[str]


def sample(
    run: Path | str,
    prompts: str,
    overrides: Sequence[str] = (),
    *,
    score: Sequence[str],
    out: Path | str,
    to: str = "best",
    n: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    least: float | None = None,
    margin: float = 0.0,
    seed: int = 0,
    trust: bool = False,
) -> SampledRows:
    """Answer every prompt several times, score the answers, and write rows to train on.

    The same call goes on where an earlier one was interrupted.

    Args:
        run: A run directory.
        prompts: Rows to answer; answers that they hold are ignored.
        overrides: `key=value` words of sections data and evaluate.
        score: Rewards that are added up: `number`, `unit_tests`, `my.py:function`, a reward run, `{kind: ...}`.
        out: A .jsonl file to write.
        to: Rows to write: `best` answers, `accepted` ones, `pairs` of a better and a worse one, or `all`.
        n: Answers to each prompt.
        temperature: Logits are divided by it; above 0.
        max_new_tokens: Of an answer.
        least: Lowest reward of an answer that is kept.
        margin: By how much the rewards of a pair differ at least.
        seed: An answer depends on the run, its prompt, this number, the number of its row and its own.
        trust: Execute the Python code that the run's config.yaml names.

    Returns:
        How many `prompts`, `answers` and `rows` there are, and the mean `reward` of all answers.

    Raises:
        WorkbenchError: A setting, a prompt or a reward is wrong; answers that there are by then are kept for the same
            call.

    Examples:
        >>> import workbench
        >>> asked, score = "starter/arithmetic_held_out.jsonl", ["number"]
        >>> settings = dict(out="all.jsonl", to="all", n=2, max_new_tokens=2)
        >>> sampled = workbench.sample("runs/short", asked, score=score, **settings)
        >>> sampled.prompts, sampled.answers
        (26, 52)
    """
    run, source, out = Path(run), prompts, Path(out)
    settings = SampleSettings(to, n, temperature, max_new_tokens, seed, least, margin)
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: rows are written as .jsonl. Give the file that ending.")
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another file, or delete it first.")
    if settings.to not in TO:
        raise ConfigError(f"--to {settings.to}: expected one of {', '.join(TO)}.")
    if settings.to == "pairs" and settings.n < 2:
        raise ConfigError("--to pairs compares answers to a prompt, and --n 1 gives one. Write --n 2 or more.")
    if settings.to == "accepted" and settings.least is None:
        raise ConfigError("--to accepted keeps answers with a reward of --least, which is not given. Write --least 1.")
    if settings.margin and settings.to != "pairs":
        raise ConfigError(f"--margin is for --to pairs, not for {settings.to}. Leave it out.")
    if not settings.temperature > 0:
        raise ConfigError(f"--temperature {settings.temperature:g}: expected a number above 0, such as 1.")
    sources = reward_words.read(score)
    config = asked_config(run, overrides, verb="sample", trust=trust)
    generate.require_text(config, run)
    skipped: list[str] = []
    questions = list(read_questions(source, config.data, skipped))
    files.require_writable(out)
    rewards.require_columns(sources, ((question.place, columns) for question, columns in questions))
    progress = SampleProgress(
        out,
        {
            "run": provenance.digests(run / "adapter", title="adapter") if (run / "adapter").is_dir() else {},
            "backbone": backbones.file_digests(config.model),
            "prompts": fingerprint(source, config.data),
            "overrides": list(overrides),
            "n": settings.n,
            "temperature": settings.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
        },
    )
    _write_answers(run, exported.load(run, config), [question for question, _ in questions], settings, progress)
    groups = _score(sources, questions, progress)
    output_rows = rows_to_write(groups, settings.to, least=settings.least, margin=settings.margin)
    if not output_rows:
        raise ConfigError(_nothing(groups, settings))
    files.write_bytes(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in output_rows).encode())
    progress.done()
    return _facts(groups, len(output_rows), skipped)


def _write_answers(
    run: Path, model: ExportedModel, questions: Sequence[Example], settings: SampleSettings, progress: SampleProgress
) -> None:
    if model.model.config.is_encoder_decoder:  # type: ignore[union-attr]
        raise ConfigError(f"{run}: sample draws answers of causal backbones, and this is an encoder-decoder.")
    prompts = [question_ids(model, question) for question in questions]
    sampler = AnswerSampler(model.model, known=len(model.tokenizer), stop=model.stop, temperature=settings.temperature)
    # By rows, not by batches, which on an accelerator depend on its memory.
    there = {int(row) for answers in progress.answers.values() for row in answers}
    row_batches = sampler.batches(prompts, answers=settings.n, tokens=settings.max_new_tokens)
    for whole in [[int(row) for row in batch] for batch in row_batches]:
        batch = [row for row in whole if row not in there]
        if not batch:
            continue
        draws = [
            generated_answers.sampling_numbers([settings.seed, row], answers=settings.n, tokens=settings.max_new_tokens)
            for row in batch
        ]
        written = sampler.answer([prompts[row] for row in batch], draws)
        answers = {
            str(row): [_text(model, ids, chat=bool(questions[row].messages)) for ids in group]
            for row, group in zip(batch, written, strict=True)
        }
        progress.keep_answers(batch[0], answers)


def _text(model: ExportedModel, ids: Indices, *, chat: bool) -> tuple[str, bool]:
    text = str(model.tokenizer.decode(ids, skip_special_tokens=True))
    return text.strip() if chat else text, bool(len(ids)) and int(ids[-1]) in model.stop


def _score(sources: Sequence[RewardSource], questions: Questions, progress: SampleProgress) -> list[AnswerGroup]:
    content = [[source.model_dump(mode="json") for source in sources], rewards.digests(sources)]
    reward, name = rewards.build(sources), hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    known = progress.rewards(name)
    groups: dict[int, AnswerGroup] = {}
    for number, written in progress.answers.items():
        answers = [
            answer_to(questions[int(row)][0], text, questions[int(row)][1])
            for row, group in written.items()
            for text, _ in group
        ]
        if number not in known:
            progress.keep_rewards(name, number, reward.detailed(answers))
        total, at = reward.total(known[number], len(answers)), 0
        for row, group in written.items():
            scored = [
                ScoredAnswer(
                    text, ended, total[at + own], {name: each[at + own] for name, each in known[number].items()}
                )
                for own, (text, ended) in enumerate(group)
            ]
            groups[int(row)], at = AnswerGroup(questions[int(row)][0], scored), at + len(group)
    return [groups[row] for row in sorted(groups)]


def _nothing(groups: Sequence[AnswerGroup], settings: SampleSettings) -> str:
    answers = [each for group in groups for each in group.answers]
    if settings.to != "all" and not any(each.finished and each.text for each in answers):
        return (
            f"None of {len(answers):,} answers ended within --max-new-tokens {settings.max_new_tokens}. Write a higher "
            "one, or --to all, which keeps unfinished ones. What is sampled is not kept for other lengths."
        )
    highest = max(each.reward for each in answers)
    wanted = "two answers to a prompt that differ in reward" if settings.to == "pairs" else "an answer that is kept"
    return (
        f"No prompt has {wanted}: the highest of {len(answers):,} rewards is {highest:g}. Lower --least or --margin, "
        "write a higher --n or --temperature, or another --score; answers are kept until --out is written."
    )


def _facts(groups: Sequence[AnswerGroup], written: int, skipped: Sequence[str]) -> SampledRows:
    answers = [each for group in groups for each in group.answers]
    top = [each for each in map(lambda group: best(group.answers), groups) if each is not None]
    texts, values = [each.text for each in answers], [each.reward for each in answers]
    signals = generated_answers.answer_lengths(texts)
    signals |= {
        f"best_{name}": value for name, value in generated_answers.answer_lengths([each.text for each in top]).items()
    }
    if (correlation := generated_answers.length_correlation(texts, values)) is not None:
        signals["length_correlation"] = correlation
    return SampledRows(
        prompts=len(groups),
        answers=len(answers),
        finished=float(np.mean([each.finished for each in answers])),
        reward=float(np.mean(values)),
        best=float(np.mean([each.reward for each in top])) if top else None,
        rows=written,
        signals=signals,
        left_out=skipped,
    )


Row = dict[str, Any]


class ScoredAnswer(NamedTuple):
    """An answer with its reward."""

    text: str
    finished: bool
    """Whether it ended by itself, and not because it was as long as answers may be."""
    reward: float
    parts: dict[str, float]
    """Its rewards by name, and how far reward models disagree on it, where there are several."""


class AnswerGroup(NamedTuple):
    """The answers to a prompt."""

    question: Example
    answers: Sequence[ScoredAnswer]


def rows_to_write(groups: Sequence[AnswerGroup], to: str, *, least: float | None, margin: float) -> list[Row]:
    """Rows as recipes sft and prefer read them, in the order of the prompts.

    Args:
        to: best, accepted, pairs or all. Answers that did not end by themselves are left out of all but `all`: a row
            would teach to end where they were cut.
        least: The lowest reward of an answer that is kept; None for every one. In pairs it is for the chosen one.
        margin: By how much the rewards of a pair differ at least; equal ones are never a pair.
    """
    lowest = float("-inf") if least is None else least
    make = _MAKERS[to]
    return [row for group in groups for row in make(group, lowest, margin)]


def best(answers: Sequence[ScoredAnswer]) -> ScoredAnswer | None:
    """The finished answer with the highest reward, of equal ones the first."""
    return max((each for each in answers if each.finished and each.text), key=lambda each: each.reward, default=None)


def _best(group: AnswerGroup, least: float, _: float) -> Iterator[Row]:
    top_answer = best(group.answers)
    if top_answer is not None and top_answer.reward >= least:
        yield _answered(group.question, top_answer)


def _accepted(group: AnswerGroup, least: float, _: float) -> Iterator[Row]:
    known: set[str] = set()
    for each in group.answers:
        if each.finished and each.text and each.reward >= least and each.text not in known:
            known.add(each.text)
            yield _answered(group.question, each)


def _pairs(group: AnswerGroup, least: float, margin: float) -> Iterator[Row]:
    better = best(group.answers)
    worse = min(
        (each for each in group.answers if each.finished and each.text), key=lambda each: each.reward, default=None
    )
    if better is None or worse is None or better.reward < least or not better.reward - worse.reward > 0:
        return
    if better.reward - worse.reward >= margin:
        row = {"chosen": better.text, "rejected": worse.text, "margin": better.reward - worse.reward}
        yield _prompt(group.question) | row


def _all(group: AnswerGroup, least: float, _: float) -> Iterator[Row]:
    for number, each in enumerate(group.answers):
        if each.reward >= least:
            named = {name: value for name, value in each.parts.items() if name != SPREAD}
            parts: Row = {"rewards": named} if len(named) > 1 else {}
            parts |= {SPREAD: each.parts[SPREAD]} if SPREAD in each.parts else {}
            facts = {"place": group.question.place, "answer_number": number, "finished": each.finished, **parts}
            yield _answered(group.question, each) | facts


_MAKERS: dict[str, Callable[[AnswerGroup, float, float], Iterator[Row]]] = {
    "best": _best,
    "accepted": _accepted,
    "pairs": _pairs,
    "all": _all,
}
TO = tuple(_MAKERS)
"""Kinds of rows."""


def _prompt(question: Example) -> Row:
    if not question.messages:
        return {"prompt": question.whole_text}
    return {"messages": list(question.messages), **({"tools": list(question.tools)} if question.tools else {})}


def _answered(question: Example, answer: ScoredAnswer) -> Row:
    if not question.messages:
        return _prompt(question) | {"completion": answer.text, "reward": answer.reward}
    turns = [*question.messages, {"role": "assistant", "content": answer.text}]
    return _prompt(question) | {"messages": turns, "reward": answer.reward}
