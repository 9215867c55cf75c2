"""Speech, audio classification and recordings within conversations have the curve of one process in two."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench
from tests.conftest import cells
from tests.recipes.tasks.sft.test_speech import transcribed
from tests.recipes.test_sound_beside_text import conversation
from tests.run_files import write_lines
from tests.sound_backbones import save_qwen2_audio
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_task_layouts import require_same
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow
TASKS = {
    "speech": ["audio.augment={speed: 0.1, time_masks: 1}", "evaluate.answers=4"],
    "classes": ["recipe=classify", "data.columns={label: text}"],
    "conversations": ["data.format=auto", "model.id={folder}/hearing", "data.train={folder}/talk.jsonl"],
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    recipe = {
        "recipe": "sft",
        "model": {"id": "starter/sound", "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"format": "audio", "train": str(transcribed(folder / "rows", 24)), "held_out": 0.25},
        "batch": {"size": 5, "tokens_per_device": 140},
        "train": {"steps": 3, "learning_rate": 2e-3, "max_grad_norm": 0.1},
        "evaluate": {"every": 2},
        "save": {"every": None},
    }
    save_qwen2_audio(folder / "hearing")
    files = (folder / "rows").glob("*.wav")
    write_lines(folder / "talk.jsonl", [conversation(str(each), answer=each.stem) for each in sorted(files)])
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    asked = [(cell["task"], cell["zero"]) for cell in cells(request, "test_two_processes_have_the_curve_of_one")]
    words = {name: [word.replace("{folder}", str(folder)) for word in TASKS[name]] for name in dict(asked)}
    for name, own in words.items():
        workbench.run(str(folder / "recipe.yaml"), own, out=folder / f"{name} alone", quiet=True)
    jobs = [(f"{name} {zero}", [*words[name], f"distributed.zero={zero}"], None) for name, zero in asked]
    layouts.in_processes(folder, jobs)
    return folder


@pytest.mark.nightly(but=["speech-3", "classes-0", "conversations-3"])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("task", TASKS)
def test_two_processes_have_the_curve_of_one(runs: Path, task: str, zero: int) -> None:
    require_same(runs / f"{task} {zero}", runs / f"{task} alone")
