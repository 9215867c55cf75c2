"""The one training loop: global batch, micro-batches, loss, step, checkpoint."""

from __future__ import annotations

import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from workbench import budget, checkpoints, fused, schedules
from workbench.checkpoints import Progress
from workbench.config import RunConfig
from workbench.data.batching import Examples, Indices, MicroBatch, global_batch, micro_batches, steps_per_epoch
from workbench.errors import ResumeError, Stopped, TrainingError
from workbench.masters import Masters
from workbench.runs import Run

Loss = Callable[[MicroBatch, float], Tensor]
"""Summed loss of a micro-batch times a factor, as a scalar with a graph."""


class Watcher(Protocol):
    """Who is told about a run while it goes on."""

    def step(self, record: dict[str, Any], *, total: int) -> None:
        """A step was done; `record` is its line of metrics.jsonl."""

    def say(self, text: str) -> None:
        """Something that a person should read."""

    def stop_requested(self) -> bool:
        """Whether to finish the step, save, and end."""


@dataclass
class Fit:
    """One run of training; `fit` makes it and works it."""

    model: nn.Module
    train: Examples
    loss: Loss
    width: int
    """Hidden size of the backbone."""
    held_out_loss: Callable[[], float]
    config: RunConfig
    compute: torch.dtype
    run: Run
    watcher: Watcher

    def __post_init__(self) -> None:
        config = self.config
        self.device = next(self.model.parameters()).device
        self.masters = Masters(self.model, self.compute)
        self.optimizer = _optimizer(self.masters, config)
        per_epoch = steps_per_epoch(len(self.train), config.batch.size)
        self.steps = config.train.steps or max(1, round(config.train.epochs * per_epoch))
        self.companion = config.adapter.companion(self.masters.named(), steps=self.steps)
        self.evaluate_at = _moments(config.evaluate.every, self.steps)
        self.save_at = _moments(config.save.every, self.steps) | {self.steps}
        self.progress = Progress()
        self.recent: deque[float] = deque(maxlen=20)
        self.accelerator = Accelerator(
            cpu=self.device.type == "cpu", log_with=list(config.trackers) or None, project_dir=self.run.path
        )
        self.accelerator.init_trackers(self.run.path.name)

    def work(self) -> Progress:
        """Train to the end; raises Stopped after a checkpoint when the watcher asks for it."""
        self._resume()
        self.tokens = self._prepare()
        began = time.monotonic() - self.progress.elapsed_s
        while self.progress.step < self.steps and not self._patience_is_over():
            record = self._step_that_fits(self.progress.step)
            self.progress = replace(
                self.progress, step=self.progress.step + 1, elapsed_s=round(time.monotonic() - began, 3)
            )
            if self.progress.step in self.evaluate_at:
                record["held_out_loss"] = self._evaluate()
            record["elapsed_s"] = round(time.monotonic() - began, 3)
            self.run.log(record)
            self.accelerator.log({key: value for key, value in record.items() if key != "step"}, step=record["step"])
            self.watcher.step(record, total=self.steps)
            stopping = self.watcher.stop_requested() and self.progress.step < self.steps
            if self.progress.step in self.save_at or stopping:
                self._save()
            if stopping:
                raise Stopped(f"Stopped after step {self.progress.step} of {self.steps}; checkpoint saved.")
        self.accelerator.end_training()
        return self.progress

    def _step_that_fits(self, step: int) -> dict[str, Any]:
        """One optimizer step; where memory runs out, the same step in smaller micro-batches."""
        while True:
            try:
                return self._step(step)
            except torch.OutOfMemoryError:
                longest = int(self.train.lengths.max())
                if self.tokens <= longest:
                    raise _out_of_memory(longest, self.train) from None
                self.tokens = max(longest, self.tokens // 2)
                self.watcher.say(f"Out of memory: going on with {self.tokens} tokens in a forward pass.")
                self.run.note(batch={"tokens_per_device": self.tokens, "steps": self.steps})
                self.accelerator.free_memory()

    def _step(self, step: int) -> dict[str, Any]:
        began = time.monotonic()
        draws = global_batch(step, rows=len(self.train), size=self.config.batch.size, seed=self.config.seed)
        epoch = step // steps_per_epoch(len(self.train), self.config.batch.size)
        rows = self.train.drawn(draws, epoch=epoch)
        supervised = self.train.supervised[rows].sum().item()
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for indices in micro_batches(rows, self.train.lengths, tokens=self.tokens):
            torch.manual_seed(_dropout_seed(self.config.seed, step, indices))
            part = self.loss(self.train.batch(indices, epoch=epoch).to(self.device), 1 / supervised)
            part.backward()
            loss += part.detach()
        if self.companion is not None:
            self.companion.penalty().backward()
        norm = nn.utils.clip_grad_norm_(list(self.masters), self.config.train.max_grad_norm)
        mean = float(loss)
        self._require_sane(mean, float(norm), step, rows)
        rate = self.config.train.learning_rate * schedules.factor((step + 0.5) / self.steps, self.config.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate_factor"]
        self.optimizer.step()
        if self.companion is not None:
            self.companion.after_step(step + 1)
        self.masters.refresh()
        tokens = int(self.train.lengths[rows].sum())
        return {
            "step": step + 1,
            "loss": mean,
            "learning_rate": rate,
            "grad_norm": float(norm),
            "tokens": tokens,
            "supervised_tokens": supervised,
            "tokens_per_second": round(tokens / (time.monotonic() - began), 1),
            "peak_bytes": peak_bytes(self.device),
        }

    def _require_sane(self, loss: float, norm: float, step: int, rows: Indices) -> None:
        """Stop before the optimizer sees a loss that is not finite, or three times the recent ones and still rising."""
        usual = statistics.median(self.recent) if len(self.recent) >= 5 else float("inf")
        if np.isfinite(loss) and np.isfinite(norm) and loss <= max(3 * usual, 2.0):
            self.recent.append(loss)
            return
        kept, _ = checkpoints.newest(self.run.checkpoints)
        places = ", ".join(self.train.place(int(row)) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
        what = "exploded" if np.isfinite(loss) and np.isfinite(norm) else "is not finite"
        raise TrainingError(
            f"The loss {what} at step {step + 1}: loss {loss:.4g}, gradient norm {norm:.4g}, "
            f"median of the last steps {usual:.4g}.\n"
            f"  Rows of the batch: {places}\n"
            f"  Last good checkpoint: {kept or 'none yet'}\n"
            f"  Lower train.learning_rate (now {self.config.train.learning_rate:g}), raise schedule.warmup, "
            "or look at these rows."
        )

    def _evaluate(self) -> float:
        self.model.eval()
        loss = self.held_out_loss()
        self.model.train()
        best = self.progress.best_loss
        if best is None or loss < best:
            self.progress = replace(
                self.progress, best_loss=loss, best_step=self.progress.step, evaluations_without_gain=0
            )
            checkpoints.write(self.run.best, {"trainable": self.masters.named()}, self.progress)
        else:
            waited = self.progress.evaluations_without_gain + 1
            self.progress = replace(self.progress, evaluations_without_gain=waited)
        return loss

    def _patience_is_over(self) -> bool:
        patience = self.config.evaluate.patience
        return patience is not None and self.progress.evaluations_without_gain >= patience

    def _save(self) -> None:
        states = {
            f"{name}|{key}": value
            for name, master in self.masters.named().items()
            for key, value in self.optimizer.state[master].items()
        }
        tensors: dict[str, Mapping[str, Tensor]] = {"trainable": self.masters.named(), "optimizer": states}
        if self.companion is not None:
            tensors["companion"] = self.companion.state()
        checkpoints.save(self.run.checkpoints, tensors, self.progress, keep=self.config.save.keep)

    def _resume(self) -> None:
        """Continue from the newest intact checkpoint, or from the beginning where there is none."""
        if not self.run.resumed:
            return
        path, damaged = checkpoints.newest(self.run.checkpoints)
        for sentence in damaged:
            self.watcher.say(f"{sentence} Using the one before it.")
        if path is not None:
            self.progress = checkpoints.read_progress(path)
            saved = checkpoints.read_tensors(path, "trainable")
            if saved.keys() != self.masters.named().keys():
                raise ResumeError(f"{path}: its tensors are not those of this adapter. Start a new run.")
            self.masters.load(saved)
            _restore(self.optimizer, self.masters, checkpoints.read_tensors(path, "optimizer"))
            if self.companion is not None:
                self.companion.load(checkpoints.read_tensors(path, "companion"))
        self.run.rewind(self.progress.step)
        self.recent.extend(record["loss"] for record in self.run.metrics())
        self.watcher.say(f"Resuming after step {self.progress.step} of {self.steps}.")

    def _prepare(self) -> int:
        """Training mode, gradient checkpointing, compilation; returns the tokens of a forward pass."""
        self.model.train()
        fused.fuse(self.model)
        if self.config.train.compile:
            for layer in decoder_layers(self.model):
                layer.compile(dynamic=True)
        tokens = budget.tokens_per_device(self.config, self.train, self.device, width=self.width)
        checkpointing = self.config.train.checkpointing
        if checkpointing is True:
            _recompute_activations(self.model)
        remembered = self.run.manifest.get("batch", {}).get("tokens_per_device") if self.run.resumed else None
        if self.config.batch.tokens_per_device == "auto":
            if remembered:
                tokens = int(remembered)
            elif self.device.type != "cpu":
                tokens = self._largest_that_fits(tokens)
        self.run.note(batch={"tokens_per_device": tokens, "steps": self.steps})
        return tokens

    def _largest_that_fits(self, tokens: int) -> int:
        try:
            return budget.largest_that_fits(tokens, self.train, self._trial, config=self.config)
        except torch.OutOfMemoryError:
            longest = int(self.train.lengths.max())
            if self.config.train.checkpointing != "auto" or self.config.adapter.facts.no_checkpointing:
                raise _out_of_memory(longest, self.train) from None
        self.watcher.say("One example does not fit: recomputing activations in the backward pass.")
        _recompute_activations(self.model)
        try:
            return budget.largest_that_fits(tokens, self.train, self._trial, config=self.config)
        except torch.OutOfMemoryError:
            raise _out_of_memory(longest, self.train) from None

    def _trial(self, batch: MicroBatch) -> None:
        try:
            self.loss(batch.to(self.device), 1.0).backward()
        finally:
            for parameter in [*self.model.parameters(), *self.masters]:
                parameter.grad = None
            self.accelerator.free_memory()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer, as its family names them."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: of the accelerator's allocator, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _optimizer(masters: Masters, config: RunConfig) -> torch.optim.AdamW:
    """AdamW with a group for each learning rate and weight decay that the method asks for; vectors never decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, master in masters.named().items():
        decays = master.ndim >= 2 and config.adapter.decays(name)
        key = (config.adapter.rate_factor(name), config.train.weight_decay if decays else 0.0)
        groups.setdefault(key, []).append(master)
    described = [
        {"params": group, "rate_factor": factor, "weight_decay": decay} for (factor, decay), group in groups.items()
    ]
    return torch.optim.AdamW(described, lr=config.train.learning_rate, fused=True)


def _restore(optimizer: torch.optim.Optimizer, masters: Masters, saved: dict[str, Tensor]) -> None:
    named = masters.named()
    for key, value in saved.items():
        name, _, kind = key.rpartition("|")
        optimizer.state[named[name]][kind] = value.to(named[name].device)


def _moments(every: int | float | None, steps: int) -> set[int]:
    """The steps at which something periodic happens, the last one always among them; none where `every` is None."""
    if every is None:
        return set()
    interval = every if isinstance(every, int) else max(1, round(every * steps))
    return {*range(interval, steps + 1, interval), steps}


def _dropout_seed(seed: int, step: int, indices: Indices) -> int:
    return int(np.random.SeedSequence([seed, step, int(indices[0])]).generate_state(1)[0])


def _recompute_activations(model: Any) -> None:
    model.activation_checkpointing_enable()


def _out_of_memory(longest: int, train: Examples) -> TrainingError:
    return TrainingError(
        f"Not even one example fits into memory: the longest has {longest} tokens "
        f"({train.place(int(train.lengths.argmax()))}).\n"
        "  Lower data.max_tokens, write train.checkpointing=true where the method allows it, or model.weights=nf4."
    )
