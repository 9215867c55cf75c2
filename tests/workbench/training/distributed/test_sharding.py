"""In which parts a model comes to the device, and is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from tests.conftest import tiny
from workbench.runs.ranks import ALONE, Ranks
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


@pytest.mark.nightly
def test_each_machine_has_a_reader_of_its_own(tmp_path: Path) -> None:
    """Of two machines with two processes each; what the others have themselves is wrong, and is replaced."""
    mp.spawn(_placed, (tmp_path / "store",), nprocs=4)  # type: ignore[no-untyped-call]


def _placed(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    model = tiny("GPT2", head="CausalLM", tie_word_embeddings=True)
    wanted = {name: each.clone() for name, each in model.state_dict().items()}
    if rank % 2:
        for each in model.parameters():
            each.data.fill_(torch.nan)
    list(place_model(model, Ranks(rank, 4, rank % 2, 2)))
    assert all(torch.equal(each, wanted[name]) for name, each in model.state_dict().items())
    assert model.lm_head.weight is model.transformer.wte.weight
    dist.destroy_process_group()
