"""One prediction out of those of several cross-validations: the best one, means, and logistic regression.

Everything is fitted to out-of-fold rows, and judged on folds that it was not fitted to.

Legend: P parts, N rows, X rows of any kind, C outputs (classes, or 1 for a number), F inputs of a regression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from workbench.crossval import ensembles
from workbench.data.labelled.labels import Floats, Labels
from workbench.evaluation import classification_scores
from workbench.evaluation.classification_scores import OneHot

How: TypeAlias = Literal["best", "mean", "greedy", "convex", "stacking"]
HOWS: tuple[How, ...] = get_args(How)
STEPS = (0.2, 0.1, 0.05, 0.02)
"""Of weights, in the search for those of a metric that is not smooth."""
LEAST = 1e-4
"""Probability that a regression reads in place of lower ones."""


@dataclass(frozen=True)
class Blend:
    """How values of the parts become one prediction."""

    how: How
    weights_P: Floats
    """Of the mean, of sum 1; a part without a weight need not be asked. Equal for a regression, which reads all."""
    coef_CF: Floats | None = None
    intercept_C: Floats | None = None
    temperature: float = 1.0
    """By which logits of the mean are divided."""

    def values(self, labels: Labels, values_PXC: Floats) -> Floats:
        """One prediction (X, C) of the parts' values; those of a part without a weight are not looked at."""
        if self.coef_CF is None:
            return ensembles.tempered(
                labels, ensembles.merge(labels.kind, values_PXC, "mean", weights_M=self.weights_P), self.temperature
            )
        assert self.intercept_C is not None
        inputs_XF, coef_CF = _inputs(labels, values_PXC), self.coef_CF
        if labels.kind == "several":  # each class reads what the parts say of it alone
            outputs_XC = np.einsum("pxc,cp->xc", inputs_XF, coef_CF) + self.intercept_C
        else:
            outputs_XC = inputs_XF @ coef_CF.T + self.intercept_C
        return outputs_XC if labels.kind == "number" else labels.values(outputs_XC)

    @property
    def facts(self) -> dict[str, Any]:
        """For a JSON file."""
        return {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in vars(self).items()}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Blend:
        """The same again."""
        fields: dict[str, Any] = {name: np.asarray(e) if isinstance(e, list) else e for name, e in facts.items()}
        return cls(**fields)


def fit(how: How, labels: Labels, values_PNC: Floats, targets_NC: OneHot) -> Blend:
    """The blend of these rows: `best` and all means have the lowest `ensembles.cost` that they find."""
    parts = len(values_PNC)
    even_P = np.full(parts, 1 / parts)
    if how == "mean":
        return Blend(how, even_P)
    if how == "best":
        costs = [ensembles.cost(labels, values_NC, targets_NC) for values_NC in values_PNC]
        return Blend(how, np.eye(parts)[int(np.argmin(costs))])
    if how == "greedy":
        return Blend(how, ensembles.greedy(labels, values_PNC, targets_NC))
    if how == "convex":
        return Blend(how, _convex(labels, values_PNC, targets_NC))
    return Blend(how, even_P, *_regression(labels, values_PNC, targets_NC))


def out_of_fold(how: How, labels: Labels, values_PNC: Floats, targets_NC: OneHot, fold_N: NDArray[Any]) -> Floats:
    """Values (N, C) of the rows, each fold's by what was fitted to the others."""
    return ensembles.cross_fitted(
        fold_N,
        lambda mask_N: fit(how, labels, values_PNC[:, mask_N], targets_NC[mask_N]),
        lambda fitted, mask_N: fitted.values(labels, values_PNC[:, mask_N]),
    )


def _convex(labels: Labels, values_PNC: Floats, targets_NC: OneHot) -> Floats:
    """Weights (P,) of least cost. The loss of a mean is convex in its weights, so that sequential quadratic programming
    finds the least; where a metric decides, weights are moved from part to part for as long as it becomes better."""
    parts, smooth = len(values_PNC), Labels(labels.kind, labels.names, labels.mean, labels.scale)
    values_PNO, targets_NO = ensembles.binary(smooth, values_PNC, targets_NC)

    def loss(weights_P: Floats) -> float:
        return ensembles.cost(smooth, np.einsum("p,pno->no", weights_P, values_PNO), targets_NO)

    found = optimize.minimize(
        loss,
        np.full(parts, 1 / parts),
        method="SLSQP",
        bounds=[(0, 1)] * parts,
        constraints={"type": "eq", "fun": lambda weights_P: weights_P.sum() - 1},
    )
    weights_P = np.clip(found.x, 0, None)
    weights_P = np.where(weights_P < 1e-3, 0, weights_P) / weights_P[weights_P >= 1e-3].sum()
    if labels.metric is None:
        return np.asarray(weights_P)

    def cost(weights_P: Floats) -> float:
        return ensembles.cost(labels, np.einsum("p,pnc->nc", weights_P, values_PNC), targets_NC)

    least = cost(weights_P)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for giver, taker in permutations(range(parts), 2):
                moved_P = weights_P.copy()
                moved_P[[giver, taker]] += np.array([-1, 1]) * min(step, moved_P[giver])
                if (tried := cost(moved_P)) < least:
                    weights_P, least, improved = moved_P, tried, True
    return np.asarray(weights_P)


def _inputs(labels: Labels, values_PXC: Floats) -> Floats:
    """What a regression reads: logits (P, X, C) of several classes; log-probabilities or numbers (X, F) of others."""
    if labels.kind == "several":
        return classification_scores.logits("several", np.clip(values_PXC, LEAST, 1 - LEAST))
    told_PXC = values_PXC if labels.kind == "number" else np.log(np.maximum(values_PXC, LEAST))
    return np.concatenate(list(told_PXC), axis=1)


def _regression(labels: Labels, values_PNC: Floats, targets_NC: OneHot) -> tuple[Floats, Floats]:
    """Coefficients (C, F) and intercepts (C,) of logistic regression, of least squares for numbers.

    Blind rows join the others, one of each class that all parts call equally likely, together as heavy as
    `ensembles.BLIND` rows: without them a class that no row has would be impossible.
    """
    from sklearn.linear_model import LinearRegression, LogisticRegression  # 0.5 s

    inputs, classes = _inputs(labels, values_PNC), targets_NC.shape[1]
    if labels.kind == "number":
        line = LinearRegression().fit(inputs, labels.true(targets_NC)[:, 0])
        return line.coef_[None], np.asarray([line.intercept_])
    if labels.kind == "several":
        blind_2P, weight_N = np.zeros((2, len(inputs))), np.append(np.ones(len(targets_NC)), [1.0, 1.0])
        models = [
            LogisticRegression(max_iter=1000).fit(
                np.concatenate([inputs[:, :, c].T, blind_2P]),
                np.append(targets_NC[:, c] > 0.5, [False, True]),
                weight_N,
            )
            for c in range(classes)
        ]
        return np.stack([each.coef_[0] for each in models]), np.asarray([each.intercept_[0] for each in models])
    blind_CF = np.full((classes, inputs.shape[1]), -np.log(classes))
    weight_N = np.append(np.ones(len(inputs)), np.full(classes, ensembles.BLIND / classes))
    model = LogisticRegression(max_iter=1000).fit(
        np.concatenate([inputs, blind_CF]), np.append(targets_NC.argmax(1), np.arange(classes)), weight_N
    )
    if classes == 2:  # one line of coefficients, for the second class
        return np.concatenate([np.zeros_like(model.coef_), model.coef_]), np.append(0.0, model.intercept_)
    return model.coef_, model.intercept_
