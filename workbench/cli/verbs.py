"""The command line. Verbs are thin: each reads its arguments, calls a recipe and prints what came back."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli import answering_verbs, completions, init_verb, shipping_verbs
from workbench.cli.arguments import Overrides, Recipe, RunFolder, Trusted, Version, byte_size, weights_of
from workbench.cli.ui.verb import ui
from workbench.errors import ConfigError, Stopped, WorkbenchError
from workbench.runs.process_memory import importing

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich is half of what --help would take
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def start(version: Version = False) -> None:
    """Fine-tune pretrained Hugging Face backbones, and know the truth about the result."""


@app.command()
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    devices: Annotated[int | None, typer.Option(min=1, help="Train on so many of this machine together.")] = None,
) -> None:
    """Train, score and report."""
    from workbench.recipes import opening
    from workbench.training.distributed import launcher

    if launcher.needed():  # else who started the processes has told it
        for sentence in opening.sentences(recipe, overrides or ()):
            typer.echo(sentence, err=True)
    if devices is not None and launcher.needed():
        launcher.launch(devices, sys.argv[1:])
        return

    import workbench

    with importing():
        import workbench.recipes.run
        from workbench.cli import render
        from workbench.runs import deadline, run_log
        from workbench.runs.ranks import joined

    path = workbench.run(recipe, overrides or (), out=out, resume=resume, began=deadline.process_began())
    if joined().first:
        run_log.add(path, render.outcome(path))


@app.command()
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw pictures as the model sees them, learning rate, which layers train: a .png file."),
    ] = None,
) -> None:
    """Show what the model sees and which tokens carry loss. A run that would not train is refused."""
    from workbench.recipes.load import load

    with importing():
        from workbench.cli import check_plot, render
        from workbench.recipes.check import check as inspect

    config = load(recipe, overrides or ())
    if plot is not None:
        check_plot.require_new(plot, config)
    check_result = inspect(config)
    render.inspection(check_result)
    if plot is not None:
        check_plot.write(plot, check_result)
        typer.echo(f"Plot: {plot}")


@app.command()
def data(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder for data.html and flags.parquet.")] = Path("data-report"),
    perplexity: Annotated[
        str,
        typer.Option(help="Rows of each file that the backbone reads: auto (what is cheap), all, off, a number."),
    ] = "auto",
) -> None:
    """Show what is in the rows and what is wrong with them. Lengths, languages, duplicates, rules of quality."""
    from workbench.recipes.load import load

    with importing():
        from workbench.cli import data_table
        from workbench.recipes import data_report

    data_table.show(data_report.write(load(recipe, overrides or ()), out, name=recipe, perplexity=perplexity))


@app.command()
def features(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Where features are written, with rows and labels: .parquet.")
    ] = None,
) -> None:
    """Say what the frozen backbone knows of labels. With --out, write its features of rows."""
    from workbench.recipes.load import load

    with importing():
        from workbench.recipes.features import write

    typer.echo(write(load(recipe, overrides or ()), out).sentence)
    if out is not None:
        typer.echo(f"Features: {out}")


@app.command()
def lr(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder for learning_rate.svg and learning_rate.json.")] = Path("lr"),
    lowest: Annotated[float | None, typer.Option(help="Lowest rate; default the recipe's / 32.")] = None,
    highest: Annotated[float | None, typer.Option(help="Highest rate; default the recipe's * 32.")] = None,
    rates: Annotated[int, typer.Option(min=3, max=50, help="How many rates.")] = 11,
    steps: Annotated[
        int | None, typer.Option(min=8, help="Steps of each; default 24, or fewer where the run has fewer.")
    ] = None,
) -> None:
    """Find a learning rate by short trainings. All go over one frozen backbone, on the same rows."""
    from workbench.recipes.load import load

    with importing():
        from workbench.cli import rate_table
        from workbench.cli.console import Terminal
        from workbench.recipes import rate_finder

    config = load(recipe, overrides or ())
    with Terminal() as terminal:
        rate_trials = rate_finder.find(config, out, terminal, lowest=lowest, highest=highest, count=rates, steps=steps)
    rate_table.show(rate_trials)


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many; with --memory accelerators that need not be here.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of each device, such as 24GB; default: what is free here.")
    ] = None,
    longest_row: Annotated[
        bool, typer.Option("--longest-row", help="Say also of how many tokens a row may be, one at a time.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what memory and time a run takes, before it runs. The fastest way that fits, and what else was tried."""
    from workbench.recipes.load import load

    with importing():
        from workbench.cli import render
        from workbench.recipes.plans import plan as planning

    elsewhere = devices is not None and memory is not None
    size = None if memory is None else byte_size(memory, option="--memory")
    config = load(recipe, overrides or ())
    choice = planning.solve(config, devices=devices or 1, memory=size, elsewhere=elsewhere)
    stored = config.model_copy(update={"model": choice.config.model})
    longest = planning.longest_row(stored, memory=size, elsewhere=elsewhere) if longest_row else None
    (render.plan_json if json else render.plan)(choice.plan, longest)
    choice.require()


@app.command(name="distill-cache")
def distill_cache(recipe: Recipe, overrides: Overrides = None) -> None:
    """Ask a teacher about every training row, once. What it says is kept in distill.cache.folder."""
    from workbench.cli.console import Terminal
    from workbench.recipes.distillation.distill_verbs import cache
    from workbench.recipes.load import load

    config = load(recipe, overrides or ())
    with Terminal(quiet=False) as terminal:
        facts = cache(config, terminal)
    for name, value in facts.items():
        typer.echo(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


app.command()(answering_verbs.evaluate)
app.command()(answering_verbs.predict)
app.command()(answering_verbs.generate)
app.command()(answering_verbs.sample)
app.command()(answering_verbs.serve)
app.command()(ui)


@app.command()
def merge(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="Folder for the merged model.")],
    weights: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    trust: Trusted = False,
) -> None:
    """Write a stock Hugging Face model. Its error against the unmerged one is measured."""
    with importing():
        from workbench.cli import render
        from workbench.recipes.shipping.merge import merge as merge_run

    render.merged(merge_run(run, out=out, weights=weights, trust=trust), out)


app.command()(shipping_verbs.export)


@app.command()
def combine(
    runs: Annotated[list[Path], typer.Argument(help="Run directories with LoRA adapters over one backbone.")],
    weights: Annotated[str, typer.Option(help="A factor for each run, such as 0.5,0.5.")],
    out: Annotated[Path, typer.Option(help="Run directory to write.")],
    rank: Annotated[int | None, typer.Option(min=1, help="Keep no more ranks; without it the sum is exact.")] = None,
    trust: Trusted = False,
) -> None:
    """Add the adapters of several runs up to one. Its error is measured."""
    with importing():
        from workbench.cli import render
        from workbench.recipes.shipping.combine import combine_runs

    render.combined(combine_runs(runs, weights=weights_of(weights), rank=rank, out=out, trust=trust), out)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path, typer.Option(help="Page with the plots.")] = Path("comparison.html"),
) -> None:
    """Put runs side by side: a table here, plots in a page."""
    from workbench import report
    from workbench.cli import render

    render.comparison(report.compare(runs, out), out)


@app.command()
def ls(
    what: Annotated[str, typer.Argument(help="recipes, adapters or runs.")] = "recipes",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="For adapters: key=value, such as model.id=FOLDER adapter.rank=8.", show_default=False),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where runs stand.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="For adapters: one JSON object.")] = False,
) -> None:
    """List shipped recipes, adapter methods, or runs. Methods come with their sizes on a backbone."""
    if what == "adapters":
        from workbench.cli import method_tables
        from workbench.models.adapter_sizes import survey

        size_table = survey(overrides or ())
        (method_tables.methods_json if json else method_tables.methods)(size_table)
    elif json or overrides:
        raise ConfigError(
            f"ls {what}: --json and key=value words go with `workbench ls adapters` only. Leave them out."
        )
    else:
        from workbench.cli import listing_table

        listing_table.show(what, folder)


@app.command()
def explain(
    setting: Annotated[
        str,
        typer.Argument(
            help="A key or section, such as batch.size; a method or policy, such as dora; a word to look for.",
            autocompletion=completions.explained,
        ),
    ] = "",
) -> None:
    """Say what a setting or a method does. Values, unit, default, meaning, paper; without a name, all sections."""
    from workbench.cli import reference_table
    from workbench.config import reference

    if chosen := reference.named_choices(setting):
        reference_table.show_choices(chosen)
    elif setting:
        reference_table.show(reference.look_up(setting), setting)
    else:
        reference_table.show_sections()


@app.command()
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
    write_bytes(out, reference.json_schema_text().encode())
    typer.echo(f"{out} written. A line of a recipe that names it: {FOR_EDITORS}{out.resolve().as_uri()}")


@app.command()
def doctor() -> None:
    """Say what this machine can do, and what goes wrong on it. Versions, devices, memory, known bad combinations."""
    with importing():
        from workbench.recipes.doctor import examine

    findings = examine()
    for finding in findings:
        mark = "FAULT" if finding.is_fault else "look" if finding.cure else "ok"
        typer.echo(f"{mark:6}{finding.subject:15} {finding.fact}")
        if finding.cure:
            typer.echo(f"{'':22}{finding.cure}")
    if faults := sum(finding.is_fault for finding in findings):
        raise ConfigError(f"{faults} of these make runs fail: each says what to do.")


@app.command()
def cp(recipe: Recipe, file: Annotated[Path, typer.Argument(help="The YAML file to write.")]) -> None:
    """Copy a shipped recipe, to change it."""
    from workbench.recipes import copy

    copy(recipe, file)
    typer.echo(f"{file} written. Next: workbench check {file}")


app.command()(init_verb.init)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A YAML file of Axolotl or LLaMA-Factory.")],
    out: Annotated[Path, typer.Option(help="The recipe to write.")] = Path("imported.yaml"),
) -> None:
    """Translate a configuration file of another tool. What has no equivalent is listed."""
    from workbench.cli import import_table
    from workbench.recipes import translated

    import_table.show(translated.write(file, out), out)


def main() -> None:
    """Run the command line; a user's mistake is told without a traceback."""
    try:
        _command()(prog_name="workbench")
    except WorkbenchError as error:
        _tell(f"Error: {error}")
        sys.exit(2)
    except Stopped as stopped:
        _tell(str(stopped))
        sys.exit(3)
    except Exception:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        import traceback

        _tell(traceback.format_exc())
        sys.exit(1)
    finally:
        gc.freeze()  # at its end Python would search all that torch has imported for garbage, which takes a second


@cache
def _command() -> Callable[..., object]:
    """The verbs with their arguments, read from the functions above, and what shells ask."""
    return typer.main.get_command(app)


def _tell(text: str) -> None:
    """To who reads this, or to who started it: of many processes that end the first is the one to hear."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from workbench.training.distributed import launcher

        launcher.report(Path(file), text)
    else:
        print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
