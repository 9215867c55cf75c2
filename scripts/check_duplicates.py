"""Compare the duplicate clusters of a file with an exhaustive Jaccard computation, and show what folds would leak.

    python scripts/check_duplicates.py train.csv --test test.csv --label category

All pairs are compared: 10,000 short rows take about half a minute. Exit status 1 where recall is below 0.95.
Banking77 is at https://github.com/PolyAI-LDN/task-specific-datasets (Casanueva et al. 2020, CC BY 4.0).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array
from sklearn.feature_extraction.text import CountVectorizer

from workbench.config.sections.folds_config import DuplicatesConfig
from workbench.data.folds.duplicates import (
    DuplicateClusters,
    Ints,
    components,
    find,
    leaking,
    normalised,
    report,
    shingles,
)
from workbench.data.folds.stratified_folds import assign, strata_of, ungrouped_leak
from workbench.data.rows import read_rows

LEAST_RECALL = 0.95


def main() -> None:
    arguments = _arguments()
    given = {key: getattr(arguments, key) for key in ("threshold", "shingle", "size")}
    config = DuplicatesConfig.model_validate({key: value for key, value in given.items() if value is not None})
    texts, labels = _columns(arguments.train, arguments)
    before = time.process_time()
    found = _find(texts, config)
    print(f"{len(texts):,} rows in {time.process_time() - before:.1f} s of one core; {config}")
    _show(found, labels, arguments.k)
    if arguments.test:
        _show_overlap(texts, _columns(arguments.test, arguments)[0], config)
    if _recall(texts, found, config) < LEAST_RECALL:
        sys.exit(f"Recall is below {LEAST_RECALL}.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("--test", type=Path)
    parser.add_argument("--text", default="text", help="column of the text")
    parser.add_argument("--label", default="label", help="column of the class")
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--shingle", choices=["characters", "words"])
    parser.add_argument("--size", type=int)
    parser.add_argument("--k", type=int, default=5, help="folds")
    return parser.parse_args()


def _columns(path: Path, arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    rows = [row.columns for row in read_rows(str(path))]
    return [row[arguments.text] for row in rows], [row[arguments.label] for row in rows]


def _find(texts: list[str], config: DuplicatesConfig) -> DuplicateClusters:
    return find(texts, threshold=config.cutoff(pictures=False), shingle=config.shingle, size=config.length)


def _show(clusters: DuplicateClusters, labels: list[str], k: int) -> None:
    result = report(clusters, labels)
    for name, value in result._asdict().items():
        print(f"  {name}: {len(value) if name == 'conflicts' else value}")
    folds = assign(strata_of(labels, k=k), groups=clusters.groups, k=k)
    print(f"  rows of each of {k} grouped folds: {np.bincount(folds.fold_RN[0]).tolist()}")
    leaks = leaking(clusters, folds.fold_RN[0]).sum()
    print(f"  validation rows with a near-duplicate in training, grouped folds: {leaks}")
    print(f"  the same, ungrouped: {ungrouped_leak(clusters, labels, k=k, seed=0)} of {len(labels)}")


def _show_overlap(train: list[str], test: list[str], config: DuplicatesConfig) -> None:
    both = _find(train + test, config)
    leaks = leaking(both, (np.arange(len(train) + len(test)) >= len(train)).astype(np.int64))
    print(f"  test rows with a near-duplicate in train: {leaks[len(train) :].sum()} of {len(test)}")
    print(f"  training rows with a near-duplicate in test: {leaks[: len(train)].sum()}")


def _recall(texts: list[str], duplicates: DuplicateClusters, config: DuplicatesConfig) -> float:
    """Share of the true pairs, and of the true clusters, that were duplicates; the smaller of both."""
    plain = sorted({normalised(text) for text in texts})
    pairs = _exhaustive(plain, config)
    expected, got = set(map(tuple, pairs.tolist())), set(map(tuple, duplicates.pairs_P2.tolist()))
    clusters, true = (_clusters(roots) for roots in (duplicates.cluster_U, components(len(plain), pairs)))
    print(f"  pairs of different texts: {len(got & expected)} of {len(expected)}, and {len(got - expected)} false ones")
    print(f"  clusters of different texts: {len(clusters & true)} of {len(true)} are the same")
    return min(len(got & expected) / max(1, len(expected)), len(clusters & true) / max(1, len(true)))


def _exhaustive(plain: list[str], config: DuplicatesConfig) -> Ints:
    counter = CountVectorizer(
        analyzer=lambda text: shingles(text, shingle=config.shingle, size=config.length), dtype=np.int32
    )
    counts = csr_array(counter.fit_transform(plain))
    size = counts.sum(axis=1)
    found = []
    for start in range(0, len(plain), 500):
        common = (counts[start : start + 500] @ counts.T).tocoo()
        first, second = common.row.astype(np.int64) + start, common.col.astype(np.int64)
        near = (common.data / (size[first] + size[second] - common.data) >= config.threshold) & (first < second)
        found.append(np.stack([first[near], second[near]], axis=1))
    return np.concatenate(found)


def _clusters(roots: Ints) -> set[frozenset[int]]:
    members: dict[int, set[int]] = {}
    for text, root in enumerate(roots.tolist()):
        members.setdefault(root, set()).add(text)
    return {frozenset(each) for each in members.values() if len(each) > 1}


if __name__ == "__main__":
    main()
