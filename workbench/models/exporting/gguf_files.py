"""GGUF files for llama.cpp and Ollama: a whole language model, or a LoRA adapter over a GGUF file of its backbone.

A tokenizer is written where llama.cpp splits text in the same way, and refused otherwise: llama.cpp reads a byte-level
BPE (`gpt2`) by its merges and the name of its pre-tokenizer rule, and a SentencePiece BPE (`llama`) by a score for each
token. llama.cpp scales each LoRA update by alpha / rank: it takes the rank from the tensors, and one alpha from the
file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from workbench.adapters.combine import PREFIX
from workbench.errors import BackboneError, FileError
from workbench.models.exporting import lora_limits

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
"""GGUF's architecture of each `model_type` of transformers."""
_SWITCHES = ("mlp_bias", "use_sliding_window", "quantization_config")
"""Settings of transformers that GGUF's architectures have no place for."""
Json = Mapping[str, Any]
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
WORD_RULES: dict[str, list[Json]] = {
    "gpt-2": [{"type": "ByteLevel", "use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}],
    "qwen2": [{"type": "Split", "pattern": {"Regex": _QWEN}}, {"type": "ByteLevel", "use_regex": False}],
    "llama-bpe": [{"type": "Split", "pattern": {"Regex": _LLAMA3}}, {"type": "ByteLevel", "use_regex": False}],
}  # llama.cpp's names of the rules that cut text into words, and the steps of a tokenizer.json that do the same
FORMATS = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}
ENDS = ("eos", "eot", "eom")  # settings of a GGUF file that each name a token at which text ends


class GgufLayout:
    """How the tensors of one backbone are named and ordered in GGUF. Raises BackboneError: GGUF would compute something
    else."""

    def __init__(self, config: PretrainedConfig) -> None:
        require_known_architecture(config)
        self.config: Any = config
        self.architecture = ARCHITECTURES[config.model_type]
        self._names = gguf.get_tensor_name_map(self.architecture, self.config.num_hidden_layers)

    @property
    def name(self) -> str:
        """Architecture as GGUF writes it."""
        return gguf.MODEL_ARCH_NAMES[self.architecture]

    @property
    def head_width(self) -> int:
        """Numbers of an attention head."""
        own: int | None = getattr(self.config, "head_dim", None)
        return own or self.config.hidden_size // self.config.num_attention_heads

    def tensor_name(self, path: str) -> str:
        """The name in GGUF of a parameter of transformers; raises BackboneError where there is none."""
        gguf_name: str | None = self._names.get_name(path, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise BackboneError(f"GGUF's architecture {self.name} has no place for {path}. Export --to merged.")
        return gguf_name

    def ordered(self, path: str, tensor: Tensor) -> Tensor:
        """Rows of a parameter, or of what is multiplied to it on the left, in GGUF's order."""
        return self._reordered(path, tensor, (2, -1))

    def restored(self, path: str, tensor: Tensor) -> Tensor:
        """Rows in transformers' order again."""
        return self._reordered(path, tensor, (-1, 2))

    def _reordered(self, path: str, tensor: Tensor, parts: tuple[int, int]) -> Tensor:
        # llama.cpp rotates neighbouring numbers of Llama's queries and keys, transformers those half a head apart.
        if self.config.model_type != "llama" or not (".q_proj." in path or ".k_proj." in path):
            return tensor
        heads = self.config.num_attention_heads if ".q_proj." in path else self.config.num_key_value_heads
        reordered: Tensor = tensor.unflatten(0, (heads, *parts)).transpose(1, 2).reshape(tensor.shape)
        return reordered


def require_known_architecture(config: PretrainedConfig) -> None:
    """Raise BackboneError where this version writes no GGUF of an architecture, or GGUF would compute another."""
    known = ", ".join(ARCHITECTURES)
    cure = "Export --to merged and convert that with llama.cpp's own convert_hf_to_gguf.py."
    if config.model_type not in ARCHITECTURES:
        raise BackboneError(f"--to gguf writes {known}, and this backbone is {config.model_type}. {cure}")
    values: Any = config
    odd = {key: getattr(values, key) for key in _SWITCHES if getattr(values, key, None)}
    if values.hidden_act != "silu":
        odd["hidden_act"] = values.hidden_act
    if (kind := rope(config).get("rope_type", "default")) != "default":
        odd["rope_type"] = kind
    if odd:
        shown = ", ".join(f"{key}={value}" for key, value in odd.items())
        raise BackboneError(f"GGUF as --to gguf writes it has no place for {shown} of this backbone. {cure}")


def rope(config: PretrainedConfig) -> Mapping[str, Any]:
    """Settings of rotary position embeddings."""
    rope_settings: Mapping[str, Any] = config.rope_parameters
    return rope_settings


def read_array(tensor: gguf.ReaderTensor) -> Tensor:
    """The numbers of a tensor that was read, in float32."""
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())


@dataclass(frozen=True)
class GgufTokenizer:
    """A vocabulary and the rules that split text into its tokens."""

    kind: str  # `gpt2` or `llama`
    words: str  # name of the pre-tokenizer rule
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    scores: Sequence[float]  # empty for byte-level BPE
    space_first: bool  # whether a text gets a leading space


def convert_tokenizer(tokenizer: PreTrainedTokenizerBase, *, rows: int) -> GgufTokenizer:
    """The tokenizer as GGUF describes it. Raises BackboneError: llama.cpp knows no such tokenizer. `rows`: of the
    embedding; those without a token get an unused one."""
    backend: Any = tokenizer.backend_tokenizer
    content: Json = json.loads(backend.to_str())
    model: Json = content["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise unknown_tokenizer(f"a {model['type']} tokenizer of this form")
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    tokens, types = _vocabulary(tokenizer, content, rows)
    if model.get("byte_fallback"):
        # A score for each token by which llama.cpp joins the same pairs in the same order as the merges. llama.cpp
        # joins any two neighbours whose text is a token, those of the highest score first. That is the order of
        # the merges where all pairs that give a token stand together, and none of them is missing.
        first: dict[str, int] = {}
        last = ""
        for number, pair in enumerate(pairs):
            token = "".join(pair)
            if token != last and token in first:
                raise unknown_tokenizer(f"one that joins {token!r} at two places of its merges")
            first.setdefault(token, number)
            last = token
        known = {tuple(pair) for pair in pairs}
        normal = {token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.NORMAL}
        for token in normal:
            for cut in range(1, len(token)):
                halves = (token[:cut], token[cut:])
                if halves[0] in normal and halves[1] in normal and halves not in known:
                    raise unknown_tokenizer(
                        f"one whose merges never join {halves[0]!r} and {halves[1]!r} to its token {token!r}"
                    )
        scores = [float(-first.get(token, len(pairs))) for token in tokens]
        return GgufTokenizer("llama", "default", tokens, types, [], scores, _space_first(content))
    return GgufTokenizer("gpt2", _word_rule(content), tokens, types, list(map(" ".join, pairs)), [], False)


def unknown_tokenizer(what: str) -> BackboneError:
    """The error of a tokenizer that llama.cpp does not know."""
    return BackboneError(
        f"The tokenizer: {what} is none that llama.cpp cuts text by in the same way, as far as this version knows "
        f"(SentencePiece BPE; byte-level BPE with the rules {', '.join(WORD_RULES)}). Export --to merged and convert "
        "that with llama.cpp's own convert_hf_to_gguf.py."
    )


def _vocabulary(tokenizer: PreTrainedTokenizerBase, content: Json, rows: int) -> tuple[list[str], list[int]]:
    """Tokens in the order of their numbers, and their types."""
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    unknown, bytes_too = content["model"].get("unk_token"), content["model"].get("byte_fallback")
    tokens, types = [], []
    for number in range(max(rows, max(known) + 1)):
        token = known.get(number, f"[PAD{number}]")
        tokens.append(token)
        if number not in known:
            types.append(gguf.TokenType.UNUSED)
        elif token == unknown:
            types.append(gguf.TokenType.UNKNOWN)
        elif number in added:
            types.append(gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED)
        elif bytes_too and len(token) == 6 and token.startswith("<0x"):
            types.append(gguf.TokenType.BYTE)
        else:
            types.append(gguf.TokenType.NORMAL)
    return tokens, [int(each) for each in types]


def _word_rule(content: Json) -> str:
    step = content["pre_tokenizer"] or {"type": "none"}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    for name, wanted in WORD_RULES.items():
        alike = len(steps) == len(wanted) and all(w.items() <= s.items() for w, s in zip(wanted, steps, strict=True))
        # Qwen composes letters (NFC) first. llama.cpp does not, which changes no text that is composed already.
        normaliser = content["normalizer"]
        normalised = normaliser is None or (normaliser == {"type": "NFC"} and name == "qwen2")
        if alike and normalised and not any(each.get("add_prefix_space") for each in steps):
            return name
    raise unknown_tokenizer(f"the rule {json.dumps(steps)[:200]}")


def _space_first(content: Json) -> bool:
    """Whether a SentencePiece tokenizer puts a space before a text, and after each special token."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normaliser = content["normalizer"] or {"type": "none"}
    steps = normaliser["normalizers"] if normaliser["type"] == "Sequence" else [normaliser]
    if content["pre_tokenizer"] is None and steps == [{"type": "Prepend", "prepend": "▁"}, replace]:
        return True
    if content["pre_tokenizer"] is None and steps == [replace]:
        return False
    raise unknown_tokenizer(f"the rule {json.dumps([content['normalizer'], content['pre_tokenizer']])[:200]}")


def write_adapter(adapter: Path, config: PretrainedConfig, path: Path, *, name: str) -> None:
    """Write the adapter in a folder, in float32. `config`: the backbone's. `name`: for people."""
    layout, settings = GgufLayout(config), lora_limits.settings(adapter)
    writer = gguf.GGUFWriter(path, layout.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_name(name)
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(settings["lora_alpha"]))
    for key, tensor in load_file(adapter / "adapter_model.safetensors").items():
        part, target, rows = _place(key, layout)
        ordered = layout.ordered(rows, tensor) if part == "b" else tensor
        writer.add_tensor(f"{target}.lora_{part}", ordered.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def restore_adapter(path: Path, config: PretrainedConfig, folder: Path, *, like: Path) -> None:
    """Write the adapter of a GGUF file as PEFT's into `folder`: scale and ranks are the file's. `config`: the
    backbone's. `like`: folder of the adapter that the file was written from, for the names of the layers alone."""
    reader, layout = gguf.GGUFReader(path), GgufLayout(config)
    tensor_by_name: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
    alpha = float(reader.get_field(gguf.Keys.Adapter.LORA_ALPHA).contents())  # type: ignore[union-attr]
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for key in load_file(like / "adapter_model.safetensors"):
        part, target, rows = _place(key, layout)
        tensor = read_array(tensor_by_name[f"{target}.lora_{part}"])
        tensors[key] = (layout.restored(rows, tensor) if part == "b" else tensor).contiguous()
        if part == "a":
            ranks[rows.removesuffix(".weight")] = len(tensor)
    most = max(ranks.values())
    patterns = {layer: rank for layer, rank in ranks.items() if rank != most}
    settings = LoraConfig(r=most, lora_alpha=alpha, target_modules=sorted(ranks), rank_pattern=patterns)  # type: ignore[arg-type]
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _place(key: str, layout: GgufLayout) -> tuple[str, str, str]:
    """Part (a or b), the name in GGUF of the weight that it changes, and that weight's path in transformers."""
    layer, _, part = key.removeprefix(PREFIX).partition(".lora_")
    return part[0].lower(), f"{layout.tensor_name(f'{layer}.weight')}", f"{layer}.weight"


def write_model(
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

    Matrices are stored in the model's precision, vectors in float32. Raises BackboneError: llama.cpp has no such
    architecture or tokenizer, or more tokens end a text than it has places.

    Args:
        template: Jinja source of the chat template.
        stop: Tokens that end a text.
        bos: Whether a prompt begins with the token for that.
        name: For people.
    """
    layout = GgufLayout(model.config)
    # Parameters by name; a head that is tied to the embedding is not stored twice.
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    matrices, file_type = FORMATS[model.dtype]
    writer = gguf.GGUFWriter(path, layout.name)
    writer.add_name(name)
    writer.add_file_type(file_type)
    config = layout.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(layout.head_width)
    writer.add_value_length(layout.head_width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(layout.head_width)
    writer.add_rope_freq_base(rope(config)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = convert_tokenizer(tokenizer, rows=model.config.vocab_size)
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.words)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_first)
    else:
        writer.add_token_merges(vocabulary.merges)
    for key in ("bos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{key}_token_id")) is not None:
            getattr(writer, f"add_{key}_token_id")(number)
    ends = sorted(stop, key=lambda number: number != tokenizer.eos_token_id)
    if len(ends) > len(ENDS):
        words = ", ".join(map(str, tokenizer.convert_ids_to_tokens(list(ends))))
        raise BackboneError(f"GGUF has places for {len(ENDS)} tokens that end a text, and this run has {words}.")
    for key, number in zip(ENDS, ends, strict=False):
        getattr(writer, f"add_{key}_token_id")(number)
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
    tensor_by_name: dict[str, Any] = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {layout.tensor_name(key): key for key in tensors}
    if tensor_by_name.keys() != names.keys():
        raise FileError(f"{path}: holds other tensors than the model: {sorted(tensor_by_name.keys() ^ names.keys())}.")
    for name, key in names.items():
        if not torch.equal(layout.restored(key, read_array(tensor_by_name[name])), tensors[key].float()):
            raise FileError(f"{path}: its tensor {name} is not the model's {key}. Please report this backbone.")


def load_model(path: Path) -> PreTrainedModel:
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
