"""Groups of processes that cut blocks: each family's parts are its whole, and backbones that cannot be cut.

torchrun starts this file in two processes for the first.
"""

from __future__ import annotations

import copy
import os
import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from workbench import adapters
from workbench.adapters import Lora
from workbench.config import RunConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.errors import ConfigError
from workbench.runs.ranks import ALONE, Ranks, joined
from workbench.training import activation_checkpointing
from workbench.training.distributed import layout_checks, tensor_parallel
from workbench.training.distributed.placement import Placement

SIZES = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 13, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("gemma", "gemma2", "gemma3_text", "granite", "mistral", "qwen2", "qwen3")},
    "llama": {"attention_bias": True, "mlp_bias": True},
    **{name: {} for name in ("cohere", "olmo2", "phi3", "starcoder2")},
}
"""Architectures, by transformers' `model_type`, and settings of theirs."""
TWO = DistributedConfig(tensor=2)


def made(family: str, **changed: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **HEADS, **FAMILIES.get(family, {}), **changed})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():  # norms and biases of their own
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def with_lora(model: PreTrainedModel) -> nn.Module:
    """LoRA on every linear layer of the blocks, away from its start."""
    adapted = adapters.attach(model.requires_grad_(False), Lora(rank=3), seed=0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    return adapted


def outcome(model: Any) -> dict[str, Tensor]:
    """Logits and whole gradients of a model."""
    ids_BL = torch.arange(14).reshape(2, 7) % 11
    logits = model(input_ids=ids_BL).logits
    logits.backward(torch.linspace(-1, 1, logits.numel()).double().view_as(logits))
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in gradients.items()}
    return {"logits": logits.detach(), **whole}


class Sums(TorchDispatchMode):
    """Inside of it, elements are counted that processes add up as they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def main() -> None:
    ranks = joined()
    for family in FAMILIES:
        for method in (with_lora, lambda model: model.requires_grad_(True)):
            model = method(made(family))
            wanted = outcome(copy.deepcopy(model))
            counted = tensor_parallel.added_up(model)
            tensor_parallel.cut(model, TWO, ranks)
            assert any(isinstance(each, DTensor) for each in model.parameters()), family
            with Sums() as sums:
                found = outcome(model)
            assert counted is not None or family in ("olmo2", "phi3")  # which gather, too
            if counted is not None:
                # Cohere's first MLP reads what nothing gave that trains.
                more = 2 * SIZES["hidden_size"] * (family == "cohere" and method is with_lora)
                assert sums.elements == 14 * (sum(counted) - more), family
                model.zero_grad()
                activation_checkpointing.keep(model.train(), True)
                with Sums() as sums:
                    outcome(model)
                # Not the last sum of a block where nothing needs it; the first one's inputs are asked for gradients.
                again = sums.elements - 14 * (sum(counted) - more)
                assert 7 * counted.forward <= again <= 14 * (counted.forward + 5 * SIZES["hidden_size"]), family
            assert found.keys() == wanted.keys(), family
            for name, tensor in wanted.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)  # some norms are float32


@pytest.mark.slow
def test_the_parts_of_each_family_are_its_whole() -> None:
    from tests import forked  # unknown to who runs this file

    command = [forked.python(), "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]


def require(backbone: PreTrainedModel, *, size: int = 2, adapter: dict[str, Any] | None = None) -> None:
    sections = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "distributed": {"tensor": size}}
    config = RunConfig.model_validate({**sections, "adapter": adapter or {"method": "lora"}})
    layout_checks.require_backbone(config, backbone, [], longest=10)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_of_even_parts_can_be_cut(size: int) -> None:
    require(made("llama", num_key_value_heads=4), size=size)


@pytest.mark.parametrize(
    ("backbone", "cure"),
    [
        (("llama", {"num_key_value_heads": 1}), "has 4, with 1 of keys .* Write distributed={zero: 3}"),
        (
            ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
            "Write distributed.tensor=3",
        ),
        (("gpt2", {}), "needs a plan .* gpt2 has none. Write distributed={zero: 3}"),
        (("mixtral", {}), "mixtures of experts. Write distributed={zero: 3}"),
    ],
)
def test_other_blocks_are_refused(backbone: tuple[str, dict[str, Any]], cure: str) -> None:
    family, changed = backbone
    with pytest.raises(ConfigError, match=cure):
        require(made(family, **changed))


@pytest.mark.parametrize("method", ["rslora", "lora+", "full"])
def test_whatever_trains_plain_lora_can_be_cut(method: str) -> None:
    require(made("llama"), adapter={"method": method})


@pytest.mark.parametrize("method", ["dora", "ia3", "adalora", "vera", "pissa", "lora-ga"])
def test_methods_that_peft_does_not_cut_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=r"PEFT, which cuts the two matrices of plain LoRA .* adapter.method=lora"):
        require(made("llama"), adapter={"method": method})


def test_groups_of_neighbours_share_the_rows() -> None:
    groups = [Placement(TWO, Ranks(number, 6)).groups for number in range(6)]
    assert [(each.rank, each.world) for each in groups] == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]
    assert TWO.together == 2 and TWO.rows_together == 2


def test_every_process_reads_and_scores_a_part_of_the_model() -> None:
    second = Placement(TWO, Ranks(1, 2))
    assert second.scores and second.waiting and not second.probes


def test_a_process_alone_plans_one_part() -> None:
    model = with_lora(made("qwen3", intermediate_size=12))
    whole = {name: each.numel() for name, each in model.named_parameters()}
    tensor_parallel.cut(model, TWO, ALONE)
    model(input_ids=torch.arange(7)[None])
    part = {name: each.numel() / whole[name] for name, each in model.named_parameters()}
    cut = ("q_proj.base", "q_proj.lora_B", "down_proj.base", "down_proj.lora_A")
    assert all((share == 0.5) == any(each in name for each in cut) for name, share in part.items() if "norm" in name)
    assert {share for name, share in part.items() if "q_proj.base" in name or "down_proj.lora_A" in name} == {0.5}
    assert {share for name, share in part.items() if "q_proj.lora_A" in name or "embed" in name} == {1.0}


if __name__ == "__main__":
    main()
