"""A narrower student loses what matters least, and computes exactly what the whole does without that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import workbench
from tests import text_families
from tests.conftest import MINILM, save_tiny, tiny
from tests.run_files import write_lines
from tests.vision_backbones import save_vision
from tests.workbench.distillation.test_layer_importance import Rows
from tests.workbench.distillation.test_students import IDS_BL, _config, _of, _outputs, _stock
from workbench.config.sections.distill_config import StudentConfig
from workbench.data.batching import MicroBatch
from workbench.distillation import student_width, students
from workbench.errors import ConfigError
from workbench.runs.ranks import ALONE

GROUPED: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LLAMA: dict[str, Any] = {**GROUPED, "hidden_size": 32}
FEWER = {"heads": 2, "neurons": 45}
TOGETHER = {"heads": 3, "channels": 24, "neurons": 45}  # where heads are as wide as channels / heads
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama": ("CausalLM", LLAMA, FEWER),
    "Qwen2": ("CausalLM", {"num_key_value_heads": 2}, FEWER),
    "Qwen3": ("CausalLM", GROUPED, FEWER),
    "Mistral": ("CausalLM", GROUPED, FEWER),
    "SmolLM3": ("CausalLM", {"num_key_value_heads": 2}, FEWER),
    "Gemma": ("CausalLM", {**GROUPED, "num_key_value_heads": 1}, FEWER),
    "Gemma2": ("CausalLM", GROUPED, FEWER),
    "Gemma3Text": ("CausalLM", {**GROUPED, "num_key_value_heads": 1}, FEWER),
    "Granite": ("CausalLM", {"num_key_value_heads": 2}, FEWER),
    "Cohere": ("CausalLM", {"num_key_value_heads": 2}, {"neurons": "50%"}),
    "Phi3": ("CausalLM", {"num_key_value_heads": 2}, FEWER),
    "Starcoder2": ("CausalLM", {"num_key_value_heads": 2}, FEWER),
    "Mixtral": ("CausalLM", GROUPED, {"heads": 2}),
    "GPT2": ("CausalLM", {}, {"neurons": 99}),
    "GPTNeoX": ("CausalLM", {}, {"neurons": 45}),
    "OPT": ("CausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}, {"neurons": 45}),
    "Bert": ("MaskedLM", {}, {"neurons": 45}),
    "Roberta": ("MaskedLM", {}, {"neurons": "50%"}),
    "DistilBert": ("MaskedLM", {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2}, {"neurons": 45}),
    "ModernBert": ("MaskedLM", {"global_attn_every_n_layers": 2}, {"neurons": 45}),
}
"""Of each family its head, its settings, and how narrow a student is that computes what the whole does."""
PLAIN = ["Llama"]


def _narrowed(folder: Path | str, head: str, made: Path, **student: Any) -> tuple[Any, dict[str, Any]]:
    """A student of the stock model in `folder`, and what its run notes."""
    config, noted = _config(str(folder), of=_of(head), **student), dict[str, Any]()
    run: Any = SimpleNamespace(ranks=ALONE, note=lambda **facts: noted.update(facts))
    described = made.with_name(f"{made.name}-described")
    students.make(config, None, described, weights=False)
    students.make(config, None, made, weights=True, rows=Rows(), run=run)  # type: ignore[arg-type]
    written = [json.loads((each / "config.json").read_text()) for each in (made, described)]
    assert {**written[0], "vocab_size": 0} == {**written[1], "vocab_size": 0}
    return _stock(made, head), noted.get("student", {})


def _planted(folder: Path | str, head: str, **student: Any) -> tuple[Any, dict[str, list[list[int]]]]:
    """The model in `folder`, all weights of some heads, neurons and channels being zero now; and what is alive."""
    model, alive = _stock(folder, head), dict[str, list[list[int]]]()
    narrowing = student_width.plan(model, StudentConfig(**student))
    drawn = np.random.default_rng(0)
    kept: dict[Any, Tensor] = {}
    for name, cuts in narrowing.cuts.items():
        for cut in cuts:
            count, place = narrowing.counts[cut.structure], (cut.structure, cut.block)
            if place not in kept:
                kept[place] = torch.from_numpy(np.sort(drawn.permutation(count.whole)[: count.kept]))
                alive.setdefault(cut.structure, []).append(kept[place].tolist())
            places = student_width._index(cut, kept[place], count.whole)
            tensor = model.state_dict()[name]
            zero = torch.ones(tensor.shape[cut.dimension], dtype=torch.bool)
            zero[places] = False
            tensor.index_fill_(cut.dimension, zero.nonzero().flatten(), 0)
    model.save_pretrained(folder)
    return model, alive


@pytest.mark.nightly(but=[*(f"{name}-activations" for name in FAMILIES), "Llama-fisher", "Bert-fisher"])
@pytest.mark.parametrize("by", ["activations", "fisher"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in PLAIN else pytest.mark.slow) for name in FAMILIES]
)
def test_what_is_dead_goes_and_outputs_stay(name: str, by: str, stories: str, tmp_path: Path) -> None:
    head, settings, fewer = FAMILIES[name]
    folder = save_tiny(tmp_path / "tiny", name, head, stories, **settings)
    original, alive = _planted(folder, head, **fewer)
    student, noted = _narrowed(folder, head, tmp_path / "student", **fewer, importance=by)
    assert noted == alive
    torch.testing.assert_close(_outputs(student), _outputs(original), rtol=1e-5, atol=1e-6)
    assert sum(map(torch.numel, student.parameters())) < sum(map(torch.numel, original.parameters()))


@pytest.mark.slow
def test_dead_heads_neurons_and_channels_by_the_names_of_llama(stories: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", "Llama", "CausalLM", stories, **LLAMA)
    original, (channel, group) = _stock(folder, "CausalLM"), (5, 1)
    neurons = [7, 30]  # one in each layer
    with torch.no_grad():
        original.model.embed_tokens.weight[:, channel] = 0
        for layer, neuron in zip(original.model.layers, neurons, strict=True):
            layer.self_attn.v_proj.weight[8 * group : 8 * group + 8] = 0
            layer.mlp.down_proj.weight[:, neuron] = 0
            layer.self_attn.o_proj.weight[channel] = layer.mlp.down_proj.weight[channel] = 0
    original.save_pretrained(folder)
    _, noted = _narrowed(folder, "CausalLM", tmp_path / "student", heads="50%", neurons=47, channels=24)
    assert noted["heads"] == [[0]] * 2
    assert all(neuron not in kept for neuron, kept in zip(neurons, noted["neurons"], strict=True))
    assert channel not in noted["channels"][0]


@pytest.mark.parametrize("name", ["Llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen3", "Phi3"))])
def test_dead_channels_go_throughout(name: str, stories: str, tmp_path: Path) -> None:
    head, settings, fewer = FAMILIES[name]
    folder = save_tiny(tmp_path / "tiny", name, head, stories, **settings)
    original, alive = _planted(folder, head, **fewer, channels=20, layers="all")
    student, noted = _narrowed(folder, head, tmp_path / "student", **fewer, channels=20)
    assert noted == alive and student.config.hidden_size == 20
    torch.testing.assert_close(_outputs(student), _outputs(original), rtol=1e-5, atol=1e-6 if name != "Qwen3" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bert", "Roberta", "ModernBert", "GPT2", "GPTNeoX", "OPT"])
def test_heads_go_with_channels_where_a_family_divides_these(name: str, stories: str, tmp_path: Path) -> None:
    head, settings, _ = FAMILIES[name]
    folder = save_tiny(tmp_path / "tiny", name, head, stories, **settings)
    for section in ({"heads": 3}, {"channels": 24}):
        with pytest.raises(ConfigError, match=r"Write distill.student.heads=3 and distill.student.channels=24"):
            _narrowed(folder, head, tmp_path / "refused", **section)
    original, alive = _planted(folder, head, **TOGETHER)
    student, noted = _narrowed(folder, head, tmp_path / "student", **TOGETHER)
    assert noted["heads"] == alive["heads"] and noted["neurons"] == alive["neurons"]
    (kept,) = noted["channels"]

    def of_fewer(norm: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
        made = torch.zeros_like(output)
        weight, bias = (None if each is None else each[kept] for each in (norm.weight, norm.bias))
        made[..., kept] = torch.nn.functional.layer_norm(given[0][..., kept], (len(kept),), weight, bias, norm.eps)
        return made

    for module in original.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_hook(of_fewer)
    torch.testing.assert_close(_outputs(student), _outputs(original), rtol=1e-4, atol=1e-5)


def test_importance_is_that_of_the_formulas_written_a_second_time() -> None:
    model, batch = tiny("Llama", **LLAMA), Rows().batch(np.arange(4))
    model.requires_grad_(False)
    narrowing = student_width.plan(model, StudentConfig(heads=2, neurons=9, channels=8))
    real_BL = torch.arange(9) < batch.lengths_B[:, None]  # type: ignore[index]
    found = student_width.importance(model, narrowing, batch, "activations")
    layer, seen = model.model.layers[1], dict[str, Tensor]()
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: seen.update(heads=given[0]))
    layer.mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.update(neurons=given[0]))
    model(**batch.inputs)
    for name, matrix, size in (("heads", layer.self_attn.o_proj, 16), ("neurons", layer.mlp.down_proj, 1)):
        for number in (0, 1):
            part = slice(number * size, (number + 1) * size)
            added_BLD = (seen[name][..., part] @ matrix.weight[:, part].T)[:] * real_BL[..., None]
            wanted = added_BLD.flatten(1).norm(dim=1).sum()
            torch.testing.assert_close(found[name, 1][number], wanted)  # type: ignore[index]

    # The derivative by a factor of a neuron, in each row.
    labelled = MicroBatch(batch.inputs, torch.tensor([0, 4, 12, 20]), torch.tensor([9, 8, 7, 6]), 30, batch.lengths_B)
    found = student_width.importance(model, narrowing, labelled, "fisher")
    factor = torch.ones(4, requires_grad=True)
    layer.mlp.down_proj.register_forward_pre_hook(
        lambda _, given: (
            torch.cat([given[0][..., :3], given[0][..., 3:4] * factor[:, None, None], given[0][..., 4:]], -1),
        )
    )
    logits_NV = model(**batch.inputs).logits.flatten(0, 1)[labelled.positions_N]
    torch.nn.functional.cross_entropy(logits_NV, labelled.labels_N, reduction="sum").backward()
    assert factor.grad is not None
    torch.testing.assert_close(found["neurons", 1][3], factor.grad.square().sum())


def test_rows_of_one_pass_or_of_several_say_the_same_of_padding() -> None:
    model, batch = tiny("Llama", **LLAMA), Rows().batch(np.arange(4))
    narrowing = student_width.plan(model, StudentConfig(heads=2, channels=8))
    other = batch.inputs["input_ids"].clone()
    other[1, 5:] = 33  # padding of the second row
    padded = MicroBatch({"input_ids": other}, batch.positions_N, batch.labels_N, 30, batch.lengths_B)
    for by in ("activations", "fisher"):
        first, second = (student_width.importance(model, narrowing, each, by) for each in (batch, padded))
        for place, value in first.items():
            torch.testing.assert_close(value, second[place])


@pytest.mark.parametrize("name", ["ViT", pytest.param("Dinov2", marks=pytest.mark.slow)])
def test_pictures(name: str, tmp_path: Path) -> None:
    fewer: dict[str, Any] = {"heads": 3, **({"neurons": 20} if name == "ViT" else {})}
    folder = save_vision(tmp_path / "tiny", name)
    model = _stock(folder, "ImageClassification")
    narrowing = student_width.plan(model, StudentConfig(**fewer))
    assert narrowing.skeleton.config.num_attention_heads == 3
    none, pixels = torch.zeros(0, dtype=torch.int64), torch.randn(3, 3, 32, 32)
    batch = MicroBatch({"pixel_values": pixels}, none, none, 3)
    student, kept = student_width.narrowed(model, StudentConfig(**fewer), [batch])
    student.save_pretrained(tmp_path / "student")
    assert [len(each) for each in kept["heads"]] == [3, 3]
    assert torch.equal(_stock(tmp_path / "student", "ImageClassification")(pixels)[0], student(pixels)[0])


@pytest.mark.slow
def test_depth_and_width_together_and_random_weights(stories: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny", "Llama", "CausalLM", stories, **LLAMA, num_hidden_layers=4)
    smaller: dict[str, Any] = {"heads": "50%", "neurons": "25%", "channels": "75%"}
    student, noted = _narrowed(folder, "CausalLM", tmp_path / "student", layers="important-50%", **smaller)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    sizes |= {"intermediate_size": 12, "hidden_size": 24}
    assert {name: getattr(student.config, name) for name in sizes} == sizes
    assert len(noted["layers"][0]) == len(noted["heads"]) == len(noted["neurons"]) == 2
    random, _ = _narrowed(folder, "CausalLM", tmp_path / "random", layers="first-1", weights="random", **smaller)
    assert random.config.hidden_size == 24 and _outputs(random, IDS_BL).isfinite().all()
    # Once more, of the student.
    again, _ = _narrowed(tmp_path / "student", "CausalLM", tmp_path / "again", neurons="50%")
    assert (again.config.intermediate_size, again.config.head_dim) == (6, 8)


@pytest.mark.slow
def test_a_sentence_encoder_without_a_head(tmp_path: Path) -> None:
    config = _config(MINILM, of="classify", heads="50%", channels="50%", neurons="50%")
    students.make(config, None, tmp_path / "student", weights=True, rows=Rows())  # type: ignore[arg-type]
    made = _stock(tmp_path / "student", "").config
    assert (made.num_attention_heads, made.hidden_size, made.intermediate_size) == (6, 192, 768)


@pytest.mark.parametrize(
    ("name", "settings", "section", "message"),
    [
        ("Llama", LLAMA, {"heads": "1%"}, r"has 4 heads, of which 2 at a time .* leaves none. Write .*heads=2"),
        ("Llama", LLAMA, {"heads": 3}, r"leaves 3. Write distill.student.heads=4"),
        ("Llama", LLAMA, {"neurons": 49}, r"has 48 neurons, and this leaves 49. Write distill.student.neurons=48"),
        ("Llama", LLAMA, {"channels": "1%"}, r"has 32 channels, and this leaves none. Write .*channels=1"),
        (
            "Mixtral",
            {},
            {"neurons": "50%"},
            r"MixtralConfig does not allow .* Write distill.student.layers=important-50%",
        ),
        ("Mamba", {}, {"heads": "50%"}, r"MambaConfig does not allow"),
        ("Mamba", {}, {"neurons": "50%"}, r"MambaConfig does not allow"),
        ("Bloom", {}, {"heads": "50%", "channels": "50%"}, r"BloomConfig does not allow"),
        ("Olmo2", {}, {"heads": "50%"}, r"Olmo2Config does not allow .*q_norm.weight"),
        ("Gemma2", GROUPED, {"channels": "50%"}, r"Gemma2Config does not allow .* computes something else"),
        ("T5", {}, {"neurons": "50%"}, r"T5Config does not allow .* 2 stacks"),
    ],
)
def test_what_cannot_be_left_out_is_refused(
    name: str, settings: dict[str, Any], section: dict[str, Any], message: str, stories: str, tmp_path: Path
) -> None:
    head = "Seq2SeqLM" if name == "T5" else "CausalLM"
    folder = save_tiny(tmp_path / "tiny", name, head, stories, **settings)
    with pytest.raises(ConfigError, match=message):
        _narrowed(folder, head, tmp_path / "student", **section)


@pytest.mark.slow
@pytest.mark.nightly(but=["deepseek_v3", "gemma4_text", "qwen3_5"])
@pytest.mark.parametrize("name", [name for name in text_families.FAMILIES if name not in ("mamba", "falcon_mamba")])
def test_of_every_family_a_student_is_made_or_refused(name: str, tmp_path: Path) -> None:
    folder = text_families.save(name, tmp_path / "tiny")
    model = AutoModelForImageTextToText if name in text_families.PICTURES else AutoModelForCausalLM
    backbone = model.from_pretrained(folder, dtype=torch.float32)
    for structure in ("heads", "neurons", "channels"):
        try:
            narrowing = student_width.plan(backbone, StudentConfig(**{structure: "50%"}))
        except ConfigError as refusal:
            assert "distill.student" in str(refusal)
            continue
        count = narrowing.counts[structure]  # type: ignore[index]
        assert narrowing.cuts and count.kept == max(1, count.whole // 2)


@pytest.mark.parametrize("value", [0, -1, "0%", "101%", "half", 2.5, True, None, []])
def test_how_many_is_a_number_or_a_share(value: Any) -> None:
    with pytest.raises(ValueError, match=r"write all, a number such as 4, or a share such as 50%"):
        StudentConfig(neurons=value)


@pytest.mark.parametrize("section", [{}, {"layers": "first-2"}, {"neurons": 4, "weights": "random"}])
def test_importance_of_nothing_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Leave importance out"):
        StudentConfig(importance="fisher", **section)


@pytest.mark.slow
def test_a_run_trains_merges_and_exports_it(stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(Path("rows.jsonl"), [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(24)])
    words = [f"distill.teacher.id={stories}", "data.train=rows.jsonl", "data.held_out=0.25", "train.steps=2"]
    words += ["batch.size=4", "evaluate.every=null", "evaluate.answers=0", "distill.control=false"]
    smaller = ["distill.student.layers=important-3", "distill.student.heads=50%", "distill.student.neurons=50%"]
    smaller += ["distill.student.channels=48", "distill.student.importance=fisher"]
    for method in ("full", "lora"):
        run = workbench.run("distill/quickstart", [*words, *smaller, f"adapter={{method: {method}}}"], quiet=True)
        student = json.loads((run / "manifest.json").read_text())["student"]
        assert [len(student[part]) for part in ("heads", "neurons", "channels")] == [3, 3, 1]
        costs = json.loads((run / "scores.json").read_text())["costs"]
        assert costs["student"]["parameters"] < 0.5 * costs["teacher"]["parameters"]
        workbench.merge(run, out=f"whole-{method}")
        whole = _stock(f"whole-{method}", "CausalLM")
        config = whole.config
        assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (3, 4, 48)
        assert config.intermediate_size == 86 and config.head_dim == 8
        again = tmp_path / f"again-{method}"
        whole.save_pretrained(again)
        assert torch.equal(_outputs(_stock(again, "CausalLM")), _outputs(whole))
        workbench.evaluate(run)
    # Pruned and distilled once more.
    more = ["distill.student.layers=all", "distill.student.neurons=50%", "model.id=whole-full"]
    run = workbench.run("distill/quickstart", [*words, *more, "adapter={method: full}"], quiet=True)
    workbench.merge(run, out="twice")
    assert _stock("twice", "CausalLM").config.intermediate_size == 43
