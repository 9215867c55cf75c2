"""Noise of the forward pass: the laws of its papers, and that nothing but seed, step and row decides it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import T5_SIZES, tiny
from workbench import adapters
from workbench.adapters import Full
from workbench.adapters.anatomy import decoder_layers
from workbench.adapters.row_dropout import RowDraw, drawing, row_keys
from workbench.config.sections.regularise_config import RegulariseConfig
from workbench.errors import ConfigError
from workbench.models import forward_hooks

CPU = torch.device("cpu")
IDS = torch.arange(3, 33).view(5, 6)


def rows(*numbers: int, step: int = 3, lengths: int = 6) -> RowDraw:
    return RowDraw(0, step, np.array(numbers), np.full(len(numbers), lengths))


def noisy(family: str = "Llama", **settings: Any) -> Any:
    model = adapters.attach(tiny(family), Full(), seed=0)
    forward_hooks.install(model, decoder_layers(model), RegulariseConfig(**settings))  # type: ignore[arg-type]
    return model.train()


def hidden(model: Any, ids: Tensor, *numbers: int, **value: Any) -> Tensor:
    with torch.no_grad(), drawing([rows(*numbers, **value)], CPU):
        states: Tensor = model(input_ids=ids).logits
    return states


@pytest.mark.parametrize("settings", [{"neftune": 5.0}, {"stochastic_depth": 0.5}], ids=["neftune", "depth"])
def test_a_row_gets_the_same_noise_alone_and_among_others_and_other_noise_in_other_steps(settings: Any) -> None:
    model = noisy(**settings)
    together = hidden(model, IDS, 7, 2, 9, 4, 8)
    padded = nn.functional.pad(IDS[2:3], (0, 3))
    torch.testing.assert_close(hidden(model, padded, 9)[:, :6], together[2:3])
    assert not torch.allclose(hidden(model, IDS, 7, 2, 9, 4, 8, step=4), together)


@pytest.mark.parametrize("settings", [{"neftune": 5.0}, {"stochastic_depth": 0.5}], ids=["neftune", "depth"])
def test_outside_of_training_steps_and_where_it_is_off_every_bit_is_what_it_is_without(settings: Any) -> None:
    bare, model = tiny("Llama").train(), noisy(**settings)
    wanted = bare(input_ids=IDS).logits
    assert torch.equal(model(input_ids=IDS).logits, wanted), "no rows are told"
    with drawing([rows(0, 1, 2, 3, 4)], CPU):
        assert not torch.equal(model(input_ids=IDS).logits, wanted)
        forward_hooks.install(model, decoder_layers(model), RegulariseConfig())
        assert torch.equal(model(input_ids=IDS).logits, wanted)


def test_neftune_is_even_noise_whose_reach_falls_with_the_root_of_length_and_width() -> None:
    model = noisy(neftune=5.0)
    embeddings = model.get_input_embeddings()
    ids = torch.zeros(2, 400, dtype=torch.long)
    with torch.no_grad(), drawing([RowDraw(0, 1, np.arange(2), np.array([400, 100]))], CPU):
        noise = embeddings(ids) - embeddings.weight[0]
    for part, length in zip(noise, (400, 100), strict=True):
        scaled = part * (length * part.shape[-1]) ** 0.5 / 5.0
        assert scaled.abs().max() <= 1 + 1e-4
        found = np.histogram(scaled.numpy(), bins=8, range=(-1, 1))[0] / scaled.numel()
        np.testing.assert_allclose(found, 1 / 8, atol=5 * (1 / 8 / scaled.numel()) ** 0.5)


def test_stochastic_depth_passes_by_later_blocks_more_often_and_is_right_on_average() -> None:
    """The second of two blocks that add 1 and 10 is passed by with the whole rate, the first with half of it."""

    class Adds(nn.Module):
        def __init__(self, amount: float) -> None:
            super().__init__()
            self.amount = amount

        def forward(self, hidden_states: Tensor) -> tuple[Tensor, str]:
            return hidden_states + self.amount, "more"

    blocks = [Adds(1.0), Adds(10.0)]
    forward_hooks.install(tiny("Llama"), blocks, RegulariseConfig(stochastic_depth=0.6))
    count = 20_000
    found = torch.zeros(count, 1, 1)
    with drawing([RowDraw(0, 1, np.arange(count), np.ones(count))], CPU):
        assert row_keys() is not None
        for block in blocks:
            found, more = block(hidden_states=found)
            assert more == "more"
    first, second = found.flatten().remainder(25) > 0.5, found.flatten() > 20
    assert abs(first.float().mean() - 0.7) < 0.02 and abs(second.float().mean() - 0.4) < 0.02
    torch.testing.assert_close(found.flatten(), first / 0.7 + second * 10 / 0.4)
    assert abs((first & second).float().mean() - 0.7 * 0.4) < 0.02, "blocks are passed by independently"


def test_two_texts_have_no_length_to_scale_by() -> None:
    with pytest.raises(ConfigError, match="reads two"):
        forward_hooks.install(tiny("T5", head="Seq2SeqLM", **T5_SIZES), [], RegulariseConfig(neftune=5.0))
