"""Every verb over backbones that also read pictures, of each task that learns what they have: towers change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.test_table import ALONE, OF_RECIPES, OF_RUNS, TASKS, Table, refused_verb
from tests.text_families import PICTURES, save

HEADED = sorted(name for name, facts in TASKS.items() if facts.head in ("text", "hidden"))


@pytest.mark.slow
@pytest.mark.nightly(but=["reinforce-qwen3_vl"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of stock PEFT
@pytest.mark.parametrize("family", PICTURES)
@pytest.mark.parametrize("task", HEADED)
def test_every_verb_takes_it_or_says_why_not(task: str, family: str, tmp_path: Path) -> None:
    table = Table(tmp_path, save(family, tmp_path / family))
    table.backbones[task] = table.llama
    for verb in (*OF_RECIPES, *OF_RUNS):
        if refused_verb(task, ALONE, verb) is None:
            status, said = table.verb(task, ALONE, verb)
            if verb == "serve" and status:  # and what to do instead
                assert "cannot be served here: it keeps something else than alike keys and values" in said
                assert "`workbench merge` writes a model that other servers load" in said
            else:
                assert status == 0, (verb, said)
