"""Real small backbones and data for every test; nothing leaves this folder or the test's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FILES = Path(__file__).parent / "files"
STORIES = FILES / "stories260k"


@pytest.fixture(scope="session", autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, no shared cache, one thread."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    torch.set_num_threads(1)  # these models are too small to share among threads
    yield
    patch.undo()


@pytest.fixture(scope="session")
def stories() -> str:
    """Folder of stories260K, a real Llama of 0.26 M parameters in float32."""
    return str(STORIES)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """120 short questions with answers of unequal length."""
    rows = [
        {"question": f"What comes after {n}?" + " Think about it." * (n % 5), "answer": f"{n + 1}" + " it is" * (n % 7)}
        for n in range(120)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
