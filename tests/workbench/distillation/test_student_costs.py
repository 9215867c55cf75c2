"""What a student costs stands beside its teacher's in a run's scores; sizes and operations equal those counted here."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig

import workbench
from tests.recipes.over.test_distill import FULL, _config, _run, rows, teachers
from tests.run_files import read_scores
from workbench.distillation import student_costs
from workbench.distillation.student_costs import Measurable
from workbench.recipes.verbs.export import export
from workbench.runs import cost_table

__all__ = ["rows", "teachers"]  # fixtures


def _on_disk(*paths: Path) -> tuple[int, int]:
    """Parameters and bytes of safetensors files."""
    numbers = 0
    for path in paths:
        with safe_open(path, "pt") as file:
            numbers += sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    return numbers, sum(path.stat().st_size for path in paths)


def _operations(config: Any, tokens: int, supervised: int) -> int:
    """Of a Llama over a row: twice the products of q, k, v, o, the MLP, attention's two, and the head."""
    width, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    weights = width * (2 * width + 2 * width * groups // heads + 3 * config.intermediate_size)
    block = tokens * weights + 2 * tokens**2 * width
    return 2 * (config.num_hidden_layers * block + supervised * width * config.vocab_size)


@pytest.mark.slow
def test_a_decoder_and_its_teacher_are_told(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    distill = {"teacher": {"id": str(teachers["full"])}, "student": {"layers": [0]}}
    model = {"id": "teacher", "weights": "float32"}
    run = _run(_config(short_stories, rows, model=model, adapter=FULL, distill=distill), tmp_path / "run")
    costs = read_scores(run)["costs"]
    for who, folder in (("student", run), ("teacher", teachers["full"])):
        config = AutoConfig.from_pretrained(folder / "adapter")
        assert (costs[who]["parameters"], costs[who]["bytes"]) == _on_disk(folder / "adapter" / "model.safetensors")
        counted = {_operations(config, costs["tokens"], supervised) for supervised in range(1, costs["tokens"])}
        assert costs[who]["flops_row"] in counted
        assert all(costs[who][name] > 0 for name in cost_table.TIMES if "seconds" not in name)
    assert costs["student"]["parameters"] < costs["teacher"]["parameters"]
    table = cost_table.read(costs)
    assert table is not None and len(table.rows) == 6
    page = (run / "report.html").read_text()
    export(run, to="vllm", out=tmp_path / "served", weights="float32")
    for text in (page.lower(), (tmp_path / "served/README.md").read_text().lower()):
        assert table.note.lower() in html.unescape(text)
        assert all(shown.lower() in text for row in table.rows for shown in row)
    compared = dict(
        (label, values) for label, *values in workbench.compare([run, teachers["full"]], tmp_path / "c").rows
    )
    assert compared["teacher: parameters"] == [table.rows[0][1], "-"]


@pytest.mark.slow
def test_a_teacher_on_the_students_backbone_is_counted_without_its_adapter(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    pair = [str(teachers["lora"]), str(teachers["other"])]
    run = _run(_config(short_stories, rows, distill={"teacher": {"id": pair}}), tmp_path / "run")
    costs = read_scores(run)["costs"]
    base, adapter = Path(short_stories) / "model.safetensors", "adapter/adapter_model.safetensors"
    assert (costs["student"]["parameters"], costs["student"]["bytes"]) == _on_disk(base, run / adapter)
    theirs = _on_disk(base, *(teachers[name] / adapter for name in ("lora", "other")))
    assert (costs["teacher"]["parameters"], costs["teacher"]["bytes"]) == theirs
    assert costs["teacher"]["flops_row"] == 2 * costs["student"]["flops_row"]


def _layer(outputs: int, copies: int = 1) -> Measurable:
    layer, row = nn.Linear(3, outputs, bias=False), torch.ones(1, 3)
    return Measurable(layer, lambda rows: layer(row.expand(len(rows), 3)), student_costs.size(layer), copies=copies)


def test_the_costs_of_several_teachers_add_up() -> None:
    sizes = {"student": 12, "teacher": 99}
    lengths = np.asarray([5, 2, 9])
    teachers = (_layer(outputs, copies) for outputs, copies in ((4, 1), (7, 3)))
    costs = student_costs.measured(_layer(2), teachers, lengths, sizes=sizes)["costs"]
    assert costs["tokens"] == 5 and costs["student"]["weights"] == "float32"
    assert [costs[who]["flops_row"] for who in ("student", "teacher")] == [2 * 3 * 2, 2 * 3 * (4 + 3 * 7)]
    assert [costs[who]["parameters"] for who in ("student", "teacher")] == [6, 12 + 21]
    alone = student_costs.measured(_layer(2), (), lengths, sizes=sizes)["costs"]
    assert "teacher" not in alone and alone["student"]["bytes"] == 12
    table = cost_table.read(alone)
    assert table is not None and "No teacher" in table.note and cost_table.read({}) is None


def test_operations_on_quantised_weights_are_not_told() -> None:
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.int8), requires_grad=False)
    assert student_costs.operations(Measurable(layer, lambda _: None, 12), np.arange(1)) is None
