"""Recipe distill in two processes: a student of any teacher has the losses, and a cache the bytes, of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import workbench
from tests.conftest import MINILM, cells, save_tiny, write_animals, write_questions
from tests.workbench.training.distributed import layouts
from workbench.config.yaml_text import dump_yaml
from workbench.runs import score_files

pytestmark = pytest.mark.slow

STEPS = 4
CACHED = ["distill.cache.k=16", "distill.temperature=2"]
CLASSES = [
    *["of=classify", "model.id={}/bert", "model.weights=float32", "data.train={}/animals.jsonl"],
    *["data.held_out=0.2", "distill.teacher={id: '{}/animals', weights: float32}"],
]
MATCHED = "distill.match=[{what: hidden_cosine}]"
JOBS = {
    "made": ["distill.student.layers=[1]", MATCHED],
    "shared": ["distill.teacher.id=backbone", "distill.loss=jsd", "distill.alpha=[0.2, 1.0]"],
    "cached": [*CACHED, "distill.cache.folder={}/cache"],
    "on-policy": ["distill.on_policy={share: 0.5, max_new_tokens: 6}"],
    "peers": ["distill.teacher.id=null", "distill.peers=2"],
    "classes": [*CLASSES, "distill.student.layers=first-1", MATCHED],
}
"""Settings of students; the folder stands for {}."""


def words(folder: Path, name: str) -> list[str]:
    return [each.replace("{}", str(folder)) for each in JOBS[name]]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """Every student of two processes and of one, in folders of their names."""
    folder = tmp_path_factory.mktemp("students")
    recipe = {
        "recipe": "sft",
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {
            "train": str(write_questions(folder / "rows.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(60)]))
        },
        "batch": {"size": 5, "tokens_per_device": 160},
        "train": {"steps": STEPS, "learning_rate": 5e-3},
        "evaluate": {"every": STEPS // 2, "answers": 0},
        "save": {"every": STEPS // 2, "keep": 2},
    }
    (folder / "teacher.yaml").write_text(dump_yaml(recipe))
    distill = {"teacher": {"id": str(folder / "teacher")}, "alpha": 0.7}
    (folder / "recipe.yaml").write_text(dump_yaml({**recipe, "recipe": "distill", "distill": distill}))
    save_tiny(folder / "bert", "Bert", "SequenceClassification", MINILM)
    write_animals(folder / "animals.jsonl", range(60))
    of_classes = [each.replace("{}", str(folder)) for each in CLASSES if not each.startswith("distill")]
    for name, own in {
        "teacher": ["adapter={method: full}"],
        "animals": ["recipe=classify", *of_classes, "of=null"],
    }.items():
        workbench.run(str(folder / "teacher.yaml"), own, out=folder / name, quiet=True)
    asked = {cell["name"] for cell in cells(request, "test_two_processes_teach_as_one_does")} | {"made", "cached"}
    for name in asked:
        own = [each.replace("/cache", "/alone-cache") for each in words(folder, name)]
        workbench.run(str(folder / "recipe.yaml"), own, out=folder / f"{name} alone", quiet=True)
    jobs: list[tuple[str, list[str], str | None]] = [
        (name, words(folder, name), None) for name in JOBS if name in asked
    ]
    again = [cell["name"] for cell in cells(request, "test_they_go_on_bit_for_bit")]
    jobs += [(f"{name} again", words(folder, name), name) for name in again]
    layouts.in_processes(folder, jobs)
    return folder


def lines(run: Path, name: str) -> list[float]:
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in told if line.get(name) is not None]


def require_same(run: Path, alone: Path, *, rel: float) -> None:
    for name in ("loss", "held_out_loss"):
        assert lines(run, name) == pytest.approx(lines(alone, name), rel=rel)
    found, wanted = (score_files.of_rows(json.loads((each / "scores.json").read_text())) for each in (run, alone))
    assert found.keys() == wanted.keys()
    for when in wanted:
        assert found[when] == pytest.approx(wanted[when], rel=1e-4, abs=1e-4)


@pytest.mark.nightly(but=["made", "cached", "on-policy", "classes"])
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_teach_as_one_does(runs: Path, name: str) -> None:
    losses = lines(runs / f"{name} alone", "loss")
    assert len(losses) == STEPS and losses[-1] != losses[0]
    require_same(runs / name, runs / f"{name} alone", rel=1e-5)


def test_they_make_the_cache_that_one_makes(runs: Path) -> None:
    found, wanted = (
        {file.name: file.read_bytes() for file in (runs / name).iterdir()} for name in ("cache", "alone-cache")
    )
    assert found == wanted and len(found) == 2


@pytest.mark.nightly(but=["cached"])
@pytest.mark.parametrize("name", ["made", "cached"])
def test_they_go_on_bit_for_bit(runs: Path, name: str) -> None:
    resumed, whole = runs / f"{name} again", runs / name
    assert lines(resumed, "loss") == lines(whole, "loss")
    found, wanted = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (resumed, whole))
    assert found.keys() == wanted.keys() and all(found[each].equal(wanted[each]) for each in wanted)


def test_one_process_goes_on_with_what_two_began(runs: Path) -> None:
    layouts.halfway(runs / "made", runs / "made elsewhere")
    workbench.run(str(runs / "recipe.yaml"), words(runs, "made"), out=runs / "made elsewhere", resume=True, quiet=True)
    require_same(runs / "made elsewhere", runs / "made alone", rel=1e-4)
