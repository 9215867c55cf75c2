"""Correction by similarity: predictions are drawn to what is said of the nearest rows, where out-of-fold rows gain.

    p'_i = (1 - a) p_i + a sum_j w_ij z_j,    w_ij = softmax_j(s_ij / t) over the k nearest rows j that i may ask

s is the cosine similarity of features of the frozen backbone, or of the run that `correction.embedder` names; z are
predictions or labels. This is one step of label propagation, F <- (1 - a) Y + a S F of Zhou et al. 2004, "Learning with
local and global consistency", as smoothing is in "Correct and Smooth" of Huang et al. 2021, arXiv:2010.13993, with S
normalised by rows: a number stays in its range and probabilities sum to 1. With labels it is the interpolation of
Khandelwal et al. 2020, arXiv:1911.00172, equation 3. One step, so that a new row needs the labelled rows alone: its
answer does not depend on what else is asked.

Which rows may be asked is what keeps the fit honest. Row i is predicted by the adapters of its fold, which did not
train on it. The prediction of a row of another fold comes from adapters that did, so that the label of i would leak
through it: `predictions` are asked of the rows of i's own fold, which the same adapters predict and none of which
taught them. `labels` are asked of the rows of all other folds, which did teach them: the own fold stands for new rows,
of which no label is known. A new row finds the same in every fold, rows and adapters that know nothing of it, and what
it hears is the mean over folds, each as it was fitted.

Nor does a row ask its near-duplicates: a new row has none among the labelled rows, as those of test rows leave
training, and would be corrected by what only copies gain. Copies among the test rows have a stage of their own,
ensemble.consensus.

Any mean shrinks predictions, and shrunk ones may have a lower loss whoever was asked. So the correction is held
against predictions that are drawn to the mean of all rows of their fold, by a strength that is fitted in the same way.

Legend: N labelled rows, T other rows, X rows of any kind, P rows that are asked, K neighbours of a row, the nearest
first, D features, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors
from safetensors import safe_open
from scipy import optimize, special

from workbench.config.sections.correction_config import Ask, CorrectionConfig
from workbench.crossval import ensembles, gains
from workbench.crossval.ensembles import Mask
from workbench.crossval.fold_adapters import FoldContext
from workbench.crossval.gains import Gain
from workbench.data.folds.stratified_folds import FoldAssignment
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.errors import ConfigError, FileError
from workbench.evaluation import run_embedder
from workbench.evaluation.classification_scores import OneHot
from workbench.evaluation.frozen_features import cached_features
from workbench.runs import files
from workbench.runs.run_directory import Run

Features: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]

TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Candidates: at 0.01 hardly more than the nearest row counts, at 1 all neighbours count alike."""

ROWS_AT_ONCE = 256
"""Rows that are compared with all that are asked, for the memory of their similarities."""

FILE = "neighbours.safetensors"
"""The rows that predictions are corrected by, in a run directory."""
_FEATURES = "members/features.safetensors"


class Neighbours(NamedTuple):
    """The nearest rows of each row."""

    row_NK: Ints
    """Their numbers among the rows that are asked."""
    similarity_NK: Floats

    def of(self, rows_N: Mask) -> Neighbours:
        """Those of the rows of a mask."""
        return Neighbours(self.row_NK[rows_N], self.similarity_NK[rows_N])


class AnsweringRows(NamedTuple):
    """The rows that each labelled row may ask, and the answers."""

    nearest: Neighbours
    answers_NC: Floats
    """Predictions or labels of all labelled rows, as Labels.values gives them."""


@dataclass(frozen=True)
class Correction:
    """How predictions are moved towards the predictions or labels of their neighbours."""

    ask: Ask
    neighbours: int
    """Nearest rows that are asked; of those found, no more."""
    strength: float
    """Weight of the neighbours in a prediction; 0 leaves it as it is, to the last bit."""
    temperature: float

    @property
    def facts(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """For a person."""
        settings = f"{self.neighbours}, strength {self.strength:.2f}, temperature {self.temperature:g}"
        return f"Neighbours asked for their {self.ask}: {settings}."

    def consensus(self, neighbours: Neighbours, answers_PC: Floats) -> Floats:
        """Weighted means (N, C) of what neighbours say."""
        nearest = slice(self.neighbours)
        weight_NK = special.softmax(neighbours.similarity_NK[:, nearest] / self.temperature, axis=1)
        consensus_NC: Floats = np.zeros((len(weight_NK), answers_PC.shape[1]))
        for weight_N, row_N in zip(weight_NK.T, neighbours.row_NK[:, nearest].T, strict=True):
            consensus_NC += weight_N[:, None] * answers_PC[row_N]
        return consensus_NC

    def apply(self, values_NC: Floats, consensus_NC: Floats) -> Floats:
        """Corrected values (N, C)."""
        return _drawn(self.strength, values_NC, consensus_NC)


def nearest(rows_ND: Features, asked_PD: Features, count: int, clusters: tuple[Ints, Ints] | None = None) -> Neighbours:
    """The nearest of the rows that are asked, for each of some rows.

    Args:
        count: At most as many as there are rows to ask.
        clusters: Clusters of near-duplicates of the rows (N,) and of those that are asked (P,): no row asks its own.
    """
    tiny = np.finfo(np.float32).tiny  # a row of zeros stays
    rows_ND, asked_PD = (
        each_XD / np.maximum(np.linalg.norm(each_XD, axis=1, keepdims=True), tiny) for each_XD in (rows_ND, asked_PD)
    )
    row_NK = np.empty((len(rows_ND), count), dtype=np.int64)
    similarity_NK = np.empty((len(rows_ND), count))
    for start in range(0, len(rows_ND), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        similarity_nP = rows_ND[some] @ asked_PD.T
        if clusters is not None:
            similarity_nP[clusters[0][some, None] == clusters[1]] = -np.inf
        found_nK = np.argpartition(-similarity_nP, count - 1, axis=1)[:, :count]
        similarity_nK = np.take_along_axis(similarity_nP, found_nK, axis=1)
        order_nK = np.argsort(-similarity_nK, axis=1, kind="stable")
        row_NK[some] = np.take_along_axis(found_nK, order_nK, axis=1)
        similarity_NK[some] = np.take_along_axis(similarity_nK, order_nK, axis=1)
    return Neighbours(row_NK, similarity_NK)


def across_folds(ask: Ask, features_ND: Features, fold_N: Ints, cluster_N: Ints, count: int) -> Neighbours:
    """The nearest rows that each row may ask, numbered among all rows; none of its cluster of near-duplicates."""
    row_NK = np.empty((len(fold_N), count), dtype=np.int64)
    similarity_NK = np.empty((len(fold_N), count))
    for own, asked in _folds(ask, fold_N):
        found = nearest(features_ND[own], features_ND[asked], count, (cluster_N[own], cluster_N[asked]))
        row_NK[own], similarity_NK[own] = asked[found.row_NK], found.similarity_NK
    return Neighbours(row_NK, similarity_NK)


def answers(labels: Labels, values_NC: Floats, targets_NC: OneHot) -> dict[Ask, Floats]:
    """Answers of labelled rows (N, C), in the unit of `Labels.values`."""
    true_NC = targets_NC.astype(np.float64)
    return {"predictions": values_NC, "labels": labels.values(true_NC) if labels.kind == "number" else true_NC}


def fit(
    config: CorrectionConfig,
    labels: Labels,
    values_NC: Floats,
    targets_NC: OneHot,
    asked: Mapping[Ask, AnsweringRows],
    part_N: NDArray[Any],
) -> tuple[Correction, Floats]:
    """The correction with the lowest out-of-fold loss, of all that the configuration leaves open.

    Returns:
        What all rows fitted, and corrected values (N, C) of each part's rows by what the rows of other parts fitted.

    Args:
        values_NC: As Labels.values gives, by adapters that did not train on the row.
        targets_NC: What Labels.targets gives.
        asked: By `across_folds` and `answers`, with as many neighbours as the largest number to choose from.
        part_N: Rows of one part are judged by what was fitted on the others.
    """
    temperatures = TEMPERATURES if config.temperature is None else (config.temperature,)

    def fitted(rows_N: Mask) -> Correction:
        """Fitted to the labels of the rows of a mask; labels that are asked for are those of other rows."""
        plain_nC, targets_nC = values_NC[rows_N], targets_NC[rows_N]
        found = []
        for ask, neighbours, temperature in product(config.asked, config.candidates, temperatures):
            whole = Correction(ask, neighbours, 1.0, temperature)
            consensus_nC = whole.consensus(asked[ask].nearest.of(rows_N), asked[ask].answers_NC)
            strength = config.strength
            if strength is None:
                strength = _strength(labels, plain_nC, consensus_nC, targets_nC)
            candidate = replace(whole, strength=strength)
            found.append((_loss(labels, candidate.apply(plain_nC, consensus_nC), targets_nC), candidate))
        return min(found, key=itemgetter(0))[1]

    def apply(correction: Correction, rows_N: Mask) -> Floats:
        each = asked[correction.ask]
        return correction.apply(values_NC[rows_N], correction.consensus(each.nearest.of(rows_N), each.answers_NC))

    judged_NC = ensembles.cross_fitted(part_N, fitted, apply)
    return fitted(np.ones(len(part_N), dtype=bool)), judged_NC


def gain(
    config: CorrectionConfig,
    labels: Labels,
    values_NC: Floats,
    corrected_NC: Floats,
    targets_NC: OneHot,
    fold_N: NDArray[Any],
    part_N: NDArray[Any],
    *,
    groups_N: NDArray[Any] | None = None,
    sure: float = gains.SURE,
) -> Gain:
    """Gain of corrected values over plain ones, or over those drawn to the mean of their fold where these are better.

    Args:
        values_NC: As in `fit`.
        corrected_NC: As `fit` returns them.
        groups_N: Rows of one group, such as a cluster of duplicates, are one witness.
        sure: Confidence that the gain has to have.
    """
    mean_NC = np.empty_like(values_NC)
    for own, _ in _folds("predictions", fold_N):
        mean_NC[own] = values_NC[own].mean(0)
    shrunk_NC = ensembles.cross_fitted(
        part_N,
        lambda rows_N: _strength(labels, values_NC[rows_N], mean_NC[rows_N], targets_NC[rows_N]),
        lambda strength, rows_N: _drawn(strength, values_NC[rows_N], mean_NC[rows_N]),
    )
    before_NC = min(values_NC, shrunk_NC, key=lambda each_NC: _loss(labels, each_NC, targets_NC))
    return gains.gain(
        labels, before_NC, corrected_NC, targets_NC, least=config.least_gain, sure=sure, groups_N=groups_N
    )


def corrected(
    correction: Correction, values_TC: Floats, rows_TD: Features, asked_ND: Features, answers_NC: Floats, fold_N: Ints
) -> Floats:
    """Corrected values (T, C) of rows that no adapter trained on.

    Args:
        values_TC: By all adapters together.
        rows_TD: Features of the rows, and `asked_ND` those of the labelled rows, by the same model.
        answers_NC: What the labelled rows, of the folds `fold_N`, answer.
    """
    if not correction.strength or not len(values_TC):
        return values_TC
    consensus = []
    for _, asked in _folds(correction.ask, fold_N):
        found = nearest(rows_TD, asked_ND[asked], correction.neighbours)
        consensus.append(correction.consensus(found, answers_NC[asked]))
    return correction.apply(values_TC, np.mean(consensus, axis=0))


def changed(labels: Labels, before_NC: Floats, after_NC: Floats) -> float | None:
    """Share of rows whose predicted class, or any of several, changed; None for numbers."""
    if labels.kind == "number":
        return None
    pairs = zip(labels.predicted(before_NC), labels.predicted(after_NC), strict=True)
    return float(np.mean([before != after for before, after in pairs]))


def fitting(config: CorrectionConfig, folds: FoldAssignment, cluster_N: Ints) -> tuple[CorrectionConfig, list[str]]:
    """The section with those numbers of neighbours that every row has to ask, and a sentence on those left out.

    Raises:
        ConfigError: None of the numbers is as small.
    """
    if not config.is_on:
        return config, []
    _, cluster_N = np.unique(cluster_N, return_inverse=True)
    fold_N, least = folds.fold_RN[0], list[tuple[int, Ask, str]]()
    for ask in config.asked:
        for own, asked in _folds(ask, fold_N):
            same_N = np.bincount(cluster_N[asked], minlength=len(cluster_N))
            least.append((len(asked) - int(same_N[cluster_N[own]].max()), ask, folds.names[fold_N[own[0]]]))
    fewest, ask, fold = min(least, key=itemgetter(0))
    whose = "of its own fold" if ask == "predictions" else "of other folds"
    fit = tuple(count for count in config.candidates if count <= fewest)
    if not fit:
        cure = f"Write correction.neighbours={fewest} or less" if fewest else "Leave correction out"
        raise ConfigError(
            f"correction.neighbours: a row asks {config.candidates[0]} rows {whose} for their {ask}, and "
            f"a row of fold {fold} has {fewest} beside its near-duplicates. {cure}, or give more rows."
        )
    if fit == config.candidates:
        return config, []
    left, tried = (", ".join(map(str, counts)) for counts in (config.candidates[len(fit) :], fit))
    note = (
        f"correction.neighbours: {left} left out, and {tried} tried: a row of fold {fold} has {fewest} "
        f"rows {whose} to ask for their {ask}."
    )
    return config.model_copy(update={"neighbours": fit}), [note]


def _drawn(strength: float, values_NC: Floats, consensus_NC: Floats) -> Floats:
    return (1 - strength) * values_NC + strength * consensus_NC if strength else values_NC


def _folds(ask: Ask, fold_N: NDArray[Any]) -> Iterator[tuple[Ints, Ints]]:
    """Numbers of the rows of each fold, and of those that they may ask."""
    for fold in np.unique(fold_N):
        own_N = fold_N == fold
        yield np.flatnonzero(own_N), np.flatnonzero(own_N if ask == "predictions" else ~own_N)


def _strength(labels: Labels, plain_nC: Floats, consensus_nC: Floats, targets_nC: OneHot) -> float:
    """The strength with the lowest loss. The loss of each row is convex in it, so that there is one valley."""

    def loss(strength: float) -> float:
        return _loss(labels, _drawn(strength, plain_nC, consensus_nC), targets_nC)

    valley = optimize.minimize_scalar(loss, bounds=(0, 1), method="bounded", options={"xatol": 1e-4})
    return min(0.0, float(valley.x), key=loss)


def _loss(labels: Labels, values_nC: Floats, targets_nC: OneHot) -> float:
    return float(gains.row_losses(labels, values_nC, targets_nC).mean())


class NeighbourBank(NamedTuple):
    """The labelled rows of a cross-validation, as neighbours of other rows."""

    features_ND: Features
    fold_N: Ints
    answers: dict[Ask, Floats]
    """Predictions (N, C) by adapters that did not train on the row, not corrected, and labels."""
    embedder: str = ""
    """Digest of the embedder that features are of; empty: the frozen backbone's."""

    def neighbours(self, asks: Sequence[Ask], cluster_N: Ints, count: int) -> dict[Ask, AnsweringRows]:
        """The rows that each of them may ask, and the answers."""
        centred_ND = self._centred(self.features_ND)
        return {
            ask: AnsweringRows(across_folds(ask, centred_ND, self.fold_N, cluster_N, count), self.answers[ask])
            for ask in asks
        }

    def corrected(self, correction: Correction, values_TC: Floats, rows_TD: Features) -> Floats:
        """`corrected` values (T, C) of rows with features (T, D) by the same model."""
        known_ND, answers_NC = self._centred(self.features_ND), self.answers[correction.ask]
        return corrected(correction, values_TC, self._centred(rows_TD), known_ND, answers_NC, self.fold_N)

    def save(self, run: Path) -> None:
        """Write it into a run directory, for `read_bank`."""
        arrays: dict[str, NDArray[Any]] = {"features": self.features_ND, "fold": self.fold_N}
        arrays |= {ask: answers_NC for ask, answers_NC in self.answers.items()}
        files.write_bytes(run / FILE, safetensors.save(arrays, {"embedder": self.embedder} if self.embedder else None))

    def _centred(self, rows_XD: Features) -> Features:
        """Features less the mean of the labelled rows: what all rows have in common makes none of them similar."""
        centred_XD: Features = rows_XD - self.features_ND.mean(0)
        return centred_XD


def read_bank(run: Path) -> NeighbourBank:
    """The bank of the finished run at `run`."""
    arrays = safetensors.load_file(run / FILE)
    with safe_open(run / FILE, "numpy") as file:
        embedder = (file.metadata() or {}).get("embedder", "")
    answers: dict[Ask, Floats] = {"predictions": arrays["predictions"], "labels": arrays["labels"]}
    return NeighbourBank(arrays["features"], arrays["fold"], answers, embedder)


def bank_of_run(
    context: FoldContext, run: Run, data: FoldData, values_NC: Floats
) -> tuple[NeighbourBank, Features | None]:
    """The bank of a run that has not ended, and features (T, D) of its test rows where it has some.

    Args:
        values_NC: Of the labelled rows, by adapters that did not train on them.
    """
    if not run.ranks.agreed((run.home / _FEATURES).exists()):
        sets = {"train": data.rows} | ({} if data.test is None else {"test": data.test})
        set_features = dict(zip(sets, _features(context, list(sets.values())), strict=True))
        files.write_bytes(run.path / _FEATURES, safetensors.save(set_features))
        run.ranks.wait()
    set_features = safetensors.load_file(run.home / _FEATURES)
    fold_N = np.asarray(data.folds.fold_RN[0], dtype=np.int64)
    answers_NC = answers(data.labels, values_NC, data.rows.targets_NC)
    embedder = run_embedder.of(context.config, "correction")
    digest = "" if embedder is None else embedder.digest
    return NeighbourBank(set_features["train"], fold_N, answers_NC, digest), set_features.get("test")


def corrected_by_run(
    run: Path, context: FoldContext, rows: LabelledSet, values_TC: Floats, decided: dict[str, Any] | None
) -> Floats:
    """Values (T, C) of other rows as the finished run at `run` decided to correct them.

    Args:
        values_TC: Not corrected.
        decided: `Correction.facts`; None where the run does not correct.

    Raises:
        FileError: The embedder that `correction.embedder` names has changed since.
    """
    if decided is None:
        return values_TC
    bank, embedder = read_bank(run), run_embedder.of(context.config, "correction")
    if bank.embedder != ("" if embedder is None else embedder.digest):
        raise FileError(
            f"correction.embedder={context.config.correction.embedder}: {run} corrects predictions by its embeddings, "
            "and it is not what it was then. Put back what it was, or run the cross-validation again."
        )
    (rows_TD,) = _features(context, [rows])
    return bank.corrected(Correction(**decided), values_TC, rows_TD)


def _features(context: FoldContext, sets: Sequence[LabelledSet]) -> list[Features]:
    embedder = run_embedder.of(context.config, "correction")
    if embedder is None:
        return cached_features(context.config.model, context.reader, [rows.inputs for rows in sets])
    return [embedder.embed([context.reader.describe(record) for record in rows.records]) for rows in sets]
