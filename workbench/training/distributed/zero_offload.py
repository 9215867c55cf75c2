"""DeepSpeed's settings (ZeRO, offload to the host and to disk): section `distributed`, or a JSON of your own."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.config import TrainingSections
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.errors import ConfigError

if TYPE_CHECKING:
    import torch

Settings = dict[str, Any]

_TRAVELLING = {"bfloat16": "bf16", "float16": "fp16"}
"""Precision in which gradients travel, by `compression.gradients`."""
KEPT_ELEMENTS = 100_000
"""With zero=3 a parameter of fewer stays on every device: fetching it would take longer than it is worth."""
OURS = {
    "train_batch_size": "batch.size",
    "train_micro_batch_size_per_gpu": "batch.tokens_per_device",
    "gradient_accumulation_steps": "batch.tokens_per_device",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "optimizer and train.learning_rate",
    "scheduler": "schedule",
    "fp16": "model.compute",
    "bf16": "model.compute",
    "managed_gradient_accumulation": "batch.tokens_per_device",
}
"""DeepSpeed's settings that a recipe decides, and by which of its keys."""
OLD_LOCK = 600.0
"""Seconds after which a compilation that left its lock behind was killed: everybody would wait for it for ever."""


def deepspeed(config: TrainingSections, compute: torch.dtype, *, world: int, trained: int) -> Settings:
    """DeepSpeed's settings for a run that trains so many parameters.

    Raises:
        ConfigError: As `read` does.
    """
    import torch

    return {
        "communication_data_type": _TRAVELLING.get(config.distributed.compression.gradients, "fp32"),
        "data_types": {"grad_accum_dtype": "fp32"},
        **own_or_written(config.distributed, trained=trained),
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": world,
        "gradient_accumulation_steps": 1,
        # How many micro-batches a step has differs from step to step: whoever calls says when it is over.
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.train.max_grad_norm,
        "bf16": {"enabled": compute == torch.bfloat16},
        "fp16": {"enabled": False},
        # torch's AdamW is as fast on a host as DeepSpeed's, which must be compiled there.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
    }


def own_or_written(section: DistributedConfig, *, trained: int) -> Settings:
    """A person's own settings, or those that section `distributed` says. Raises ConfigError: as `read` does."""
    return read(section) or {"zero_optimization": _zero(section, trained)}


def cuts_weights(section: DistributedConfig) -> bool:
    """Whether a process holds a share of each weight; with ZeRO and FSDP2 all of it while its module computes."""
    if section.deepspeed is not None:
        return bool(read(section)["zero_optimization"].get("stage") == 3)
    return section.zero == 3 or section.engine == "fsdp2" or section.tensor * section.pipeline > 1


def _zero(section: DistributedConfig, trained: int) -> Settings:
    places = {"cpu": {"device": "cpu"}, "nvme": {"device": "nvme", "nvme_path": str(section.nvme)}}
    elements = max(1, min(section.bucket_bytes // 4, trained))  # it makes room for all of them
    elements += elements % 2  # DeepSpeed asks for an even number
    settings: Settings = {
        "stage": section.zero,
        "overlap_comm": section.overlap and section.zero == 2,  # others need to know the last micro-batch before
        "contiguous_gradients": True,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
    }
    if section.zero == 3:
        settings |= {
            "stage3_prefetch_bucket_size": max(1, section.bucket_bytes // 4),
            "stage3_max_live_parameters": max(elements, 10**8),
            "stage3_max_reuse_distance": max(elements, 10**8),
            "stage3_param_persistence_threshold": KEPT_ELEMENTS,
        }
        settings |= {"zero_quantized_weights": True} if section.compression.weights == "int8" else {}
        settings |= {"zero_quantized_gradients": True} if section.compression.gradients == "int4" else {}
    if section.offload_optimizer in places:
        settings["offload_optimizer"] = places[section.offload_optimizer]
    if section.offload_parameters in places:
        settings["offload_param"] = places[section.offload_parameters]
    return settings


def read(section: DistributedConfig) -> Settings:
    """Content of a person's own DeepSpeed JSON; empty where there is none.

    Raises:
        ConfigError: It cannot be read, or contradicts the recipe.
    """
    path = section.deepspeed
    if path is None:
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"distributed.deepspeed: {path} cannot be read ({error}). Write the path of a DeepSpeed JSON."
        ) from None
    if not isinstance(settings, dict):
        raise ConfigError(f"distributed.deepspeed: {path} holds no JSON object.")
    ours = {key: value for key, value in settings.items() if key in OURS and value != "auto"}
    if ours:
        lines = "\n".join(f"  {key}: the recipe says it, in {OURS[key]}" for key in ours)
        raise ConfigError(
            f"distributed.deepspeed: {path} says again what the recipe says, and both cannot hold.\n{lines}\n"
            '  Leave these out of the file, or write "auto" for them.'
        )
    if "zero_optimization" not in settings:
        raise ConfigError(f"distributed.deepspeed: {path} has no zero_optimization. Write one, or leave the file out.")
    return {key: value for key, value in settings.items() if key not in OURS}


def require_nvme() -> None:
    """Compile them now, one process after the other; raises ConfigError where this machine cannot."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils import cpp_extension

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise ConfigError(
            "distributed.nvme: DeepSpeed writes to disk through libaio, which is not installed here. "
            "Run `apt install libaio-dev` (it is compiled once, in about a minute), or write cpu instead of nvme."
        )
    folder = Path(cpp_extension._get_build_directory("async_io", verbose=False))
    with (folder.parent / "workbench.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back also where this process is killed
        for left in (folder / "lock", folder.parent / "pin_memory" / "lock"):
            if left.exists() and time.time() - left.stat().st_mtime > OLD_LOCK:
                left.unlink()
        builder.load(verbose=False)
