"""Operations against the formula of a transformer."""

from __future__ import annotations

import torch

from tests.conftest import tiny
from workbench.planning.operations import Operations


def test_a_forward_pass_takes_two_operations_for_each_weight_and_token() -> None:
    model = tiny("Llama", tie_word_embeddings=False)
    ids_BL = torch.arange(12).view(2, 6)
    with Operations() as operations, torch.no_grad():
        model(input_ids=ids_BL, use_cache=False)
    matrices = sum(parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim == 2)
    embeddings = model.get_input_embeddings().weight.numel()
    # Attention: queries with keys, and weights with values, over all pairs of positions in every head.
    attention = 2 * 2 * 6 * 6 * model.config.hidden_size * model.config.num_hidden_layers
    assert operations.count == 2 * 12 * (matrices - embeddings) + 2 * attention
