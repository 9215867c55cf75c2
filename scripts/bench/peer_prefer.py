"""Train with TRL's DPOTrainer, KTOTrainer or ORPOTrainer, and write what `workbench run` writes.

    python scripts/bench/peer_prefer.py LOSS MODEL ROWS OUT SETTINGS [ADAPTER]     # settings of TRL's section, as JSON

scripts/bench/prefer.py starts this in a process of its own. ADAPTER is a file of initial values for the LoRA.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peer_trl import Counts, Metrics
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer


class CountingDPO(DPOTrainer):
    """DPOTrainer that says how many tokens it saw."""

    def counts(self, logs: dict[str, Any]) -> Counts:
        return Counts(int(logs["num_tokens"]), self.args.train_batch_size * self.args.gradient_accumulation_steps)


class CountingKTO(KTOTrainer):
    """KTOTrainer that says how many tokens it saw."""

    def counts(self, logs: dict[str, Any]) -> Counts:
        return Counts(int(logs["num_tokens"]), self.args.train_batch_size * self.args.gradient_accumulation_steps)


class PaperORPO(ORPOTrainer):
    """ORPOTrainer with the negative log-likelihood of Hong et al. 2024, eq. 2: of the chosen answer, by answer.

    TRL's own is of prompt and answer together, a mean over the tokens of a micro-batch.
    """

    seen = 0

    def concatenated_forward(self, model: Any, batch: Any) -> Any:
        forward: Any = super().concatenated_forward(model, batch)
        chosen, rejected, chosen_logits, rejected_logits, *_ = forward
        if model.training:
            self.seen += sum(int(batch[f"{side}_attention_mask"].sum()) for side in ("chosen", "rejected"))
        return chosen, rejected, chosen_logits, rejected_logits, -chosen.mean()

    def counts(self, logs: dict[str, Any]) -> Counts:
        return Counts(self.seen, self.args.train_batch_size * self.args.gradient_accumulation_steps)


KINDS: dict[str, tuple[Any, Any]] = {
    "dpo": (CountingDPO, DPOConfig),
    "kto": (CountingKTO, KTOConfig),
    "orpo": (PaperORPO, ORPOConfig),
}


def main(loss: str, model: str, rows: str, out: Path, settings: dict[str, Any], adapter: str | None = None) -> None:
    trainer_class, config_class = KINDS[loss]
    dtype = settings.pop("dtype")
    tokenizer = AutoTokenizer.from_pretrained(model)
    if loss == "orpo":
        tokenizer.bos_token = None  # ORPOTrainer would put one in front of prompts, where the tokenizer puts none
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)),
        args=config_class(output_dir=str(out), **settings),
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    if adapter is not None:
        found: Any = set_peft_model_state_dict(trainer.model, load_file(adapter))
        assert not found.unexpected_keys, found.unexpected_keys
    trainer.add_callback(Metrics(trainer, out / "metrics.jsonl"))
    trainer.train()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    loss, model, rows, out, settings, *adapter = sys.argv[1:]
    main(loss, model, rows, Path(out), json.loads(settings), *adapter)
