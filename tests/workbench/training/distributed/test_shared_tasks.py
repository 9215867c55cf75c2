"""Tasks that exchange more than gradients have the curve and the scores of one process in two, whatever each holds.

Embeddings are compared with those of all processes, answers are written and read by each its part, and a student's
teacher stands beside what is cut.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench
from tests.conftest import cells, write_questions
from tests.matrix import LAYOUTS
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_task_layouts import text
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

EMBED = ["recipe=embed", "data.train={}/texts.jsonl", "data.held_out=0.2"]
REWARDED = [
    *["recipe=reinforce", "data.train={}/prompts.jsonl", "data.held_out=0.2", "rewards=[{file: '{}/reward.py'}]"],
    *["reinforce={answers: 4, max_new_tokens: 12}", "evaluate.answers=4"],
]
TAUGHT = ["recipe=distill", "distill.alpha=0.7"]
WRITTEN = "distill.teacher={id: '{}/teacher', weights: float32}"
RUNS = {
    "embed": EMBED,
    "embed dropout": [*EMBED, "adapter.dropout=0.2", "batch.tokens_per_device=60"],
    "embed packed": [*EMBED, "model.weights=nf4"],
    "rewarded": REWARDED,
    "rewarded twice": [*REWARDED, "reinforce.updates=2", "reinforce.kl=loss", "reinforce.beta=0.1"],
    "rewarded whole": [*REWARDED, "adapter={method: full}", "reinforce.beta=0"],
    "taught": [*TAUGHT, WRITTEN],
    "taught by itself": [*TAUGHT, "distill.teacher.id=backbone", "distill.loss=jsd"],
    "taught packed": [*TAUGHT, WRITTEN, "model.weights=nf4"],
}
"""Settings of each; the folder stands for {}."""
WHOLE, CUT = ("ddp", "zero1", "zero2"), ("zero3", "fsdp2_2", "fsdp2_3")
CELLS = [
    *((name, layout) for name in ("embed", "embed dropout") for layout in (*WHOLE, *CUT)),
    *((name, layout) for name in ("rewarded", "rewarded twice", "rewarded whole") for layout in WHOLE),
    *((name, layout) for name in ("taught", "taught by itself") for layout in ("zero2", *CUT)),
    *((name, "fsdp2_3") for name in ("embed packed", "taught packed")),
]
REWARD = """
def reward(answers):
    return [sum(letter in "aeiou" for letter in each.text) / (1 + len(each.text)) for each in answers]
"""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """The runs that are asked for, of two processes and of one, in folders of their names."""
    folder = tmp_path_factory.mktemp("shared")
    recipe = {
        "recipe": "sft",
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"train": str(write_questions(folder / "rows.jsonl", ["It is" + " so" * (n % 7) for n in range(40)]))},
        "batch": {"size": 5, "tokens_per_device": 160},
        "train": {"steps": 3, "learning_rate": 5e-3},
        "evaluate": {"every": None, "answers": 0},
        "save": {"every": None},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    (folder / "texts.jsonl").write_text("".join(json.dumps(text(n)) + "\n" for n in range(40)))
    prompts = [{"question": f"What comes after {n}?" + " Think." * (n % 3)} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "reward.py").write_text(REWARD)
    asked = cells(request, "test_two_processes_have_the_curve_of_one")
    own = {name: [word.replace("{}", str(folder)) for word in words] for name, words in RUNS.items()}
    if any("taught" in cell["name"] for cell in asked):
        workbench.run(str(folder / "recipe.yaml"), ["adapter={method: full}"], out=folder / "teacher", quiet=True)
    for name in {cell["name"] for cell in asked}:
        workbench.run(str(folder / "recipe.yaml"), own[name], out=folder / f"{name} alone", quiet=True)
    layouts.in_processes(
        folder,
        [
            (f"{cell['name']} {cell['layout']}", [*own[cell["name"]], f"distributed={LAYOUTS[cell['layout']]}"], None)
            for cell in asked
        ],
    )
    return folder


def lines(run: Path, name: str) -> list[float]:
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in told if line.get(name) is not None]


@pytest.mark.nightly(but=["embed-fsdp2_3", "rewarded twice-zero2"])
@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_two_processes_have_the_curve_of_one(runs: Path, name: str, layout: str) -> None:
    run, alone = runs / f"{name} {layout}", runs / f"{name} alone"
    # Losses of rewards are differences that nearly cancel; the rewards themselves are the same answers'.
    assert lines(run, "loss") == pytest.approx(lines(alone, "loss"), rel=1e-5, abs=1e-8 if "rewarded" in name else 0)
    norms = lines(run, "grad_norm")  # which say more: without a reference, the first update's loss is 0 by its equation
    assert norms == pytest.approx(lines(alone, "grad_norm"), rel=1e-3) and len(set(norms)) == 3
    assert lines(run, "reward[mean]") == lines(alone, "reward[mean]")
    found, wanted = (json.loads((each / "scores.json").read_text()) for each in (run, alone))
    for when in ("before", "after"):
        figures = {key: value for key, value in wanted[when].items() if isinstance(value, float)}
        assert {key: found[when][key] for key in figures} == pytest.approx(figures, rel=1e-4, abs=1e-4)
