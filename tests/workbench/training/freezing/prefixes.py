"""Tiny models whose first blocks are frozen, and rows for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import FAMILIES, tiny
from workbench.adapters import anatomy
from workbench.data.batching import padded
from workbench.training.freezing.cached_prefix import CachedPrefix
from workbench.training.freezing.hidden_state_store import HiddenStateStore, MemoryStore

ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "DistilBert": {},
    "Electra": {"embedding_size": 16},
    "MPNet": {},
    "ModernBert": {"cls_token_id": 3, "sep_token_id": 4},
    "RoFormer": {},
    "DebertaV2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
}
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
STILL = dict.fromkeys((*DROPOUTS, "dropout", "hidden_dropout", "hidden_dropout_prob", "embd_pdrop", "resid_pdrop"), 0.0)
"""No dropout, as each family calls it."""
OTHERS = ("Bloom", "Mamba", "Phi3")
"""Decoders whose blocks give other tuples, or have no attention."""


def build(name: str, **settings: Any) -> PreTrainedModel:
    head = "MaskedLM" if name in ENCODERS else "CausalLM"
    given = {"num_hidden_layers": 4, **STILL, **ENCODERS.get(name, {}), **settings}
    if name == "Phi3":
        given = {**FAMILIES["Llama"], **given}
    return tiny(name, head=head, **given)


def stack(model: PreTrainedModel) -> list[nn.Module]:
    (paths,) = anatomy.blocks(model)
    return [model.get_submodule(path) for path in paths]


def freeze(model: PreTrainedModel, depth: int) -> PreTrainedModel:
    """Only blocks above the line train: heads are often tied to the embeddings."""
    model.requires_grad_(False)
    for block in stack(model)[depth:]:
        block.requires_grad_(True)
    model.train()
    for block in stack(model)[:depth]:
        block.eval()
    return model


def prefix_of(
    model: PreTrainedModel, depth: int, states: HiddenStateStore | None = None, *, trailing: int = 0
) -> CachedPrefix:
    states = states or MemoryStore(torch.float32)
    return CachedPrefix(model, blocks=stack(model), depth=depth, states=states, trailing=trailing)


@contextmanager
def installed(cached: CachedPrefix) -> Iterator[CachedPrefix]:
    cached.install()
    try:
        yield cached
    finally:
        cached.remove()


def batch(rows: Sequence[Sequence[int]], *, masked: bool, more: int = 0) -> dict[str, Tensor]:
    """Rows padded with zeros, `more` than needed."""
    arrays = [np.asarray(row) for row in rows]
    ids_BL = torch.from_numpy(padded(arrays))
    mask_BL = torch.from_numpy(padded([np.ones_like(row) for row in arrays]))
    inputs = {"input_ids": ids_BL, "attention_mask": mask_BL} if masked else {"input_ids": ids_BL}
    return {name: nn.functional.pad(each, (0, more)) for name, each in inputs.items()}
