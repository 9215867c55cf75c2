"""Adapters that teach each other, trained in one bank; the best of them is shipped."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedTokenizerBase

from workbench import evaluation
from workbench.config import RunConfig, tasks
from workbench.data.text.chat import Template
from workbench.data.text.token_masking import Masking
from workbench.data.text.tokenized import Splits
from workbench.distillation.peers import mutual_loss
from workbench.models import backbones, exported, model_summary, output_heads
from workbench.recipes import sft
from workbench.runs.run_directory import Run
from workbench.runs.timing import phase
from workbench.training.callbacks import Callback
from workbench.training.freezing import freezer as freezing
from workbench.training.signal import ProgressClock, TrainingSignal
from workbench.training.trainer import Trainer


def train(
    config: RunConfig,
    base: RunConfig,
    run: Run,
    data: Splits,
    tokenizer: PreTrainedTokenizerBase,
    template: Template | Masking,
    watcher: Callback,
) -> None:
    """From a backbone to the adapter with the lowest held-out loss; while they train, their mean loss is watched."""
    count = config.distill.peers
    assert count is not None
    backbone = backbones.load(base.model, tokenizer, task=tasks.of(base))
    watcher.say(model_summary.storage(backbone, config.adapter))
    sft.score_before(base, run, backbone, data, tokenizer, template, watcher)
    seeds = [base.seed + number for number in range(count)]
    together, freezer = freezing.attach_bank(backbone.model, base, [base.adapter] * count, seeds=seeds)
    own = sum(each.numel() for each in together.parameters_of(together.members[0]).values())
    run.note(model=model_summary.model(base, backbone, together.model, own=own))
    with together.only(together.members[0]):
        head = output_heads.find(together.model, backbone.model)

    def losses() -> dict[str, float]:
        found = {}
        for member in together.members:
            with together.only(member), phase(run.timer, "evaluation"):
                found[member] = evaluation.likelihood(together.model, head, data.held_out).loss
        return found

    if run.timer is not None:
        sft.plan(run.timer, base, data, peers=count)
    clock = ProgressClock()
    fit = Trainer(
        model=together.model,
        supervision=TrainingSignal(
            data.train,
            mutual_loss(config.distill, together, head, clock),
            settings=config.distill.model_dump(mode="json"),
        ),
        freezer=freezer,
        width=head.width,
        held_out=[data.held_out],
        held_out_loss=lambda: sum(losses().values()) / count,
        config=base,
        compute=backbone.compute,
        run=run,
        watcher=watcher,
        clock=clock,
        timer=run.timer,
        trying=partial(together.only, together.members[0]),
    )
    fit.work()
    with fit.shipping():
        found = losses()
        best = min(found, key=lambda member: found[member])
        run.note(distill={"peers": list(found.values())})
        watcher.say(f"Held-out loss of each: {', '.join(f'{loss:.4f}' for loss in found.values())}. Shipping the best.")
        stop = evaluation.stop_tokens(tokenizer, data.train)
        exported.save(together.model, run.adapter, tokenizer, template, stop, adapter=partial(together.save, best))
