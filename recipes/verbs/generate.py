"""`predict` and `generate`: what a finished run's adapter says of the rows of a file, or answers to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import TextStreamer

from workbench import evaluation
from workbench.config import RunConfig
from workbench.config.task_facts import names
from workbench.data.text.formats import Example
from workbench.errors import ConfigError
from workbench.evaluation.forward_passes import dealt_results
from workbench.models import exported
from workbench.recipes.task import PredictionTable, ScoringOptions, implementation
from workbench.recipes.tasks.sft.task import question_ids
from workbench.recipes.verbs.evaluate import asked_config
from workbench.runs import files, run_directory
from workbench.runs.ranks import joined
from workbench.runs.trust import Trust

WRITERS = {".jsonl", ".csv", ".parquet"}


def predict(
    run: Path, source: str, overrides: Sequence[str] = (), *, out: Path, max_new_tokens: int, trust: bool = False
) -> PredictionTable:
    """Answer every row of `source` greedily, or name its class; the first of several processes writes `out`."""
    if out.suffix not in WRITERS:
        raise ConfigError(f"--out {out}: expected a name that ends in {', '.join(sorted(WRITERS))}.")
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another file, or delete it first.")
    config = asked_config(run, overrides, verb="predict", trust=trust)
    ranks = joined()
    scoring = dealt_results(ranks)
    if config.task.predicts is None:
        require_text(config, run)
    files.require_writable(out)
    predictions = implementation(config).predict(
        run, source, config, ScoringOptions(scoring, Trust(trust), max_new_tokens)
    )
    if ranks.first:
        table = predictions.table
        if out.suffix == ".jsonl":
            content = str(table.to_json(orient="records", lines=True, force_ascii=False)).encode()
        else:
            content = str(table.to_csv(index=False)).encode() if out.suffix == ".csv" else table.to_parquet()
        files.write_bytes(out, content)
    return predictions


def generate(run: Path, prompt: str, *, max_new_tokens: int, trust: bool = False) -> None:
    """Print one greedy answer as it is written; rendered as the training rows were."""
    config = run_directory.shipped_config(run, Trust(trust))
    require_text(config, run)
    model = exported.load(run, config)
    raw = files.read_json(run / "manifest.json").get("data", {}).get("train", {}).get("chat") is False
    question = (
        Example("the prompt", text=((prompt, False),))
        if raw
        else Example("the prompt", messages=({"role": "user", "content": prompt},))
    )
    ids = torch.from_numpy(question_ids(model, question))[None].to(next(model.model.parameters()).device)
    evaluation.generate(
        model.model,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        evaluation.generation_config(model.stop, max_new_tokens=max_new_tokens),
        streamer=TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True),
    )


def require_text(config: RunConfig, run: Path) -> None:
    """Raise ConfigError where a run trains no model that writes text."""
    if config.task.writes_text:
        return
    predicts = "" if config.task.predicts is None else f", `workbench predict` can {config.task.predicts[1]}"
    raise ConfigError(
        f"{run}: recipe {config.recipe} trains no model that writes text. `workbench evaluate` scores it{predicts}; "
        f"answers come from recipes {names(lambda task: task.writes_text).replace('|', ', ')}."
    )
