"""Plans of recipe prefer: what the reference reads, and what kto looks at, is a part of the time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.recipes.tasks.prefer.test_preference_run import BETA, RECIPE, pair, single
from tests.run_files import write_lines
from workbench.config import RunConfig
from workbench.models import output_heads
from workbench.recipes.load import load
from workbench.recipes.task import implementation
from workbench.recipes.tasks.prefer import preference_run
from workbench.recipes.verbs.plans.plan import plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    found = tmp_path_factory.mktemp("planned")
    write_lines(found / "pairs.jsonl", (pair(n) for n in range(30)))
    write_lines(found / "single.jsonl", (single(n) for n in range(30)))
    (found / "recipe.yaml").write_text(RECIPE.format(model=short_stories, train=found / "pairs.jsonl", beta=BETA))
    return found


def config(folder: Path, *words: str) -> RunConfig:
    return load(folder / "recipe.yaml", words)


def test_the_reference_reads_every_answer_once(folder: Path) -> None:
    own = config(folder)
    work, (*_, pairs) = plan(own).work, preference_run.prepare(own)
    assert work.once == pairs.train.lengths.sum() + pairs.held_out.lengths.sum() and work.looked == 0
    assert plan(config(folder, "prefer.loss=orpo")).work.once == 0


@pytest.mark.slow
def test_devices_share_what_the_reference_reads_unless_they_share_its_weights(folder: Path) -> None:
    alone = plan(config(folder)).work.once
    assert plan(config(folder), devices=2).work.once == alone / 2
    assert plan(config(folder, "distributed.zero=3"), devices=2).work.once == alone


@pytest.mark.slow
def test_a_forward_pass_is_a_part_of_a_step(folder: Path) -> None:
    """Over frozen weights, whose gradients need no products, a larger one than where all weights train."""
    with output_heads.whole_last_block(
        True
    ):  # half of these two blocks: a step leaves out more of it than a forward pass
        plans = [plan(config(folder, f"adapter={{method: {method}}}")) for method in ("full", "lora")]
    full, frozen = (each.work.forward / each.dry_run.flops_per_token for each in plans)
    assert 0.25 < full < frozen < 0.8


def test_kto_looks_at_as_many_answers_as_it_learns_from(folder: Path) -> None:
    own = config(folder, "prefer.loss=kto", f"data.train={folder / 'single.jsonl'}")
    work, (*_, rows) = plan(own).work, preference_run.prepare(own)
    assert rows.train.others is not None and rows.held_out.others is not None
    others = rows.train.others.lengths.sum()
    assert work.looked == pytest.approx(work.tokens * others / rows.train.lengths.sum())
    known = rows.train.lengths.sum() + rows.held_out.lengths.sum()
    assert work.once == known + others + rows.held_out.others.lengths.sum()


def test_a_model_of_another_name_is_told(folder: Path, short_stories: str) -> None:
    assert not implementation(config(folder)).plan_notes(config(folder))
    own = config(folder, f"prefer.reference={shutil.copytree(short_stories, folder / 'copy')}")
    (note,) = implementation(own).plan_notes(own)
    assert "copy, is taken to be as large as the model that trains" in note
