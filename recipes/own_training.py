"""Trainings that a script puts together: a configuration, and a backbone, rows and a loss of its own.

They take the place of what the configuration would load. What is saved is a run of recipe sft or mlm, for every verb.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.config import RunConfig
from workbench.config.expansions.member_runs import Trial
from workbench.config.yaml_text import dump_yaml
from workbench.data.held_out_split import Splits
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError, Stopped
from workbench.losses.chunked_loss import Criterion
from workbench.models import backbones
from workbench.models.backbones import Backbone
from workbench.recipes.over import sweep
from workbench.recipes.over.sweep import SweepMember
from workbench.recipes.over.sweep_tasks import SweepTask
from workbench.recipes.task import implementation
from workbench.recipes.tasks.sft import text_run
from workbench.recipes.tasks.sft.task import TokenTask
from workbench.recipes.tasks.sft.text_run import TextRun
from workbench.runs import deadline, files, run_directory
from workbench.runs.run_directory import Run
from workbench.training import bank_trainer, thread_choice
from workbench.training.callbacks import SILENT, Callback


@dataclass(frozen=True)
class OwnRun(TextRun):
    """A run with a loss that is handed in."""

    own: Criterion | None = field(default=None, kw_only=True)

    @property
    def criterion(self) -> Callable[..., Tensor] | None:
        return self.own


def fit(
    config: RunConfig,
    *,
    out: Path | str,
    backbone: Backbone | None = None,
    data: Splits[TokenizedSet] | None = None,
    criterion: Criterion | None = None,
    resume: bool = False,
    callback: Callback = SILENT,
) -> Path:
    """Train one adapter as `run` does, with a backbone, rows and a loss of your own where you give them.

    Micro-batches, schedule, evaluation, checkpoints and resuming are those of `run`; it neither scores nor reports.

    Args:
        config: Of recipe sft or mlm. The method is `config.adapter`.
        out: Run directory to write. Verbs such as `evaluate` take it, and load the backbone that `config.model` names.
        backbone: From `load_backbone`; it holds the trained adapter afterwards. None: that of `config.model`.
        data: Rows to train on and held-out ones, from `load_rows` or `encode_rows`; None: those of `config.data`.
        criterion: A loss as `token_loss` takes it; None: cross-entropy.
        resume: Continue the training in `out`.
        callback: Shows progress, and may ask to stop.

    Returns:
        The run directory, with adapter/, metrics.jsonl and checkpoints/.

    Raises:
        WorkbenchError: The training would fail, or would learn nothing.
        Stopped: The callback asked for it; a checkpoint is saved.

    Examples:
        >>> import torch, workbench
        >>> words = ["data.train=starter/arithmetic_start.jsonl", "data.held_out=0.2", "train.steps=2"]
        >>> config = workbench.load_recipe("sft/quickstart", [*words, "evaluate.answers=0"])
        >>> def focal(logits_nV, labels_n):
        ...     loss_n = torch.nn.functional.cross_entropy(logits_nV.float(), labels_n, reduction="none")
        ...     return (-(-loss_n).expm1() * loss_n).sum()
        >>> run = workbench.fit(config, criterion=focal, out="runs/focal")
        >>> sorted(workbench.evaluate(run))
        ['loss', 'perplexity', 'token_accuracy']
    """
    with _directory(Path(out), config, resume=resume) as run:
        _run(config, run, backbone, data, criterion, callback).train(score_later=True)
    return Path(out)


def fit_bank(
    configs: Sequence[RunConfig],
    *,
    out: Path | str,
    backbone: Backbone | None = None,
    data: Splits[TokenizedSet] | None = None,
    criterion: Criterion | None = None,
    resume: bool = False,
    callback: Callback = SILENT,
) -> list[Path]:
    """Train several adapters together over one frozen backbone, each as if alone: `fit` of each, in about one's time.

    Args:
        configs: One for each adapter. Methods, ranks, seeds and learning rates may differ; model and rows may not.
        out: Run directory to write.
        backbone: As for `fit`, and so are all that follow.
        data: Rows that all train on.
        criterion: A loss as `token_loss` takes it; None: cross-entropy.
        resume: Continue the training in `out`.
        callback: Shows progress, and may ask to stop.

    Returns:
        A run directory for each adapter, in the order of `configs`.

    Raises:
        ConfigError: A bank cannot hold one of them; the message says why.
        TrainingError: All of them failed.
        Stopped: The callback asked for it; checkpoints are saved.

    Examples:
        >>> import workbench
        >>> words = ["data.train=starter/arithmetic_start.jsonl", "data.held_out=0.2", "train.steps=2"]
        >>> words += ["evaluate.answers=0", "batch.size=4"]
        >>> configs = [workbench.load_recipe("sft/quickstart", [*words, f"adapter.rank={rank}"]) for rank in (4, 8)]
        >>> runs = workbench.fit_bank(configs, out="runs/bank")
        >>> [workbench.evaluate(run)["loss"] < 8 for run in runs]
        [True, True]
    """
    for config in configs:
        if reason := bank_trainer.refusal(config):
            raise ConfigError(f"A bank cannot hold this adapter: {reason}. Train it alone, with `fit`.")
    if any((each.model, each.data) != (configs[0].model, configs[0].data) for each in configs):
        raise ConfigError("configs: sections model and data differ, and a bank shares them. Make them alike.")
    with _directory(Path(out), configs[0], resume=resume) as run:
        files.write_json(run.path / "before.json", {"scores": {}, "answers": {}})  # nothing is scored before training
        trials = [Trial(f"{number}", {}, config, number) for number, config in enumerate(configs)]
        entries = [SweepMember(trial, run.child(f"members/{trial.name}")) for trial in trials]
        for trial, own in entries:
            files.write_bytes(own.path / "config.yaml", dump_yaml(trial.config.model_dump(mode="json")).encode())
        sweep.together(SweepTask(_run(configs[0], run, backbone, data, criterion, callback)), run, entries, callback)
    return [Path(out) / "members" / trial.name for trial in trials]


def _run(
    config: RunConfig,
    run: Run,
    backbone: Backbone | None,
    data: Splits[TokenizedSet] | None,
    criterion: Criterion | None,
    callback: Callback,
) -> OwnRun:
    """The run of these parts, before a weight is read."""
    if config.over is not None or type(implementation(config)) is not TokenTask:
        raise ConfigError(f"recipe={config.recipe}: `fit` takes recipe=sft or mlm. Write one of these, or call `run`.")
    of_cross_entropy = {
        "regularise.label_smoothing": config.regularise.label_smoothing > 0,
        "regularise.z_loss": config.regularise.z_loss > 0,
        "regularise.r_drop": config.regularise.r_drop > 0,
        "data.sampling": config.data.sampling.by != "all",
        "data.curriculum": config.data.curriculum.by == "self_paced",
        "optimizer.name": config.optimizer.name == "sophia",
    }
    if criterion is not None and (key := next((name for name, is_on in of_cross_entropy.items() if is_on), None)):
        raise ConfigError(f"{key} works on cross-entropy, and `criterion` is another loss. Leave one of them out.")
    if data is None:
        tokenizer, template, data = text_run.prepare(config, run)
    else:
        tokenizer = backbones.tokenizer(config.model)
        template = text_run.encoder_of(config, tokenizer)
    loader: Any = backbones.load if backbone is None else lambda *_, **__: backbone
    return OwnRun(config, run, callback, tokenizer, template, data, loader=loader, own=criterion)


@contextmanager
def _directory(out: Path, config: RunConfig, *, resume: bool) -> Iterator[Run]:
    """A run directory, whose manifest says in the end how the block ended."""
    run = run_directory.start(out, config, resume=resume)
    clock = run.path / "clock.json"
    try:
        run.deadline = deadline.start(config.budget, clock, began=time.monotonic(), agreed=run.ranks.agreed)
        with deadline.kept(run.deadline, clock), thread_choice.as_begun(run):
            yield run
        run.note(status="done")
    except BaseException as error:
        run.note(status="stopped" if isinstance(error, Stopped) else "failed", reason=str(error))
        raise
    finally:
        run.close()
