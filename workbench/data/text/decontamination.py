"""Training texts that hold the text of evaluation rows, found by common n-grams whatever their case and punctuation.

An evaluation row is found where n-grams that a training row has too cover a share of the words of its prompt or of its
answer (after Lambert et al. 2024, Tülu 3). N-grams of more than COMMON different evaluation texts are a
template's and are not compared (Brown et al. 2020, GPT-3, appendix C). Texts that are equal but for case, punctuation
and spaces are found at any length. Memory grows with the evaluation rows, not with the training rows.

Legend: V words, W windows of n words, P postings, T texts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice, repeat
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

COMMON = 10
"""Evaluation texts that may have an n-gram before it counts as a template's."""
EXCERPT = 24
"""Words of a common text that are shown."""
_BLOCK = 1024
_APOSTROPHE = re.compile(r"(?<=\w)['`\u2018\u2019\u02bc](?=\w)")
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
"""Thai, Lao, Burmese, Khmer, kana and Han: scripts without spaces between words."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")

Hashes: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]


class TextRow(NamedTuple):
    """The texts of a row, such as its prompt and its answer."""

    place: str
    """File and row."""
    texts: tuple[str, ...]


class Match(NamedTuple):
    """A training row, and the evaluation row that it holds most of."""

    row: int
    """Number of the training row, from 0, in their order."""
    train: str
    evaluation: str
    source: str
    """The evaluation set."""
    share: float
    """Share of the words of the evaluation row's prompt or answer that are in the training row."""
    text: str
    """The longest common text, without case and punctuation."""


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
                for part in _compared([words(text) for text in row.texts], ngram):
                    self._add(_Text(row.place, source, tuple(part)))
        self._weights = _odd(ngram)
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
            flat = [self._numbered([word for part in parts for word in part]) for parts in split]
            hit_rows, hits = self._found(flat)
            bounds = np.searchsorted(hit_rows, np.arange(len(block) + 1))
            for at, (number, row) in enumerate(block):
                best = self._best(split[at], hits[bounds[at] : bounds[at + 1]])
                if best is not None and best[0] >= share:
                    held = self._texts[best[1]]
                    yield Match(number, row.place, held.place, held.source, round(best[0], 4), best[2])

    def _add(self, text: _Text) -> None:
        if not text.words or (key := _whole(text.words)) in self._whole:
            return
        self._whole[key] = len(self._texts)
        self._texts.append(text)
        for word in text.words:
            self._numbers.setdefault(word, len(self._numbers) + 1)

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
        covered_T = self._covered(owner_P, start_P)
        shares = {text: count / self._comparable_T[text] for text, count in covered_T.items()}
        number = max(shares, key=lambda text: (shares[text], -text))
        run = _longest_run(np.sort(start_P[owner_P == number]), self._ngram)
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


def _compared(parts: Sequence[list[str]], ngram: int) -> list[list[str]]:
    """The parts that are long enough to be told from others by themselves; else the row as a whole."""
    return [part for part in parts if len(part) >= ngram] or [[word for part in parts for word in part]]


def _whole(part: Sequence[str]) -> bytes:
    """A digest of a text that its spaces do not change."""
    return blake2b("".join(part).encode(), digest_size=12).digest()


def _shown(part: Sequence[str]) -> str:
    return " ".join(part[:EXCERPT]) + (" ..." if len(part) > EXCERPT else "")


def _longest_run(start_P: Ints, ngram: int) -> slice:
    """The longest stretch of words that n-grams cover without a gap; `start_P` is sorted."""
    runs = np.split(start_P, np.flatnonzero(np.diff(start_P) > ngram) + 1)
    longest = max(runs, key=lambda run: int(run[-1] - run[0]))
    return slice(int(longest[0]), int(longest[-1]) + ngram)


def _mixed(numbers: Hashes) -> Hashes:
    """Numbers spread over 64 bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed: Hashes = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _odd(count: int) -> Hashes:
    """Odd factors, one for each place of an n-gram."""
    factors: Hashes = _mixed(np.arange(1, count + 1, dtype=np.uint64) + np.uint64(1 << 40)) | np.uint64(1)
    return factors
