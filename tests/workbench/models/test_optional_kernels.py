"""Optional kernels by name: what transformers asks for by itself, and what a run without them says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from tests.text_families import build
from workbench.models import optional_kernels

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("family", "packages"),
    [
        ("qwen3_5", ["flash-linear-attention", "causal-conv1d"]),
        ("lfm2", ["causal-conv1d"]),
        ("mamba", ["causal-conv1d", "mamba-ssm"]),
        ("llama", []),
    ],
)
def test_layers_say_which_kernels_they_lack(family: str, packages: list[str]) -> None:
    model = build(family)
    assert [each.package for each in optional_kernels.missing(model)] == packages
    said = optional_kernels.advice(model, CUDA)
    assert said is None if not packages else said is not None and said.endswith(f"pip install {' '.join(packages)}")
    assert optional_kernels.advice(model, torch.device("cpu")) is None


def test_an_installed_package_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_kernels, "installed", lambda package: package == "fla")
    assert [each.package for each in optional_kernels.missing(build("qwen3_5"))] == ["causal-conv1d"]


def test_transformers_takes_these_functions_from_these_packages() -> None:
    """Read from its source: a function that moves to another package, or has another name, shows here."""
    folder = Path(transformers.__file__).parent / "models"
    text = "\n".join(path.read_text() for path in folder.glob("*/modeling_*.py"))
    asked = re.findall(r'from_hub_with_fallback\("\w+", "(\w+)"\)\s*def (\w+)\(', text)
    for each in optional_kernels.KERNELS:
        assert {(each.imports, name) for name in each.functions} <= {*asked}
