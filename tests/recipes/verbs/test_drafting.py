"""A student that drafts for its teacher changes no answer, and is measured as speculative decoding is written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import load_peft_weights
from safetensors.torch import save_file

from tests.recipes.verbs.test_export import SaveRun
from workbench.data.batching import evenly_spaced
from workbench.data.text import tokenized
from workbench.errors import ConfigError
from workbench.evaluation import generation
from workbench.models import exported
from workbench.models.exporting import card
from workbench.recipes.verbs.drafting import ROWS, drafts
from workbench.runs import draft_table, run_directory, score_files

MOST = 12


def _another(run: Path, out: Path) -> Path:
    """The same run with another adapter."""
    run.rename(out)
    return out


@pytest.fixture
def pair(save_run: SaveRun) -> tuple[Path, Path]:
    """A student whose adapter is that of its teacher, turned round."""
    teacher = save_run()
    teacher = _another(teacher, teacher.with_name("teacher"))
    student = save_run()
    weights = load_peft_weights(str(student / "adapter"), device="cpu")
    save_file(
        {name: -3 * each if "lora_B" in name else each for name, each in weights.items()},
        student / "adapter" / "adapter_model.safetensors",
    )
    return student, teacher


def _greedy(model: Any, ids: list[int]) -> list[int]:
    """The likeliest next token behind each of the ids."""
    tokens: list[int] = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
    return tokens


@torch.no_grad()
def _by_hand(student: Path, teacher: Path, drafted_at_once: int) -> tuple[int, int, int]:
    """Tokens, passes of the teacher and drafted tokens of all prompts, by Leviathan et al. 2023 at temperature 0."""
    config = run_directory.read_config(student)
    pupil, writer = (exported.load(run, run_directory.read_config(run)) for run in (student, teacher))
    rows = tokenized.load(config.data, pupil.tokenizer, pupil.template, seed=config.seed).held_out
    tokens = passes = drafted = 0
    for index in evenly_spaced(len(rows), ROWS):
        prompt = generation.prompt_of(rows[int(index)]).tolist()
        answer: list[int] = []
        while len(answer) < MOST and (not answer or answer[-1] not in writer.stop):
            draft: list[int] = []
            while len(draft) < min(drafted_at_once, MOST - len(answer) - 1) and not set(draft) & set(writer.stop):
                draft.append(_greedy(pupil.model, prompt + answer + draft)[-1])
            wanted = _greedy(writer.model, prompt + answer + draft)[-len(draft) - 1 :]
            accepted = next((n for n, token in enumerate(draft) if token != wanted[n]), len(draft))
            new = wanted[: accepted + 1]
            ends = [n for n, token in enumerate(new) if token in writer.stop]
            answer += new[: ends[0] + 1] if ends else new
            passes, drafted = passes + 1, drafted + len(draft)
        tokens += len(answer)
    return tokens, passes, drafted


@pytest.mark.slow
def test_drafts_are_counted_as_written_down_and_change_nothing(pair: tuple[Path, Path]) -> None:
    student, teacher = pair
    before = score_files.of_rows({"after": {"loss": 1.0}})
    found = drafts(student, teacher, [f"evaluate.max_new_tokens={MOST}"])
    assert found["equal"] == 1 and set(found["drafted"]) == {"auto", "2", "4", "8"}
    for count in (2, 4):
        tokens, passes, drafted = _by_hand(student, teacher, count)
        of_count = found["drafted"][str(count)]
        assert found["tokens"] == tokens and of_count["tokens_per_pass"] == pytest.approx(tokens / passes)
        assert of_count["acceptance"] == pytest.approx((tokens - passes) / drafted)
        assert 0 < of_count["acceptance"] < 1 and of_count["speedup"] > 0
    scores = score_files.files.read_json(student / "scores.json")
    assert scores["drafts"] == found and score_files.of_rows({**scores, "after": {"loss": 1.0}}) == before
    page = (student / "report.html").read_text()
    assert "What the student drafts for its teacher" in page
    table = draft_table.read(found)
    assert table is not None and "the same for all of the prompts" in table.note and table.note in page
    assert "## Drafts" in card._drafts(found)[0]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_accepts_its_own_drafts(save_run: SaveRun) -> None:
    run = save_run()
    found = drafts(run, run, [f"evaluate.max_new_tokens={MOST}"])
    assert found["equal"] == 1 and all(each["acceptance"] > 0.9 for each in found["drafted"].values())
    assert found["drafted"]["8"]["tokens_per_pass"] > found["drafted"]["2"]["tokens_per_pass"] > 1.5


def test_other_tokens_than_the_teachers_are_refused(save_run: SaveRun, short_stories: str) -> None:
    teacher = save_run()
    teacher = _another(teacher, teacher.with_name("teacher"))
    student = save_run(model={"id": short_stories, "weights": "float32", "new_tokens": ["<|start|>", "<|end|>"]})
    told = r"reads other tokens than (.|\n)*'<\|start\|>' is number none to the one and 512 (.|\n)*model\.id=teacher"
    with pytest.raises(ConfigError, match=told):
        drafts(student, teacher)


def test_virtual_tokens_draft_nothing(save_run: SaveRun) -> None:
    run = save_run(adapter={"method": "prefix"})
    with pytest.raises(ConfigError, match=r"virtual tokens(.|\n)*adapter\.method, such as lora"):
        drafts(run, run)


def test_drafts_are_measured_alone(save_run: SaveRun) -> None:
    from typer.testing import CliRunner

    from workbench.cli.verbs import app

    run = str(save_run())
    for words in (["--against", run], ["--devices", "2"]):
        said = CliRunner().invoke(app, ["evaluate", run, "--drafts-for", run, *words])
        assert isinstance(said.exception, ConfigError) and "Leave --" in str(said.exception)
