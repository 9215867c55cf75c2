"""A run that is stopped while it scores keeps what is scored, and ends, resumed, with the same scores."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.run_files import read_scores
from tests.workbench.evaluation.scoring_together import Impatient
from workbench import evaluation
from workbench.config import RunConfig
from workbench.errors import Stopped
from workbench.evaluation import result_store, row_outputs, scores
from workbench.evaluation.row_passes import over_rows
from workbench.recipes.run import run
from workbench.training import capacity

Sections = dict[str, Any]


@pytest.fixture
def text(short_stories: str, questions: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": "sft",
            "model": {"id": short_stories, "weights": "float32"},
            "adapter": {"method": "lora", "rank": 2},
            "data": {"train": str(questions), "held_out": 0.4},
            "batch": {"size": 8},
            "train": {"steps": 2},
            "evaluate": {"every": None, "answers": 8, "max_new_tokens": 4},
            "save": {"every": None},
        }
    )


@pytest.fixture
def classes(tmp_path: Path, short_stories: str) -> Sections:
    rows = "".join(f"{'good' if n % 2 else 'bad'} story {n} {'it is ' * (n % 5)},{n % 2}\n" for n in range(48))
    (tmp_path / "rows.csv").write_text("text,label\n" + rows)
    return {
        "model": {"id": short_stories, "weights": "float32"},
        "adapter": {"method": "lora", "rank": 2},
        "data": {"train": str(tmp_path / "rows.csv")},
        "batch": {"size": 8},
        "train": {"steps": 2},
        "evaluate": {"every": None},
        "save": {"every": None},
    }


@pytest.fixture
def scored_rows(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many rows models scored, in small batches."""
    found: Counter[str] = Counter()

    def counted(model: Any, lengths: Any, compute: Any, *, scoring: Any = None, **more: Any) -> Any:
        def counting(rows: Any) -> Any:
            found.update({scoring.model: len(rows)} if scoring else {})
            return compute(rows)

        return over_rows(model, lengths, counting, scoring=scoring, **more)

    for module in (scores, row_outputs):
        monkeypatch.setattr(module, "over_rows", counted)
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", 64)
    return found


def _ends_equal(config: RunConfig, folder: Path, scored_rows: Counter[str], *, after: str) -> None:
    """Stopped in the third forward pass after it said `after`, and gone on with."""
    run(config, out=folder / "straight", resume=False, callback=Impatient())
    wanted = scored_rows.copy()
    scored_rows.clear()
    with pytest.raises(Stopped, match=r"what is scored so far is kept\.\nContinue with: --out .* --resume"):
        run(config, out=folder / "broken", resume=False, callback=Impatient(after=after, passes=4))
    assert json.loads((folder / "broken/manifest.json").read_text())["status"] == "stopped"
    assert (folder / "broken" / result_store.FILE).exists()
    run(config, out=folder / "broken", resume=True, callback=Impatient())
    ended = [read_scores(folder / name) for name in ("straight", "broken")]
    assert ended[0] == ended[1]
    assert not (folder / "broken" / result_store.FILE).exists()
    assert scored_rows == wanted, "something was scored twice"


@pytest.mark.few("Scoring what was saved")
@pytest.mark.parametrize("after", ["Scoring the backbone", "Scoring what was saved"])
def test_text(after: str, text: RunConfig, tmp_path: Path, scored_rows: Counter[str]) -> None:
    _ends_equal(text, tmp_path, scored_rows, after=after)


def test_classes(classes: Sections, tmp_path: Path, scored_rows: Counter[str]) -> None:
    config = RunConfig.model_validate({**classes, "recipe": "classify", "data": {**classes["data"], "held_out": 0.5}})
    _ends_equal(config, tmp_path, scored_rows, after="Scoring what was saved")


@pytest.mark.cube
def test_folds(classes: Sections, tmp_path: Path, scored_rows: Counter[str]) -> None:
    config = RunConfig.model_validate({**classes, "recipe": "crossval", "folds": {"k": 2}})
    _ends_equal(config, tmp_path, scored_rows, after="Asking what was saved")


@pytest.mark.slow
def test_processes_that_share_weights_stop_together(text: RunConfig, tmp_path: Path) -> None:
    config = text.model_dump(mode="json", exclude_unset=True) | {"distributed": {"zero": 3}}
    config["data"]["limit"], config["evaluate"]["answers"] = 72, 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [forked.python(), "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(Path(__file__).with_name("scoring_together.py")), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    ended = [read_scores(tmp_path / run) for run in ("straight", "broken")]
    assert ended[0] == ended[1]
    assert not (tmp_path / "broken" / result_store.FILE).exists()


def test_answers_that_were_cut_short_are_not_kept(text: RunConfig, trained: Path, tmp_path: Path) -> None:
    from workbench.data.text import tokenized
    from workbench.models import exported
    from workbench.runs import run_directory

    config = run_directory.read_config(trained)
    model = exported.load(trained, config)
    rows = tokenized.load(config.data, model.tokenizer, model.template, seed=config.seed).held_out
    asked: list[bool] = []

    def in_the_middle() -> bool:
        asked.append(len(asked) > 4)
        return asked[-1]

    scoring = result_store.ResultStore(tmp_path, in_the_middle).by("after")
    with pytest.raises(Stopped):
        evaluation.answers(model.model, rows, model.tokenizer, count=4, max_new_tokens=99, scoring=scoring)
    assert not (tmp_path / result_store.FILE).exists()
