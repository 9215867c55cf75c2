"""Scores are a function of the rows, however many of them memory lets into one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench import evaluation, losses
from workbench.data.batching import Indices, micro_batches
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import Stopped, TrainingError
from workbench.evaluation.result_store import ResultStore
from workbench.evaluation.row_passes import over_rows
from workbench.models import output_heads
from workbench.models.output_heads import Head
from workbench.runs.ranks import Ranks
from workbench.training import capacity

T = TypeVar("T")


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


class Unheard(Ranks):
    """One of several processes, which hears nothing of the others."""

    def gathered(self, value: T) -> list[T]:
        return [value]


def test_each_of_several_processes_computes_rows_of_its_own(llama: PreTrainedModel) -> None:
    lengths, shares = np.random.default_rng(0).integers(1, 60, 23), list[dict[int, int]]()
    for rank in range(3):
        scoring = ResultStore(None, lambda: False, dealt=Unheard(rank, 3)).by("shipped")
        shares.append(over_rows(llama, lengths, lambda rows: rows.tolist(), scoring=scoring))
    assert sorted(row for share in shares for row in share) == list(range(23))
    assert all(row == result for share in shares for row, result in share.items())
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
