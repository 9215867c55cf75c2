"""Trainings that a script puts together are those of `run`, with a loss, rows and a backbone that are handed in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import workbench
from tests.run_files import read_losses
from workbench.config import RunConfig
from workbench.data.held_out_split import Splits
from workbench.errors import ConfigError, Stopped
from workbench.training.callbacks import Silent


@pytest.fixture
def config(short_stories: str, questions: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": "sft",
            "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
            "adapter": {"method": "lora", "rank": 4, "alpha": 8},
            "data": {"train": str(questions), "held_out": 0.1},
            "batch": {"size": 6, "tokens_per_device": 128},
            "train": {"steps": 4, "learning_rate": 5e-3},
            "evaluate": {"every": None, "answers": 0},
        }
    )


def changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return RunConfig.model_validate(config.model_dump() | {section: config.model_dump()[section] | values})


def written_out(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
    """Cross-entropy: -log of the label's share of the exponentials."""
    return (logits_nV.logsumexp(-1) - logits_nV.gather(1, labels_n[:, None])[:, 0]).sum()


def test_the_training_is_that_of_run(config: RunConfig, tmp_path: Path) -> None:
    wanted = workbench.run(config, out=tmp_path / "run", quiet=True)
    fitted = workbench.fit(config, out=tmp_path / "fit")
    assert read_losses(fitted) == read_losses(wanted)
    scores = json.loads((wanted / "scores.json").read_text())["after"]
    assert workbench.evaluate(fitted) == {name: scores[name] for name in workbench.evaluate(fitted)}
    assert json.loads((fitted / "manifest.json").read_text())["status"] == "done"


def test_a_loss_that_is_written_out_is_that_loss(config: RunConfig, tmp_path: Path) -> None:
    plain, own = (workbench.fit(config, criterion=each, out=tmp_path / str(each)) for each in (None, written_out))
    assert read_losses(own) == pytest.approx(read_losses(plain), rel=1e-5)
    other = workbench.fit(config, criterion=lambda *ask: 2 * written_out(*ask), out=tmp_path / "twice")
    assert read_losses(other)[0] == pytest.approx(2 * read_losses(plain)[0], rel=1e-5)


def test_rows_in_memory_and_a_loaded_backbone_take_the_place_of_those_that_are_named(
    config: RunConfig, questions: Path, tmp_path: Path
) -> None:
    tokenizer = workbench.load_tokenizer(config.model)
    named = workbench.load_rows(config.data, tokenizer, seed=config.seed)
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    every = workbench.encode_rows(rows, tokenizer)
    split = Splits(every.subset(named.train.rows), every.subset(named.held_out.rows), None)
    backbone = workbench.load_backbone(config.model, tokenizer)
    nowhere = changed(config, "data", train="nowhere.jsonl")
    fitted = workbench.fit(nowhere, backbone=backbone, data=split, out=tmp_path / "memory")
    assert read_losses(fitted) == read_losses(workbench.fit(config, out=tmp_path / "file"))
    assert any("lora" in name for name, _ in backbone.model.named_parameters())


def test_members_of_a_bank_train_as_if_alone(config: RunConfig, tmp_path: Path) -> None:
    configs = [config, changed(changed(config, "adapter", rank=2), "train", learning_rate=1e-3)]
    together = workbench.fit_bank(configs, criterion=written_out, out=tmp_path / "bank")
    for number, (run, own) in enumerate(zip(together, configs, strict=True)):
        alone = workbench.fit(own, criterion=written_out, out=tmp_path / f"{number}")
        assert read_losses(run) == pytest.approx(read_losses(alone), rel=1e-4)
        assert workbench.evaluate(run)["loss"] == pytest.approx(workbench.evaluate(alone)["loss"], rel=1e-4)


def test_what_was_stopped_goes_on(config: RunConfig, tmp_path: Path) -> None:
    class Stopping(Silent):
        def stop_requested(self) -> bool:
            return True

    with pytest.raises(Stopped):
        workbench.fit(config, criterion=written_out, out=tmp_path / "two", callback=Stopping())
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["status"] == "stopped"
    resumed = workbench.fit(config, criterion=written_out, out=tmp_path / "two", resume=True)
    assert read_losses(resumed) == read_losses(workbench.fit(config, criterion=written_out, out=tmp_path / "one"))


def test_what_a_loss_of_ones_own_leaves_out_is_refused(config: RunConfig, tmp_path: Path) -> None:
    for section, values in {"regularise": {"z_loss": 1e-4}, "data": {"sampling": {"by": "tilted"}}}.items():
        with pytest.raises(ConfigError, match=rf"{section}\.\w+ works on cross-entropy"):
            workbench.fit(changed(config, section, **values), criterion=written_out, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="recipe=classify: `fit` takes recipe=sft or mlm"):
        workbench.fit(workbench.load_recipe("classify/quickstart"), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="model and data differ"):
        workbench.fit_bank([config, changed(config, "data", max_tokens=64)], out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"model\.new_tokens: a bank trains no rows"):
        workbench.fit_bank([changed(config, "model", new_tokens=["<|a|>"])], out=tmp_path / "run")


def test_the_chunks_of_a_loss_add_up_to_it(short_stories: str) -> None:
    section = workbench.load_recipe("sft/quickstart", [f"model.id={short_stories}", "model.weights=float32"]).model
    tokenizer = workbench.load_tokenizer(section)
    model = workbench.load_backbone(section, tokenizer).model
    head = workbench.output_head(model, model)
    batch = workbench.encode_rows([{"text": "Once upon a time"}, {"text": "The end"}], tokenizer).batch(np.arange(2))
    with torch.no_grad():
        logits_NV = model(**batch.inputs).logits.flatten(0, 1)[batch.positions_N]
    wanted = F.cross_entropy(logits_NV, batch.labels_N, reduction="sum") / 7
    for criterion in (None, written_out):
        loss = workbench.token_loss(model, head, criterion)
        torch.testing.assert_close(loss(batch, 1 / 7), wanted)
        weighted = batch.weighted(np.array([2.0, 2.0]))
        if criterion is None:
            torch.testing.assert_close(loss(weighted, 1 / 7), 2 * wanted)
