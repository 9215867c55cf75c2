"""Make the shipped sound backbone: a Whisper of 0.8 M parameters that transcribes up to two seconds of spoken commands.

    pip install espeakng-loader
    python scripts/make_starter_sound.py OUT [--minutes 25]

Its words (digits and commands) are spoken by eSpeak NG in many voices, speeds and pitches; no recording of a person
enters. Recordings differ in loudness, noise, colour and band, half of them hold nothing above 4 kHz, as telephones
and files of 8 kHz do. The loss is that of the transcript, after the tokens of language and task; beside it a linear
layer over the mean of the encoder's outputs names the word of recordings that hold one. Single, clear words come first.

Legend: B recordings of a batch, T samples, M mel bands, F frames, L tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soxr
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

_DIGITS = "zero one two three four five six seven eight nine"
_COMMANDS = "yes no up down left right on off stop go open close start end red green blue black white"
_OTHERS = """
    f2 f3 f4 f5 m2 m3 m4 m5 m6 m7 m8 adam andrea andy annie antonio belinda benjamin boris caleb david edward gene iven
    john lee linda max michael miguel norbert pablo paul pedro quincy rob robert sandro shelby steph travis victor zac
"""
DIGITS, WORDS, VARIANTS = _DIGITS.split(), [*_DIGITS.split(), *_COMMANDS.split()], _OTHERS.split()
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
RATE, SECONDS, BANDS, HOP = 16_000, 2, 40, 320
VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-us-nyc", "en-gb-x-gbclan", "en-029")
BATCH, POOL, FRESH, PEAK_RATE, WARMUP = 64, 6000, 16, 2e-3, 0.03
CLEAR = 0.35  # share of the run over which noise, masks and further words come in


class Row(NamedTuple):
    """A recording and its transcript."""

    features_MF: Tensor
    ids: list[int]
    word: int
    """Number of its only word; -100 where there are several."""


class Speaker:
    """The library eSpeak NG, which returns samples instead of playing them."""

    def __init__(self) -> None:
        import espeakng_loader  # type: ignore[import-not-found, unused-ignore]

        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        self.rate = self.library.espeak_Initialize(2, 500, str(espeakng_loader.get_data_path()).encode(), 0)
        self.heard: list[NDArray[np.int16]] = []
        self.callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)(
            self._hear
        )
        self.library.espeak_SetSynthCallback(self.callback)

    def _hear(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _: object) -> int:
        if samples and count > 0:
            self.heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, word: str, *, voice: str, speed: int, pitch: int, range: int) -> NDArray[np.int16]:
        """A word, at `RATE`, without the silence around it. `speed`: words a minute; pitch and range: 0 to 100."""
        self.heard = []
        if self.library.espeak_SetVoiceByName(voice.encode()) != 0:
            return np.zeros(0, np.int16)
        for parameter, value in ((1, speed), (3, pitch), (4, range)):
            self.library.espeak_SetParameter(parameter, value, 0)
        text = word.encode()
        self.library.espeak_Synth(text, len(text) + 1, 0, 1, 0, 1, None, None)
        self.library.espeak_Synchronize()
        if not self.heard:
            return np.zeros(0, np.int16)
        samples = np.concatenate(self.heard).astype(np.float32)
        loud = np.flatnonzero(np.abs(samples) > 0.02 * np.abs(samples).max())
        if not len(loud):
            return np.zeros(0, np.int16)
        changed: NDArray[np.float32] = soxr.resample(samples[loud[0] : loud[-1] + 1], self.rate, RATE)
        return np.asarray(np.clip(changed, -32768, 32767), dtype=np.int16)


def spoken(each: int, rng: np.random.Generator) -> list[list[NDArray[np.int16]]]:
    """Of every word, `each` recordings."""
    speaker, recordings = Speaker(), []
    for word in WORDS:
        own: list[NDArray[np.int16]] = []
        while len(own) < each:
            voice = f"{rng.choice(VOICES)}+{rng.choice(VARIANTS)}"
            speed, pitch, span = (int(rng.integers(*ends)) for ends in ((90, 260), (5, 95), (10, 90)))
            said = speaker.say(word, voice=voice, speed=speed, pitch=pitch, range=span)
            if RATE // 10 < len(said) < RATE * 1.3:
                own.append(said)
        recordings.append(own)
    return recordings


def drawn(
    recordings: list[list[NDArray[np.int16]]], rng: np.random.Generator, strength: float
) -> tuple[NDArray[np.float32], str]:
    """A recording (T,) of one to three words, and its transcript."""
    wave, place, said = np.zeros(RATE * SECONDS, np.float32), int(rng.integers(0, RATE // 3)), []
    for _ in range(1 if rng.random() < 1 - 0.5 * strength else int(rng.integers(2, 4))):
        number = int(rng.integers(len(WORDS))) if rng.random() < 0.6 else int(rng.integers(len(DIGITS)))
        own = recordings[number][int(rng.integers(len(recordings[number])))] / 32768
        if place + len(own) > len(wave):
            break
        wave[place : place + len(own)] += own / max(1e-3, np.abs(own).max())
        place += len(own) + int(rng.integers(RATE // 50, RATE // 4))
        said.append(WORDS[number])
    return wave, " ".join(said)


def coloured(waves_BT: Tensor, rng: torch.Generator, strength: float) -> Tensor:
    """The recordings, louder or softer, filtered, in noise, half of them without what is above 4 kHz."""
    count, length = waves_BT.shape

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=rng)

    hertz = torch.fft.rfftfreq(length, 1 / RATE)
    knots = torch.randn(count, 1, 9, generator=rng) * uniform(0, 0.7 * strength, 1, 1)  # a smooth curve of decibels
    curve = nn.functional.interpolate(knots, len(hertz), mode="linear", align_corners=True)[:, 0].exp()
    band = torch.where(uniform(0, 1, 1) < 0.5, uniform(3400, 4000, 1), torch.full((count, 1), 8001.0))
    tilt = (hertz.clamp(min=50) / 1000) ** -uniform(0, 1, 1)
    level = strength * 10 ** uniform(-3.5, -0.8, 1) * (uniform(0, 1, 1) < 0.8) * length**0.5
    noise = torch.view_as_complex(torch.randn(count, len(hertz), 2, generator=rng)) * tilt
    filtered: Tensor = torch.fft.irfft((torch.fft.rfft(waves_BT) + noise * level) * curve * (hertz <= band), n=length)
    loudness: Tensor = 10 ** uniform(-1.3, 0, 1) / filtered.abs().amax(1, keepdim=True).clamp(min=1e-3)
    return filtered * loudness


def tokenizer(folder: Path) -> WhisperTokenizer:
    """A byte-level BPE that knows every word, with Whisper's tokens of language and task."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([" ".join([word, word]) for word in WORDS], trainer)
    known = json.loads(bpe.to_str())["model"]
    vocabulary = {token: number for token, number in known["vocab"].items()}
    for token in SPECIAL:
        vocabulary[token] = len(vocabulary)
    made = WhisperTokenizer(
        vocab=vocabulary,
        merges=[tuple(each) for each in known["merges"]],
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        additional_special_tokens=list(SPECIAL[1:]),
        language="english",
        task="transcribe",
        predict_timestamps=False,
    )
    made.save_pretrained(folder)
    return made


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    began = time.monotonic()
    recordings = spoken(arguments.each, rng)
    print(f"{len(WORDS)} words, {arguments.each} times each: {time.monotonic() - began:.0f} s", flush=True)
    text = tokenizer(arguments.out)
    ids = text.get_vocab()
    end, *start = (ids[each] for each in SPECIAL)
    config = WhisperConfig(
        vocab_size=len(text),
        num_mel_bins=BANDS,
        d_model=96,
        encoder_layers=4,
        encoder_attention_heads=4,
        encoder_ffn_dim=384,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=384,
        max_source_positions=SECONDS * RATE // HOP // 2,
        max_target_positions=48,
        dropout=0.0,
        classifier_proj_size=96,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start[0],
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    extractor = WhisperFeatureExtractor(feature_size=BANDS, sampling_rate=RATE, chunk_length=SECONDS, hop_length=HOP)
    namer = nn.Linear(config.d_model, len(WORDS))
    optimizer = torch.optim.AdamW(
        [*model.parameters(), *namer.parameters()], lr=PEAK_RATE, weight_decay=0.05, betas=(0.9, 0.98)
    )
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
    budget, began, step = 60 * arguments.minutes, time.monotonic(), 0
    pool: list[Row] = []
    draw = partial(made, recordings, text, extractor, start, end, rng, generator)
    while (share := (time.monotonic() - began) / budget) < 1:
        strength = min(1.0, share / CLEAR)
        pool = [*draw(FRESH if pool else 10 * BATCH, strength), *pool][:POOL]
        features_BMF, tokens_BL, word_B = together([pool[each] for each in rng.integers(len(pool), size=BATCH)], end)
        for group in optimizer.param_groups:
            warm = min(1.0, share / WARMUP)
            group["lr"] = PEAK_RATE * warm * 0.5 * (1 + math.cos(math.pi * share))
        with torch.autocast("cpu", torch.bfloat16):
            heard_BMF = masked(features_BMF, generator, strength)
            outputs = model(input_features=heard_BMF, decoder_input_ids=tokens_BL[:, :-1])
            named = namer(outputs.encoder_last_hidden_state.mean(1))
            logits = outputs.logits
        wanted = tokens_BL[:, 1:].clone()
        wanted[:, : len(start) - 1] = -100  # the tokens of language and task are given
        after_end = (wanted == end).cumsum(1) > 1
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.masked_fill(after_end, -100).flatten())
        of_word = nn.functional.cross_entropy(named.float(), word_B, ignore_index=-100)
        (loss + of_word).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0:
            print(f"step {step}, {share:.0%}: transcript {loss.item():.3f}, word {of_word.item():.3f}", flush=True)
    model.bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start[0],
        lang_to_id={"<|en|>": start[1]},
        task_to_id={"transcribe": start[2]},
        no_timestamps_token_id=start[3],
        is_multilingual=True,
        language="en",
        task="transcribe",
        return_timestamps=False,
        max_length=config.max_target_positions,
    )
    extractor.save_pretrained(arguments.out)
    model.save_pretrained(arguments.out)


def made(
    recordings: list[list[NDArray[np.int16]]],
    text: WhisperTokenizer,
    extractor: WhisperFeatureExtractor,
    start: list[int],
    end: int,
    rng: np.random.Generator,
    generator: torch.Generator,
    count: int,
    strength: float,
) -> list[Row]:
    """New recordings."""
    waves, said = zip(*(drawn(recordings, rng, strength) for _ in range(count)), strict=True)
    waves_BT = coloured(torch.from_numpy(np.stack(waves)), generator, strength)
    features: Tensor = extractor(list(waves_BT.numpy()), sampling_rate=RATE, return_tensors="pt").input_features
    ids = [[*start, *text(each, add_special_tokens=False).input_ids, end] for each in said]
    words = [WORDS.index(each) if each in WORDS else -100 for each in said]
    return list(map(Row, features, ids, words))


def together(rows: list[Row], end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features (B, M, F) and tokens (B, L) of rows, padded with the end of the text, and their words (B,)."""
    longest = max(len(row.ids) for row in rows)
    tokens_BL = torch.tensor([[*row.ids, *[end] * (longest - len(row.ids))] for row in rows])
    return torch.stack([row.features_MF for row in rows]), tokens_BL, torch.tensor([row.word for row in rows])


def masked(features_BMF: Tensor, generator: torch.Generator, strength: float) -> Tensor:
    """SpecAugment (Park et al. 2019): a band of up to 8 mel bands and a span of up to 8 frames are at the mean."""
    count, bands, frames = features_BMF.shape
    hidden = torch.zeros(count, bands, frames, dtype=torch.bool)
    for size, most, shape in ((bands, round(8 * strength), (1, -1, 1)), (frames, round(8 * strength), (1, 1, -1))):
        length = torch.randint(0, most + 1, (count, 1, 1), generator=generator)
        first = (torch.rand(count, 1, 1, generator=generator) * (size - length)).long()
        places = torch.arange(size).view(shape)
        hidden |= (places >= first) & (places < first + length)
    return torch.where(hidden, features_BMF.mean((1, 2), keepdim=True), features_BMF)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=int, default=250, help="recordings of every word")
    parser.add_argument("--minutes", type=float, default=25)
    main(parser.parse_args())
