"""Verbs that let a finished run answer: evaluate, predict, generate, sample, serve."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.arguments import RunFolder, RunSettings, Trusted
from workbench.errors import ConfigError
from workbench.runs.process_memory import importing

Devices = Annotated[int | None, typer.Option(min=1, help="Share the rows among so many devices of this machine.")]

if TYPE_CHECKING:
    from workbench.evaluation.serving.served_models import ServedModel


def evaluate(
    run: RunFolder,
    overrides: RunSettings = None,
    against: Annotated[Path | None, typer.Option(help="Another run, whose answers are compared: a win rate.")] = None,
    score: Annotated[list[str] | None, typer.Option(help="With --against: a reward, as `sample` takes it.")] = None,
    judge: Annotated[
        str | None, typer.Option(help="With --against: a program that reads pairs as JSON lines and writes 1, 2 or 0.")
    ] = None,
    judge_timeout: Annotated[float, typer.Option(min=0, help="Seconds for all verdicts.")] = 600.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="With --against: of an answer.")] = 256,
    out: Annotated[Path | None, typer.Option(help="With --against: a .jsonl file of the answers.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, or YAML files of its form: A,B.")] = None,
    limit: Annotated[int | None, typer.Option(help="With --tasks: documents of each.")] = None,
    shots: Annotated[int | None, typer.Option(help="With --tasks: examples before a question.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With --tasks: ask in the chat template.")] = False,
    devices: Devices = None,
    trust: Trusted = False,
) -> None:
    """Score a finished run again. On held-out rows or data.test=FILE, against another run, on tasks of lm-eval."""
    if devices is not None and (tasks is not None or against is not None):
        raise ConfigError("--tasks and --against ask on one device. Leave --devices out.")
    if tasks is not None:
        if overrides or score or judge is not None or out is not None:
            raise ConfigError("--tasks takes no settings, --score, --judge or --out. Leave them out.")
        _ask_tasks(run, tasks, against, limit=limit, shots=shots, chat=chat, trust=trust)
        return
    if limit is not None or shots is not None or chat:
        raise ConfigError("--limit, --shots and --chat are of tasks. Write --tasks NAME as well.")
    if against is None and (score or judge is not None or out is not None):
        raise ConfigError("--score, --judge and --out compare with another run. Write --against OTHER as well.")
    if _done_together(devices):
        return
    with importing():
        from workbench.cli import render
        from workbench.recipes.answers.serve import evaluate as evaluated
        from workbench.runs.ranks import joined

    if against is None:
        scores = evaluated(run, overrides or (), trust=trust)
        if joined().first:
            render.scores(scores)
        return
    from workbench.recipes.answers.win_rate import Contest, win_rate

    contest = Contest(tuple(score or ()), judge, max_new_tokens, judge_timeout, out)
    render.scores(win_rate(run, against, overrides or (), contest, trust=trust))


def _done_together(devices: int | None) -> bool:
    """Whether so many processes were to be started, which have done what this command says and reported."""
    if devices is None:
        return False
    from workbench.training.distributed import launcher

    if launcher.needed():
        launcher.launch(devices, sys.argv[1:])
        return True
    return False


def _ask_tasks(
    run: Path, tasks: str, against: Path | None, *, limit: int | None, shots: int | None, chat: bool, trust: bool
) -> None:
    """Print the scores of tasks before and after, or of two runs."""
    from workbench.cli import render
    from workbench.evaluation.benchmarks import Benchmark
    from workbench.recipes.answers.benchmark import benchmark
    from workbench.report import tasks_section

    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise ConfigError("--tasks: expected a name or a YAML file.")
    task_scores = benchmark(run, Benchmark(names, limit, shots, chat), against=against, trust=trust)
    render.tasks([tasks_section.shown(each.row()) for each in task_scores], before=str(against or "backbone"))


def predict(
    run: RunFolder,
    input: Annotated[str, typer.Argument(help="Rows to answer; answers they hold are ignored.")],
    out: Annotated[Path, typer.Option(help="A .jsonl, .csv or .parquet file to write.")],
    overrides: RunSettings = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    devices: Devices = None,
    trust: Trusted = False,
) -> None:
    """Answer every row of a file. With data.on_bad_row=skip those that cannot be read are left out."""
    if _done_together(devices):
        return
    with importing():
        from workbench.recipes.answers.serve import predict as answer
        from workbench.runs.ranks import joined

    summary = answer(run, input, overrides or (), out=out, max_new_tokens=max_new_tokens, trust=trust)
    if not joined().first:
        return
    typer.echo(f"{summary.rows} answers in {out}")
    for reason in summary.left_out[:20]:
        typer.echo(f"left out: {reason}", err=True)
    if (more := len(summary.left_out) - 20) > 0:
        typer.echo(f"left out: {more} more", err=True)


def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Argument(help="What a user would say.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    trust: Trusted = False,
) -> None:
    """Stream one greedy answer."""
    with importing():
        from workbench.recipes.answers.serve import generate as stream

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
    overrides: RunSettings = None,
    to: Annotated[str, typer.Option(help="Rows to write: best, accepted, pairs or all.")] = "best",
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to each prompt.")] = 8,
    temperature: Annotated[float, typer.Option(help="Logits are divided by it.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    least: Annotated[float | None, typer.Option(help="Lowest reward of an answer that is kept.")] = None,
    margin: Annotated[float, typer.Option(min=0, help="By how much the rewards of a pair differ at least.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    trust: Trusted = False,
) -> None:
    """Sample answers, score them, and write rows. For SFT (best, accepted) or preferences (pairs); repeat to resume."""
    with importing():
        from workbench.cli import sample_table
        from workbench.recipes.answers.sample import SampleSettings
        from workbench.recipes.answers.sample import sample as write

    settings = SampleSettings(to, n, temperature, max_new_tokens, seed, least, margin)
    sample_table.show(write(run, prompts, overrides or (), score, settings, out=out, trust=trust), out)


def serve(
    runs: Annotated[list[str], typer.Argument(help="Run directories, or NAME=DIRECTORY.")],
    host: Annotated[str, typer.Option(help="Address to listen at; others than this machine's own need a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="WORKBENCH_API_KEY", show_envvar=True, help="What clients send as a bearer token."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Answers that are written at the same time.")] = 64,
    queue: Annotated[int, typer.Option(min=0, help="Answers that may wait; more are turned away with 429.")] = 256,
    context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and answer; default: the backbone's.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for a request.")] = 600.0,
    body: Annotated[str, typer.Option(help="Largest request, such as 8MB.")] = "8MB",
    grace: Annotated[int, typer.Option(min=0, help="Seconds for begun answers after SIGTERM or Ctrl-C.")] = 30,
    load_adapters: Annotated[
        bool, typer.Option("--load-adapters", help="Load LoRA adapters from disk where clients ask, as vLLM does.")
    ] = False,
    trust: Trusted = False,
) -> None:
    """Answer over HTTP like OpenAI's interface. Several runs by name in one batch, until SIGTERM or Ctrl-C."""
    from workbench.cli.arguments import byte_size

    size = byte_size(body, option="--body")
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"serve needs {', '.join(missing)}. Install them: pip install 'peft-workbench[serve]'")
    from workbench.evaluation.serving.app import ServerLimits

    with importing():
        from workbench.recipes.serving.serving import ServeSettings, serve_runs
    from workbench.runs.http_server import Address

    limits = ServerLimits(api_key=api_key or None, seconds=timeout, body_bytes=size, loads_adapters=load_adapters)
    settings = ServeSettings(Address(host, port), limits, rows, queue, context, grace)

    def ready(address: str, models: Sequence[ServedModel]) -> None:
        for model in models:
            typer.echo(f"{model.name}: {model.verb}")
        typer.echo(f"{address} answers. Stop it with Ctrl-C or SIGTERM.")

    serve_runs(runs, settings, trust=trust, ready=ready)
