"""One adapter's training: data order, optimizer, schedule, early stop, checkpoints. Who computes is not its matter."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench import checkpoints, schedules
from workbench.checkpoints import Progress
from workbench.config import RunConfig
from workbench.data.batching import Examples, Indices, global_batch, steps_per_epoch
from workbench.errors import ResumeError, TrainingError
from workbench.limits import Timer, limits
from workbench.runs import Run


@dataclass(frozen=True)
class Course:
    """What one adapter learns, and how: everything about its training that is its own."""

    train: Examples
    held_out_loss: Callable[[], float]
    config: RunConfig
    run: Run
    """Where its metrics and checkpoints go, as if it trained alone."""
    timer: Timer | None = None
    """Ends it in time, where wall clock limits the run."""


class Member:
    """An adapter that trains. Its state is a function of its course and of the steps it has done, of nothing else.

    Args:
        trainable: The values that train, in float32 or wider, by name.
    """

    def __init__(self, course: Course, trainable: Mapping[str, nn.Parameter]) -> None:
        self.course = course
        self.trainable = trainable
        config = course.config
        self._per_epoch = steps_per_epoch(len(course.train), config.batch.size)
        self._limits = limits(config, len(course.train), course.timer)
        self.progress = Progress()
        self.error: TrainingError | None = None
        """Why it ended before its time."""
        self._optimizer = _optimizer(trainable, config)
        self._companion = config.adapter.companion(trainable, steps=self._limits.steps)
        self._before = 0.0
        """Share of the run that was done before the last step."""
        self._recent: deque[float] = deque(maxlen=20)
        self._saved_step: int | None = None

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run; where tokens or wall clock may end it, as many as it looks like now."""
        step, share = self.progress.step, self.progress.share
        return round(step / share) if share else self._limits.steps or 1

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

    @property
    def place(self) -> str:
        """How far it is, in words."""
        return f"step {self.progress.step} of {self.total}"

    def batch(self) -> Indices:
        """Rows of its next step."""
        config = self.course.config
        train, step = self.course.train, self.progress.step
        return train.drawn(
            global_batch(step, rows=len(train), size=config.batch.size, seed=config.seed), epoch=self.epoch
        )

    def update(self, loss: float) -> dict[str, Any] | None:
        """Clip, check, and take the optimizer step; the gradients are there, `loss` is the mean of the step's rows.

        Returns:
            The step's line of metrics.jsonl; None where the loss exploded, which `error` then says.
        """
        config, before, rows = self.course.config, self.progress, self.batch()
        if self._companion is not None:
            self._companion.penalty().backward()
        norm = float(nn.utils.clip_grad_norm_(list(self.trainable.values()), config.train.max_grad_norm))
        self.error = self._diagnosis(loss, norm, rows)
        if self.error is not None:
            self._optimizer.zero_grad(set_to_none=True)
            return None
        tokens = int(self.course.train.lengths[rows].sum())
        rate = config.train.learning_rate * schedules.factor(self._share(0.5, tokens), config.schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["rate_factor"]
        self._optimizer.step()
        if self._companion is not None:
            self._companion.after_step(before.step + 1)
        self._optimizer.zero_grad(set_to_none=True)
        self._recent.append(loss)
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
        timer = self.course.timer
        if timer is not None and not timer.fits_another():
            self.progress = replace(self.progress, share=1.0)
        if self._is_due(self.course.config.evaluate.every):
            record = {**record, "held_out_loss": self._evaluate()}
            if timer is not None and not timer.fits_another():
                self.progress = replace(self.progress, share=1.0)
        self.progress = replace(self.progress, elapsed_s=round(time.monotonic() - began, 3))
        record = {**record, "elapsed_s": self.progress.elapsed_s}
        self.course.run.log(record)
        return record

    def save(self, *, keep: int) -> None:
        """Write its state as the newest of `keep` checkpoints; where it failed, its manifest says why."""
        run = self.course.run
        # A failed member may stand where it saved before: replacing that is a moment in which there is none.
        if self._saved_step != self.progress.step:
            checkpoints.save(run.checkpoints, self._state(), self.progress, keep=keep)
            self._saved_step = self.progress.step
        if self.error is not None:
            run.note(status="failed", reason=str(self.error), failed_step=self.progress.step + 1)

    def load_best(self) -> None:
        """Go back to the values with the lowest held-out loss."""
        self._load(checkpoints.read_tensors(self.course.run.best, "trainable"))

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
        path, damaged = checkpoints.newest(run.checkpoints, at_most=at_most)
        if path is not None:
            self._read(path)
        checkpoints.drop_after(run.checkpoints, self.progress.step)
        run.rewind(self.progress.step)
        self._recent.extend(record["loss"] for record in run.metrics())
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

    def _is_due(self, every: int | float | None) -> bool:
        """Whether something periodic happens after the step that was just done."""
        return schedules.due(every, step=self.progress.step, before=self._before, after=self.progress.share)

    def _share(self, part: float, tokens: int) -> float:
        """Share of the run that is done when a part of the step is, whose gradients are there and whose update is not.

        Args:
            tokens: Of the step.
        """
        done = self.progress
        share = self._limits.share(steps=done.step + part, tokens=done.tokens + part * tokens, ahead=part - 1)
        return max(done.share, share)

    def _failed_by(self, step: float) -> bool:
        failed = self.course.run.manifest.get("failed_step")
        return failed is not None and failed <= step

    def _diagnosis(self, loss: float, norm: float, rows: Indices) -> TrainingError | None:
        """What is wrong with a loss that is not finite, or is three times the recent ones and still rising."""
        usual = statistics.median(self._recent) if len(self._recent) >= 5 else float("inf")
        if not np.isfinite(loss):
            what = "The loss is not finite"
        elif not np.isfinite(norm):
            what = "The norm of the gradient is not finite"
        elif loss > max(3 * usual, 2.0):
            what = "The loss exploded"
        else:
            return None
        kept, _ = checkpoints.newest(self.course.run.checkpoints)
        places = ", ".join(self.course.train.place(int(row)) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
        return TrainingError(
            f"{what} at step {self.progress.step + 1}: loss {loss:.4g}, gradient norm {norm:.4g}, "
            f"median of the last steps {usual:.4g}.\n"
            f"  Rows of the batch: {places}\n"
            f"  Last good checkpoint: {kept or 'none yet'}\n"
            f"  Lower train.learning_rate (now {self.course.config.train.learning_rate:g}), raise schedule.warmup, "
            "or look at these rows."
        )

    def _evaluate(self) -> float:
        loss, before = self.course.held_out_loss(), self.progress
        if before.best_loss is None or loss < before.best_loss:
            self.progress = replace(before, best_loss=loss, best_step=before.step, evaluations_without_gain=0)
            checkpoints.write(self.course.run.best, {"trainable": self.trainable}, self.progress)
        else:
            self.progress = replace(before, evaluations_without_gain=before.evaluations_without_gain + 1)
        return loss

    def _state(self) -> checkpoints.Tensors:
        states = {
            f"{name}|{key}": value
            for name, parameter in self.trainable.items()
            for key, value in self._optimizer.state[parameter].items()
        }
        tensors: dict[str, Mapping[str, Tensor]] = {"trainable": self.trainable, "optimizer": states}
        if self._companion is not None:
            tensors["companion"] = self._companion.state()
        return tensors

    def _read(self, path: Path) -> None:
        """Set everything to what `_state` gave."""
        saved = checkpoints.read_tensors(path, "trainable")
        if saved.keys() != self.trainable.keys():
            raise ResumeError(f"{path}: its tensors are not those of this adapter. Start a new run.")
        self._load(saved)
        for key, value in checkpoints.read_tensors(path, "optimizer").items():
            name, _, kind = key.rpartition("|")
            self._optimizer.state[self.trainable[name]][kind] = value.to(self.trainable[name].device)
        if self._companion is not None:
            self._companion.load(checkpoints.read_tensors(path, "companion"))
        self.progress = checkpoints.read_progress(path)
        self._saved_step = self.progress.step

    @torch.no_grad()
    def _load(self, saved: Mapping[str, Tensor]) -> None:
        for name, parameter in self.trainable.items():
            parameter.copy_(saved[name])


def _optimizer(trainable: Mapping[str, nn.Parameter], config: RunConfig) -> torch.optim.AdamW:
    """AdamW with a group for each learning rate and weight decay that the method asks for; vectors never decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trainable.items():
        decays = parameter.ndim >= 2 and config.adapter.decays(name)
        key = (config.adapter.rate_factor(name), config.train.weight_decay if decays else 0.0)
        groups.setdefault(key, []).append(parameter)
    described = [
        {"params": group, "rate_factor": factor, "weight_decay": decay} for (factor, decay), group in groups.items()
    ]
    return torch.optim.AdamW(described, lr=config.train.learning_rate, fused=True)
