"""A name that the hub cannot have is told before any work, and a hub that cannot be reached loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import ConfigError, FileError
from workbench.models.exporting import hub


@pytest.mark.parametrize("name", ["model", "a/b/c", "me/..", "me/a b", ""])
def test_a_name_that_is_none_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match="Write OWNER/NAME, such as me/my-model"):
        hub.require_name(name)


def test_a_hub_that_cannot_be_reached_leaves_the_export(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    hub.require_name("me/my-model")
    with pytest.raises(FileError, match=rf"nothing was pushed .*kept at {tmp_path}.*hf upload me/my-model"):
        hub.push(tmp_path, "me/my-model")
    assert (tmp_path / "README.md").read_text() == "mine"
