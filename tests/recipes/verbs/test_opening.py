"""A run says that it has begun, and what it will do, before anything that takes long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workbench.recipes import shipped
from workbench.recipes.verbs import opening

RECIPE = "recipe: sft\nmodel: {id: ./mine}\nadapter: {method: dora}\ndata: {train: rows.jsonl}\n"


def test_the_quickstart_is_told_with_its_time() -> None:
    told = " ".join(opening.sentences("sft/quickstart", []))
    for word in (
        "lora",
        "starter",
        "fairytaleqa_train.jsonl",
        "0.5 epochs in steps of 16 rows",
        "78 s of processor time",
    ):
        assert word in told


@pytest.mark.parametrize("recipe", shipped())
def test_every_shipped_recipe_can_be_told(recipe: str) -> None:
    told = opening.sentences(recipe, [])
    assert " trains " in told[0]
    assert all(line.endswith(".") for line in told if line.startswith("  Measured")), "cut in mid-sentence"


def test_overrides_count_and_measured_times_are_those_of_the_recipe() -> None:
    told = " ".join(opening.sentences("sft/quickstart", ["train.steps=7", "model.id=other", "budget.time=90m"]))
    assert "7 steps of 16 rows (budget: time 90m)" in told and "over other" in told
    for overrides, figures in (
        (["train.steps=7"], True),
        (["data.train=my.txt"], False),
        (["model.id=other"], False),
    ):
        told = " ".join(opening.sentences("sft/quickstart", overrides))
        assert ("As it is shipped: Measured on" in told) is figures


def test_a_file_is_told_and_mistakes_are_left_to_who_reads_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(RECIPE)
    assert opening.sentences(str(path), [])[:2] == [
        f"{path}: recipe sft trains dora over ./mine,",
        "  1 epoch in steps of 32 rows, on rows.jsonl.",
    ]
    for text in ("recipe: [", "model: 3\nbudget: 90m\n"):
        path.write_text(text)
        assert opening.sentences(str(path), [])
    assert opening.sentences("sft/quickstrat", []) == ["sft/quickstrat: reading the recipe ..."]


def test_methods_of_members_are_told_each_once(tmp_path: Path) -> None:
    members = "fleet.members={a: {adapter.method: dora}, b: {}, c: {adapter: {method: ia3}}, d: {adapter.rank: 4}}"
    (tmp_path / "e.yaml").write_text("adapter: {method: houlsby}")
    for recipe, override, methods in (
        ("fleet/quickstart", members, "dora, lora, ia3"),
        ("fleet/quickstart", f"fleet.members={tmp_path}", "houlsby"),
        ("fleet/quickstart", "seed=1", "lora"),
        ("sweep/quickstart", "sweep.over={adapter.method: [lora, ia3]}", "lora, ia3"),
        ("search/quickstart", "search.space={adapter.method: [dora, lora]}", "dora, lora"),
    ):
        assert f" trains {methods} over " in opening.sentences(recipe, [override])[0]


def test_nothing_of_it_needs_torch() -> None:
    code = (
        "import sys; from workbench.recipes.verbs.opening import sentences;"
        "sentences('sft/quickstart', []); print(*sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in ended.stdout.split()
