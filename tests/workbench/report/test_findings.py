"""The verdict is honest: each sentence is made of the numbers, and stands only where they say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from workbench.evaluation import held_out_losses
from workbench.evaluation.comparison import PairedScore
from workbench.report import pages
from workbench.report.findings import findings, verdict
from workbench.report.run_record import COLUMNS, RunRecord


def record(
    *,
    config: dict[str, Any] | None = None,
    manifest: dict[str, Any] | None = None,
    metrics: dict[str, list[float]] | None = None,
    scores: dict[str, dict[str, float]] | None = None,
    predictions: dict[str, list[float]] | None = None,
) -> RunRecord:
    steps = len(next(iter((metrics or {"step": []}).values())))
    columns = {"step": range(1, steps + 1), "loss": [4.0] * steps} | (metrics or {})
    return RunRecord(
        folder=Path("run"),
        name="run",
        config_text="",
        config=config or {},
        manifest={"status": "done"} | (manifest or {}),
        metrics=pd.DataFrame(columns).reindex(columns=list(COLUMNS)).astype(float),
        scores=scores or {},
        predictions=pd.DataFrame(predictions or {}),
    )


def said(one: RunRecord) -> str:
    return " ".join(f"[{finding.tone}] {finding.text}" for finding in findings(one))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"loss": 5.57}, {"loss": 3.92}, "Held-out loss fell from 5.57 to 3.92 nats per token."),
        ({"loss": 3.92}, {"loss": 4.01}, "Held-out loss did not fall: 3.92 nats per token before, 4.01 after."),
        ({"loss": 3.92}, {"loss": 3.91}, "Held-out loss hardly moved: 3.92 nats per token before, 3.91 after."),
        ({"loss": 5.0}, {"loss": float("nan")}, "Held-out loss did not fall: 5.00 nats per token before, nan after."),
        ({"loss": 5.0, "f1": 0.05}, {"loss": 4.0, "f1": 0.21}, "; the answers' F1 rose from 0.05 to 0.21."),
        ({"loss": 5.0, "f1": 0.21}, {"loss": 4.0, "f1": 0.05}, "; the answers' F1 fell from 0.21 to 0.05."),
        ({"loss": 5.0, "f1": 0.211}, {"loss": 4.0, "f1": 0.212}, "; the answers' F1 stayed at 0.21."),
    ],
)
def test_verdict_of_a_scored_run(before: dict[str, float], after: dict[str, float], words: str) -> None:
    assert verdict(record(scores={"before": before, "after": after})).endswith(words)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            {"f1": 0.0},
            {"f1": 0.6, "f1_low": 0.5, "f1_high": 0.7},
            "F1 of entities rose from 0.000 to 0.600 (95 %: 0.500 to",
        ),
        (
            {"accuracy": 0.6},
            {"accuracy": 0.62, "accuracy_low": 0.58, "accuracy_high": 0.66},
            "the interval holds what it was",
        ),
        (
            {"accuracy": 0.6},
            {"accuracy": 0.8, "accuracy_low": 0.7, "accuracy_high": 0.9},
            "the most frequent tag gives 0.600.",
        ),
    ],
)
def test_verdict_of_tags(before: dict[str, float], after: dict[str, float], words: str) -> None:
    scores = {"before": {"loss": 2.0, **before}, "after": {"loss": 0.5, **after}}
    one = record(config={"recipe": "tag"}, scores=scores)
    assert words in verdict(one)
    shown = {row["name"]: row for row in pages.scores(one) if row["difference"]}
    assert shown.keys() == {"loss", *before} and shown["loss"]["label"] == "Loss, nats per word"
    (name,) = before
    low = after[f"{name}_low"]
    assert shown[name]["judged"] == ("better" if low > before[name] else "may be chance")


@pytest.mark.parametrize(
    ("after", "interval", "words"),
    [
        (
            3.9,
            (-0.2, -0.04),
            "Held-out loss fell from 4.00 to 3.90 nats per token, by 0.04 to 0.20 (95 % over 9 rows).",
        ),
        (4.1, (0.04, 0.2), "Held-out loss rose from 4.00 to 4.10 nats per token, by 0.04 to 0.20 (95 % over 9 rows): "),
        (3.9, (-0.3, 0.1), "nats per token, which may be chance (95 % over 9 rows: -0.30 to +0.10)."),
        (4.0, None, "Held-out loss hardly moved: 4.00 nats per token before, 4.00 after."),
    ],
)
def test_a_verdict_says_whether_it_may_be_chance(
    after: float, interval: tuple[float, float] | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = PairedScore("loss", 9, 4.0, after, interval, p=None)
    monkeypatch.setattr(held_out_losses, "learnt", lambda folder: found)
    assert words in verdict(record(scores={"before": {"loss": 4.0}, "after": {"loss": after}}))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("running", "Not finished: at step 2 of 1,000 when this page was written"),
        ("stopped", "The run was stopped at step 2 of 1,000"),
        ("failed", "The run failed at step 2 of 1,000"),
        ("done", "The run ended at step 2 of 1,000 and was not scored"),
    ],
)
def test_verdict_of_a_run_without_scores(status: str, words: str) -> None:
    manifest = {"status": status, "batch": {"steps": 1000}}
    assert verdict(record(manifest=manifest, metrics={"loss": [5.0, 4.0]})) == words + "."
    measured = {"loss": [5.0, 4.0], "held_out_loss": [4.5, 4.75]}
    scores = {"before": {"loss": 5.57}}
    best = "; lowest held-out loss 4.50 nats per token at step 1 (5.57 before training)."
    assert verdict(record(manifest=manifest, metrics=measured, scores=scores)) == words + best


@pytest.mark.parametrize(
    ("losses", "ship", "words"),
    [
        ([5, 4, 3.8, 4.1, 4.2], "best", "lowest (3.80) at step 3 and 4.20 at step 5: the run overfits"),
        ([5, 4, 3.8, 4.1, 4.2], "best", "That best adapter is the one saved."),
        ([5, 4, 3.8, 4.1, 4.2], "last", "save.ship=best would save that adapter"),
        ([5, 4.5, 4, 3.5, 3.4], "last", "[plain] Held-out loss was still falling at the end"),
        ([5, 4, 3.8, 3.79, 3.8], "last", ""),  # a change below 1 % says nothing
        ([5], "last", ""),
    ],
)
def test_overfitting_and_stopping_early(losses: list[float], ship: str, words: str) -> None:
    text = said(record(config={"save": {"ship": ship}}, metrics={"held_out_loss": losses}))
    assert words in text
    assert bool(text) == bool(words)


AVERAGED = {"average": {"method": "ema"}}


@pytest.mark.parametrize(
    ("config", "test", "words"),
    [
        ({}, {}, ""),
        (AVERAGED, {}, "the better of the values and their average, so that their scores flatter it. data.test=FILE"),
        (AVERAGED, {"test": {"loss": 3.75}}, "On the test rows, scored once, its loss is 3.7500."),
        ({"save": {"ship": "best"}}, {}, "the best of 3 evaluations, so"),
        ({"save": {"ship": "best"}} | AVERAGED, {}, "the best of 3 evaluations and the better of the values and"),
        ({"recipe": "crossval"} | AVERAGED, {}, ""),
    ],
)
def test_scores_of_rows_that_chose_are_told_to_flatter(config: dict[str, Any], test: Any, words: str) -> None:
    scores = {"before": {"loss": 5.0}, "after": {"loss": 3.5}} | test
    text = said(record(config=config, scores=scores, metrics={"held_out_loss": [4.0, 3.6, 3.6]}))
    assert words in text and bool(words) == ("flatter" in text)


def test_a_failed_run_is_not_told_to_go_on() -> None:
    assert said(record(manifest={"status": "failed"}, metrics={"held_out_loss": [5.0, 4.0]})) == ""


@pytest.mark.parametrize(("norms", "words"), [([2, 3, 0.5], "in 67 % of the steps (median norm 2.00)"), ([2, 0.5], "")])
def test_clipping_is_told_above_half_of_the_steps(norms: list[float], words: str) -> None:
    text = said(record(config={"train": {"max_grad_norm": 1.0}}, metrics={"grad_norm": norms}))
    assert words in text
    assert bool(text) == bool(words)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (
            [0.3, 0.2, 0.4, 0.3],
            "[good] The answers changed by more than chance: F1 +0.200 ± 0.080 (95 %) over 4 answers.",
        ),
        ([0.0, 0.0, 0.1, 0.0], "[warning] The answers changed by more than chance: F1 -0.075"),
        ([0.0, 0.9, 0.1, 0.1], "[warning] The change of the answers may be chance: F1 +0.175 ±"),
    ],
)
def test_the_answers_difference_comes_with_its_chance(after: list[float], words: str) -> None:
    before = [0.1, 0.1, 0.1, 0.1]
    scores = {"before": {"f1": sum(before) / 4}, "after": {"f1": sum(after) / 4}}
    assert words in said(record(scores=scores, predictions={"f1_before": before, "f1_after": after}))


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([0.1, 0.0, 0.2, 0.1], "[good] The answers changed by more than chance: word error rate -0.400 ±"),
        ([0.9, 0.8, 1.0, 0.9], "[warning] The answers changed by more than chance: word error rate +0.400 ±"),
        ([0.0, 0.9, 0.1, 0.9], "[warning] The change of the answers may be chance: word error rate -0.025 ±"),
    ],
)
def test_an_error_rate_is_better_where_it_falls(after: list[float], words: str) -> None:
    before = [0.5, 0.5, 0.5, 0.5]
    scores = {"before": {"wer": 0.5}, "after": {"wer": sum(after) / 4}}
    assert words in said(record(scores=scores, predictions={"wer_before": before, "wer_after": after}))


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"rows": 100, "truncated": 12}, "12 % of the training examples were cut at 256 tokens."),
        ({"rows": 100, "truncated": 5}, ""),
        ({"rows": 100, "skipped": 1}, "1 row of the training file was left out."),
        ({"rows": 0}, ""),
    ],
)
def test_data_that_was_not_used(train: dict[str, int], words: str) -> None:
    text = said(record(config={"data": {"max_tokens": 256}}, manifest={"data": {"train": train, "test": None}}))
    assert words in text
    assert bool(text) == bool(words)


@pytest.mark.parametrize(
    ("steps", "warmup", "words"),
    [
        (1, 0.05, "has only 1 step, in which an adapter hardly moves. Write train.steps=100"),
        (5, 0.0, "has only 5 steps"),
        (5, 0.1, "schedule.warmup=0.1 of 5 steps is less than one step"),
        (19, 0.05, "Write train.steps=20, or schedule.warmup=0."),
        (20, 0.05, ""),
        (12, 0.0, ""),
    ],
)
def test_a_run_of_few_steps_is_told(steps: int, warmup: float, words: str) -> None:
    told = said(record(config={"schedule": {"warmup": warmup}}, manifest={"batch": {"steps": steps}}))
    assert words in told and bool(told) == bool(words)


def test_what_the_rows_said_is_told() -> None:
    assert said(record(manifest={"told": ["a.csv has texts and labels."]})) == "[warning] a.csv has texts and labels."
