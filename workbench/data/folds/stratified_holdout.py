"""A held-out share of labelled rows that shows every class as often as the rest does."""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from workbench.data.folds.row_split import Class, Groups, Strata


def hold_out(strata: Strata, *, groups: Groups, share: float, seed: int) -> NDArray[np.bool_]:
    """True for the rows (N,) that are held out: of each class about `share`, at least one row, and never all.

    Class by class, the rarest first, whole groups are taken in the order of a hash of seed and name, until the class
    has its share; of groups with several classes, first those that bring no class above its share. The order of rows
    does not matter. A class with one group, or whose every group is another's last one, is not held out.

    Args:
        strata: Classes of each row; a row without any is dealt like a class of its own.
        groups: Rows with equal names stay together.
        share: Above 0, below 1.
    """
    dealt = [classes or ("",) for classes in strata]
    total = Counter(each for classes in dealt for each in classes)
    members: dict[str, Counter[Class]] = defaultdict(Counter)
    for classes, group in zip(dealt, groups, strict=True):
        members[group].update(classes)
    order = sorted(members, key=lambda group: blake2b(f"{seed} {group}".encode(), digest_size=16).digest())
    wanted = {each: max(1, round(share * count)) for each, count in total.items()}
    held: Counter[Class] = Counter()
    chosen: set[str] = set()
    for each in sorted(total, key=lambda each: (total[each], str(each))):
        for gently in (True, False):
            for group in order:
                if held[each] >= wanted[each]:
                    break
                own = members[group]
                after = {c: held[c] + own[c] for c in own}
                above = [c for c in own if after[c] > wanted[c] and (gently or c == each) and held[c]]
                if own[each] and group not in chosen and not above and all(after[c] < total[c] for c in own):
                    chosen.add(group)
                    held.update(own)
    return np.asarray([group in chosen for group in groups])
