"""A combined run is a run: it scores, serves and merges, and its weights are the weighted sum."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from workbench.cli.verbs import app
from workbench.errors import ConfigError
from workbench.models import exported
from workbench.recipes.verbs.combine import combine_runs
from workbench.recipes.verbs.merge import merge
from workbench.runs import run_directory

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SaveRun = Callable[..., Path]


@pytest.fixture
def pair(save_run: SaveRun, tmp_path: Path) -> list[Path]:
    """Two runs of different rank, scale and targets."""
    first = save_run(adapter={"method": "lora", "rank": 4, "alpha": 8}).rename(tmp_path / "first")
    second = save_run(adapter={"method": "rslora", "rank": 2, "alpha": 3, "targets": "mlp"}).rename(tmp_path / "second")
    return [first, second]


def test_the_combined_run_merges_to_the_weighted_sum(pair: list[Path], short_stories: str, tmp_path: Path) -> None:
    stops = GenerationConfig.from_pretrained(pair[1] / "adapter")
    stops.eos_token_id = [2, 7]
    stops.save_pretrained(pair[1] / "adapter")
    found = combine_runs(pair, weights=(0.5, -1.0), rank=None, out=tmp_path / "sum")
    assert found.error.overall < 1e-6 and found.ranks == (4, 6)
    assert found.parameters == sum(each.numel() for each in _tensors(tmp_path / "sum").values())
    for run in (*pair, tmp_path / "sum"):
        merge(run, out=run / "merged", weights="float32")
    base = AutoModelForCausalLM.from_pretrained(short_stories).state_dict()
    first, second, both = (_merged(run) for run in (*pair, tmp_path / "sum"))
    for name, value in base.items():
        wanted = value + 0.5 * (first[name] - value) - (second[name] - value)
        torch.testing.assert_close(both[name], wanted, rtol=1e-5, atol=1e-5)
    config = run_directory.read_config(tmp_path / "sum")
    assert config.data == run_directory.read_config(pair[0]).data
    assert exported.load(tmp_path / "sum", config).stop == sorted({2, 7, *exported.load(pair[0], config).stop})


def test_the_verb_says_what_a_lower_rank_costs(pair: list[Path], tmp_path: Path) -> None:
    words = ["combine", *map(str, pair), "--weights", "1,1", "--out", str(tmp_path / "sum")]
    said = CliRunner().invoke(app, [*words, "--rank", "3"])
    assert said.exit_code == 0, said.output
    error = run_directory.files.read_json(tmp_path / "sum" / "manifest.json")["combined"]["error"]
    assert 0.05 < error < 1 and f"{error:.2e}" in said.output and "rank 3" in said.output
    evaluated = CliRunner().invoke(app, ["evaluate", str(tmp_path / "sum")])
    assert evaluated.exit_code == 0 and "loss" in evaluated.output


def test_folders_beside_an_adapter_come_along(pair: list[Path], tmp_path: Path) -> None:
    """As embedders have, which write no answers."""
    for run in pair:
        (run / "adapter" / "1_Pooling").mkdir()
        (run / "adapter" / "1_Pooling" / "config.json").write_text("{}")
        (run / "adapter" / "generation_config.json").unlink()
    (pair[0] / "adapter" / "1_Pooling" / "config.json").chmod(0o444)
    (pair[0] / "adapter").chmod(0o555)
    combine_runs(pair, weights=(1.0, 1.0), rank=None, out=tmp_path / "sum")
    assert (tmp_path / "sum" / "adapter" / "1_Pooling" / "config.json").read_text() == "{}"
    copies = [tmp_path / "sum" / "adapter", *(tmp_path / "sum" / "adapter").rglob("*")]
    assert all(path.stat().st_mode & 0o200 for path in copies)
    (pair[0] / "adapter").chmod(0o755)
    (pair[1] / "adapter" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    with pytest.raises(ConfigError, match=r"differ in adapter/1_Pooling/config\.json"):
        combine_runs(pair, weights=(1.0, 1.0), rank=None, out=tmp_path / "other")


def test_mistakes_are_told_before_anything_is_written(pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "sum"
    with pytest.raises(ConfigError, match="--weights has 1 numbers for 2 runs"):
        combine_runs(pair, weights=(1.0,), rank=None, out=out)
    with pytest.raises(ConfigError, match="exists already"):
        combine_runs(pair, weights=(1.0, 1.0), rank=None, out=pair[0])
    config = (pair[1] / "config.yaml").read_text()
    (pair[1] / "config.yaml").write_text(config.replace("recipe: sft", "recipe: mlm"))
    with pytest.raises(ConfigError, match=r"second is of recipe mlm, and .*first of sft"):
        combine_runs(pair, weights=(1.0, 1.0), rank=None, out=out)
    (pair[1] / "config.yaml").write_text(config)
    (pair[1] / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r"differ in adapter/chat_template\.jinja"):
        combine_runs(pair, weights=(1.0, 1.0), rank=None, out=out)
    (pair[1] / "config.yaml").write_text(config.replace(run_directory.read_config(pair[1]).model.id, "starter"))
    with pytest.raises(ConfigError, match=r"second has model\.id=starter, and .*first"):
        combine_runs(pair, weights=(1.0, 1.0), rank=None, out=out)
    shutil.rmtree(pair[0] / "adapter")
    with pytest.raises(ConfigError, match="no adapter there yet"):
        combine_runs(pair, weights=(1.0, 1.0), rank=None, out=out)
    said = CliRunner().invoke(app, ["combine", str(pair[0]), "--weights", "a,b", "--out", str(out)])
    assert isinstance(said.exception, ConfigError) and "--weights a,b: expected numbers" in str(said.exception)
    with pytest.raises(ConfigError, match=r"--by tie: there is no such way .* sum, slerp, ties, dare, dare_ties"):
        combine_runs(pair, weights=(1.0, 1.0), by="tie", out=out)
    for by, density in (("sum", 0.5), ("ties", 0.0), ("ties", 1.5)):
        with pytest.raises(ConfigError, match=rf"--density {density:g}: .* this is by {by}"):
            combine_runs(pair, weights=(1.0, 1.0), by=by, density=density, out=out)
    assert not out.exists()


def test_a_merge_by_value_is_a_run_too(pair: list[Path], tmp_path: Path) -> None:
    words = ["combine", *map(str, pair), "--weights", "1,1", "--by", "ties", "--density", "0.3"]
    said = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "merged")])
    assert said.exit_code == 0 and "Against what --by gives" in said.output, said.output
    noted = run_directory.files.read_json(tmp_path / "merged" / "manifest.json")["combined"]
    assert noted["by"] == "ties" and noted["error"] > 0.01
    assert CliRunner().invoke(app, ["evaluate", str(tmp_path / "merged")]).exit_code == 0


def _tensors(run: Path) -> dict[str, Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def _merged(run: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32).state_dict())
