"""Train the folds of a cross-validation with this workbench, from Python, and print one line of JSON.

    python scripts/bench/our_folds.py bank|sequential|one MODEL ROWS.csv OUT --folds 5

`bank`: all folds at once. `sequential`: one after another over one loaded backbone. `one`: fold 0 alone. The column
`fold` says which rows validate. scripts/bench/crossval.py starts this in a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from torch import from_numpy

from workbench import adapters
from workbench.adapters import anatomy
from workbench.config import RunConfig
from workbench.config.sections.folds_config import FoldsConfig
from workbench.data.folds import stratified_folds
from workbench.data.labelled import labelled_data, labels
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.text_reader import TextReader
from workbench.evaluation import classification_scores
from workbench.losses.class_losses import Objective, criterion
from workbench.models import backbones, classifier
from workbench.models.backbones import Backbone
from workbench.models.classifier import Classifier
from workbench.runs import metrics_log, process_memory, run_directory
from workbench.runs.run_directory import Run
from workbench.training import capacity
from workbench.training.adapter_trainer import TrainTask
from workbench.training.bank_trainer import BankTrainer
from workbench.training.freezing import freezer as freezing
from workbench.training.signal import TrainingSignal
from workbench.training.step_metrics import peak_bytes
from workbench.training.trainer import Trainer


class Fold(NamedTuple):
    """Rows that one adapter trains on and is scored on."""

    train: LabelledSet
    validation: LabelledSet
    config: RunConfig
    run: Run

    @property
    def objective(self) -> Objective:
        """The training loss."""
        return criterion(self.config.classes, from_numpy(self.train.targets_NC))


class Job(NamedTuple):
    """All folds, and the backbone under them."""

    backbone: Backbone
    reader: TextReader
    labels: Labels
    folds: list[Fold]

    @property
    def width(self) -> int:
        """Hidden size of the backbone."""
        return int(self.backbone.model.config.get_text_config().hidden_size)

    def classifier(self, model: Any) -> Classifier:
        """The model around the backbone, and how it comes to a row's classes."""
        return classifier.classification_model(model, self.backbone.model, self.reader, self.labels)


class Silent:
    """Watches without a word."""

    def step(self, record: dict[str, Any], *, total: int) -> None: ...

    def say(self, text: str) -> None: ...

    def stop_requested(self) -> bool:
        return False


class Watch:
    """Seconds inside of it."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self.wall_s -= time.perf_counter()
        self.cpu_s -= time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter()
        self.cpu_s += time.process_time()


class Done(NamedTuple):
    """Results of a training."""

    watch: Watch
    right: float
    """Validated rows whose class was found."""
    trainable: int


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    process_memory.keep()
    job, callback = _prepare(arguments), Silent()
    loaded_bytes = peak_bytes(job.backbone.model.device)
    done = _bank(job, callback) if arguments.arm == "bank" else _one_after_another(job, callback)
    steps = [record for fold in job.folds for record in metrics_log.read(fold.run.path)]
    held = sum(len(fold.validation) for fold in job.folds)
    return {
        "train_s": done.watch.wall_s,
        "train_cpu_s": done.watch.cpu_s,
        "accuracy": done.right / held,
        "held_out_rows": held,
        "wall_s": time.time() - psutil.Process().create_time(),
        "peak_bytes": peak_bytes(job.backbone.model.device),
        "loaded_bytes": loaded_bytes,
        "tokens": sum(step["tokens"] for step in steps),
        "trainable": done.trainable,
        "steps": len(steps),
        "losses": [record["loss"] for record in metrics_log.read(job.folds[0].run.path)],
    }


def _prepare(arguments: argparse.Namespace) -> Job:
    config = _config(arguments)
    tokenizer = backbones.tokenizer(config.model)
    reader = TextReader(tokenizer, config.data, config.classes, config.duplicates)
    source = reader.read(config.data.train)
    found = labels.fit("one", source.labels, source=source.name)
    dealt = stratified_folds.read_folds(
        [record.row for record in source.records], FoldsConfig(column="fold", k=arguments.folds)
    )
    rows = labelled_data.encode(source, reader, found)
    run, wanted = run_directory.start(arguments.out, config, resume=False), []
    for split in dealt.splits():
        if arguments.arm == "one" and split.fold:
            break
        own = config.model_copy(update={"seed": split.fold})
        child = run.child(f"fold-{split.fold}")
        wanted.append(Fold(rows.subset(split.train_N), rows.subset(split.validation_N), own, child))
    backbone = backbones.load(config.model, tokenizer, task=classifier.task(found, seed=0))
    return Job(backbone, reader, found, wanted)


def _config(arguments: argparse.Namespace) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": "classify",
            "model": {"id": arguments.model, "weights": arguments.weights, "compute": arguments.compute},
            "adapter": {"method": "lora", "rank": arguments.rank, "alpha": arguments.alpha, "targets": "all-linear"},
            "data": {
                "train": str(arguments.rows),
                "max_tokens": arguments.max_tokens,
                "columns": {"label": arguments.label},
            },
            "batch": {
                "size": arguments.batch,
                "tokens_per_device": arguments.tokens or "auto",
                "packing": {"true": True, "false": False}.get(arguments.packing, "auto"),
            },
            "train": {"epochs": arguments.epochs, "learning_rate": arguments.lr},
            "freeze": {"policy": "static", "layers": arguments.freeze, "cache": "memory"} if arguments.freeze else {},
            "evaluate": {"every": None},
            "save": {"every": None},
        }
    )


def _bank(job: Job, callback: Silent) -> Done:
    """All folds in one bank."""
    bank, freezer = freezing.attach_bank(
        job.backbone.model,
        job.folds[0].config,
        [fold.config.adapter for fold in job.folds],
        seeds=[fold.config.seed for fold in job.folds],
    )
    with bank.only(bank.members[0]):
        model = job.classifier(bank.model)
    device = job.backbone.model.device
    fit = BankTrainer(
        bank,
        [TrainTask(fold.train, lambda: 0.0, fold.config, fold.run) for fold in job.folds],
        freezer=freezer,
        objectives=[fold.objective for fold in job.folds],
        predict=model.outputs,
        compute=job.backbone.compute,
        tokens=max(
            capacity.tokens_per_device(
                fold.config,
                fold.train,
                device,
                width=job.width,
                members=len(job.folds),
                compute=job.backbone.compute,
            )
            for fold in job.folds
        ),
        callback=callback,
        reads_packed=model.reads_packed(job.folds[0].config.adapter),
    )
    watch, right = Watch(), 0.0
    with watch:
        fit.work()
    for fold, member in zip(job.folds, bank.members, strict=True):
        with bank.only(member):
            right += _right(model, fold.validation)
    for fold, member in zip(job.folds, bank.members, strict=True):
        with fit.final_values(member):
            classifier.save(model, fold.run.adapter, adapter=partial(bank.save, member))
    return Done(watch, right, sum(each.numel() for each in bank.parameters_of(bank.members[0]).values()))


def _one_after_another(job: Job, callback: Silent) -> Done:
    """Each fold by itself, over the same loaded backbone."""
    backbone = job.backbone.model
    heads = {name: copy.deepcopy(backbone.get_submodule(name)) for name in anatomy.fresh_heads(backbone)}
    watch, right, trainable = Watch(), 0.0, 0
    for fold in job.folds:
        freezer = freezing.attach(backbone, fold.config, seed=fold.config.seed)
        attached: Any = freezer.model
        model = job.classifier(attached)
        fit = Trainer(
            model=attached,
            signal=TrainingSignal(
                fold.train, model.row_loss(fold.objective), reads_packed=model.reads_packed(fold.config.adapter)
            ),
            freezer=freezer,
            held_out=[],
            width=job.width,
            held_out_loss=lambda: 0.0,
            config=fold.config,
            compute=job.backbone.compute,
            run=fold.run,
            callback=callback,
        )
        with watch:
            fit.work()
        attached.eval()
        right += _right(model, fold.validation)
        with fit.final_values():
            classifier.save(model, fold.run.adapter)
        trainable = adapters.count(attached).trainable
        attached.unload()
        for name, head in heads.items():  # PEFT leaves the trained one in its place
            backbone.set_submodule(name, copy.deepcopy(head))
    return Done(watch, right, trainable)


def _right(model: Classifier, rows: LabelledSet) -> float:
    outputs_NC = classification_scores.predict_outputs(model.model, model.outputs, rows)
    return float((outputs_NC.argmax(1) == rows.targets_NC.argmax(1)).sum())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("arm", choices=("bank", "sequential", "one"))
    parser.add_argument("model", help="folder or hub id of the backbone")
    parser.add_argument("rows", type=Path, help="csv with the columns text, fold and the label's")
    parser.add_argument("out", type=Path, help="folder for what is trained")
    parser.add_argument("--label", default="category", help="column with the class")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--batch", type=int, default=32, help="rows of a step of a fold")
    parser.add_argument("--tokens", type=int, help="of a micro-batch, padding included; by default as the workbench")
    parser.add_argument("--packing", choices=("auto", "true", "false"), default="auto")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--freeze", type=float, help="share of the blocks that do not train, computed once for a row")
    parser.add_argument("--weights", choices=("float32", "bfloat16", "nf4"), default="float32")
    parser.add_argument("--compute", choices=("auto", "float32", "bfloat16"), default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    print(json.dumps(main(_arguments())))
