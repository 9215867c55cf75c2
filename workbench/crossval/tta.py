"""Test-time augmentation: outputs of several views of a row are merged, where out-of-fold rows show that it helps.

Legend: V views, the plain row first; N rows, n of them, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

from workbench.config.sections.classes_config import Kind
from workbench.config.sections.tta_config import TtaConfig
from workbench.crossval import ensembles, gains
from workbench.crossval.ensembles import Mask
from workbench.crossval.gains import Gain
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.rows import excerpt
from workbench.data.tta_views import UserMerge
from workbench.errors import ConfigError
from workbench.evaluation import classification_scores
from workbench.evaluation.classification_scores import OneHot

Merge: TypeAlias = Literal["mean", "geometric", "max", "vote", "user"]

SUM_TOLERANCE = 1e-4
"""How far from 1 the probabilities that a user's function returns may sum: rounding of float32 is less."""


class _Fitted(NamedTuple):
    """Parameters of a merge that were fitted to out-of-fold rows."""

    threshold: float | None
    temperature: float = 1.0


@dataclass(frozen=True)
class TtaDecision:
    """Whether views are merged, and how; numbers are those of out-of-fold rows."""

    kind: Kind
    names: tuple[str, ...]
    """Names of all views; `plain` first."""
    merge: Merge
    threshold: float | None
    """Rows whose normalised entropy is above it are read in all views; None: all rows."""
    temperature: float
    """Divisor of the merged outputs: a mean of views claims less confidence than it deserves."""
    spent: float
    """Share of rows that are read in all views."""
    losses: tuple[float, ...]
    """Loss of each view by itself, nats a row (for numbers, of their variance)."""
    gain: Gain
    """Gain of the merged views over the plain rows, with a temperature where merged ones have one; what is fitted is
    fitted on other folds."""

    @property
    def accepted(self) -> bool:
        """Whether the views are used."""
        return self.gain.accepted

    @property
    def passes(self) -> float:
        """Forward passes of a row, on average; 1 without views."""
        return 1 + self.spent * (len(self.names) - 1)

    @property
    def reason(self) -> str:
        """For a person."""
        rows = "all rows" if self.threshold is None else f"the {self.spent:.0%} most uncertain rows"

        def each(values: Sequence[float], form: str) -> str:
            return ", ".join(f"{name} {value:{form}}" for name, value in zip(self.names, values, strict=True))

        return (
            f"{len(self.names) - 1} views of {rows}, merge {self.merge}, {self.passes:.2f} forward passes a row. "
            f"{self.gain.sentence} Loss of each view alone: {each(self.losses, '.4f')}."
        )

    @property
    def facts(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> TtaDecision:
        """The decision of such facts."""
        tuples = {name: facts[name] and tuple(facts[name]) for name in ("names", "losses")}
        return cls(**facts | tuples | {"gain": Gain(**facts["gain"])})


def fit(
    config: TtaConfig,
    labels: Labels,
    values_VNC: Floats,
    targets_NC: OneHot,
    fold_N: NDArray[Any],
    *,
    names: Sequence[str],
    calibrate: bool = False,
    groups_N: NDArray[Any] | None = None,
    user_merge: UserMerge | None = None,
    sure: float = gains.SURE,
) -> tuple[TtaDecision, Floats]:
    """Decide on out-of-fold rows whether and how views are merged.

    The entropy that parts rows, and the temperature, are judged as fitted on other folds; what stays is
    fitted on all.

    Returns:
        The decision, and the merged values (N, C) that it was judged by, whether they were accepted or not.

    Args:
        values_VNC: As Labels.values gives, of models that did not train on the row; the plain row first.
        targets_NC: What Labels.targets gives.
        fold_N: The fold of each row.
        names: Of the views without the plain row.
        calibrate: Fit a temperature of merged rows; it is judged beside plain rows that get one of their own too.
        groups_N: Rows of one group, such as a cluster of duplicates, are one witness.
        user_merge: For merge `user`.
        sure: Confidence that the gain has to have.

    Raises:
        ConfigError: The user's function returns no values.
    """
    assert len(names) + 1 == len(values_VNC)
    fitter = _Fitter(config.uncertain, labels, targets_NC, calibrate, user_merge)
    # The plain rows get all that merged rows get but the views, which would else be credited with a better calibration.
    before_NC = fitter.judged("mean", values_VNC[:1], fold_N) if calibrate else values_VNC[0]
    after_NC = fitter.judged(config.merge, values_VNC, fold_N)
    final = fitter.fitted(config.merge, values_VNC, np.ones(len(fold_N), dtype=bool))
    decision = TtaDecision(
        kind=labels.kind,
        names=("plain", *names),
        merge=config.merge,
        threshold=final.threshold,
        temperature=final.temperature,
        spent=float(_uncertain(final.threshold, labels.kind, values_VNC[0]).mean()),
        losses=tuple(float(gains.row_losses(labels, each, targets_NC).mean()) for each in values_VNC),
        gain=gains.gain(labels, before_NC, after_NC, targets_NC, least=config.least_gain, sure=sure, groups_N=groups_N),
    )
    return decision, after_NC


@dataclass(frozen=True)
class _Fitter:
    """Fits what out-of-fold rows decide, on some of them."""

    uncertain: float | None
    """Share of rows that are read in all views; None: all of them."""
    labels: Labels
    targets_NC: OneHot
    calibrate: bool
    user_merge: UserMerge | None

    def fitted(self, how: Merge, values_VNC: Floats, rows_N: Mask) -> _Fitted:
        """Parameters fitted to the rows of the mask."""
        plain_NC = values_VNC[0]
        threshold = None
        if self.uncertain is not None:
            # The entropy above which lies that share of the rows, or less where rows are alike.
            falling_n = np.sort(entropy(self.labels.kind, plain_NC[rows_N]))[::-1]
            threshold = float(falling_n[min(round(self.uncertain * len(falling_n)), len(falling_n) - 1)])
        parameters = _Fitted(threshold)
        spent_N = rows_N & _uncertain(threshold, self.labels.kind, plain_NC)
        if not (self.calibrate and spent_N.any()):
            return parameters
        merged_nC = _merged(how, parameters, self.labels, values_VNC[:, spent_N], self.user_merge)
        outputs_nC = classification_scores.outputs_of_values(self.labels, merged_nC)
        heat = ensembles.temperature(self.labels, outputs_nC, self.targets_NC[spent_N])
        return parameters._replace(temperature=heat)

    def judged(self, how: Merge, values_VNC: Floats, fold_N: NDArray[Any]) -> Floats:
        """Values (N, C) of each fold, merged as all other folds decide."""
        return ensembles.cross_fitted(
            fold_N,
            partial(self.fitted, how, values_VNC),
            lambda fitted, rows_N: _merged(how, fitted, self.labels, values_VNC[:, rows_N], self.user_merge),
        )


def try_merge(labels: Labels, views: int, user_merge: UserMerge) -> None:
    """Try a user's function on made-up values of so many views, before anything is trained.

    Raises:
        ConfigError: It returns no values, or other ones of a row when other rows stand beside it.
    """
    outputs_VNC = np.random.default_rng(0).normal(size=(views, 8, len(labels.names)))
    values_VNC = np.stack([labels.values(outputs_NC) for outputs_NC in outputs_VNC])
    merged_NC = _checked(labels.kind, user_merge(values_VNC), values_VNC.shape)
    if not np.allclose(user_merge(values_VNC[:, :3]), merged_NC[:3]):
        raise ConfigError(
            "tta.function: merge() gives a row other values when it is called with fewer rows, so that predictions "
            "would depend on what else is predicted. Merge each row by itself, over axis 0, the views."
        )


def needs_views(decision: TtaDecision, values_NC: Floats) -> Mask:
    """Which rows (N,) are to be read in all views, by the outputs of the plain ones."""
    if not decision.accepted:
        return np.zeros(len(values_NC), dtype=bool)
    return _uncertain(decision.threshold, decision.kind, values_NC)


def apply(decision: TtaDecision, labels: Labels, values_VNC: Floats, user_merge: UserMerge | None = None) -> Floats:
    """Values (N, C) of rows: merged where `needs_views` says so, of the plain row elsewhere.

    Args:
        values_VNC: The plain row first, calibrated as it was in `fit`. What stands in other views does not matter where
            a row needs none.

    Raises:
        ConfigError: The user's function returns no values.
    """
    assert len(values_VNC) == len(decision.names)
    if not decision.accepted:
        plain_NC: Floats = values_VNC[0]
        return plain_NC
    parameters = _Fitted(decision.threshold, decision.temperature)
    return _merged(decision.merge, parameters, labels, values_VNC, user_merge)


def entropy(kind: Kind, p_NC: Floats) -> Floats:
    """How uncertain each row is (N,): 0 is sure, 1 has all classes alike; the mean over classes where several hold."""
    if kind == "several":
        found_N: Floats = (special.entr(p_NC) + special.entr(1 - p_NC)).mean(1) / np.log(2)
    else:
        found_N = special.entr(p_NC).sum(1) / np.log(p_NC.shape[1])
    return found_N


def _uncertain(threshold: float | None, kind: Kind, plain_NC: Floats) -> Mask:
    if threshold is None:
        return np.ones(len(plain_NC), dtype=bool)
    uncertain_N: Mask = entropy(kind, plain_NC) > threshold
    return uncertain_N


def _merged(how: Merge, fitted: _Fitted, labels: Labels, values_VNC: Floats, user_merge: UserMerge | None) -> Floats:
    """Values (N, C): the plain row's, but where views are spent."""
    merged_NC: Floats = values_VNC[0].copy()
    rows_N = _uncertain(fitted.threshold, labels.kind, merged_NC)
    if not rows_N.any():
        return merged_NC
    views_VnC = values_VNC[:, rows_N]
    if how == "user":
        assert user_merge is not None
        one_nC = _checked(labels.kind, user_merge(views_VnC), views_VnC.shape)
    elif how == "vote":
        one_nC = vote(labels.kind, views_VnC)
    else:
        one_nC = ensembles.merge(labels.kind, views_VnC, how)
    merged_NC[rows_N] = labels.values(classification_scores.outputs_of_values(labels, one_nC) / fitted.temperature)
    return merged_NC


def _checked(kind: Kind, merged_nC: Floats, given: tuple[int, ...]) -> Floats:
    """The values that a user's function returned; raises ConfigError where they do not fit the rows it was given."""
    if merged_nC.shape != given[1:]:
        raise ConfigError(
            f"tta.function: merge() returned shape {merged_nC.shape} for p of shape (V, N, C) = {given}. "
            f"Return (N, C) = {given[1:]}."
        )
    sum_n = merged_nC.sum(1)
    mistakes = [(~np.isfinite(merged_nC).all(1), "Return finite numbers")]
    if kind != "number":
        mistakes.append(((merged_nC < 0).any(1), "Return probabilities, which are never negative"))
    if kind == "several":
        mistakes.append(((merged_nC > 1).any(1), "Return probabilities between 0 and 1"))
    if kind in ("one", "pair"):
        mistakes.append((np.abs(sum_n - 1) > SUM_TOLERANCE, "Divide by p.sum(axis=1, keepdims=True)"))
    for wrong_n, cure in mistakes:
        if wrong_n.any():
            row = int(wrong_n.argmax())
            raise ConfigError(
                f"tta.function: merge() returned {excerpt(merged_nC[row].tolist())} for row {row} (they count from 0), "
                f"with sum {sum_n[row]:.6g}. {cure}."
            )
    return merged_nC


def vote(kind: Kind, values_VNC: Floats) -> Floats:
    """Shares of votes (N, C): each prediction votes for its class, and their mean has one vote, which it divides.

    The class with most votes is the likeliest one; the vote of the mean breaks ties, and leaves no probability at 0,
    whose loss would be infinite.

    Args:
        kind: Kind of the labels, not numbers. Where several classes hold, there is a vote on each of them.
        values_VNC: Probabilities.
    """
    if kind == "several":
        # Half a vote for each side where a probability is exactly one half.
        votes_VNC = (np.sign(values_VNC - 0.5) + 1) / 2
    else:
        votes_VNC = (values_VNC == values_VNC.max(2, keepdims=True)).astype(np.float64)
        votes_VNC /= votes_VNC.sum(2, keepdims=True)
    shares_NC: Floats = (votes_VNC.sum(0) + values_VNC.mean(0)) / (len(values_VNC) + 1)
    return shares_NC
