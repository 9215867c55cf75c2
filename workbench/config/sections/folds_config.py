"""The sections `duplicates`, `folds` and `ensemble`.

workbench/data/folds/ and workbench/crossval/ensembles.py carry it out.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from workbench.schema import MayExecute, Section, Unit


class DuplicatesConfig(Section):
    """Rows that are alike: kept in one fold, thinned out or weighted."""

    on_duplicate: Literal["together", "keep_one", "weight", "ignore"] = "together"
    """Near-duplicates share a fold (`together`), share it and weigh 1/size each (`weight`), or all but one are left
    out (`keep_one`). `ignore` looks for none."""
    threshold: Annotated[float, Field(ge=0.4, le=1)] | Literal["auto"] = "auto"
    """Similarity from which two rows are near-duplicates: of texts the Jaccard similarity of their sets of shingles
    (`auto`: 0.7), of pictures that of their details and shapes at the best shift (`auto`: 0.95, which is a correlation
    of 0.9 of details and 0.997 of shapes; like products may need 1: pictures are equal once they are prepared)."""
    features: Annotated[float, Field(gt=0, le=1)] | None = None
    """Cosine similarity of the frozen backbone's features, less their mean, from which rows are near-duplicates too;
    null: features are not compared. Large backbones know the same object or meaning in another form (begin with 0.95);
    small ones know little more than `threshold` does, and take like rows for equal: look at what `check` counts."""
    embedder: str | None = Field(default=None, min_length=1)
    """Run directory of recipe embed whose embeddings of texts `features` compares, with the run's pooling and its
    instruction of queries; null: the frozen backbone's features. Sentence embeddings know texts of one meaning."""
    trust: MayExecute = False
    """Execute the Python code that the embedder's run directory names. Only of those whom you trust."""
    shingle: Literal["characters", "words"] = "characters"
    """Unit of a shingle, for texts alone. Characters distinguish short sentences more finely; words are faster on
    documents."""
    size: Annotated[PositiveInt | Literal["auto"], Unit("characters or words")] = "auto"
    """Characters or words in a shingle, for texts alone. `auto`: 4 characters, 3 words."""

    @model_validator(mode="after")
    def _looked_for(self) -> DuplicatesConfig:
        if self.features is not None and self.on_duplicate == "ignore":
            raise ValueError("on_duplicate=ignore looks for none, and features would. Leave one of the two out.")
        if self.embedder is not None and self.features is None:
            raise ValueError("embedder gives what features compares, and features is null. Write features: 0.9.")
        if self.trust and self.embedder is None:
            raise ValueError("trust is for the code of embedder, and none is named. Leave it out.")
        return self

    def cutoff(self, *, pictures: bool) -> float:
        """Similarity from which rows are near-duplicates."""
        return self.threshold if self.threshold != "auto" else 0.95 if pictures else 0.7

    @property
    def length(self) -> int:
        """Characters or words in a shingle."""
        return self.size if self.size != "auto" else 4 if self.shingle == "characters" else 3


STAGES = ("calibration", "drop_suspects", "pseudo_label", "tta", "correction", "consensus", "decision")


def _stage(name: str) -> str:
    if name not in STAGES and not re.fullmatch("pseudo_label [1-9]", name):
        raise ValueError(f"no stage is called `{name}`. Write {', '.join(STAGES)}, or a round such as pseudo_label 1.")
    return name


class FoldsConfig(Section):
    """Folds of a cross-validation, and how they train."""

    k: Annotated[int, Field(ge=2), Unit("folds")] = 5
    """Folds; each is validated by a model that trained on the others. Why: each adapter trains on four fifths of the
    rows; twice as many folds take twice as long."""
    repeats: Annotated[PositiveInt, Unit("splits")] = 1
    """Number of different splits of the rows into k folds."""
    seeds: Annotated[PositiveInt, Unit("adapters")] = 1
    """Adapters of each fold; they differ in how they begin and in the order of their rows."""
    together: bool = True
    """Train all adapters in one bank; false: one after another, for less memory, or where a bank refuses. Why: five
    folds in a bank take half of the time of five runs (scripts/bench/README.md)."""
    refit: bool | None = None
    """At the end, train one more adapter on all rows: the run's `adapter`, where only one can be served. null: where
    the folds' adapters cannot answer together, as those that write text. Why: nobody can score an adapter out of fold
    that has trained on all rows."""
    group: str | None = Field(default=None, min_length=1)
    """A column whose equal values never stand on both sides of a fold, such as a user's or a document's id."""
    column: str | None = Field(default=None, min_length=1)
    """A column with the fold of each row; no folds are made then, and as many train as it has values."""
    time: str | None = Field(default=None, min_length=1)
    """A column of numbers or dates: each fold validates rows that are later than all that it trains on. The rows are
    cut into k + 1 blocks in their order, the first of which only trains."""
    nested: Annotated[Annotated[int, Field(ge=2)] | None, Unit("outer folds")] = None
    """Outer folds of a nested cross-validation: each is left out in turn, while all of the run, its choices among
    stages and among the values of `sweep.over` too, is done on the other rows; then it is scored. The run ships what it
    would without. Why: an honest score of the whole flow, for that many times the time."""
    every_class: bool = True
    """Each fold must validate every class; false accepts folds that lack one with too few rows or groups."""

    keep: list[Annotated[str, AfterValidator(_stage)]] = Field(default_factory=list)
    """Stages that stay although out-of-fold rows do not say that they help, by the names in stages.json: `tta`,
    `correction`, `decision`, `pseudo_label 1`, or `pseudo_label` for every round. A finished run takes it, too, when it
    is resumed: what was computed is kept."""

    def nested_cost(self, *, steps: bool) -> str:
        """What `nested` costs, in a sentence. `steps`: whether a number of steps ends a training, not one of epochs."""
        assert self.nested is not None, "it is asked for"
        times = self.nested + steps
        return (
            f"Nested cross-validation: the whole flow runs {self.nested} times on {self.nested - 1}/{self.nested} of "
            f"the rows, and once on all; it takes about {times} times as long as without folds.nested."
        )

    @model_validator(mode="after")
    def _one_deal(self) -> FoldsConfig:
        if self.column is not None and self.repeats > 1:
            raise ValueError(f"column `{self.column}` gives one set of folds. Write folds.repeats=1.")
        if self.time is not None and (self.repeats > 1 or self.column is not None):
            raise ValueError(f"time `{self.time}` gives one set of folds. Leave repeats and column out.")
        return self


class EnsembleConfig(Section):
    """How the adapters of the folds answer together."""

    merge: Literal["auto", "mean", "geometric", "rank"] = "auto"
    """How the adapters' probabilities are combined. `auto`: the mean, or the geometric mean where it is
    better on out-of-fold rows, which needs folds.seeds or folds.repeats above 1 to tell. Weights of several runs:
    `workbench blend`."""
    calibrate: bool = True
    """Give probabilities a temperature that is fitted on out-of-fold rows, and for all adapters together on unlabelled
    rows, or on test rows without their labels. Kept where the out-of-fold loss falls."""
    consensus: bool = False
    """Give near-duplicates among the test rows the mean of their probabilities."""
    decide: bool = True
    """Where `evaluate.metric` is a score of classes (accuracy, F1, mcc, qwk, or a function of your own), choose a row's
    class by probabilities that are moved for rare classes, as out-of-fold rows say. Kept where the score surely gains;
    probabilities stay as they are."""
