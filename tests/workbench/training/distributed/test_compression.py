"""Two processes whose gradients and weights travel as codes: exact in the warm-up, near after it, resumed in bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import workbench
from tests.conftest import cells
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_layouts import METHODS, curve, weights, write_recipe

pytestmark = pytest.mark.slow

WARM_UP = 2
"""Of 6 steps; checkpoints are of steps 3 and 6."""
RATE = ["train.learning_rate=3e-4", "train.steps=6", "save.every=3"]
COMPRESSION = f"warm_up: {WARM_UP}, block: 64"
LAYOUTS = {
    "int8": f"{{compression: {{gradients: int8, {COMPRESSION}}}}}",
    "onebit": f"{{compression: {{gradients: onebit, {COMPRESSION}}}}}",
    "fsdp2": f"{{engine: fsdp2, zero: 3, compression: {{gradients: int8, weights: int8, {COMPRESSION}}}}}",
}
PLAIN = {"int8": "{zero: 0}", "onebit": "{zero: 0}", "fsdp2": "{engine: fsdp2, zero: 3}"}
CELLS = [("full", "int8"), ("full", "onebit"), ("lora", "fsdp2"), ("lora", "onebit"), ("full", "fsdp2")]
FEW = ("full-int8", "full-onebit", "lora-fsdp2")
RESUMED = FEW[1:]
"""Residuals of momenta, and of gradients where a process has a share of the weights."""
FARTHEST = {"int8": 3e-4, "onebit": 0.06, "fsdp2": 0.02}
"""Largest relative distance of a loss from that of the same layout without compression."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """Runs of two processes with compression and without, resumed ones, and a run that one process goes on with."""
    folder = tmp_path_factory.mktemp("compression")
    write_recipe(folder, Path(short_stories))
    near, resumed = (
        {(cell["method"], cell["kind"]) for cell in cells(request, test)}
        for test in ("test_the_warm_up_is_exact_and_what_follows_is_near", "test_it_goes_on_bit_for_bit")
    )
    asked = near | resumed | set(CELLS[:3])  # of which other tests are, too
    jobs: list[tuple[str, list[str], str | None]] = []
    for method in METHODS:
        words = [f"adapter={METHODS[method]}", *RATE, "batch.tokens_per_device=160"]
        kinds = [kind for kind in LAYOUTS if (method, kind) in asked]
        jobs += [(f"{method} {kind}", [*words, f"distributed={LAYOUTS[kind]}"], None) for kind in kinds]
        layouts_of_plain = {PLAIN[kind] for kind in kinds if (method, kind) in near}
        jobs += [(f"{method} {layout} plain", [*words, f"distributed={layout}"], None) for layout in layouts_of_plain]
        jobs += [
            (f"{method} {kind} resumed", [*words, f"distributed={LAYOUTS[kind]}"], f"{method} {kind}")
            for kind in kinds
            if (method, kind) in resumed
        ]
    small = [f"adapter={METHODS['full']}", *RATE, "batch.tokens_per_device=64"]
    jobs.append(("small passes", [*small, f"distributed={LAYOUTS['int8']}"], None))
    rows = [{"text": f"{n} birds sing", "label": "even" if n % 2 == 0 else "odd"} for n in range(60)]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels = ["recipe=classify", f"data.train={folder / 'labels.jsonl'}", f"adapter={METHODS['lora']}", *RATE]
    kinds = [cell["kind"] for cell in cells(request, "test_classes_are_learnt_with_it_too")]
    jobs += [(f"classify {kind}", [*labels, f"distributed={LAYOUTS[kind]}"], None) for kind in kinds]
    layouts.in_processes(folder, jobs)
    workbench.run(str(folder / "recipe.yaml"), labels, out=folder / "classify alone", quiet=True)
    layouts.halfway(folder / "full int8", folder / "alone")
    words = [f"adapter={METHODS['full']}", *RATE, "batch.tokens_per_device=160"]
    workbench.run(str(folder / "recipe.yaml"), words, out=folder / "alone", resume=True, quiet=True)
    return folder


def sent(run: Path) -> list[int]:
    return [json.loads(line)["sent_bytes"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.few(*FEW)
@pytest.mark.parametrize(("method", "kind"), CELLS)
def test_the_warm_up_is_exact_and_what_follows_is_near(runs: Path, method: str, kind: str) -> None:
    found, plain = curve(runs / f"{method} {kind}"), curve(runs / f"{method} {PLAIN[kind]} plain")
    # The gradients of the first step that is compressed are those of exact weights.
    exact = WARM_UP + (kind != "fsdp2")
    assert found[:exact] == plain[:exact]
    assert found[-1] != plain[-1] and found == pytest.approx(plain, rel=FARTHEST[kind])


@pytest.mark.few(*RESUMED)
@pytest.mark.parametrize(("method", "kind"), CELLS)
def test_it_goes_on_bit_for_bit(runs: Path, method: str, kind: str) -> None:
    resumed, whole = runs / f"{method} {kind} resumed", runs / f"{method} {kind}"
    assert curve(resumed) == curve(whole)
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(("kind", "share"), [("int8", (1 + 4 / 64) / 4), ("onebit", (1 / 8 + 4 / 64) / 4)])
def test_bytes_are_counted(runs: Path, kind: str, share: float) -> None:
    bytes_by_step = sent(runs / f"full {kind}")
    assert len({*bytes_by_step[:WARM_UP]}) == len({*bytes_by_step[WARM_UP:]}) == 1
    assert bytes_by_step[-1] == pytest.approx(share * bytes_by_step[0], rel=0.01)


def test_shares_send_less_too(runs: Path) -> None:
    bytes_by_step = sent(runs / "lora fsdp2")
    assert min(bytes_by_step[WARM_UP:]) < 0.3 * min(bytes_by_step[:WARM_UP])


def test_micro_batches_change_nothing(runs: Path) -> None:
    assert curve(runs / "small passes") == pytest.approx(curve(runs / "full int8"), rel=1e-4)


def test_one_process_goes_on_with_what_two_began(runs: Path) -> None:
    assert curve(runs / "alone") == pytest.approx(curve(runs / "full int8"), rel=1e-3)


@pytest.mark.few("onebit")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_classes_are_learnt_with_it_too(runs: Path, kind: str) -> None:
    found, alone = curve(runs / f"classify {kind}"), curve(runs / "classify alone")
    assert found[:WARM_UP] == pytest.approx(alone[:WARM_UP], rel=1e-5)
    assert found[WARM_UP:] != alone[WARM_UP:] and found == pytest.approx(alone, rel=FARTHEST[kind])
