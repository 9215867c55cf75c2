"""No fold leaks: whatever must stay together is on one side, and what is later in time is never trained on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.config.sections.basic_sections import DataConfig, HeldOutFold
from workbench.data.folds import held_fold
from workbench.data.folds.held_fold import FoldRow
from workbench.data.folds.stratified_folds import Split, assign
from workbench.data.rows import read_rows
from workbench.errors import ConfigError, DataError

COUNT, FOLDS = 48, 4
WORDS = [a + b for a in ("am", "bir", "ce", "del", "em", "fli") for b in ("ber", "ch", "dar", "ta", "ing")]


def text(n: int) -> str:
    """Three texts of each kind differ by a letter at their end."""
    rng = np.random.default_rng(n // 3)
    return " ".join(rng.choice(WORDS, 12)) + " abc"[n % 3]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of users, of days in no order, and of folds that someone made."""
    path = tmp_path_factory.mktemp("folds") / "rows.jsonl"
    day_N = np.random.default_rng(0).permutation(COUNT)
    rows = [
        {"text": text(n), "user": f"u{n // 6}", "day": f"2026-{1 + day // 28:02}-{1 + day % 28:02}", "part": n % FOLDS}
        for n, day in enumerate(day_N.tolist())
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(source: Path, order: list[int] | None = None) -> list[FoldRow]:
    read = [FoldRow(row.place, row.columns["text"], f"key {n // 2}") for n, row in enumerate(read_rows(str(source)))]
    return read if order is None else [read[n] for n in order]


def splits(source: Path, **settings: Any) -> list[Split]:
    return [
        held_fold.split(
            HeldOutFold(of=FOLDS, number=n, **settings), rows(source), config=DataConfig(train=str(source)), seed=0
        )
        for n in range(FOLDS)
    ]


def column(source: Path, name: str) -> np.ndarray[Any, Any]:
    return np.asarray([row.columns[name] for row in read_rows(str(source))])


def require_apart(split: Split, group_N: Any) -> None:
    group_N = np.asarray(group_N)
    assert not np.isin(group_N[split.train_N], group_N[split.validation_N]).any()


@pytest.mark.parametrize("near", [0.7, None])
@pytest.mark.parametrize("repeat", [0, 2])
def test_every_row_is_held_out_once_beside_its_likes(source: Path, near: float | None, repeat: int) -> None:
    found = splits(source, near=near, repeat=repeat)
    assert (sum(split.validation_N.astype(int) for split in found) == 1).all()
    for split in found:
        assert (split.train_N ^ split.validation_N).all()
        require_apart(split, [row.key for row in rows(source)])
        if near is not None:
            require_apart(split, [n // 3 for n in range(COUNT)])


def test_repeats_and_seeds_deal_anew_and_orders_do_not(source: Path) -> None:
    fold = HeldOutFold(of=FOLDS, number=1)

    def held(fold: HeldOutFold, seed: int, order: list[int] | None = None) -> set[str]:
        own = rows(source, order)
        split = held_fold.split(fold, own, config=DataConfig(train=str(source)), seed=seed)
        return {own[n].place for n in np.flatnonzero(split.validation_N)}

    first = held(fold, 0)
    assert first == held(fold, 0, np.random.default_rng(1).permutation(COUNT).tolist())
    assert len({frozenset(held(fold, seed)) for seed in range(4)}) > 1
    assert len({frozenset(held(fold.model_copy(update={"repeat": repeat}), 0)) for repeat in range(4)}) > 1


def test_groups_of_a_column_are_on_one_side(source: Path) -> None:
    for split in splits(source, group="user", near=None):
        require_apart(split, column(source, "user"))
        require_apart(split, [row.key for row in rows(source)])


def test_folds_of_a_column_are_those_folds(source: Path) -> None:
    for number, split in enumerate(splits(source, column="part")):
        np.testing.assert_array_equal(split.validation_N, column(source, "part") == number)
    with pytest.raises(DataError, match="is in fold `1`, but"):
        splits(source, column="part", group="user")


@pytest.mark.parametrize("settings", [{"near": None}, {}, {"group": "user"}])
def test_time_trains_on_the_past_alone(source: Path, settings: dict[str, Any]) -> None:
    day_N = column(source, "day").astype("datetime64[D]")
    found = splits(source, time="day", **settings)
    held_N = sum(split.validation_N.astype(int) for split in found)
    assert held_N.max() == 1 and held_N.sum() == pytest.approx(COUNT * FOLDS / (FOLDS + 1), abs=FOLDS)
    for before, split in zip([None, *found], found, strict=False):
        require_apart(split, [row.key for row in rows(source)])
        if not settings:
            require_apart(split, [n // 3 for n in range(COUNT)])
        if "group" in settings:
            require_apart(split, column(source, "user"))
        if split.train_N.any():
            assert day_N[split.train_N].max() < day_N[split.validation_N].min()
        if before is not None:
            assert day_N[before.validation_N].max() < day_N[split.validation_N].min()


def test_rows_of_one_time_are_in_one_block(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text(n), "year": 2000 + n // 9}) + "\n" for n in range(COUNT)))
    for split in splits(path, time="year", near=None):
        year_N = column(path, "year")
        assert not np.isin(year_N[split.train_N], year_N[split.validation_N]).any()
    with pytest.raises(DataError, match=r"2 different times are too few"):
        path.write_text("".join(json.dumps({"text": text(n), "year": n % 2}) + "\n" for n in range(COUNT)))
        splits(path, time="year", near=None)
    path.write_text("".join(json.dumps({"text": text(n), "year": f"year {n}"}) + "\n" for n in range(COUNT)))
    with pytest.raises(DataError, match="neither a number nor a date"):
        splits(path, time="year", near=None)


def test_unknown_columns_are_named(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"no row has such a column.*`user`"):
        splits(source, group="usr")


def test_a_fold_that_trains_is_trained_on(source: Path) -> None:
    for split, held in zip(splits(source, trains=True), splits(source), strict=True):
        assert split.train_N.all()
        np.testing.assert_array_equal(split.validation_N, held.validation_N)


def test_rows_with_several_labels_are_as_even_as_iterative_stratification() -> None:
    """Sechidis et al. 2011, algorithm 1, written a second time; evenness is their label distribution."""

    def unevenness(strata: list[tuple[str, ...]], fold_N: Any) -> float:
        total = Counter(name for own in strata for name in own)
        gaps = []
        for fold in range(FOLDS):
            own = [strata[n] for n in np.flatnonzero(np.asarray(fold_N) == fold)]
            count = Counter(name for each in own for name in each)
            gaps += [abs(count[name] / FOLDS**-1 / total[name] - 1) for name in total]
        return float(np.mean(gaps))

    generator, found = np.random.default_rng(0), []
    for seed in range(60):
        share_6 = generator.random(6) ** 3
        rows_N6 = generator.random((int(generator.integers(60, 90)), 6)) < share_6
        strata = [tuple(np.array(list("abcdef"))[row_6]) or ("a",) for row_6 in rows_N6]
        groups = [str(n) for n in range(len(strata))]
        ours = assign(strata, groups=groups, k=FOLDS, seed=seed).fold_RN[0]
        found.append((unevenness(strata, ours), unevenness(strata, sechidis(strata, seed))))
    ours_mean, theirs_mean = np.mean(found, axis=0)
    assert ours_mean <= theirs_mean + 0.005, "ties are drawn, so that one set of rows may be dealt better by either"


def sechidis(strata: list[tuple[str, ...]], seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    left, fold_of = set(range(len(strata))), [0] * len(strata)
    wanted_F = np.full(FOLDS, len(strata) / FOLDS)
    total = Counter(name for own in strata for name in own)
    wanted_FC = {name: np.full(FOLDS, count / FOLDS) for name, count in total.items()}
    while left:
        counts = Counter(name for n in left for name in strata[n])
        rarest = min(counts, key=lambda name: (counts[name], name))
        for n in sorted(n for n in left if rarest in strata[n]):
            best = np.flatnonzero(wanted_FC[rarest] == wanted_FC[rarest].max())
            best = best[wanted_F[best] == wanted_F[best].max()]
            fold = int(rng.choice(best))
            fold_of[n] = fold
            wanted_F[fold] -= 1
            for name in strata[n]:
                wanted_FC[name][fold] -= 1
            left.remove(n)
    return fold_of
