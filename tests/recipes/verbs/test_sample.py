"""Answers are sampled, scored and written as rows that other recipes read; a stopped command goes on equally."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
from typer.testing import CliRunner

import workbench
from tests.run_files import write_lines
from tests.scripts.shown_commands import ROOT, blocks
from workbench.cli.verbs import app
from workbench.config import DataConfig
from workbench.data.batching import Indices
from workbench.data.text import formats, generated_answers, preference_pairs
from workbench.data.text.formats import Example
from workbench.errors import ConfigError
from workbench.evaluation import generation
from workbench.evaluation.generation import AnswerSampler
from workbench.recipes.single.sampled_answers import (
    AnswerGroup,
    SampledRows,
    ScoredAnswer,
    rows_to_write,
    worth,
)
from workbench.recipes.verbs.sample import sample

LETTERS = """
from pathlib import Path

def letters(answers):
    if any(answer.row["n"] == 3 for answer in answers) and Path(__file__).with_name("broken").exists():
        raise RuntimeError("out of order")
    return [len(set(answer.text)) + answer.row["n"] / 10 for answer in answers]
"""
SETTINGS: dict[str, Any] = {"n": 4, "max_new_tokens": 16, "temperature": 0.9}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are answered in several batches."""
    monkeypatch.setattr(generation.capacity, "forward_tokens", lambda *_, **__: 200)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    write_lines(path, ({"question": f"What comes after {n}?", "n": n} for n in range(6)))
    (tmp_path / "mine.py").write_text(LETTERS)
    return path


def _sample(run: Path, asked: Path, out: str, score: str = "mine.py:letters", **settings: Any) -> list[dict[str, Any]]:
    found = _facts(run, asked, out, score, **settings)
    rows = [json.loads(line) for line in (asked.parent / out).read_text().splitlines()]
    assert found.rows == len(rows) and not list(asked.parent.glob(".*unfinished*"))
    return rows


def _facts(run: Path, asked: Path, out: str, score: str = "mine.py:letters", **settings: Any) -> SampledRows:
    word = str(asked.parent / score) if score.startswith("mine") else score
    return sample(run, str(asked), score=[word], out=asked.parent / out, **{**SETTINGS, **settings})


def test_rows_of_all_kinds_come_from_the_same_answers(trained: Path, asked: Path) -> None:
    every = _sample(trained, asked, "all.jsonl", to="all")
    assert len(every) == 24 and [row["place"] for row in every[::4]] == [f"asked.jsonl, row {n}" for n in range(1, 7)]
    for row in every:
        text, n = row["messages"][-1]["content"], int(row["place"].rpartition(" ")[2]) - 1
        assert row["reward"] == pytest.approx(len(set(text)) + n / 10)
    finished = [row for row in every if row["finished"] and row["messages"][-1]["content"]]
    highest = {row["place"]: max(r["reward"] for r in finished if r["place"] == row["place"]) for row in finished}
    best = _sample(trained, asked, "best.jsonl")
    assert [row["reward"] for row in best] == list(highest.values())
    accepted = _sample(trained, asked, "accepted.jsonl", to="accepted", least=6.0)
    kept = {row["messages"][-1]["content"] for row in finished if row["reward"] >= 6}
    assert {row["messages"][-1]["content"] for row in accepted} == kept
    config = DataConfig(train=str(asked.parent / "best.jsonl"))
    read = list(formats.read(config.train or "", config, skipped=[]))
    assert [example.messages[-1]["content"] for example in read] == [row["messages"][-1]["content"] for row in best]


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(trained: Path, asked: Path) -> None:
    """Counted over all draws of k among n."""
    for right in range(6):
        answers = [1] * right + [0] * (5 - right)
        for k in range(1, 6):
            draws = [any(each) for each in itertools.combinations(answers, k)]
            assert generated_answers.pass_at(k, 5, right) == pytest.approx(sum(draws) / len(draws))
    found = _facts(trained, asked, "all.jsonl", to="all", least=6.0)
    rows = [json.loads(line) for line in (asked.parent / "all.jsonl").read_text().splitlines()]
    rights = [sum(row["reward"] >= 6 for row in rows[at : at + 4]) for at in range(0, 24, 4)]
    assert {k: value for k, (value, _) in found.passes.items()} == pytest.approx(
        {k: np.mean([generated_answers.pass_at(k, 4, right) for right in rights]) for k in (1, 2, 4)}
    )
    assert found.passes[1][0] == pytest.approx(sum(rights) / 24)
    assert _facts(trained, asked, "other.jsonl", to="all").passes == {}  # a sum of letters says not what is right


@pytest.mark.slow
def test_the_best_answer_by_vote_is_the_one_that_most_agree_on(trained: Path, asked: Path) -> None:
    every = _sample(trained, asked, "all.jsonl", "vote", to="all", n=6)
    best = [row["reward"] for row in _sample(trained, asked, "best.jsonl", "vote", n=6)]
    highest = dict[str, float]()
    for place in dict.fromkeys(row["place"] for row in every):
        rows = [row for row in every if row["place"] == place]
        texts = [" ".join(row["messages"][-1]["content"].casefold().split()) for row in rows]
        if not any(letter.isdigit() for letter in "".join(texts)):
            assert [row["reward"] for row in rows] == pytest.approx([texts.count(text) / 6 for text in texts])
        finished = [row["reward"] for row, text in zip(rows, texts, strict=True) if row["finished"] and text]
        highest |= {place: max(finished)} if finished else {}
    assert best == list(highest.values())
    with pytest.raises(ConfigError, match=r"--score vote compares answers to a prompt.*Write --n 2 or more"):
        _sample(trained, asked, "one.jsonl", "vote", n=1)


@pytest.mark.slow
def test_the_page_s_commands_run(
    trained: Path, short_stories: str, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As recipes/verbs/sample.md shows them, but for fewer and shorter answers, a reward of any text, and two steps."""
    (block,) = [
        each for each in blocks(ROOT / "recipes" / "verbs" / "sample.md") if each.run_by.endswith("test_sample.py")
    ]
    lines = [line.partition("  #")[0].rstrip() for line in block.text.splitlines()]
    assert [line.split()[1] for line in lines] == ["sample", "sample", "sample", "sample", "run"]
    monkeypatch.chdir(asked.parent)
    tiny = [f"model.id={short_stories}", "train.steps=2", "train.epochs=null", "data.held_out=0.3", "batch.size=2"]
    tiny += ["evaluate.every=null", "evaluate.answers=0", "evaluate.samples=0"]
    changes = {"prompts.jsonl": asked.name, "8": "4", **dict.fromkeys(("number", "runs/reward"), "mine.py:letters")}
    Path("RUN").symlink_to(trained)  # whose answers end
    for line in lines[:4]:
        words = [changes.get(word, word) for word in shlex.split(line)[1:]]
        done = CliRunner().invoke(app, [*words, "--max-new-tokens", "16"])
        assert done.exit_code == 0, (line, done.output, done.exception)
        out = Path(words[words.index("--out") + 1])
        assert out.read_text()
        if out.name == "sft.jsonl":
            out.rename(f"{words[words.index('--to') + 1]}.jsonl")
    Path("RUN").unlink()
    workbench.run("sft/quickstart", [*tiny, "data.train=best.jsonl"], out=Path("RUN"), quiet=True)
    done = CliRunner().invoke(app, [*lines[4].split()[1:], *tiny])
    assert done.exit_code == 0, (done.output, done.exception)
    assert Path("runs/prefer-quickstart/scores.json").is_file()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_likelihoods_are_means_over_wordings_of_stock_forward_passes(
    trained: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wordings = ["{prompt}", 'As {"a": 1}: {prompt} {prompt}']
    drawn: dict[tuple[int, ...], list[Indices]] = {}
    answer = AnswerSampler.answer

    def kept(self: AnswerSampler, prompts: Sequence[Indices], draws: Sequence[Any], *shown: Any) -> list[list[Indices]]:
        groups = answer(self, prompts, draws, *shown)
        drawn.update({tuple(prompt.tolist()): group for prompt, group in zip(prompts, groups, strict=True)})
        return groups

    monkeypatch.setattr(AnswerSampler, "answer", kept)
    asked.write_text("".join(asked.read_text().splitlines(keepends=True)[:3]))
    rows = _sample(trained, asked, "all.jsonl", "likelihood", to="all", n=2, wording=wordings)
    model = AutoPeftModelForCausalLM.from_pretrained(trained / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "adapter")
    wanted = list[float]()
    for n in range(3):
        turns = [[{"role": "user", "content": each.replace("{prompt}", f"What comes after {n}?")}] for each in wordings]
        prompts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in turns]
        for ids in [ids for prompt in prompts for ids in drawn[tuple(prompt)]]:
            means = []
            for prompt in prompts:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
                log_p = logits.double().log_softmax(-1)
                means.append(float(log_p[torch.arange(len(ids)), torch.from_numpy(ids)].mean()))
            wanted.append(sum(means) / 2)
    assert [row["reward"] for row in rows] == pytest.approx(wanted, abs=1e-5) and len(set(wanted)) > 3
    assert [row["wording"] for row in rows[:4]] == [wordings[0]] * 2 + [wordings[1]] * 2
    assert all(row["messages"][0]["content"].startswith("What comes after") for row in rows)
    finished = [row for row in rows if row["finished"] and row["messages"][-1]["content"]]
    highest = {row["place"]: max(r["reward"] for r in finished if r["place"] == row["place"]) for row in finished}
    best = _sample(trained, asked, "best.jsonl", "likelihood", n=2, wording=wordings)
    assert [row["reward"] for row in best] == list(highest.values()) and {row["wording"] for row in best} <= {*wordings}


@pytest.mark.slow
def test_a_vote_counts_the_answers_to_all_wordings(trained: Path, asked: Path) -> None:
    wordings = ["{prompt}", "{prompt} Think."]
    settings: dict[str, Any] = {"to": "all", "n": 1, "wording": wordings, "temperature": 0.3}
    rows = _sample(trained, asked, "all.jsonl", "vote", **settings)
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        same = one["messages"][-1]["content"] == other["messages"][-1]["content"]
        assert one["reward"] == other["reward"] == (1 if same else pytest.approx(0.75, abs=0.26))
    assert rows == _sample(trained, asked, "again.jsonl", "vote", **settings)
    pairs = _sample(trained, asked, "pairs.jsonl", to="pairs", n=2, wording=wordings)
    assert pairs and all({each["wording"], each["rejected_wording"]} <= {*wordings} for each in pairs)


@pytest.mark.parametrize(
    ("references", "name", "single", "chosen"),
    [(["2", "5", "#### 7", None], "accuracy", 2 / 3, 2 / 3), (["two", "5", "7", ""], "f1", 1.5 / 3, 1 / 3)],
)
def test_a_choice_is_worth_its_score_beside_that_of_single_answers(
    references: list[str | None], name: str, single: float, chosen: float
) -> None:
    said = [
        [_answer("so 2", 0.5), _answer("3", 0.9, False), _answer("2.0", 0.1)._replace(wording="again")],
        [_answer("4", 0.5), _answer("5", 0.4)],
        [_answer("7", 0.2, False)],
        [_answer("8", 1)],
    ]
    groups = [AnswerGroup(Example(f"row {number}"), answers) for number, answers in enumerate(said)]
    found = worth(groups, references)
    assert found is not None and (found.name, found.rows) == (name, 3)
    assert (found.first, found.second) == (pytest.approx(single), pytest.approx(chosen))
    assert worth(groups, ["2", None, None, None]) is None


@pytest.mark.slow
def test_a_choice_is_judged_where_no_reward_reads_the_right_answer(trained: Path, asked: Path) -> None:
    write_lines(asked, ({"question": f"What comes after {n}?", "answer": f"It is {n + 1}."} for n in range(6)))
    judged = _facts(trained, asked, "likely.jsonl", "likelihood", to="all").choice
    assert judged is not None and (judged.name, judged.rows) == ("accuracy", 6)
    assert (
        _facts(trained, asked, "number.jsonl", "{kind: regex, pattern: (.*), answer: answer}", to="all").choice is None
    )


def test_pairs_are_read_as_judged_answers(trained: Path, asked: Path) -> None:
    _sample(trained, asked, "pairs.jsonl", to="pairs", margin=1.0)
    config = DataConfig(train=str(asked.parent / "pairs.jsonl"), columns={"margin": "margin"})
    read = list(
        formats.read(config.train or "", config, skipped=[], weighted=True, conversion=preference_pairs.convert)
    )
    assert read and all(example.margin >= 1 and example.rejected is not None for example in read)


def test_answers_depend_on_nothing_but_run_prompt_seed_and_numbers(trained: Path, asked: Path) -> None:
    few = asked.with_name("few.jsonl")
    few.write_text("".join(asked.read_text().splitlines(keepends=True)[:2]))
    every, two = (_sample(trained, path, f"{path.stem}-all.jsonl", to="all", n=n) for path, n in ((asked, 3), (few, 2)))
    texts = [row["messages"][-1]["content"] for row in every]
    assert [row["messages"][-1]["content"] for row in two] == [texts[at] for at in (0, 1, 3, 4)]
    other = _sample(trained, few, "other.jsonl", to="all", n=2, seed=1)
    assert [row["messages"] for row in other] != [row["messages"] for row in two]


@pytest.mark.nightly(but=["writing a line-5", "scoring-0"])
@pytest.mark.parametrize(("stopped", "again"), [("sampling", 4), ("scoring", 0), ("writing a line", 5)])
def test_a_command_that_was_stopped_goes_on_equally(
    trained: Path, asked: Path, monkeypatch: pytest.MonkeyPatch, stopped: str, again: int
) -> None:
    whole = _sample(trained, asked, "whole.jsonl", to="all")
    batches: list[int] = []
    answer = AnswerSampler.answer

    def counted(
        self: AnswerSampler, prompts: Sequence[Indices], draws: Sequence[Any], *shown: Any
    ) -> list[list[Indices]]:
        batches.append(len(prompts))
        if stopped != "scoring" and len(batches) == 3:
            raise KeyboardInterrupt
        return answer(self, prompts, draws, *shown)

    monkeypatch.setattr(AnswerSampler, "answer", counted)
    broken = asked.with_name("broken")
    broken.touch()
    with pytest.raises((KeyboardInterrupt, ConfigError)):
        _facts(trained, asked, "again.jsonl", to="all")
    broken.unlink()
    kept, before = asked.with_name(".again.jsonl.unfinished.jsonl"), len(batches)
    if stopped == "writing a line":
        kept.write_bytes(kept.read_bytes()[:-20])
    assert _sample(trained, asked, "again.jsonl", to="all") == whole
    assert len(batches) - before == again  # of 6 batches


def test_a_machine_that_puts_other_prompts_together_leaves_none_out(
    trained: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _sample(trained, asked, "whole.jsonl", to="all")
    answer, calls = AnswerSampler.answer, list[int]()

    def stopped(
        self: AnswerSampler, prompts: Sequence[Indices], draws: Sequence[Any], *shown: Any
    ) -> list[list[Indices]]:
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(self, prompts, draws, *shown)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(AnswerSampler, "answer", stopped)
        _facts(trained, asked, "again.jsonl", to="all")
    monkeypatch.setattr(generation.capacity, "forward_tokens", lambda *_, **__: 400)
    assert _sample(trained, asked, "again.jsonl", to="all") == whole


def test_answers_of_another_command_are_refused(trained: Path, asked: Path) -> None:
    asked.with_name("broken").touch()
    with pytest.raises(ConfigError, match="RuntimeError: out of order"):
        _facts(trained, asked, "out.jsonl")
    with pytest.raises(ConfigError, match=r"with other n, seed. Repeat that command"):
        _facts(trained, asked, "out.jsonl", n=3, seed=4)


def _answer(text: str, reward: float, finished: bool = True) -> ScoredAnswer:
    return ScoredAnswer(text, finished, reward, {"own": reward})


def test_unfinished_and_repeated_answers_are_no_rows() -> None:
    answers = [
        _answer("cut", 9, False),
        _answer("a", 2),
        _answer("a", 2),
        _answer("b", 2),
        _answer("c", 1),
        _answer("", 7),
    ]
    groups = [AnswerGroup(Example("row 1", text=(("Why? ", False),)), answers)]

    def written(to: str, least: float | None = None, margin: float = 0) -> list[dict[str, Any]]:
        return rows_to_write(groups, to, least=least, margin=margin)

    assert written("best") == [{"prompt": "Why? ", "completion": "a", "reward": 2}]
    assert [row["completion"] for row in written("accepted", least=2)] == ["a", "b"]
    assert written("pairs") == [{"prompt": "Why? ", "chosen": "a", "rejected": "c", "margin": 1}]
    assert not written("pairs", margin=2) and not written("best", least=3) and not written("pairs", least=3)
    assert len(written("all")) == 6
    even = [groups[0]._replace(answers=answers[1:4])]
    assert not rows_to_write(even, "pairs", least=None, margin=0)


def test_signals_tell_repetition_and_length() -> None:
    assert generated_answers.repetition("one two three four") == 0
    assert generated_answers.repetition("a b c d a b c d") == pytest.approx(1 - 4 / 5)
    assert generated_answers.answer_lengths(["a a a a a", "b"]) == {"words": 3.0, "repetition": 0.25}
    assert generated_answers.length_correlation(["a", "a a", "a a a"], [1.0, 2.0, 9.0]) == pytest.approx(1)
    assert generated_answers.length_correlation(["a", "b"], [1.0, 2.0]) is None
    assert np.isfinite(generated_answers.repetition(""))
