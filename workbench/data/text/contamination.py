"""Contaminated training rows: listed, and kept, dropped or refused as `data.decontaminate` says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.config import DataConfig
from workbench.config.sections.decontaminate_config import DecontaminateConfig
from workbench.data import starter
from workbench.data.text import formats
from workbench.data.text.decontamination import EvaluationIndex, Match, TextRow
from workbench.data.text.formats import Example
from workbench.errors import DataError
from workbench.runs import files
from workbench.runs.run_directory import Run

FILE = "contamination.json"
LISTED = 20
"""Matches that the manifest and the report list; contamination.json has all."""
_TOLD = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Contamination:
    """The training rows that hold the text of evaluation rows."""

    config: DecontaminateConfig
    rows: int
    """Training rows that were compared."""
    sets: Mapping[str, int]
    """Rows of each evaluation set."""
    matches: tuple[Match, ...]

    @property
    def contaminated_N(self) -> npt.NDArray[np.bool_]:
        """True for each row that holds the text of an evaluation row."""
        found_N = np.zeros(self.rows, dtype=bool)
        found_N[[match.row for match in self.matches]] = True
        return found_N

    @property
    def sentences(self) -> list[str]:
        """How many rows were found, and the first of them with the common text."""
        sentence = f"{len(self.matches):,} of {self.rows:,} training rows hold text of {' or '.join(self.sets)}"
        done = {"keep": "kept", "drop": "dropped from training"}.get(self.config.action, "refused")
        listed = [f"  {match_text(match)}" for match in self.matches[:_TOLD]]
        return [f"Contamination: {sentence}{f'; {done}' if self.matches else ''}.", *listed]

    def facts(self) -> dict[str, Any]:
        """For the manifest and the report."""
        settings = self.config.model_dump(mode="json", include={"action", "ngram", "share"})
        counts = {"rows": self.rows, "contaminated": len(self.matches), "sets": dict(self.sets)}
        return {**settings, **counts, "matches": [match._asdict() for match in self.matches[:LISTED]]}


def write(contamination: Contamination | None, run: Run) -> None:
    """Write every match into contamination.json of a run; nothing where none were looked for."""
    if contamination is not None and run.ranks.first:
        files.write_json(
            run.path / FILE, {**contamination.facts(), "matches": [match._asdict() for match in contamination.matches]}
        )


def match_text(match: Match) -> str:
    """A match for a person."""
    return f'{match.train} holds {match.share:.0%} of {match.evaluation} ({match.source}): "{match.text}"'


def find(
    name: str, rows: Iterable[TextRow], sets: Mapping[str, Iterable[TextRow]], config: DecontaminateConfig
) -> Contamination:
    """Compare training rows, read once in their order, with evaluation sets.

    Args:
        name: The training file, for messages.

    Raises:
        DataError: Rows are contaminated and `config.action` is refuse, or all are and would be dropped.
    """
    counts: dict[str, int] = dict.fromkeys(sets, 0)

    def counted(source: str) -> Iterable[TextRow]:
        for row in sets[source]:
            counts[source] += 1
            yield row

    index = EvaluationIndex(((source, counted(source)) for source in sets), ngram=config.ngram)
    read = 0

    def trained() -> Iterable[TextRow]:
        nonlocal read
        for row in rows:
            read += 1
            yield row

    matches = tuple(index.matches(trained(), share=config.share))
    report = Contamination(config, read, counts, matches)
    if matches and config.action == "refuse":
        listed = report.sentences[1:]
        raise DataError(
            f"{name}: {len(matches):,} of {read:,} training rows hold the text of evaluation rows, so scores would be "
            "too good:\n" + "\n".join(listed) + "\n  Write data.decontaminate.action=drop to leave them out of "
            "training, or keep to list them only."
        )
    if len(matches) == read and config.action == "drop":
        raise DataError(
            f"{name}: every row holds the text of an evaluation row; nothing is left to train on. Give other rows, or "
            "raise data.decontaminate.share."
        )
    return report


def joined(parts: Sequence[Contamination | None], prefixes: Iterable[str]) -> Contamination | None:
    """Findings in several sets of training rows that were compared with the same evaluation rows.

    Args:
        prefixes: The beginning of the places of each set's rows.
    """
    prefixed_reports = [(each, prefix) for each, prefix in zip(parts, prefixes, strict=True) if each is not None]
    if not prefixed_reports:
        return None
    reports = [each for each, _ in prefixed_reports]
    starts = accumulate((each.rows for each in reports), initial=0)
    matches = (
        match._replace(row=start + match.row, train=prefix + match.train)
        for start, (each, prefix) in zip(starts, prefixed_reports, strict=False)
        for match in each.matches
    )
    return replace(reports[0], rows=sum(each.rows for each in reports), matches=tuple(matches))


def evaluation_sets(held_out: Mapping[str, T], test: Mapping[str, T]) -> dict[str, T]:
    """Sets of rows that are scored, each under the setting that names its file, such as `data.test.NAME`."""
    keys = {"data.held_out": held_out, "data.test": test}
    return {f"{key}.{name}" if name else key: rows for key, sets in keys.items() for name, rows in sets.items()}


def named_sets(config: DataConfig) -> dict[str, Iterator[TextRow]]:
    """The rows of each set of `data.decontaminate.against`, of whatever format."""
    return {each: _rows(config, each) for each in config.decontaminate.against}


def texts_of(config: DataConfig, source: str) -> Iterator[str]:
    """The text of each row of a file or a hub data set, of whatever format."""
    return (" ".join(row.texts) for row in _rows(config, source))


def _rows(config: DataConfig, source: str) -> Iterator[TextRow]:
    plain = config.model_copy(update={"format": "auto", "columns": {}})
    return map(text_row, formats.read(starter.resolve(source), plain, skipped=[]))


def text_row(example: Example) -> TextRow:
    """The prompt and the answer of an example, without what its system prompt says; or its raw text."""
    if not example.messages:
        return TextRow(example.place, (example.whole_text,))
    by_role = {"user": "", "assistant": ""}
    for message in example.messages:
        if message["role"] in by_role:
            by_role[message["role"]] += f"{message.get('content') or ''}\n"
    return TextRow(example.place, tuple(by_role.values()))
