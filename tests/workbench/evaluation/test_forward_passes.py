"""Scores are a function of the rows, however many of them memory lets into one forward pass."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests import forked
from tests.run_files import read_scores
from tests.workbench.evaluation.scoring_together import Impatient
from workbench import evaluation, losses
from workbench.config import RunConfig
from workbench.data.batching import Indices, micro_batches
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import Stopped, TrainingError
from workbench.evaluation import classification_scores, forward_passes, generation, perplexity
from workbench.evaluation.forward_passes import ResultStore, over_rows
from workbench.models import output_heads
from workbench.models.output_heads import Head
from workbench.recipes.verbs.run import run
from workbench.runs.ranks import Ranks
from workbench.training import capacity

T = TypeVar("T")
Sections = dict[str, Any]


@pytest.fixture
def head(llama: PreTrainedModel) -> Head:
    return output_heads.find(llama, llama)


@pytest.fixture
def memory(llama: PreTrainedModel) -> Iterator[Callable[[int], list[int]]]:
    """Lets forward passes have so many tokens and no more; returns how many the passes had that were tried."""
    handles = []

    def limit(most: int) -> list[int]:
        tried: list[int] = []

        def check(_: Any, __: Any, inputs: dict[str, Tensor]) -> None:
            tried.append(inputs["input_ids"].numel())
            if tried[-1] > most:
                raise torch.OutOfMemoryError("fake")

        handles.append(llama.register_forward_pre_hook(check, with_kwargs=True))
        return tried

    yield limit
    for handle in handles:
        handle.remove()


def test_sums_do_not_depend_on_how_rows_are_cut(
    llama: PreTrainedModel, head: Head, rows: TokenizedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in the last bit, where the losses of tokens are the same."""

    def token_scores(hidden_ND: Tensor, labels_N: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return (labels_N * 0.7).exp(), labels_N > 30  # more digits together than a float64 has

    monkeypatch.setattr(losses, "token_scores", token_scores)
    found = set()
    for tokens in (1, 12, 20, 30, 4096):
        monkeypatch.setattr(capacity, "FORWARD_TOKENS", tokens)
        found.add(evaluation.likelihood(llama, head, rows))
    assert len(found) == 1


def test_memory_that_runs_out_makes_passes_smaller_and_changes_no_score(
    llama: PreTrainedModel,
    head: Head,
    rows: TokenizedSet,
    memory: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = evaluation.likelihood(llama, head, rows)
    tried = memory(26)
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", 60)
    found = evaluation.likelihood(llama, head, rows)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert found.token_accuracy == wanted.token_accuracy
    fits = [tokens for tokens in tried if tokens <= 26]
    assert tried[: len(tried) - len(fits)] == tried[:1] == [60], "a size that did not fit is not tried again"


def test_a_row_that_does_not_fit_is_refused(
    llama: PreTrainedModel, head: Head, rows: TokenizedSet, memory: Callable[[int], list[int]]
) -> None:
    memory(11)
    with pytest.raises(TrainingError, match="scoring rows of 12 tokens, 12 in a forward pass"):
        evaluation.likelihood(llama, head, rows)


def test_rows_that_are_known_are_left_out_whatever_their_micro_batches_were(
    llama: PreTrainedModel, head: Head, rows: TokenizedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = evaluation.likelihood(llama, head, rows)
    questions = iter([False, False, True])
    with monkeypatch.context() as smaller, pytest.raises(Stopped):
        smaller.setattr(capacity, "FORWARD_TOKENS", 24)
        evaluation.likelihood(llama, head, rows, scoring=ResultStore(tmp_path, questions.__next__).by("after"))
    resumed = ResultStore(tmp_path, lambda: False).by("after")
    seen: list[int] = []
    handle = llama.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(len(inputs["input_ids"])), with_kwargs=True
    )
    found = evaluation.likelihood(llama, head, rows, scoring=resumed)
    handle.remove()
    assert 0 < sum(seen) < len(rows)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    other = rows.subset(np.arange(4))
    alone = evaluation.likelihood(llama, head, other)
    assert evaluation.likelihood(llama, head, other, scoring=resumed) == alone, "a set of its own"


class OneOfThree(Ranks):
    """One of three processes, which gets each row's number as its result from the others."""

    def gathered(self, value: T) -> list[T]:
        return [value, {row: row for row in range(23)}]  # type: ignore[list-item]


def test_each_of_several_processes_computes_rows_of_its_own(llama: PreTrainedModel) -> None:
    lengths, shares = np.random.default_rng(0).integers(1, 60, 23), list[list[int]]()

    def compute(rows: Indices) -> list[int]:
        shares[-1] += rows.tolist()
        return list(rows.tolist())

    for rank in range(3):
        scoring = ResultStore(None, lambda: False, dealt=OneOfThree(rank, 3)).by("shipped")
        shares.append([])
        assert over_rows(llama, lengths, compute, scoring=scoring) == list(range(23))
    assert sorted(row for share in shares for row in share) == list(range(23))
    tokens = [sum(lengths[row] for row in share) for share in shares]
    assert max(tokens) - min(tokens) < 60 and max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_micro_batch_is_not_cut_again_as_long_as_it_fits() -> None:
    chance = np.random.default_rng(0)
    for tokens in (40, 300, 5000):
        lengths = chance.integers(1, 60, 80)
        for part in micro_batches(np.arange(80), lengths, tokens=tokens):
            (again,) = micro_batches(part, lengths, tokens=tokens)
            assert np.array_equal(again, part)


@pytest.mark.parametrize(
    ("free", "tokens"),
    [(2**20, 4096), (2 * 4 * 32 * 64 * 9000, 8192), (2 * 4 * 32 * 64 * 20000, 16384), (2**45, 65536)],
)
def test_an_accelerator_gets_what_half_of_its_free_memory_holds(
    free: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "available", lambda _: free)
    assert capacity.forward_tokens(torch.device("cuda"), width=64) == tokens
    assert capacity.forward_tokens(torch.device("cpu"), width=64) == capacity.FORWARD_TOKENS


def test_the_size_is_asked_of_the_memory(
    llama: PreTrainedModel, head: Head, rows: TokenizedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "forward_tokens", lambda device, width: 1)
    computed: list[Indices] = []
    over_rows(llama, rows.lengths, lambda numbers: computed.append(numbers) or [0] * len(numbers))
    assert [len(numbers) for numbers in computed] == [1] * len(rows)


@pytest.fixture
def text(short_stories: str, questions: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": "sft",
            "model": {"id": short_stories, "weights": "float32"},
            "adapter": {"method": "lora", "rank": 2},
            "data": {"train": str(questions), "held_out": 0.4},
            "batch": {"size": 8},
            "train": {"steps": 2},
            "evaluate": {"every": None, "answers": 8, "max_new_tokens": 4},
            "save": {"every": None},
        }
    )


@pytest.fixture
def classes(tmp_path: Path, short_stories: str) -> Sections:
    rows = "".join(f"{'good' if n % 2 else 'bad'} story {n} {'it is ' * (n % 5)},{n % 2}\n" for n in range(48))
    (tmp_path / "rows.csv").write_text("text,label\n" + rows)
    return {
        "model": {"id": short_stories, "weights": "float32"},
        "adapter": {"method": "lora", "rank": 2},
        "data": {"train": str(tmp_path / "rows.csv")},
        "batch": {"size": 8},
        "train": {"steps": 2},
        "evaluate": {"every": None},
        "save": {"every": None},
    }


@pytest.fixture
def scored_rows(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many rows models scored, in small batches."""
    found: Counter[str] = Counter()

    def counted(model: Any, lengths: Any, compute: Any, *, scoring: Any = None, **more: Any) -> Any:
        def counting(rows: Any) -> Any:
            found.update({scoring.model: len(rows)} if scoring else {})
            return compute(rows)

        return over_rows(model, lengths, counting, scoring=scoring, **more)

    for module in (perplexity, generation, classification_scores):
        monkeypatch.setattr(module, "over_rows", counted)
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", 64)
    return found


def _ends_equal(config: RunConfig, folder: Path, scored_rows: Counter[str], *, after: str) -> None:
    """Stopped in the third forward pass after it said `after`, and gone on with."""
    run(config, out=folder / "straight", resume=False, callback=Impatient())
    wanted = scored_rows.copy()
    scored_rows.clear()
    with pytest.raises(Stopped, match=r"what is scored so far is kept\.\nContinue with: workbench run .* --resume"):
        run(config, out=folder / "broken", resume=False, callback=Impatient(after=after, passes=4))
    assert json.loads((folder / "broken/manifest.json").read_text())["status"] == "stopped"
    assert (folder / "broken" / forward_passes.FILE).exists()
    run(config, out=folder / "broken", resume=True, callback=Impatient())
    ended = [read_scores(folder / name) for name in ("straight", "broken")]
    assert ended[0] == ended[1]
    assert not (folder / "broken" / forward_passes.FILE).exists()
    assert scored_rows == wanted, "something was scored twice"


@pytest.mark.nightly(but=["Scoring what was saved"])
@pytest.mark.parametrize("after", ["Scoring the backbone", "Scoring what was saved"])
def test_text(after: str, text: RunConfig, tmp_path: Path, scored_rows: Counter[str]) -> None:
    _ends_equal(text, tmp_path, scored_rows, after=after)


def test_classes(classes: Sections, tmp_path: Path, scored_rows: Counter[str]) -> None:
    config = RunConfig.model_validate({**classes, "recipe": "classify", "data": {**classes["data"], "held_out": 0.5}})
    _ends_equal(config, tmp_path, scored_rows, after="Scoring what was saved")


@pytest.mark.nightly
def test_folds(classes: Sections, tmp_path: Path, scored_rows: Counter[str]) -> None:
    config = RunConfig.model_validate({**classes, "recipe": "crossval", "folds": {"k": 2}})
    _ends_equal(config, tmp_path, scored_rows, after="Asking what was saved")


@pytest.mark.nightly
@pytest.mark.slow
def test_processes_that_share_weights_stop_together(text: RunConfig, tmp_path: Path) -> None:
    config = text.model_dump(mode="json", exclude_unset=True) | {"distributed": {"zero": 3}}
    config["data"]["limit"], config["evaluate"]["answers"] = 72, 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [forked.python(), "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", str(Path(__file__).with_name("scoring_together.py")), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    ended = [read_scores(tmp_path / run) for run in ("straight", "broken")]
    assert ended[0] == ended[1]
    assert not (tmp_path / "broken" / forward_passes.FILE).exists()


def test_answers_that_were_cut_short_are_not_kept(text: RunConfig, trained: Path, tmp_path: Path) -> None:
    from workbench.data.text import tokenized
    from workbench.models import exported
    from workbench.runs import run_directory

    config = run_directory.read_config(trained)
    model = exported.load(trained, config)
    rows = tokenized.load(config.data, model.tokenizer, model.template, seed=config.seed).held_out
    asked: list[bool] = []

    def in_the_middle() -> bool:
        asked.append(len(asked) > 4)
        return asked[-1]

    scoring = forward_passes.ResultStore(tmp_path, in_the_middle).by("after")
    with pytest.raises(Stopped):
        evaluation.answers(model.model, rows, model.tokenizer, count=4, max_new_tokens=99, scoring=scoring)
    assert not (tmp_path / forward_passes.FILE).exists()


def test_progress_counts_the_rows_of_every_pass(llama: PreTrainedModel) -> None:
    told: list[str] = []
    lengths = np.full(5, 8)
    with forward_passes.progress(told.append, every=0.0):
        for _ in range(2):
            over_rows(llama, lengths, lambda numbers: [0] * len(numbers))
    over_rows(llama, lengths, lambda numbers: [0] * len(numbers))
    assert told[-1].startswith("10 forward passes of rows, ")
