"""Count the kernels of a forward and backward pass: of a bank by its members, and of LoRA on experts.

    python scripts/bench/launches.py

On a GPU the profiler counts kernels. On a CPU operators stand in for them: each that computes is one, a grouped product
too, and views are none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel

import workbench
from workbench.adapters import Lora
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.precision.grouped_products import KernelGroups, PaddedGroups, fastest
from workbench.config import ModelConfig
from workbench.models import backbones
from workbench.planning.counters import LiveBytes

DEVICE = backbones.device()
SHAPE: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}
IDS = torch.arange(3, 67).view(4, 16)
EXPERTS = 64


class Operators(LiveBytes):
    """Counts operators that compute, and bytes that are alive."""

    count = 0

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        self.count += not (func.is_view or "empty" in name or name == "_unsafe_view")
        return super().called(func, args, kwargs)


def launches(model: torch.nn.Module, compute: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Kernels of a forward and backward pass over adapters in bfloat16, as they train, and bytes at its peak."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    compute().square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    if DEVICE.type == "cpu":
        with Operators() as counted:
            compute().square().sum().backward()
        return counted.count, counted.peak
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        compute().square().sum().backward()
        torch.accelerator.synchronize()
    kernels = [each for each in profiler.events() if each.device_type.name == "CUDA"]
    peak = int(torch.accelerator.max_memory_allocated()) - int(before)
    return sum(not each.name.startswith("Mem") for each in kernels), peak


def of_bank(members: int, *, ranks: Sequence[int], rows: Sequence[int], way: Any) -> int:
    """Of a bank with LoRA on all linear layers, whose members have these ranks and numbers of rows in turn."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16).to(DEVICE)
    configs = [Lora(rank=ranks[number % len(ranks)], alpha=16) for number in range(members)]
    bank = workbench.attach_bank(model.requires_grad_(False), configs, seeds=range(members))
    bank._routing.grouping = way
    bank.train()
    routed = [MemberRows(member, rows[number % len(rows)]) for number, member in enumerate(bank.members)]
    ids = IDS[:1].repeat(sum(each.many for each in routed), 1).to(DEVICE)

    def compute() -> torch.Tensor:
        logits: torch.Tensor = bank.model(input_ids=ids).logits
        return logits

    with bank.route(routed, length=ids.shape[1]):
        return launches(bank.model, compute)[0]


def of_experts(folder: Path, *, weights: Any, way: str) -> tuple[int, int]:
    """Of LoRA on each expert of a mixture."""
    section = ModelConfig(id=str(folder), weights=weights, compute="bfloat16")
    model: Any = backbones.load(section, None).model
    ours = Lora(rank=8, alpha=16, targets="attention", experts=True)
    if way == "ours":
        attached: Any = workbench.attach(model, ours, seed=0)
    else:
        model.set_experts_implementation(way)
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        attached = get_peft_model(model, LoraConfig(r=8, target_modules=attention, target_parameters=names))
    return launches(attached, lambda: attached.train()(input_ids=IDS.to(DEVICE)).logits)


@contextmanager
def mixture() -> Iterator[Path]:
    """The folder of a random Mixtral."""
    with tempfile.TemporaryDirectory() as folder:
        config = MixtralConfig(**SHAPE, num_local_experts=EXPERTS, num_experts_per_tok=4)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(folder)
        yield Path(folder)


def main() -> None:
    ways: dict[str, Any] = {"one by one": lambda *_, **__: None, "batched": lambda *_, **__: PaddedGroups}
    ways |= {"grouped": lambda *_, **__: KernelGroups, "as chosen here": fastest}
    print(f"| bank on {DEVICE.type}, two blocks | {' | '.join(ways)} |\n|---{'|---' * len(ways)}|")
    for kind, ranks, rows in (("alike", [8], [2]), ("unequal rows", [8], [1, 2]), ("and ranks", [4, 8, 12], [1, 2])):
        for members in (2, 5, 20):
            found = [str(of_bank(members, ranks=ranks, rows=rows, way=way)) for way in ways.values()]
            print(f"| {members}, {kind} | {' | '.join(found)} |", flush=True)
    print(f"\n| two blocks of {EXPERTS} experts: kernels, MB at the peak |  |\n|---|---|")
    with mixture() as folder:
        for weights, way, said in (
            ("bfloat16", "eager", "PEFT's over one expert after the other"),
            ("bfloat16", "grouped_mm", "PEFT's over grouped experts"),
            ("bfloat16", "ours", "ours"),
            ("nf4", "ours", "ours over nf4"),
        ):
            count, peak = of_experts(folder, weights=weights, way=way)
            print(f"| {said} | {count}, {peak / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
