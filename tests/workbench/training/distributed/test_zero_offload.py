from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.training.distributed import zero_offload


def config(**distributed: object) -> RunConfig:
    return RunConfig.model_validate({"recipe": "sft", "data": {"train": "rows.jsonl"}, "distributed": distributed})


def test_six_settings_become_deepspeeds() -> None:
    found = zero_offload.deepspeed(
        config(zero=3, offload_optimizer="cpu", offload_parameters="nvme", nvme="/disk", bucket_bytes=400),
        torch.bfloat16,
        world=4,
        trained=10**9,
    )
    zero = found["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/disk"}
    assert zero["reduce_bucket_size"] == 100
    few = zero_offload.deepspeed(config(zero=2), torch.bfloat16, world=2, trained=99)["zero_optimization"]
    assert few["reduce_bucket_size"] == few["allgather_bucket_size"] == 100, "DeepSpeed asks for an even number"
    assert found["bf16"] == {"enabled": True}
    assert found["train_batch_size"] == 4 and found["gradient_accumulation_steps"] == 1


def test_a_file_of_ones_own_is_taken_whole(tmp_path: Path) -> None:
    own = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, "wall_clock_breakdown": True}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**own, "train_batch_size": "auto", "bf16": "auto"}))
    found = zero_offload.deepspeed(config(deepspeed=str(path)), torch.float32, world=2, trained=10)
    assert {key: found[key] for key in own} == own
    assert found["bf16"] == {"enabled": False} and found["train_batch_size"] == 2


@pytest.mark.parametrize("key", zero_offload.OURS)
def test_what_the_recipe_says_it_cannot_say(tmp_path: Path, key: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, key: 1}))
    with pytest.raises(ConfigError, match=f"{key}: the recipe says it"):
        zero_offload.read(config(deepspeed=str(path)).distributed)


@pytest.mark.parametrize(
    ("section", "cure"),
    [
        ({"zero": 0, "offload_optimizer": "cpu"}, "zero=2"),
        ({"zero": 2, "offload_parameters": "cpu"}, "zero=3"),
        ({"zero": 2, "offload_optimizer": "nvme", "nvme": "/disk"}, "zero=3"),
        ({"zero": 3, "offload_optimizer": "nvme"}, "nvme=FOLDER"),
        ({"zero": 3, "deepspeed": "ds.json"}, "Leave out zero"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(section: dict[str, object], cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        config(**section)
