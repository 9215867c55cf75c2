"""A student that learns what its teacher writes: sequence-level distillation (Kim and Rush 2016, arXiv:1606.07947)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig, RunConfig
from workbench.data import starter
from workbench.data.rows import fingerprint
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError
from workbench.models import exported
from workbench.models.exported import ExportedModel
from workbench.recipes.single import sampled_answers
from workbench.recipes.single.sampled_answers import (
    AnswerWriter,
    LocalWriter,
    Questions,
    SampleProgress,
    SampleSettings,
    ServedWriter,
    rows_to_write,
)
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

FILE = "answers.jsonl"
"""The rows that are learnt, in the run directory."""


def writer(config: RunConfig, source: TeacherSource | None) -> AnswerWriter:
    """Who writes; an address is asked once whether it has the model. Raises ConfigError: the teacher writes no text."""
    section = config.distill
    if section.teacher.url is not None:
        assert isinstance(section.teacher.id, str) and section.answers is not None, "the configuration requires both"
        keys = "distill.teacher.url", "distill.teacher.id"
        served = ServedWriter(section.teacher.url, section.teacher.id, *keys, limits=section.answers.requests)
        served.require()
        return served
    assert source is not None, "the configuration requires one"
    name = f"distill.teacher.id={source.name}"
    if source.config is not None and not source.config.task.writes_text:
        raise ConfigError(f"{name}: recipe {source.config.recipe} writes no text. Name a run of recipe sft.")
    if source.models > 1 or (source.config is not None and source.config.crossvalidates):
        raise ConfigError(f"{name}: {source.models} models write no answer together. Name one run.")
    if source.hub_config().is_encoder_decoder:
        raise ConfigError(
            f"{name}: answers are drawn from causal models, and this is an encoder-decoder. Name another."
        )

    def load() -> ExportedModel:
        if source.run is not None:
            return exported.load(source.run, source.config_of(source.run))
        with source.named_in_errors():
            return sampled_answers.stock(source.model, config)

    return LocalWriter(name, load, {"teacher": source.files})


def questions(base: RunConfig, data: TokenizedSet, config: RunConfig) -> Questions:
    """The training prompts, with the columns of their rows; raises DataError where a reward lacks one."""
    assert config.distill.answers is not None
    places = {tokenized.example_of(place) for place in data.places()}
    (own,) = base.data.training_files.values()
    return sampled_answers.questions(starter.resolve(own.train), own, base, config.distill.answers.score, places)


def rows(
    config: RunConfig,
    base: RunConfig,
    source: TeacherSource | None,
    run: Run,
    data: TokenizedSet,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatEncoder | MlmEncoder,
    callback: Callback,
) -> tuple[TokenizedSet, TokenizedSet]:
    """The training rows with the teacher's answers, and for each of them the row with its own.

    The answers are written into the run directory, where a run that is resumed finds those that there are.
    """
    path = run.home / FILE
    if run.ranks.first and not path.exists():
        _write(config, base, source, run, data, callback)
    run.ranks.wait()
    places = [json.loads(line)["place"] for line in path.read_text(encoding="utf-8").splitlines()]
    kept = {name: getattr(base.data, name) for name in ("max_tokens", "truncate", "loss_on")}
    told = DataConfig(train=str(path), on_bad_row="skip", **kept)
    taught = tokenized.read(str(path), told, tokenizer, template)
    if not len(taught):
        raise ConfigError(f"{path}: none of the teacher's answers can be learnt. {taught.skipped[-1]}")
    if run.ranks.first and taught.skipped:
        callback.say(f"{len(taught.skipped):,} of these answers cannot be learnt. The first: {taught.skipped[0]}")
    of_place = {tokenized.example_of(place): index for index, place in enumerate(data.places())}
    numbers = (int(tokenized.example_of(place).rpartition(" ")[2]) - 1 for place in taught.places())
    return taught, data.subset(np.asarray([of_place[places[number]] for number in numbers]))


def _write(
    config: RunConfig, base: RunConfig, source: TeacherSource | None, run: Run, data: TokenizedSet, callback: Callback
) -> None:
    section = config.distill.answers
    assert section is not None
    teacher, asked = writer(config, source), questions(base, data, config)
    settings = SampleSettings(
        section.to,
        section.n,
        section.temperature,
        section.max_new_tokens,
        base.seed,
        section.least,
        likelihood=any(source.reads_likelihood for source in section.score),
    )
    path = run.home / FILE
    (own,) = base.data.training_files.values()
    identity = {
        **teacher.identity,
        "prompts": [fingerprint(starter.resolve(own.train), own), len(asked)],
        **{name: value for name, value in dataclasses.asdict(settings).items() if name not in ("to", "least")},
    }
    progress = SampleProgress(path, identity)
    callback.say(f"The teacher writes {len(asked) * section.n:,} answers ...")
    groups = sampled_answers.written_and_scored(teacher, asked, settings, section.score, progress)
    lines: list[dict[str, Any]] = [
        {**row, "place": group.question.place}
        for group in groups
        for row in rows_to_write([group], section.to, least=section.least, margin=0.0)
    ]
    facts = sampled_answers.facts(groups, len(lines), [], section.requests)
    if not lines:
        reward = "" if facts.best is None else f", the best with a mean reward of {facts.best:.3g}"
        raise ConfigError(
            f"distill.answers: none of {facts.answers:,} answers is learnt; {facts.finished:.0%} ended by themselves"
            f"{reward}. Write a higher distill.answers.max_new_tokens or n, or a lower least."
        )
    for reason in facts.left_out[:20]:
        callback.say(f"Left out: {reason}")
    callback.say(
        f"{facts.rows:,} answers are learnt, of {facts.answers:,} to {facts.prompts:,} prompts; {facts.finished:.0%} "
        f"ended by themselves, {len(facts.left_out):,} could not be used."
    )
    run.note(distill={"teacher": config.distill.teacher.id, "answers": dataclasses.asdict(facts)})
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.write_bytes(path, text.encode())
    progress.done()
