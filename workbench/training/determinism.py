"""Where a killed run resumes bit for bit: kernels that add in one order, on the device that the run began on.

On a CPU torch's kernels do. On an accelerator some backward passes (attention, scattered sums) and cuBLAS on several
streams add in the order in which threads end, unless `train.deterministic` asks for others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from workbench.config import TrainingSections
from workbench.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATING = (":4096:8", ":16:8")
"""Workspaces of cuBLAS with which it repeats itself, the fast one first."""
FLASH = "FLASH_ATTENTION_DETERMINISTIC"
"""What transformers asks for the backward pass of the package flash-attn."""


def prepare(config: TrainingSections) -> None:
    """Set what libraries read once, before their first product; for the processes that this one starts, too.

    Raises:
        ConfigError: The environment asks for a workspace with which cuBLAS does not repeat itself.
    """
    if not config.train.deterministic:
        return
    if (given := os.environ.setdefault(WORKSPACE, REPEATING[0])) not in REPEATING:
        raise ConfigError(
            f"train.deterministic: {WORKSPACE}={given} is a workspace with which cuBLAS does not repeat itself. "
            f"Write {WORKSPACE}={REPEATING[0]}, or leave it out."
        )
    os.environ[FLASH] = "1"


@contextmanager
def kept(config: TrainingSections) -> Iterator[None]:
    """Inside the block torch computes as `train.deterministic` says.

    Raises:
        ConfigError: An operation of this training has no kernel that repeats itself.
    """
    if not config.train.deterministic:
        yield
        return
    memory: Any = torch.utils.deterministic
    filled, cudnn = memory.fill_uninitialized_memory, torch.backends.cuda.cudnn_sdp_enabled()
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # nothing here reads memory before it is written
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass does not repeat itself
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ConfigError(
            f"train.deterministic: {str(error).partition(',')[0]}. Write train.deterministic=false: a resumed run then "
            "agrees with a whole one up to rounding."
        ) from error
    finally:
        torch.use_deterministic_algorithms(False)
        memory.fill_uninitialized_memory = filled
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def of_resumed(
    config: TrainingSections, device: torch.device, *, before: Mapping[str, Any], here: Mapping[str, Any]
) -> str:
    """A sentence on the steps of a resumed run, where they need not be those of a whole one to the bit; else empty.

    Args:
        before: The device of the process before, as the manifest has it (`run_directory.hardware`).
        here: This one.
    """
    if before.get("name", here["name"]) != here["name"]:
        return (
            f" The steps before were taken on {before['name']}, and this is {here['name']}: those that follow agree "
            "with a whole run's up to rounding, not bit for bit."
        )
    if device.type == "cpu" or config.train.deterministic:
        return ""
    return (
        " On this device its steps agree with a whole run's up to rounding; bit for bit they do in a run that began "
        "with train.deterministic=true."
    )
