"""Rows cut to a growing length: the paper's pace, and what is left of each row counted token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.run_files import write_lines
from workbench.config import RunConfig
from workbench.config.sections.curriculum_config import LengthWarmUpConfig
from workbench.data.batching import collate
from workbench.data.text import length_warm_up, tokenized
from workbench.data.text.length_warm_up import GrowingRows
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError
from workbench.models import backbones


def read(folder: Path, stories: str, rows: list[dict[str, Any]]) -> TokenizedSet:
    write_lines(folder / "rows.jsonl", rows)
    data = {"train": str(folder / "rows.jsonl"), "held_out": 0.1}
    config = RunConfig.model_validate({"recipe": "sft", "model": {"id": stories}, "data": data})
    tokenizer = backbones.tokenizer(config.model)
    encoder = row_encoder(config, backbones.hub_config(config.model), tokenizer, template=None)
    return tokenized.load(config.data, tokenizer, encoder, seed=0).train


@pytest.fixture
def texts(tmp_path: Path, stories: str) -> TokenizedSet:
    words = np.random.default_rng(0).choice(["the", "cat", "dog", "sat", "tree"], size=(1200, 60))
    return read(tmp_path, stories, [{"text": " ".join(row[: 3 + n % 57])} for n, row in enumerate(words)])


@given(start=st.integers(8, 200), longest=st.integers(9, 900), steps=st.integers(1, 300), until=st.floats(0.05, 1))
@example(start=21, longest=447, steps=24, until=0.05)
def test_the_length_grows_evenly_in_multiples_of_eight(start: int, longest: int, steps: int, until: float) -> None:
    """Li et al. 2022: seqlen_t = seqlen_s + (seqlen_e - seqlen_s) min(t / T, 1), less what 8 does not divide."""
    config = LengthWarmUpConfig(start=start, until=until)
    limits = [config.limit(step, steps=steps, longest=longest) for step in range(steps)]
    for step, limit in enumerate(limits):
        wanted = start + (longest - start) * min(step / (until * steps), 1)
        if limit is None:
            assert step >= until * steps or max(start, wanted - wanted % 8) >= longest - 1e-6
        else:
            # A length that is a multiple of eight may come out as the last bit below it.
            assert limit in {max(start, int(near) - int(near) % 8) for near in (wanted - 1e-9, wanted + 1e-9)}
            assert limit < longest
    known = [longest if limit is None else limit for limit in limits]
    assert start >= longest or known == sorted(known)
    assert LengthWarmUpConfig().limit(0, steps=steps, longest=longest) is None


def test_what_is_left_of_each_row(texts: TokenizedSet) -> None:
    """Rows over several chunks of the table, some of them held out, counted and collated one by one."""
    found = length_warm_up.growing(texts, LengthWarmUpConfig(start=16, until=0.5), 40)
    assert isinstance(found, GrowingRows)
    for step in (0, 7, 19):
        seen = found.seen(epoch=0, step=step)
        limit = seen.limit
        assert limit is not None and seen is found.seen(epoch=1, step=step), "the pass has no say"
        left = [texts[row].supervised[:limit] for row in range(len(texts))]
        assert seen.lengths.tolist() == [len(each) for each in left]
        assert seen.supervised.tolist() == [int(each[1:].sum()) for each in left]
        rows = [texts[row]._replace(input_ids=texts[row].input_ids[:limit], supervised=left[row]) for row in (50, 3)]
        batch, wanted = seen.batch(np.array([50, 3])), collate(rows)
        assert batch.labels_N.equal(wanted.labels_N) and batch.positions_N.equal(wanted.positions_N)
        assert batch.inputs["input_ids"].equal(wanted.inputs["input_ids"]) and batch.rows_B is not None
        assert len(batch.labels_N) == seen.supervised[[50, 3]].sum()
    late = found.seen(epoch=0, step=20)
    assert late is found and np.array_equal(late.supervised, texts.supervised)


def test_rows_that_cannot_be_cut_are_refused_with_what_could(tmp_path: Path, stories: str, texts: TokenizedSet) -> None:
    assert length_warm_up.growing(texts, LengthWarmUpConfig(), 10) is texts
    with pytest.raises(DataError, match=r"start=512: the longest training row has \d+ tokens, so that none is cut"):
        length_warm_up.growing(texts, LengthWarmUpConfig(start=512), 10)
    rows = read(tmp_path, stories, [{"question": "how much " * (1 + n), "answer": "so " * 9} for n in range(9)])
    first = max(int(np.flatnonzero(rows[row].supervised[1:])[0]) + 2 for row in range(len(rows)))
    with pytest.raises(
        DataError, match=rf"start=8 would cut all that carries loss off .*\n  Write .*start={first} or more"
    ):
        length_warm_up.growing(rows, LengthWarmUpConfig(start=8), 10)
    least = length_warm_up.growing(rows, LengthWarmUpConfig(start=first), 10)
    assert least.seen(epoch=0, step=0).supervised.min() == 1
