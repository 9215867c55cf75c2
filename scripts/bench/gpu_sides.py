"""The sides of scripts/bench/gpu.py. As a command one side of one case: trains, and prints a line of JSON.

python scripts/bench/gpu_sides.py SIDE CASE SECONDS ROWS_AT_ONCE CHECKPOINTING [rehearse]
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.argv[1:2] == ["Unsloth"]:
    # It patches transformers, PEFT and TRL where it is imported before them, and writes what it compiles.
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path(tempfile.gettempdir()) / "unsloth_compiled_cache"))
    importlib.import_module("unsloth")

import gpu_cases
import torch
from gpu_cases import ALPHA, RANK, STEPS, WARM_UP, Case, RandomRows
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from workbench.data import starter

RATE = 1e-4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIGER = importlib.util.find_spec("liger_kernel") is not None and DEVICE.type == "cuda"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""All linear layers of a Llama."""


class Clock:
    """Times steps after the warm-up, until so many seconds or steps are over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.given = {"liger": "no", "packed": "no"}
        """What the side was given, as the table tells it."""
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
        clock.given = {"liger": _said(run.manifest["kernels"] == "liger"), "packed": _said(packed)}
        clock.given |= dict.fromkeys(("rows_at_once", "checkpointing"), "as fits")
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


def trl(
    case: Case, clock: Clock, rows_at_once: int, checkpointing: bool, *, liger: bool = False, packed: bool = False
) -> list[int]:
    """TRL's trainer, with Liger's kernels or rows packed by best fit where asked for.

    A packed row has at most as many tokens as the longest row has, and a step about as many tokens as without packing.
    Flash attention keeps the rows apart where it is installed, else sdpa under a mask of all pairs of tokens.
    """
    model: Any = gpu_cases.model(case, DEVICE)
    settings: dict[str, Any] = {"gradient_checkpointing": checkpointing, "use_liger_kernel": liger}
    if packed:
        model.set_attn_implementation(_flash_attention() or "sdpa")
        packed_rows = round(rows_at_once * case.row_lengths.mean() / case.longest)
        settings |= {"packing": True, "packing_strategy": "bfd", "max_length": case.longest}
        settings |= {"per_device_train_batch_size": max(1, packed_rows)}
    tokens = _fine_tuned(model, case, clock, rows_at_once, settings, peft_config=_lora())
    clock.given["liger"] = _said(liger)
    if packed:
        clock.given["packed"] += f", {_flash_attention() or 'dense masks: no flash-attn here'}"
    return tokens


def unsloth(case: Case, clock: Clock, rows_at_once: int, checkpointing: bool) -> list[int]:
    """Unsloth as its notebooks use it: its kernels, its checkpointing, its patches of TRL's trainer."""
    language_model = importlib.import_module("unsloth").FastLanguageModel
    model, tokenizer = language_model.from_pretrained(
        str(gpu_cases.saved(case, DEVICE)),
        max_seq_length=case.longest,
        dtype=torch.bfloat16,
        load_in_4bit=case.weights == "nf4",
        use_exact_model_name=True,
    )
    model = language_model.get_peft_model(
        model, r=RANK, lora_alpha=ALPHA, target_modules=LINEAR, use_gradient_checkpointing="unsloth"
    )
    clock.given["checkpointing"] = "unsloth"
    return _fine_tuned(model, case, clock, rows_at_once, {}, processing_class=tokenizer)


def _fine_tuned(
    model: Any, case: Case, clock: Clock, rows_at_once: int, settings: dict[str, Any], **given: Any
) -> list[int]:
    """Train by TRL's trainer with these settings; returns the real tokens of each step, counted in what it computes."""
    library: Any = importlib.import_module("trl")  # its trainer is Unsloth's, where that was imported
    rows, packs = RandomRows(case).dataset(), settings.get("packing", False)
    tokens, counted = list[int](), list[int | torch.Tensor]()

    class Counting(library.SFTTrainer):  # type: ignore[misc]
        """Counts tokens, and takes rows in their order, as the raw loop does, but packed ones, which lie by length."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return super()._get_train_sampler(train_dataset) if packs else SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
            mask = inputs.get("attention_mask")
            counted.append(inputs["input_ids"].numel() if mask is None else mask.sum())
            clock.given["packed"] = "no" if mask is not None else "yes" if packs else "padding-free"
            return super().training_step(model, inputs, *rest)

    class Marks(TrainerCallback):
        """Marks the steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= not clock.mark()
            tokens.append(int(sum(counted)))
            counted.clear()

    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "per_device_train_batch_size": rows_at_once,
            "gradient_accumulation_steps": -(-case.rows // rows_at_once),
            "max_steps": STEPS,
            "max_length": None,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "use_cpu": DEVICE.type == "cpu",
            "bf16": True,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": STEPS,
        }
        Counting(
            model=model,
            args=library.SFTConfig(**common | settings),
            train_dataset=rows,
            callbacks=[Marks()],
            **{"processing_class": AutoTokenizer.from_pretrained(starter.FOLDER)} | given,
        ).train()
    return tokens


def _flash_attention() -> str | None:
    """The flash attention over rows of any lengths that transformers finds here."""
    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


def _said(fact: bool) -> str:
    return "yes" if fact else "no"


def _steps(case: Case) -> Iterator[tuple[int, list[torch.Tensor]]]:
    rows = [torch.from_numpy(row) for row in RandomRows(case).rows]
    for step in range(STEPS):
        yield step, rows[step * case.rows : (step + 1) * case.rows]


def _lora() -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")


def _fewer(rows: int) -> Iterator[tuple[int, bool]]:
    """Fewer rows at once, at last with checkpointing."""
    fewer = max(1, rows // 4)
    yield from ((rows, False), (rows // 2, False), (fewer, False), (1, False), (fewer, True))


def _checkpointed(rows: int) -> Iterator[tuple[int, bool]]:
    """Fewer rows at once, always with checkpointing."""
    yield from ((rows, True), (max(1, rows // 2), True), (max(1, rows // 4), True))


@dataclass(frozen=True)
class Side:
    """How one side trains, and what it is given."""

    train: Callable[[Case, Clock, int, bool], list[int]]
    """Returns the real tokens of each step, given rows at once and whether it checkpoints."""
    ways: Callable[[int], Iterable[tuple[int, bool]]] | None = None
    """Rows at once and checkpointing, in the order in which they are tried, by rows of a step; None: it finds them."""
    packed: bool = False
    """Whether it packs rows, which means something where their lengths differ."""
    needs: tuple[str, ...] = ()
    """Packages without which it is skipped."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process."""


SIDES = {
    "workbench": Side(ours),
    "workbench packed": Side(partial(ours, packed=True), packed=True),
    "TRL": Side(trl, _checkpointed),
    "TRL tuned": Side(partial(trl, liger=LIGER), _fewer),
    "raw loop": Side(raw, _fewer),
    "TRL packed": Side(partial(trl, liger=LIGER, packed=True), _fewer, packed=True),
    "Unsloth": Side(unsloth, _checkpointed, needs=("unsloth", "bitsandbytes")),
    "workbench packed, expandable segments": Side(
        partial(ours, packed=True), packed=True, environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    ),
}
"""In the order of their worth: a call may have time for the first ones alone."""


def peaks() -> dict[str, int]:
    """The most bytes that torch's allocator gave and that it took from the device; on a CPU that this process held."""
    if DEVICE.type == "cuda":
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return dict.fromkeys(("peak_bytes", "reserved_bytes"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main(side: str, name: str, seconds: str, rows_at_once: str, checkpointing: str, *words: str) -> None:
    case = gpu_cases.case(name, rehearsed="rehearse" in words)
    clock = Clock(float(seconds))
    try:
        tokens = SIDES[side].train(case, clock, int(rows_at_once), checkpointing == "1")
    except torch.OutOfMemoryError as error:
        gc.collect()
        print(json.dumps({"out_of_memory": str(error).splitlines()[0]}))
        return
    # Unsloth sets it, too.
    segments = _said("expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", ""))
    found = {"rates": clock.rates(tokens), "tokens": tokens, **peaks(), **clock.given}
    print(json.dumps({**found, "expandable_segments": segments}))


if __name__ == "__main__":
    main(*sys.argv[1:])
