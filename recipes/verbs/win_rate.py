"""`evaluate RUN --against OTHER`: how often a run's answer beats that of another run, by a reward or a judge."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench import evaluation
from workbench.config import RunConfig, reward_words
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import Answer, answer_to
from workbench.data.text.prompts import first_turn, read_questions, turns_of
from workbench.errors import ConfigError
from workbench.evaluation import comparison, judges, rewards
from workbench.evaluation.generation import question_of
from workbench.models import exported
from workbench.models.exported import ExportedModel
from workbench.recipes.single import sampled_answers
from workbench.recipes.verbs import generate
from workbench.recipes.verbs.asked_config import asked_config
from workbench.report import pages
from workbench.runs import files, run_directory, score_files
from workbench.runs.trust import Trust

BACKBONE = "backbone"
"""In place of another run: the run's own backbone, as it came."""
Questions = Sequence[tuple[Example, Mapping[str, Any]]]


@dataclass(frozen=True)
class Contest:
    """By what answers are compared."""

    score: tuple[str, ...] = ()
    """Rewards, as `reward_words.read` takes them."""
    judge: str | None = None
    """A program, or an address with OpenAI's interface; see `judges.named`."""
    judge_model: str | None = None
    """Name of the model at that address."""
    max_new_tokens: int = 256
    judge_timeout: float = 600.0
    """Seconds for all verdicts."""
    out: Path | None = None
    """Where the answers are written, with who wins: a .jsonl file."""


def win_rate(
    run: Path | str,
    against: Path | str,
    overrides: Sequence[str] = (),
    *,
    score: Sequence[str] = (),
    judge: str | None = None,
    judge_model: str | None = None,
    judge_timeout: float = 600.0,
    max_new_tokens: int = 256,
    out: Path | str | None = None,
    trust: bool = False,
) -> dict[str, float]:
    """How often a run's answer beats that of another one, or of its backbone, to the same prompts; kept beside the run.

    Args:
        run: A run directory.
        against: Another one, or `backbone`: the run's own without its adapter.
        overrides: `key=value` words of sections data and evaluate. `data.test=FILE` names the prompts; without it those
            of the held-out file are answered. A row may have several `turns`, as MT-Bench's have, which each model
            answers one after the other.
        score: Rewards that are added up: `number`, `unit_tests`, `my.py:function`, a reward run, `{kind: ...}`.
        judge: In place of `score`, a program that reads pairs of answers as JSON lines and writes 1, 2 or 0 for each;
            or the address of a server with OpenAI's interface, up to /v1.
        judge_model: The model's name at that address.
        judge_timeout: Seconds for all verdicts of a program, or for each of an address.
        max_new_tokens: Of an answer.
        out: A .jsonl file for the answers, with who wins.
        trust: Execute the Python code that the runs' config.yaml name.

    Returns:
        `win_rate` with its interval, `ties`, the mean rewards of both, and more by name; of rows with several turns
        also `win_rate_turn_1` and so on, with intervals of a bootstrap over rows. `rows_skipped` counts the rows
        that data.on_bad_row=skip left out, where there are any.

    Raises:
        ConfigError: There is nothing to compare by, or no file of prompts.

    Examples:
        >>> import workbench
        >>> words = ["data.test=starter/arithmetic_held_out.jsonl"]
        >>> scores = workbench.win_rate("runs/short", "runs/short", words, score=["number"], max_new_tokens=2)
        >>> scores["win_rate"], scores["ties"]
        (0.5, 1.0)
    """
    run, other = Path(run), Path(against)
    contest = Contest(
        tuple(score), judge, judge_model, max_new_tokens, judge_timeout, None if out is None else Path(out)
    )
    _require(contest)
    verdicts = judges.named(judge, judge_model, timeout=judge_timeout) if judge is not None else None
    config = asked_config(run, overrides, verb="evaluate", trust=trust)
    moved = [word for word in overrides if word.startswith("model.id=")]
    bare = str(against) == BACKBONE and not other.exists()
    other_config = config if bare else run_directory.shipped_config(other, Trust(trust), moved)
    for each, path in ((config, run), (other_config, run if bare else other)):
        generate.require_text(each, path)
    sources = reward_words.read(contest.score)
    if alone := [f"{source.kind} {source.sampled_alone}" for source in sources if source.sampled_alone]:
        raise ConfigError(
            f"--score {alone[0]}: it is for answers that are sampled. Write another --score; `workbench sample` takes "
            "this one."
        )
    reward = rewards.build(sources) if sources else None
    skipped: list[str] = []
    read = (read_questions(file, config.data, skipped, convert=first_turn) for file in _files(config))
    questions = [question for each in read for question in each]
    turns = {max(1, len(turns_of(columns))) for _, columns in questions}
    if len(turns) > 1:
        raise ConfigError(f"--against: rows have {min(turns)} to {max(turns)} turns. Give each row as many.")
    rewards.require_columns(sources, ((question.place, columns) for question, columns in questions))
    own = _answers(exported.load(run, config), questions, contest)
    stock = partial(sampled_answers.stock, other_config.model, other_config)
    theirs = _answers(stock() if bare else exported.load(other, other_config), questions, contest)
    scores: dict[str, float] = {}
    if reward is not None:
        own_S, other_S = reward(own), reward(theirs)
        win_S = comparison.wins_by_reward(own_S, other_S)
        scores = {"reward": sum(own_S) / len(own_S), "reward_other": sum(other_S) / len(other_S)}
    else:
        assert verdicts is not None
        judged = judges.in_both_orders(verdicts, list(zip(own, theirs, strict=True)))
        win_S, scores = judged.win_S, judged.bias
    if contest.out is not None:
        lines = [
            {"place": a.place, "prompt": a.prompt, "answer": a.text, "other": b.text, "win": float(win)}
            for a, b, win in zip(own, theirs, win_S, strict=True)
        ]
        files.write_bytes(contest.out, "".join(json.dumps(line) + "\n" for line in lines).encode())
    scores |= {"rows_skipped": float(len(skipped))} if skipped else {}
    texts = ([each.text for each in side] for side in (own, theirs))
    scores = comparison.win_rate_scores(win_S, *texts, turns=max(turns)) | scores
    by = " ".join(filter(None, (contest.judge_model, contest.judge))) or " + ".join(contest.score)
    facts = {"against": str(other), "by": by, "prompts": [*_files(config)], "count": len(own)}
    score_files.keep_win_rate(run, {**facts, **scores})
    pages.write(run)
    return scores


def _require(contest: Contest) -> None:
    if bool(contest.score) == (contest.judge is not None):
        raise ConfigError(
            "--against compares answers by --score REWARD (a reward model's run, a verifier, my.py), or by "
            "--judge 'PROGRAM ...'. Write one of them."
        )
    if contest.out is None:
        return
    if contest.out.suffix != ".jsonl":
        raise ConfigError(f"--out {contest.out}: rows are written as .jsonl. Give the file that ending.")
    if contest.out.exists():
        raise ConfigError(f"{contest.out} exists already. Name another file, or delete it first.")
    files.require_writable(contest.out)


def _files(config: RunConfig) -> list[str]:
    """The files of prompts: of `data.test` where there are any, else of the held-out rows."""
    prompt_files = [*(config.data.test_files or config.data.held_out_files).values()]
    if not prompt_files:
        raise ConfigError(
            "--against: the run held out a share of its training file, and both runs answer the rows of a file. Write "
            "data.test=FILE."
        )
    return prompt_files


def _answers(model: ExportedModel, questions: Questions, contest: Contest) -> list[Answer]:
    """A model's answers, from its own template and tokenizer: to the first turns of all questions, then the second."""
    found: list[Answer] = []
    for turn in range(max(1, len(turns_of(questions[0][1])))):
        if turn:
            said = [(each.example.messages, turns_of(each.row)[turn]) for each in found[-len(questions) :]]
            questions = [
                (replace(question, messages=(*before, {"role": "user", "content": text})), row)
                for (question, row), (before, text) in zip(questions, said, strict=True)
            ]
        asked = [question_of(model, question) for question, _ in questions]
        texts = evaluation.complete(
            model.model,
            [each.ids for each in asked],
            model.tokenizer,
            stop=model.stop,
            max_new_tokens=contest.max_new_tokens,
            pictures=[each.pictures for each in asked],
            processor=model.template.processor,
        )
        found += [answer_to(question, text, row) for (question, row), text in zip(questions, texts, strict=True)]
    return found
