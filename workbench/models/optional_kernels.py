"""Kernels of other packages that make a GPU faster, by name: `doctor` lists them, and a run that lacks one says so.

Without them transformers computes by plain PyTorch, which is right and several times slower: layers of linear attention
(Qwen3.5, Kimi Linear), the short convolutions beside them, state spaces (Mamba and its hybrids).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import nn

from workbench.models.flash_kernels import NEWER, installed


@dataclass(frozen=True)
class OptionalKernels:
    """A package with kernels for NVIDIA's GPUs."""

    package: str
    """Its name for pip."""
    imports: str
    computes: str
    """What, in words."""
    functions: tuple[str, ...] = ()
    """Of transformers' modules, which it computes where it is installed; none: no layer waits for it."""
    generation: int | None = None
    """Major compute capability of the cards that it was written for; None: any."""


KERNELS = (
    OptionalKernels("liger-kernel", "liger_kernel", "norms, gates, rotations and the loss"),
    OptionalKernels(
        "flash-linear-attention",
        "fla",
        "linear attention (Qwen3.5, Qwen3-Next, Kimi Linear)",
        ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"),
    ),
    OptionalKernels(
        "causal-conv1d", "causal_conv1d", "short convolutions (Qwen3.5, LFM2, Mamba)", ("causal_conv1d_fn",)
    ),
    OptionalKernels(
        "mamba-ssm",
        "mamba_ssm",
        "state spaces (Mamba, Bamba, Falcon-H1, Nemotron-H)",
        ("mamba2_chunk_scan", "mamba_selective_scan"),
    ),
    *(
        OptionalKernels(each.title, each.package, "attention", generation=each.generation)  # not for pip
        for each in NEWER.values()
    ),
)


def version(kernels: OptionalKernels) -> str:
    """Of the package, as pip knows it; empty where it does not."""
    try:
        return metadata.version(kernels.package)
    except metadata.PackageNotFoundError:
        return ""


def missing(model: nn.Module) -> list[OptionalKernels]:
    """Packages that are not installed and by which layers of this model would compute."""
    homes = {type(module).__module__ for module in model.modules()}
    known = {name for home in homes if home in sys.modules for name in vars(sys.modules[home])}
    return [each for each in KERNELS if known & {*each.functions} and not installed(each.imports)]


def advice(model: nn.Module, device: torch.device) -> str | None:
    """A sentence on packages that a model lacks on a GPU; None where it lacks none, or there is none."""
    if device.type != "cuda" or not (lacking := missing(model)):
        return None
    what = " and ".join(each.computes.partition(" (")[0] for each in lacking)
    names = " ".join(each.package for each in lacking)
    return f"{what} by plain PyTorch, several times slower than by kernels that are not installed: pip install {names}"
