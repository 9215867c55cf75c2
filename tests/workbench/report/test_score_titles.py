"""Every score that a task reports has a title and, where one is better, a direction."""

from __future__ import annotations

import pytest

from workbench.cli.ui.run_folder import main_score
from workbench.config.sections.metrics import choice
from workbench.config.task_facts import TASKS, TaskFacts
from workbench.report import score_titles


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_main_score_of_every_task_has_the_direction_of_its_facts(task: TaskFacts) -> None:
    titles = score_titles.of(task.report)
    assert task.score == "loss" or titles[task.score][1] == ("high" if task.higher_is_better else "low")


@pytest.mark.parametrize(("before", "after", "better"), [(0.4, 0.2, True), (0.2, 0.4, False)])
def test_a_score_of_which_less_is_better_falls(before: float, after: float, better: bool) -> None:
    named = {"before": before, "after": after}
    scores = {when: {"wer": one, "wer_low": one - 0.01, "wer_high": one + 0.01} for when, one in named.items()}
    found = main_score({"recipe": "sft"}, scores)
    assert found is not None and found["better"] is better


def test_a_metric_of_the_users_own_is_judged_as_he_says() -> None:
    for word, direction in (("higher", "high"), ("lower", "low")):
        judge = choice("mine.py:cost", word)  # type: ignore[arg-type]
        assert score_titles.of("classes", judge=judge)["cost"] == ("cost", direction)
