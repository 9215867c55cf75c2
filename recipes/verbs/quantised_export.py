"""What an ONNX model in 8 or 4 bits costs and loses beside the one in float32 that it was made of.

Legend: B rows, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.distillation import student_costs
from workbench.models.exporting.onnx_model import OnnxModel
from workbench.runs import units
from workbench.runs.run_directory import hardware


class PairedModels(nn.Module):
    """A quantised ONNX model, called like its original, whose outputs are compared with those of the plain one."""

    def __init__(self, quantised: OnnxModel, plain: OnnxModel) -> None:
        super().__init__()
        self.quantised, self.plain = quantised, plain
        self.largest = self.summed = self.squares = 0.0
        self.count = 0
        self.rows: list[dict[str, Tensor]] = []
        """Inputs of each row that was read, not padded, a batch of one."""

    @property
    def config(self) -> Any:
        """Configuration of the original model."""
        return self.quantised.config

    def forward(self, **inputs: Any) -> Any:
        """The quantised model's outputs; what they differ by at real positions is added up."""
        found, wanted = self.quantised(**inputs), self.plain(**inputs)
        wanted_B, found_B = (getattr(each, self.plain.output).double() for each in (wanted, found))
        mask_BL = inputs.get("attention_mask")
        if wanted_B.ndim == 3 and mask_BL is not None:
            wanted_B, found_B = wanted_B[mask_BL.bool()], found_B[mask_BL.bool()]
        difference_B = (found_B - wanted_B).abs()
        self.largest = max(self.largest, float(difference_B.max()))
        self.summed += float(difference_B.sum())
        self.squares += float(wanted_B.square().sum())
        self.count += difference_B.numel()
        self.rows += [_row(inputs, row) for row in range(len(next(iter(inputs.values()))))]
        return found

    @property
    def sentence(self) -> str:
        """How far outputs differ, for a person."""
        mean, size = self.summed / self.count, (self.squares / self.count) ** 0.5
        return (
            f"Outputs change by {units.number(mean)} on average and {units.number(self.largest)} at most; their root "
            f"mean square is {units.number(size)}."
        )


def _row(inputs: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    one = {name: each[row : row + 1] for name, each in inputs.items() if each is not None}
    if "attention_mask" not in one:
        return one
    real_L = one["attention_mask"][0].bool()
    return {name: each[:, real_L] for name, each in one.items()}


def costs(pair: PairedModels, files: tuple[Path, Path]) -> tuple[list[tuple[str, str, str, str]], str]:
    """Rows of a table as `card.QUANTISED_COLUMNS` has them, and a sentence on how they were measured.

    A row of median length is timed alone and 32 times in one batch, both models in turn.

    Args:
        files: The plain model, and the quantised one.
    """
    sizes = [sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*")) for path in files]
    rows = [_row_of("bytes on disk", sizes, units.size)]
    row = sorted(pair.rows, key=lambda each: next(iter(each.values())).numel())[len(pair.rows) // 2]
    once = 0.0
    for batch in (1, student_costs.ROWS):
        if batch * once > student_costs.LARGE_SECONDS:
            break
        inputs = {name: each.repeat_interleave(batch, 0) for name, each in row.items()}
        seconds = student_costs.interleaved([partial(each, **inputs) for each in (pair.plain, pair.quantised)])
        once = sum(seconds)
        rows.append(_row_of("time for a row" if batch == 1 else f"time for {batch} rows", seconds, units.step))
    tokens = f", rows of {row['input_ids'].shape[1]:,} tokens" if "input_ids" in row else ""
    threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    return rows, f"Measured in turn on {hardware()['name']}, {threads}{tokens}."


def _row_of(title: str, both: Sequence[float], shown: Callable[[float], str]) -> tuple[str, str, str, str]:
    plain, quantised = both
    return title, shown(plain), shown(quantised), f"{plain / quantised:.3g} times"
