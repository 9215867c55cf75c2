"""Verbs that let a finished run answer: evaluate, predict, generate, sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.arguments import Overrides, RunFolder, Trusted
from workbench.errors import ConfigError


def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    against: Annotated[Path | None, typer.Option(help="Another run, whose answers are compared: a win rate.")] = None,
    score: Annotated[list[str] | None, typer.Option(help="With --against: a reward, as `sample` takes it.")] = None,
    judge: Annotated[
        str | None, typer.Option(help="With --against: a program that reads pairs as JSON lines and writes 1, 2 or 0.")
    ] = None,
    judge_timeout: Annotated[float, typer.Option(min=0, help="Seconds for all verdicts.")] = 600.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="With --against: of an answer.")] = 256,
    out: Annotated[Path | None, typer.Option(help="With --against: a .jsonl file of the answers.")] = None,
    trust: Trusted = False,
) -> None:
    """Score a finished run again, on its held-out rows or on data.test=FILE; or against another run."""
    from workbench.cli import render
    from workbench.recipes.serve import evaluate as evaluated

    if against is None:
        if score or judge is not None or out is not None:
            raise ConfigError("--score, --judge and --out compare with another run. Write --against OTHER as well.")
        render.scores(evaluated(run, overrides or (), trust=trust))
        return
    from workbench.recipes.win_rate import Contest, win_rate

    contest = Contest(tuple(score or ()), judge, max_new_tokens, judge_timeout, out)
    render.scores(win_rate(run, against, overrides or (), contest, trust=trust))


def predict(
    run: RunFolder,
    input: Annotated[str, typer.Argument(help="Rows to answer; answers they hold are ignored.")],
    out: Annotated[Path, typer.Option(help="A .jsonl, .csv or .parquet file to write.")],
    overrides: Overrides = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    trust: Trusted = False,
) -> None:
    """Answer every row of a file; data.on_bad_row=skip leaves out those that cannot be read."""
    from workbench.recipes.serve import predict as answer

    found = answer(run, input, overrides or (), out=out, max_new_tokens=max_new_tokens, trust=trust)
    typer.echo(f"{found.rows} answers in {out}")
    for reason in found.left_out[:20]:
        typer.echo(f"left out: {reason}", err=True)
    if (more := len(found.left_out) - 20) > 0:
        typer.echo(f"left out: {more} more", err=True)


def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Argument(help="What a user would say.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    trust: Trusted = False,
) -> None:
    """Stream one greedy answer."""
    from workbench.recipes.serve import generate as stream

    stream(run, prompt, max_new_tokens=max_new_tokens, trust=trust)


def sample(
    run: RunFolder,
    prompts: Annotated[str, typer.Argument(help="Rows to answer; answers they hold are ignored.")],
    score: Annotated[
        list[str],
        typer.Option(
            help="number, unit_tests, my.py[:function], a run of recipe reward, or '{kind: ..., ...}'; a sum."
        ),
    ],
    out: Annotated[Path, typer.Option(help="A .jsonl file to write.")],
    overrides: Overrides = None,
    to: Annotated[str, typer.Option(help="Rows to write: best, accepted, pairs or all.")] = "best",
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to each prompt.")] = 8,
    temperature: Annotated[float, typer.Option(help="Logits are divided by it.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    least: Annotated[float | None, typer.Option(help="Lowest reward of an answer that is kept.")] = None,
    margin: Annotated[float, typer.Option(min=0, help="By how much the rewards of a pair differ at least.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    trust: Trusted = False,
) -> None:
    """Sample answers, score them, and write rows for SFT (best, accepted) or preferences (pairs); repeat to resume."""
    from workbench.cli import sample_table
    from workbench.recipes.sample import SampleSettings
    from workbench.recipes.sample import sample as write

    settings = SampleSettings(to, n, temperature, max_new_tokens, seed, least, margin)
    sample_table.show(write(run, prompts, overrides or (), score, settings, out=out, trust=trust), out)
