"""The command line. Verbs are thin: each reads its arguments, calls a recipe and prints what came back."""

from __future__ import annotations

import gc
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.arguments import (
    Devices,
    Groups,
    Moved,
    Overrides,
    Recipe,
    RunFolder,
    RunSettings,
    Trusted,
    Version,
    complete_explained,
    weights_of,
)
from workbench.errors import ConfigError, Stopped, WorkbenchError, unnameable
from workbench.planning import cards
from workbench.runs import units
from workbench.runs.process_memory import importing, restart_without_caches

if TYPE_CHECKING:
    from workbench.config import RunConfig
    from workbench.evaluation.serving.served_models import ServedModel

app = typer.Typer(
    cls=Groups,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich is half of what --help would take
    context_settings={"help_option_names": ["-h", "--help"]},
)
_RUNS = Path("runs")
_FIRST = """\
Fine-tune pretrained Hugging Face backbones, and know the truth about the result.

  workbench run sft/quickstart    a first run, with what comes with the package
  workbench init my.yaml          a recipe that fits, for your model and your rows
  workbench explain WORD          what a setting, a method or a word of the field means

All commands: workbench --help"""


def _loaded(recipe: str, overrides: Sequence[str] | None, *, rows: bool = True) -> RunConfig:
    """The configuration of a recipe; it and its rows are read before torch is imported, so that mistakes are told at
    once."""
    from workbench.recipes import first_look
    from workbench.recipes.load import load, require_found

    config = load(recipe, overrides or ())
    require_found(config)
    if rows:
        first_look.require_rows(config)
    return config


@app.callback()
def start(context: typer.Context, version: Version = False) -> None:
    """Fine-tune pretrained Hugging Face backbones, and know the truth about the result."""
    if context.invoked_subcommand is None:
        typer.echo(_FIRST)


@app.command(rich_help_panel=Groups.TRAIN)
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    devices: Annotated[int | None, typer.Option(min=1, help="Train on so many of this machine together.")] = None,
    push: Annotated[
        str | None, typer.Option(help="Copy checkpoints and the finished run here, such as s3://BUCKET/RUN.")
    ] = None,
    each: Annotated[str | None, typer.Option(help="KEY=[VALUE, VALUE]: a run for each, side by side in --out.")] = None,
) -> None:
    """Train, score and report."""
    if each is not None:
        if devices is not None or push is not None:
            raise ConfigError("--each runs one after another here. Leave --devices and --push out.")
        _run_each(recipe, overrides or (), each, out, resume=resume)
        return
    from workbench.recipes import first_look
    from workbench.recipes.load import directory
    from workbench.recipes.verbs import opening
    from workbench.runs import addresses, remote_copy
    from workbench.training.distributed import launcher

    config = _loaded(recipe, overrides, rows=False)
    out = out or directory(recipe, resume=resume)
    if push is not None and resume and launcher.needed():
        remote_copy.fetch(push, out)
    if launcher.needed():  # else the launcher has looked
        first_look.require(config, devices=devices or 1, out=out, resume=resume)
    if push is not None and launcher.needed() and not resume:  # which may go on with a copy
        addresses.require_free(push)
    if launcher.needed():  # else the launcher has printed them
        for sentence in opening.sentences(recipe, overrides or ()):
            typer.echo(sentence, err=True)
    if _launched(devices):
        return

    import workbench
    from workbench.cli import render

    with importing():
        import workbench.recipes.verbs.run
        from workbench.runs import deadline, run_log
        from workbench.runs.ranks import joined

    path = workbench.run(config, out=out, resume=resume, push=push, began=deadline.process_began())
    if joined().first:
        run_log.add(path, render.outcome(path))
        if push is not None:
            typer.echo(f"Copied to {push}")


def _run_each(recipe: str, overrides: Sequence[str], each: str, out: Path | None, *, resume: bool) -> None:
    from workbench.cli.each_value import run_each
    from workbench.recipes.load import directory

    folder = out or directory(recipe, resume=resume)
    with importing():
        from workbench import report
        from workbench.cli import render
    runs = run_each(recipe, each, overrides, out=folder, resume=resume, ended=render.outcome)
    page = folder / "comparison.html"
    render.comparison(report.compare(runs, page), page)


@app.command(rich_help_panel=Groups.BEFORE)
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of rates, layers and pictures to write, a .png.")] = None,
) -> None:
    """Show what the model sees and which tokens carry loss. A run that would not train is refused."""
    from workbench.recipes import first_look

    config = _loaded(recipe, overrides, rows=False)
    first_look.require(config, devices=config.distributed.together)
    with importing():
        from workbench.cli import check_output
        from workbench.recipes.verbs.check import check as inspect

    if plot is not None:
        check_output.require_new_plot(plot, config)
    found = inspect(config)
    check_output.inspection(found)
    if plot is not None:
        check_output.write_plot(plot, found)
        typer.echo(f"Plot: {plot}")


@app.command(rich_help_panel=Groups.BEFORE)
def data(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder for data.html and flags.parquet.")] = Path("data-report"),
    perplexity: Annotated[str, typer.Option(help="Rows that the backbone reads: auto, all, off, a number.")] = "auto",
) -> None:
    """Show what is in the rows and what is wrong with them. Lengths, languages, duplicates, quality rules."""
    config = _loaded(recipe, overrides, rows=False)  # of which the report tells
    with importing():
        from workbench.cli import render
        from workbench.recipes.verbs import data_report

    render.data(data_report.data_report(config, out=out, name=recipe, perplexity=perplexity))


@app.command(rich_help_panel=Groups.BEFORE)
def features(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="A .parquet file for features, rows and labels.")] = None,
) -> None:
    """Score the labels by the frozen backbone's features. With --out, write the features."""
    config = _loaded(recipe, overrides)
    with importing():
        from workbench.recipes.verbs.features import features as probed

    typer.echo(probed(config, out=out).sentence)
    if out is not None:
        typer.echo(f"Features: {out}")


@app.command(rich_help_panel=Groups.BEFORE)
def lr(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder for learning_rate.svg and learning_rate.json.")] = Path("lr"),
    lowest: Annotated[float | None, typer.Option(help="Lowest rate; default the recipe's / 32.")] = None,
    highest: Annotated[float | None, typer.Option(help="Highest rate; default the recipe's * 32.")] = None,
    rates: Annotated[int, typer.Option(min=3, max=50, help="How many rates.")] = 11,
    steps: Annotated[int | None, typer.Option(min=8, help="Steps of each; default 24, or those of the run.")] = None,
) -> None:
    """Find a learning rate by short trainings. All go over one frozen backbone, on the same rows."""
    config = _loaded(recipe, overrides)
    with importing():
        from workbench.cli import render
        from workbench.cli.console import Terminal
        from workbench.recipes.verbs import rate_finder

    with Terminal() as terminal:
        tried = rate_finder.find_learning_rate(
            config, out=out, lowest=lowest, highest=highest, rates=rates, steps=steps, callback=terminal
        )
    render.learning_rates(tried)


@app.command(rich_help_panel=Groups.BEFORE)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Annotated[int | None, typer.Option(min=1, help="How many; with --memory they may be elsewhere.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of each device, such as 24GB; default: free memory here.")] = None,
    device: Annotated[str | None, typer.Option(help="A card that need not be here, such as 4090 or h100.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Of the machine with all devices, such as 128GB; default: free memory here.")
    ] = None,
    longest_row: Annotated[bool, typer.Option("--longest-row", help="Find the longest row that would fit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Predict the memory and time of a run. The fastest configuration that fits, and the others that were tried."""
    size = None if memory is None else units.byte_size(memory, name="--memory")
    host = None if host_memory is None else units.byte_size(host_memory, name="--host-memory")
    if device is not None and device != "cpu":
        cards.find(device)
    config = _loaded(recipe, overrides)
    with importing():
        from workbench.cli import render
        from workbench.recipes.verbs.plans import plan

    choice = plan.solve(config, devices=devices, memory=size, device=device, host_memory=host)
    stored = config.model_copy(update={"model": choice.config.model})
    target = plan.PlanTarget.of(devices, size, device)
    longest = plan.longest_row(stored, memory=target.memory, elsewhere=target.elsewhere) if longest_row else None
    (render.plan_json if json else render.plan)(choice.plan, longest)
    choice.require()


@app.command(name="distill-cache", rich_help_panel=Groups.TRAIN)
def distill_cache(
    recipe: Recipe,
    overrides: Overrides = None,
    read: Annotated[Path | None, typer.Option(help="A folder of DistillKit's logits, in place of a teacher.")] = None,
    write: Annotated[Path | None, typer.Option(help="A new folder for the same as DistillKit reads it.")] = None,
) -> None:
    """Compute a teacher's outputs for all training rows, once. They are stored in distill.cache.folder."""
    config = _loaded(recipe, overrides)
    from workbench.cli.console import Terminal
    from workbench.recipes.over import distill_verbs

    with Terminal() as terminal:
        facts = distill_verbs.distill_cache(config, read=read, write=write, callback=terminal)
    for name, value in facts.items():
        typer.echo(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


@app.command(name="distill-student", rich_help_panel=Groups.TRAIN)
def distill_student(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="A new folder for a stock model.")],
    overrides: Overrides = None,
) -> None:
    """Write a student before it trains. Any recipe takes the folder as model.id."""
    config = _loaded(recipe, overrides)
    from workbench.cli.console import Terminal
    from workbench.recipes.over import distill_verbs

    with Terminal() as terminal:
        distill_verbs.distill_student(config, out=out, callback=terminal)
    typer.echo(f"Written: {out}. Train it with model.id={out}.")


@app.command(rich_help_panel=Groups.USE)
def evaluate(
    run: RunFolder,
    overrides: RunSettings = None,
    against: Annotated[
        Path | None, typer.Option(help="Another run, on the same rows in pairs; with a reward or judge also backbone.")
    ] = None,
    drafts_for: Annotated[
        Path | None, typer.Option(help="A teacher's run: how much faster it writes with this one's drafts.")
    ] = None,
    score: Annotated[list[str] | None, typer.Option(help="With --against: a reward for a win rate.")] = None,
    judge: Annotated[
        str | None, typer.Option(help="With --against: an address, or a program; JSON pairs in, 1, 2 or 0 out.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="With --judge ADDRESS: the model's name there.")] = None,
    judge_timeout: Annotated[float | None, typer.Option(min=0, help="Seconds for all verdicts; 600.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="With a reward or judge: of an answer; 256.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With a reward or judge: a .jsonl file of the answers.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, or YAML files of its form: A,B.")] = None,
    limit: Annotated[int | None, typer.Option(help="With --tasks: documents of each.")] = None,
    shots: Annotated[int | None, typer.Option(help="With --tasks: examples before a question.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With --tasks: ask in the chat template.")] = False,
    devices: Devices = None,
    trust: Trusted = False,
) -> None:
    """Score a finished run again. On rows, against another run, on tasks of lm-eval, as the drafter of its teacher."""
    if devices is not None and (tasks is not None or against is not None or drafts_for is not None):
        raise ConfigError("--drafts-for, --tasks and --against ask on one device. Leave --devices out.")
    if drafts_for is not None and (tasks is not None or against is not None):
        raise ConfigError("--drafts-for measures one thing alone. Leave --tasks and --against out.")
    contest: dict[str, Any] = {"score": score, "judge": judge, "judge_model": judge_model}
    contest["judge_timeout"] = judge_timeout
    contest |= {"max_new_tokens": max_new_tokens, "out": out}
    contest = {name: value for name, value in contest.items() if value is not None}
    given = [f"--{name.replace('_', '-')}" for name in contest]
    if tasks is not None:
        if given:
            raise ConfigError(f"--tasks takes no {' and no '.join(given)}. Leave it out.")
        _ask_tasks(run, tasks, overrides or (), against, limit=limit, shots=shots, chat=chat, trust=trust)
        return
    if limit is not None or shots is not None or chat:
        raise ConfigError("--limit, --shots and --chat are of tasks. Write --tasks NAME as well.")
    if against is None and given:
        raise ConfigError(f"{given[0]} is there to compare with another run. Write --against OTHER as well.")
    from workbench.recipes.verbs.asked_config import asked_config

    asked_config(run, overrides or (), verb="evaluate", trust=trust)  # mistakes come before torch
    if _launched(devices):
        return
    with importing():
        from workbench.cli import render
        from workbench.recipes.verbs.evaluate import evaluate as evaluated
        from workbench.runs.ranks import joined

    if drafts_for is not None:
        from workbench.recipes.verbs.drafting import drafts

        render.drafts(drafts(run, drafts_for, overrides or (), trust=trust))
        return
    if against is None:
        scores = evaluated(run, overrides or (), trust=trust)
        if joined().first:
            render.scores(scores)
        return
    if not given:
        from workbench.recipes.verbs.paired_evaluation import paired
        from workbench.report import pages

        pairs, notes = paired(run, against, overrides or (), trust=trust)
        render.paired([pages.paired_row(run.name, each) for each in pairs])
        for note in notes:
            typer.echo(note)
        return
    from workbench.recipes.verbs.win_rate import win_rate

    scores = win_rate(
        run,
        against,
        overrides or (),
        trust=trust,
        **contest,
    )
    render.scores(scores)


@app.command(rich_help_panel=Groups.USE)
def predict(
    run: RunFolder,
    input: Annotated[str, typer.Argument(help="Rows to answer; answers they hold are ignored.")],
    out: Annotated[Path, typer.Option(help="A .jsonl, .csv or .parquet file to write.")],
    overrides: RunSettings = None,
    like: Annotated[
        Path | None, typer.Option(help="A leaderboard's sample submission, whose rows are written.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    devices: Devices = None,
    trust: Trusted = False,
) -> None:
    """Answer every row of a file. With data.on_bad_row=skip, unreadable rows are left out."""
    from workbench.data import source_files
    from workbench.recipes.verbs.asked_config import asked_config

    config = asked_config(run, overrides or (), verb="predict", trust=trust)  # mistakes come before torch
    if config.media is None:
        source_files.data_files(input, config.data)
    if _launched(devices):
        return
    with importing():
        from workbench.evaluation import forward_passes
        from workbench.recipes.verbs.generate import predict as answer
        from workbench.runs.ranks import joined

    with forward_passes.progress(partial(typer.echo, err=True) if joined().first else str):
        summary = answer(run, input, overrides or (), out=out, like=like, max_new_tokens=max_new_tokens, trust=trust)
    if not joined().first:
        return
    typer.echo(f"{summary.rows} answers in {out}")
    for note in summary.notes:
        typer.echo(note)
    for reason in summary.left_out[:20]:
        typer.echo(f"left out: {reason}", err=True)
    if (more := len(summary.left_out) - 20) > 0:
        typer.echo(f"left out: {more} more", err=True)


def _require_run(run: Path) -> None:
    """Raise ConfigError, before torch is imported, where a folder is no run directory."""
    from workbench.runs import run_directory

    run_directory.shipped_values(run)


def _launched(devices: int | None) -> bool:
    """Run this command in so many processes, unless this is one of them; whether that was done."""
    if devices is None:
        return False
    from workbench.training.distributed import launcher

    if not launcher.needed():
        return False
    launcher.launch(devices, sys.argv[1:])
    return True


def _ask_tasks(
    run: Path,
    tasks: str,
    overrides: Sequence[str],
    against: Path | None,
    *,
    limit: int | None,
    shots: int | None,
    chat: bool,
    trust: bool,
) -> None:
    """Print the scores of tasks before and after, or of two runs."""
    from workbench.cli import render
    from workbench.recipes.verbs.benchmark import benchmark
    from workbench.report import task_sections

    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise ConfigError("--tasks: expected a name or a YAML file.")
    task_scores = benchmark(run, names, overrides, against=against, limit=limit, shots=shots, chat=chat, trust=trust)
    render.tasks([task_sections.benchmark_row(each.row()) for each in task_scores], before=str(against or "backbone"))


@app.command(rich_help_panel=Groups.USE)
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Argument(help="What a user would say; a recording that is transcribed.")],
    overrides: Moved = None,
    picture: Annotated[list[Path] | None, typer.Option(help="A picture that it is about; several.")] = None,
    recording: Annotated[list[Path] | None, typer.Option(help="A recording that it is about; several.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    trust: Trusted = False,
) -> None:
    """Stream one greedy answer."""
    _require_run(run)
    with importing():
        from workbench.recipes.verbs.generate import generate as answer

    answer(
        run,
        prompt,
        overrides or (),
        pictures=picture or (),
        recordings=recording or (),
        max_new_tokens=max_new_tokens,
        trust=trust,
        write=partial(print, end="", flush=True),
    )
    print()


@app.command(rich_help_panel=Groups.USE)
def sample(
    teacher: Annotated[
        str, typer.Argument(help="A run directory, a folder or hub id of a model, or an address up to /v1.")
    ],
    prompts: Annotated[str, typer.Argument(help="Rows to answer; answers they hold are ignored.")],
    out: Annotated[Path, typer.Option(help="A .jsonl file to write.")],
    overrides: RunSettings = None,
    score: Annotated[
        list[str] | None, typer.Option(help="number, vote, likelihood, my.py[:function], a reward run, '{kind: ...}'.")
    ] = None,
    to: Annotated[str, typer.Option(help="Rows to write: best, accepted, pairs or all.")] = "best",
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to each prompt, in each wording.")] = 8,
    wording: Annotated[
        list[str] | None, typer.Option(help="A way to ask, such as '{prompt} Think step by step.'; several.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Logits are divided by it.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    least: Annotated[float | None, typer.Option(help="Lowest reward of an answer that is kept.")] = None,
    margin: Annotated[float, typer.Option(min=0, help="By how much the rewards of a pair differ at least.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    model: Annotated[str | None, typer.Option(help="Of an address: the model's name there.")] = None,
    at_once: Annotated[int, typer.Option(min=1, max=100, help="Of an address: requests at the same time.")] = 4,
    retries: Annotated[int, typer.Option(min=0, help="Of an address: after failures that may pass.")] = 7,
    timeout: Annotated[float, typer.Option(min=0.001, help="Of an address: longest wait, in seconds.")] = 600.0,
    price: Annotated[str | None, typer.Option(help="Of a million tokens that are read, and written: 0.5,1.5.")] = None,
    trust: Trusted = False,
) -> None:
    """Sample answers, score them, and write rows. For SFT (best, accepted) or preferences (pairs); repeat to resume."""
    if not _may_be_model(teacher):
        _require_run(Path(teacher))
    with importing():
        from workbench.cli import render
        from workbench.recipes.verbs.sample import sample as write

    sampled = write(
        teacher,
        prompts,
        overrides or (),
        score=score or (),
        out=out,
        model=model,
        at_once=at_once,
        retries=retries,
        timeout=timeout,
        price=None if price is None else price.split(","),
        to=to,
        n=n,
        wording=wording or (),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        least=least,
        margin=margin,
        seed=seed,
        trust=trust,
    )
    render.sampled(sampled, out)


def _may_be_model(teacher: str) -> bool:
    """Whether a teacher that is no run directory can be a model or an address; else it is a run that is not there."""
    path = Path(teacher)
    if teacher.startswith(("http://", "https://")) or (path / "config.json").is_file():
        return True
    there = path.exists() or (len(path.parts) > 1 and path.parent.is_dir())
    return not there and teacher.count("/") < 2 and not teacher.startswith((".", "~", "/"))


@app.command(rich_help_panel=Groups.USE)
def judge(
    judge: Annotated[str, typer.Argument(help="An address up to /v1, or a program; JSON pairs in, 1, 2 or 0 out.")],
    rows: Annotated[str, typer.Argument(help="Preference rows: what people chose and rejected, or ties.")],
    overrides: RunSettings = None,
    model: Annotated[str | None, typer.Option(help="Of an address: the model's name there.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Longest wait for an address or a program, in s.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="A .jsonl file of the pairs, with both verdicts.")] = None,
) -> None:
    """Tell how far a judge of answers agrees with people."""
    with importing():
        from workbench.cli import render
        from workbench.recipes.verbs.judge import judge as asked

    render.scores(asked(judge, rows, overrides or (), model=model, timeout=timeout, out=out))


@app.command(rich_help_panel=Groups.USE)
def router(
    fleet: Annotated[Path, typer.Argument(help="A finished run of recipe fleet.")],
    trust: Trusted = False,
) -> None:
    """Learn which member of a fleet answers a prompt. `serve FLEET` then answers for model auto."""
    with importing():
        from workbench.cli import render
        from workbench.recipes.verbs.router import router as fitted

    render.scores(fitted(fleet, trust=trust))


@app.command(rich_help_panel=Groups.USE)
def serve(
    runs: Annotated[list[str], typer.Argument(help="Run directories, or NAME=DIRECTORY; model.id=FOLDER if moved.")],
    host: Annotated[str, typer.Option(help="Address to listen at; one open to others needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="WORKBENCH_API_KEY", help="Bearer token of clients.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Answers that are written at the same time.")] = 64,
    queue: Annotated[int, typer.Option(min=0, help="Answers that may wait; more are turned away with 429.")] = 256,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer; default: the model's.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for a request.")] = 600.0,
    body: Annotated[str, typer.Option(help="Largest request, such as 8MB.")] = "8MB",
    grace: Annotated[int, typer.Option(min=0, help="Seconds for begun answers after SIGTERM or Ctrl-C.")] = 30,
    load_adapters: Annotated[bool, typer.Option("--load-adapters", help="Load adapters on request, as vLLM.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Train adapters for clients of the Tinker SDK.")] = False,
    states: Annotated[Path, typer.Option(help="Where --train saves states.")] = Path("runs/states"),
    adapters: Annotated[int, typer.Option(min=1, help="Adapters that --train trains at the same time.")] = 64,
    trust: Trusted = False,
) -> None:
    """Answer over HTTP like OpenAI's interface. Several runs by name in one batch, until SIGTERM or Ctrl-C.

    With --train: `workbench serve BACKBONE --train` trains adapters of many clients over one backbone.
    """
    size = units.byte_size(body, name="--body")
    _require_server("serve")
    if train:
        with importing():
            from workbench.evaluation.serving.training_server import TrainingLimits
            from workbench.recipes.verbs.serving import serve_training
        from workbench.runs.http_server import Address

        keys = tuple(key for key in (api_key or "").split(",") if key)
        own = TrainingLimits(api_keys=keys, adapters=adapters, body_bytes=size)

        def trains(address: str, model: str) -> None:
            typer.echo(f"{model} trains adapters for the Tinker SDK; their states stand in {states}.")
            typer.echo(f"TINKER_BASE_URL={address} answers. Stop it with Ctrl-C or SIGTERM.")

        serve_training(runs, Address(host, port), own, folder=states, rows=rows, queue=queue, grace=grace, ready=trains)
        return
    from workbench.evaluation.serving.app import ServerLimits

    with importing():
        from workbench.recipes.verbs.serving import ServeSettings, serve_runs
    from workbench.runs.http_server import Address

    limits = ServerLimits(api_key=api_key or None, seconds=timeout, body_bytes=size, loads_adapters=load_adapters)
    settings = ServeSettings(Address(host, port), limits, rows, queue, context, grace)

    def ready(address: str, models: Sequence[ServedModel]) -> None:
        for model in models:
            typer.echo(f"{model.name}: {model.verb}")
        typer.echo(f"{address} answers. Stop it with Ctrl-C or SIGTERM.")

    serve_runs(runs, settings, trust=trust, ready=ready)


def _require_server(verb: str) -> None:
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"{verb} needs {', '.join(missing)}. Install them: pip install 'peft-workbench[serve]'")


@app.command(rich_help_panel=Groups.USE)
def ui(
    folder: Annotated[Path, typer.Argument(help="Where runs stand.")] = _RUNS,
    host: Annotated[str, typer.Option(help="Address to listen at; one open to others needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
    token: Annotated[str | None, typer.Option(envvar="WORKBENCH_UI_TOKEN", help="Needed to change things.")] = None,
) -> None:
    """Show the runs of a folder in a browser. While they train, too; start, stop, compare and ask them there."""
    _require_server("ui")
    if (folder / "manifest.json").is_file():
        raise ConfigError(f"{folder} is a run. Name the folder that it stands in: workbench ui {folder.parent}")
    if not folder.is_dir() and folder != _RUNS:
        raise ConfigError(f"{folder}: no such folder. Name the one in which runs stand, or make it first.")
    from workbench.cli.ui.server import Access, Page
    from workbench.runs.http_server import Address, serve

    access = Access(token or secrets.token_urlsafe(16), host)
    if not access.is_local and not token:
        raise ConfigError(
            f"--host {host} lets others in, who could start programs here. Set WORKBENCH_UI_TOKEN (or --token) to "
            "a long secret, which they then need for everything; the connection is not encrypted."
        )

    def ready(address: str) -> None:
        typer.echo(f"{address}/#token={access.token}")
        typer.echo(f"shows {folder}. Stop it with Ctrl-C; a run that it started goes on.")

    with Address(host, port).bound() as listening:
        serve(Page(folder, access).app, listening, grace=10, ready=ready)


@app.command(rich_help_panel=Groups.SHIP)
def merge(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="Folder for the merged model.")],
    overrides: Moved = None,
    weights: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    trust: Trusted = False,
) -> None:
    """Write a stock Hugging Face model. Its error against the unmerged one is measured."""
    _require_run(run)
    with importing():
        from workbench.cli import render
        from workbench.recipes.verbs.merge import merge as merge_run

    render.merged(merge_run(run, overrides or (), out=out, weights=weights, trust=trust), out)


@app.command(rich_help_panel=Groups.SHIP)
def export(
    run: RunFolder,
    to: Annotated[str, typer.Option(help="peft, merged, gguf, ollama, vllm, sglang or onnx.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    overrides: Moved = None,
    normalise: Annotated[bool, typer.Option("--normalise", help="Write plain LoRA of one rank, scale 1.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="One whole model instead of an adapter.")] = False,
    weights: Annotated[
        str | None, typer.Option(help="float32, bfloat16 (default) or float16; onnx: float32 (default), int8 or int4.")
    ] = None,
    push: Annotated[str | None, typer.Option(help="OWNER/NAME on the hub to upload it to; private if new.")] = None,
    trust: Trusted = False,
) -> None:
    """Write a run as another program loads it. Checked against the run's own outputs, with a model card."""
    _require_run(run)
    with importing():
        from workbench.cli import render
        from workbench.recipes.verbs.export import export as export_run

    command = shlex.join(["workbench", *sys.argv[1:]])
    exported_run = export_run(
        run,
        overrides or (),
        to=to,
        out=out,
        normalise=normalise,
        whole=merge,
        weights=weights,
        push=push,
        trust=trust,
        command=command,
    )
    render.exported(exported_run, out)


@app.command(rich_help_panel=Groups.SHIP)
def adopt(
    folder: Annotated[Path, typer.Argument(help="Folder of an adapter in PEFT's format.")],
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Its backbone, where that is elsewhere now.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory to write; default runs/FOLDER.")] = None,
) -> None:
    """Make a run of an adapter of another program. Every verb takes it, and training as train.start."""
    with importing():
        from workbench.recipes.verbs.adopt import adopt as adopt_adapter

    adopted = adopt_adapter(folder, overrides or (), model=model, out=out)
    typer.echo(f"{adopted.method} over {adopted.model}, {adopted.parameters:,} parameters.")
    for name, value in adopted.beside.items():
        typer.echo(f"  {name}: {value}")
    run = out or Path("runs") / folder.resolve().name
    typer.echo(f'{run} written. Next: workbench generate {run} "PROMPT"; to train it further: train.start={run}')


@app.command(rich_help_panel=Groups.SHIP)
def combine(
    runs: Annotated[
        list[str],
        typer.Argument(help="Runs with LoRA adapters over one backbone; model.id=FOLDER, data.held_out=FILE."),
    ],
    out: Annotated[Path, typer.Option(help="Run directory to write.")],
    weights: Annotated[
        str | None, typer.Option(help="A factor for each run, such as 0.5,0.5; search: by held-out score.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Keep no more ranks; without it the sum is exact.")] = None,
    by: Annotated[str, typer.Option(help="sum, slerp (of two), ties, dare, dare_ties, soup or greedy-soup.")] = "sum",
    density: Annotated[float | None, typer.Option(help="Share of values that ties, dare keep; 0.5.")] = None,
    trials: Annotated[int | None, typer.Option(help="Most weights that a search scores; 32.")] = None,
    trust: Trusted = False,
) -> None:
    """Make one adapter of those of several runs. A weighted sum or a merge; its error is measured."""
    with importing():
        from workbench.adapters.soups import SEARCH
        from workbench.cli import render
        from workbench.cli.console import Terminal
        from workbench.recipes.verbs.combine import combine_runs

    words = [word for word in runs if "=" in word and not Path(word).is_dir()]
    runs = [word for word in runs if word not in words]
    factors = weights if weights is None or weights == SEARCH else weights_of(weights)
    with Terminal() as terminal:
        combined = combine_runs(
            runs,
            words,
            weights=factors,
            out=out,
            rank=rank,
            by=by,
            density=density,
            trials=trials,
            trust=trust,
            callback=terminal,
        )
    render.combined(combined, out)


@app.command(rich_help_panel=Groups.SHIP)
def blend(
    runs: Annotated[list[str], typer.Argument(help="Cross-validations over the same folds; evaluate.metric=NAME.")],
    out: Annotated[Path, typer.Option(help="Run directory to write.")],
    way: Annotated[str, typer.Option(help="auto, mean, greedy, convex or stacking.")] = "auto",
    trust: Trusted = False,
) -> None:
    """Make one run of several cross-validations. Weights are judged out of fold, and so is what each part is worth."""
    with importing():
        from workbench.cli import render
        from workbench.cli.console import Terminal
        from workbench.recipes.verbs.blend import blend_runs

    words = [word for word in runs if "=" in word and not Path(word).is_dir()]
    parts = [word for word in runs if word not in words]
    with Terminal() as terminal:
        blended = blend_runs(parts, words, out=out, way=way, trust=trust, callback=terminal)
    render.blended(blended, out)


@app.command(rich_help_panel=Groups.USE)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path, typer.Option(help="Page with the plots.")] = Path("comparison.html"),
) -> None:
    """Put runs side by side: a table here, plots in a page."""
    from workbench import report
    from workbench.cli import render

    render.comparison(report.compare(runs, out), out)


@app.command(rich_help_panel=Groups.LEARN)
def ls(
    what: Annotated[str, typer.Argument(help="recipes, a group of them such as sft, adapters or runs.")] = "recipes",
    overrides: Annotated[list[str] | None, typer.Argument(help="For adapters: key=value.", show_default=False)] = None,
    folder: Annotated[Path, typer.Option(help="Where runs stand.")] = _RUNS,
    json: Annotated[bool, typer.Option("--json", help="For adapters: one JSON object.")] = False,
) -> None:
    """List shipped recipes, adapter methods, or runs. Methods come with their sizes on a backbone."""
    from workbench.cli import render

    if what == "adapters":
        from workbench.models.model_sizes import survey

        (render.methods_json if json else render.methods)(survey(overrides or ()))
    elif json or overrides:
        raise ConfigError(f"ls {what}: --json and key=value go with `workbench ls adapters` only. Leave them out.")
    else:
        render.listing(what, folder)


@app.command(rich_help_panel=Groups.LEARN)
def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A key, section, method, policy, or words.", autocompletion=complete_explained),
    ] = None,
) -> None:
    """Say what a setting or a method does. Values, unit, default, meaning, paper; without a name, all sections."""
    from workbench.cli import render
    from workbench.config import glossary, reference

    setting = " ".join(words or ())
    if chosen := reference.named_choices(setting):
        render.choices(chosen)
    elif met := [] if reference.is_key(setting) else glossary.find(setting):
        render.terms(met)
    elif setting:
        render.settings(reference.look_up(setting), setting)
    else:
        render.settings([each for each in reference.settings() if "." not in each.key], "")


@app.command(rich_help_panel=Groups.LEARN)
def schema(
    out: Annotated[Path | None, typer.Option(help="File to write; without it the schema is printed.")] = None,
) -> None:
    """Write the JSON Schema of recipes. Editors complete and check them by it."""
    from workbench.config import reference
    from workbench.recipes import FOR_EDITORS
    from workbench.runs.files import write_bytes

    if out is None:
        typer.echo(reference.json_schema_text(), nl=False)
        return
    if out.exists():
        raise ConfigError(f"{out}: is there already. Remove it, or write another --out.")
    write_bytes(out, reference.json_schema_text().encode())
    typer.echo(f"{out} written. A line of a recipe that names it: {FOR_EDITORS}{out.resolve().as_uri()}")


@app.command(rich_help_panel=Groups.LEARN)
def doctor() -> None:
    """Check what this machine can do. Versions, devices, memory, known bad combinations."""
    with importing():
        from workbench.recipes.verbs.doctor import examine

    findings = examine()
    for finding in findings:
        mark = "FAULT" if finding.is_fault else "look" if finding.cure else "ok"
        typer.echo(f"{mark:6}{finding.subject:15} {finding.fact}")
        if finding.cure:
            typer.echo(f"{'':22}{finding.cure}")
    if faults := sum(finding.is_fault for finding in findings):
        raise ConfigError(f"{faults} of these make runs fail: each says what to do.")


@app.command(rich_help_panel=Groups.LEARN)
def family(
    model: Annotated[str, typer.Argument(help="A folder with a config.json, or the id of a model on the hub.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Try what works with a backbone's architecture. LoRA, nf4, packing, bank, exports, on a tiny random model."""
    with importing():
        from workbench.cli import render
        from workbench.recipes.verbs.family import family as try_out

    found = try_out(model)
    if json:
        typer.echo(dumps(asdict(found)))
    else:
        render.family(found)


@app.command(rich_help_panel=Groups.BEFORE)
def cp(recipe: Recipe, file: Annotated[Path, typer.Argument(help="The YAML file to write.")]) -> None:
    """Copy a shipped recipe, to change it."""
    from workbench.recipes import copy

    copy(recipe, file)
    typer.echo(f"{file} written. Next: workbench check {file}")


@app.command(rich_help_panel=Groups.BEFORE)
def init(
    out: Annotated[Path, typer.Argument(help="The recipe to write; or the folder of rows.")] = Path("my.yaml"),
    overrides: Overrides = None,
    rows: Annotated[str | None, typer.Option(help="A file, a folder, or a hub data set.")] = None,
    goal: Annotated[str | None, typer.Option(help="answers, classes, folds, judged, rewards, embeddings ...")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub id; starter: the shipped one.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of the device, such as 24GB; default: what is free here.")] = None,
    device: Annotated[str | None, typer.Option(help="A card that need not be here, such as 4090 or h100.")] = None,
    time: Annotated[str | None, typer.Option(help="Longest time, such as 90m; default: no limit.")] = None,
) -> None:
    """Ask five questions, and write a recipe that will fit. Rows and machine are looked at."""
    asks = sys.stdin.isatty()
    if device is not None and device != "cpu":
        cards.find(device)

    def answer(question: str, default: str) -> str:
        return str(typer.prompt(question, default=default)) if asks else default

    if rows is None and out.is_dir():
        rows, out = str(out), Path(f"{out.resolve().name}.yaml")
    if rows is None:
        if not asks:
            raise ConfigError("--rows: which rows to learn from? Write --rows FILE, a folder, or a hub data set.")
        rows = str(typer.prompt("Rows to learn from (a file, a folder, or a hub data set)"))
    with importing():
        from workbench.recipes.verbs import leaderboard
        from workbench.recipes.verbs.first_recipe import GOALS, Wishes, commands, suggested, write

    if goal is None:
        goal = suggested(rows)
        if asks:
            for name, each in GOALS.items():
                typer.echo(f"  {name:14} {each.says}")
            goal = str(typer.prompt("What is to be learnt", default=goal))
    model = model or answer("Backbone (a folder or a hub id)", GOALS[goal].model if goal in GOALS else "")
    if device is None:
        memory = memory or answer("Memory of the device (such as 24GB; here: what is free on this machine)", "here")
    time = time or answer("Longest time (such as 90m; none: no limit)", "none")
    size = None if memory in (None, "here") else units.byte_size(memory, name="--memory")
    competition, limit = leaderboard.found(rows), None if time == "none" else time
    wishes = Wishes(rows, goal, model, size, limit, overrides or (), competition, device)
    summary = write(wishes, out)
    typer.echo(f"{out} written: {summary}.\nNext: {', then: '.join(commands(wishes, out))}")


@app.command("import", rich_help_panel=Groups.BEFORE)
def import_(
    file: Annotated[Path, typer.Argument(help="A YAML file of Axolotl or LLaMA-Factory.")],
    out: Annotated[Path, typer.Option(help="The recipe to write.")] = Path("imported.yaml"),
) -> None:
    """Translate a configuration file of another tool. What has no equivalent is listed."""
    from workbench.cli import render
    from workbench.recipes.verbs import translated

    render.translation(translated.write(file, out), out)


def main() -> None:
    """Run the command line; prints a user's mistake without a traceback."""
    if sys.argv[1:2] == ["run"]:
        restart_without_caches()
    try:
        _command()(prog_name="workbench")
    except WorkbenchError as error:
        _tell(f"Error: {error}")
        sys.exit(2)
    except Stopped as stopped:
        _tell(str(stopped))
        sys.exit(3)
    except Exception as error:
        if (text := unnameable(error)) is not None:
            _tell(f"Error: {text}")
            sys.exit(2)
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        import traceback

        _tell(traceback.format_exc())
        sys.exit(1)
    finally:
        gc.freeze()  # otherwise Python searches all live objects for garbage at exit, which takes a second


@cache
def _command() -> Callable[..., object]:
    """The verbs with their arguments, read from the functions above, and shell completion."""
    return typer.main.get_command(app)


def _tell(text: str) -> None:
    """Print why the process ends, or report it to the launcher, which shows the first of its processes that failed."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from workbench.training.distributed import launcher

        launcher.report(Path(file), text)
    else:
        print(text.encode(errors="backslashreplace").decode(), file=sys.stderr)  # half characters too


if __name__ == "__main__":
    main()
