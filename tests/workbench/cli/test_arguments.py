"""Words that a shell completes, each of which the command line takes, and what a shell gets of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from workbench import recipes
from workbench.cli import arguments, verbs
from workbench.config import reference
from workbench.recipes.load import load


def test_every_shipped_recipe_and_what_is_on_the_way_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert arguments.complete_recipes("") == recipes.shipped()
    (tmp_path / "sft").mkdir()
    for name in ("mine.yaml", "rows.jsonl", ".hidden.yml", "sft/other.yml"):
        (tmp_path / name).touch()
    assert arguments.complete_recipes("sft/q") == ["sft/qlora", "sft/quickstart"]
    assert arguments.complete_recipes("sft/o") == ["sft/other.yml"]
    assert arguments.complete_recipes("ml") == ["mlm/quickstart"] and arguments.complete_recipes("mi") == ["mine.yaml"]
    assert arguments.complete_recipes(f"{tmp_path}/") == [f"{tmp_path}/mine.yaml", f"{tmp_path}/sft/"]
    assert arguments.complete_recipes("gone/") == []
    assert arguments.complete_runs("s") == ["sft/"], "a file is no run"


def test_settings_complete_to_keys_and_then_to_values_that_a_recipe_takes() -> None:
    assert arguments.complete_settings("train.learn") == ["train.learning_rate="]
    known = {each.key for each in reference.settings()}
    assert {word.rstrip("=") for word in arguments.complete_settings("")} < known
    assert arguments.complete_settings("schedule.name=co") == ["schedule.name=cosine", "schedule.name=constant"]
    for word in arguments.complete_settings("schedule.name=co"):
        load("sft/quickstart", [word])
    assert arguments.complete_settings("train.learning_rate=") == arguments.complete_settings("nothing=") == []


def test_explain_completes_to_what_it_knows() -> None:
    found = arguments.complete_explained("do")
    assert "dora" in found and all(reference.named_choices(word) or reference.look_up(word) for word in found)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("workbench run sft/q", {"sft/qlora", "sft/quickstart"}),
        ("workbench check sft/quickstart adapter.targ", {"adapter.targets="}),
        ("workbench explain lis", {"lisa"}),
        ("workbench exp", {"export", "explain"}),
    ],
)
def test_a_shell_asks_the_program_itself(
    line: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["workbench"])
    monkeypatch.setenv("_WORKBENCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        verbs.main()
    assert ended.value.code in (0, None)
    assert {*capsys.readouterr().out.split()} == wanted


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_ask(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # else the shell that began the tests
    with pytest.raises(SystemExit):
        typer.main.get_command(verbs.app)(["--show-completion", shell], prog_name="workbench")
    assert f"complete_{shell}" in capsys.readouterr().out


def test_the_program_offers_to_install_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["workbench", "--help"])
    with pytest.raises(SystemExit):
        verbs.main()
    assert "--install-completion" in capsys.readouterr().out


GROUPS = ("Before a run", "Train", "Score and use what was trained", "Merge and ship", "Look up")


def test_without_a_verb_three_commands_are_shown() -> None:
    result = CliRunner().invoke(verbs.app, [])
    shown = [line for line in result.output.splitlines() if line.startswith("  workbench ")]
    assert result.exit_code == 0 and [line.split()[1] for line in shown] == ["run", "init", "explain"]
    assert "workbench --help" in result.output


def test_help_says_of_every_verb_a_whole_sentence() -> None:
    groups = CliRunner().invoke(verbs.app, ["--help"]).output.split("\n\n")[-5:]
    assert [group.partition(":\n")[0] for group in groups] == list(GROUPS)
    listed = [line for group in groups for line in group.strip().splitlines()[1:]]
    assert len(listed) == len(verbs.app.registered_commands)
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.parametrize("verb", ["evaluate", "predict", "sample"])
def test_help_of_verbs_over_finished_runs_names_no_setting_of_training(verb: str) -> None:
    assert "train.epochs" not in CliRunner().invoke(verbs.app, [verb, "--help"]).output
