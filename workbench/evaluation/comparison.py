"""Two models on the same rows: paired tests of a score, win rates of answers, and a judge program.

Legend: S rows or prompts that both have.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from workbench.data.rows import excerpt
from workbench.data.text import generated_answers
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError
from workbench.evaluation import metrics, prediction_table
from workbench.runs import units

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]
CONTENT = ("row", "prompt", "text", "rejected", "image", "audio", "reference", "label")
"""Columns of a table of predictions that identify a row: its place and its content."""
VERDICTS = {"1": 1, "2": 2, "0": 0}  # the first answer is better, the second one, neither


@dataclass(frozen=True)
class PairedScore:
    """A score of two models over the rows that both have."""

    name: str
    rows: int
    first: float
    second: float  # means of the score over the rows
    interval: tuple[float, float] | None  # student's 95 % interval of second - first; None where no row differs
    p: float | None  # probability of a difference of this size or more where there is none; None where no row differs

    @property
    def difference(self) -> float:
        """second - first."""
        return self.second - self.first


def compare(first: pd.DataFrame, second: pd.DataFrame) -> list[PairedScore]:
    """Scores of two tables of predictions (`predictions.parquet`) over the rows that are in both.

    For scores of 0 and 1, p is that of McNemar's exact test (1947), else that of Student's paired t-test.
    """
    ours, theirs = _by_row(first), _by_row(second)
    same = ours.index.intersection(theirs.index)
    if len(same) < 2:
        return []
    pairs = (
        (name, ours.loc[same, name].to_numpy(), theirs.loc[same, name].to_numpy()) for name in ours if name in theirs
    )
    # Of a query for which nothing was to be found there is no score.
    return [
        paired(name, *(each[~np.isnan(first_S)] for each in (first_S, second_S))) for name, first_S, second_S in pairs
    ]


def mean_interval(value_S: Floats) -> tuple[float, float] | None:
    """Student's 95 % interval of a mean, such as of differences; None below two values, or where all are equal."""
    return _mean_test(value_S)[0]


def _mean_test(value_S: Floats) -> tuple[tuple[float, float] | None, float | None]:
    count = len(value_S)
    error = float(value_S.std(ddof=1)) / count**0.5 if count > 1 else 0.0
    return t_test(float(value_S.mean()) if count else 0.0, error, count)


def t_test(difference: float, error: float, count: int) -> tuple[tuple[float, float] | None, float | None]:
    """Student's 95 % interval of a difference over `count` rows with this standard error, and p; None without error."""
    if count < 2 or error == 0:  # as where no answer changed, which says nothing of other rows
        return None, None
    from scipy import stats  # 0.5 s, and most pages compare nothing

    bound = float(stats.t.ppf(0.975, count - 1)) * error
    return (difference - bound, difference + bound), float(2 * stats.t.sf(abs(difference) / error, count - 1))


def paired(name: str, first_S: Floats, second_S: Floats) -> PairedScore:
    """A score `name` of two models over rows that both have; p as `compare` says."""
    difference_S = second_S - first_S
    bounds, p = _mean_test(difference_S)
    if bounds is not None and np.isin(first_S, (0, 1)).all() and np.isin(difference_S, (-1, 0, 1)).all():
        from scipy import stats

        gained, lost = int((difference_S > 0).sum()), int((difference_S < 0).sum())
        p = float(stats.binomtest(gained, gained + lost).pvalue)
    return PairedScore(name, len(first_S), float(first_S.mean()), float(second_S.mean()), bounds, p)


def _by_row(table: pd.DataFrame) -> pd.DataFrame:
    """Scores of a table, indexed by the identity of each row; rows that occur twice are left out."""
    import pandas as pd  # 0.2 s, which a first step need not wait for

    if "row" not in table:
        return pd.DataFrame()
    keys = [[_plain(cell) for cell in table[name]] for name in CONTENT if name in table]
    scores = pd.DataFrame(_row_scores(table))
    scores.index = pd.Index(list(zip(*keys, strict=True)), tupleize_cols=False)
    return scores[~scores.index.duplicated(keep=False)]


def _row_scores(table: pd.DataFrame) -> dict[str, Floats]:
    """Scores of each row (N,), by their names in scores.json."""
    if "f1_after" in table:
        return {"f1": _floats(table["f1_after"]), "rouge_l": _floats(table["rouge_l_after"])}
    if "wer_after" in table:
        return {"wer": _floats(table["wer_after"]), "cer": _floats(table["cer_after"])}
    if "reward_after" in table:
        return {"reward": _floats(table["reward_after"])}
    if "margin" in table:
        return {"accuracy": _floats(table["margin"] > 0), "margin": _floats(table["margin"])}
    if "ndcg@10" in table:
        hits = table["right"] if "right" in table else table["label"] == table["nearest_label"]
        return {"ndcg@10": _floats(table["ndcg@10"]), "accuracy": _floats(hits)}
    if "similarity" in table and "score" in table:
        return {"spearman": _rank_products(_floats(table["similarity"]), _floats(table["score"]))}
    if "right" in table:
        return {"accuracy": _floats(table["right"])}
    if "label" not in table or "predicted" not in table:
        return {}
    if "words" in table:  # which have a tag each
        tags = zip(table["label"].str.split(), table["predicted"].str.split(), strict=True)
        return {"word_accuracy": _floats([np.equal(label, predicted).mean() for label, predicted in tags])}
    if not prediction_table.class_names(table):
        return {"absolute_error": _floats((table["predicted"] - table["label"]).abs())}
    scores = {"accuracy": _floats(prediction_table.ranked(table).right_N)}
    loss_N = prediction_table.log_losses(table)
    return scores if loss_N is None else {**scores, "loss": loss_N}


def _rank_products(one_S: Floats, other_S: Floats) -> Floats:
    """The share of each row in Spearman's correlation, which is their mean."""
    from scipy import stats

    ranks = [stats.rankdata(each) for each in (one_S, other_S)]
    one, other = ((each - each.mean()) / (each.std() or 1.0) for each in ranks)
    return np.asarray(one * other, dtype=np.float64)


def _floats(column: npt.ArrayLike) -> Floats:
    return np.asarray(column, dtype=np.float64)


def _plain(cell: object) -> object:
    """A cell as a value that can be compared; the order of several classes does not matter."""
    return tuple(sorted(map(str, cell))) if isinstance(cell, (list, tuple, np.ndarray)) else cell


def wins_by_reward(own_S: Sequence[float], other_S: Sequence[float]) -> Floats:
    """1 where the own answer has the higher reward, 0 where it has the lower one, 0.5 where they are equal; (S,)."""
    return np.asarray((1 + np.sign(np.asarray(own_S) - np.asarray(other_S))) / 2, dtype=np.float64)


def wins_by_verdict(own_first_S: Sequence[int], other_first_S: Sequence[int]) -> Floats:
    """Mean of two verdicts on each pair of answers (S,), so that the order of the answers cancels out. `own_first_S`:
    with the own answer first: 1 where the first is better, 2 where the second is, 0 for neither. `other_first_S`: the
    same with the other model's answer first."""
    points = np.asarray([0.5, 1.0, 0.0])
    own, other = (points[np.asarray(each, dtype=np.int64)] for each in (own_first_S, other_first_S))
    return np.asarray((own + 1 - other) / 2, dtype=np.float64)


def order_agreement(own_first_S: Sequence[int], other_first_S: Sequence[int]) -> float:
    """Share of prompts whose verdict stays the same when the order changes; 0 for a judge that decides by position."""
    return float((np.asarray(own_first_S) == np.asarray([0, 2, 1])[np.asarray(other_first_S)]).mean())


def win_rate_interval(win_S: Floats) -> tuple[float, float]:
    """95 % interval of the mean of wins (1), losses (0) and ties between them.

    Wilson's where there are wins and losses alone, or where all prompts end alike; else Student's of the mean over
    prompts, clipped to 0 and 1.
    """
    shares = mean_interval(win_S)
    if np.isin(win_S, (0, 1)).all() or shares is None:
        wilson = metrics.accuracy_interval(float(win_S.sum()), len(win_S))
        return wilson.low, wilson.high
    return max(0.0, shares[0]), min(1.0, shares[1])


def win_rate_scores(win_S: Floats, own: Sequence[str], other: Sequence[str], *, turns: int = 1) -> dict[str, float]:
    """Scores by name: the win rate with its 95 % interval, where a tie counts half, and what may explain it.

    `longer` is how often the longer of two answers wins, over answers that differ in length (words): far above one half
    means that length is rewarded. `words` and `repetition` are means over the own answers and over the other's.

    Where each question has several `turns`, `win_S` has the first ones of all questions, then the second ones. The
    answers to one question are not independent: intervals, also those of `win_rate_turn_1` and so on, are then
    percentiles of a bootstrap over questions.
    """
    win_QT = win_S.reshape(turns, -1).T
    low, high = win_rate_interval(win_QT.mean(1))
    score_by_name = {
        "win_rate": float(win_S.mean()),
        "win_rate_low": low,
        "win_rate_high": high,
        "ties": float((win_S == 0.5).mean()),
    }
    if turns > 1:
        names = ["win_rate", *(f"win_rate_turn_{turn + 1}" for turn in range(turns))]
        score_by_name |= metrics.bootstrap_means(names, np.column_stack([win_QT.mean(1), win_QT]))
    longer_S = np.asarray([len(a.split()) - len(b.split()) for a, b in zip(own, other, strict=True)])
    if (unlike_S := longer_S != 0).any():
        score_by_name["longer"] = float(np.where(longer_S > 0, win_S, 1 - win_S)[unlike_S].mean())
    score_by_name |= generated_answers.answer_lengths(own)
    score_by_name |= {f"{name}_other": value for name, value in generated_answers.answer_lengths(other).items()}
    return units.rounded(score_by_name)


def judge_verdicts(
    command: str, pairs: Sequence[tuple[Answer, Answer]], *, timeout: float, key: str = "--judge"
) -> list[int]:
    """Verdicts of a user's program on pairs of answers: 1, 2 or 0, as in VERDICTS.

    It reads lines `{"prompt": ..., "messages": [...], "first": ..., "second": ..., "row": {...}}` from its standard
    input, and writes a line `1`, `2` or `0` for each; where the conversations before two answers differ,
    `second_messages` is that of the second. Raises ConfigError: it cannot be started, fails, takes too long,
    or writes something else.

    Args:
        command: Program and arguments; no shell reads it.
        timeout: Seconds for all pairs.
        key: Names it in errors.
    """
    lines = []
    for first, second in pairs:
        asked = {"prompt": first.prompt, "messages": list(first.messages), "row": dict(first.row)}
        if first.messages != second.messages:
            asked["second_messages"] = list(second.messages)
        lines.append(json.dumps({**asked, "first": first.text, "second": second.text}, default=str) + "\n")
    text = "".join(lines)
    try:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except (OSError, ValueError, IndexError) as error:
        raise _judge_error(key, command, f"cannot be started ({error}). Name a program and its arguments") from None
    with process:  # closes its pipes, however it ends
        try:
            out, errors = process.communicate(text, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise _judge_error(
                key, command, f"took more than {timeout:g} s. Make it faster, or raise --judge-timeout"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = (errors.strip().splitlines() or ["it wrote no reason"])[-1]
        raise _judge_error(key, command, f"ended with status {process.returncode}: {last}. Correct it")
    judgements = [line.strip() for line in out.split("\n") if line.strip()]
    if len(judgements) != len(pairs):
        raise _judge_error(
            key, command, f"wrote {len(judgements)} lines for {len(pairs)} pairs. Let it write 1, 2 or 0 for each line"
        )
    for number, verdict in enumerate(judgements):
        if verdict not in VERDICTS:
            raise _judge_error(
                key, command, f"wrote {excerpt(verdict)} in line {number + 1}. Let it write 1, 2 or 0 (neither)"
            )
    return [VERDICTS[verdict] for verdict in judgements]


def _judge_error(key: str, command: str, problem: str) -> ConfigError:
    return ConfigError(f"{key} {command!r} {problem}.")
