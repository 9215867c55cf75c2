"""Averages of the trained values along a run: EMA, SWA, LAWA and RNA (`average.method`).

The values of one run stay close to each other, so they are averaged as they are, factors of LoRA too. Those of
different runs do not: `workbench combine` averages their updates instead.

The updates are those of `torch.optim.swa_utils`. Its AveragedModel is not used: it copies a whole module, the frozen
backbone included, and has neither LAWA nor an EMA that warms up.

Legend: K samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from workbench.config.sections.average_config import AverageConfig
from workbench.training.optim import schedules

Values = dict[str, Tensor]
"""By the parameter's name."""
_KEEPING = ("lawa", "rna")
"""Methods that keep the latest samples."""
_swa = swa_utils.get_swa_multi_avg_fn()
"""Moves the mean of so many samples to that of one more. Of equal samples it is that sample to the bit."""


def copies(config: AverageConfig, *, steps: int) -> int:
    """Copies of the values that are kept at the end of a run of so many steps."""
    if config.method not in _KEEPING:
        return 0 if config.method == "none" else 1
    shares = [step / steps for step in range(steps + 1)]
    moments = (
        after >= config.begin and schedules.due(config.every, step=step, before=shares[step - 1], after=after)
        for step, after in enumerate(shares[1:], start=1)
    )
    return min(config.k, sum(moments))


class WeightAverage:
    """The average of what `trainable` held after some of the steps. Its state is a function of those values only.

    EMA and SWA keep one copy, which each sample moves towards itself. LAWA and RNA keep the latest k samples, and
    compute their mean or their weighted sum each time, so that no error adds up.

    Args:
        trainable: The values that train, in float32 or wider, by name. The average has their precision.
    """

    def __init__(self, config: AverageConfig, trainable: Mapping[str, nn.Parameter]) -> None:
        assert all(parameter.dtype in (torch.float32, torch.float64) for parameter in trainable.values())
        self.config = config
        self.trainable = trainable
        self._count = 0
        self._kept: deque[Values] = deque()
        """The mean, or the samples of LAWA and RNA, the oldest first."""

    @property
    def ready(self) -> bool:
        """Whether anything was averaged yet."""
        return self._count > 0

    def update(self, step: int, *, before: float, after: float) -> None:
        """After an optimizer step: add its values as a sample where the configuration says so.

        Args:
            step: Counted from 1.
            before: Share of the run that was done before the step.
            after: Share that is done after it; 1 where it was the last.
        """
        config = self.config
        due = config.method == "ema" or schedules.due(config.every, step=step, before=before, after=after)
        if due and after >= config.begin:
            self._take()
            self._count += 1

    def values(self) -> Values:
        """The average, on the device where it is kept. Read it only, and only until the next update."""
        first, *others = self._kept
        if not others:
            return first
        if self.config.method == "rna":
            weights = coefficients(self._kept, ridge=self.config.ridge)
            weighed = [each for each in zip(weights, self._kept, strict=True) if each[0]]
            zeros = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self._kept[-1].items()}
            return {
                name: sum((weight * sample[name].double() for weight, sample in weighed), zero).to(first[name].dtype)
                for name, zero in zeros.items()
            }
        mean = {name: value.clone() for name, value in first.items()}
        for done, sample in enumerate(others, start=1):
            _swa(list(mean.values()), [sample[name] for name in mean], done)
        return mean

    def ship(self) -> None:
        """Put the average into the parameters, for good."""
        self._set(self.values())

    @contextmanager
    def applied(self, refresh: Callable[[], None] = lambda: None) -> Iterator[None]:
        """The parameters hold the average inside the block, and afterwards the bits that they held before.

        Args:
            refresh: Called when the parameters have changed: copies them to where they compute.
        """
        assert self.ready
        own = self._copies()
        try:
            self._set(self.values())
            refresh()
            yield
        finally:
            self._set(own)
            refresh()

    def state(self) -> Values:
        """State for a checkpoint: the number of samples so far (0-d, int64), and the values that are kept."""
        kept = {f"{slot}|{name}": value for slot, values in enumerate(self._kept) for name, value in values.items()}
        return {"count": torch.tensor(self._count), **kept}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state`."""
        slots: dict[int, Values] = {}
        for key, value in state.items():
            slot, _, name = key.partition("|")
            if key != "count":
                slots.setdefault(int(slot), {})[name] = value.to(self._place(name), copy=True)
        self._count = int(state["count"])
        self._kept = deque(slots[slot] for slot in sorted(slots))

    @torch.no_grad()
    def _take(self) -> None:
        """Add the values of the parameters as a sample; there were `_count` before."""
        config, done = self.config, self._count
        if not self._kept or (config.method in _KEEPING and done < config.k):
            self._kept.append(self._copies())
        elif config.method in _KEEPING:
            # The newest is written over the oldest: there are never more than k copies.
            self._kept.rotate(-1)
            for name, value in self._kept[-1].items():
                value.copy_(self.trainable[name])
        else:
            (mean,) = self._kept
            samples = [self.trainable[name].detach().to(self._place(name)) for name in mean]
            decay = min(config.decay, (1 + done) / (10 + done))
            move = _swa if config.method == "swa" else swa_utils.get_ema_multi_avg_fn(decay)
            move(list(mean.values()), samples, done)

    def _place(self, name: str) -> torch.device:
        """Where a parameter's average is kept."""
        return torch.device("cpu") if self.config.device == "cpu" else self.trainable[name].device

    def _copies(self) -> Values:
        """Copies of the parameters where averages are kept."""
        return {name: each.detach().to(self._place(name), copy=True) for name, each in self.trainable.items()}

    @torch.no_grad()
    def _set(self, values: Values) -> None:
        for name, parameter in self.trainable.items():
            parameter.copy_(values[name])


def coefficients(samples: Sequence[Mapping[str, Tensor]], *, ridge: float) -> list[float]:
    """RNA's weights of the samples x_1 to x_K, oldest first, which add up to 1; only the last where nothing moved.

    Scieur, d'Aspremont and Bach 2016 (arXiv:1606.04133, algorithm 2) solve, for the steps r_i = x_(i+1) - x_i,
    (R'R / |R'R| + ridge I) z = 1, and take c = z / sum z: of all weights with sum 1 those of the smallest step R c, and
    with `ridge` of small weights too. What c weighs here is where the steps lead, x_2 to x_K. Weights may be negative;
    for a large `ridge` all are alike, and it is LAWA over K - 1 samples.

    Args:
        samples: Values by name, on one device.
    """
    steps = len(samples) - 1

    def step(number: int, name: str) -> Tensor:
        return samples[number + 1][name].double() - samples[number][name]

    products = torch.empty(steps, steps, dtype=torch.float64)
    for row in range(steps):
        for column in range(row + 1):
            product = sum(float(step(row, name).mul_(step(column, name)).sum()) for name in samples[0])
            products[row, column] = products[column, row] = product
    size = torch.linalg.matrix_norm(products, ord=2) if steps else torch.zeros(())
    if not size > 0:
        return [0.0] * steps + [1.0]
    z = torch.linalg.solve(products / size + ridge * torch.eye(steps, dtype=torch.float64), torch.ones(steps).double())
    return [0.0, *(z / z.sum()).tolist()]
