"""The seam of tasks: facts are asked and names are not, and what facts refuse is refused in their own sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.config import RunConfig, task_facts
from workbench.config.task_facts import OVER, TASKS, TaskFacts
from workbench.recipes.task import implementation

ROOT = Path(__file__).parents[2]
NAMES = {*TASKS, *OVER}
OTHER_TOOLS = ROOT / "workbench" / "config" / "foreign"
"""Translates the names of other tools into ours."""


def _branches(path: Path) -> Iterator[str]:
    """Yield comparisons of a recipe with a name, and collections of names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            asked = ast.unparse(node.left)
            constants = {each.value for right in node.comparators for each in ast.walk(right) if _is_name(each)}
            if constants and ("recipe" in asked or asked.endswith((".name", ".of"))):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, (ast.Tuple, ast.Set, ast.List, ast.Dict)):
            items = node.keys if isinstance(node, ast.Dict) else node.elts
            tasks = [each.value for each in items if isinstance(each, ast.Constant) and each.value in TASKS]
            if len(tasks) > 1 and len(tasks) == len(items):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES


def test_nobody_branches_on_the_name_of_a_task() -> None:
    """Outside of the files of a task, where facts answer instead."""
    paths = [path for room in ("workbench", "adapters", "recipes") for path in (ROOT / room).rglob("*.py")]
    own = (ROOT / "recipes" / "tasks", ROOT / "recipes" / "over" / "__init__.py", OTHER_TOOLS)
    assert len(paths) > 200
    others = [path for path in paths if not any(path.is_relative_to(each) for each in own)]
    assert not [branch for path in others for branch in _branches(path)]


def test_a_task_is_no_recipe_over_tasks() -> None:
    with pytest.raises(ValueError, match=r"of=sft names the task of recipe=.*Leave of out"):
        RunConfig.model_validate({"recipe": "sft", "of": "sft", "data": {"train": "rows.jsonl"}})


@pytest.mark.parametrize(
    ("task", "key"), [(name, key) for name, facts in TASKS.items() for key in facts.refuses], ids=str
)
def test_what_a_task_has_no_use_for_is_refused(task: str, key: str) -> None:
    given = {
        "data.format": "text", "data.truncate": "right", "data.loss_on": "all", "data.sources": {"a": {"train": "a"}},
        "data.streaming": {"on": True}, "model.chat_template": "x.jinja", "model.new_tokens": ["<x>"],
        "data.select": {"by": "random", "rows": 0.5}, "data.sampling": {"by": "importance"},
        "data.curriculum": {"by": "length"}, "data.augment": {"deletion": 0.1},
        "data.length_warm_up": {"start": 8}, "data.decontaminate": {"action": "drop", "against": ["t"]},
        "data.clean": ["exact_duplicate"], "regularise.label_smoothing": 0.1, "regularise.z_loss": 1e-4,
        "regularise.r_drop": 1.0, "image.column": "x", "image.size": 64, "image.prepare": {"median": 3},
        "image.augment": {"preset": "light"}, "image.depth": 8, "image.workers": 1,
    }  # fmt: skip
    section, _, name = key.partition(".")
    values = {"recipe": task, "data": {"train": "rows.jsonl"}}
    if key == "data.sources":
        values["data"] = {}
    values[section] = {**values.get(section, {}), name: given[key]}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        RunConfig.model_validate(values)


def test_a_name_is_a_word_that_nobody_has() -> None:
    facts = TASKS["sft"]
    for name in ("Sft", "my-task", "sweep"):
        with pytest.raises(ValueError, match="cannot name a task"):
            task_facts.register(TaskFacts(name=name, line="", module="mine", head=facts.head))
    with pytest.raises(ValueError, match="names the task of"):
        task_facts.register(TaskFacts(name="sft", line="", module="mine", head=facts.head))


def test_a_task_is_carried_out_by_its_own_module() -> None:
    config = RunConfig.model_validate({"recipe": "tag", "data": {"train": "rows.jsonl"}})
    assert type(implementation(config)).__module__ == TASKS["tag"].module
