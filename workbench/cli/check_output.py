"""What `check` prints: rows as the model reads them, sizes of the splits, and the course of the run in sentences."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from workbench.cli.render import OUT, table
from workbench.config import RunConfig
from workbench.config.freeze_config import FreezeConfig, Moment
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.recipes.inspection import Inspection
from workbench.recipes.over.crossval_verbs import CrossvalInspection
from workbench.recipes.tasks.classify.task import ClassInspection
from workbench.recipes.tasks.embed.task import EmbedInspection
from workbench.recipes.verbs.check import AnyInspection
from workbench.report import learning_rate_plots
from workbench.runs import files, units
from workbench.training.optim import optimizers

if TYPE_CHECKING:
    from workbench.data.batching import Indices
    from workbench.data.labelled.fold_data import FoldData
    from workbench.data.labelled.labelled_data import LabelledSet
    from workbench.recipes.tasks.classify.picture_checks import PictureFindings

CLASSES = 12
"""Classes of a table of folds; of more, the rarest are shown."""
PICTURES = (".png", ".jpg", ".jpeg")
"""File formats of a sheet of pictures."""
UNKNOWN_STEPS = 1000
"""Steps that a run is taken to have where a budget alone ends it."""


def inspection(inspection: AnyInspection) -> None:
    """Print rendered examples with the supervised tokens marked, lengths, and what a run would do."""
    if isinstance(inspection, EmbedInspection):
        _pairs(inspection)
    elif isinstance(inspection, ClassInspection):
        data = inspection.data
        splits = {"train": data.train, "held-out": data.held_out, "test": data.test}
        _labelled(inspection.examples, splits, inspection.pictures)
        if data.labels.kind != "number":
            sets = {"train": data.train, "held-out": data.held_out}
            counts = {name: each.facts()["classes"] for name, each in sets.items()}
            most = max(counts["train"].values())
            rows = []
            for name in sorted(data.labels.names, key=lambda name: -counts["train"].get(name, 0)):
                in_split = [counts[split].get(name, 0) for split in counts]
                rows.append((name, *(f"{count:,}" for count in in_split), "#" * round(40 * in_split[0] / most)))
            OUT.print(table(["class", "train", "held-out", ""], rows, right=(), title="Classes"))
        if inspection.drawn != len(data.train):
            OUT.print(f"classes.sampling draws {inspection.drawn:,} rows in an epoch.")
    elif isinstance(inspection, CrossvalInspection):
        _folds(inspection)
    else:
        for place, pieces in inspection.examples:
            OUT.rule(Text(place))
            OUT.print(Text.assemble(*((text, "bold green" if loss else "dim") for text, loss in pieces)))
        OUT.rule()
        OUT.print("[bold green]green[/] carries loss, [dim]grey[/] is read only.\n")
        numbers(inspection)
        return
    _course(inspection)


def numbers(inspection: Inspection) -> None:
    """Print sizes and lengths of rows of text, and what a run would do with them."""
    rows = []
    splits = {"train": inspection.data.train, "held-out": inspection.data.held_out, "test": inspection.data.test}
    for name, split in splits.items():
        if split is not None:
            counts = (len(split), int(split.lengths.sum()), int(split.supervised.sum()), int(split.lengths.max()))
            cut = f"{split.truncated:,} ({split.truncated / len(split):.1%})"
            rows.append((name, *(f"{count:,}" for count in counts), cut, f"{len(split.skipped):,}"))
    columns = ["split", "rows", "tokens", "with loss", "longest", "cut", "left out"]
    OUT.print(table(columns, rows, framed=True))
    kept = [name for name in ("held-out", "test") if splits[name] is not None]
    data = inspection.config.data
    if kept and inspection.config.task.writes_text and not data.fold.trains:  # whose own fold was not compared
        near = data.decontaminate.action == "off"
        advice = " data.decontaminate.action=keep looks for rows that are nearly alike." if near else ""
        OUT.print(f"No {' or '.join(kept)} row equals a training row.{advice}\n")
    for name, split in splits.items():
        if isinstance(split, TokenizedSet) and (sentences := split.use_in_words()):  # tagged rows are no texts to use
            OUT.print(f"{name}: {' '.join(sentences)}")
    OUT.print(_histogram(inspection.data.train.lengths))
    _course(inspection)


def _pairs(inspection: EmbedInspection) -> None:
    """Some rows with their texts, and the sizes of the splits."""
    for place, texts in inspection.examples:
        OUT.print(Rule(Text(place)))
        for name, text in texts:
            style = "bold green" if name == "positive" else "dim"
            OUT.print(Text.assemble((f"{name:>10}  ", "bold"), (text, style)))
    OUT.print(Rule())
    sizes = []
    for name, rows in inspection.data._asdict().items():
        if rows is not None:
            tokens, longest = int(rows.units.lengths.sum()), int(rows.units.lengths.max())
            counts = (len(rows), len(rows.units.texts), tokens, longest, rows.truncated, len(rows.skipped))
            sizes.append((name.replace("_", "-"), *(f"{count:,}" for count in counts)))
    columns = ["split", "rows", "texts", "tokens", "longest text", "cut", "left out"]
    OUT.print(table(columns, sizes, framed=True))


def _labelled(
    examples: list[tuple[str, str, str]], splits: Mapping[str, LabelledSet | None], pictures: PictureFindings | None
) -> None:
    """Some rows as the model reads them, the sizes of the splits, and the lengths or pictures of the first split."""
    there = {name: split for name, split in splits.items() if split is not None}
    if pictures is not None:
        facts = Table.grid(padding=(0, 2))
        for name, sentence in pictures.facts:
            facts.add_row(Text(name, style="bold"), Text(sentence))
        shown = Table(Column("such as", overflow="fold"), "label", box=None)
        for name, label in pictures.examples:
            shown.add_row(Text(name), Text(label, style="bold green"))
        sizes = [(name, f"{len(split):,}", f"{len(split.skipped):,}") for name, split in there.items()]
        OUT.print(facts, Text(), shown, Text(), table(["split", "rows", "left out"], sizes), Text())
        return
    for place, text, label in examples:
        OUT.rule(Text(place))
        OUT.print(Text(text, style="dim"), Text.assemble(("label  ", "bold"), (label, "bold green")))
    OUT.rule()
    rows = []
    for name, split in there.items():
        cut = f"{split.truncated:,} ({split.truncated / len(split):.1%})"
        counts = (len(split), int(split.lengths.sum()), int(split.lengths.max()))
        rows.append((name, *(f"{count:,}" for count in counts), cut, f"{len(split.skipped):,}"))
    OUT.print(table(["split", "rows", "tokens", "longest", "cut", "left out"], rows, framed=True))
    OUT.print(_histogram(there["train"].lengths))


def _histogram(lengths: Indices) -> Table:
    """Example lengths in eight bins."""
    counts, edges = np.histogram(lengths, bins=min(8, max(1, len(np.unique(lengths)))))
    rows = [
        (f"{low:,.0f}-{high:,.0f}", f"{count:,}", "#" * round(40 * count / counts.max()))
        for count, low, high in zip(counts, edges, edges[1:], strict=False)
    ]
    return table(["tokens", "examples", ""], rows, right=(), title="Lengths of the training rows")


def _folds(inspection: CrossvalInspection) -> None:
    """Rendered rows, what the folds hold, what their duplicates would leak, and how many adapters train."""
    data = inspection.data
    splits = {"train": data.rows, "test": data.test, "unlabelled": data.unlabelled}
    _labelled(inspection.examples, splits, inspection.pictures)
    OUT.print(_fold_sizes(data))
    OUT.print(_duplicates(data), markup=False)
    times = {"deals of the rows": len(data.folds.fold_RN), "seeds": inspection.config.folds.seeds}
    counts = [f"{data.folds.k} folds", *(f"{count} {name}" for name, count in times.items() if count > 1)]
    OUT.print(f"\n{inspection.members} adapters ({', '.join(counts)}), each trained as follows.")


def _fold_sizes(data: FoldData) -> Table:
    """Rows of each fold of the first repetition, and of its classes or the mean of its numbers."""
    from workbench.data.labelled.labels import counts

    folds = [data.rows.subset(data.folds.fold_RN[0] == fold).labels for fold in range(data.folds.k)]
    columns, title = ["", *(f"fold {name}" for name in data.folds.names)], "Folds"
    rows = [("rows", *(f"{len(labels):,}" for labels in folds))]
    if data.labels.kind == "number":
        means = (sum(float(label) for label in labels if isinstance(label, float)) / len(labels) for labels in folds)
        return table(columns, [*rows, ("mean label", *(f"{mean:.4g}" for mean in means))], title=title)
    total = counts([label for label in data.rows.labels if label is not None])
    own = [counts([label for label in labels if label is not None]) for labels in folds]
    names = sorted(total, key=lambda name: -total[name])
    if len(names) > CLASSES:
        title = f"Folds, with the {CLASSES} rarest of {len(names)} classes"
    rows += [(name, *(f"{each[name]:,}" for each in own)) for name in names[-CLASSES:]]
    return table(columns, rows, title=title)


def _duplicates(data: FoldData) -> str:
    """Sentence on the duplicates among the training rows."""
    report = data.duplicates
    if report is None:
        return "\nduplicates.on_duplicate=ignore: near-duplicates were not looked for."
    sentence = f"\nDuplicates: {report.exact:,} equal rows, {report.clusters:,} clusters of near-duplicates"
    if report.clusters:
        least = f"{report.least_similar:.2f}"
        sentence += f" with {report.clustered:,} rows (largest {report.largest:,}, least similar rows {least})"
    if data.conflicts:
        sentence += f"; {len(data.conflicts):,} clusters carry different labels, such as {', '.join(data.conflicts[0])}"
    leak = f"{data.leak:,} rows ({data.leak / max(1, report.rows):.1%})"
    return f"{sentence}.\nFolds that ignore them would validate {leak} beside a near-duplicate that trains."


def _course(inspection: AnyInspection) -> None:
    """How many steps a run takes, what trains, and what differs from a plain run."""
    kinds = inspection.targets
    where = f"{len(kinds)} kinds of module: {', '.join(kinds[:12])}" if kinds else "all weights"
    batches = f"steps of {inspection.config.batch.size} examples"
    if inspection.steps is None:
        batches = f"{batches.capitalize()} until the budget is used up"
    else:
        batches = f"{'' if inspection.config.budget.unlimited else 'At most '}{inspection.steps} {batches}"
    OUT.print(f"\n{batches}, training {where}.", markup=False)
    probe = [] if isinstance(inspection, Inspection) or not inspection.probe else [inspection.probe]
    course = outlook(inspection.config, steps=inspection.steps, blocks=inspection.blocks)
    for note in (*probe, *course, *inspection.notes):
        OUT.print(note, markup=False)


def outlook(config: RunConfig, *, steps: int | None, blocks: int | None) -> list[str]:
    """Sentences on everything that differs from a plain run: its end, its optimizer, the layers that train.

    Args:
        steps: Of the run; None where a budget alone ends it.
        blocks: Transformer blocks of the backbone; None only without freezing.
    """
    settings, rate = config.optimizer, config.train.learning_rate
    parts = []
    if settings.sam is not None:
        parts.append("SAM in each step" if settings.sam_every == 1 else f"SAM every {settings.sam_every:,} steps")
    if settings.sam_reuse is not None:
        parts.append("LookSAM between them")
    if settings.gradient_share is not None:
        parts.append(f"the largest {units.percent(settings.gradient_share)} of the gradient in each step")
    if config.batch.growth is not None:
        parts.append(f"batches that grow with the noise to {config.batch.growth:,} rows at most")
    if settings.lookahead is not None:
        parts.append(f"Lookahead every {settings.lookahead} steps")
    if settings.layer_decay < 1:
        parts.append(f"each layer at {settings.layer_decay:.3g} times the rate of the one above it")
    if settings.scaling != "none":
        parts.append(
            f"learning rate {rate:.3g} of {settings.reference_batch} rows scaled to {optimizers.peak_rate(config):.3g}"
        )
    optimizer = f"Optimizer: {', '.join([settings.name, *parts])}." if parts or settings.name != "adamw" else None
    notes = [_end(config, steps), optimizer, *(() if steps is None else config.schedule.about_short(steps))]
    if config.freeze.policy != "none":
        assert blocks is not None, "nobody can freeze layers of a backbone without any"
        notes.append(f"freeze.policy={config.freeze.policy}: {_layers(config, steps=steps, blocks=blocks)}.")
    return [sentence for sentence in notes if sentence is not None]


def _end(config: RunConfig, steps: int | None) -> str | None:
    """Sentence on the limit that ends the run; None where that is its number of steps."""
    budget = config.budget
    if budget.unlimited:
        return None
    limits = [] if steps is None else [f"{steps:,} steps"]
    limits += [] if budget.tokens is None else [f"{budget.tokens:,} tokens"]
    limits += [] if budget.seconds is None else [units.duration(budget.seconds)]
    limits += ["the time of its Slurm job"] if budget.time == "slurm" else []
    first = ", whichever comes first" if limits[1:] else ""
    scored = "; scores and reports are part of the time" if budget.timed else ""
    return f"Ends after {_listed(limits, 'or')}{first}{scored}."


def _layers(config: RunConfig, *, steps: int | None, blocks: int) -> str:
    """Which layers a policy lets train, and how much of the work it saves at most."""
    policy = config.freeze
    if policy.observes is not None:
        return f"{learning_rate_plots.why_no_freezing(policy, blocks)}{_first_decision(policy, steps)}"
    count = steps or UNKNOWN_STEPS
    first = policy.plan(Moment(0, 0.0, config.seed), blocks=blocks).trains
    last = policy.plan(Moment(count - 1, (count - 1) / count, config.seed), blocks=blocks).trains
    if policy.fixed:
        sentence = f"{_named([not each for each in first])} of {blocks} never train"
    elif policy.thaws:
        sentence = f"{sum(first)} of {blocks + 2} layers may train at a time, at first {_named(first)}"
    else:
        sentence = f"at first {_named(first)} may train, at the end {_named(last)}"
    share = learning_rate_plots.frozen_share(
        learning_rate_plots.freezing(policy, steps=count, blocks=blocks, seed=config.seed)
    )
    return f"{sentence}; {units.percent(share)} of the layer-steps are frozen"


def _first_decision(policy: FreezeConfig, steps: int | None) -> str:
    """After which step a policy that observes may freeze something, or that the run is too short for it."""
    earliest = policy.interval * policy.judges
    if steps is None or steps > earliest:
        return f", after step {earliest:,} at the earliest"
    return f"; the first decision comes after step {earliest:,}, so that none of {steps:,} steps has a frozen layer"


def _named(layers: Sequence[bool]) -> str:
    """The layers that are marked, such as "the embeddings, blocks 2 to 4 and the head"."""
    if all(layers):
        return "all layers"
    names = ["the embeddings"] if layers[0] else []
    spans = list(_spans(layers[1:-1]))
    if spans:
        each = [str(start) if start == end else f"{start} to {end}" for start, end in spans]
        names.append(f"block{'s' if len(spans) > 1 or spans[0][0] < spans[0][1] else ''} {', '.join(each)}")
    return _listed([*names, *(["the head"] if layers[-1] else [])], "and")


def _spans(marked: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last of marked neighbours, counted from 1."""
    start = None
    for number, is_marked in enumerate([*marked, False], start=1):
        if is_marked and start is None:
            start = number
        elif not is_marked and start is not None:
            yield start, number - 1
            start = None


def _listed(names: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def require_new_plot(path: Path, config: RunConfig) -> None:
    """Refuse a file that `write_plot` could not write, before the work that comes first."""
    learning_rate_plots.require_new(path, PICTURES if config.reads_pictures else learning_rate_plots.SUFFIXES)


def write_plot(path: Path, inspection: AnyInspection) -> None:
    """Draw the learning rate and which layers train when, below the rows where they are pictures, to a new file."""
    pictures = None if isinstance(inspection, Inspection | EmbedInspection) else inspection.pictures
    if pictures is None:
        learning_rate_plots.write_schedule(path, inspection.config, steps=inspection.steps, blocks=inspection.blocks)
        return
    require_new_plot(path, inspection.config)
    drawn = learning_rate_plots.draw_schedule(inspection.config, steps=inspection.steps, blocks=inspection.blocks)
    sheet: Image.Image = pictures.sheet()
    schedule: Image.Image = Image.open(io.BytesIO(drawn))
    if schedule.width > sheet.width:
        size = (sheet.width, schedule.height * sheet.width // schedule.width)
        schedule = schedule.resize(size, Image.Resampling.LANCZOS)
    both = Image.new("RGB", (sheet.width, sheet.height + schedule.height), "white")
    both.paste(sheet)
    both.paste(schedule.convert("RGB"), (0, sheet.height))
    buffer = io.BytesIO()
    both.save(buffer, Image.registered_extensions()[path.suffix.lower()], quality=92)
    files.write_bytes(path, buffer.getvalue())
