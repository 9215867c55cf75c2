"""Fine-tune the same model on the same rows with this workbench and with TRL, and print the ratios.

    python scripts/bench/sft.py                                  # 100 M parameters, 32 steps, 2 pairs of runs
    python scripts/bench/sft.py --peer best --pairs 3 --json speed.json
    python scripts/bench/sft.py --precision float32
    python scripts/bench/sft.py --clock processor --steps 6      # on a busy machine
    python scripts/bench/sft.py --model SmolLM2-135M             # a folder: trained weights, its own tokenizer
    python scripts/bench/sft.py --model 8b --device cuda
    python scripts/bench/sft.py --ours model.compute=bfloat16    # settings of this workbench
    python scripts/bench/sft.py --peer best --ours train.compile=true --theirs torch_compile=true   # of trl.SFTConfig

A random Llama, unless --model names a folder; GSM8K as prompt and completion, LoRA of rank 16 on all linear layers, 8
examples a step, no packing, at most 512 tokens, AdamW, loss on the completion. Every run is a process of its own, ours
and theirs in turn; both must see the same number of tokens, and of tokens with loss, or no ratio is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import gsm8k
import measuring
from random_llama import SHAPES

# TRL 1.16 as read in trl/trainer/{sft_config,sft_trainer}.py and trl/kernels/chunked_logprob.py; gsm8k.py says more:
# - completion_only_loss=None: on for rows with prompt and completion. EOS is added to the completion and carries loss.
# - loss_type "nll": a fused head, the only one there is. It projects the labelled positions alone where it has Triton
#   (CUDA, XPU); on a CPU it projects all positions, padding too, and once more in the backward pass, with tiles
#   of 4,096 positions x 32,768 words: here the logits of the whole batch.


def main() -> None:
    arguments = _arguments()
    print(machine := measuring.machine(arguments.device, ("torch", "transformers", "peft", "trl")))
    with tempfile.TemporaryDirectory(prefix="bench-sft-") as name:
        folder = Path(name)
        gsm8k.write_model(arguments.model, folder / "model", arguments.device)
        gsm8k.write_rows(folder, arguments.steps)
        gsm8k.write_recipe(folder / "ours.yaml", arguments.steps, {"model": {"id": str(folder / "model")}})
        sides = {
            "workbench": partial(gsm8k.our_command, folder / "ours.yaml", arguments),
            "TRL": partial(_their_command, folder, arguments),
        }
        results = measuring.in_turn(sides, folder, arguments)
    ratios = measuring.ratios(results)
    print(measuring.summary(ratios, results))
    print(*gsm8k.notes(arguments, version("trl")), sep="\n")
    measuring.write_report(arguments, machine=machine, runs=results, ratios=ratios)


def _arguments() -> argparse.Namespace:
    parser = gsm8k.parser(__doc__)
    parser.add_argument(
        "--model", default="100m", help="100m, 1b or 8b, the last two as in Llama 3; or a model's folder"
    )
    arguments = gsm8k.arguments_of(parser)
    if arguments.model not in SHAPES and not Path(arguments.model).is_dir():
        parser.error(f"--model {arguments.model}: write {', '.join(SHAPES)}, or a folder with a causal language model.")
    return arguments


def _their_command(folder: Path, arguments: argparse.Namespace, out: Path) -> Sequence[str]:
    out.mkdir()
    script, rows = str(gsm8k.HERE / "peer_trl.py"), str(folder / "train.jsonl")
    settings = json.dumps(gsm8k.trl_settings(arguments))
    return [sys.executable, script, str(folder / "model"), rows, str(out), settings]


if __name__ == "__main__":
    main()
