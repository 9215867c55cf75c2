"""The pictures of a page: mistakes, rows in doubt, cells of the confusion matrix, gradient maps, training pictures.

Each picture stands in the page once and is drawn wherever it is named, so that no script is needed.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from workbench.evaluation import training_dynamics
from workbench.evaluation.prediction_table import Floats, class_names, ranked, suspects
from workbench.report.class_section import Neighbour, in_words, neighbours
from workbench.report.crossval_section import CONFLICTS
from workbench.report.rendering import begins
from workbench.report.run_record import RunRecord
from workbench.runs import units

SHOWN = 16
"""Mistakes, and rows in doubt, on the page."""
IN_A_CELL = 24
"""Pictures that a cell of the confusion matrix opens."""
IN_A_CLUSTER = 8
MOST_BYTES = 3_800_000
"""Bytes of all pictures as they stand in the page; further ones are left out."""
LONGEST_NAME = 60
_SMALL = 64
"""Pictures with shorter sides are enlarged without smoothing, so that their pixels can be seen."""


@dataclass(frozen=True)
class Picture:
    """A picture that the page holds once."""

    id: str
    uri: str
    """A `data:` URI of JPEG."""
    width: int
    height: int
    sound: str = ""
    """A `data:` URI of MP3 of the recording whose spectrum it is; empty for a picture."""

    @property
    def is_small(self) -> bool:
        """Whether it is enlarged without smoothing."""
        return max(self.width, self.height) < _SMALL


@dataclass(frozen=True)
class Card:
    """A row with its picture."""

    picture: Picture | None
    """None where the run did not keep it."""
    name: str
    label: str
    predicted: str
    chance: str
    """Probability of the prediction, or how far off it is; empty where `predicted` says it."""
    right: bool | None
    """None for a number."""
    place: str = ""
    map: Picture | None = None
    """The same under its gradient map."""
    near: list[tuple[Neighbour, Picture | None]] = field(default_factory=list)
    """Training rows that are most like it."""

    @property
    def words(self) -> str:
        """The picture in words."""
        return f"{self.name}, label {self.label}, predicted {self.predicted} {self.chance}".rstrip()


@dataclass(frozen=True)
class Panel:
    """The pictures that a cell of the confusion matrix opens."""

    id: str
    label: str
    predicted: str
    count: int
    """Rows of the cell, of which some have a picture."""
    cards: list[Card]


@dataclass(frozen=True)
class TrainedPicture:
    """A training picture in its states."""

    name: str
    label: str
    states: list[tuple[str, Picture]]


@dataclass(frozen=True)
class PictureSection:
    """The part of the page; a list is empty where there is nothing to show."""

    pictures: list[Picture]
    heard: bool
    """Whether they are spectra of recordings."""
    """All that the page holds."""
    mistakes: list[Card]
    uncertain: list[Card]
    suspects: list[Card]
    """Rows whose label is probably wrong, by adapters that did not train on them."""
    panels: Mapping[tuple[str, str], Panel]
    """By true class and class that was predicted."""
    explained: list[Card]
    trained: list[TrainedPicture]
    hard: list[Card]
    """Training rows whose labels stayed least probable, with their mean probability."""
    conflicts: list[list[Card]]
    """Clusters of near-duplicates with different labels."""

    @property
    def is_augmented(self) -> bool:
        """Whether training pictures differ between epochs."""
        return any(caption.startswith("epoch") for each in self.trained for caption, _ in each.states)

    def panel(self, label: str, predicted: str) -> Panel | None:
        """The panel of a cell, where it has pictures."""
        return self.panels.get((label, predicted))


@dataclass
class Album:
    """Gives pictures their places in the page."""

    left: int = MOST_BYTES
    pictures: list[Picture] = field(default_factory=list)

    def stored(self, row: Any) -> Picture | None:
        """The picture of a row of pictures.parquet, with its sound, which those of older runs do not have."""
        return self.picture(row.jpeg, getattr(row, "sound", b""))

    def picture(self, jpeg: bytes, heard: bytes = b"") -> Picture | None:
        """None where it is no JPEG, or the page is full."""
        try:
            with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
                width, height = image.size
        except (OSError, Image.DecompressionBombError):
            return None
        uri = f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
        sound = f"data:audio/mpeg;base64,{base64.b64encode(heard).decode()}" if heard else ""
        if len(uri) + len(sound) > self.left:
            return None
        self.left -= len(uri) + len(sound)
        self.pictures.append(Picture(f"picture-{len(self.pictures)}", uri, width, height, sound))
        return self.pictures[-1]


def beside_rows(table: pd.DataFrame, places: Iterable[str]) -> dict[str, list[Picture]]:
    """The pictures of some rows of text, by their places; the first ones, where the page is full."""
    album = Album()
    own: dict[str, list[Any]] = {}
    for stored in table.itertuples():
        own.setdefault(stored.row, []).append(stored)
    return {
        place: [each for stored in own.get(place, ()) if (each := album.stored(stored)) is not None] for place in places
    }


def pictured(run: RunRecord) -> PictureSection | None:
    """The section; None where the run kept no pictures or made no predictions."""
    table, stored = run.labelled, run.pictures
    if "predicted" not in table or stored.empty:
        return None
    album = Album()
    # A few pictures of training come first: they are not to be missing where the page is full.
    trained = []
    for _, states in stored[stored["kind"] == "trained"].groupby("row", sort=False):
        drawn = [(state.caption, album.stored(state)) for state in states.itertuples()]
        kept = [(caption, picture) for caption, picture in drawn if picture is not None]
        first = states.iloc[0]
        trained.append(TrainedPicture(_short(first["image"]), _begins(in_words(first["label"])), kept))
    maps = {each.row: album.stored(each) for each in _of_kind(stored, "map")}
    of_training = {each.row: album.stored(each) for each in _of_kind(stored, "neighbour")}
    of_row = {each.row: album.stored(each) for each in _of_kind(stored, "row")}
    near = {
        place: [(each, of_training.get(each.place) or of_row.get(each.place)) for each in rows]
        for place, rows in neighbours(run).items()
    }
    cards = _cards(table, of_row)
    by_place = {card.place: card for card in cards}
    left_out = {each.row: _card(each, album, "left out") for each in _of_kind(stored, "left out")}
    ranking = ranked(table)
    have = {number for number, card in enumerate(cards) if card.picture is not None}
    return PictureSection(
        pictures=album.pictures,
        heard="audio" in table,
        mistakes=[replace(cards[n], near=near.get(cards[n].place, [])) for n in ranking.mistakes if n in have][:SHOWN],
        uncertain=[_doubtful(cards[n], table.iloc[n]) for n in ranking.uncertain[:SHOWN] if n in have],
        suspects=[
            replace(
                cards[n],
                near=near.get(cards[n].place, []),
                predicted=_begins(other),
                chance=f"{table.at[n, f'p_{other}']:.2f}",
            )
            for n, other in (suspects(table) if run.crossvalidates else {}).items()
            if n in have
        ][:SHOWN],
        panels=_panels(table, cards, ranking.sure_N),
        explained=[
            replace(by_place[place], map=drawn)
            for place, drawn in maps.items()
            if drawn is not None and place in by_place
        ],
        trained=trained,
        hard=_hard(run, {each.row: _card(each, album) for each in _of_kind(stored, "hard")}),
        conflicts=_conflicts(run, left_out | by_place),
    )


def _of_kind(stored: pd.DataFrame, kind: str) -> Iterable[Any]:
    records: Iterable[Any] = stored[stored["kind"] == kind].itertuples()
    return records


def _cards(table: pd.DataFrame, of_row: Mapping[str, Picture | None]) -> list[Card]:
    ranking, numbers = ranked(table), not class_names(table)
    return [
        Card(
            picture=of_row.get(row.row),
            name=_short(row.audio if "audio" in table else row.image),
            label=_begins(in_words(row.label)),
            predicted=_begins(in_words(row.predicted)),
            chance=f"off by {units.number(sure)}" if ranking.is_distance else f"{sure:.2f}",
            right=None if numbers else bool(right),
            place=row.row,
        )
        for row, sure, right in zip(table.itertuples(), ranking.sure_N, ranking.right_N, strict=True)
    ]


def _card(stored: Any, album: Album, predicted: str = "") -> Card:
    """A training row, shown without a prediction."""
    picture = album.stored(stored)
    return Card(picture, _short(stored.image), _begins(stored.label), "", predicted, None, stored.row)


def _doubtful(card: Card, row: pd.Series) -> Card:
    p_C = row[[name for name in row.index if name.startswith("p_")]].astype(float).sort_values(ascending=False)
    several = isinstance(row["label"], (list, tuple, np.ndarray))
    if several:
        p_C = p_C.iloc[np.argsort((p_C - 0.5).abs().to_numpy(), kind="stable")]
    names = [_begins(str(name).removeprefix("p_")) for name in p_C.index[:2]]
    # The space does not break, so that a probability stays beside its class.
    predicted = (", " if several else " or ").join(
        f"{name}\u00a0({p:.2f})" for name, p in zip(names, p_C.iloc[:2], strict=True)
    )
    return replace(card, predicted=predicted, chance="")


def _panels(table: pd.DataFrame, cards: list[Card], sure_N: Floats) -> dict[tuple[str, str], Panel]:
    names = class_names(table)
    if not names or isinstance(table["label"].iloc[0], (list, tuple, np.ndarray)):
        return {}
    number_of = {name: number for number, name in enumerate(names)}
    members: dict[tuple[str, str], list[int]] = {}
    cell_N = list(zip(table["label"], table["predicted"], strict=True))
    for row in np.argsort(-sure_N, kind="stable").tolist():
        members.setdefault(cell_N[row], []).append(row)
    panels = {}
    for (label, predicted), rows in members.items():
        pictured = [cards[row] for row in rows if cards[row].picture is not None][:IN_A_CELL]
        if pictured and label in number_of and predicted in number_of:
            name = f"cell-{number_of[label]}-{number_of[predicted]}"
            panels[label, predicted] = Panel(name, _begins(label), _begins(predicted), len(rows), pictured)
    return panels


def _hard(run: RunRecord, by_place: Mapping[str, Card]) -> list[Card]:
    """Cards of the hardest training rows; none where a picture is missing, so that a page shows all or none."""
    hardest = pd.DataFrame() if run.dynamics.empty else training_dynamics.hardest(run.dynamics)
    cards = [
        replace(card, predicted=f"{line.confidence:.2f}", chance=f"right {units.percent(line.correctness)}")
        for line in hardest.itertuples()
        if (card := by_place.get(line.row)) is not None and card.picture is not None
    ]
    return cards if len(cards) == len(hardest) else []


def _conflicts(run: RunRecord, by_place: Mapping[str, Card]) -> list[list[Card]]:
    clusters = (run.stages.get("duplicates") or {}).get("conflicts") or []
    card_clusters = [[by_place[place] for place in places[:IN_A_CLUSTER] if place in by_place] for places in clusters]
    return [cards for cards in card_clusters if any(card.picture for card in cards)][:CONFLICTS]


def _begins(text: str) -> str:
    return begins(text, LONGEST_NAME)


def _short(name: str) -> str:
    """The end of a path, from the last folder on."""
    short = "/".join(str(name).split("/")[-2:])
    return short if len(short) <= LONGEST_NAME else "…" + short[-LONGEST_NAME:]
