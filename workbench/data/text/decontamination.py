"""Training texts that hold the text of evaluation rows: found by common n-grams, and kept, dropped or refused.

An evaluation row is found where n-grams that a training row has too cover a share of the words of its prompt or of its
answer (after Lambert et al. 2024, Tülu 3), whatever their case and punctuation. N-grams of more than COMMON different
evaluation texts are a template's and are not compared (Brown et al. 2020, GPT-3, appendix C). Texts that are equal but
for case, punctuation and spaces are found at any length. Memory grows with the evaluation rows, not with the training
rows.

Legend: V words, W windows of n words, P postings, T texts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, chain, islice, repeat
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.config import DataConfig
from workbench.config.sections.cleaning_config import DecontaminateConfig
from workbench.data import starter
from workbench.data.text import formats
from workbench.data.text.formats import Example
from workbench.errors import DataError
from workbench.runs import files
from workbench.runs.run_directory import Run

COMMON = 10  # evaluation texts that may have an n-gram before it counts as a template's
EXCERPT = 24  # words of a common text that are shown
_BLOCK = 1024
_APOSTROPHE = re.compile(r"(?<=\w)['`\u2018\u2019\u02bc](?=\w)")
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
"""Thai, Lao, Burmese, Khmer, kana and Han: scripts without spaces between words."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")

Hashes: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]


class TextRow(NamedTuple):
    """The texts of a row, such as its prompt and its answer."""

    place: str  # file and row
    texts: tuple[str, ...]


class Match(NamedTuple):
    """A training row, and the evaluation row that it holds most of."""

    row: int  # number of the training row, from 0, in their order
    train: str
    evaluation: str
    source: str  # the evaluation set
    share: float  # share of the words of the evaluation row's prompt or answer that are in the training row
    text: str  # the longest common text, without case and punctuation


class _Text(NamedTuple):
    place: str
    source: str
    words: tuple[str, ...]


def words(text: str) -> list[str]:
    """The words of `text` without case and punctuation; characters, of scripts without spaces."""
    return _WORD.findall(_APOSTROPHE.sub("", unicodedata.normalize("NFKC", text).casefold()))


class EvaluationIndex:
    """The n-grams of evaluation rows, to look training rows up in."""

    def __init__(self, sets: Iterable[tuple[str, Iterable[TextRow]]], *, ngram: int) -> None:
        """Index the rows of evaluation sets, each given with its name."""
        self._ngram = ngram
        self._whole: dict[bytes, int] = {}
        self._texts: list[_Text] = []
        self._numbers: dict[str, int] = {}
        for source, rows in sets:
            for row in rows:
                parts = [words(text) for text in row.texts]
                # The parts that are long enough to be told from others by themselves; else the row as a whole.
                for part in [part for part in parts if len(part) >= ngram] or [list(chain.from_iterable(parts))]:
                    if part and (key := _whole(part)) not in self._whole:
                        self._whole[key] = len(self._texts)
                        self._texts.append(_Text(row.place, source, tuple(part)))
                        for word in part:
                            self._numbers.setdefault(word, len(self._numbers) + 1)
        # Odd factors, one for each place of an n-gram.
        self._weights: Hashes = _mixed(np.arange(1, ngram + 1, dtype=np.uint64) + np.uint64(1 << 40)) | np.uint64(1)
        hashes = [self._windows(self._numbered(text.words)) for text in self._texts]
        owner_P = np.repeat(np.arange(len(hashes)), [len(each) for each in hashes])
        start_P = np.concatenate([np.arange(len(each)) for each in hashes] or [np.zeros(0, dtype=np.int64)])
        hash_P = np.concatenate(hashes or [np.zeros(0, dtype=np.uint64)])
        order_P = np.argsort(hash_P, kind="stable")
        hash_P, owner_P, start_P = hash_P[order_P], owner_P[order_P], start_P[order_P]
        # A text may repeat an n-gram: different texts are counted.
        pairs = np.unique(np.stack([hash_P, owner_P.astype(np.uint64)], axis=1), axis=0)[:, 0]
        known, times = np.unique(pairs, return_counts=True)
        kept_P = ~np.isin(hash_P, known[times > COMMON])
        self._hash_P, self._owner_P, self._start_P = hash_P[kept_P], owner_P[kept_P], start_P[kept_P]
        self._comparable_T = self._covered(self._owner_P, self._start_P)

    def __len__(self) -> int:
        """Different evaluation texts."""
        return len(self._texts)

    def matches(self, rows: Iterable[TextRow], *, share: float) -> Iterator[Match]:
        """The contaminated rows among training rows, each with the evaluation row that it holds most of."""
        numbered = enumerate(rows)
        while block := list(islice(numbered, _BLOCK)):
            split = [[words(text) for text in row.texts] for _, row in block]
            hit_rows, hits = self._found([self._numbered([word for part in parts for word in part]) for parts in split])
            bounds = np.searchsorted(hit_rows, np.arange(len(block) + 1))
            for at, (number, row) in enumerate(block):
                best = self._best(split[at], hits[bounds[at] : bounds[at + 1]])
                if best is not None and best[0] >= share:
                    held = self._texts[best[1]]
                    yield Match(number, row.place, held.place, held.source, round(best[0], 4), best[2])

    def _numbered(self, grams: Sequence[str]) -> Ints:
        """Numbers of words; 0 for one that no evaluation row has."""
        return np.fromiter(map(self._numbers.get, grams, repeat(0)), dtype=np.int64, count=len(grams))

    def _windows(self, numbers_V: Ints) -> Hashes:
        """A hash of each n-gram (W,)."""
        if len(numbers_V) < self._ngram:
            return np.zeros(0, dtype=np.uint64)
        mixed_V = _mixed(numbers_V.astype(np.uint64))
        count = len(mixed_V) - self._ngram + 1
        hash_W = np.zeros(count, dtype=np.uint64)
        for offset, weight in enumerate(self._weights):
            hash_W += mixed_V[offset : offset + count] * weight
        return hash_W

    def _found(self, rows: Sequence[Ints]) -> tuple[Ints, Hashes]:
        """Row and hash of each n-gram of some rows that the index has."""
        # Rows are set apart by words that no evaluation row has.
        apart = np.zeros(1, dtype=np.int64)
        joined_V = np.concatenate([part for row in rows for part in (row, apart)])
        row_V = np.repeat(np.arange(len(rows)), [len(row) + 1 for row in rows])
        hash_W = self._windows(joined_V)
        unknown_V = np.concatenate([[0], np.cumsum(joined_V == 0)])
        whole_W = unknown_V[self._ngram :] == unknown_V[: -self._ngram] if len(hash_W) else np.zeros(0, dtype=bool)
        candidates = np.flatnonzero(whole_W)
        if not len(candidates) or not len(self._hash_P):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64)
        at = np.minimum(np.searchsorted(self._hash_P, hash_W[candidates]), len(self._hash_P) - 1)
        candidates = candidates[self._hash_P[at] == hash_W[candidates]]
        return row_V[candidates], hash_W[candidates]

    def _best(self, parts: Sequence[Sequence[str]], hits: Hashes) -> tuple[float, int, str] | None:
        """Share, number and common text of the evaluation text that a row holds most of."""
        wholes = [*parts, [word for part in parts for word in part]] if len(parts) > 1 else parts
        for part in wholes:
            number = self._whole.get(_whole(part)) if part else None
            if number is not None:
                return 1.0, number, _shown(self._texts[number].words)
        if not len(hits):
            return None
        hits = np.unique(hits)
        first, last = np.searchsorted(self._hash_P, hits), np.searchsorted(self._hash_P, hits, side="right")
        postings = np.concatenate([np.arange(*bounds) for bounds in zip(first, last, strict=True)])
        owner_P, start_P = self._owner_P[postings], self._start_P[postings]
        shares = {text: count / self._comparable_T[text] for text, count in self._covered(owner_P, start_P).items()}
        number = max(shares, key=lambda text: (shares[text], -text))
        # The longest stretch of words that n-grams cover without a gap; `start_P` is sorted.
        start_P = np.sort(start_P[owner_P == number])
        runs = np.split(start_P, np.flatnonzero(np.diff(start_P) > self._ngram) + 1)
        longest = max(runs, key=lambda run: int(run[-1] - run[0]))
        run = slice(int(longest[0]), int(longest[-1]) + self._ngram)
        return shares[number], number, _shown(self._texts[number].words[run])

    def _covered(self, owner_P: Ints, start_P: Ints) -> dict[int, int]:
        """Words that n-grams cover, of each text that has any."""
        order = np.lexsort((start_P, owner_P))
        owner_P, start_P = owner_P[order], start_P[order]
        if not len(owner_P):
            return {}
        step_P = np.full(len(owner_P), self._ngram)
        same_P = owner_P[1:] == owner_P[:-1]
        step_P[:-1][same_P] = np.minimum(np.diff(start_P)[same_P], self._ngram)
        texts, first = np.unique(owner_P, return_index=True)
        return dict(zip(texts.tolist(), np.add.reduceat(step_P, first).tolist(), strict=True))


def _whole(part: Sequence[str]) -> bytes:
    """A digest of a text that its spaces do not change."""
    return blake2b("".join(part).encode(), digest_size=12).digest()


def _shown(part: Sequence[str]) -> str:
    return " ".join(part[:EXCERPT]) + (" ..." if len(part) > EXCERPT else "")


def _mixed(numbers: Hashes) -> Hashes:
    """Numbers spread over 64 bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed: Hashes = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


FILE = "contamination.json"
LISTED = 20  # matches that the manifest and the report list; contamination.json has all
_TOLD = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Contamination:
    """The training rows that hold the text of evaluation rows."""

    config: DecontaminateConfig
    rows: int  # training rows that were compared
    sets: Mapping[str, int]  # rows of each evaluation set
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


def write_matches(contamination: Contamination | None, run: Run) -> None:
    """Write every match into contamination.json of a run; nothing where none were looked for."""
    if contamination is not None and run.ranks.first:
        files.write_json(
            run.path / FILE, {**contamination.facts(), "matches": [match._asdict() for match in contamination.matches]}
        )


def match_text(match: Match) -> str:
    """A match for a person."""
    return f'{match.train} holds {match.share:.0%} of {match.evaluation} ({match.source}): "{match.text}"'


def find_contamination(
    name: str, rows: Iterable[TextRow], sets: Mapping[str, Iterable[TextRow]], config: DecontaminateConfig
) -> Contamination:
    """Compare training rows, read once in their order, with evaluation sets. Raises DataError: rows are contaminated
    and `config.action` is refuse, or all are and would be dropped. `name`: the training file, for messages."""
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


def join_contaminations(parts: Sequence[Contamination | None], prefixes: Iterable[str]) -> Contamination | None:
    """Findings in several sets of training rows that were compared with the same evaluation rows. `prefixes`: the
    beginning of the places of each set's rows."""
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
    """Prompt and answer of an example, or both its answers, without what its system prompt says; or its raw text."""
    other = () if example.rejected is None else (text_row(example.rejected).texts[-1],)
    if not example.messages:
        return TextRow(example.place, (example.whole_text, *other))
    by_role = {"user": "", "assistant": ""}
    for message in example.messages:
        if message["role"] in by_role:
            by_role[message["role"]] += f"{message.get('content') or ''}\n"
    return TextRow(example.place, (*by_role.values(), *other))
