"""Questions of first readers are answered by the commands of their page, typed as they stand over tiny models."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.recipes.drawings import draw
from tests.run_files import write_lines
from tests.scripts.shown_commands import ROOT, run_in_shell
from tests.workbench.evaluation.serving.conftest import save_runs

sys.path.append(str(ROOT / "scripts" / "bench"))
try:
    from published_models import write_config
finally:
    sys.path.pop()

PAGE = ROOT / "scripts" / "tutorials" / "walks.md"
SHORT = "train.steps=2 data.held_out=0.2 evaluate.answers=1 evaluate.max_new_tokens=4"
FEW_FOLDS = "train.steps=2 folds.k=2 image.size=32 tta.views=[shifts]"


def commands(title: str) -> list[str]:
    """Those of a walk, each on one line."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    shown = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S))
    return shown.replace("\\\n", "").splitlines()


def write_model(name: str) -> None:
    """A tiny model of a published one's family in the folder that has its name."""
    write_config(name, Path(name), tiny=True)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name)).save_pretrained(name)


def conversations(numbers: range) -> list[dict[str, object]]:
    said = [(f"How many is {n}?", f"After {n} comes the number {n + 1}, and so on for ever.") for n in numbers]
    return [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in said]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_there_are_at_most_three_commands_each() -> None:
    titles = re.findall(r"^## (.*)$", PAGE.read_text(), re.M)
    assert len(titles) >= 5 and all(1 <= len(commands(title)) <= 3 for title in titles)


@pytest.mark.slow
@pytest.mark.nightly
def test_own_conversations(tmp_path: Path) -> None:
    write_model("Qwen/Qwen3-0.6B")
    write_lines("chat.jsonl", conversations(range(40)))
    init, check, run = commands("Fine-tune Qwen3-0.6B on my chat.jsonl")
    said = run_in_shell(f"{init}\n{check}\n{run} {SHORT}", tmp_path)
    assert "Next: workbench check chat.yaml" in said and "Held-out loss" in said
    assert Path("runs/chat/report.html").is_file()


@pytest.mark.slow
def test_a_split_that_leaks(tmp_path: Path) -> None:
    train = conversations(range(30))
    write_lines("train.jsonl", train)
    write_lines("val.jsonl", [*train[:2], *conversations(range(100, 110))])
    first, second = commands("Is my validation split leaking?")
    said = " ".join(run_in_shell(first, tmp_path, status=2).split())
    assert "2 of 30 training rows are also in val.jsonl" in said and "data.overlap=drop" in said
    said = " ".join(run_in_shell(second, tmp_path).split())
    assert "Left out: 2 rows" in said and "No held-out row equals a training row." in said


@pytest.mark.slow
@pytest.mark.nightly
def test_what_fits(tmp_path: Path) -> None:
    write_config("openai/gpt-oss-20b", Path("openai/gpt-oss-20b"), tiny=True)
    for command in commands("Which adapter fits on 24 GB with gpt-oss-20b?"):
        assert "Fits: " in run_in_shell(f"{command} data.limit=40 data.max_tokens=64", tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
def test_pictures_of_a_leaderboard(tmp_path: Path) -> None:
    pictures = sorted(draw(Path("plants/images"), 48).glob("*/*.png"), key=lambda path: path.name)
    rows = pd.DataFrame({"id": [each.stem for each in pictures], "species": [each.parent.name for each in pictures]})
    for picture in pictures:
        picture.rename(Path("plants/images") / picture.name)
        if not [*picture.parent.iterdir()]:
            picture.parent.rmdir()
    rows[:36].to_csv("plants/train.csv", index=False)
    rows[36:][["id"]].to_csv("plants/test.csv", index=False)
    rows[36:].assign(species="bar").to_csv("plants/sample_submission.csv", index=False)
    init, run, predict = commands("Five folds on plants/ and a submission file")
    said = run_in_shell(f"{init}\n{run} {FEW_FOLDS}\n{predict}", tmp_path)
    assert f"then: {run}" in said and predict in said, "init prints the commands that follow"
    written = pd.read_csv("runs/plants/submission.csv", dtype=str)
    assert written.id.tolist() == rows[36:].id.tolist() and set(written.species) <= {"circle", "square", "bar"}


@pytest.mark.slow
@pytest.mark.nightly
def test_two_adapters_are_served(tmp_path: Path) -> None:
    """The server answers what `curl` asks; it ends with the shell."""
    Path("runs").mkdir()
    for path, name in zip(
        save_runs(tmp_path, "starter", [{"method": "lora", "rank": 4}] * 2), ("chat", "second"), strict=True
    ):
        path.rename(Path("runs") / name)
    serve, ask = (line.replace("8000", "8017") for line in commands("Serve two adapters"))
    wait = "until curl -s http://127.0.0.1:8017/health > /dev/null; do sleep 0.2; kill -0 $!; done"
    said = run_in_shell(f"{serve} --port 8017 &\ntrap 'kill $!' EXIT\n{wait}\n{ask}", tmp_path)
    assert '"model":"other"' in said.replace(": ", ":") and '"role":"assistant"' in said.replace(": ", ":")
