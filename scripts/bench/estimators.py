"""Bytes of weights, gradients and optimizer of a full fine-tuning in bfloat16 with AdamW: our plans' beside what
DeepSpeed's and accelerate's estimators say, as Markdown and JSON.

    python scripts/bench/estimators.py [--models 8b 32b 70b] [--devices 8] [--json FILE]

No weight is read: models are the config.json of random_llama.py. Nothing else is compared, as the estimators count
neither activations nor what travels: ours are the most that a device holds of weights, masters, gradients and the
optimizer's state at a moment of a step, and beside it with buckets and gathered weights, which DeepSpeed's allocates.
Sources: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, estimate_zero2_model_states_mem_needs and
estimate_zero3_model_states_mem_needs, without their factor for buffers of the host; accelerate/commands/estimate.py,
estimate_training_usage, of one device.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import measuring
import random_llama
from accelerate.commands.estimate import estimate_training_usage
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from workbench.config.sections.distributed_config import DistributedConfig, Place
from workbench.planning import sharded_memory
from workbench.planning.sharded_memory import GRADIENTS, MASTERS, MOMENTS, OPTIMIZER, WEIGHTS, Contents
from workbench.recipes.verbs.plans import plan as plans

CPU: Place = "cpu"
LAYOUTS = {
    "each device all": DistributedConfig(zero=0),
    "ZeRO 2": DistributedConfig(zero=2),
    "ZeRO 2, optimizer on the host": DistributedConfig(zero=2, offload_optimizer=CPU),
    "ZeRO 3": DistributedConfig(zero=3),
    "ZeRO 3, optimizer on the host": DistributedConfig(zero=3, offload_optimizer=CPU),
    "ZeRO 3, weights there too": DistributedConfig(zero=3, offload_optimizer=CPU, offload_parameters=CPU),
}
STATES = (WEIGHTS, MASTERS, GRADIENTS, OPTIMIZER)
HEADER = ["model", "layout", "estimator", "a device GB", "ours", "error", "with buckets", "host GB", "ours", "error"]


class Bytes(NamedTuple):
    """Of a device, and of the host for all devices."""

    device: float
    host: float


def main() -> None:
    arguments = _arguments()
    rows: list[list[object]] = [[*HEADER]]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in arguments.models:
            random_llama.configuration(shape, Path(folder) / shape)
            contents = _contents(Path(folder) / shape)
            for name, layout in LAYOUTS.items():
                estimator, theirs = estimated(contents, layout, devices=arguments.devices)
                ours = planned(contents, layout, devices=arguments.devices)
                whole = planned(contents, layout, devices=arguments.devices, buckets=True)
                found.append({"model": shape, "layout": name, "theirs": theirs, "ours": ours, "with_buckets": whole})
                cells = [*_beside(theirs.device, ours.device), _gb(whole.device), *_beside(theirs.host, ours.host)]
                rows.append([shape, name, estimator, *cells])
    print(measuring.markdown(rows))
    versions = ("torch", "transformers", "deepspeed", "accelerate")
    measuring.write_report(arguments, machine=measuring.machine("cpu", versions), found=found)


def planned(contents: Contents, layout: DistributedConfig, *, devices: int, buckets: bool = False) -> Bytes:
    """The most of a step's moments. `buckets`: with what travels and what is gathered."""
    moments = [sharded_memory.states(contents, layout, devices=devices, moment=each, passes=2) for each in MOMENTS]

    def counted(held: dict[str, int]) -> int:
        return sum(size for name, size in held.items() if buckets or name in STATES)

    return Bytes(max(counted(each.device) for each in moments), max(counted(each.host) for each in moments) * devices)


def estimated(contents: Contents, layout: DistributedConfig, *, devices: int) -> tuple[str, Bytes]:
    """What the estimator of a layout's engine says, and whose it is."""
    count = contents.trainable
    if layout.zero == 0:
        usage = estimate_training_usage(4 * count, "bfloat16")
        return "accelerate", Bytes(usage["model"] + usage["optimizer"] + usage["gradients"], 0)
    offload = layout.offload_optimizer == CPU
    if layout.zero == 2:
        host, device = estimate_zero2_model_states_mem_needs(
            count, devices, cpu_offload=offload, additional_buffer_factor=1.0
        )
        return "DeepSpeed", Bytes(device, host if offload else 0)  # without offload: what loading takes
    host, device, _ = estimate_zero3_model_states_mem_needs(
        count,
        max(contents.trained),
        devices,
        cpu_offload=offload,
        cpu_offload_params=layout.offload_parameters == CPU,
        additional_buffer_factor=1.0,
    )
    return "DeepSpeed", Bytes(device, host if offload else 0)


def _contents(model: Path) -> Contents:
    words = [f"model.id={model}", "model.weights=bfloat16", "adapter={method: full}"]
    return plans.solve("sft/chat", words, devices=8, device="h200").plan.contents


def _beside(theirs: float, ours: float) -> list[str]:
    return [_gb(theirs), _gb(ours), f"{ours / theirs - 1:+.0%}"] if theirs else ["", _gb(ours) if ours else "", ""]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f}"


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--models", nargs="*", default=["8b", "32b", "70b"], choices=list(random_llama.SHAPES))
    found.add_argument("--devices", type=int, default=8)
    found.add_argument("--json", type=Path, help="a file to write")
    return found.parse_args()


if __name__ == "__main__":
    main()
