"""Groups of processes that cut blocks, and backbones whose blocks cannot be cut."""

from __future__ import annotations

import pytest
from transformers import BertConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from workbench.config import RunConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.errors import ConfigError
from workbench.runs.ranks import ALONE, Ranks
from workbench.training.distributed import tensor
from workbench.training.distributed.placement import Placement

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}


def require(backbone: PretrainedConfig, size: int = 2) -> None:
    sections = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "distributed": {"tensor": size}}
    tensor.require(RunConfig.model_validate(sections), backbone)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_of_even_parts_can_be_cut(size: int) -> None:
    require(LlamaConfig(**SIZES), size)


@pytest.mark.parametrize(
    ("backbone", "cure"),
    [
        (LlamaConfig(**{**SIZES, "num_key_value_heads": 1}), "8 heads, 1 of keys .* Write distributed={zero: 3}"),
        (LlamaConfig(**{**SIZES, "intermediate_size": 93}), "93 features. Write distributed={zero: 3}"),
        (
            LlamaConfig(**{**SIZES, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
            "Write distributed.tensor=3",
        ),
        (LlamaConfig(**SIZES, attention_bias=True), "attention_bias"),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias"),
        (Qwen3Config(**SIZES, attention_bias=True), "each device would add the bias"),
        (BertConfig(), "bert is none of the architectures .* Write distributed={zero: 3}"),
    ],
)
def test_other_blocks_are_refused(backbone: PretrainedConfig, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        require(backbone)


def test_groups_of_neighbours_share_the_rows() -> None:
    layout = DistributedConfig(tensor=2)
    groups = [Placement(layout, Ranks(number, 6)).groups for number in range(6)]
    assert [(each.rank, each.world) for each in groups] == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]
    assert layout.together == 2 and layout.rows_together == 2


def test_every_process_reads_and_scores_a_part_of_the_model() -> None:
    second = Placement(DistributedConfig(tensor=2), Ranks(1, 2))
    assert second.scores and second.waiting and not second.probes


def test_a_process_alone_plans_one_part() -> None:
    own = tensor.group(DistributedConfig(tensor=4), ALONE)
    assert (own.number, own.size, own.processes) == (0, 4, None)
