"""A run killed again and again, also inside the writing of a checkpoint, ends bit-identical to an undisturbed one."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import forked

KILLS = 9
STEPS = 40

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: {train}, held_out: 0.1, curriculum: {{by: length}}}}
batch: {{size: 8}}
train: {{steps: {steps}, learning_rate: 1.0e-2}}
evaluate: {{every: 7, answers: 0}}
save: {{every: 2, keep: 2, ship: best, asynchronous: {asynchronous}}}
"""


PICTURES = """
recipe: classify
model: {{id: starter/vision, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, targets: all-layers}}
data: {{format: image, train: starter/sign_digits.zip/train, limit: 120, held_out: 0.2}}
image: {{augment: {{preset: light, trivialaugment: true, cutmix: 1, curriculum: {{resolution: {{start: 0.5}}}}}}}}
batch: {{size: 8}}
train: {{steps: {steps}, learning_rate: 1.0e-2}}
evaluate: {{every: 7}}
save: {{every: 2, keep: 2, ship: best}}
"""


@pytest.mark.nightly(but=["text"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "kills", "total"), [(RECIPE, KILLS, STEPS), (PICTURES, 6, 24)], ids=["text", "pictures"]
)
def test_killed_at_random_moments(
    text: str,
    kills: int,
    total: int,
    tmp_path: Path,
    short_stories: str,
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe = tmp_path / "recipe.yaml"
    given = dict(model=short_stories, train=questions, steps=total)
    recipe.write_text(text.format(**given, asynchronous="false"))
    chance = random.Random(0)

    straight, broken = tmp_path / "straight", tmp_path / "broken"
    _join(_start(recipe, straight, resume=False))
    recipe.write_text(text.format(**given, asynchronous="true"))  # of pictures, not: both ways are killed

    inside_a_write = 0
    for number in range(kills):
        child = _start(recipe, broken, resume=(broken / "config.yaml").exists())
        _wait_for_steps(broken, child, _steps(broken) + 1)
        if number % 3 == 0:
            _wait_for_write(broken, child)
        else:
            time.sleep(chance.uniform(0, 0.25))
        child.kill()
        child.communicate()  # to the end of what it writes, which is its own
        inside_a_write += any((broken / "checkpoints").glob(".*.unfinished"))
    assert _steps(broken) < total, "the run ended before it was killed often enough; raise its steps"
    assert inside_a_write >= kills // 6
    _join(_start(recipe, broken, resume=True))

    records = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (straight, broken)
    ]
    steps, losses = ([[record[key] for record in run] for run in records] for key in ("step", "loss"))
    assert steps[0] == steps[1] == list(range(1, total + 1))
    assert losses[0] == losses[1]
    for name in ("samples.jsonl", "layers.jsonl"):
        found = [(run / name).read_bytes() if (run / name).exists() else b"" for run in (straight, broken)]
        assert found[0] == found[1], name
    for file in (
        Path("adapter/adapter_model.safetensors"),
        Path(f"checkpoints/step-{total:08d}/trainable.safetensors"),
    ):
        tensors = [load_file(run / file) for run in (straight, broken)]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0]), file
    assert json.loads((straight / "scores.json").read_text()) == json.loads((broken / "scores.json").read_text())


def _start(recipe: Path, out: Path, *, resume: bool) -> subprocess.Popen[str]:
    command = [forked.python(), "-m", "workbench.cli.verbs", "run", str(recipe), "--out", str(out)]
    command += ["--resume"] if resume else []
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _join(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said


def _steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _wait_for_steps(run: Path, child: subprocess.Popen[str], steps: int) -> None:
    deadline = time.monotonic() + 90
    while _steps(run) < steps and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def _wait_for_write(run: Path, child: subprocess.Popen[str]) -> None:
    """Wait until a checkpoint is half written, for some seconds."""
    deadline = time.monotonic() + 5
    while child.poll() is None and time.monotonic() < deadline:
        if any((run / "checkpoints").glob(".*.unfinished")):
            return
