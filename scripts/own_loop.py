"""A training loop of your own over the parts of the package, where settings are not enough.

    python scripts/own_loop.py [FOLDER]

Change backbone, method, rows, loss and loop. scripts/finetune.py leaves the loop to the package.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import workbench
from workbench.adapters import Lora
from workbench.config import DataConfig, ModelConfig

BACKBONE = ModelConfig(id="starter", weights="float32")  # a folder, or a hub id such as Qwen/Qwen3-0.6B
METHOD = Lora(rank=16, alpha=32, targets="all-linear")
ROWS = DataConfig(train="starter/fairytaleqa_train.jsonl", held_out="starter/fairytaleqa_held_out.jsonl")


def train(rows: DataConfig, *, steps: int = 60, size: int = 16, rate: float = 1e-3) -> tuple[nn.Module, list[float]]:
    """The backbone with a trained adapter, and the loss of each step in nats per supervised token."""
    tokenizer = workbench.load_tokenizer(BACKBONE)
    backbone = workbench.load_backbone(BACKBONE, tokenizer).model
    data = workbench.load_rows(rows, tokenizer).train
    model = workbench.attach(backbone, METHOD)
    loss = workbench.token_loss(model, workbench.output_head(model, backbone))
    trainable = [each for each in model.parameters() if each.requires_grad]
    optimizer, losses = torch.optim.AdamW(trainable, lr=rate), list[float]()
    model.train()
    for step in range(steps):
        batch = workbench.global_batch(step, rows=len(data), size=size, seed=0)
        scale = 1 / float(data.supervised[batch].sum())
        losses.append(0.0)
        for part in workbench.micro_batches(batch, data.lengths, tokens=4096):
            part_loss = loss(data.batch(part).to(backbone.device), scale)
            part_loss.backward()
            losses[-1] += part_loss.item()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}  loss {losses[-1]:.3f}")
    return model.eval(), losses


def score(adapter: Path, rows: DataConfig) -> float:
    """Held-out loss of what was saved, in nats per supervised token."""
    tokenizer = workbench.load_tokenizer(BACKBONE)
    backbone = workbench.load_backbone(BACKBONE, tokenizer).model
    model, held_out = workbench.load_adapter(backbone, adapter), workbench.load_rows(rows, tokenizer).held_out
    return workbench.likelihood(model, workbench.output_head(model, backbone), held_out).loss


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own-loop")
    workbench.save_adapter(train(ROWS)[0], folder)
    print(f"held-out loss {score(folder, ROWS):.3f}; adapter in {folder}")
