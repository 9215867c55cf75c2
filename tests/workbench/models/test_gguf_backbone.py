"""Backbones in GGUF files: the numbers of their blocks, written out a second time, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import CHAT_TEMPLATE, tiny, trains
from workbench.config import ModelConfig
from workbench.errors import BackboneError
from workbench.models import backbones
from workbench.models.exporting import gguf_files
from workbench.recipes.verbs.merge import merge

Bytes = numpy.ndarray[Any, Any]
RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8, tokens_per_device: 400}}
train: {{steps: 2, learning_rate: 1.0e-2}}
evaluate: {{every: null, answers: 0}}
"""


def half(pair: Bytes) -> numpy.float32:
    """The float16 number of two bytes."""
    return numpy.float32(pair.copy().view("<f2")[0])


def q8_0(block: Bytes) -> list[numpy.float32]:
    return [half(block[:2]) * numpy.float32(number) for number in block[2:].view(numpy.int8)]


def q4_0(block: Bytes) -> list[numpy.float32]:
    numbers = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [half(block[:2]) * numpy.float32(int(number) - 8) for number in numbers]


def q4_k(block: Bytes) -> list[numpy.float32]:
    """llama.cpp's `dequantize_row_q4_K`."""
    scale, least, packed, numbers = half(block[:2]), half(block[2:4]), block[4:16].astype(int), block[16:]
    found = []
    for part in range(8):
        if part < 4:
            s, m = packed[part] & 63, packed[part + 4] & 63
        else:
            s = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4
            m = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4
        own = numbers[part // 2 * 32 :][:32] >> 4 if part % 2 else numbers[part // 2 * 32 :][:32] & 15
        found += [scale * numpy.float32(s) * numpy.float32(n) - least * numpy.float32(m) for n in own]
    return found


def q6_k(block: Bytes) -> list[numpy.float32]:
    """llama.cpp's `dequantize_row_q6_K`."""
    low, high, scales = block[:128].astype(int), block[128:192].astype(int), block[192:208].view(numpy.int8)
    found = []
    for at in range(256):
        side, quarter, place = at // 128, at % 128 // 32, at % 32
        four = low[64 * side + 32 * (quarter % 2) + place] >> 4 * (quarter // 2) & 15
        two = high[32 * side + place] >> 2 * quarter & 3
        found.append(half(block[208:]) * numpy.float32(scales[at // 16]) * numpy.float32((four | two << 4) - 32))
    return found


def f16(block: Bytes) -> list[numpy.float32]:
    return [half(block)]


BLOCKS: dict[str, tuple[Callable[[Bytes], list[numpy.float32]], tuple[int, ...], float]] = {
    "Q8_0": (q8_0, (0,), 0.003),
    "Q4_0": (q4_0, (0,), 0.05),
    "Q4_K": (q4_k, (0, 2), 0.0005),
    "Q6_K": (q6_k, (208,), 0.0001),
    "F16": (f16, (0,), 0.2),
}
"""Of a format: what a block stands for, where its scales are, and their size."""


def written(path: Path, kind: str) -> dict[str, Tensor]:
    """A GGUF file of random blocks of one format; returns what they stand for, by the name in transformers."""
    number, at, size = BLOCKS[kind]
    each, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    model = tiny("Llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_key_value_heads=2)
    draw, wanted = numpy.random.default_rng(0), dict[str, Tensor]()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(10_000.0)
    writer.add_token_list([f"<{number}>" for number in range(64)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, value in model.state_dict().items():
        known = str(names.get_name(name, try_suffixes=(".weight",)))
        if value.ndim == 1:
            wanted[name] = value
            writer.add_tensor(known, value.numpy())
            continue
        rows, columns = value.shape
        blocks = draw.integers(256, size=(rows * columns // each, width), dtype=numpy.uint8)
        for place in at:
            scales = draw.normal(size=(len(blocks), 1)) * size
            blocks[:, place : place + 2] = scales.astype("<f2").view(numpy.uint8)
        numbers = torch.tensor(numpy.array([number(block) for block in blocks])).reshape(rows, columns)
        if "q_proj" in name or "k_proj" in name:  # where pairs that llama.cpp turns stand together
            numbers = numbers.reshape(-1, 32, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        wanted[name] = numbers
        writer.add_tensor(known, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(wanted)
    model.save_pretrained(path.parent / "plain")
    return wanted


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("Q8_0", "float32"), ("Q4_0", "float32"), ("Q4_K", "nf4"), ("Q6_K", "float32"), ("F16", "bfloat16")],
)
def test_it_computes_what_a_repository_of_its_numbers_computes(kind: str, weights: Any, tmp_path: Path) -> None:
    assert written(tmp_path / f"model.{kind}.gguf", kind)
    compute = "bfloat16" if weights == "bfloat16" else "float32"
    section, rows = ModelConfig(id=str(tmp_path), weights=weights, compute=compute), torch.arange(9)[None]
    arrived, plain = (
        backbones.load(section.model_copy(update={"id": str(each)}), None) for each in (tmp_path, tmp_path / "plain")
    )
    assert plain.model(rows).logits.std() > 0
    assert torch.equal(arrived.model(rows).logits, plain.model(rows).logits)
    assert backbones.blueprint(section, vocabulary=64).weights == arrived.weights == weights
    assert arrived.weight_bytes == plain.weight_bytes


@pytest.mark.slow
def test_a_run_over_it_learns_what_one_over_the_plain_weights_learns(
    short_stories: str, questions: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").mkdir()
    model = AutoModelForCausalLM.from_pretrained(short_stories, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(short_stories)
    words.chat_template = CHAT_TEMPLATE
    for each in (model, words):
        each.save_pretrained(tmp_path / "plain")
    settings = {"template": CHAT_TEMPLATE, "stop": [words.eos_token_id], "bos": True, "name": "stories"}
    gguf_files.write_model(model, words, tmp_path / "file" / "stories.gguf", **settings)
    curves = []
    for name in ("plain", "file"):
        run = trains(tmp_path, RECIPE, model=tmp_path / name, train=questions)(name=f"run-{name}")
        lines = (run / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in lines if "loss" in line])
    assert len(curves[0]) >= 2 and curves[0] == curves[1]
    found = merge(run, out=tmp_path / "merged")
    assert found.agreement.kl is not None and found.agreement.kl < 1e-3
    assert not list((tmp_path / "merged").glob("*.gguf")) and list((tmp_path / "merged").glob("*.safetensors"))


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    def write(name: str, architecture: str, *tensors: str, scaled: str = "none") -> None:
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaled))
        writer.add_token_list(["<0>"])
        for tensor in tensors:
            writer.add_tensor(tensor, numpy.zeros(4, numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write("a.gguf", "gemma2", "output_norm.weight")
    write("b.gguf", "llama", "rope_freqs.weight")
    write("c.gguf", "qwen3", "output_norm.weight", scaled="yarn")
    for name, words in (
        ("", r"holds 3 GGUF files \(a.gguf, b.gguf, c.gguf\). Write .* model.id=\S+/a.gguf$"),
        ("a.gguf", "llama, qwen2, qwen3 are read, and not gemma2. .* model.weights=nf4"),
        ("b.gguf", "rotary embeddings are scaled"),
        ("c.gguf", "rotary embeddings are scaled"),
        ("d.gguf", "no file .*d.gguf. Write model.id=FOLDER/NAME.gguf"),
    ):
        with pytest.raises(BackboneError, match=words):
            backbones.hub_config(ModelConfig(id=str(tmp_path / name)))


def test_the_tokenizer_is_the_files_whatever_stands_beside_it(tmp_path: Path) -> None:
    start = ModelConfig(id="starter", weights="float32")
    words = backbones.tokenizer(start)
    words.chat_template = CHAT_TEMPLATE
    settings = {"template": CHAT_TEMPLATE, "stop": [words.eos_token_id], "bos": False, "name": "starter"}
    gguf_files.write_model(backbones.load(start, None).model, words, tmp_path / "starter.gguf", **settings)
    words.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("another")
    found = backbones.tokenizer(ModelConfig(id=str(tmp_path)))
    row = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    assert [getattr(found, role) for role in roles] == [getattr(words, role) for role in roles]
    assert found.apply_chat_template(row) == words.apply_chat_template(row)
