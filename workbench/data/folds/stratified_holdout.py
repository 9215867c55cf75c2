"""A stratified held-out share of grouped rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from workbench.data.folds.row_split import Class, Groups, Strata


def hold_out(strata: Strata, *, groups: Groups, share: float, seed: int) -> NDArray[np.bool_]:
    """True for the rows (N,) that are held out: about `share` of each class, at least one row, and never all.

    For each class, rarest first, whole groups are taken in the order of a hash of seed and name until the class has its
    share; of groups with several classes, first those that take no class above its share. The order of rows does not
    matter. A class with a single group, or whose every group is the last one of another class, is not held out.

    Args:
        strata: Classes of each row; rows without any count as a class of their own.
        groups: Group of each row; the rows of a group stay together.
        share: Above 0, below 1.
    """
    strata = [classes or ("",) for classes in strata]
    total = Counter(name for classes in strata for name in classes)
    counts: dict[str, Counter[Class]] = defaultdict(Counter)
    for classes, group in zip(strata, groups, strict=True):
        counts[group].update(classes)
    order = sorted(counts, key=lambda group: blake2b(f"{seed} {group}".encode(), digest_size=16).digest())
    target = {name: max(1, round(share * count)) for name, count in total.items()}
    taken: Counter[Class] = Counter()
    held_out: set[str] = set()
    for name in sorted(total, key=lambda name: (total[name], str(name))):
        for strict in (True, False):  # at first no class may exceed its share, then only `name` may not
            for group in order:
                if taken[name] >= target[name]:
                    break
                own = counts[group]
                after = {c: taken[c] + own[c] for c in own}
                exceeds = any(after[c] > target[c] and taken[c] for c in own if strict or c == name)
                if own[name] and group not in held_out and not exceeds and all(after[c] < total[c] for c in own):
                    held_out.add(group)
                    taken.update(own)
    return np.asarray([group in held_out for group in groups])
