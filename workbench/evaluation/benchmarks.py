"""Tasks of EleutherAI's lm-evaluation-harness (lm-eval): scores of a model, and paired scores of two models."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from workbench.errors import ConfigError, DataError
from workbench.evaluation import comparison
from workbench.training import capacity

LIBRARY = "peft-workbench[eval]"
SHOTS_SEED = 1234  # seed of the few-shot examples, as in lm-eval's own command


@dataclass(frozen=True)
class Benchmark:
    """Tasks, and how the model is prompted."""

    tasks: tuple[str, ...]  # names that lm-eval knows, or YAML files of its form
    limit: int | None = None  # documents of each task; None: all
    shots: int | None = None  # few-shot examples before a question; None: as the task says
    chat: bool = False  # whether questions are written in the tokenizer's chat template


@dataclass(frozen=True)
class Metric:
    """A metric of a task."""

    task: str
    name: str
    value: float
    """As lm-eval aggregates it over documents."""
    higher_is_better: bool
    documents: Mapping[str, float]
    """Its value for each document, by the document's id; empty where it is not a mean over documents."""


@dataclass(frozen=True)
class Paired:
    """A metric of two models on the same documents."""

    before: Metric
    after: Metric

    @property
    def difference(self) -> float:
        """after - before."""
        return self.after.value - self.before.value

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean difference over documents; None where all differences are equal."""
        same = [key for key in self.after.documents if key in self.before.documents]
        if len(same) < 2 or len(same) != len(self.before.documents):
            return None
        return comparison.mean_interval(
            np.array([self.after.documents[key] - self.before.documents[key] for key in same])
        )

    def row(self) -> dict[str, Any]:
        """The entry of scores.json."""
        low, high = self.interval or (None, None)
        return {
            **{"task": self.after.task, "metric": self.after.name, "documents": len(self.after.documents) or None},
            **{"before": self.before.value, "after": self.after.value, "difference": self.difference},
            **{"low": low, "high": high, "higher_is_better": self.after.higher_is_better},
        }


def require(benchmark: Benchmark) -> None:
    """Refuse tasks that lm-eval does not know, before a model is loaded. Raises ConfigError: lm-eval is not installed,
    a task is unknown, or a number is out of range."""
    if (benchmark.limit is not None and benchmark.limit < 1) or (benchmark.shots or 0) < 0:
        raise ConfigError("--limit must be at least 1, and --shots at least 0.")
    manager = _manager(benchmark)
    known = {*manager.all_tasks}
    for task in benchmark.tasks:
        if task.endswith((".yaml", ".yml")):
            if not Path(task).is_file():
                raise ConfigError(f"--tasks {task}: no such file.")
        elif not manager.match_tasks([task]) and task not in known:
            raise ConfigError(
                f"--tasks {task}: lm-eval knows no such task. `lm-eval ls tasks` lists them; a task of your own is a "
                "YAML file."
            )


def ask(model: nn.Module, tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark) -> list[Metric]:
    """Metrics of a causal language model, in the order of the tasks. Raises ConfigError, DataError: a task cannot be
    read, or its rows cannot be. `model`: in evaluation mode, on its device."""
    manager = _manager(benchmark)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    longest = getattr(model.config, "max_position_embeddings", None) or 2048
    device = next(model.parameters()).device
    width = max(int(getattr(model.config, "hidden_size", 1)), 1)
    rows = max(1, capacity.forward_tokens(device, width=width) // int(longest))
    with _quiet(), _explained(benchmark):
        asked = HFLM(pretrained=_Tied(model), tokenizer=tokenizer, batch_size=rows, max_length=int(longest))
        loaded = manager.load(list(benchmark.tasks))
        for task in loaded["tasks"].values():
            if benchmark.shots is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=benchmark.shots or 0)
            task.set_fewshot_seed(seed=SHOTS_SEED)
        results = lm_eval.evaluate(
            lm=asked,
            task_dict=loaded,
            limit=benchmark.limit,
            apply_chat_template=benchmark.chat,
            fewshot_as_multiturn=benchmark.chat,
            bootstrap_iters=0,
        )
    return list(_metrics(results))


class _Tied(nn.Module):
    """Keeps lm-eval from tying the weights again, which fails where embeddings are wrapped."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config, self.device = model, model.config, next(model.parameters()).device
        self.generate = model.generate

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The model's outputs."""
        return self.model(*arguments, **named)

    def tie_weights(self) -> None:
        """Do nothing: the weights were tied when the model was loaded."""


def _metrics(results: Any) -> Iterator[Metric]:
    for task, values in results["results"].items():
        samples = results["samples"].get(task, [])
        better = results["higher_is_better"].get(task) or {}
        for key, value in values.items():
            name, _, kept = key.partition(",")
            if not kept or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            own = {s["doc_hash"] + str(s["doc_id"]): s.get(name) for s in samples if s.get("filter", kept) == kept}
            single = {key: float(each) for key, each in own.items() if isinstance(each, int | float | np.number)}
            mean = bool(single) and len(single) == len(own) and np.isclose(np.mean([*single.values()]), value)
            title = name if kept == "none" else f"{name} ({kept})"
            yield Metric(task, title, float(value), better.get(name) is not False, single if mean else {})


def paired(before: Sequence[Metric], after: Sequence[Metric]) -> list[Paired]:
    """Each metric of one model with the same metric of the other."""
    known = {(each.task, each.name): each for each in before}
    return [Paired(known[each.task, each.name], each) for each in after]


def _manager(benchmark: Benchmark) -> Any:
    """lm-eval's list of tasks; its built-in ones only where one is named, since reading them takes seconds."""
    try:
        with _quiet():
            from lm_eval.tasks import TaskManager

            return TaskManager(include_defaults=any(not task.endswith((".yaml", ".yml")) for task in benchmark.tasks))
    except ImportError:
        raise ConfigError(f"--tasks needs lm-eval, which is not installed: pip install '{LIBRARY}'") from None


@contextlib.contextmanager
def _explained(benchmark: Benchmark) -> Iterator[None]:
    """Name the tasks in the error where lm-eval cannot read one; it raises whatever its reader raised."""
    try:
        yield
    except (ConfigError, DataError, MemoryError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("torch") or isinstance(error, RuntimeError):
            raise
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise DataError(f"--tasks {','.join(benchmark.tasks)}: lm-eval could not ask it: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide lm-eval's advice to callers of its API; its progress bars stay."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
