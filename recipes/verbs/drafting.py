"""`evaluate STUDENT --drafts-for TEACHER`: a student as the drafter of its teacher in speculative decoding."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from workbench.config import RunConfig
from workbench.data.batching import Indices, evenly_spaced
from workbench.data.text import tokenized
from workbench.errors import BackboneError, ConfigError, DataError
from workbench.evaluation import generation
from workbench.models import exported
from workbench.models.exported import ExportedModel
from workbench.recipes.verbs import generate
from workbench.recipes.verbs.asked_config import asked_config
from workbench.report import pages
from workbench.runs import run_directory, score_files
from workbench.runs.run_directory import hardware
from workbench.runs.trust import Trust
from workbench.training.preflight import longest_sequence

ROWS, LEAST, SECONDS = 16, 4, 120.0
"""Prompts that are answered; after so many seconds no further one is begun, but for the least number."""
DRAFTED: Mapping[str, Mapping[str, float]] = {
    "auto": {},
    **{str(n): {"num_assistant_tokens": n, "assistant_confidence_threshold": 0.0} for n in (2, 4, 8)},
}
"""Tokens that are drafted at a time: as transformers does by itself (20 at most, while the drafter is sure), or so
many."""


class _Passes:
    """Counts the forward passes of a model inside the block."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.count = model, 0

    def _add(self, *_: object) -> None:
        self.count += 1

    def __enter__(self) -> _Passes:
        self._handle = self._model.register_forward_hook(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def drafts(
    run: Path | str, drafts_for: Path | str, overrides: Sequence[str] = (), *, trust: bool = False
) -> dict[str, Any]:
    """How many of a student's drafted tokens its teacher accepts, and how much faster the teacher writes with them.

    Transformers' assisted generation, greedy, one text at a time, as both runs saved their models, adapters not merged.
    The teacher alone and with each number of drafted tokens answer every prompt in turn. Kept in scores.json and on
    the page of `run`.

    Args:
        run: Directory of the student's run.
        drafts_for: Directory of the teacher's run, whose answers are drafted.
        overrides: `key=value` words of sections data and evaluate. The first tokens of `data.test`, else of the
            held-out rows are continued by `evaluate.max_new_tokens` at most.
        trust: Execute the Python code that the runs' config.yaml name.

    Returns:
        `rows` and `tokens` (what the teacher wrote), `tokens_per_second` (alone), `equal` (share of prompts whose
        answers are all the teacher's own), and in `drafted` for each number of tokens `acceptance` (share of drafted
        tokens), `tokens_per_pass` (of the teacher) and `speedup`.

    Raises:
        ConfigError: A run writes no text, or its tokens are others than the teacher's.

    Examples:
        >>> import workbench
        >>> found = workbench.drafts("runs/short", "runs/short", ["evaluate.max_new_tokens=4"])
        >>> sorted(found["drafted"])
        ['2', '4', '8', 'auto']
    """
    run, other = Path(run), Path(drafts_for)
    config = asked_config(run, overrides, verb="evaluate", trust=trust)
    moved = [word for word in overrides if word.startswith("model.id=")]
    theirs = run_directory.shipped_config(other, Trust(trust), moved)
    for each, path in ((config, run), (theirs, other)):
        generate.require_text(each, path)
    _require_same_tokens((run, config), (other, theirs))
    student, writer = exported.load(run, config), exported.load(other, theirs)
    drafter, target = _assistant(student, run), _assistant(writer, other)
    prompts = _prompts(student, config, (drafter, target))
    found = _measured(writer, drafter, target, prompts, most=config.evaluate.max_new_tokens)
    threads = torch.get_num_threads()
    found |= {"teacher": str(other), "device": hardware()["name"], "threads": threads}
    score_files.keep(run, score_files.DRAFTS, found)
    pages.write(run)
    return found


@contextmanager
def _without_advice() -> Iterator[None]:
    """Hides advice of transformers on how its own assisted generation calls `generate`."""
    logger, hidden = logging.getLogger("transformers.generation.utils"), "together with generation-related arguments"

    def others(record: logging.LogRecord) -> bool:
        return hidden not in record.getMessage()

    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


def _require_same_tokens(student: tuple[Path, RunConfig], teacher: tuple[Path, RunConfig]) -> None:
    own, theirs = (exported.load_tokenizer(*each).get_vocab() for each in (student, teacher))
    if own == theirs:
        return
    differ = min(own.items() ^ theirs.items(), key=lambda each: (each[1], each[0]))[0]
    mine, its = own.get(differ, "none"), theirs.get(differ, "none")
    raise ConfigError(
        f"--drafts-for {teacher[0]}: it reads other tokens than {student[0]}: {len(theirs):,} and {len(own):,}, and "
        f"{differ!r} is number {its} to the one and {mine} to the other. Drafted tokens must be the teacher's. Distil "
        "a student with its tokenizer: workbench run distill/quickstart model.id=teacher distill.teacher.id="
        f"{teacher[0]}"
    )


def _assistant(model: ExportedModel, run: Path) -> PreTrainedModel:
    """The model of transformers with its adapter inside, as assisted generation takes it."""
    stock: Any = model.model
    if isinstance(stock, PeftModel):
        settings = stock.active_peft_config
        if settings.is_prompt_learning or getattr(settings, "alora_invocation_tokens", None):
            raise ConfigError(
                f"{run}: its adapter puts virtual tokens before a text or waits for a word in it, which assisted "
                "generation does not do. Take a run of another adapter.method, such as lora."
            )
        stock = stock.get_base_model()
    if stock.config.is_encoder_decoder or stock._is_stateful:
        raise BackboneError(
            f"{run}: {type(stock).__name__} has no cache from which rejected tokens can be taken back, or a decoder "
            "beside its encoder, and its drafts are not measured here. Take a decoder with attention, such as Llama."
        )
    return stock  # type: ignore[no-any-return]


def _prompts(student: ExportedModel, config: RunConfig, models: Sequence[PreTrainedModel]) -> list[Indices]:
    rows = tokenized.read_files(config.data.test_files, config.data, student.tokenizer, student.template)
    if rows is None:
        rows = tokenized.load(config.data, student.tokenizer, student.template, seed=config.seed).held_out
    limits = [limit for model in models if (limit := longest_sequence(model.config)) is not None]
    most = min(limits) - config.evaluate.max_new_tokens if limits else None
    each = (generation.prompt_of(rows[int(index)]) for index in evenly_spaced(len(rows), ROWS))
    found = [prompt for prompt in each if len(prompt) and (most is None or len(prompt) <= most)]
    if not found:
        new = config.evaluate.max_new_tokens
        raise DataError(
            f"{config.data.test or config.data.train}: no prompt leaves room for evaluate.max_new_tokens={new} within "
            f"{min(limits):,} tokens. Write a smaller number, or name other rows, data.test=FILE."
        )
    return found


@torch.no_grad()
def _measured(
    writer: ExportedModel, drafter: PreTrainedModel, target: PreTrainedModel, prompts: Sequence[Indices], *, most: int
) -> dict[str, Any]:
    """Answers of the teacher alone and with drafts, in turn; the first prompt is answered once before, to warm up."""
    settings, names = generation.generation_config(writer.stop, max_new_tokens=most), [None, *DRAFTED]
    seconds, passes, drafted = ({name: 0.0 for name in names} for _ in range(3))
    rows = tokens = same = 0

    def answer(prompt: Indices, drafting: str | None) -> list[int]:
        inputs = generation.padded_on_the_left([prompt], device=target.device)
        if drafting is not None:
            drafter.generation_config = GenerationConfig(
                **{"num_assistant_tokens_schedule": "constant", **DRAFTED[drafting]}
            )
        with _Passes(target) as own, _Passes(drafter) as its:
            began = time.perf_counter()
            output = generation.generate(writer.model, inputs, settings, drafter=None if drafting is None else drafter)
            seconds[drafting] += time.perf_counter() - began
        passes[drafting] += own.count
        drafted[drafting] += its.count
        return output[0, len(prompt) :].tolist()

    with generation.plain(writer.model, target), generation.plain(drafter, drafter), _without_advice():
        for name in names:
            answer(prompts[0], name)
        for counts in (seconds, passes, drafted):
            counts.update(dict.fromkeys(names, 0.0))
        began = time.perf_counter()
        for prompt in prompts:
            if rows >= LEAST and time.perf_counter() - began > SECONDS:
                break
            answers = [answer(prompt, name) for name in names]
            rows, tokens = rows + 1, tokens + len(answers[0])
            same += all(each == answers[0] for each in answers)
    return {
        "rows": rows,
        "tokens": tokens,
        "max_new_tokens": most,
        "tokens_per_second": tokens / seconds[None],
        "equal": same / rows,
        "drafted": {
            name: {
                "acceptance": (tokens - passes[name]) / max(1, drafted[name]),
                "tokens_per_pass": tokens / passes[name],
                "speedup": seconds[None] / seconds[name],
            }
            for name in DRAFTED
        },
    }
