"""Activated LoRA: backbone before the last invocation of a row, lora from there on, as stock PEFT computes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from tests.adapters.contract import attach
from workbench import adapters
from workbench.adapters import ALora, Lora
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.errors import ConfigError

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

CALL = (60, 5)
IDS = torch.tensor([[3, 60, 5, 61, 60, 5, 7, 9], [60, 5, 4, 8, 15, 16, 1, 0], [60, 6, 5, 60, 8, 9, 4, 60]])
"""Twice, once, never; the second row has two tokens of padding."""
STARTS = (4, 0, None)


def trained(model: PreTrainedModel, **settings: Any) -> Any:
    """An adapter of which no matrix is zero."""
    found = attach(copy.deepcopy(model), ALora(invocation=CALL, rank=4, **settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    return found.eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS, **more: Any) -> Tensor:
    found: Tensor = model(input_ids=ids, **more).logits
    return found


def test_the_law_written_out(llama: PreTrainedModel) -> None:
    """A token's layer output is W x before the start and W x + (alpha / rank) B A x from it on."""
    model, seen = trained(llama), dict[str, tuple[Tensor, Tensor]]()
    layers = {path: each for path, each in model.named_modules() if hasattr(each, "lora_A")}
    handles = [
        each.register_forward_hook(lambda _, given, out, path=path: seen.update({path: (given[0], out)}))
        for path, each in layers.items()
    ]
    logits(model)
    for handle in handles:
        handle.remove()
    for path, (x, found) in seen.items():
        layer: Any = layers[path]
        update = 32 / 4 * x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
        wanted = layer.base_layer(x)
        for row, start in enumerate(STARTS):
            if start is not None:
                wanted[row, start:] += update[row, start:]
        assert torch.allclose(found, wanted, atol=1e-5), path
    assert len(seen) >= 7


def test_before_the_invocation_all_is_the_backbone_bit_for_bit(llama: PreTrainedModel) -> None:
    """So a cache of keys and values of a prompt, made by the backbone, serves the adapter."""
    model = trained(llama)
    plain, found = logits(llama), logits(model)
    assert torch.equal(found[0, :4], plain[0, :4]) and torch.equal(found[2], plain[2])
    assert (found[0, 4:] - plain[0, 4:]).abs().min(dim=-1).values.max() > 0 and not torch.equal(found[1], plain[1])
    cache = llama(input_ids=IDS[:1, :4], use_cache=True).past_key_values
    rest = logits(model, IDS[:1, 4:], past_key_values=cache)
    assert torch.allclose(rest, found[:1, 4:], atol=1e-5)


def test_padding_and_other_rows_do_not_matter(llama: PreTrainedModel) -> None:
    model = trained(llama)
    whole = logits(model)
    for row, length in enumerate((8, 6, 8)):
        alone = logits(model, IDS[row : row + 1, :length])
        assert torch.allclose(alone[0], whole[row, :length], atol=1e-5)


def test_where_all_of_a_row_is_invoked_it_is_lora(llama: PreTrainedModel) -> None:
    model, lora = trained(llama), attach(copy.deepcopy(llama), Lora(rank=4)).eval()
    lora.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, IDS[1:2]), logits(lora, IDS[1:2]))


def test_stock_peft_computes_what_was_saved(llama: PreTrainedModel, tmp_path: Path) -> None:
    model = trained(llama)
    adapters.save(model, tmp_path)
    stock = PeftModel.from_pretrained(copy.deepcopy(llama), str(tmp_path)).eval()
    assert torch.allclose(logits(stock), logits(model), atol=1e-5)
    loaded = adapters.load(copy.deepcopy(llama), tmp_path)
    assert torch.equal(logits(loaded), logits(model))


def test_answers_are_those_of_whole_passes(llama: PreTrainedModel) -> None:
    """Prompts of unequal length, padded on the left: each token is the likeliest after all before it."""
    model, prompts = trained(llama), [IDS[0, :7], IDS[1, :4], IDS[2]]
    width = max(map(len, prompts))
    padded = torch.stack([torch.cat([torch.zeros(width - len(each), dtype=torch.int64), each]) for each in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(each) for each in prompts]).long()
    found = model.generate(input_ids=padded, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for prompt, row in zip(prompts, found, strict=True):
        ids = prompt
        for token in row[width:]:
            following = logits(model, ids[None])[0, -1].argmax()
            if CALL[0] in ids[len(prompt) :]:  # a new invocation would begin in the answer
                break
            assert following == token
            ids = torch.cat([ids, token[None]])


def test_dropout_is_by_row(llama: PreTrainedModel) -> None:
    model = trained(llama, dropout=0.5).train()

    def drawn(rows: list[int]) -> Tensor:
        draw = RowDraw(seed=0, step=1, rows=torch.tensor(rows).numpy())
        with drawing([draw], torch.device("cpu")):
            return logits(model, IDS[rows])

    assert torch.allclose(drawn([0, 1])[1], drawn([1])[0], atol=1e-5)


def test_without_ids_it_is_refused_with_what_to_write(llama: PreTrainedModel) -> None:
    for invocation in ("", "Answer:"):
        with pytest.raises(ConfigError, match=r"Write them, as adapter.invocation=\[5,7\]"):
            attach(copy.deepcopy(llama), ALora(invocation=invocation))
