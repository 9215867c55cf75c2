"""Pages are run as they stand: what their shell blocks show, in one shell, with the settings of their comments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.recipes.test_published_files import PUBLISHED
from tests.scripts.shown_commands import PAGES, ROOT, TUTORIALS, blocks, inline, run_in_shell
from workbench.config.yaml_text import dump_yaml

RUN = [page for page in PAGES if any(block.runs_as_printed for block in blocks(page))]
IDS = [str(page.relative_to(ROOT)) for page in RUN]
ROWS = "".join(json.dumps({"question": f"How many is {n}?", "answer": f"It is {n}."}) + "\n" for n in range(40))
RECIPES = {"sft.yaml": "sft/quickstart", "prefer.yaml": "prefer/quickstart"}
"""Files of a reader's own, by the names that pages give them, and what a test takes instead."""
TINY = "train.steps=2 evaluate.answers=1 evaluate.max_new_tokens=4 evaluate.samples=0 data.held_out=0.2"
"""Settings that make a second of a run."""


def _write_what_a_reader_has(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "qlora.yml").write_text(dump_yaml(PUBLISHED["axolotl/examples/llama-3/qlora.yml"]))
    for name, recipe in RECIPES.items():
        shutil.copy(ROOT / "recipes" / "configs" / f"{recipe}.yaml", folder / name)
    (folder / "scripts").symlink_to(ROOT / "scripts")


@pytest.mark.nightly(
    but=[
        *("recipes/tasks/prefer.md", "recipes/tasks/reward.md", "recipes/verbs/init.md"),
        *("scripts/tutorials/distil.md", "scripts/tutorials/small_model.md"),
    ]
)
@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=IDS)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    _write_what_a_reader_has(tmp_path)
    run_in_shell("\n".join(block.script() for block in blocks(page) if block.runs_as_printed), tmp_path)
    if page in TUTORIALS:
        promised = [code for code in inline(page) if code.startswith("runs/") and " " not in code]
        assert [name for name in promised if not (tmp_path / name).exists()] == []


@pytest.mark.slow
def test_the_first_commands_of_the_readme_run_on_own_rows(tmp_path: Path) -> None:
    """From `init` to `merge`, as printed, but for a backbone without network, few steps, and an answer to `init`."""
    (block,) = [each for each in blocks(ROOT / "README.md") if "workbench init" in each.text]
    lines = [line.partition("  #")[0].rstrip() for line in block.text.splitlines()]
    assert [line.split()[1] for line in lines] == ["init", "check", "run", "generate", "merge"]
    (tmp_path / "my.jsonl").write_text(ROWS)
    script = (
        "\n".join(lines)
        .replace("Qwen/Qwen3-0.6B", "starter")
        .replace("data.train=my.jsonl", f"data.train=my.jsonl {TINY}")
        .replace("init my.yaml", "init my.yaml --rows my.jsonl --memory 8GB")
    )
    assert script.count("model.id=starter") == script.count(TINY) == 2
    run_in_shell(script, tmp_path)
    assert (tmp_path / "runs/mine/report.html").is_file() and (tmp_path / "merged/model.safetensors").is_file()


@pytest.mark.slow
def test_the_page_on_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks one after another, as one script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    code = [block.text for block in blocks(ROOT / "scripts" / "README.md") if block.language == "python"]
    assert len(code) > 4
    exec(compile("\n".join(code), "scripts/README.md", "exec"), {"__name__": "page"})
    assert (tmp_path / "best.jsonl").read_text()
