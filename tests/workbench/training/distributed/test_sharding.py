"""In which parts a model comes to the device, and is cut."""

from __future__ import annotations

import pytest
from torch import nn

from tests.conftest import tiny
from workbench.runs.ranks import ALONE
from workbench.training.distributed.sharding import place_model

MODELS = {
    "Bert": "MaskedLM",
    "Roberta": "SequenceClassification",
    "T5": "Seq2SeqLM",
    "Bart": "Seq2SeqLM",
    "GPT2": "CausalLM",
    "Llama": "CausalLM",
}


def _own(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters(recurse=False)}


@pytest.mark.parametrize("name", MODELS)
def test_no_block_shares_a_weight_with_what_is_outside_of_it(name: str) -> None:
    model = tiny(name, head=MODELS[name], tie_word_embeddings=True)
    *blocks, whole = place_model(model, ALONE)
    assert whole is model and len(blocks) >= 2
    for block in blocks:
        inside = set(block.modules())
        own = {id(parameter) for parameter in block.parameters()}
        assert not any(own & _own(module) for module in model.modules() if module not in inside)
