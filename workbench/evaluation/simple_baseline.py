"""What a simple classifier without a backbone tells of rows' classes: the least that a fine-tuned model has to beat.

Legend: T training rows, M other rows.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from workbench.data.images.picture_reader import PictureRows
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.records import RowReader

MOST = 4000  # training rows that it is fitted to; more take minutes
SIDE, COLOURS = 64, 8  # pixels of a side from which gradients are counted; bins of each colour channel
TEXTS, PICTURES = "TF-IDF of words and letters", "gradient and colour histograms"


class Baseline(NamedTuple):
    """Predictions of logistic regression on features that are counted rather than learnt."""

    features: str
    rows: int
    """Training rows that it was fitted to."""
    predicted_M: NDArray[np.str_]


def fit(train: LabelledSet, others: LabelledSet, reader: RowReader, *, seed: int) -> Baseline:
    """Classes of other rows by logistic regression that is fitted to at most `MOST` training rows of two classes or
    more; takes seconds. Texts: TF-IDF of words, pairs of words and parts of words; pictures: histograms of oriented
    gradients (Dalal and Triggs, 2005) and of colours."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train = train.subset(np.sort(np.random.default_rng(seed).permutation(len(train))[:MOST]))
    seen: Any
    asked: Any
    if isinstance(train.inputs, PictureRows):
        features, (seen, asked) = (
            PICTURES,
            (np.stack([*map(picture_counts, each.inputs.arrays())]) for each in (train, others)),
        )
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=100))
    else:
        features, (seen, asked) = TEXTS, ([*map(reader.describe, each.records)] for each in (train, others))
        model = make_pipeline(text_features(), LogisticRegression(C=10, max_iter=100))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a rough fit is enough
        model.fit(seen, np.asarray([str(label) for label in train.labels]))
    return Baseline(features, len(train), model.predict(asked))


def text_features() -> Any:
    """What makes TF-IDF of words, pairs of words and parts of words of texts; to be fitted."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\S+")
    return make_union(
        words, TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True, max_features=20_000)
    )


def picture_counts(picture_HW3: npt.NDArray[np.uint8]) -> NDArray[np.float32]:
    """Histograms of oriented gradients, and the square roots of those of each colour in each quarter of a picture."""
    square = np.asarray(cv2.resize(picture_HW3, (SIDE, SIDE), interpolation=cv2.INTER_AREA))
    gradients = cv2.HOGDescriptor((SIDE, SIDE), (16, 16), (8, 8), (8, 8), 9).compute(square)
    half = SIDE // 2
    quarters = square.reshape(2, half, 2, half, 3).transpose(0, 2, 4, 1, 3).reshape(12, -1)
    colours = [np.histogram(each, COLOURS, (0, 256))[0] for each in quarters]
    return np.concatenate([np.ravel(gradients), np.sqrt(np.concatenate(colours) / half**2)]).astype(np.float32)
