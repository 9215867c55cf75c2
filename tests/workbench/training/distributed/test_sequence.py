"""Parts of rows: every token and every prediction is in one part, whatever the lengths and the arrangement of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.config import RunConfig
from workbench.data.batching import Row, collate
from workbench.data.packing import PACKED, PADDED, RowLayout
from workbench.errors import ConfigError
from workbench.models.sequence_attention import SequenceGroup
from workbench.training.distributed import layout_checks, sequence


def rows(lengths: list[int]) -> list[Row]:
    """Rows of tokens that are all different, of which every third carries no loss."""
    ends = np.cumsum(lengths)
    ids = [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    return [Row(each, each % 3 > 0) for each in ids]


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=5),
    size=st.integers(2, 4),
    form=st.sampled_from([PADDED, PACKED]),
)
@settings(max_examples=60, deadline=None)
def test_parts_together_are_the_rows(lengths: list[int], size: int, form: RowLayout) -> None:
    batch = collate(rows(lengths))
    whole = form.lay(batch)
    parts = [sequence.arranged(form, SequenceGroup(number, size)).lay(batch) for number in range(size)]
    length = whole.inputs["input_ids"].shape[1]
    joined = torch.cat([part.inputs["input_ids"] for part in parts], dim=1)
    assert torch.equal(joined[:, :length], whole.inputs["input_ids"]) and not joined[:, length:].any()
    predicted = [
        (int(part.inputs["input_ids"].flatten()[at]), int(label))
        for part in parts
        for at, label in zip(part.positions_N, part.labels_N, strict=True)
    ]
    wanted = zip(whole.inputs["input_ids"].flatten()[whole.positions_N].tolist(), whole.labels_N.tolist(), strict=True)
    assert sorted(predicted) == sorted(wanted)
    assert len({part.inputs["input_ids"].shape for part in parts}) == 1


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), size=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_a_part_has_no_more_tokens_than_a_device_may_compute(lengths: list[int], size: int) -> None:
    known, parts = np.array(lengths), sequence.arranged(PADDED, SequenceGroup(0, size))
    for batch in parts.cut(np.arange(len(known)), known, tokens=40):
        assert parts.tokens(known[batch]) <= 40 or len(batch) == 1
        laid = parts.lay(collate(rows([int(each) + 1 for each in known[batch]])))
        assert laid.inputs["input_ids"].numel() <= parts.tokens(known[batch] + 1)


def test_heads_of_all_tokens_come_back_as_all_heads_of_a_part() -> None:
    """In a plan each process gets what it sent itself, in the shapes of a run."""
    group, part_BHlD = SequenceGroup(1, 2), torch.randn(3, 4, 5, 6, requires_grad=True)
    whole_BhLD = group.to_heads(part_BHlD)
    assert whole_BhLD.shape == (3, 2, 10, 6)
    back_BlHD = group.to_tokens(whole_BhLD.transpose(1, 2))
    assert torch.equal(back_BlHD, part_BHlD.transpose(1, 2))
    back_BlHD.sum().backward()
    assert part_BHlD.grad is not None and torch.equal(part_BHlD.grad, torch.ones_like(part_BHlD))


@pytest.mark.parametrize(
    ("hub", "cure"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, r"6, with 3 of keys and values. Write .*sequence=3"),
        ({"num_attention_heads": 7}, r"sequence=7"),
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, r"sequence=1"),
    ],
)
def test_heads_that_cannot_be_dealt_evenly_are_refused(hub: dict[str, int], cure: str) -> None:
    config = RunConfig.model_validate(
        {"recipe": "sft", "data": {"train": "rows.jsonl"}, "distributed": {"sequence": 2}}
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=1680, num_hidden_layers=1, **hub))
    with pytest.raises(ConfigError, match=cure):
        layout_checks.require_backbone(config, model, [], longest=10)
