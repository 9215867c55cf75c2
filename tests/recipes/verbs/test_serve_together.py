"""`evaluate` and `predict` in two processes, which share the rows: scores and files are those of one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench
from tests import forked
from tests.conftest import MINILM, cells, save_tiny, write_animals, write_questions
from tests.recipes import answering
from tests.run_files import write_lines
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

RECIPES = ("sft", "classify", "crossval", "embed", "rerank", "reward")
FEW = RECIPES[:2]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    write_lines(path, rows)
    return str(path)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """A run of each recipe that is asked for, in folders of their names, and what two processes and one say of rows."""
    folder = tmp_path_factory.mktemp("runs")
    bert = save_tiny(folder / "bert", "Bert", "SequenceClassification", MINILM)
    questions = str(write_questions(folder / "questions.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(31)]))
    animals = str(write_animals(folder / "animals.jsonl", range(45)))
    tests = str(write_animals(folder / "tests.jsonl", range(45, 62)))
    told = [(n, f"Who saw {n}?", f"It was {n} of them." + " Yes." * (n % 3)) for n in range(40)]
    pairs = write(folder / "pairs.jsonl", [{"anchor": asked, "positive": answer} for _, asked, answer in told])
    ranked = [{"anchor": asked, "positive": answer, "negatives": [f"No {n}."]} for n, asked, answer in told]
    candidates = write(folder / "candidates.jsonl", ranked)
    judged = [{"prompt": asked, "chosen": f" {answer}", "rejected": f" No {n}."} for n, asked, answer in told]
    judgements = write(folder / "judgements.jsonl", judged)
    of_recipes: dict[str, tuple[str, str, dict[str, Any]]] = {
        "sft": (short_stories, questions, {"evaluate": {"every": None, "answers": 5, "max_new_tokens": 6}}),
        "classify": (bert, animals, {}),
        "crossval": (bert, animals, {"folds": {"k": 3}, "tta": {"views": ["typos"], "merge": "mean"}}),
        "embed": (bert, pairs, {}),
        "rerank": (bert, candidates, {}),
        "reward": (short_stories, judgements, {}),
    }
    names = {cell["recipe"] for cell in cells(request, "test_scores_are_those_of_one_process")} | {"sft", "classify"}
    for recipe, (model, train, own) in of_recipes.items():
        if recipe not in names:
            continue
        data = {"train": train} if recipe == "crossval" else {"train": train, "held_out": 0.3}
        values = {
            "recipe": recipe,
            "model": {"id": model, "weights": "float32", "compute": "float32"},
            "adapter": {"method": "lora", "rank": 4},
            "data": data,
            "batch": {"size": 8},
            "train": {"steps": 4, "learning_rate": 1e-2},
            "evaluate": {"every": None},
        }
        (folder / f"{recipe}.yaml").write_text(dump_yaml({**values, **own}))
        workbench.run(str(folder / f"{recipe}.yaml"), out=folder / recipe, quiet=True)
    own_tests = {"crossval": [f"data.test={tests}"]}
    asked = [(name, own_tests.get(name, []), of_recipes[name][1]) for name in RECIPES if name in names]
    (folder / "asked.json").write_text(json.dumps(asked))
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    answering.main(folder, folder / "one")
    command = [forked.python(), "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", answering.__file__, str(folder), str(folder / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def told(*words: str) -> subprocess.CompletedProcess[str]:
    command = [forked.python(), "-m", "workbench.cli.verbs", *words, "--devices", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.nightly(but=FEW)
@pytest.mark.parametrize("recipe", RECIPES)
def test_scores_are_those_of_one_process(folder: Path, recipe: str) -> None:
    found, wanted = (json.loads((folder / which / f"{recipe}.json").read_text()) for which in ("two", "one"))
    assert found == pytest.approx(wanted, abs=2e-6) and wanted


@pytest.mark.nightly(but=FEW)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_file_has_the_rows_of_one_process_in_their_order(folder: Path, recipe: str) -> None:
    found, wanted = (pd.read_parquet(folder / which / f"{recipe}.parquet") for which in ("two", "one"))
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-5, atol=1e-6)
    assert len(wanted) > 20


def test_the_command_writes_once_and_says_so_once(folder: Path, tmp_path: Path) -> None:
    source, out = folder / "questions.jsonl", tmp_path / "answers.parquet"
    done = told("predict", str(folder / "sft"), str(source), "--max-new-tokens", "6", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"31 answers in {out}\n"
    pd.testing.assert_frame_equal(pd.read_parquet(out), pd.read_parquet(folder / "one" / "sft.parquet"))
    done = told("evaluate", str(folder / "classify"))
    assert done.returncode == 0 and done.stdout.count(" brier ") == 1, done.stderr


def test_a_mistake_ends_all_and_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "Who?", "answer": "I."}\n{"question": \n')
    out = tmp_path / "answers.csv"
    done = told("predict", str(folder / "sft"), str(tmp_path / "bad.jsonl"), "--out", str(out))
    assert done.returncode == 2 and "bad.jsonl" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*answers*"))
    text = (folder / "sft" / "config.yaml").read_text().replace("recipe: sft", "recipe: prefer")
    (tmp_path / "preferred").mkdir()
    (tmp_path / "preferred" / "config.yaml").write_text(text)
    done = told("evaluate", str(tmp_path / "preferred"))
    assert done.returncode == 2 and "recipe prefer" in done.stderr and "Leave --devices out" in done.stderr
