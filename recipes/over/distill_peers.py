"""Adapters that teach each other, trained in one bank; the best of them is shipped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from workbench import evaluation
from workbench.config import RunConfig
from workbench.data import mixture
from workbench.distillation.student_loss import mutual_loss
from workbench.evaluation import Likelihood
from workbench.models import exported, model_sizes
from workbench.recipes.tasks.sft.text_run import TextRun
from workbench.training.freezing import freezer as freezing
from workbench.training.signal import ProgressClock, TrainingSignal
from workbench.training.trainer import Trainer


def train(config: RunConfig, student: TextRun) -> None:
    """From a backbone to the adapter with the lowest held-out loss; while they train, their mean loss is watched."""
    count, base, run, data = config.distill.peers, _recomputing_nothing(student.config), student.run, student.data
    assert count is not None
    backbone = student.backbone()
    student.score_before(backbone)
    seeds = [base.seed + number for number in range(count)]
    together, freezer = freezing.attach_bank(backbone.model, base, [base.adapter] * count, seeds=seeds)
    run.note(model=model_sizes.member_facts(base, backbone, together, together.members[0]))
    with together.only(together.members[0]):
        live = student.assemble(together.model, backbone)

    def likelihoods() -> dict[str, Likelihood]:
        by_member = {}
        for name in together.members:
            with together.only(name), run.deadline.phase("evaluation"):
                by_member[name] = evaluation.likelihood(together.model, live.head, data.held_out)
        return by_member

    of_sets = dict[str, float]()

    def mean_loss() -> float:
        peers = likelihoods().values()
        for name in next(iter(peers)).by_source:
            of_sets[f"held_out_loss[{name}]"] = sum(each.by_source[name].loss for each in peers) / count
        return sum(each.loss for each in peers) / count

    student.plan_time(peers=count)
    clock = ProgressClock()
    trainer = Trainer(
        model=together.model,
        signal=TrainingSignal(
            mixture.mixed(data.train, base),
            mutual_loss(config.distill, together, live.head, clock),
            settings=config.distill.model_dump(mode="json"),
            reads_packed=True,
        ),
        freezer=freezer,
        width=live.head.width,
        held_out=[data.held_out],
        held_out_loss=mean_loss,
        held_out_parts=of_sets,
        config=base,
        compute=backbone.compute,
        run=run,
        callback=student.callback,
        clock=clock,
        trial_context=partial(together.only, together.members[0]),
    )
    trainer.work()
    with trainer.final_values():
        best = _best(student, {member: each.loss for member, each in likelihoods().items()})
        save = partial(together.save, best)
        if run.ranks.first:
            exported.save(together.model, run.adapter, student.tokenizer, student.template, live.stop, adapter=save)
    run.ranks.wait()


def _recomputing_nothing(config: RunConfig) -> RunConfig:
    """Where `auto` could choose to: blocks that are recomputed would not know whose rows they compute."""
    if config.train.checkpointing != "auto":
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"checkpointing": False})})


def _best(student: TextRun, losses: Mapping[str, float]) -> str:
    """The member with the lowest held-out loss; all are told and noted."""
    student.run.note(distill={"peers": list(losses.values())})
    shown = ", ".join(f"{loss:.4f}" for loss in losses.values())
    student.callback.say(f"Held-out loss of each: {shown}. Shipping the best.")
    return min(losses, key=lambda member: losses[member])
