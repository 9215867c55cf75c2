"""What does not go with a pipeline is refused by name, with what to write."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.runs.ranks import Ranks
from workbench.training.distributed import layout_checks

ONE = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "evaluate": {"answers": 0}}
LLAMA = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 11, "num_hidden_layers": 3}


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({**ONE, "distributed": {"pipeline": 2}, **sections})


@pytest.mark.parametrize(
    ("sections", "cure"),
    [
        ({"recipe": "embed"}, r"Write recipe=classify\|mlm\|prefer\|reward\|sft\|tag"),
        ({"adapter": {"method": "dora"}}, r"Write adapter.method=full\|lora\|rslora\|lora\+"),
        ({"model": {"weights": "int8"}}, "Write model.weights=nf4"),
        ({"model": {"compute": "float16"}}, "Write model.compute=bfloat16"),
        ({"model": {"dropout": True}}, "Write model.dropout=false"),
        ({"model": {"new_tokens": ["<a>"]}}, r"Write model.new_tokens=\[\]"),
        ({"optimizer": {"name": "muon"}}, r"Write optimizer.name=adamw\|sgd\|lion"),
        ({"optimizer": {"sam": 0.05}}, "optimizer.sam. Write optimizer.sam=null"),
        ({"freeze": {"policy": "static"}}, "Write freeze.policy=none"),
        ({"average": {"method": "ema"}}, "Write average.method=none"),
        ({"layer_drop": {"rate": 0.2}}, "Write layer_drop={}"),
        ({"regularise": {"r_drop": 0.5}}, "Write regularise={}"),
        ({"train": {"compile": True}}, "Write train.compile=false"),
        ({"evaluate": {"answers": 4}}, "Write evaluate.answers=0"),
        ({"batch": {"packing": False}}, "Write batch.packing=auto"),
        ({"model": {"attention": "eager"}}, "Write model.attention=sdpa"),
        ({"data": {"train": "rows.jsonl", "sampling": {"by": "importance"}}}, "Write data.sampling={}"),
        ({"data": {"train": "rows.jsonl", "curriculum": {"by": "self_paced"}}}, "Write data.curriculum.by=length"),
    ],
)
def test_mistakes_say_what_to_write(sections: dict[str, Any], cure: str) -> None:
    with pytest.raises(ValueError, match=f"distributed.pipeline=2 .*{cure}, or distributed.pipeline=1"):
        config(**sections)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"zero": 2}, "zero=2"),
        ({"engine": "fsdp2", "zero": 3}, "zero=3, engine=fsdp2"),
        ({"sequence": 2}, "sequence=2"),
        ({"zero": 3, "offload_parameters": "cpu"}, "zero=3, offload_parameters=cpu"),
    ],
)
def test_other_layouts_of_weights_are_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} would cut or move them"):
        config(distributed={"pipeline": 2, **more})


def test_devices_that_make_no_whole_pipelines_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"distributed.pipeline=2 makes groups of 2 devices, and there are 3. Write --d"
    ):
        layout_checks.require(config(), Ranks(0, 3))
    layout_checks.require(config(), Ranks(0, 4))


def test_a_schedule_is_of_a_pipeline() -> None:
    with pytest.raises(ValueError, match=r"schedule=interleaved is of a pipeline. Write distributed.pipeline=2"):
        config(distributed={"schedule": "interleaved"})
    staged = {"pipeline": 2, "schedule": "zero_bubble"}
    with pytest.raises(ValueError, match=r"train.checkpointing keeps nothing .* Write train.checkpointing=false"):
        config(distributed=staged, train={"checkpointing": True})
    four = config(distributed=staged)
    with pytest.raises(
        ConfigError, match=r"needs 4 blocks with schedule=zero_bubble, .* Write distributed.schedule=1f1b"
    ):
        layout_checks.require_backbone(four, LlamaForCausalLM(LlamaConfig(**LLAMA)), [], longest=9)


def test_backbones_without_a_stretch_for_each_device_are_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    with pytest.raises(ConfigError, match=r"needs 4 blocks with .* has 3. Write distributed.pipeline=3 or"):
        layout_checks.require_backbone(config(distributed={"pipeline": 4}), model, [], longest=9)
    with pytest.raises(ConfigError, match=r"adapter.targets names lm_head, which is in none. Write adapter.targets="):
        layout_checks.require_backbone(config(), model, ["q_proj", "lm_head"], longest=9)
    layout_checks.require_backbone(config(), model, ["q_proj", "down_proj"], longest=9)
    opt = OPTForCausalLM(OPTConfig(**LLAMA))
    with pytest.raises(ConfigError, match=r"opt is none of the architectures .* Write distributed.pipeline=1"):
        layout_checks.require_backbone(config(), opt, [], longest=9)
