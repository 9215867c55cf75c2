"""Fleets and searches over a backbone that two processes share: who comes and goes, and every curve, as in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.conftest import Records, cells, record_cell, write_questions
from tests.recipes.weather import weather, write
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_bank_layouts import curves, predictions, weights
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

SHARED = "distributed={engine: fsdp2, zero: 3}"
STEPS = {"ada": 2, "bob": 6, "cleo": 3}
"""Members of a fleet, of whom two train at once."""
OWN: dict[str, dict[str, Any]] = {
    "ada": {"adapter.rank": 4, "seed": 2},
    "bob": {"adapter": {"rank": 8, "dropout": 0.1}, "train.learning_rate": 2e-3},
    "cleo": {"adapter.rank": 2, "adapter.targets": "attention", "batch.size": 3, "data.held_out": 0.3},
}
FILES = {"fleet of sft": "fleet.json", "fleet of classify": "fleet.json", "search": "search.json"}
SEARCH = {"trials": 4, "eta": 2, "rungs": 1, "rows": 5}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """Runs of one process, in folders named `alone`, of two, and of two that were broken off and went on."""
    folder = tmp_path_factory.mktemp("fleets")
    for number, name in enumerate(STEPS):
        write_questions(
            folder / f"sft-{name}.jsonl", [f"{name} {n}" + " it is" * (n % 5) for n in range(20 + 4 * number)]
        )
        write(folder / f"classify-{name}.jsonl", weather(24 + 6 * number, seed=number))
    recipe = {
        "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 4, "alpha": 8},
        "data": {"held_out": 0.2},
        "batch": {"size": 5, "tokens_per_device": 160},
        "train": {"learning_rate": 5e-3},
        "evaluate": {"every": 2, "answers": 2, "max_new_tokens": 4, "probe": 0},
        "save": {"every": 2, "keep": 2},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    words = {
        f"fleet of {kind}": ["recipe=fleet", f"of={kind}", f"fleet={json.dumps(fleet(folder, kind))}"]
        for kind in ("sft", "classify")
    }
    rates = {"train.learning_rate": [1e-3, 2e-3, 5e-3, 1e-2]}
    rows = [f"data.train={folder / 'classify-cleo.jsonl'}", "train.steps=4"]
    words["search"] = ["recipe=search", "of=classify", f"search={json.dumps({**SEARCH, 'space': rates})}", *rows]
    asked = {cell["kind"] for cell in cells(request, "test_every_member_is_that_of_one_process")}
    again = {cell["kind"] for cell in cells(request, "test_what_was_broken_off_goes_on_bit_for_bit")}
    for kind in asked:
        workbench.run(str(folder / "recipe.yaml"), words[kind], out=folder / f"{kind} alone", quiet=True)
    jobs = [(kind, [*words[kind], SHARED], None) for kind in sorted(asked | again)]
    jobs += [(f"{kind} again", [*words[kind], SHARED], f"{kind} again") for kind in sorted(again)]
    layouts.in_processes(folder, jobs)
    return folder


def fleet(folder: Path, kind: str) -> dict[str, Any]:
    members = {
        name: {"data.train": str(folder / f"{kind}-{name}.jsonl"), "train.steps": STEPS[name], **settings}
        for name, settings in OWN.items()
    }
    return {"at_once": 2, "members": members}


@pytest.mark.nightly(but=["fleet of classify"])
@pytest.mark.parametrize("kind", FILES)
def test_every_member_is_that_of_one_process(runs: Path, kind: str, record_property: Records) -> None:
    record_cell(record_property, method="lora", recipe=kind.partition(" ")[0], layout=SHARED)
    found, wanted = curves(runs / kind), curves(runs / f"{kind} alone")
    assert found.keys() == wanted.keys()
    lengths = sorted(map(len, found.values()))
    assert lengths == ([2, 2, 4, 4] if kind == "search" else sorted(STEPS.values()))
    for member, steps in wanted.items():
        for step, other in zip(steps, found[member], strict=True):
            assert other == pytest.approx(step, rel=1e-5)
    tensors, others = weights(runs / f"{kind} alone"), weights(runs / kind)
    assert tensors.keys() == others.keys() and len(tensors) == 3
    for file, values in tensors.items():
        assert float((others[file] - values).norm() / values.norm()) < 1e-4
    scores, expected = (json.loads((runs / name / "scores.json").read_text()) for name in (kind, f"{kind} alone"))
    for when in ("before", "after"):
        assert scores[when] == pytest.approx(expected[when], rel=1e-3)
    tables = [json.loads((runs / name / FILES[kind]).read_text()) for name in (kind, f"{kind} alone")]
    if kind != "search":
        assert tables[0]["left"] == tables[1]["left"] == ["ada", "cleo", "bob"]
        return
    assert predictions(runs / kind) == pytest.approx(predictions(runs / f"{kind} alone"), abs=1e-5)
    assert tables[0]["best"] == tables[1]["best"] and len(tables[0]["waves"]) == 2
    for wave, other in zip(*(table["waves"] for table in tables), strict=True):
        assert {**wave, "seconds": 0} == {**other, "seconds": 0, "losses": pytest.approx(other["losses"], rel=1e-5)}


@pytest.mark.parametrize("kind", ["fleet of classify", pytest.param("search", marks=pytest.mark.nightly)])
def test_what_was_broken_off_goes_on_bit_for_bit(runs: Path, kind: str) -> None:
    assert curves(runs / f"{kind} again") == curves(runs / kind)
    tensors, others = weights(runs / kind), weights(runs / f"{kind} again")
    assert tensors.keys() == others.keys() and all(others[file].equal(tensors[file]) for file in tensors)
