"""Training of one adapter: order of rows, optimizer, schedule, evaluations, early stopping, checkpoints.

Gradients are computed elsewhere, by `Trainer` for one adapter or by `BankTrainer` for several.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from workbench.adapters.method import TrainHook
from workbench.config import TrainingSections
from workbench.data.batching import Examples, Indices
from workbench.data.row_order import RowOrder
from workbench.errors import ResumeError, TrainingError
from workbench.models import backbones
from workbench.runs import metrics_log, run_directory
from workbench.runs.deadline import Deadline
from workbench.runs.run_directory import Run
from workbench.training import best_checkpoint, checkpoints, determinism, early_stopping
from workbench.training.checkpoint_parts import Background, Held, SavedTensors
from workbench.training.checkpoints import Progress
from workbench.training.distributed import sharding
from workbench.training.distributed.sharding import Sharded
from workbench.training.freezing.freezer import Freezer
from workbench.training.loss_guard import LossGuard, comparable
from workbench.training.master_weights import MasterWeights
from workbench.training.optim import optimizer_states, optimizers, schedules
from workbench.training.optim.optimizer_states import EvictedStates, LocalStep, OptimizerStep
from workbench.training.optim.schedules import limits
from workbench.training.optim.weight_averaging import WeightAverage
from workbench.training.sampling.loss_based import ReferenceLosses
from workbench.training.sampling.row_orders import row_order
from workbench.training.sampling.sampler import Sampler


@dataclass(frozen=True)
class TrainableValues:
    """The values that train, in float32 or wider, and their layers."""

    values: Mapping[str, nn.Parameter]
    """By name in the model."""
    layers: Mapping[str, int]
    """Layer of each: 0 the embeddings, 1 to n the blocks, n + 1 what comes after them."""
    blocks: int
    """Transformer blocks of the backbone, n."""
    fresh: Collection[str]
    """Names of values that start at random, such as those of a classification head."""
    refresh: Callable[[], None]
    """Copies the values into the parameters that compute."""
    optimizer_step: Callable[[torch.optim.Optimizer, Mapping[str, nn.Parameter]], OptimizerStep] = LocalStep
    """Takes the optimizer's steps, locally or on shards."""


def trained(masters: MasterWeights | Sharded, freezer: Freezer) -> TrainableValues:
    """The trainable values of a model, with the layer of each."""
    return TrainableValues(
        masters.named(),
        layers=freezer.layers,
        blocks=len(freezer.blocks),
        fresh=freezer.fresh,
        refresh=masters.refresh,
        optimizer_step=masters.adopt if isinstance(masters, Sharded) else LocalStep,
    )


PACE_STEPS = 3
"""Steps after which the pace of a run gives a rough estimate of their total number."""


@dataclass(frozen=True)
class TrainTask:
    """Data, settings and limits of one adapter's training."""

    train: Examples
    held_out_loss: Callable[[], float]
    config: TrainingSections
    run: Run
    """Directory of its metrics and checkpoints, as if the adapter trained alone."""
    held_out_parts: dict[str, float] = field(default_factory=dict)
    """Further figures of the last call of `held_out_loss`, by their names in metrics.jsonl."""
    reference: ReferenceLosses | None = None
    """Losses that `data.sampling.by=tokens` compares with."""
    evaluation_asked: Callable[[], bool] = lambda: False
    """Whether the user asked for an evaluation since the last step; the same in all processes."""


class AdapterTrainer:
    """An adapter that trains. Its state depends only on its task and on the number of steps done.

    Args:
        hooks: Further parts of training that have a state, by the name of their file in a checkpoint.
    """

    def __init__(
        self, task: TrainTask, trained: TrainableValues, *, hooks: Mapping[str, TrainHook] | None = None
    ) -> None:
        self.task = task
        self.trainable = trainable = trained.values
        config = task.config
        self._limits = limits(config, len(task.train), task.run.deadline)
        self.order = row_order(task.train, config, self._limits.steps, task.run.ranks, task.reference)
        self._refresh = trained.refresh
        self.progress = Progress()
        self._view = lru_cache(maxsize=2)(lambda **when: task.train.seen(**when, steps=self._limits.steps))
        """The training rows as a step reads them, cached for the present and the next step."""
        self.error: TrainingError | None = None
        """Why training failed; None unless it has."""
        self.until = 1.0
        """Share of the run at which training pauses; another process or bank continues from its checkpoint."""
        groups = optimizers.groups(trainable, config, layers=trained.layers, blocks=trained.blocks, fresh=trained.fresh)
        self.optimizer = optimizers.build(groups, config)
        self.start = optimizers.starting_values(trainable, config)
        self._optimizer_step = trained.optimizer_step(self.optimizer, trainable)
        self._evicted = EvictedStates(task.run.path / "evicted")
        self._rates: Sequence[float] | None = None
        self._frozen: Collection[str] | None = None
        averaged = config.average.method != "none"
        self._average = WeightAverage(config.average, trainable) if averaged else None
        self._hooks = dict(hooks or {})
        if isinstance(self.order, Sampler):
            self._hooks["sampling"] = self.order
        if (own := config.adapter.train_hook(trainable, steps=self._limits.steps)) is not None:
            self._hooks["method"] = own
        self.loss_guard = LossGuard(
            task.train, checkpoints_folder=task.run.checkpoints, learning_rate=config.train.learning_rate
        )
        self._before = self._rate = 0.0
        """Share of the run that was done before the last step, and the learning rate of the present one."""
        self._saved_step: int | None = None
        self._background = Background() if config.save.asynchronous else None

    def missing_state_bytes(self) -> int:
        """Bytes of state that the optimizer will allocate on this device in its first step; 0 after that."""
        if self.optimizer.state:
            return 0
        kind, groups = backbones.device().type, self.optimizer.param_groups
        own = [[sharding.local(each) for each in group["params"]] for group in groups]
        here = [[each for each in parameters if each.device.type == kind] for parameters in own]
        parts = [{**group, "params": parameters} for group, parameters in zip(groups, here, strict=True) if parameters]
        return optimizers.state_bytes(parts, self.task.config) if parts else 0

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run; an estimate where tokens or wall clock may end it."""
        step, share = self.progress.step, self.progress.share
        return round(step / share) if share else self._limits.steps or 1

    def passes(self) -> float | None:
        """Mean number of times that each row is computed; None at the start of a run that only `budget.time` ends."""
        ends, train = self._limits, self.task.train
        if ends.steps is None and ends.tokens is None:
            known = self.progress.step >= PACE_STEPS
            return self.total * self.task.config.batch.size / len(train) if known else None
        steps = math.inf if ends.steps is None else ends.steps * self.task.config.batch.size / len(train)
        tokens = math.inf if ends.tokens is None else ends.tokens / (len(train) * float(train.lengths.mean()))
        return min(steps, tokens)

    @property
    def place(self) -> str:
        """How far training has come, in words."""
        return f"step {self.progress.step} of {self.total}"

    @property
    def live(self) -> bool:
        """Whether there are steps left."""
        return self.error is None and not self._is_end(self.progress)

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due: as often as `save.every` says, and at the end."""
        return self._is_due(self.task.config.save.every) or not self.live

    @property
    def epoch(self) -> int:
        """The pass over the data that the next step belongs to, from 0."""
        return self.order.epoch(self.progress.step)

    @property
    def even_order(self) -> RowOrder:
        """The order of rows without a sampler, which is known beforehand."""
        return self.order.evenly if isinstance(self.order, Sampler) else self.order

    def batch(self) -> Indices:
        """Rows of the next step."""
        return self.order.rows(self.progress.step)

    def batch_after(self) -> tuple[Indices, int]:
        """Rows of the step after the next, as far as they are known, and its pass over the data."""
        step = self.progress.step + 1
        return self.order.ahead(step), self.order.epoch(step)

    @property
    def seen(self) -> Examples:
        """The training rows as the next step reads them."""
        return self._view(epoch=self.epoch, step=self.progress.step)

    def seen_after(self) -> Examples:
        """The training rows as the step after the next reads them."""
        step = self.progress.step + 1
        return self._view(epoch=self.order.epoch(step), step=step)

    def follow(self, frozen: Collection[str], rates: Sequence[float]) -> None:
        """Freeze these values from the next step on, and set each layer's factor of the learning rate.

        Optimizer states of frozen values move to disk until they train again, or are dropped.
        """
        self._rates = rates
        if frozen == self._frozen:
            return
        self._frozen = frozen
        keep = self.task.config.freeze.thaws and not self.task.config.freeze.forgets
        for name, parameter in self.trainable.items():
            if name in frozen:
                state = optimizer_states.state_tensors(self.optimizer, {name: parameter})
                if self.optimizer.state.pop(parameter, None) and keep:
                    # The step count of the parameter group continues.
                    self._evicted.put(name, {key: each for key, each in state.items() if key.startswith(f"{name}|")})
            elif name in self._evicted:
                optimizer_states.load_state(self.optimizer, {name: parameter}, self._evicted.pop(name))

    def clip(self, rows: Indices) -> Tensor:
        """Set the learning rate and clip the gradients of `rows`; returns their norm before clipping, a scalar."""
        for hook in self._hooks.values():
            hook.on_gradients()
        optimizers.penalise(self.trainable, self.task.config, self.start)
        self._deadline.stepped()
        config = self.task.config
        rate = optimizers.peak_rate(config) * schedules.factor(
            self._share(0.5, int(self.seen.lengths[rows].sum())), config.schedule, drops=self.progress.drops
        )
        for group in self.optimizer.param_groups:
            own = 1.0 if self._rates is None or group["layer"] is None else self._rates[group["layer"]]
            group["lr"] = rate * group["rate_factor"] * own
        self._rate = rate
        return self._optimizer_step.clip(self.task.config.train.max_grad_norm)

    def update(self, loss: float, norm: float, rows: Indices) -> dict[str, Any] | None:
        """Check the mean loss of `rows` and the `norm` that `clip` returned, and take the optimizer step.

        Returns:
            The step's line of metrics.jsonl; None where the loss exploded, with the reason in `error`.
        """
        before, seen = self.progress, self.seen
        tokens = int(seen.lengths[rows].sum())
        supervised = seen.supervised[rows].sum().item()
        self.error = self.loss_guard(loss, norm, rows, tokens=supervised, step=before.step)
        if self.error is None:
            self._optimizer_step.take()
            for hook in self._hooks.values():
                hook.after_step(before.step + 1)
        self._optimizer_step.clear()
        if self.error is not None:
            return None
        self._before, share = before.share, self._share(1.0, tokens)
        self.progress = replace(before, step=before.step + 1, tokens=before.tokens + tokens, share=share)
        return {
            "step": self.progress.step,
            "loss": loss,
            "learning_rate": self._rate,
            "grad_norm": norm,
            "tokens": tokens,
            "supervised_tokens": supervised,
            **self.even_order.metrics(before.step),
        }

    def finish_step(self, record: dict[str, Any], *, began: float) -> dict[str, Any]:
        """After a step: evaluate where that is due or asked for, and log; returns the record with the held-out loss.

        An evaluation that the user asked for is marked, and affects neither the best checkpoint nor early stopping.

        Args:
            began: `time.monotonic` of the start, moved forward by the time between processes.
        """
        self._end_in_time()
        if self._average is not None:
            self._average.update(self.progress.step, before=self._before, after=self.progress.share)
        asked, due = self.task.evaluation_asked(), self._is_due(self.task.config.evaluate.every)
        if (due or asked) and (self.progress.share >= 1 or self._deadline.affords("evaluation", "samples")):
            losses, average = {"held_out_loss": self.judged(self.task.held_out_loss)}, self._average
            parts = dict(self.task.held_out_parts)
            judged = {False: early_stopping.criterion(losses | parts, self.task.config.evaluate)}
            if average is not None and average.ready:
                with average.applied(self._refresh):
                    losses["averaged_held_out_loss"] = loss = self.task.held_out_loss()
                line = {"held_out_loss": loss, **self.task.held_out_parts}
                judged[True] = early_stopping.criterion(line, self.task.config.evaluate)
            if due:
                self._judge(judged)
            record = {**record, **losses, **parts, **({} if due else {"asked": 1})}
            self._end_in_time()
        self.progress = replace(self.progress, elapsed_s=round(time.monotonic() - began, 3))
        metrics_log.append(
            self.task.run.path / metrics_log.METRICS, [record := {**record, "elapsed_s": self.progress.elapsed_s}]
        )
        return record

    def judged(self, held_out_loss: Callable[[], float]) -> float:
        """A held-out loss of the values that the optimizer evaluates, such as an average of them."""
        with optimizer_states.evaluating(self.optimizer, refresh=self._refresh):
            return held_out_loss()

    def save(self, *, keep: int, last: bool = False) -> None:
        """Write the state as the newest of `keep` checkpoints, and a failure into the manifest.

        Args:
            last: Nothing is trained after it: do not leave it to the background.
        """
        run = self.task.run
        # A failed member may be at the step of its last checkpoint: replacing it would leave a moment without one.
        if self._saved_step != self.progress.step:
            of_hooks = {name: hook.state() for name, hook in self._hooks.items()}
            state: dict[str, Mapping[str, Held]] = {
                "trainable": self._optimizer_step.values(),
                "optimizer": {**self._optimizer_step.states(), **self._evicted.state()},
                **(of_hooks if run.ranks.first else {}),
            }
            if self._average is not None:
                state["average"] = self._average.state()
            checkpoints.save(
                run.checkpoints, state, self.progress, keep=keep, ranks=run.ranks, background=self._background
            )
            self._saved_step = self.progress.step
        if self.error is not None:
            run.note(status="failed", reason=str(self.error), failed_step=self.progress.step + 1)
        if last or not self.live:
            self.wait_for_checkpoint()
        if not self.live:
            self._evicted.clear()

    def wait_for_checkpoint(self) -> None:
        """Wait for a checkpoint that is written in the background."""
        if self._background is not None:
            self._background.wait()

    @contextmanager
    def final_values(self, say: Callable[[str], None]) -> Iterator[None]:
        """Inside the block the parameters hold the values to ship: of the best or the last step, or their average."""
        with optimizer_states.evaluating(self.optimizer, refresh=self._refresh):
            task = self.task
            source, sentence = best_checkpoint.shipped(task.run, task.config, self.progress, self._average)
            if isinstance(source, SavedTensors):
                self._optimizer_step.read(source)
            elif source is not None:
                source.ship()
            if sentence is not None:
                say(sentence)
            yield

    def reaches(self, step: float) -> float:
        """The last step up to `step` that can be resumed; `step` itself if training had ended by then."""
        path, _ = checkpoints.newest(self.task.run.checkpoints, at_most=step, ranks=self.task.run.ranks)
        progress = Progress() if path is None else checkpoints.read_progress(path)
        return step if self._failed_by(step) or self._is_end(progress) else progress.step

    def resume(self, *, at_most: float = math.inf) -> list[str]:
        """Continue from the newest intact checkpoint up to step `at_most`, and delete later ones.

        A failure by step `at_most` remains a failure. Returns sentences for the user.
        """
        run = self.task.run
        if not run.resumed:
            return []
        path, damaged = checkpoints.newest(run.checkpoints, at_most=at_most, ranks=run.ranks)
        if path is not None:
            saved = SavedTensors(path)
            if saved.stored("trainable").keys() != self.trainable.keys():
                raise ResumeError(f"{path}: its tensors are not those of this adapter. Start a new run.")
            self._optimizer_step.read(saved)
            self._evicted.clear()
            for name, hook in self._hooks.items():
                hook.load(saved.whole(name))
            if self._average is not None:
                self._average.load(saved.whole("average"))
            self.progress = checkpoints.read_progress(path)
            self._saved_step = self.progress.step
        if run.ranks.first:
            checkpoints.drop_after(run.checkpoints, self.progress.step)
            metrics_log.rewind(run.path, self.progress.step)
        self.loss_guard.load(run.ranks.agreed(comparable(metrics_log.read(run.path))))
        sentences = [f"{sentence} Using the one before it." for sentence in damaged]
        if self._failed_by(at_most):
            self.error = TrainingError(run.manifest["reason"])
            return [*sentences, f"Not resumed, because it failed: {self.error}"]
        if run.manifest.get("failed_step") is not None:
            run.note(status="running", reason=None, failed_step=None)
        on = dict(before=run.hardware_before, here=run_directory.hardware())
        how = determinism.of_resumed(self.task.config, backbones.device(), **on)
        return [*sentences, f"Resuming after {self.place}.{how}"]

    def _is_end(self, progress: Progress) -> bool:
        patience = self.task.config.evaluate.patience
        return early_stopping.out_of_patience(progress, patience) or progress.share >= self.until

    def _failed_by(self, step: float) -> bool:
        failed = self.task.run.manifest.get("failed_step")
        return failed is not None and failed <= step

    def _is_due(self, every: int | float | None) -> bool:
        return schedules.due(every, step=self.progress.step, before=self._before, after=self.progress.share)

    def _end_in_time(self) -> None:
        if not self._deadline.fits_another():
            self.progress = replace(self.progress, share=1.0)

    @property
    def _deadline(self) -> Deadline:
        return self.task.run.deadline

    def _share(self, part: float, tokens: int) -> float:
        """Share of the run that is done after this part of the present step.

        Args:
            tokens: Number of tokens in the step.
        """
        done = self.progress
        return self._limits.share(done.share, steps=done.step + part, tokens=done.tokens + part * tokens, part=part)

    def _judge(self, losses: Mapping[bool, float]) -> None:
        """Let the lowest loss, of the values or (True) of their average, decide about best checkpoint and stopping."""
        loss, average = min(losses.values()), self._average
        averaged, step = loss < losses[False], self.progress.step
        self.progress = early_stopping.evaluated(
            self.progress, loss, averaged=averaged, schedule=self.task.config.schedule
        )
        if self.progress.best_step == step:
            with optimizer_states.evaluating(self.optimizer, refresh=self._refresh):
                values = self._optimizer_step.values() if average is None or not averaged else average.values()
                best_checkpoint.write(self.task.run, values, self.progress)
