"""Adversarial validation: whether rows to evaluate by can be told from training rows, how surely, and by what.

Legend: N rows of both sides, T training rows, M other rows, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import normalised
from workbench.data.text.quality.survey import SourceRows
from workbench.errors import DataError
from workbench.evaluation import simple_baseline

Floats = NDArray[np.float64]
TEXTS, PICTURES = 2000, 400
"""Rows of a side that are compared at most, for some seconds."""
LEAST = 30
"""Different rows of a side below which nothing is said."""
LONGEST = 5000
"""Characters of a text that are read."""
FOLDS, SHOWN, SURE = 5, 8, 0.025
_WORD = r"[\u3040-\u9fff]|\w+|[^\w\s]"


class Difference(NamedTuple):
    """A feature in which the two sides surely differ."""

    name: str
    train: float
    """Its median, or the share of rows that have the word or format."""
    other: float
    auc: float
    """Of the feature alone, 0.5 to 1."""
    shares: bool

    @property
    def values(self) -> tuple[str, str]:
        """In words: of training rows, and of the others."""
        one, other = (f"{each:.1%}" if self.shares else f"{each:,.3g}" for each in (self.train, self.other))
        return one, other


class RowShift(NamedTuple):
    """How well a simple classifier tells the rows of a source from training rows."""

    title: str
    train_rows: int
    """Different rows that were compared; of near-duplicates of a side one."""
    rows: int
    auc: float | None
    """Cross-validated, with its 95 % interval; None where rows are too few."""
    low: float | None
    high: float | None
    differences: tuple[Difference, ...]
    """The largest first."""

    @property
    def differs(self) -> bool:
        """Whether the rows are surely unlike training rows, by the classifier or by a feature alone."""
        return bool(self.differences) or (self.low is not None and self.low > 0.5)

    @property
    def sentence(self) -> str:
        """The finding for a person."""
        compared = f"{self.title}: {self.rows:,} different rows against {self.train_rows:,} training rows"
        if self.auc is None or self.low is None or self.high is None:
            return f"{compared} are too few to say whether they are alike; {LEAST} of each are the least."
        told = self.low > 0.5
        found = (
            f"{compared}: a simple classifier {'tells' if told else 'does not tell'} them apart, AUC {self.auc:.3f} "
            f"(95 %: {self.low:.3f} to {self.high:.3f}; 0.5: they are alike)"
        )
        if not self.differs:
            least = 0.5 + (self.high - self.low) / 2
            return f"{found}. Differences below AUC {least:.2f} would not show in so many rows."
        by = ", ".join(f"{each.name} ({' -> '.join(each.values)})" for each in self.differences[:3])
        why = f"{'most by' if told else 'but they surely differ in'} {by}" if by else "by no single word or measure"
        return f"{found}, {why}. Scores on folds of training rows may not hold for them."


def compare(train: Sequence[SourceRows], other: SourceRows, *, seed: int) -> RowShift:
    """Tell the rows of a source from training rows by logistic regression on what is counted in texts or pictures,
    out of fold. Near-duplicates share a fold and count once on each side, so that copies neither make nor hide a
    difference."""
    sides = [_sample(train, seed), _sample([other], seed)]
    side_N = np.repeat([0, 1], list(map(len, sides)))
    rows = list(chain(*sides))
    group_N, (matrix_NF, named) = _groups(rows), _features(rows)
    _, first = np.unique(2 * group_N + side_N, return_index=True)
    first = np.sort(first)
    side_N, group_N = side_N[first], group_N[first]
    counted = int((side_N == 0).sum()), int((side_N == 1).sum())
    if min(counted) < LEAST:
        return RowShift(other.title, counted[0], counted[1], None, None, None, ())
    auc, low, high = _told_apart(matrix_NF[first], side_N, group_N, seed)
    return RowShift(other.title, counted[0], counted[1], auc, low, high, _differences(named, first, side_N))


Row = tuple[SourceRows, int]


def _sample(sources: Sequence[SourceRows], seed: int) -> list[Row]:
    rows = [(each, number) for each in sources for number in range(len(each.rows))]
    most = PICTURES if sources[0].jpeg is not None else TEXTS
    return [rows[at] for at in np.sort(np.random.default_rng(seed).permutation(len(rows))[:most])]


def _groups(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Group of each row; near-duplicates share one."""
    keys: Sequence[object]
    if rows and rows[0][0].jpeg is None:
        texts = [source.rows[number].text for source, number in rows]
        try:
            return np.asarray(duplicates.find(texts, threshold=0.7).cluster_N, dtype=np.int64)
        except DataError:  # texts of one template
            keys = list(map(normalised, texts))
    else:
        keys = [
            number if source.clusters is None else int(source.clusters.cluster_N[number]) for source, number in rows
        ]
    return np.unique(np.asarray(keys), return_inverse=True)[1]


class _Named(NamedTuple):
    """Features that a person knows by name."""

    measures: dict[str, Floats]
    words_NF: Any
    """Whether each row has each of `words`, sparse."""
    words: Sequence[str]


def _features(rows: Sequence[Row]) -> tuple[Any, _Named]:
    """What the classifier reads of rows, and what a difference is told by."""
    return _of_pictures(rows) if rows[0][0].jpeg is not None else _of_texts(rows)


def _of_texts(rows: Sequence[Row]) -> tuple[Any, _Named]:
    from scipy import sparse
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.preprocessing import StandardScaler

    texts = [source.rows[number].text[:LONGEST] for source, number in rows]
    letters_N = np.asarray([max(1, sum(map(str.isalpha, text))) for text in texts])
    length_N = np.asarray([max(1, len(text)) for text in texts])
    measures = {
        "characters": np.asarray([len(source.rows[number].text) for source, number in rows], dtype=np.float64),
        "words": np.asarray([len(text.split()) for text in texts], dtype=np.float64),
        "lines": np.asarray([text.count("\n") + 1 for text in texts], dtype=np.float64),
        "share of capitals among letters": np.asarray([sum(map(str.isupper, text)) for text in texts]) / letters_N,
        "share of digits": np.asarray([sum(map(str.isdigit, text)) for text in texts]) / length_N,
        "share of symbols": np.asarray([sum(not (x.isalnum() or x.isspace()) for x in text) for text in texts])
        / length_N,
    }
    counter = CountVectorizer(binary=True, token_pattern=_WORD, min_df=min(5, len(texts)))
    try:
        words_NF, words = counter.fit_transform(texts), list(counter.get_feature_names_out())
        counted = simple_baseline.text_features().fit_transform(texts)
    except ValueError:  # no word in any of them
        words_NF, words = sparse.csr_matrix((len(texts), 0)), []
        counted = sparse.csr_matrix((len(texts), 0))
    scaled = StandardScaler().fit_transform(np.log1p(np.stack(list(measures.values()), axis=1)))
    return sparse.hstack([counted, sparse.csr_matrix(scaled)]).tocsr(), _Named(measures, words_NF, words)


def _of_pictures(rows: Sequence[Row]) -> tuple[Any, _Named]:
    from scipy import sparse
    from sklearn.preprocessing import StandardScaler

    counted, told = [], []
    for source, number in rows:
        assert source.jpeg is not None, "pictures have one"
        pixels = cv2.imdecode(np.frombuffer(source.jpeg(number), np.uint8), cv2.IMREAD_COLOR)
        assert pixels is not None, "it was written just now"
        rgb_HW3 = np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), dtype=np.uint8)
        grey_HW = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
        counted.append(simple_baseline.picture_counts(rgb_HW3))
        spread = float(rgb_HW3.max(2).astype(np.float64).mean() - rgb_HW3.min(2).astype(np.float64).mean())
        sharp = float(cv2.Laplacian(grey_HW, cv2.CV_64F).std())
        height, width = source.sizes[number]
        told.append((width, height, width / height, grey_HW.mean() / 255, grey_HW.std() / 255, spread / 255, sharp))
    titles = ("width", "height", "width / height", "brightness", "contrast", "colourfulness", "sharpness")
    measures = dict(zip(titles, np.asarray(told, dtype=np.float64).T, strict=True))
    suffixes = [source.rows[number].place.partition(", row ")[0].rpartition(".")[2].lower() for source, number in rows]
    formats = sorted(set(suffixes))
    formats_NF = np.asarray([[each == name for name in formats] for each in suffixes], dtype=np.float64)
    scaled = StandardScaler().fit_transform(np.column_stack([counted, *measures.values()]))
    return np.column_stack([scaled, formats_NF]), _Named(measures, sparse.csr_matrix(formats_NF), formats)


def _told_apart(matrix_NF: Any, side_N: NDArray[Any], group_N: NDArray[Any], seed: int) -> tuple[float, float, float]:
    """Mean over folds of the AUC, and its 95 % interval: the variance in a fold is that of DeLong et al. (1988), folds
    share training rows (Nadeau and Bengio 2003)."""
    import warnings

    from scipy import stats
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold

    strength = 10.0 if not isinstance(matrix_NF, np.ndarray) else 0.01
    aucs, variances = [], []
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    for seen, held in folds.split(matrix_NF, side_N, group_N):
        model = LogisticRegression(C=strength, class_weight="balanced", max_iter=100)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a rough fit is enough
            model.fit(matrix_NF[seen], side_N[seen])
        score_n = model.decision_function(matrix_NF[held])
        one, other = score_n[side_N[held] == 0], score_n[side_N[held] == 1]
        ranks = stats.rankdata(np.concatenate([one, other]))
        above_T = 1 - (ranks[: len(one)] - stats.rankdata(one)) / len(other)
        below_M = (ranks[len(one) :] - stats.rankdata(other)) / len(one)
        aucs.append(float(below_M.mean()))
        variances.append(float(above_T.var(ddof=1) / len(one) + below_M.var(ddof=1) / len(other)))
    auc, error = float(np.mean(aucs)), float(np.sqrt(np.mean(variances) * (1 / FOLDS + 1 / (FOLDS - 1))))
    return auc, max(0.0, auc - 1.96 * error), min(1.0, auc + 1.96 * error)


def _differences(named: _Named, first: NDArray[Any], side_N: NDArray[Any]) -> tuple[Difference, ...]:
    """Features that differ by more than chance explains among all that were looked at (Bonferroni), the largest
    first."""
    from scipy import stats

    other_N = side_N == 1
    level = SURE / max(1, len(named.measures) + len(named.words))
    found = []
    for name, values_N in named.measures.items():
        one, other = values_N[first][~other_N], values_N[first][other_N]
        statistic, p = stats.mannwhitneyu(other, one)
        auc = float(statistic) / (len(one) * len(other))
        if p < level:
            found.append(Difference(name, float(np.median(one)), float(np.median(other)), max(auc, 1 - auc), False))
    words_NF = named.words_NF[first]
    train_F, other_F = (np.asarray(words_NF[mask].mean(axis=0)).ravel() for mask in (~other_N, other_N))
    together_F = np.asarray(words_NF.mean(axis=0)).ravel()
    error_F = np.sqrt(np.clip(together_F * (1 - together_F), 0, None) * (1 / other_N.sum() + 1 / (~other_N).sum()))
    z_F = np.divide(other_F - train_F, error_F, out=np.zeros_like(error_F), where=error_F > 0)
    for at in np.flatnonzero(2 * stats.norm.sf(np.abs(z_F)) < level).tolist():
        train, other = float(train_F[at]), float(other_F[at])
        found.append(Difference(f"`{named.words[at]}`", train, other, 0.5 + abs(other - train) / 2, True))
    return tuple(sorted(found, key=lambda each: -each.auc)[:SHOWN])
