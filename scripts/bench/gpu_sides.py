"""One side of one case of scripts/bench/gpu.py, in a process of its own: trains, and prints a line of JSON.

python scripts/bench/gpu_sides.py SIDE CASE SECONDS ROWS_AT_ONCE CHECKPOINTING [rehearse]
"""

from __future__ import annotations

import gc
import importlib.util
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpu_cases
import torch
from gpu_cases import ALPHA, RANK, STEPS, WARM_UP, Case, RandomRows
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import TrainerCallback

RATE = 1e-4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None


class Clock:
    """Times steps after the warm-up, until so many seconds or steps are over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.liger = False
        """Whether Liger's kernels ran."""
        self._marks: list[float] = []

    def mark(self) -> bool:
        """A step is over; whether there is time for another."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        self._marks.append(time.perf_counter())
        if len(self._marks) == WARM_UP and DEVICE.type == "cuda":  # what was tried and did not fit is left out
            torch.cuda.reset_peak_memory_stats()
        warm = self._marks[WARM_UP - 1 :]
        return len(self._marks) < STEPS and (len(warm) < 4 or warm[-1] - warm[0] < self._seconds)

    def rates(self, tokens: list[int]) -> list[float]:
        """Tokens a second of each warm step.

        Args:
            tokens: Real tokens of every step.
        """
        pairs = zip(self._marks[WARM_UP - 1 :], self._marks[WARM_UP:], strict=False)
        return [count / (end - start) for count, (start, end) in zip(tokens[WARM_UP:], pairs, strict=False)]


def _recipe(case: Case, *, packed: bool) -> dict[str, Any]:
    """The recipe of our side."""
    return {
        "recipe": "sft",
        "model": {"id": case.name, "weights": case.weights, "compute": "bfloat16"},
        "adapter": {"method": "lora", "rank": RANK, "alpha": ALPHA, "targets": "all-linear"},
        "data": {"train": "random"},
        "batch": {"size": case.rows, "packing": packed},
        "train": {"steps": STEPS, "learning_rate": RATE, "checkpointing": "auto"},
        "schedule": {"name": "constant", "warmup": 0.0},
        "evaluate": {"every": None},
        "save": {"every": None},
    }


def ours(case: Case, clock: Clock, rows_at_once: int, checkpointing: bool, *, packed: bool = False) -> list[int]:
    """The workbench's trainer, which finds how much it computes at once; returns the tokens of each step."""
    from workbench.config import RunConfig
    from workbench.errors import Stopped
    from workbench.models import attention_backend, output_heads
    from workbench.recipes.tasks.sft.text_run import next_token_loss
    from workbench.runs import run_directory
    from workbench.training.freezing import freezer as freezing
    from workbench.training.signal import TrainingSignal
    from workbench.training.trainer import Trainer

    tokens: list[int] = []

    class Watch:
        """Marks the steps."""

        going = True

        def step(self, record: dict[str, Any], *, total: int) -> None:
            tokens.append(record["tokens"])
            self.going = clock.mark()

        def say(self, text: str) -> None:
            print(text, file=sys.stderr)

        def stop_requested(self) -> bool:
            return not self.going

    config = RunConfig.model_validate(_recipe(case, packed=packed))
    attention_backend.register()
    backbone, rows = gpu_cases.model(case, DEVICE), RandomRows(case)
    freezer = freezing.attach(backbone, config, seed=0)
    loss = next_token_loss(freezer.model, output_heads.known(backbone))
    with tempfile.TemporaryDirectory() as folder:
        run = run_directory.start(Path(folder) / "run", config, resume=False)
        trainer = Trainer(
            model=freezer.model,
            signal=TrainingSignal(rows, loss, reads_packed=True),
            freezer=freezer,
            width=case.config.hidden_size,
            held_out=[],
            held_out_loss=lambda: 0.0,
            config=config,
            compute=torch.bfloat16,
            run=run,
            callback=Watch(),
        )
        try:
            trainer.work()
        except Stopped:
            pass
        finally:
            run.close()
        clock.liger = run.manifest["kernels"] == "liger"
    return tokens


def raw(case: Case, clock: Clock, rows_at_once: int, checkpointing: bool) -> list[int]:
    """A loop of torch over PEFT's LoRA: autocast to bfloat16, fused AdamW, padding to the longest row at once."""
    model: Any = get_peft_model(gpu_cases.model(case, DEVICE), _lora())
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=RATE, fused=True)
    tokens = []
    for step, lengths in _steps(case):
        counted = sum(map(len, lengths)) - len(lengths)
        for start in range(0, len(lengths), rows_at_once):
            part = lengths[start : start + rows_at_once]
            longest = max(map(len, part))
            ids = torch.stack([F.pad(row, (0, longest - len(row))) for row in part]).to(DEVICE, non_blocking=True)
            mask = torch.stack([torch.arange(longest) < len(row) for row in part]).to(DEVICE, non_blocking=True)
            labels = ids.where(mask, -100)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum") / counted
            loss.backward()
            del logits, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens.append(sum(map(len, lengths)))
        assert step < STEPS
        if not clock.mark():
            break
    return tokens


def trl(case: Case, clock: Clock, rows_at_once: int, checkpointing: bool, *, liger: bool = False) -> list[int]:
    """TRL's trainer; with Liger-Kernel where `liger`."""
    clock.liger = liger
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from workbench.data import starter

    class InOrder(SFTTrainer):
        """Takes the rows in their order, so that the tokens of each step are known."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    class Marks(TrainerCallback):
        """Marks the steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= not clock.mark()

    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=-(-case.rows // rows_at_once),
            gradient_checkpointing=checkpointing,
            max_steps=STEPS,
            max_length=None,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            use_liger_kernel=liger,
            use_cpu=DEVICE.type == "cpu",
            bf16=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=STEPS,
        )
        InOrder(
            model=gpu_cases.model(case, DEVICE),
            args=settings,
            train_dataset=RandomRows(case).dataset(),
            processing_class=AutoTokenizer.from_pretrained(starter.FOLDER),
            peft_config=_lora(),
            callbacks=[Marks()],
        ).train()
    return [sum(map(len, rows)) for _, rows in _steps(case)]


def _steps(case: Case) -> Iterator[tuple[int, list[torch.Tensor]]]:
    rows = [torch.from_numpy(row) for row in RandomRows(case).rows]
    for step in range(STEPS):
        yield step, rows[step * case.rows : (step + 1) * case.rows]


def _lora() -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")


SIDES: dict[str, Callable[[Case, Clock, int, bool], list[int]]] = {
    "workbench": ours,
    "workbench packed": partial(ours, packed=True),
    "TRL": trl,
    "TRL tuned": lambda *given: trl(*given, liger=HAS_LIGER and DEVICE.type == "cuda"),
    "raw loop": raw,
}


def peak_bytes() -> int:
    """The most bytes that torch's allocator gave, or on a CPU that this process held."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(side: str, name: str, seconds: str, rows_at_once: str, checkpointing: str, *words: str) -> None:
    case = gpu_cases.case(name, rehearsed="rehearse" in words)
    clock = Clock(float(seconds))
    try:
        tokens = SIDES[side](case, clock, int(rows_at_once), checkpointing == "1")
    except torch.OutOfMemoryError as error:
        gc.collect()
        print(json.dumps({"out_of_memory": str(error).splitlines()[0]}))
        return
    print(json.dumps({"rates": clock.rates(tokens), "peak_bytes": peak_bytes(), "liger": clock.liger}))


if __name__ == "__main__":
    main(*sys.argv[1:])
