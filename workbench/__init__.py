"""peft-workbench: fine-tune pretrained backbones with small trainable parts, and know the truth about the result."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.adapters import attach
    from workbench.adapters import load as load_adapter
    from workbench.adapters import register as register_method
    from workbench.adapters import save as save_adapter
    from workbench.adapters.banks.bank import attach as attach_bank
    from workbench.cli.each_value import run_each
    from workbench.config import RunConfig
    from workbench.config.task_facts import register as register_task
    from workbench.data.batching import global_batch, micro_batches
    from workbench.data.text.tokenized import encode as encode_rows
    from workbench.data.text.tokenized import load as load_rows
    from workbench.evaluation.perplexity import likelihood
    from workbench.evaluation.serving.training_bank import Datum, TrainingBank
    from workbench.models.backbones import load as load_backbone
    from workbench.models.backbones import tokenizer as load_tokenizer
    from workbench.models.output_heads import find as output_head
    from workbench.recipes.load import load as load_recipe
    from workbench.recipes.over.distill_verbs import distill_cache, distill_student
    from workbench.recipes.own_training import fit, fit_bank
    from workbench.recipes.tasks.sft.text_run import token_loss
    from workbench.recipes.verbs.adopt import adopt
    from workbench.recipes.verbs.benchmark import benchmark
    from workbench.recipes.verbs.blend import blend_runs as blend
    from workbench.recipes.verbs.check import check
    from workbench.recipes.verbs.combine import combine_runs as combine
    from workbench.recipes.verbs.data_report import data_report
    from workbench.recipes.verbs.doctor import examine as doctor
    from workbench.recipes.verbs.drafting import drafts
    from workbench.recipes.verbs.evaluate import evaluate
    from workbench.recipes.verbs.export import export
    from workbench.recipes.verbs.family import family
    from workbench.recipes.verbs.features import features
    from workbench.recipes.verbs.generate import generate, load_run, predict
    from workbench.recipes.verbs.judge import judge
    from workbench.recipes.verbs.merge import merge
    from workbench.recipes.verbs.plans.plan import solve as plan
    from workbench.recipes.verbs.rate_finder import find_learning_rate
    from workbench.recipes.verbs.sample import sample
    from workbench.recipes.verbs.win_rate import win_rate
    from workbench.report.pages import compare

# OpenMP threads that wait by spinning stall one another where other programs share the cores.
# Read once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# oneDNN and torch keep a compiled product for each of the last 1,024 shapes. Batches of many lengths fill that with
# most of a gigabyte, and come back to few of them: twelve steps of the quickstart are as fast with 64.
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
# On some CPUs bitsandbytes asks at its import for a package that would fetch kernels from the hub.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__version__ = "0.1.0"
__all__ = [
    "Datum",
    "TrainingBank",
    "__version__",
    "adopt",
    "attach",
    "attach_bank",
    "benchmark",
    "blend",
    "check",
    "combine",
    "compare",
    "data_report",
    "distill_cache",
    "distill_student",
    "doctor",
    "drafts",
    "encode_rows",
    "evaluate",
    "export",
    "family",
    "features",
    "find_learning_rate",
    "fit",
    "fit_bank",
    "generate",
    "global_batch",
    "judge",
    "likelihood",
    "load_adapter",
    "load_backbone",
    "load_recipe",
    "load_rows",
    "load_run",
    "load_tokenizer",
    "merge",
    "micro_batches",
    "output_head",
    "plan",
    "predict",
    "register_method",
    "register_task",
    "run",
    "run_each",
    "sample",
    "save_adapter",
    "token_loss",
    "win_rate",
]
_PLACES = {
    "Datum": "evaluation.serving.training_bank:Datum",
    "TrainingBank": "evaluation.serving.training_bank:TrainingBank",
    "attach": "adapters:attach",
    "attach_bank": "adapters.banks.bank:attach",
    "benchmark": "recipes.verbs.benchmark:benchmark",
    "blend": "recipes.verbs.blend:blend_runs",
    "check": "recipes.verbs.check:check",
    "adopt": "recipes.verbs.adopt:adopt",
    "combine": "recipes.verbs.combine:combine_runs",
    "compare": "report.pages:compare",
    "data_report": "recipes.verbs.data_report:data_report",
    "distill_cache": "recipes.over.distill_verbs:distill_cache",
    "distill_student": "recipes.over.distill_verbs:distill_student",
    "doctor": "recipes.verbs.doctor:examine",
    "drafts": "recipes.verbs.drafting:drafts",
    "encode_rows": "data.text.tokenized:encode",
    "evaluate": "recipes.verbs.evaluate:evaluate",
    "export": "recipes.verbs.export:export",
    "family": "recipes.verbs.family:family",
    "features": "recipes.verbs.features:features",
    "find_learning_rate": "recipes.verbs.rate_finder:find_learning_rate",
    "fit": "recipes.own_training:fit",
    "fit_bank": "recipes.own_training:fit_bank",
    "generate": "recipes.verbs.generate:generate",
    "global_batch": "data.batching:global_batch",
    "judge": "recipes.verbs.judge:judge",
    "likelihood": "evaluation.perplexity:likelihood",
    "load_adapter": "adapters:load",
    "load_backbone": "models.backbones:load",
    "load_recipe": "recipes.load:load",
    "load_rows": "data.text.tokenized:load",
    "load_run": "recipes.verbs.generate:load_run",
    "load_tokenizer": "models.backbones:tokenizer",
    "merge": "recipes.verbs.merge:merge",
    "micro_batches": "data.batching:micro_batches",
    "output_head": "models.output_heads:find",
    "plan": "recipes.verbs.plans.plan:solve",
    "predict": "recipes.verbs.generate:predict",
    "register_method": "adapters:register",
    "register_task": "config.task_facts:register",
    "run_each": "cli.each_value:run_each",
    "sample": "recipes.verbs.sample:sample",
    "save_adapter": "adapters:save",
    "token_loss": "recipes.tasks.sft.text_run:token_loss",
    "win_rate": "recipes.verbs.win_rate:win_rate",
}
"""Module and name of each public function, which is imported when it is first asked for: torch takes seconds."""


if not TYPE_CHECKING:  # which would take every name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, own = _PLACES[name].partition(":")
        return getattr(importlib.import_module(f"workbench.{module}"), own)


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]


def run(
    recipe: RunConfig | Path | str,
    overrides: Sequence[str] = (),
    *,
    out: Path | str | None = None,
    resume: bool = False,
    quiet: bool = False,
    push: str | None = None,
    began: float | None = None,
) -> Path:
    """Train, score and report.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe such as `sft/quickstart`.
        overrides: `key=value` words on top of a file or name.
        out: The run directory; by default a new one under `runs/`.
        resume: Continue the run in `out`.
        quiet: Draw no progress.
        push: An empty address that fsspec writes, such as `s3://BUCKET/RUN`. The run is copied there after each
            checkpoint and when it is done; with `resume`, a machine without the run goes on from that copy.
        began: The moment that `budget.time` counts from, by `time.monotonic`; by default that of the call.

    Returns:
        The run directory: scores.json, adapter/, report.html and the rest.

    Raises:
        WorkbenchError: Something is wrong that the caller can mend.
        Stopped: Ended on SIGTERM or Ctrl-C, with a checkpoint to resume from.

    Examples:
        >>> import json, workbench
        >>> words = ["data.train=starter/arithmetic_start.jsonl", "data.held_out=0.2", "train.steps=4"]
        >>> words += ["evaluate.answers=0"]
        >>> run = workbench.run("sft/quickstart", words, out="runs/short", quiet=True)
        >>> scores = json.loads((run / "scores.json").read_text())
        >>> scores["after"]["loss"] < scores["before"]["loss"]
        True
    """
    import time

    began = time.monotonic() if began is None else began
    from workbench.recipes.load import directory, load

    config = load(recipe, overrides)

    from contextlib import nullcontext

    from workbench.cli.console import Terminal
    from workbench.recipes.verbs.run import run as run_config
    from workbench.runs import addresses, remote_copy
    from workbench.runs.ranks import joined
    from workbench.runs.run_log import RunLog

    ranks = joined()
    path = ranks.agreed(Path(out) if out is not None else directory(recipe, resume=resume))
    if push is not None and ranks.world == 1:  # a launcher has looked
        if resume:
            remote_copy.fetch(push, path)
        else:
            addresses.require_free(push)
    log = RunLog()
    with Terminal(quiet=quiet or not ranks.first, log=log) as terminal:
        copied = nullcontext() if push is None or not ranks.first else remote_copy.kept(path, push, terminal.say)
        with copied:
            path = run_config(config, out=path, resume=resume, callback=terminal, began=began, log=log)
    return path
