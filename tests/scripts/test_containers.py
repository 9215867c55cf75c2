"""The image installs what README installs, in its order, and the editor's container is built from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "containers"


def test_each_target_installs_by_the_lines_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    stages = re.split(r"^FROM \S+ AS (\w+)$", (FOLDER / "Dockerfile").read_text(), flags=re.M)[1:]
    ran = {
        name: re.findall(r"^RUN (pip .+)$", text, re.M) for name, text in zip(stages[::2], stages[1::2], strict=True)
    }
    assert ran == {"base": [], "cpu": [ran["cpu"][0], *ran["cuda"]], "cuda": ran["cuda"]}
    assert [f"`{ran['cpu'][0]}`" in readme, f"{ran['cuda'][0]} && workbench" in readme] == [True, True]


def test_the_editors_container_is_a_target_of_the_image() -> None:
    found = json.loads((FOLDER / "devcontainer.json").read_text())
    build = found["build"]
    assert (FOLDER / build["dockerfile"]).exists() and (FOLDER / build["context"]).resolve() == ROOT
    assert f" AS {build['target']}\n" in (FOLDER / build["dockerfile"]).read_text()
    assert found["postCreateCommand"] in (ROOT / "README.md").read_text()
