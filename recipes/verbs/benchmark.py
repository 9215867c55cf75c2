"""`evaluate RUN --tasks ...`: tasks of lm-eval before and after training, or of two runs, in pairs; kept in the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel

from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.evaluation import benchmarks
from workbench.evaluation.benchmarks import Benchmark, Metric, Paired
from workbench.models import backbones, exported
from workbench.recipes.verbs import generate
from workbench.report import pages
from workbench.runs import run_directory, score_files
from workbench.runs.trust import Trust


def benchmark(
    run: Path | str,
    tasks: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    against: Path | str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    trust: bool = False,
) -> list[Paired]:
    """Ask a finished run's model tasks of lm-eval, and its backbone without the adapter or another run.

    Scores against the backbone are kept in the run directory and its report. Needs lm-eval (extra `eval`).

    Args:
        run: A run directory.
        tasks: Names that lm-eval knows, or YAML files of its form.
        overrides: `model.id=FOLDER`, where the backbone has moved since.
        against: A run whose model is asked in place of the backbone.
        limit: Documents of each task; None: all.
        shots: Examples before a question; None: as the task says.
        chat: Write questions in the tokenizer's chat template.
        trust: Execute the Python code that the runs' config.yaml name.

    Returns:
        For each metric `before` and `after`, their `difference`, and its 95 % `interval` over the same documents.

    Raises:
        ConfigError: The run writes no text, or is an encoder-decoder; lm-eval is missing or knows no such task.

    Examples:
        >>> import json, workbench
        >>> from pathlib import Path
        >>> rows = [{"question": f"{n} plus 1 is", "choices": [f"{n + 1}", f"{n + 3}"], "gold": 0} for n in range(4)]
        >>> file, task = Path("sums.jsonl").resolve(), {"task": "sums", "dataset_path": "json", "test_split": "test"}
        >>> size = file.write_text("".join(json.dumps(row) + "\\n" for row in rows))
        >>> task |= {"dataset_kwargs": {"data_files": {"test": str(file)}}, "output_type": "multiple_choice"}
        >>> task |= {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"}
        >>> size = Path("sums.yaml").write_text(json.dumps({**task, "metric_list": [{"metric": "acc"}]}))
        >>> for metric in workbench.benchmark("runs/short", ["sums.yaml"], limit=4):
        ...     print(metric.after.task, len(metric.after.documents))
        sums 4
    """
    run, against = Path(run), None if against is None else Path(against)
    asked = Benchmark(tuple(tasks), limit, shots, chat)
    paths = [path for path in (run, against) if path is not None]
    configs = {path: run_directory.shipped_config(path, Trust(trust), overrides) for path in paths}
    for path, config in configs.items():
        generate.require_text(config, path)
    benchmarks.require(asked)
    if against is not None:
        comparisons = benchmarks.paired(_after(against, configs[against], asked), _after(run, configs[run], asked))
    else:
        comparisons = _both(run, configs[run], asked)
        rows = [each.row() for each in comparisons]
        score_files.keep(run, score_files.TASKS, {"shots": asked.shots, "limit": asked.limit, "rows": rows})
        pages.write(run)
    return comparisons


def _both(run: Path, config: RunConfig, asked: Benchmark) -> list[Paired]:
    """With the adapter and without it, loaded once; of full fine-tuning the backbone is another model."""
    live = _model(run, config)
    after = benchmarks.ask(live.model, live.tokenizer, asked)
    if isinstance(live.model, PeftModel):
        with live.model.disable_adapter():
            return benchmarks.paired(benchmarks.ask(live.model, live.tokenizer, asked), after)
    backbone = backbones.load(config.model, live.tokenizer).model.eval()
    return benchmarks.paired(benchmarks.ask(backbone, live.tokenizer, asked), after)


def _after(run: Path, config: RunConfig, asked: Benchmark) -> Sequence[Metric]:
    live = _model(run, config)
    return benchmarks.ask(live.model, live.tokenizer, asked)


def _model(run: Path, config: RunConfig) -> exported.ExportedModel:
    live = exported.load(run, config)
    settings: Any = live.model.config
    if settings.is_encoder_decoder:
        raise ConfigError(f"{run}: tasks are asked of causal language models, and this is an encoder-decoder.")
    return live
