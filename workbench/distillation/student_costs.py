"""What a student costs and saves: sizes, times and operations of the student and of its teacher, on the same rows.

Both stand in memory and are timed in turn, student, teacher, student, so that what else the machine does slows both. A
number of several repeats is their median; the first pass of each is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerBase

from workbench import adapters
from workbench.adapters import Full
from workbench.config import ModelConfig, RunConfig
from workbench.data.batching import Collate, Indices, Row, encoder_inputs, evenly_spaced
from workbench.distillation.teacher_sources import TeacherSource
from workbench.distillation.teachers import TeacherModel
from workbench.evaluation import generation
from workbench.models import backbones, exported, output_heads
from workbench.runs import cost_table, score_files
from workbench.runs.run_directory import Run, hardware

ROWS, PROMPT, WRITTEN, REPEATS = 32, 32, 16, 5
"""Rows of the large batch, tokens of its prompts at most, so that it takes no more memory than training did; tokens
that a decoder writes after a prompt, and passes that are timed at most."""
SECONDS, LARGE_SECONDS = 1.0, 4.0
"""Seconds after which no further repeat begins, and expected seconds beyond which the large batch is not timed."""
Pass = Callable[[], object]


@dataclass(frozen=True)
class Measurable:
    """A model that reads the same rows as another, whose costs are told."""

    model: nn.Module
    read: Callable[[Indices], object]
    """All that it says of these rows, in one pass."""
    parameters: int
    """Of the backbone and of all adapters that answer."""
    write: Callable[[Indices, int], object] | None = None
    """Writes so many tokens after the prompts of these rows; None where it writes no text."""
    copies: int = 1
    """Adapters like its own that answer together, each in a pass of its own."""


def size(model: nn.Module, copies: int = 1) -> int:
    """Parameters of a model whose adapter has so many copies."""
    return adapters.count(model).total + (copies - 1) * adapter_size(model)


def adapter_size(model: nn.Module) -> int:
    """Parameters of the adapter of a model; 0 where it has none."""
    return sum(each.numel() for name, each in model.named_parameters() if "default" in name.split("."))


def rows_to_read(count: int) -> Indices:
    """Numbers of the held-out rows that are read, among `count`."""
    return evenly_spaced(count, ROWS)


@torch.no_grad()
def measured(
    student: Measurable, teachers: Iterable[Measurable], lengths: Indices, *, sizes: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Costs of the student and of those who teach it together, as scores.json holds them.

    Args:
        student: Reads the rows of `rows_to_read`.
        teachers: One after another is made and timed beside the student; their costs are summed.
        lengths: Tokens of the rows (R,). One alone is that of median length.
        sizes: Bytes on disk of `student` and `teacher`.
    """
    one = np.argsort(lengths, kind="stable")[len(lengths) // 2][None]
    batches = {1: one, ROWS: np.resize(np.arange(len(lengths)), ROWS)}
    found: dict[str, list[dict[str, Any]]] = {"student": [], "teacher": []}

    def look(*models: Measurable) -> None:
        for costs, each, own in zip(found.values(), models, _times(models, batches), strict=False):
            known = {"weights": _stored(each.model), "parameters": each.parameters}
            costs.append({**known, "flops_row": operations(each, one), **own})

    for peer in teachers:
        look(student, peer)
        del peer  # before another is loaded
    if not found["student"]:
        look(student)
    together = {"student": _medians, "teacher": _sums}
    costs = {
        who: {name: _joined(together[who], name, [each[name] for each in models]) for name in models[0]}
        | {"bytes": sizes[who]}
        for who, models in found.items()
        if models
    }
    facts = {"device": hardware()["name"], "threads": torch.get_num_threads(), "tokens": int(lengths[one[0]])}
    return {score_files.COSTS: {**facts, **costs}}


def _stored(model: nn.Module) -> str:
    """The type of most of the numbers of a model."""
    elements = Counter[str]()
    for each in model.parameters():
        elements[str(each.dtype).removeprefix("torch.")] += each.numel()
    kind = elements.most_common(1)[0][0]
    return {"uint8": "4 bits"}.get(kind, kind)


def operations(model: Measurable, row: Indices) -> int | None:
    """Floating-point operations of one pass over a row, all copies together; None where some are not counted."""
    if any(each.dtype in (torch.int8, torch.uint8) for each in model.model.parameters()):
        return None  # the counter does not know products with quantised weights
    counter = FlopCounterMode(display=False)
    # The plain kernel of attention is made of products that the counter knows on every device.
    with counter, sdpa_kernel(SDPBackend.MATH), output_heads.whole_last_block(True):
        model.read(row)
    return model.copies * int(counter.get_total_flops())


def _times(models: Sequence[Measurable], batches: Mapping[int, Indices]) -> list[dict[str, float | None]]:
    """Seconds of each model, or its tokens a second, by their names in scores.json."""
    writes = all(each.write is not None for each in models)
    found: list[dict[str, float | None]] = [{} for _ in models]

    def timed(rows: Indices, written: int) -> list[float]:
        seconds = interleaved([_pass(each, rows, written) for each in models])
        return [each.copies * own for each, own in zip(models, seconds, strict=True)]

    once = timed(batches[1], int(writes))
    for size, rows in batches.items():
        if size > 1 and size * sum(once) > LARGE_SECONDS:
            taken: Sequence[float | None] = [None] * len(models)
        else:
            taken = once if size == 1 and not writes else timed(rows, WRITTEN if writes else 0)
        for own, first, seconds in zip(found, once, taken, strict=True):
            if writes:
                own |= {"first_token_s": first, f"tokens_per_second_{size}": seconds and size * WRITTEN / seconds}
            else:
                own[f"seconds_{size}"] = seconds
    return found


def _pass(model: Measurable, rows: Indices, written: int) -> Pass:
    if not written:
        return lambda: model.read(rows)
    assert model.write is not None, "all of them write"
    write = model.write
    return lambda: write(rows, written)


def interleaved(passes: Sequence[Pass]) -> list[float]:
    """Median seconds of each pass; they run in turn, and the first round warms up."""
    rounds, began = list[list[float]](), time.perf_counter()
    while len(rounds) < 2 or (len(rounds) <= REPEATS and time.perf_counter() - began < SECONDS):
        rounds.append([])
        for each in passes:
            start = time.perf_counter()
            each()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            rounds[-1].append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]


def _joined(how: Callable[[str, Sequence[Any]], Any], name: str, values: Sequence[Any]) -> Any:
    return None if None in values else how(name, values)


def _medians(name: str, values: Sequence[Any]) -> Any:
    """A cost of one model that was measured beside each of several."""
    return statistics.median(values) if name in cost_table.TIMES else values[0]


def _sums(name: str, values: Sequence[Any]) -> Any:
    """A cost of several models that answer one after another."""
    if name.startswith("tokens_per_second"):
        return 1 / sum(1 / each for each in values)
    return values[0] if name == "weights" else sum(values)


def sizes(base: RunConfig, run: Run, source: TeacherSource | None) -> dict[str, int]:
    """Bytes of the files with weights that each needs, backbone and adapters. `base`: the student as a plain run."""
    whole = isinstance(base.adapter, Full)
    found = {"student": _bytes(exported.model_under(base, run.adapter), () if whole else (run.adapter,))}
    return found | (
        {} if source is None else {"teacher": sum(_bytes(each.model, each.adapters) for each in source.each)}
    )


def _bytes(model: ModelConfig, folders: Sequence[Path]) -> int:
    paths = (path for each in (backbones.folder_of(model), *folders) for path in backbones.weight_files(each))
    return sum(path.stat().st_size for path in paths)


def of_tokens(
    models: Sequence[TeacherModel],
    backbone: Any,
    rows: Sequence[Row],
    *,
    parameters: int,
    collate: Collate,
    writes: bool,
) -> Measurable:
    """A language model, of several with one distribution all together, and the rows in its tokens. `writes`: whether it
    writes text, which is timed then."""

    def read(numbers: Indices) -> None:
        batch = collate([rows[int(number)] for number in numbers], epoch=0).to(backbone.device)
        for each in models:
            with each.active():
                hidden_BLD = each.head.hidden(each.model, batch.inputs)
                each.head.project(hidden_BLD.flatten(0, 1)[batch.positions_N])

    def write(numbers: Indices, tokens: int) -> None:
        most = max(len(row.input_ids) for row in rows) - WRITTEN if len(numbers) == 1 else PROMPT
        prompts = [generation.prompt_of(rows[int(number)])[: max(1, most)] for number in numbers]
        encodes = backbone.config.is_encoder_decoder
        inputs = encoder_inputs(prompts) if encodes else generation.padded_on_the_left(prompts)
        inputs = {name: tensor.to(backbone.device) for name, tensor in inputs.items()}
        config = generation.generation_config([], max_new_tokens=tokens)
        for each in models:
            with each.active(), generation.plain(each.model, backbone):
                generation.generate(each.model, inputs, config)

    return Measurable(backbone, read, parameters, write if writes else None)


def in_other_tokens(row: Row, own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> Row:
    """A row as another tokenizer cuts its text."""
    prompt = generation.prompt_of(row)
    parts = [
        np.asarray(theirs.encode(own.decode(ids), add_special_tokens=False), dtype=np.int64)
        for ids in (prompt, row.input_ids[len(prompt) :])
    ]
    ids = np.concatenate(parts)
    return Row(ids, np.arange(len(ids)) >= len(parts[0]), len(parts[0]) if row.source else 0)
