"""A student keeps the layers that matter: what does nothing goes first, and the rest answers as the whole did."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.conftest import MINILM, T5_SIZES, save_tiny, tiny
from tests.vision_backbones import save_vision
from tests.workbench.distillation.test_students import _config, _outputs, _stock
from workbench.adapters import anatomy
from workbench.config.sections.distill_config import StudentConfig
from workbench.data.batching import MicroBatch
from workbench.distillation import layer_importance, students

ENDS = ("o_proj.weight", "down_proj.weight", "c_proj.weight", "c_proj.bias", "o.weight", "wo.weight")
"""The last parameters of the parts of a block, which is added to what it is given: without them it does nothing."""
IDS_BL = np.random.default_rng(0).integers(3, 60, size=(4, 9))


class Rows:
    """Training rows of made-up tokens, two of them shorter."""

    lengths = np.array([9, 5, 9, 7])

    def __init__(self, *, decoder: bool = False) -> None:
        self.decoder = decoder

    def batch(self, indices: Any) -> MicroBatch:
        """Padded rows."""
        ids_BL, lengths_B = torch.from_numpy(IDS_BL[indices]), torch.from_numpy(self.lengths[indices])
        ids_BL[torch.arange(9) >= lengths_B[:, None]] = 0
        inputs = {"input_ids": ids_BL} | ({"decoder_input_ids": ids_BL} if self.decoder else {})
        none = torch.zeros(0, dtype=torch.int64)
        return MicroBatch(inputs, none, none, int(lengths_B.sum()), lengths_B)


def _idle(model: Any, layers: tuple[int, ...]) -> None:
    for stack in anatomy.blocks(model):
        for number in layers:
            for name, parameter in model.get_submodule(stack[number]).named_parameters():
                if name.endswith(ENDS):
                    torch.nn.init.zeros_(parameter)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "T5", "Gemma3Text"])
def test_layers_that_do_nothing_go_first(name: str, stories: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 5}
    if name == "T5":
        sizes |= {**T5_SIZES, "num_layers": 5, "num_hidden_layers": 5, "num_decoder_layers": 5}
    if name == "Gemma3Text":  # the kinds of its layers go with them
        sizes["layer_types"] = [*["sliding_attention"] * 2, *["full_attention"] * 3]
    head = "Seq2SeqLM" if name == "T5" else "CausalLM"
    folder = save_tiny(tmp_path / "tiny", name, head, stories, **sizes)
    original = _stock(folder, head)
    _idle(original, (1, 2))
    original.save_pretrained(folder)
    config = _config(folder, layers="important-3")
    students.make(config, None, tmp_path / "student", weights=False)
    students.make(config, None, tmp_path / "student", weights=True, rows=Rows(decoder=name == "T5"))  # type: ignore[arg-type]
    student = _stock(tmp_path / "student", head)
    assert [len(stack) for stack in anatomy.blocks(student)] == [3] * (1 + student.config.is_encoder_decoder)
    torch.testing.assert_close(_outputs(student), _outputs(original), rtol=1e-5, atol=1e-5)
    if name == "Gemma3Text":
        assert student.config.layer_types == ["sliding_attention", *["full_attention"] * 2]


def test_the_choice_is_that_of_the_rule_written_a_second_time() -> None:
    torch.manual_seed(0)
    model = tiny("Llama", head="CausalLM", vocab_size=64, num_hidden_layers=5).eval()
    layers, batch = model.model.layers, Rows().batch(np.arange(4))
    real_BL = torch.arange(9) < batch.lengths_B[:, None]  # type: ignore[index]

    @torch.no_grad()
    def states(kept: list[int]) -> Any:
        model.model.layers = torch.nn.ModuleList([layers[number] for number in kept])
        found = model.model(batch.inputs["input_ids"], use_cache=False).last_hidden_state[real_BL]
        model.model.layers = layers
        return found

    whole, left, changes = states([*range(5)]), [*range(5)], []
    while len(left) > 2:  # of so few layers all are tried
        errors = {n: float((states([m for m in left if m != n]) - whole).square().mean()) for n in left[1:-1]}
        gone = min(errors, key=lambda number: errors[number])
        left.remove(gone)
        changes.append(errors[gone] / float(whole.square().mean()))
    found = layer_importance.choose(model, anatomy.blocks(model)[0], [0, 4], 2, batch)
    assert found.kept == left == [0, 4] and found.changes == pytest.approx(changes, rel=1e-3, abs=1e-6)
    third = layer_importance.choose(model, anatomy.blocks(model)[0], [0, 4], 3, batch)
    assert third.changes == found.changes[:2] and "forward" not in vars(layers[1])


def test_rows_are_read_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny("Llama", head="CausalLM", vocab_size=64, num_hidden_layers=4).eval(), list[torch.device]()
    to = MicroBatch.to
    monkeypatch.setattr(MicroBatch, "to", lambda self, device: asked.append(device) or to(self, device))
    layer_importance.choose(model, anatomy.blocks(model)[0], [0, 3], 3, Rows().batch(np.arange(4)))
    assert asked == [model.device]


def test_a_sentence_encoder_and_pictures_lose_what_matters_least(tmp_path: Path) -> None:
    made = tmp_path / "student"
    students.make(_config(MINILM, of="classify", layers="important-50%"), None, made, weights=True, rows=Rows())  # type: ignore[arg-type]
    assert _stock(made, "").config.num_hidden_layers == 3
    folder = save_vision(tmp_path / "vit", "ViT", num_hidden_layers=4)
    original = _stock(folder, "ImageClassification")
    for name, parameter in original.named_parameters():
        if ".1." in name and name.endswith(("output.dense.weight", "output.dense.bias", "fc2.weight", "fc2.bias")):
            torch.nn.init.zeros_(parameter)
    original.save_pretrained(folder)
    none = torch.zeros(0, dtype=torch.int64)
    batch = MicroBatch({"pixel_values": torch.randn(2, 3, 8, 8)}, none, none, 2)
    size = original.config.image_size
    batch.inputs["pixel_values"] = torch.randn(2, 3, size, size)
    found = layer_importance.choose(original.eval(), anatomy.blocks(original)[0], [0, 3], 3, batch)
    assert found.kept == [0, 2, 3]


def test_how_many_layers_are_important() -> None:
    assert StudentConfig(layers="important-50%").chosen(30) == StudentConfig(layers="important-15").chosen(30)
    assert len(StudentConfig(layers="important-1%").chosen(12)) == 1
    with pytest.raises(ValueError, match=r"the backbone has 4 layers. Write important-N with a number up to 4"):
        StudentConfig(layers="important-9").chosen(4)
    with pytest.raises(ValidationError, match=r"random weights are all alike. Write layers=first-N"):
        StudentConfig(layers="important-2", weights="random")


def test_a_run_says_which_layers_it_kept(tmp_path: Path, stories: str) -> None:
    said: list[str] = []
    run = SimpleNamespace(ranks=students.ALONE, note=lambda **facts: noted.update(facts))
    noted: dict[str, Any] = {}
    callback: Any = SimpleNamespace(say=said.append)
    students.make(
        _config(stories, layers="important-3"),
        None,
        tmp_path / "student",
        weights=True,
        rows=Rows(),  # type: ignore[arg-type]
        callback=callback,
        run=run,  # type: ignore[arg-type]
    )
    ((kept,), (changes,)) = noted["student"]["layers"], noted["student"]["changes"]
    assert len(kept) == 3 and kept[0] == 0 and kept[-1] == 4 and len(changes) == 2
    assert said[-1] == f"Layers that it keeps: {', '.join(map(str, kept))}."
    assert json.loads((tmp_path / "student" / "config.json").read_text())["num_hidden_layers"] == 3
