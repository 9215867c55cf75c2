"""Operations against the formula of a transformer."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.conftest import tiny
from workbench.planning.counters import Operations


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


def test_attention_counts_every_head_of_the_query_forward_and_backward() -> None:
    """Two products forward, five backward; a head of keys serves two of queries."""
    query, key, value = (torch.ones(2, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2))
    with Operations() as operations:
        found = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    product = 2 * (2 * 4) * 6 * 6 * 8
    assert operations.count == 2 * product
    with Operations() as operations:
        found.sum().backward()
    assert operations.count == 5 * product


def test_products_that_add_to_what_is_there_count_too() -> None:
    """LoRA's: torch knows them only where they write elsewhere."""
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    with Operations() as operations:
        torch.ones(3, 7).addmm_(left, right)
        torch.ones(2, 3, 7).baddbmm_(left.expand(2, 3, 5), right.expand(2, 5, 7))
    assert operations.count == 3 * (2 * 3 * 5 * 7)


def test_each_shape_has_its_own_count_however_often_it_comes() -> None:
    with Operations() as operations:
        for rows, columns in ((3, 7), (4, 7), (3, 9), (3, 7)):
            torch.ones(rows, 5) @ torch.ones(5, columns)
    assert operations.count == 2 * 5 * (21 + 28 + 27 + 21)


def test_products_with_packed_weights_count_as_those_with_whole_ones() -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(64, 32, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    with Operations() as operations, torch.no_grad():
        layer(torch.ones(3, 5, 64, dtype=torch.bfloat16))
    assert operations.count == 2 * 15 * 64 * 32
