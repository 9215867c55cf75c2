"""`workbench doctor`: what this machine and environment can do, and what is known to go wrong on it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from workbench.adapters.precision import fp8_layers
from workbench.models import backbones, flash_kernels, optional_kernels
from workbench.runs import run_directory
from workbench.runs.files import cache_folder

LITTLE_DISK = 5 * 10**9
"""Free bytes below which a run with checkpoints of a billion parameters may end in a full disk."""
LITTLE_SHARED = 256 << 20
"""Bytes of /dev/shm below which processes that share tensors fail, as in a container with its default of 64 MiB."""
COPIED = 256 << 20
"""Bytes by which the speed of a link is measured."""
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)[af]?")
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class MachineFact:
    """One fact about the machine or the environment."""

    subject: str
    fact: str
    cure: str = ""
    """The problem, and what to do; empty where nothing is."""
    is_fault: bool = False
    """Whether runs fail because of it; else they are slower, or some settings are refused."""


def examine() -> list[MachineFact]:
    """What this machine and environment can do, and what is known to go wrong on it.

    Returns:
        Findings, faults first: a `subject`, the `fact`, and where something can be mended its `cure`. Runs fail where
        `is_fault`.

    Examples:
        >>> import workbench
        >>> {"packages", "device", "memory"} <= {finding.subject for finding in workbench.doctor()}
        True
    """
    checks: list[Callable[[], Iterator[MachineFact]]] = [
        packages,
        optional_packages,
        processor,
        accelerator,
        communication,
        links,
        threads,
        memory,
        disks,
        quantisation,
        kernels,
        extras,
    ]
    facts = [finding for check in checks for finding in check()]
    return sorted(facts, key=lambda each: (not each.is_fault, not each.cure))


def packages() -> Iterator[MachineFact]:
    """Packages that the workbench needs, in the versions that it goes with."""
    name = "peft-workbench"
    yield MachineFact(name, f"{metadata.version(name)}, Python {run_directory.versions()['python']}")
    wrong = list(_unmet(metadata.requires(name) or []))
    versions = ", ".join(
        f"{package} {version}"
        for package, version in run_directory.versions().items()
        if package not in ("python", name)
    )
    cure = f"{'; '.join(wrong)}. Write: pip install -c constraints.txt -e ." if wrong else ""
    yield MachineFact("packages", versions, cure, is_fault=bool(wrong))


def _unmet(requirements: list[str]) -> Iterator[str]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if _version(requirement.name) is None:
            yield f"{requirement.name} is not installed"
        elif fault := _other_version(requirement):
            yield fault


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _other_version(requirement: Requirement) -> str:
    """An installed package of a version that does not go with the workbench, in words; empty where it does."""
    version = _version(requirement.name)
    if version is None or requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} {version} is there, {requirement.specifier} is needed"


def optional_packages() -> Iterator[MachineFact]:
    """Packages of extras that are installed in a version that does not go with the workbench."""
    requirements = [Requirement(each) for each in metadata.requires("peft-workbench") or []]
    extras = [each for each in requirements if each.marker is not None and not each.marker.evaluate({"extra": ""})]
    for fault in dict.fromkeys(filter(None, map(_other_version, extras))):
        name = fault.partition(" ")[0]
        yield MachineFact(
            name, fault, f"What needs it fails or computes otherwise: pip install -c constraints.txt -U {name}"
        )


def processor() -> Iterator[MachineFact]:
    """The device that computes, and its precision."""
    hardware = run_directory.hardware()
    size = f"{hardware['memory_bytes'] / 2**30:.0f} GiB"
    yield MachineFact("device", f"{hardware['device']}: {hardware['name']}, {hardware['cores']} cores, {size}")
    native = backbones.has_bfloat16_units(backbones.device())
    fact = (
        "computed in hardware: model.weights=auto takes it" if native else "emulated: model.weights=auto takes float32"
    )
    yield MachineFact("bfloat16", fact)


def accelerator() -> Iterator[MachineFact]:
    """Devices besides the processor, and a driver that torch was not built for."""
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            fact = f"{torch.cuda.get_device_name(number)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            capability, built = torch.cuda.get_device_capability(number), torch.cuda.get_arch_list()
            foreign = not runs_on(capability, built)
            cure = f"This torch has kernels for {', '.join(built)} only. Install another build from pytorch.org."
            yield MachineFact(f"cuda:{number}", fact, cure if foreign else "", is_fault=foreign)
    elif DRIVER.exists() and (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) in ("", "-1"):
        yield MachineFact("accelerator", f"hidden by CUDA_VISIBLE_DEVICES={hidden}", "Unset it to train on the GPU.")
    elif DRIVER.exists():
        yield MachineFact(
            "accelerator",
            f"an NVIDIA driver is there, torch {torch.__version__} does not use it",
            "Install a build of torch for its CUDA version (pytorch.org); `nvidia-smi` shows it.",
            is_fault=True,
        )


def communication() -> Iterator[MachineFact]:
    """The library by which several devices talk: NCCL between GPUs, gloo between processes on cores."""
    there = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    if not torch.cuda.is_available():
        yield MachineFact(
            "NCCL", f"{'not used' if there else 'not in this torch'}: without a GPU processes talk by gloo"
        )
    elif there:
        yield MachineFact("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        cure = "Several devices talk by gloo, slowly. Install torch from pytorch.org."
        yield MachineFact("NCCL", "not in this torch", cure)


def links() -> Iterator[MachineFact]:
    """Whether GPUs reach each other's memory, and how fast each copies to the next one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    try:
        rates = {(one, (one + 1) % count): link_speed(one, (one + 1) % count) for one in range(count)}
    except torch.OutOfMemoryError:
        speed = "no room to measure how fast they copy"
    else:
        slowest = min(rates, key=rates.__getitem__)
        one, other = slowest
        speed = f"{rates[slowest] / 1e9:.0f} GB/s from cuda:{one} to cuda:{other}, the slowest of {len(rates)} links"
    if not apart:
        yield MachineFact("links", f"each GPU reaches the memory of all others; {speed}")
        return
    told = ", ".join(f"cuda:{one} to cuda:{other}" for one, other in apart[:3]) + (", ..." if apart[3:] else "")
    cure = (
        "What they exchange goes through the host. Choose GPUs that reach each other by CUDA_VISIBLE_DEVICES "
        "(`nvidia-smi topo -m` shows which), or a layout that sends less: distributed.zero=0."
    )
    yield MachineFact("links", f"no peer access: {told}; {speed}", cure)


def link_speed(one: int, other: int) -> float:
    """Bytes a second at which a GPU copies to another one: the fastest of three copies."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{one}")
    target = torch.empty_like(source, device=f"cuda:{other}")
    seconds = []
    for _ in range(4):  # the first one sets the link up
        torch.cuda.synchronize(one)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(other)
        seconds.append(time.perf_counter() - began)
    return COPIED / min(seconds[1:])


def runs_on(capability: tuple[int, int], built: list[str]) -> bool:
    """Whether a GPU of a compute capability runs a torch that was built for these architectures.

    A binary (`sm_80`) runs on the same major version from its minor one on; an intermediate form (`compute_90`) is
    compiled for all that is newer. Other words, those of ROCm, say nothing.
    """
    known = [match for match in map(_ARCHITECTURE.fullmatch, built) if match]
    for kind, major, minor in (match.groups() for match in known):
        own = int(major), int(minor)
        if own <= capability and (kind == "compute" or own[0] == capability[0]):
            return True
    return not known


def threads() -> Iterator[MachineFact]:
    """Cores that torch may use."""
    allowed, used = len(psutil.Process().cpu_affinity()), torch.get_num_threads()
    cure = ""
    if used < allowed // 2:
        cure = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')} leaves cores idle. Unset it for a single run."
    yield MachineFact("threads", f"{used} compute, on {allowed} cores that this process may use", cure)


def memory() -> Iterator[MachineFact]:
    """Free memory, and what processes share."""
    free = psutil.virtual_memory()
    yield MachineFact("memory", f"{free.available / 2**30:.1f} of {free.total / 2**30:.1f} GiB free")
    shared = Path("/dev/shm")
    if shared.exists() and (total := shutil.disk_usage(shared).total) < LITTLE_SHARED:
        yield MachineFact(
            "/dev/shm",
            f"{total / 2**20:.0f} MiB",
            "Processes share tensors there: start the container with --shm-size=2g.",
        )


def disks() -> Iterator[MachineFact]:
    """Room for runs and for caches."""
    for subject, folder in (("runs here", Path.cwd()), ("cache", cache_folder())):
        there = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield MachineFact(
                subject, f"{there} cannot be written", "Set WORKBENCH_CACHE, or work in another folder.", is_fault=True
            )
        else:
            cure = "Checkpoints may fill it: save.keep=1, or --out on another disk." if free < LITTLE_DISK else ""
            yield MachineFact(subject, f"{folder}: {free / 1e9:.0f} GB free", cure)


def quantisation() -> Iterator[MachineFact]:
    """Whether 4-bit weights work here, by quantising some."""
    try:
        from bitsandbytes import functional

        value = torch.linspace(-1, 1, 4096, device=backbones.device())
        packed, state = functional.quantize_4bit(value, quant_type="nf4")
        error = (functional.dequantize_4bit(packed, state) - value).abs().max().item()
    except Exception as error_:  # of a library with native code: whatever it raises, it does not work
        yield MachineFact("nf4, int8", f"bitsandbytes fails: {error_}", "Take model.weights=bfloat16 or float32.")
        return
    multiplied = "multiplied" if fp8_layers.multiplies(backbones.device()) else "emulated"
    yield MachineFact("fp8", f"products are {multiplied} here")
    yield MachineFact("nf4, int8", f"work; largest error of nf4 {error:.2f} of the largest value")


def kernels() -> Iterator[MachineFact]:
    """Optional kernels for the GPUs that are here."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return
    generation = torch.cuda.get_device_capability()[0]
    fitting = [each for each in optional_kernels.KERNELS if each.generation in (None, generation)]
    there = [each for each in fitting if flash_kernels.installed(each.imports)]
    lacking = [f"{each.package} for {each.computes}" for each in fitting if each not in there]
    versions = (f"{each.package} {optional_kernels.version(each)}".strip() for each in there)
    told = [", ".join(versions) or "none", f"not installed: {', '.join(lacking)}"]
    yield MachineFact("optional kernels", "; ".join(told[: 1 + bool(lacking)]))


def extras() -> Iterator[MachineFact]:
    """Programs and packages that some settings need."""
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    cure = "" if compiler else "train.compile=true needs one: install g++."
    yield MachineFact("C++ compiler", compiler or "none", cure)
    if find_spec("torchvision") is not None:
        try:
            import_module("torchvision")
        except Exception as error:  # built for another torch, which shows in many ways
            yield MachineFact(
                "torchvision",
                f"does not import: {error}",
                "Uninstall it, or install the build for this torch.",
                is_fault=True,
            )
    if (given := os.environ.get("HF_HUB_OFFLINE")) not in (None, "", "0"):
        yield MachineFact("hub", f"HF_HUB_OFFLINE={given}: only what was fetched before is found")
