"""The section of a page on training dynamics: the map of the data, its hardest rows, and labels in doubt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.data.batching import evenly_spaced
from workbench.errors import FileError
from workbench.evaluation import training_dynamics
from workbench.evaluation.prediction_table import class_names
from workbench.report.plots import Axis, Plot, Series, draw, floats
from workbench.report.rendering import ends
from workbench.report.run_record import RunRecord
from workbench.runs import files, units

BARS = 30
"""Most bars of a histogram."""
DRAWN = 900
"""Rows that the map has room for."""
LONGEST = 120
"""Characters that are shown of the beginning of a row, and of its end."""
_BANDS = (("never right", 0.0, 0.0), ("sometimes right", 1e-9, 1 - 1e-9), ("always right", 1.0, 1.0))
"""Names and bounds of the correctness of rows."""


class HardRow(NamedTuple):
    """A row whose labels stayed improbable."""

    row: str
    text: str
    confidence: str
    correctness: str
    forgotten: str


@dataclass(frozen=True)
class DynamicsSection:
    """The part of the page."""

    sentence: str
    plots: list[Plot]
    hardest: list[HardRow]
    unlearnable: list[HardRow]
    """Some of the rows that no fold can learn."""


def observed(run: RunRecord) -> DynamicsSection | None:
    """The section on dynamics; None where no losses of rows were recorded."""
    table = run.dynamics
    if table.empty:
        return None
    shown = table.iloc[evenly_spaced(len(table), DRAWN)]
    lost = shown["row"].isin(training_dynamics.unlearnable(table)["row"])
    bands = [("no fold learns", len(_BANDS), shown[lost])]  # never right, and wrong out of fold too
    for colour, (name, low, high) in enumerate(_BANDS):
        band = shown[shown["correctness"].between(low, high) & ~lost]
        bands.append((name, colour, band.sort_values("variability")))
    series = [
        Series(name, floats(band["variability"]), floats(band["confidence"]), "points", colour)
        for name, colour, band in bands
        if len(band)
    ]
    caption = (
        "Each row while it trained: low and steady are hard or wrongly labelled, high and steady are easy, and what "
        "moves most teaches most (Swayamdipta et al. 2020)."
    )
    if len(shown) < len(table):
        caption += f" {len(shown):,} of {len(table):,} rows are drawn."
    x, y = Axis("variability of the label's probability"), Axis("its mean, confidence")
    data_map = draw("Map of the data", series, x=x, y=y, caption=caption, wide=True)
    return DynamicsSection(
        sentence=sentence(table, several="adapters" in table),
        plots=[data_map, *_losses_by_visit(table), *_forgetting(table), *_doubts(run)],
        hardest=_rows(run, training_dynamics.hardest(table)),
        unlearnable=_rows(run, training_dynamics.unlearnable(table).head(training_dynamics.HARDEST)),
    )


def _rows(run: RunRecord, shown: pd.DataFrame) -> list[HardRow]:
    # Texts of rows by their places, where the run directory has them.
    table = run.labelled if run.crossvalidates else run.dynamics
    rows = table.dropna(subset=["text"]) if "text" in table else pd.DataFrame({"row": [], "text": []})
    texts = dict(zip(rows["row"], rows["text"], strict=True))
    return [
        HardRow(
            row=line.row,
            text=ends(texts.get(line.row, ""), LONGEST),
            confidence=f"{line.confidence:.3f}",
            correctness=units.percent(line.correctness),
            forgotten=f"{line.forgotten:,}",
        )
        for line in shown.itertuples()
    ]


def sentence(table: pd.DataFrame, *, several: bool) -> str:
    """How many rows were never learned, and how many were forgotten."""
    never, forgotten = len(training_dynamics.never_learned(table)), int((table["forgotten"] > 0).sum())
    by = "by none of the adapters that trained on them" if several else "at no visit"
    none = ""
    if "right_out_of_fold" in table:
        unlearnable = len(training_dynamics.unlearnable(table))
        none = f" {unlearnable:,} of the first no fold can learn: they are wrong out of fold too."
    return (
        f"{never:,} of {len(table):,} rows were predicted {by} as they are labelled; {forgotten:,} were forgotten at "
        f"least once after they had been right.{none}"
    )


def _losses_by_visit(table: pd.DataFrame) -> list[Plot]:
    """Losses of rows from visit to visit, over as many visits as at least half of the rows have."""
    counts = table["losses"].map(len) if "losses" in table else pd.Series([0])
    visits = int(counts.quantile(0.5, interpolation="lower"))
    if visits < 2:
        return []
    loss_NV = np.stack([losses[:visits] for losses in table.loc[counts >= visits, "losses"]]).astype(np.float64)
    low_V, median_V, high_V = np.quantile(loss_NV, [0.25, 0.5, 0.75], axis=0)
    x = np.arange(1, visits + 1, dtype=np.float64)
    series = [Series("quartiles", x, low_V, "faint"), Series("quartiles", x, high_V, "faint")]
    series.append(Series("median", x, median_V))
    caption, visit = f"Median and quartiles of {len(loss_NV):,} rows, in nats.", Axis("visit", "count")
    loss = Axis("loss", from_zero=True)
    return [draw("Loss of rows from visit to visit", series, x=visit, y=loss, caption=caption).once_each()]


def _forgetting(table: pd.DataFrame) -> list[Plot]:
    """How often rows were forgotten; nothing where none was."""
    events = table.loc[table["forgotten"] > 0, "forgotten"].to_numpy()
    if not len(events):
        return []
    edges = np.arange(0.5, events.max() + 1) if events.max() <= BARS else np.linspace(0.5, events.max() + 0.5, BARS)
    bars = Series("rows", edges, np.histogram(events, edges)[0].astype(np.float64), "bars")
    never = f"never forgotten: {len(table) - len(events):,} of {len(table):,} rows"
    caption = f"Right at a visit and wrong at the next (Toneva et al. 2019); {never}."
    times, rows = Axis("times forgotten", "count"), Axis("rows", "count")
    return [draw("Forgetting events", [bars], x=times, y=rows, caption=caption)]


def _doubts(run: RunRecord) -> list[Plot]:
    """Probability of each row's own label out of fold, with that of the suspected ones before it."""
    table = run.labelled
    if run.suspects.empty or "label" not in table or not class_names(table):
        return []
    own_N = np.array([table.at[row, f"p_{label}"] for row, label in table["label"].items()])
    suspected_N = table["row"].isin(run.suspects["row"]).to_numpy()
    edges = np.linspace(0, 1, 21)
    parts = (("not suspected", own_N[~suspected_N], 0), ("suspected", own_N[suspected_N], 1))
    return [
        draw(
            "Probability of each row's label, out of fold",
            [Series(name, edges, np.histogram(p_n, edges)[0] * 1.0, "bars", colour) for name, p_n, colour in parts],
            x=Axis("probability of the label"),
            y=Axis("rows", "count"),
            caption=f"{len(run.suspects):,} of {len(table):,} labels are probably wrong; suspects.parquet lists them.",
            wide=True,
        )
    ]


FILE = "layers.jsonl"
FROZEN = "frozen"


class LayerTable(NamedTuple):
    """Parts of blocks by kind, neighbouring blocks that are alike in one row."""

    kinds: Sequence[str]
    """Those of which any trains."""
    frozen: Sequence[str]
    """The others."""
    rows: Sequence[tuple[str, Sequence[str], str]]
    """Name, a cell for each kind (empty where there is no such part), share of the steps in which it trained."""
    changed: bool
    """Whether a freezing policy changed what trained."""


def layers(run: RunRecord) -> LayerTable | None:
    """The table of a run; None where the run does not tell."""
    path = run.folder / FILE
    try:
        lines = files.whole_lines(path)
        return _table(lines, run) if lines else None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise FileError(f"{path}: damaged ({error}). Restore it, or delete it: the report does without.") from None


def _table(lines: Sequence[Mapping[str, Any]], run: RunRecord) -> LayerTable:
    layers = lines[0]["layers"]
    known = dict.fromkeys(kind for layer in layers for kind in layer["parts"])
    kinds = [kind for kind in known if any(layer["parts"].get(kind) for layer in layers)]
    still = [kind for kind in known if kind not in kinds]
    last = max(int(run.metrics["step"].max()) if len(run.metrics) else 1, int(lines[-1]["step"]), 1)
    begins = [max(1, int(line["step"])) for line in lines]
    spans = list(zip(lines, begins, [*begins[1:], last + 1], strict=True))

    def alike(layer: Mapping[str, Any]) -> tuple[str, float]:
        """The same for blocks that may share a row: those with the same parts that trained in as many steps."""
        trained = sum(end - begin for line, begin, end in spans if str(line["trains"])[int(layer["layer"])] == "1")
        name = str(layer["name"])
        parts = json.dumps([name.startswith("block ") or name, layer["parts"]])
        return parts, trained / last if any(layer["parts"].values()) else 0.0

    rows = []
    for (key, share), group in groupby(layers, alike):
        names, parts = [str(layer["name"]) for layer in group], json.loads(key)[1]
        each = " each" if len(names) > 1 else ""
        cells = [
            "" if (values := parts.get(kind)) is None else f"{units.count(values)}{each}" if values else FROZEN
            for kind in kinds
        ]
        first, last_name = (name.removeprefix("block ") for name in (names[0], names[-1]))
        name = f"blocks {first} to {last_name}" if each else names[0]
        rows.append((name, cells, units.percent(share) if any(parts.values()) else ""))
    return LayerTable(tuple(kinds), tuple(still), rows, changed=len(lines) > 1)
