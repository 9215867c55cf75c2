"""Tiny backbones of the families that hear, with seeded weights, and recordings of tones."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers

from workbench.data import starter

WAVES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "conv_dim": (16, 16), "conv_kernel": (20, 10), "conv_stride": (20, 10), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "vocab_size": 300, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 48,
    "max_source_positions": 50, "max_target_positions": 32, "classifier_proj_size": 16,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1, "init_std": 0.3,
}  # fmt: skip
ENDS = ("pad_token_id", "bos_token_id", "eos_token_id")
AST: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_length": 60, "num_mel_bins": 24,
}  # fmt: skip
MASKED = {**WAVES, "feat_extract_norm": "layer", "do_stable_layer_norm": True}
FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2", MASKED, "Wav2Vec2", {"sampling_rate": 8000, "return_attention_mask": True}),
    "hubert": ("Hubert", WAVES, "Wav2Vec2", {"sampling_rate": 8000, "return_attention_mask": False}),
    "ast": ("AST", AST, "AST", {"num_mel_bins": 24, "max_length": 60}),
    "whisper": (
        "Whisper",
        WHISPER,
        "Whisper",
        {"feature_size": 8, "sampling_rate": 16_000, "chunk_length": 1},
    ),
}


def save_sound(folder: Path, name: str) -> str:
    """A backbone without a head and its feature extractor in a folder; returns its path."""
    family, settings, extractor, how = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    getattr(transformers, f"{family}Model")(config).save_pretrained(folder)
    getattr(transformers, f"{extractor}FeatureExtractor")(**how).save_pretrained(folder)
    return str(folder)


def save_moonshine(folder: Path) -> str:
    """A Moonshine with the tokens of the shipped Whisper, which hears waves of any length; returns its path."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(starter.resolve("starter/sound"))
    torch.manual_seed(0)
    config = transformers.MoonshineConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, max_position_embeddings=48,
        encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=2,
        decoder_num_attention_heads=2, initializer_range=0.3, bos_token_id=357, decoder_start_token_id=357,
        eos_token_id=356, pad_token_id=356,
    )  # fmt: skip
    transformers.MoonshineForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    extractor.save_pretrained(folder)
    return str(folder)


def save_timed_whisper(folder: Path) -> str:
    """A Whisper with tokens of times, which hears a second at once; returns its path."""
    source = starter.resolve("starter/sound")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    first = len(tokenizer)
    tokenizer.add_tokens([transformers.AddedToken(f"<|{0.02 * number:.2f}|>") for number in range(51)])
    own = {"vocab_size": first + 51, "decoder_start_token_id": 357, **dict.fromkeys(ENDS, 356)}
    torch.manual_seed(3)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER | own))
    model.generation_config = transformers.GenerationConfig.from_pretrained(
        source, suppress_tokens=[5, 90], begin_suppress_tokens=[220], max_length=32, max_initial_timestamp_index=20
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(**FAMILIES["whisper"][3]).save_pretrained(folder)
    return str(folder)


def save_qwen2_audio(folder: Path) -> str:
    """A Qwen2-Audio with the tokens of the shipped Llama, which hears a second; returns its path."""
    words = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(starter.resolve("starter"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(words.values())})
    torch.manual_seed(0)
    config = transformers.Qwen2AudioConfig(
        audio_config={
            "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
            "max_source_positions": 50, "initializer_range": 0.3,
        },
        text_config={
            "model_type": "qwen2", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )  # fmt: skip
    transformers.Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    transformers.Qwen2AudioProcessor(extractor, tokenizer, **words).save_pretrained(folder)
    return str(folder)


def tone(hertz: float, *, seconds: float = 0.5, rate: int = 8000, seed: int = 0) -> Any:
    """A tone (T,) in some noise."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.02, len(times))
    return (0.4 * np.sin(2 * np.pi * hertz * times) + noise).astype(np.float32)


def record(folder: Path, count: int, *, seed: int = 0) -> Path:
    """A table of recordings of high and low tones, by four people; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, rows = np.random.default_rng(seed), [("audio", "label", "speaker")]
    for number in range(count):
        label = ("low", "high")[number % 2]
        hertz = rng.uniform(300, 500) if label == "low" else rng.uniform(1500, 2500)
        wave = tone(hertz, seconds=rng.uniform(0.25, 0.55), seed=number + seed)
        soundfile.write(folder / f"{number}.wav", wave, 8000)
        rows.append((f"{number}.wav", label, f"person {number // 2 % 4}"))
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path
