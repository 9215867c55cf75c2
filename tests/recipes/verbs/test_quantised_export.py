"""What a quantised export loses and saves is measured beside the model that it was made of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tests.recipes.verbs.test_export import SaveRun, _kl, _of_run
from workbench.cli.verbs import app
from workbench.errors import ConfigError
from workbench.evaluation.perplexity import Agreement
from workbench.recipes.load import load
from workbench.recipes.tasks.embed.task import Angle
from workbench.recipes.verbs.export import _require_close
from workbench.recipes.verbs.quantised_export import PairedModels


class _Table(nn.Module):
    """A model whose logits stand in a table."""

    output, config = "logits", None

    def __init__(self, table_VC: Tensor) -> None:
        super().__init__()
        self.table_VC = table_VC

    def forward(self, input_ids: Tensor, **_: Tensor) -> Any:
        return SimpleNamespace(logits=self.table_VC[input_ids])


def test_changes_are_those_at_real_positions() -> None:
    one = torch.zeros(4, 3)
    other = torch.tensor([[9.0, 9, 9], [0, 1, 0], [0, 0, -2], [0, 0, 0]])  # token 0 is padding
    pair: Any = PairedModels(_Table(other), _Table(one))  # type: ignore[arg-type]
    ids = torch.tensor([[1, 2, 3], [3, 0, 0]])
    assert pair(input_ids=ids, attention_mask=(ids > 0).long()).logits.max() == 9
    assert (pair.largest, pair.summed, pair.count) == (2, 3, 12)
    assert [row["input_ids"].tolist() for row in pair.rows] == [[[1, 2, 3]], [[3]]]


@pytest.mark.nightly(but=["int8"])
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantised_export_is_smaller_and_tells_its_error(weights: str, save_run: SaveRun, tmp_path: Path) -> None:
    run, out = save_run(), tmp_path / "out"
    words = ["export", str(run), "--to", "onnx", "--weights", weights, "--out", str(out)]
    told = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert f"written in {weights}." in told and "Before it was quantised: On" in told and "bytes on disk" in told
    card = (out / "README.md").read_text()
    for title in ("bytes on disk", "time for a row", "time for 32 rows"):
        assert f"| {title} |" in card
    assert "Outputs change by" in card and "by onnxruntime" in card
    ids, wanted = _of_run(run)
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()})
    assert 1e-8 < _kl(wanted, torch.from_numpy(logits).double()) < 0.1
    assert sorted(each.suffix for each in out.iterdir() if "onnx" in each.name) == [".onnx"]


@pytest.mark.parametrize(("weights", "advice"), [("int8", "float32"), ("int4", "float32 or int8")])
def test_a_model_that_too_few_bits_made_another_is_refused(weights: str, advice: str) -> None:
    source: Any = SimpleNamespace(quantised=weights, weights="float32", config=load("sft/quickstart"))
    with pytest.raises(ConfigError, match=rf"is not kept(.|\n)*Write --weights {advice}\."):
        _require_close(source, Agreement(kl=0.2, top1=0.5, positions=9))
    _require_close(source, Agreement(kl=0.05, top1=0.9, positions=9))
    _require_close(source, Angle(9, 0.95, 0.1))
    with pytest.raises(ConfigError, match=r"least cosine 0\.85"):
        _require_close(source, Angle(9, 0.85, 0.1))
