"""What keeping a frozen tower's outputs gains: pictures a second of processor time, with and without, interleaved.

    python scripts/bench/picture_features.py [--rounds 5]

A stock LLaVA of random values: CLIP's ViT-B/16 at 224 pixels before a language model of the starter's size, LoRA on the
language model, 16 pictures in batches of 4. A round is an epoch over all pictures with each way; the first epoch, which
computes what is kept, is told apart.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

import workbench
from workbench import adapters
from workbench.adapters import Lora
from workbench.config import ModelConfig
from workbench.config.sections.image_config import ImageConfig
from workbench.data import starter
from workbench.data.text.chat import ChatEncoder
from workbench.models import backbones
from workbench.models.picture_features import PictureFeatures
from workbench.models.picture_processor import PictureProcessor

PICTURES, BATCH = 16, 4


def save(folder: Path) -> None:
    """Write the model with its processor."""
    tokenizer = AutoTokenizer.from_pretrained(starter.FOLDER, extra_special_tokens={"image_token": "<image>"})
    text = {**LlamaConfig.from_pretrained(starter.FOLDER).to_dict(), "vocab_size": len(tokenizer)}
    vision = CLIPVisionConfig(patch_size=16, hidden_size=768, intermediate_size=3072, num_attention_heads=12)
    number: Any = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=number)
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    LlavaProcessor(
        CLIPImageProcessorPil(),
        tokenizer,
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        section = ModelConfig(id=folder, weights="float32")
        epochs = {kept: epoch(section, kept=kept) for kept in (False, True)}
        first = epochs[True]()
        epochs[False]()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for kept, run in epochs.items():
                seconds[kept].append(run())
    without, kept_s = (statistics.median(each) for each in seconds.values())
    found = {
        "computed each time": PICTURES / without,
        "kept, first epoch": PICTURES / first,
        "kept, later epochs": PICTURES / kept_s,
        "gain of later epochs": without / kept_s,
    }
    print(json.dumps({name: round(value, 2) for name, value in found.items()}, indent=1))


def epoch(section: ModelConfig, *, kept: bool) -> Callable[[], float]:
    """An epoch over all pictures, forward and backward, that returns its processor time in seconds."""
    tokenizer = backbones.tokenizer(section)
    processor = PictureProcessor(section, type(backbones.hub_config(section)), ImageConfig())
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(PICTURES):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (200, 240, 3), dtype=np.uint8)).save(buffer, "PNG")
        rows.append({"question": "What is it?", "answer": f"Picture {number}.", "image": buffer.getvalue()})
    data = workbench.encode_rows(rows, tokenizer, ChatEncoder(tokenizer, processor=processor))
    backbone = backbones.load(section, tokenizer)
    if kept:
        PictureFeatures(backbone.model, processor)
        processor.name_rows(True)
    model = adapters.attach(backbone.model, Lora(rank=16, alpha=32), seed=0)
    loss = workbench.token_loss(model, workbench.output_head(model, backbone.model))

    def run() -> float:
        began = time.process_time()
        for start in range(0, PICTURES, BATCH):
            batch = data.batch(np.arange(start, start + BATCH))
            loss(batch, 1 / len(batch.labels_N)).backward()
        return time.process_time() - began

    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args().rounds)
