"""One adapter's training: data order, optimizer, schedule, early stop, checkpoints. Who computes is not its matter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.adapters.method import TrainHook
from workbench.config import RunConfig
from workbench.data.batching import Examples, Indices, global_batch, steps_per_epoch
from workbench.errors import ResumeError, TrainingError
from workbench.runs.run_directory import Run
from workbench.runs.timing import Timer
from workbench.training import checkpoints
from workbench.training.checkpoints import Progress
from workbench.training.freezing.state_eviction import EvictedStates
from workbench.training.limits import limits
from workbench.training.loss_guard import LossGuard
from workbench.training.optim import optimizer_states, optimizers, schedules, weight_averaging
from workbench.training.optim.weight_averaging import WeightAverage
from workbench.training.optimizer_step import LocalStep, OptimizerStep

PACE_STEPS = 3
"""After so many steps the pace of a run tells roughly how many it will do."""


@dataclass(frozen=True)
class TrainableValues:
    """The values that train, in float32 or wider, and where in the model they belong."""

    values: Mapping[str, nn.Parameter]
    """By name."""
    layers: Mapping[str, int]
    """Layer of the backbone of each: 0 the embeddings, 1 to n the blocks, n + 1 what comes after them."""
    blocks: int
    """n."""
    fresh: Collection[str]
    """Names of those that start at random, such as a classification head."""
    refresh: Callable[[], None]
    """Copies the values to where they compute."""
    stepper: Callable[[torch.optim.Optimizer, Mapping[str, nn.Parameter]], OptimizerStep] = LocalStep
    """Who takes the steps of their optimizer."""


@dataclass(frozen=True)
class TrainTask:
    """Data, settings and limits of one adapter's training."""

    train: Examples
    held_out_loss: Callable[[], float]
    config: RunConfig
    run: Run
    """Where its metrics and checkpoints go, as if it trained alone."""
    timer: Timer | None = None
    """Ends it in time, where wall clock limits the run."""


class AdapterTrainer:
    """An adapter that trains. Its state is a function of its course and of the steps it has done, of nothing else.

    Args:
        beside: What else goes on in training, by the name of its file in a checkpoint.
    """

    def __init__(
        self, course: TrainTask, trained: TrainableValues, *, beside: Mapping[str, TrainHook] | None = None
    ) -> None:
        self.course = course
        self.trainable = trainable = trained.values
        config = course.config
        self._per_epoch = steps_per_epoch(len(course.train), config.batch.size)
        self._limits = limits(config, len(course.train), course.timer)
        self._refresh = trained.refresh
        self.progress = Progress()
        self.error: TrainingError | None = None
        """Why it ended before its time."""
        groups = optimizers.groups(trainable, config, layers=trained.layers, blocks=trained.blocks, fresh=trained.fresh)
        self._optimizer = optimizers.build(groups, config)
        self._stepper = trained.stepper(self._optimizer, trainable)
        self._evicted = EvictedStates(course.run.path / "evicted")
        self._rates: Sequence[float] | None = None
        self._frozen: Collection[str] | None = None
        self._average = weight_averaging.average(config.average, trainable)
        self._companions = dict(beside or {})
        if (own := config.adapter.companion(trainable, steps=self._limits.steps)) is not None:
            self._companions["companion"] = own
        self._diagnosis = LossGuard(course.train, kept=course.run.checkpoints, learning_rate=config.train.learning_rate)
        self._before = 0.0
        """Share of the run that was done before the last step."""
        self._saved_step: int | None = None

    def missing_state_bytes(self) -> int:
        """Bytes that the optimizer will add in its first step, where it takes one here; 0 after that."""
        if self._optimizer.state or not isinstance(self._stepper, LocalStep):
            return 0
        return optimizers.state_bytes(self._optimizer.param_groups, self.course.config)

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run; where tokens or wall clock may end it, as many as it looks like now."""
        step, share = self.progress.step, self.progress.share
        return round(step / share) if share else self._limits.steps or 1

    def passes(self) -> float | None:
        """How often the whole run computes each row, on average; None while only wall clock tells, and no pace yet."""
        ends, train = self._limits, self.course.train
        if ends.steps is None and ends.tokens is None:
            known = self.progress.step >= PACE_STEPS
            return self.total * self.course.config.batch.size / len(train) if known else None
        steps = math.inf if ends.steps is None else ends.steps * self.course.config.batch.size / len(train)
        tokens = math.inf if ends.tokens is None else ends.tokens / float(train.lengths.sum())
        return min(steps, tokens)

    @property
    def place(self) -> str:
        """How far it is, in words."""
        return f"step {self.progress.step} of {self.total}"

    @property
    def live(self) -> bool:
        """Whether it has steps to do."""
        return self.error is None and not self._is_end(self.progress)

    @property
    def due(self) -> bool:
        """Whether its state is to be saved: at the steps that the configuration says, and where it ends."""
        return self._is_due(self.course.config.save.every) or not self.live

    @property
    def epoch(self) -> int:
        """The pass over its data that its next step belongs to, from 0."""
        return self.progress.step // self._per_epoch

    def batch(self) -> Indices:
        """Rows of its next step."""
        return self._rows(self.progress.step)

    def later(self) -> tuple[Indices, int]:
        """Rows of the step after that, and the pass over the data that it belongs to."""
        step = self.progress.step + 1
        return self._rows(step), step // self._per_epoch

    def _rows(self, step: int) -> Indices:
        config, train = self.course.config, self.course.train
        draws = global_batch(step, rows=len(train), size=config.batch.size, seed=config.seed)
        return train.drawn(draws, epoch=step // self._per_epoch)

    def follow(self, frozen: Collection[str], rates: Sequence[float]) -> None:
        """From the next step on, these values do not train; each layer learns at its factor of the learning rate.

        What the optimizer remembers of frozen values leaves the memory, and comes back when they train again.
        """
        self._rates = rates
        if frozen == self._frozen:
            return
        self._frozen = frozen
        keep = self.course.config.freeze.thaws
        for name, parameter in self.trainable.items():
            if name in frozen:
                state = optimizer_states.state_tensors(self._optimizer, {name: parameter})
                if self._optimizer.state.pop(parameter, None) and keep:
                    # What its group counts goes on without it.
                    self._evicted.put(name, {key: each for key, each in state.items() if key.startswith(f"{name}|")})
            elif name in self._evicted:
                optimizer_states.load_state(self._optimizer, {name: parameter}, self._evicted.pop(name))

    def update(self, loss: float, rows: Indices) -> dict[str, Any] | None:
        """Clip, check, and take the optimizer step; the gradients of `rows` are there, `loss` is their mean.

        Returns:
            The step's line of metrics.jsonl; None where the loss exploded, which `error` then says.
        """
        config, before = self.course.config, self.progress
        for companion in self._companions.values():
            companion.on_gradients()
        optimizers.penalise(self.trainable, config)
        tokens = int(self.course.train.lengths[rows].sum())
        rate = self._set_rate(self._share(0.5, tokens))
        norm, self.error = self._stepper.step(
            config.train.max_grad_norm, lambda norm: self._diagnosis(loss, norm, rows, step=before.step)
        )
        if self.error is None:
            for companion in self._companions.values():
                companion.after_step(before.step + 1)
        self._stepper.clear()
        if self.error is not None:
            return None
        self._before = before.share
        self.progress = replace(
            before, step=before.step + 1, tokens=before.tokens + tokens, share=self._share(1.0, tokens)
        )
        return {
            "step": self.progress.step,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "tokens": tokens,
            "supervised_tokens": self.course.train.supervised[rows].sum().item(),
        }

    def settle(self, record: dict[str, Any], *, began: float) -> dict[str, Any]:
        """After a step: evaluate where it is time, and log. Returns the record with what was found.

        Args:
            began: What `time.monotonic` would have said at its start, had nothing interrupted it.
        """
        self._end_in_time()
        if self._average is not None:
            self._average.update(self.progress.step, before=self._before, after=self.progress.share)
        if self._is_due(self.course.config.evaluate.every) and self._affords_evaluation():
            record = {**record, **self._evaluate()}
            self._end_in_time()
        self.progress = replace(self.progress, elapsed_s=round(time.monotonic() - began, 3))
        record = {**record, "elapsed_s": self.progress.elapsed_s}
        self.course.run.log(record)
        return record

    def save(self, *, keep: int) -> None:
        """Write its state as the newest of `keep` checkpoints; where it failed, its manifest says why."""
        run = self.course.run
        # A failed member may stand where it saved before: replacing that is a moment in which there is none.
        if self._saved_step != self.progress.step:
            state = self._state()  # all processes that hold a share of it give it
            if run.ranks.first:
                checkpoints.save(run.checkpoints, state, self.progress, keep=keep)
            self._saved_step = self.progress.step
        if self.error is not None:
            run.note(status="failed", reason=str(self.error), failed_step=self.progress.step + 1)
        if not self.live:
            self._evicted.clear()

    @contextmanager
    def shipping(self, say: Callable[[str], None]) -> Iterator[None]:
        """Inside the block it holds the values that are shipped: of the best or the last step, or their average."""
        with optimizer_states.evaluating(self._optimizer, refresh=self._refresh):
            if said := self._choose():
                say(said)
            yield

    def _choose(self) -> str | None:
        """Hold what is shipped; returns which that is, and None where only the last step's values can be."""
        progress = self.progress
        if self.course.config.save.ship == "best":
            self.course.run.ranks.wait()  # until it is written
            self._stepper.load(checkpoints.read_tensors(self.course.run.best, "trainable"))
            which = "the average at step" if progress.best_averaged else "step"
            return f"Shipping {which} {progress.best_step}, which has the lowest held-out loss."
        if self._average is None:
            return None
        if not progress.averaged:
            return "Shipping the values of the last step: their held-out loss is not above that of their average."
        self._stepper.load(self._average.values())
        return "Shipping the average: its held-out loss is lower than that of the last step's values."

    def reaches(self, step: float) -> float:
        """The last step up to `step` that its run can go on from; `step` itself where it had ended by then."""
        path, _ = checkpoints.newest(self.course.run.checkpoints, at_most=step)
        progress = Progress() if path is None else checkpoints.read_progress(path)
        return step if self._failed_by(step) or self._is_end(progress) else progress.step

    def resume(self, *, at_most: float = math.inf) -> list[str]:
        """Continue from its run's newest intact checkpoint of step `at_most` or before, and forget what came after.

        A failure by step `at_most` stays one. Returns what a person should read.
        """
        run = self.course.run
        if not run.resumed:
            return []
        path, damaged = run.ranks.agreed(checkpoints.newest(run.checkpoints, at_most=at_most))
        if path is not None:
            self._read(path)
        if run.ranks.first:
            checkpoints.drop_after(run.checkpoints, self.progress.step)
            run.rewind(self.progress.step)
        self._diagnosis.recall(run.ranks.agreed([record["loss"] for record in run.metrics()]))
        said = [f"{sentence} Using the one before it." for sentence in damaged]
        if self._failed_by(at_most):
            self.error = TrainingError(run.manifest["reason"])
            return [*said, f"Not resumed, because it failed: {self.error}"]
        if run.manifest.get("failed_step") is not None:
            run.note(status="running", reason=None, failed_step=None)
        return [*said, f"Resuming after {self.place}."]

    def _is_end(self, progress: Progress) -> bool:
        patience = self.course.config.evaluate.patience
        tired = patience is not None and progress.evaluations_without_gain >= patience
        return tired or progress.share >= 1

    def _failed_by(self, step: float) -> bool:
        failed = self.course.run.manifest.get("failed_step")
        return failed is not None and failed <= step

    def _is_due(self, every: int | float | None) -> bool:
        """Whether something periodic happens after the step that was just done."""
        return schedules.due(every, step=self.progress.step, before=self._before, after=self.progress.share)

    def _end_in_time(self) -> None:
        timer = self.course.timer
        if timer is not None and not timer.fits_another():
            self.progress = replace(self.progress, share=1.0)

    def _affords_evaluation(self) -> bool:
        """Whether there is time to evaluate and to train on; after the last step always."""
        timer = self.course.timer
        return timer is None or self.progress.share >= 1 or timer.affords("evaluation")

    def _share(self, part: float, tokens: int) -> float:
        """Share of the run that is done when a part of the step is, whose gradients are there and whose update is not.

        Args:
            tokens: Of the step.
        """
        done = self.progress
        share = self._limits.share(steps=done.step + part, tokens=done.tokens + part * tokens, ahead=part - 1)
        return max(done.share, share)

    def _set_rate(self, share: float) -> float:
        """The learning rate at a share of the run, given to the optimizer."""
        rate = optimizers.peak_rate(self.course.config) * schedules.factor(share, self.course.config.schedule)
        for group in self._optimizer.param_groups:
            own = 1.0 if self._rates is None or group["layer"] is None else self._rates[group["layer"]]
            group["lr"] = rate * group["rate_factor"] * own
        return rate

    def _evaluate(self) -> dict[str, float]:
        """Held-out loss of the values that train, and of their average; the lower one counts."""
        found, average = {"held_out_loss": self._held_out_loss()}, self._average
        if average is not None and average.ready:
            with self._averaged(average):
                found["averaged_held_out_loss"] = self.course.held_out_loss()
        loss = min(found.values())
        before = replace(self.progress, averaged=loss < found["held_out_loss"])
        if before.best_loss is None or loss < before.best_loss:
            self.progress = replace(
                before,
                best_loss=loss,
                best_step=before.step,
                best_averaged=before.averaged,
                evaluations_without_gain=0,
            )
            with optimizer_states.evaluating(self._optimizer, refresh=self._refresh):
                values = average.values() if average is not None and before.averaged else self._stepper.values()
                if self.course.run.ranks.first:
                    checkpoints.write(self.course.run.best, {"trainable": values}, self.progress)
        else:
            self.progress = replace(before, evaluations_without_gain=before.evaluations_without_gain + 1)
        return found

    def _held_out_loss(self) -> float:
        with optimizer_states.evaluating(self._optimizer, refresh=self._refresh):
            return self.course.held_out_loss()

    @contextmanager
    def _averaged(self, average: WeightAverage) -> Iterator[None]:
        """Load the average into the computing weights inside the block."""
        try:
            with average.applied():
                self._refresh()
                yield
        finally:
            self._refresh()

    def _state(self) -> checkpoints.Tensors:
        tensors: dict[str, Mapping[str, Tensor]] = {
            "trainable": self._stepper.values(),
            "optimizer": {**self._stepper.states(), **self._evicted.state()},
            **{name: companion.state() for name, companion in self._companions.items()},
        }
        if self._average is not None:
            tensors["average"] = self._average.state()
        return tensors

    def _read(self, path: Path) -> None:
        """Set everything to what `_state` gave."""
        saved = checkpoints.read_tensors(path, "trainable")
        if saved.keys() != self.trainable.keys():
            raise ResumeError(f"{path}: its tensors are not those of this adapter. Start a new run.")
        self._stepper.load(saved, checkpoints.read_tensors(path, "optimizer"))
        self._evicted.clear()
        for name, companion in self._companions.items():
            companion.load(checkpoints.read_tensors(path, name))
        if self._average is not None:
            self._average.load(checkpoints.read_tensors(path, "average"))
        self.progress = checkpoints.read_progress(path)
        self._saved_step = self.progress.step
