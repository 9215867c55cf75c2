"""Requests to evaluate: a file that one call takes, refused where several adapters train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ConfigError
from workbench.runs import evaluation_request


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    assert not evaluation_request.withdrawn(tmp_path)
    evaluation_request.ask(tmp_path, {"recipe": "sft"})
    evaluation_request.ask(tmp_path, {"recipe": "sft"})
    assert evaluation_request.is_open(tmp_path)
    assert evaluation_request.withdrawn(tmp_path) and not evaluation_request.withdrawn(tmp_path)
    assert not evaluation_request.is_open(tmp_path)


@pytest.mark.parametrize(
    "config", [{"recipe": "crossval"}, {"recipe": "sweep"}, {"recipe": "distill", "distill": {"peers": {"count": 2}}}]
)
def test_runs_of_several_adapters_say_that_they_cannot(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{config['recipe']} trains several adapters.*evaluate\.every"):
        evaluation_request.ask(tmp_path, config)
    assert not evaluation_request.is_open(tmp_path)
    assert evaluation_request.refusal({"recipe": "distill", "distill": {"peers": None}}) is None
