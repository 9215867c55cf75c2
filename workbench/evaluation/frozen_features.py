"""Features of rows by a frozen backbone, kept in the cache folder, and what they say before anything trains.

A probe of the features tells how much of the labels the backbone knows already, and the features find the training rows
that are most like other rows. The features of each row are computed once, for every run.

Legend: N rows, B rows of a micro-batch, L tokens, T training rows and M other rows of a probe, D features.
"""

from __future__ import annotations

import gc
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.adapters import anatomy
from workbench.config import ModelConfig, RunConfig, model_heads
from workbench.config.model_heads import ModelHead
from workbench.data.batching import Indices, MicroBatch
from workbench.data.images.picture_reader import PictureReader
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.records import RecordSource, RowInputs, RowReader
from workbench.data.sound.sound_reader import SoundReader
from workbench.errors import WorkbenchError
from workbench.evaluation import simple_baseline
from workbench.evaluation.classification_scores import OneHot
from workbench.evaluation.forward_passes import over_rows
from workbench.evaluation.prediction_table import ranked, suspects
from workbench.models import backbones, classifier
from workbench.models.classifier import Classifier
from workbench.runs import files, run_directory
from workbench.runs.files import cache_folder
from workbench.runs.run_directory import Run
from workbench.training.distributed.placement import Placement
from workbench.training.freezing.hidden_state_store import DiskStore

if TYPE_CHECKING:
    import pandas as pd
    from sklearn.pipeline import Pipeline

VOTERS = 10  # nearest rows that vote, each weighted by its cosine similarity; fewer where there are fewer rows
STRENGTH = 0.1  # inverse strength of the linear probe's penalty on standardised features
PARTS = 5  # folds of the linear probe: each is predicted by a probe of the others
UNKNOWN = 1e-6  # least probability of a class, also of a class that no other row has
Floats = NDArray[np.float32]
FORMAT = "1"  # raise it when features of the same rows change, or how rows are identified
AT_ONCE = 4096  # rows that are computed between two writes to the cache; a killed process loses at most as many
_NO_LABELS = Labels("one", ("a", "b"))  # features are the head's inputs, so the labels do not matter
PROBE_FILE, NEIGHBOURS_FILE = "probe.json", "neighbours.parquet"
"""In a run directory: scores of the frozen backbone; the nearest training rows of mistakes and suspect labels."""
NEIGHBOURS = 3  # training rows that are shown beside a row
EXPLAINED = 24  # mistakes, and suspected labels, that are shown beside training rows
SHARE = 0.08
"""Rows that are probed before a run, as a share of those that its steps read; a step costs three passes or more."""
LEAST, MOST = 64, 4000  # bounds of the number of rows: fewer say nothing, more take long to compare
LARGEST = 500_000_000  # parameters above which a backbone takes long to load once more
CHECK_WORK = {"cpu": 2e12, "cuda": 1e15}  # floating-point operations that `check` may spend, by device: some seconds
_COLUMNS = ("row", "neighbour", "text", "label", "similarity")


class Probe(NamedTuple):
    """Accuracies of predictions from frozen features alone."""

    neighbours: float  # of a vote of the nearest training rows (k-NN)
    linear: float  # of logistic regression on standardised features


def backbone_features(model: Classifier, rows: RowInputs) -> Floats:
    """Features of each row (N, D), in their order: the inputs of the classification head."""
    head = model.backbone.get_submodule(anatomy.fresh_heads(model.backbone)[-1])
    device = next(model.model.parameters()).device

    def compute(numbers: Indices) -> list[Floats]:
        read, caught = rows.batch(numbers, epoch=None), list[Tensor]()
        batch = MicroBatch(read.inputs, read.positions_B, torch.zeros(len(read.positions_B)), read.tokens).to(device)
        handle = head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            model.outputs(batch)
        finally:
            handle.remove()
        if model.token_head is not None:  # a causal model: the last real token
            found_BD = caught[-1].flatten(0, 1)[batch.positions_N]
        else:  # an encoder's first token, or a picture
            found_BD = caught[-1][:, 0] if caught[-1].ndim == 3 else caught[-1].flatten(1)
        return list(found_BD.float().cpu().numpy())

    return np.stack(over_rows(model.model, rows.lengths, compute))


def probe(train_ND: Floats, labels_N: Sequence[str], others_MD: Floats, wanted_M: Sequence[str]) -> Probe:
    """Accuracy on other rows of predictions from the features of training rows; takes seconds."""
    from sklearn.neighbors import KNeighborsClassifier

    def similarity(distance: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.maximum(1 - distance, 1e-6)  # no weight is zero

    nearest = KNeighborsClassifier(min(VOTERS, len(train_ND)), weights=similarity, metric="cosine")
    nearest.fit(train_ND, labels_N)
    linear = linear_probe(train_ND, np.asarray(labels_N))
    wanted = np.asarray(wanted_M)
    return Probe(*(float((each.predict(others_MD) == wanted).mean()) for each in (nearest, linear)))


def probe_losses(features_ND: Floats, class_N: Indices, *, seed: int) -> NDArray[np.float64]:
    """Loss (N,) of each row's class in nats, by a linear probe that was fitted to other rows.

    Rounded to three digits, since the last bits of features depend on the rows of the same batch.

    Args:
        class_N: Number of each row's class, from 0.
        seed: Decides which of `PARTS` folds a row is in.
    """
    part_N = np.random.default_rng([seed, 12]).permutation(len(class_N)) % PARTS
    probability_N = np.full(len(class_N), UNKNOWN)
    for part in range(PARTS):
        mine_N = part_N == part
        known_C = np.unique(class_N[~mine_N])
        if len(known_C) < 2 or not mine_N.any():
            continue
        said_NC = np.full((len(class_N), class_N.max() + 1), UNKNOWN)
        probe = linear_probe(features_ND[~mine_N], class_N[~mine_N])
        said_NC[np.ix_(mine_N, known_C)] = probe.predict_proba(features_ND[mine_N])
        probability_N[mine_N] = said_NC[mine_N, class_N[mine_N]]
    found_N: NDArray[np.float64] = np.round(-np.log(np.maximum(probability_N, UNKNOWN)), 3)
    return found_N


def linear_probe(train_ND: NDArray[np.floating[Any]], labels_N: NDArray[Any]) -> Pipeline:
    """Logistic regression on standardised features."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regression = LogisticRegression(C=STRENGTH, max_iter=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a rough fit is enough
        fitted: Pipeline = make_pipeline(StandardScaler(), regression).fit(train_ND, labels_N)
    return fitted


def linear_values(labels: Labels, train_TD: Floats, targets_TC: OneHot) -> Callable[[Any], NDArray[np.float64]]:
    """A linear probe of labels of any kind: a function from features to values, as Labels.values gives."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scaled = partial(make_pipeline, StandardScaler())
    return simple_baseline.linear_values(labels, train_TD, targets_TC, STRENGTH, scaled)


def cached_features(model: ModelConfig, reader: RowReader, sets: Sequence[RowInputs]) -> list[Floats]:
    """Features (N, D) of each set of rows; the backbone is loaded only where some are not in the cache.

    A row is identified by what the model reads of it, whatever its file or place. The last bits of features depend on
    the rows of the same batch. Raises FileError: the cache folder cannot be written.
    """
    store = _store(model, reader)
    keys = [_keys(inputs) for inputs in sets]
    missing = [store.missing(each) for each in keys]
    if any(missing):
        head = model_heads.classes(_NO_LABELS.names, seed=0, problem=_NO_LABELS.problem)
        backbone = backbones.load(model, reader.tokenizer, task=head).model
        computing = classifier.classification_model(backbone, backbone, reader, _NO_LABELS)
        for inputs, names, numbers in zip(sets, keys, missing, strict=True):
            for start in range(0, len(numbers), AT_ONCE):
                some = np.asarray(numbers[start : start + AT_ONCE], dtype=np.int64)
                found_ND = torch.from_numpy(backbone_features(computing, inputs.take(some)))
                store.put([names[number] for number in some], list(found_ND[:, None]))
        del computing
        gc.collect()  # a model is in cycles
    return [store.get(each, 1)[:, 0].numpy() for each in keys]


def of_sources(model: ModelConfig, reader: RowReader) -> Callable[[Sequence[RecordSource]], Floats]:
    """A function from sources of rows to the features of all their rows together, in their order."""
    return lambda sources: np.concatenate(cached_features(model, reader, [reader.inputs(each) for each in sources]))


def are_known(model: ModelConfig, reader: RowReader, sets: Sequence[RowInputs]) -> bool:
    """Whether the features of all rows are in the cache folder."""
    store = _store(model, reader)
    return not any(store.missing(_keys(inputs)) for inputs in sets)


def _store(model: ModelConfig, reader: RowReader) -> DiskStore:
    seen = reader.format.facts if isinstance(reader, PictureReader) else None
    heard = reader.format.saved() if isinstance(reader, SoundReader) else None
    facts = [FORMAT, backbones.file_digests(model), model.model_dump(), seen or heard]
    return vector_store("features", facts, instead="evaluate.probe=0 and duplicates.features=null")


def vector_store(name: str, facts: Sequence[object], *, instead: str) -> DiskStore:
    """The cache of vectors of rows, for everything that they depend on besides the row: device, versions and `facts`.
    `instead`: what to write where the disk is full."""
    facts = [*facts, backbones.device().type, run_directory.versions()]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return DiskStore(cache_folder() / name, fingerprint=digest, dtype=torch.float32, instead=instead)


def _keys(inputs: RowInputs) -> list[bytes]:
    """A key for each row: a hash of what the model reads."""
    return [
        hashlib.blake2b(f"{row.dtype}{row.shape}".encode() + row.tobytes(), digest_size=16).digest()
        for row in inputs.arrays()
    ]


Look = Callable[..., "FrozenProbe"]  # probes at most `most` rows by their frozen features


@dataclass(frozen=True)
class FrozenProbe:
    """The frozen features of training rows and others."""

    model: ModelConfig
    reader: RowReader
    train: LabelledSet
    others: LabelledSet  # held-out rows; in a cross-validation the training rows once more
    train_T: Indices  # numbers of the rows of `train` that are probed
    others_M: Indices
    train_TD: Floats
    others_MD: Floats
    fold_N: Indices  # fold of each row of `train`: rows of the same fold are not compared
    other_fold_N: Indices  # fold of each row of `others`; held-out rows have their own

    def scores(self) -> Probe | None:
        """Accuracies on the last fold of probes of the other folds.

        None where a row does not have exactly one class, or there is nothing to compare.
        """
        seen_T, asked_M = self._scored()
        train = [self.train.labels[row] for row in self.train_T[seen_T]]
        others = [self.others.labels[row] for row in self.others_M[asked_M]]
        names = [label for label in (*train, *others) if isinstance(label, str)]
        if len(names) < len(train) + len(others) or len(set(train)) < 2 or not others:
            return None
        return probe(self.train_TD[seen_T], names[: len(train)], self.others_MD[asked_M], names[len(train) :])

    def _scored(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Training rows that are not of the last fold (T,), and other rows that are (M,)."""
        last = self.other_fold_N.max()
        return self.fold_N[self.train_T] != last, self.other_fold_N[self.others_M] == last

    @property
    def facts(self) -> dict[str, Any]:
        """For PROBE_FILE: numbers of rows (training, others, searched for neighbours, in all), and the accuracies."""
        probe_scores, (seen_T, asked_M) = self.scores(), self._scored()
        counts = {
            "train": int(seen_T.sum()),
            "others": int(asked_M.sum()),
            "compared": len(self.train_T),
            "rows": len(self.train),
        }
        return counts | ({} if probe_scores is None else probe_scores._asdict())

    def neighbours(self, rows: Sequence[int]) -> list[tuple[int, int, float]]:
        """Other rows by number, each with its nearest training rows of other folds and their cosine similarities.

        The mean of the training rows is subtracted from all features first; it would make all of them similar.
        """
        (others_XD,) = cached_features(self.model, self.reader, [self.others.inputs.take(np.asarray(rows, np.int64))])
        centre_D = self.train_TD.mean(0)
        similarity_XT = _unit_length(others_XD - centre_D) @ _unit_length(self.train_TD - centre_D).T
        matches = []
        for row, similarity_T in zip(rows, similarity_XT, strict=True):
            similarity_T[self.fold_N[self.train_T] == self.other_fold_N[row]] = -np.inf
            for nearest in np.argsort(-similarity_T, kind="stable")[:NEIGHBOURS]:
                if similarity_T[nearest] > -np.inf:
                    matches.append((int(row), int(self.train_T[nearest]), float(similarity_T[nearest])))
        return matches

    def write_neighbours(self, folder: Path, table: pd.DataFrame, *, out_of_fold: bool = False) -> LabelledSet:
        """Write NEIGHBOURS_FILE into a run directory; returns the training rows that it names. `table`: predictions of
        `others`, in their order. `out_of_fold`: whether the predictions are out of fold, so that suspect labels can be
        found."""
        import pandas as pd  # 0.2 s, which the first step need not wait for

        from workbench.evaluation.thumbnails import label_in_words

        wanted = [*ranked(table).mistakes[:EXPLAINED], *(list(suspects(table))[:EXPLAINED] if out_of_fold else [])]
        matches: list[tuple[int, int, float]] = []
        if wanted:
            with suppress(WorkbenchError, torch.OutOfMemoryError):  # the run is done and must not fail here
                matches = self.neighbours(list(dict.fromkeys(wanted)))
        lines = [
            (
                self.others.place(row),
                self.train.place(nearest),
                self.reader.describe(self.train.records[nearest]),
                label_in_words(self.train.labels[nearest]),
                similarity,
            )
            for row, nearest, similarity in matches
        ]
        files.write_bytes(folder / NEIGHBOURS_FILE, pd.DataFrame(lines, columns=list(_COLUMNS)).to_parquet())
        return self.train.subset(np.unique(np.asarray([nearest for _, nearest, _ in matches], dtype=np.int64)))


def of_splits(
    config: RunConfig, reader: RowReader, train: LabelledSet, held_out: LabelledSet, *, most: int
) -> FrozenProbe:
    """Probe training and held-out rows: `most` of both together, or all where their features are in the cache."""
    folds = np.zeros(len(train), dtype=np.int64), np.ones(len(held_out), dtype=np.int64)
    if len(train) + len(held_out) <= MOST and are_known(config.model, reader, [train.inputs, held_out.inputs]):
        most = MOST
    others_M = _some(len(held_out), max(1, most // 2), config.seed)
    train_T = _some(len(train), max(1, most - len(others_M)), config.seed)
    inputs = [train.inputs.take(train_T), held_out.inputs.take(others_M)]
    train_TD, others_MD = cached_features(config.model, reader, inputs)
    return FrozenProbe(config.model, reader, train, held_out, train_T, others_M, train_TD, others_MD, *folds)


def of_folds(config: RunConfig, reader: RowReader, rows: LabelledSet, fold_N: Indices, *, most: int) -> FrozenProbe:
    """Probe `most` rows of a cross-validation, or all where their features are in the cache, across folds."""
    if len(rows) <= MOST and are_known(config.model, reader, [rows.inputs]):
        most = MOST
    rows_T = _some(len(rows), most, config.seed)
    (found_TD,) = cached_features(config.model, reader, [rows.inputs.take(rows_T)])
    return FrozenProbe(config.model, reader, rows, rows, rows_T, rows_T, found_TD, found_TD, fold_N, fold_N)


def rows_before_run(config: RunConfig, task: ModelHead, *, visits: int | None) -> int:
    """How many rows a run probes before it trains; 0 for none. `visits`: rows that all of its steps read; None where a
    budget alone limits the run."""
    if config.evaluate.probe != "auto":
        return config.evaluate.probe
    rows = 0 if visits is None else min(MOST, int(SHARE * visits))
    return rows if rows >= LEAST and _parameters(config, task) <= LARGEST else 0


def rows_in_check(config: RunConfig, task: ModelHead, lengths: Indices) -> int:
    """How many rows `check` can probe in seconds; 0 where it would have to fetch weights. `lengths`: tokens or patches
    of each row."""
    if config.evaluate.probe != "auto":
        return config.evaluate.probe
    if not backbones.weights_are_local(config.model):
        return 0
    parameters, work = _parameters(config, task), CHECK_WORK.get(backbones.device().type, CHECK_WORK["cuda"])
    rows = min(MOST, int(work / (2 * parameters * float(lengths.mean()))))
    return rows if rows >= LEAST and parameters <= LARGEST else 0


def before_run(
    config: RunConfig, run: Run, task: ModelHead, look: Look, *, visits: int | None, say: Callable[[str], None]
) -> FrozenProbe | None:
    """Probe rows in a small share of the run's time, write PROBE_FILE and say what it holds; None without a probe.
    `visits`: see `rows_before_run`."""
    most = rows_before_run(config, task, visits=visits) if Placement(config.distributed, run.ranks).probes else 0
    if not most:
        return None
    frozen_probe = look(most=most)
    facts = frozen_probe.facts
    files.write_json(run.path / PROBE_FILE, facts)
    if text := sentence(facts):
        say(text)
    return frozen_probe


def in_check(
    config: RunConfig, labels: Labels, train: LabelledSet, others: LabelledSet, reader: RowReader, look: Look
) -> str:
    """The probe of `check` in words, where it probes rows, and what a model without a backbone reaches; empty where
    `evaluate.probe` is 0."""
    if config.evaluate.probe == 0:
        return ""
    most = rows_in_check(config, classifier.task(labels, seed=config.seed), train.lengths)
    facts = look(most=most).facts if most else {}
    linear = facts.get("linear")
    simple = simple_baseline.in_check(labels, train, others, reader, seed=config.seed, linear=linear)
    return " ".join(each for each in (sentence(facts), simple) if each)


def sentence(facts: Mapping[str, Any], *, after: float | None = None) -> str:
    """The facts of PROBE_FILE in words; empty where there are no accuracies. `after`: accuracy of the run."""
    if "linear" not in facts:
        return ""
    run = "" if after is None else f"; this run {after:.2f}"
    enough = " What it knew before is as good as the run." if is_enough(facts, after) else ""
    return (
        f"The frozen backbone alone: k-NN {facts['neighbours']:.2f}, linear probe {facts['linear']:.2f}{run} "
        f"({facts['train']:,} training rows, {facts['others']:,} others).{enough}"
    )


def is_enough(facts: Mapping[str, Any], after: float | None) -> bool:
    """Whether a simple classifier over the frozen backbone's features is right as often as the run."""
    return "linear" in facts and after is not None and max(facts["neighbours"], facts["linear"]) >= after


def _parameters(config: RunConfig, task: ModelHead) -> int:
    return sum(each.numel() for each in backbones.skeleton(config.model, task=task).parameters())


def _some(count: int, most: int, seed: int) -> Indices:
    """A random choice of rows, in their order."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])


def _unit_length(rows_XD: Floats) -> Floats:
    length = np.linalg.norm(rows_XD, axis=-1, keepdims=True)
    return np.asarray(rows_XD / np.maximum(length, np.finfo(np.float32).tiny), dtype=np.float32)
