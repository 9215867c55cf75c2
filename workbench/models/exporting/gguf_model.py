"""A whole language model as one GGUF file, with tokenizer, chat template and stop tokens, for llama.cpp and Ollama."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from workbench.errors import BackboneError, FileError
from workbench.models.exporting import gguf_tokenizer
from workbench.models.exporting.gguf_layout import GgufLayout, read_array

FORMATS = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}
ENDS = ("eos", "eot", "eom")
"""Settings of a GGUF file that each name a token at which text ends."""


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    template: str,
    stop: Sequence[int],
    bos: bool,
    name: str,
) -> None:
    """Write a model and all that generation needs, read the file again and compare.

    Matrices are stored in the model's precision, vectors in float32.

    Args:
        template: Jinja source of the chat template.
        stop: Tokens that end a text.
        bos: Whether a prompt begins with the token for that.
        name: For people.

    Raises:
        BackboneError: llama.cpp has no such architecture or tokenizer, or more tokens end a text than it has places.
    """
    layout = GgufLayout(model.config)
    tensors = _tensors(model)
    matrices, file_type = FORMATS[model.dtype]
    writer = gguf.GGUFWriter(path, layout.name)
    writer.add_name(name)
    writer.add_file_type(file_type)
    layout.write_settings(writer)
    _write_vocabulary(writer, tokenizer, rows=model.config.vocab_size)
    _write_special_tokens(writer, tokenizer, stop)
    writer.add_add_bos_token(bos)
    writer.add_add_eos_token(False)
    writer.add_chat_template(template)
    for key, tensor in tensors.items():
        kind = matrices if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        array = gguf.quantize(layout.ordered(key, tensor).float().contiguous().numpy(), kind)
        writer.add_tensor(layout.tensor_name(key), array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _require_equal(path, layout, tensors)


def load(path: Path) -> PreTrainedModel:
    """The model in a GGUF file, by transformers' own reader of it, in float32."""
    config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    width = gguf.GGUFReader(path).get_field(gguf.Keys.Attention.KEY_LENGTH.format(arch=config.model_type))
    assert width is not None, "write puts it there"
    config.head_dim = width.contents()  # transformers reads it for none of these architectures
    causal_lm: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32, local_files_only=True
    )
    causal_lm.requires_grad_(False).eval()
    return causal_lm


def _write_vocabulary(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, *, rows: int) -> None:
    vocabulary = gguf_tokenizer.convert(tokenizer, rows=rows)
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.words)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_first)
    else:
        writer.add_token_merges(vocabulary.merges)


def _write_special_tokens(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, stop: Sequence[int]) -> None:
    for key in ("bos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{key}_token_id")) is not None:
            getattr(writer, f"add_{key}_token_id")(number)
    ends = sorted(stop, key=lambda number: number != tokenizer.eos_token_id)
    if len(ends) > len(ENDS):
        words = ", ".join(map(str, tokenizer.convert_ids_to_tokens(list(ends))))
        raise BackboneError(f"GGUF has places for {len(ENDS)} tokens that end a text, and this run has {words}.")
    for key, number in zip(ENDS, ends, strict=False):
        getattr(writer, f"add_{key}_token_id")(number)


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters by name; a head that is tied to the embedding is not stored twice."""
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def _require_equal(path: Path, layout: GgufLayout, wanted: Mapping[str, Tensor]) -> None:
    """Raise FileError where a tensor of the file is not the model's, bit for bit."""
    tensor_by_name: dict[str, Any] = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {layout.tensor_name(key): key for key in wanted}
    if tensor_by_name.keys() != names.keys():
        raise FileError(f"{path}: holds other tensors than the model: {sorted(tensor_by_name.keys() ^ names.keys())}.")
    for name, key in names.items():
        if not torch.equal(layout.restored(key, read_array(tensor_by_name[name])), wanted[key].float()):
            raise FileError(f"{path}: its tensor {name} is not the model's {key}. Please report this backbone.")
