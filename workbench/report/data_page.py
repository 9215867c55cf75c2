"""One offline page on the rows of a recipe: lengths, languages, labels, duplicates, flagged and surprising rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from workbench.config import DataConfig
from workbench.config.sections.cleaning_config import CLEAN_RULES
from workbench.data.batching import evenly_spaced
from workbench.data.text.quality import survey
from workbench.data.text.quality.cleaning import Flag
from workbench.data.text.quality.survey import Findings
from workbench.evaluation.adversarial_validation import RowShift
from workbench.report.picture_section import Album, Picture
from workbench.report.plots import Axis, Floats, Plot, Series, draw, floats
from workbench.report.rendering import ends, render
from workbench.runs import units

SHOWN = 12
"""Rows of a rule that the page shows, from all over the file."""
SAMPLED, CLASSES = 8, 40
"""Pictures of a class, and classes, that the page shows."""
KEPT = 1000
"""Characters of the text of a row in flags.parquet."""
LISTED = 12
"""Lines of a table that are not folded away."""
BINS = 40
ORIGINS = {
    "workbench": "For rows of any kind",
    "Gopher": "Gopher, for web documents",
    "C4": "C4, for web documents",
}
"""Heading of the rules of each origin."""
SURPRISING = 8
"""Rows that the page shows of those that surprise the backbone most, and least."""
LONGEST = 350
"""Characters that are shown of the beginning of a row, and of its end."""


class FlaggedRow(NamedTuple):
    """A row that a rule flags, on the page."""

    title: str
    """The source that it is of."""
    place: str
    value: str
    note: str
    text: str
    pictures: tuple[tuple[Picture, str], ...] = ()
    """Its picture and those that `note` names, each with its place."""


class RuleRows(NamedTuple):
    """A rule with some of the rows that it flags."""

    name: str
    says: str
    origin: str
    counts: tuple[str, ...]
    """Rows of each source."""
    share: str
    """Share of the training rows."""
    cleans: bool
    """Whether `data.clean` knows it."""
    flagged: int
    """Rows of all sources."""
    trained: str
    """Training rows in all."""
    rows: tuple[FlaggedRow, ...]


class CountTable(NamedTuple):
    """Counts of names in each source, and a bar of the share among training rows."""

    title: str
    rows: tuple[tuple[str, tuple[str, ...], float], ...]
    """Name, counts, and the training rows as a share of their largest count in per cent."""
    long: bool
    """Whether it is better folded away."""


class SurprisingRow(NamedTuple):
    """A row that is very likely or very unlikely for the backbone."""

    place: str
    perplexity: str
    text: str


class Surprise(NamedTuple):
    """The perplexities of one source."""

    title: str
    read: str
    """How many of the rows the backbone read."""
    quantiles: tuple[str, ...]
    """At 5, 50 and 95 per cent of the rows."""
    most: tuple[SurprisingRow, ...]
    least: tuple[SurprisingRow, ...]


def page(name: str, config: DataConfig, findings: Sequence[Findings], shifts: Sequence[RowShift] = ()) -> str:
    """The page on the rows of the recipe `name`, as HTML."""
    album = Album()
    samples = class_samples(findings, album)
    flagging = rules(findings, album)
    longest = max((tokens_N.max() for each in findings if len(tokens_N := _tokens(each))), default=0)
    marks = (float(config.max_tokens),) if config.max_tokens <= 1.1 * longest else ()
    cut = f"Longer rows are cut at {config.max_tokens:,} tokens (dashed)." if marks else ""
    wanted: list[tuple[str, str, Callable[[Findings], Floats], Axis]] = [
        ("Tokens of a row", cut, _tokens, Axis("tokens", "count", marks=marks)),
        ("Characters of a row", "", _characters, Axis("characters", "count")),
        ("Longer side of a picture", "", lambda each: floats(list(map(max, each.read.sizes))), Axis("pixels", "count")),
        ("Labels", "", lambda each: floats(each.read.numbers or ()), Axis("label")),
    ]
    return render(
        "data.html",
        name=name,
        verdict=verdict(findings),
        notes=[note for each in findings for note in each.notes],
        tiles=_tiles(findings, config),
        titles=[each.read.title for each in findings],
        sourced=sum(each.read.trains for each in findings) > 1,
        sources=[(each.read.title, each.read.source, f"{len(each.read.rows):,}") for each in findings],
        held_out=f"Training rows stand here as they are in the file; a run holds {units.percent(share)} of them out."
        if (share := config.own_share) is not None
        else "",
        shifts=shifts,
        lengths=length_rows(findings, config),
        sizes=size_rows(findings),
        samples=samples,
        pictures=album,
        plots=[plot for each in wanted for plot in _distributions(findings, *each)],
        surprises=surprises(findings),
        perplexities=_distributions(
            findings,
            "Perplexity of a row by the backbone",
            "",
            lambda each: np.log10(floats(list(each.read.perplexities.values()))),
            Axis("log10 of the perplexity"),
        ),
        tables=[table for table in _tables(findings) if table.rows],
        rules=[
            (heading, group)
            for origin, heading in ORIGINS.items()
            if (group := [rule for rule in flagging if rule.origin == origin])
        ],
        shown=SHOWN,
        kept=f"{KEPT:,}",
    )


def verdict(findings: Sequence[Findings]) -> str:
    """How many training rows are flagged, and how many by rules that may not be meant for them."""
    train = survey.training(findings)
    rows = len(train.read.rows)
    own = {(flag.row, flag.place) for flag in train.flags if survey.origin(flag.rule) == "workbench"}
    documents = {(flag.row, flag.place) for flag in train.flags} - own
    sentence = f"{len(own):,} of {rows:,} training rows ({units.percent(len(own) / max(1, rows))}) are flagged"
    more = f"; {len(documents):,} others only by rules that were made for web documents" if documents else ""
    return f"{sentence}{more}."


def class_samples(findings: Sequence[Findings], album: Album) -> list[tuple[str, str, list[tuple[Picture, str]]]]:
    """Name of each class, the most frequent first, its training pictures in words, and some with their places."""
    numbers: dict[str, list[tuple[Findings, int]]] = {}
    for each in findings:
        for number, names in enumerate(each.read.labels or () if each.read.trains and each.read.jpeg else ()):
            for name in names:
                numbers.setdefault(name, []).append((each, number))
    samples = []
    for name, own in sorted(numbers.items(), key=lambda pair: -len(pair[1]))[:CLASSES]:
        drawn = [_pictured(*own[int(at)], album) for at in evenly_spaced(len(own), SAMPLED).tolist()]
        samples.append((name, f"{len(own):,}", [each for each in drawn if each is not None]))
    return samples


def size_rows(findings: Sequence[Findings]) -> list[tuple[str, ...]]:
    """For each source of pictures: title, smallest, median and largest width x height, and how many differ."""
    rows = []
    for each in findings:
        if sizes := sorted(each.read.sizes, key=lambda size: (size[0] * size[1], size)):
            named = [f"{width:,} x {height:,}" for height, width in (sizes[0], sizes[len(sizes) // 2], sizes[-1])]
            rows.append((each.read.title, *named, f"{len(set(sizes)):,}"))
    return rows


def _pictured(findings: Findings, number: int, album: Album) -> tuple[Picture, str] | None:
    """The picture of a row and its place; None where there is none, or the page is full."""
    if findings.read.jpeg is None or number < 0 or album.left <= 0:
        return None
    picture = album.picture(findings.read.jpeg(number))
    return None if picture is None else (picture, findings.read.rows[number].place)


def rules(findings: Sequence[Findings], album: Album | None = None) -> list[RuleRows]:
    """Every rule that flags a row, its own rules first, then by how many training rows it flags. `album`: takes the
    pictures of rows; None: there are none."""
    known = {
        row.place: (each, number)
        for each in findings
        for number, row in enumerate(each.read.rows if each.read.jpeg and album else ())
    }
    train, flags = survey.training(findings), dict[str, list[tuple[Findings, Flag]]]()
    for each in findings:
        for flag in each.flags:
            flags.setdefault(flag.rule, []).append((each, flag))
    named = [
        RuleRows(
            name=rule,
            says=survey.describe(rule),
            origin=survey.origin(rule),
            counts=tuple(f"{each.counts[rule]:,}" for each in findings),
            share=units.percent(train.counts[rule] / max(1, len(train.read.rows))),
            cleans=rule in CLEAN_RULES,
            flagged=len(pairs),
            trained=f"{train.counts[rule]:,}",
            rows=tuple(_row(*pairs[int(at)], known, album) for at in evenly_spaced(len(pairs), SHOWN).tolist()),
        )
        for rule, pairs in flags.items()
    ]
    return sorted(named, key=lambda each: (each.origin != "workbench", each.origin, -train.counts[each.name]))


def length_rows(findings: Sequence[Findings], config: DataConfig) -> list[tuple[str, ...]]:
    """For each source and unit: title, unit, total, median, 95th and 99th percentile, longest, cut."""
    rows = []
    for each in findings:
        if each.read.tokens_N is None or not len(each.read.rows):
            continue
        tokens_N = _tokens(each)
        cut = each.cut(config.max_tokens)
        cut_share = f"{cut:,} ({units.percent(cut / len(tokens_N))})"
        rows.append((each.read.title, "tokens", *_quantiles(tokens_N), cut_share))
        rows.append((each.read.title, "characters", *_quantiles(_characters(each)), ""))
    return rows


def _quantiles(values_N: Floats) -> tuple[str, ...]:
    points = np.quantile(values_N, [0.5, 0.95, 0.99, 1.0])
    return (units.count(float(values_N.sum())), *(f"{round(float(point)):,}" for point in points))


def _tiles(findings: Sequence[Findings], config: DataConfig) -> list[tuple[str, str, str]]:
    """Label, value and small print of the numbers that a person asks for first."""
    train = survey.training(findings)
    counts = train.counts
    total = max(1, len(train.read.rows))
    repeated = counts["exact_duplicate"] + counts["near_duplicate"]
    unreadable = f"{counts['unreadable']:,} more cannot be read" if counts["unreadable"] else ""
    rows = ("Training rows", f"{len(train.read.rows):,}", unreadable)
    equal = f"{counts['exact_duplicate']:,} equal an earlier row, {counts['near_duplicate']:,} nearly"
    duplicated = ("Duplicates", units.percent(repeated / total), equal)
    if train.read.tokens_N is None:
        return [rows, duplicated]
    cut = train.cut(config.max_tokens)
    known = {name: count for name, count in train.languages.items() if name}
    common = max(known, key=lambda name: known[name], default=units.NOTHING)
    share = units.percent(known.get(common, 0) / max(1, sum(known.values())))
    return [
        rows,
        ("Tokens", units.count(float(train.read.tokens_N.sum())), "before rows are cut"),
        ("Cut", units.percent(cut / total), f"{cut:,} rows have over {config.max_tokens:,} tokens"),
        duplicated,
        ("Language", common, f"{share} of {sum(known.values()):,} rows that are long enough to tell"),
    ]


def _distributions(
    findings: Sequence[Findings], title: str, caption: str, measure: Callable[[Findings], Floats], axis: Axis
) -> list[Plot]:
    """The histogram of a measure of each source; none where no row has it."""
    series = []
    for colour, (name, values) in enumerate((each.read.title, measure(each)) for each in findings):
        if len(values):
            # A density, so that sources of different size lie on each other.
            heights, edges = np.histogram(values, bins=min(BINS, max(1, len(np.unique(values)))), density=True)
            series.append(Series(name, edges, heights, "bars", colour))
    y = Axis("share of rows", "none", from_zero=True)
    return [draw(title, series, x=axis, y=y, caption=caption)] if series else []


def _tokens(findings: Findings) -> Floats:
    return floats([] if findings.read.tokens_N is None else findings.read.tokens_N)


def _characters(findings: Findings) -> Floats:
    return floats([len(row.text) for row in findings.read.rows if findings.read.tokens_N is not None])


def _tables(findings: Sequence[Findings]) -> list[CountTable]:
    train = survey.training(findings)
    labels = "Labels" if findings[0].read.labels is not None else "Answers that come again and again"
    measures: dict[str, Callable[[Findings], Mapping[str, int]]] = {
        "Languages of rows": lambda each: {name or "too short to tell": n for name, n in each.languages.items()},
        "Scripts of letters": lambda each: each.scripts,
        "Files": lambda each: each.files,
        labels: lambda each: each.classes,
    }
    tables = []
    for title, of in measures.items():
        counts, trained = list(map(of, findings)), of(train)
        # The most frequent among training rows first.
        names = sorted({name for each in counts for name in each}, key=lambda name: (-trained.get(name, 0), name))
        most = max(trained.values(), default=1)
        rows = tuple(
            (name, tuple(f"{each.get(name, 0):,}" for each in counts), 100 * trained.get(name, 0) / most)
            for name in names
        )
        tables.append(CountTable(title, rows, len(rows) > LISTED))
    return tables


def surprises(findings: Sequence[Findings]) -> list[Surprise]:
    """The perplexities of each source of which the backbone read rows."""
    found = []
    for each in findings:
        if known := each.read.perplexities:
            order = sorted(known, key=lambda number: (known[number], number))
            count = min(SURPRISING, len(order) // 2 or 1)
            least, most = (
                tuple(
                    SurprisingRow(row.place, units.number(known[number]), ends(row.text, LONGEST))
                    for number, row in ((number, each.read.rows[number]) for number in chosen)
                )
                for chosen in (order[:count], order[: -count - 1 : -1])
            )
            quantiles = map(units.number, np.quantile(list(known.values()), [0.05, 0.5, 0.95]).tolist())
            read = f"{len(known):,} of {len(each.read.rows):,}"
            found.append(Surprise(each.read.title, read, tuple(quantiles), most, least))
    return found


def _row(findings: Findings, flag: Flag, known: Mapping[str, tuple[Findings, int]], album: Album | None) -> FlaggedRow:
    whole = flag.value == round(flag.value)
    value = "" if flag.value == 1 else f"{flag.value:,.0f}" if whole else units.number(flag.value)
    # A note is a place, a place (Title), label (place); label (place), or what was done (place).
    named = [flag.note, flag.note.rpartition(" (")[0], *re.findall(r" \((.+?)\)(?:;|$)", flag.note)]
    rows = [(findings, flag.row), *(known[name] for name in dict.fromkeys(named) if name in known)]
    drawn = [] if album is None else [_pictured(*row, album) for row in rows if row[0].read.jpeg]
    pictures = dict((each[1], each) for each in drawn if each is not None)
    text = ends(findings.text(flag), LONGEST)
    return FlaggedRow(findings.read.title, flag.place, value, flag.note, text, tuple(pictures.values()))
