"""The loop over a bank: one forward and backward pass for the rows of all members that are still learning.

A fleet is a bank that members leave when they have ended, and that others join between two steps.

Legend: N labels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.adapters.banks import bank as banks
from workbench.adapters.banks.bank import Bank
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.config import RunConfig
from workbench.data.batching import Examples, Indices, MicroBatch
from workbench.data.packing import JoinedRows, OwnerRows, RowLayout, laid_together, mixed_batches, padded_length
from workbench.data.prefetch import Prefetcher
from workbench.errors import Stopped, TrainingError
from workbench.losses.label_losses import LabelScorer
from workbench.models import attention_backend, forward_hooks
from workbench.training import capacity, determinism, kernels, packing, row_losses, thread_choice
from workbench.training.activation_checkpointing import ActivationKeeping
from workbench.training.adapter_trainer import AdapterTrainer, TrainTask, trained
from workbench.training.callbacks import Callback
from workbench.training.distributed import data_parallel
from workbench.training.distributed.data_parallel import BankShares
from workbench.training.freezing.freezer import Freezer
from workbench.training.freezing.prefix_cache import PrefixCache, PrefixCacheManager, PrefixForward
from workbench.training.master_weights import MasterWeights
from workbench.training.optim.optimizer_states import read_scalars
from workbench.training.row_losses import RowLossWatch, VisitRecord
from workbench.training.step_metrics import forget_peak, measured


class EpochRows(NamedTuple):
    """Rows of a member in a micro-batch, and all of its rows as a pass over its data reads them."""

    member: AdapterTrainer
    indices: Indices
    epoch: int
    seen: Examples


def rows_of_members(members: Sequence[AdapterTrainer], parts: Sequence[OwnerRows]) -> list[EpochRows]:
    """The rows of a micro-batch of the next step; the owner of a part is an index of `members`."""
    owned = [(members[part.owner], part.indices) for part in parts]
    return [EpochRows(member, indices, member.epoch, member.seen) for member, indices in owned]


def joined_rows(rows: Sequence[EpochRows], arrangement: RowLayout) -> JoinedRows:
    """The micro-batch of these rows."""
    owned = [seen.batch(indices, epoch=epoch) for _, indices, epoch, seen in rows]
    numbered = [each.numbered(indices, seen.lengths) for each, (_, indices, _, seen) in zip(owned, rows, strict=True)]
    return JoinedRows(laid_together(owned, arrangement), [len(each.labels_N) for each in owned], numbered)


def rows_key(rows: Sequence[EpochRows]) -> Hashable:
    """A key of the rows, by which a micro-batch that was collated ahead is found."""
    return tuple((id(member), id(seen), indices.tobytes(), epoch) for member, indices, epoch, seen in rows)


Predict = Callable[[MicroBatch], Tensor]
"""Outputs of the model for each label of a micro-batch (N, ...): hidden states before the head, or logits."""

Objective = Callable[[Tensor, Tensor, float], Tensor]
"""From outputs (N, ...), labels (N,) and a factor to the summed loss times the factor, a scalar with a graph."""


def refusal(config: RunConfig) -> str | None:
    """Why adapters must train one after another; None where a bank can train them together."""
    start = config.task.start
    alone = {
        "model.new_tokens": (bool(config.model.new_tokens), "a bank trains no rows of new tokens"),
        "model.dropout": (config.model.dropout, "the backbone's own dropout would draw other numbers in a bank"),
        "train.compile": (config.train.compile, "a bank's steps take longer compiled"),  # RoutedLora says by how much
        "train.mlp_tile": (isinstance(config.train.mlp_tile, int), "a bank's layers count the tokens of each member"),
        "train.offload_activations": (config.train.offload_activations is True, "a bank keeps the inputs of blocks"),
        "freeze.policy": (not config.freeze.fixed, "the members of a bank would freeze different layers"),
        "data.columns.weight": (config.data.weighs and not config.task.labelled, "a bank weighs rows, and no tokens"),
        "prefer.loss": (config.prefer.loss == "kto", "kto looks at all answers of a step before it learns from them"),
        "reward.kind": (config.reward.kind == "process", "a bank compares pairs of answers"),
        f"{start}.start": (
            start is not None and getattr(config, start).start is not None,
            "the members of a bank begin with fresh adapters",
        ),
        "prefer.beta_end": (config.prefer.beta_end is not None, "a loss in a bank does not know how much is done"),
        "data.sampling": (config.data.sampling.by != "all", "the rows of each member would depend on its own losses"),
        "data.curriculum": (
            config.data.curriculum.by == "self_paced",
            "the order of each member's rows would depend on its own losses",
        ),
        "regularise.mixout": (config.regularise.mixout > 0, "a bank computes with the values as they are"),
        "regularise.r_drop": (config.regularise.r_drop > 0, "a bank computes each row once"),
        "layer_drop": (config.layer_drop.is_on, "the members of a bank would leave out different blocks"),
        "token_drop": (config.token_drop.is_on, "a bank's layers find the rows of each member by their tokens"),
        "grow": (config.grow.is_on, "the members of a bank share blocks that stay what they are"),
        "optimizer.sam": (config.optimizer.sam is not None, "a bank computes each gradient once"),
        "optimizer.name": (config.optimizer.name == "sophia", "a bank computes no rows twice"),
        "optimizer.noise_scale": (config.optimizer.noise_scale is not None, "a bank does not compute a batch in parts"),
    }
    for key, (is_on, why) in {**alone, **data_parallel.refusals(config)}.items():
        if is_on:
            return f"{key}: {why}"
    return banks.refusal(config.adapter)


class BankTrainer:
    """Trains the members of a bank, each as if it trained alone; a member that has ended costs nothing more.

    Their rows are computed together, so the last bits of each member depend on the progress of the others. Whenever one
    saves, all that are still learning do; a bank that was killed, even between two of these checkpoints, resumes to the
    same bits.

    Args:
        train_tasks: One for each member of the bank.
        freezer: Of the bank's model.
        rows: Other rows that the run reads.
        kept: Outputs of frozen blocks that an earlier training of the same run has cached.
        objectives: Losses of the members, for the labels of their rows.
        compute: Precision of matrix products.
        tokens: In one forward pass, padding included. The last bits depend on it: a resumed run needs the same number.
        label_losses: Losses of single rows from their outputs, for observers; None: there are none.
        reads_packed: Whether `predict` works on rows that are packed into one sequence.
    """

    def __init__(
        self,
        bank: Bank,
        train_tasks: Sequence[TrainTask],
        *,
        freezer: Freezer,
        rows: Sequence[Examples] = (),
        kept: PrefixCache | None = None,
        objectives: Sequence[Objective],
        predict: Predict,
        compute: torch.dtype,
        tokens: int,
        callback: Callback,
        label_losses: LabelScorer | None = None,
        reads_packed: bool = False,
    ) -> None:
        self.bank, self.model = bank, bank.model
        self.freezer, self.predict, self.callback = freezer, predict, callback
        self.objectives = dict(zip(bank.members, objectives, strict=True))
        self.config = train_tasks[0].config
        """Settings that all members share."""
        self.run = train_tasks[0].run
        self.ranks = self.run.ranks
        """The processes that train the bank together."""
        self.shares = BankShares(bank.model, self.config.distributed, self.ranks)
        self.tokens, self.device = tokens, next(bank.model.parameters()).device
        self.ahead: Prefetcher[JoinedRows] | None = None
        """Collates the next rows in a thread, during `work`."""
        self.masters = MasterWeights(bank.model, compute)
        self.label_losses = label_losses
        self.row_losses = {name: RowLossWatch() for name in bank.members}
        tasks = dict(zip(bank.members, train_tasks, strict=True))
        self.visits: dict[str, VisitRecord] = {}
        """Losses of the rows of each member that records them."""
        for name, task in tasks.items() if label_losses is not None else ():
            if (record := row_losses.record(task.config, len(task.train), self.ranks)) is not None:
                self.visits[name] = self.row_losses[name].observers["dynamics"] = record
        self.members = {name: self.member(name, task) for name, task in tasks.items()}
        self.begun = dict.fromkeys(self.members, 0)
        """Step of each member when this bank began, as members may come from other banks."""
        self.keeping = ActivationKeeping(self.config, freezer.backbone)
        self.arrangement = packing.of_bank(
            train_tasks, freezer.backbone, reads_packed=reads_packed, tokens=tokens, compute=compute
        )
        read_rows = [*(task.train for task in train_tasks), *rows]
        self.prefix = PrefixCacheManager(
            freezer,
            PrefixForward(read_rows, passes=partial(_passes, self.members.values()), tokens=lambda: self.tokens),
            self.config,
            compute=compute,
            folder=self.run.path / "prefix",
            say=callback.say,
            trial_context=partial(bank.only, bank.members[0]),
            kept=kept,
        )

    def member(self, name: str, task: TrainTask) -> AdapterTrainer:
        """The training of a member, which has not begun."""
        every, own = trained(self.masters, self.freezer), self.bank.parameters_of(name)
        values = {key: each for key, each in every.values.items() if key in own}
        shared = replace(task, held_out_loss=partial(self.shares.reading, task.held_out_loss))
        return AdapterTrainer(shared, replace(every, values=values), hooks=self.row_losses[name].observers)

    def work(self) -> None:
        """Train every member to its end, or to its error; raises Stopped after checkpoints when the callback asks.

        Raises:
            TrainingError: every member failed; it is the error of the first.
        """
        self._resume()
        self.prepare()
        self.prefix.follow()
        with self._computing() as began:
            while live := {name: member for name, member in self.members.items() if member.live}:
                self._step(live, began)
        self.prefix.close()
        errors = [member.error for member in self.members.values() if member.error is not None]
        if len(errors) == len(self.members):
            raise errors[0]

    @contextmanager
    def _computing(self) -> Iterator[Mapping[str, float]]:
        """Inside, a thread collates rows ahead; yields the time at which each member's clock began."""
        shared = thread_choice.chosen(self.members.values(), self.tokens, self.freezer.backbone)
        same = attention_backend.cudnn_allowed([each.task.train.lengths for each in self.members.values()])
        repeating = determinism.kept(self.config)
        with closing(Prefetcher(pin=self.device.type == "cuda")) as self.ahead, shared, same, repeating:
            yield {name: time.monotonic() - member.progress.elapsed_s for name, member in self.members.items()}
        self.ahead = None

    def prepare(self) -> None:
        """Set training mode, noise, kernels, activation checkpointing and the size of micro-batches.

        Raises:
            ConfigError: The backbone does not allow activation checkpointing.
            TrainingError: Not even one row fits in memory.
        """
        self.masters.refresh()
        begun = self.run.manifest.get("batch", {}) if self.run.resumed else {}
        begun = begun if begun.get("members") == len(self.members) else {}  # else of an earlier bank of a search
        self.keeping.begin(begun.get("checkpointing") or self.keeping.now)  # a bank that trained before keeps its way
        self.bank.train()
        kernels.install(self.freezer.backbone, self.config, self.device, self.run)
        forward_hooks.install(self.freezer.backbone, self.freezer.blocks, self.config.regularise)
        if not capacity.limits_steps(self.device):
            return
        if self.config.batch.tokens_per_device == "auto":
            if remembered := begun.get("tokens_per_device"):
                self.tokens = int(remembered)
            elif not self.ranks.alone:
                self._take_what_fits()
        self._note_batch()

    def _note_batch(self) -> None:
        """Note how a step is computed, for a resumed run."""
        for member in self.members.values():
            member.task.run.note(batch=self.batch_facts(member))

    def batch_facts(self, member: AdapterTrainer) -> dict[str, Any]:
        """How a step of a member is computed, for its manifest."""
        how = dict(tokens_per_device=self.tokens, checkpointing=self.keeping.now, members=len(self.members))
        return {**how, "steps": member.total, **self.arrangement.facts()}

    def _take_what_fits(self) -> None:
        """Find the largest micro-batch with which no process runs out of memory, before the first step.

        Within a step one that did would leave the others waiting for its part of the backbone.
        """
        name, member = max(self.members.items(), key=lambda each: int(each[1].task.train.lengths.max()))
        train = member.task.train
        remembered = capacity.Remembered(
            self.config, int(train.lengths.max()), {"members": len(self.members)}, self.ranks.world
        )

        def trial(rows: Indices) -> None:
            """A forward and a backward pass that teach nothing, beside what the optimizers will allocate."""
            missing = sum(each.missing_state_bytes() for each in self.members.values())
            state = torch.empty(missing, dtype=torch.uint8, device=self.device)
            self.backward({name: member}, [OwnerRows(0, rows)], [0.0])
            del state
            self._forget_gradients()

        self.tokens = self.keeping.largest_that_fits(
            self.tokens, train, trial, remembered=remembered, together=self.ranks, device=self.device
        )
        forget_peak(self.device)  # of the longest rows together, which may never come in one step

    def _forget_gradients(self) -> None:
        for parameter in [*self.bank.model.parameters(), *self.masters]:
            parameter.grad = None

    @contextmanager
    def final_values(self, name: str) -> Iterator[None]:
        """After `work`: inside the block the model holds the values of a member to save, in float32."""
        with self.members[name].final_values(self.callback.say), self.masters.exposed():
            yield

    def _resume(self) -> None:
        """Resume every member from the last step of the bank that all can resume, or where it had ended."""
        step = self._common_step()
        for name, member in self.members.items():
            sentences = member.resume(at_most=step + self.begun[name])
            as_planned = 0 < self.begun[name] == member.progress.step
            for sentence in () if as_planned else sentences:
                self.callback.say(f"{name}: {sentence}")

    def _common_step(self) -> float:
        """The last step of the bank, counted from its beginning, that every member can resume."""
        step, all_ = math.inf, self.members.items()
        while (common := min(each.reaches(step + self.begun[name]) - self.begun[name] for name, each in all_)) < step:
            step = common
        return step

    def _step(self, live: dict[str, AdapterTrainer], began: Mapping[str, float]) -> None:
        started, ahead, records = time.monotonic(), self.ahead, {}
        waited = 0.0 if ahead is None else ahead.waited_s
        clipped = (member.clip(member.batch()) for member in live.values())  # after the gradients
        scalars = read_scalars([*self._losses_that_fit(live), *clipped])
        for (name, member), loss, norm in zip(live.items(), scalars[: len(live)], scalars[len(live) :], strict=True):
            record = member.update(loss, norm, member.batch())
            if record is None:
                self.callback.say(f"{name} ends here; the others go on. {member.error}")
            else:
                records[name] = record
                self.row_losses[name].done(member.progress.step)
        self.masters.refresh()
        waited = 0.0 if ahead is None else ahead.waited_s - waited
        measure = partial(measured, since=started, waited_s=waited, device=self.device)
        for name, record in [(name, measure(record)) for name, record in records.items()]:
            record = live[name].finish_step(record, began=began[name])
            self.callback.step({**record, "member": name}, total=live[name].total)
        stopping = self.ranks.any(self.callback.stop_requested())
        if stopping or any(member.due for member in live.values()):
            for member in live.values():
                # Two, because a kill may fall between the writes of two members: one then resumes the one before.
                member.save(keep=max(2, member.task.config.save.keep), last=stopping)
        if stopping and any(member.live for member in live.values()):
            raise Stopped(f"Stopped after step {max(member.progress.step for member in live.values())}.")

    def _losses_that_fit(self, live: dict[str, AdapterTrainer]) -> Tensor:
        """`_losses`; where memory runs out, the same in smaller micro-batches."""
        rows = max((each.task.train for each in live.values()), key=lambda rows: int(rows.lengths.max()))
        longest = int(rows.lengths.max())

        def compute(tokens: int) -> Tensor:
            self.tokens = tokens
            return self._losses(live)

        try:
            return self.keeping.until_it_fits(compute, self.tokens, longest=longest, retry=self._go_on_with)
        except torch.OutOfMemoryError:
            raise capacity.nothing_fits(longest, rows) from None

    def _go_on_with(self, tokens: int) -> None:
        if not self.ranks.alone:
            raise TrainingError(
                f"Out of memory with {self.tokens} tokens in a forward pass, which are the same on every "
                f"device.\n  Write batch.tokens_per_device={tokens}{self.keeping.to_write} and another --out."
            )
        self.callback.say(f"Out of memory: going on with {tokens} tokens in a forward pass{self.keeping.in_words}.")
        self.tokens = tokens
        self._note_batch()
        self._forget_gradients()
        forget_peak(self.device)
        self.bank.train()  # blocks that are recomputed know it by their mode

    def _losses(self, live: dict[str, AdapterTrainer]) -> Tensor:
        """Gradients, and the mean losses (members,), of each live member over its next batch."""
        members = list(live.values())
        batches = [member.batch() for member in members]
        supervised = [each.seen.supervised[rows].sum().item() for each, rows in zip(members, batches, strict=True)]
        lengths = [member.seen.lengths for member in members]
        losses = torch.zeros(len(members), dtype=torch.float64, device=self.device)
        for name in live:
            self.row_losses[name].begin()
        cut = list(self._cut(batches, lengths))
        for parts, then in zip(cut, [*cut[1:], None], strict=True):
            scales = [part.counts / supervised[part.owner] for part in parts]
            after = rows_of_members(members, then) if then else self._next_step(members)
            for part, loss in zip(parts, self.backward(live, parts, scales, then=after), strict=True):
                losses[part.owner] += loss
        self.shares.add_up(losses, [value for member in members for value in member.trainable.values()])
        return losses

    def _next_step(self, members: Sequence[AdapterTrainer]) -> list[EpochRows]:
        """The first rows of the next step, if no member ends earlier than planned."""
        going = [member for member in members if member.progress.step + 1 < member.total]
        if not going:
            return []
        batches, epochs = zip(*(member.batch_after() for member in going), strict=True)
        seen = [member.seen_after() for member in going]
        first = next(self._cut(batches, [each.lengths for each in seen]))
        return [EpochRows(going[owner], indices, epochs[owner], seen[owner]) for owner, indices, _ in first]

    def _cut(self, batches: Sequence[Indices], lengths: Sequence[Indices]) -> Iterator[list[OwnerRows]]:
        """Micro-batches of the members' rows that this process computes."""
        cut = partial(self.shares.cut, arrangement=self.arrangement, tokens=self.tokens)
        return mixed_batches(batches, lengths, cut=cut, padded=self.config.media is None)

    def _collated(self, rows: Sequence[EpochRows], *, then: Sequence[EpochRows]) -> JoinedRows:
        """A micro-batch; the thread goes on with the one of `then`."""
        if self.ahead is None:
            return joined_rows(rows, self.arrangement)
        rows_ready = self.ahead.get(rows_key(rows), partial(joined_rows, rows, self.arrangement))
        if then:
            self.ahead.expect(rows_key(then), partial(joined_rows, then, self.arrangement))
        return rows_ready

    def backward(
        self,
        live: dict[str, AdapterTrainer],
        parts: Sequence[OwnerRows],
        scales: Sequence[float],
        *,
        then: Sequence[EpochRows] = (),
    ) -> Tensor:
        """Add the gradients of a micro-batch; returns the scaled loss of each part.

        Args:
            then: Rows of the micro-batch that is expected next.
        """
        names, members = list(live), list(live.values())
        collated, labels, numbered = self._collated(rows_of_members(members, parts), then=then)
        batch, packed = collated.to(self.device), self.arrangement.packed
        rows, draws = list[MemberRows](), list[RowDraw]()
        for (owner, *_), (numbers, lengths) in zip(parts, numbered, strict=True):
            tokens = int(lengths.sum()) if packed and lengths is not None else 0
            rows.append(MemberRows(names[owner], len(numbers), tokens))
            member = members[owner]
            draws.append(RowDraw(member.task.config.seed, member.progress.step, numbers, lengths, packed))
        length = None if packed else padded_length(batch)
        with self.bank.route(rows, length=length), drawing(draws, self.device):
            labels_N = batch.labels_N.split(labels)

            def forward() -> tuple[Tensor, Sequence[Tensor]]:
                outputs_N = self.predict(batch).split(labels)
                losses = [
                    self.objectives[names[part.owner]](outputs, wanted, scale)
                    for part, outputs, wanted, scale in zip(parts, outputs_N, labels_N, scales, strict=True)
                ]
                return torch.stack(losses), [each.detach() for each in outputs_N]

            losses, outputs_N = self.shares.forward(forward)
            losses.sum().backward()
        for part, outputs, wanted in zip(parts, outputs_N, labels_N, strict=True):
            watch = self.row_losses[names[part.owner]]
            if self.label_losses is not None and watch.observers and part.counts:
                watch.add(part.indices, torch.arange(len(part.indices)), self.label_losses(outputs, wanted))
        return losses.detach().double()


def _passes(members: Collection[AdapterTrainer]) -> float:
    """How often training computes each row, if all members have about the same rows."""
    drawn = sum((member.passes() or math.inf) * len(member.task.train) for member in members)
    return drawn / max(len(member.task.train) for member in members)


class FleetTrainer(BankTrainer):
    """Trains the members of a bank until one of them ends. Then all have saved, and the bank may change.

    The members that stay keep their values and optimizers. A process that is killed later restarts with the members of
    this moment, at the steps in `begun`, and continues with the same bits.

    Args:
        every: Tasks of all members that will ever train here, because the arrangement of rows must not depend on the
            present ones.
        options: See `BankTrainer`.
    """

    def __init__(
        self,
        bank: Bank,
        train_tasks: Sequence[TrainTask],
        *,
        every: Sequence[TrainTask],
        compute: torch.dtype,
        reads_packed: bool,
        **options: Any,
    ) -> None:
        super().__init__(bank, train_tasks, compute=compute, reads_packed=reads_packed, **options)
        self._compute = compute
        self._resumed = False
        self.arrangement = packing.of_bank(
            every, self.freezer.backbone, reads_packed=reads_packed, tokens=self.tokens, compute=compute
        )

    def work_until_one_ends(self) -> list[str]:
        """Train, and return the names of members that have ended or failed; raises Stopped as `work` does."""
        if not self._resumed:
            self._resume()
            self._resumed = True
        self.prepare()
        with self._computing() as began:
            while all(member.live for member in self.members.values()):
                self._step(dict(self.members), began)
        return [name for name, member in self.members.items() if not member.live]

    def join(self, name: str, task: TrainTask, objective: Objective, *, freezer: Freezer) -> None:
        """Add a member that the bank already has.

        Args:
            freezer: Of the bank's model with this member.
        """
        self.freezer = freezer
        self.masters.add(self.bank.parameters_of(name), self._compute)
        self.objectives[name], self.row_losses[name], self.begun[name] = objective, RowLossWatch(), 0
        self.members[name] = self.member(name, task)

    def leave(self, name: str) -> None:
        """Forget a member with its optimizer; the bank still has it."""
        self.masters.forget(self.bank.parameters_of(name))
        for known in (self.members, self.objectives, self.row_losses, self.begun):
            del known[name]
