"""Settings that Axolotl and LLaMA-Factory name alike, as transformers' Trainer does, and how they are translated."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from math import prod
from typing import Any, get_args

from workbench.config.sections.run_sections import Tracker
from workbench.errors import ConfigError


class Translation:
    """The settings that are left of a file, and the recipe that the others became."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._left = {key: value for key, value in settings.items() if value not in (None, "", [], {})}
        self.recipe: dict[str, Any] = {}
        self.looks: list[str] = []
        """Points to look at: settings that mean something else here, or that could not be taken whole."""
        self.idle: list[str] = []
        """Settings that have no effect on what is learnt, or that are decided by themselves here."""

    @property
    def left(self) -> dict[str, Any]:
        """Settings without an equivalent."""
        return dict(self._left)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a setting, which is read with this; `default` where the file has none."""
        return self._left.pop(key, default)

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number, also where YAML reads it as text, as it does with 2e-4.

        Raises:
            ConfigError: Something else stands there.
        """
        value = self.take(key, default)
        try:
            return None if value is None else float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{key}: expected a number, found {value!r}.") from None

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number."""
        value = self.number(key, default)
        if value is not None and value != int(value):
            raise ConfigError(f"{key}: expected a whole number, found {value:g}.")
        return None if value is None else int(value)

    def give(self, place: str, value: Any) -> None:
        """Write a value at a place of the recipe, such as train.learning_rate; None writes nothing."""
        if value is None:
            return
        *sections, key = place.split(".")
        section = self.recipe
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value

    def move(self, key: str, place: str, read: Callable[[str], Any] | None = None) -> None:
        """Give a setting its place in the recipe."""
        self.give(place, (read or self.take)(key))

    def choose(self, key: str, known: Mapping[str, Any], place: str) -> None:
        """Give a named choice its name here; an unknown one is left."""
        value = self._left.get(key)
        if value is not None and str(value).lower() in known:
            self.give(place, known[str(self.take(key)).lower()])

    def ignore(self, *keys: str) -> None:
        """Pass over settings that change nothing of what is learnt."""
        self.idle += [key for key in keys if self._left.pop(key, None) is not None]

    def look(self, text: str) -> None:
        """Note what a person should look at."""
        self.looks.append(text)

    def refuse(self, key: str, reason: str) -> None:
        """Refuse a file whose task is not one of ours, as far as the setting says so.

        Raises:
            ConfigError: The setting is there, and is not false.
        """
        value = self._left.get(key)
        if value not in (None, False):
            raise ConfigError(f"{key}: {value!r}: {reason}")


LISTS = ("all", "all-linear")


def low_rank(translation: Translation, *, rank: str, targets: Any, default_rank: int) -> None:
    """LoRA with its variants; a scale that the file leaves out is twice the rank, as in LLaMA-Factory."""
    named = translation.whole(rank)
    size = default_rank if named is None else named
    wanted = {
        "dora": any([translation.take("use_dora"), translation.take("peft_use_dora")]),
        "rslora": any([translation.take("use_rslora"), translation.take("peft_use_rslora")]),
        "pissa": bool(translation.take("pissa_init")),
        "lora+": translation.left.get("loraplus_lr_ratio") is not None,
    }
    chosen = [name for name, on in wanted.items() if on]
    if len(chosen) > 1:
        translation.look(f"{' and '.join(chosen)} together: here each is a method of its own; {chosen[0]} is written.")
    translation.give("adapter.method", chosen[0] if chosen else "lora")
    translation.give("adapter.rank", size)
    translation.give("adapter.alpha", translation.number("lora_alpha", 2 * size))
    translation.move("lora_dropout", "adapter.dropout", translation.number)
    place(translation, targets)
    if translation.recipe["adapter"]["method"] == "lora+":
        translation.give("adapter.rate_ratio", translation.number("loraplus_lr_ratio"))


def place(translation: Translation, targets: Any) -> None:
    """Layers that are changed: a role, or names."""
    if isinstance(targets, str) and targets in LISTS:
        translation.give("adapter.targets", "all-linear")
    elif isinstance(targets, str) and any(sign in targets for sign in "*[(\\|"):
        translation.look(f"Layers by a pattern, {targets}: write a role or names to adapter.targets; here all-linear.")
    elif targets:
        names = targets.split(",") if isinstance(targets, str) else list(targets)
        translation.give("adapter.targets", [str(name).strip() for name in names])


OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), "adamw8bit"),
    **dict.fromkeys(("paged_adamw_8bit", "paged_adamw8bit"), "paged_adamw8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "paged_adamw"),
    **dict.fromkeys(("lion_pytorch", "lion_32bit"), "lion"),
    **{name: name for name in ("adafactor", "sgd", "muon", "galore", "apollo", "adam_mini")},
    **dict.fromkeys(("schedule_free_adamw",), "schedule_free"),
}
"""Optimizers of transformers' Trainer."""
SCHEDULES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "reduce_lr_on_plateau": "plateau",
    "warmup_stable_decay": "wsd",
    "one_cycle": "one_cycle",
    "rex": "rex",
}
PLACEHOLDER = "FILE_OR_HUB_ID"
"""A data source of which the file says only a name."""
IDLE = (
    *("logging_steps", "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "ddp_timeout", "tf32", "debug"),
    *("save_only_model", "save_strategy", "eval_strategy", "save_safetensors", "dataloader_num_workers", "strict"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "ddp_find_unused_parameters", "remove_unused_columns"),
    *("torch_compile", "dataloader_prefetch_factor", "dataloader_pin_memory", "eval_batch_size", "run_name"),
    *("per_device_eval_batch_size", "group_by_length", "include_tokens_per_second", "save_first_step"),
)
"""Settings without effect on what is learnt, or which are decided by themselves here."""


def length_and_rate(translation: Translation, *, epochs: float) -> None:
    """Length of the run, learning rate, its course, decay and clipping.

    Args:
        epochs: Passes where the file names neither these nor steps.
    """
    steps = translation.whole("max_steps")
    passes = translation.number("num_epochs", translation.number("num_train_epochs", epochs))
    if steps is not None and steps > 0:
        translation.give("train.steps", steps)
    else:
        translation.give("train.epochs", passes)
    translation.move("learning_rate", "train.learning_rate", translation.number)
    translation.move("weight_decay", "train.weight_decay", translation.number)
    translation.move("max_grad_norm", "train.max_grad_norm", translation.number)
    translation.move("seed", "seed", translation.whole)
    share, first = translation.number("warmup_ratio"), translation.number("warmup_steps")
    if first is not None and first < 1 and share is None:  # transformers 5 takes a share there
        share, first = first, None
    if first and steps:
        share = first / steps
    elif first:
        translation.look(
            f"warmup_steps={first:g}: schedule.warmup is a share of the run, here 0.05. Write {first:g} / the number "
            "of steps, which `workbench check` says."
        )
    translation.give("schedule.warmup", None if first and not steps else share or 0.0)
    translation.move("early_stopping_patience", "evaluate.patience", translation.whole)
    best = bool(translation.take("load_best_model_at_end")) or "patience" in translation.recipe.get("evaluate", {})
    translation.give("save.ship", "best" if best else None)


def schedule(translation: Translation, key: str) -> None:
    """The course of the learning rate."""
    translation.choose(key, SCHEDULES, "schedule.name")
    name = translation.recipe.get("schedule", {}).get("name")
    if name == "cosine":
        translation.move("cosine_min_lr_ratio", "schedule.floor", translation.number)
    extra = translation.take("lr_scheduler_kwargs")
    if extra:
        translation.look(
            f"{key}'s own settings {extra}: look at the section schedule (`workbench explain schedule.name`)."
        )


def optimizer(translation: Translation, key: str) -> None:
    """The optimizer, and its memory."""
    translation.choose(key, OPTIMIZERS, "optimizer.name")
    first, second = translation.number("adam_beta1"), translation.number("adam_beta2")
    if first is not None or second is not None:
        translation.give("optimizer.betas", [0.9 if first is None else first, 0.999 if second is None else second])
    translation.move("adam_epsilon", "optimizer.eps", translation.number)
    translation.move("neftune_noise_alpha", "regularise.neftune", translation.number)
    translation.move("label_smoothing_factor", "regularise.label_smoothing", translation.number)


def batch(translation: Translation, micro: str, *, packed: bool) -> None:
    """Rows of a step, on one device."""
    parts = translation.whole(micro), translation.whole("gradient_accumulation_steps")
    rows = prod(part for part in parts if part is not None)
    translation.give("batch.size", rows)
    translation.look(
        f"batch.size={rows} are the rows of a step on one device there. Here it is the global batch, the same on any "
        "number of devices: multiply it by how many you had."
    )
    if packed:
        translation.look(
            f"Packing: there a row of the batch is a sequence filled with several examples; here batch.size counts "
            f"examples, and they are packed where that is faster. Write {rows} times the examples that fill a sequence "
            "(`workbench check` says the mean length)."
        )


def often(translation: Translation, place: str, *, steps: str, per_epoch: str) -> None:
    """Steps, or times in an epoch, between evaluations or checkpoints."""
    every, times = translation.number(steps), translation.number(per_epoch)
    epochs = translation.recipe.get("train", {}).get("epochs")
    if every:
        translation.give(place, every if every < 1 else int(every))
    elif times and epochs:
        share = round(1 / (times * epochs), 6)
        translation.give(place, share if share < 1 else None)  # once in a run: our default is oftener


def sharing(translation: Translation, *, deepspeed: Any, fsdp: Any, offload: bool) -> None:
    """Layout of several devices; a DeepSpeed file is told by its name."""
    if (deepspeed or fsdp) and translation.recipe["recipe"] != "sft":
        translation.look(
            f"Sharing by {deepspeed or 'FSDP'}: recipe {translation.recipe['recipe']} keeps whole models on each "
            "device."
        )
    elif deepspeed:
        stage = re.search(r"z(?:ero)?_?([0-3])", str(deepspeed).lower())
        if stage is None:
            translation.look(
                f"deepspeed: {deepspeed}: write its stage to distributed.zero, or the file to distributed.deepspeed."
            )
            return
        section: dict[str, Any] = {"zero": int(stage[1])}
        if "offload" in str(deepspeed).lower():
            section["offload_optimizer"] = "cpu"
            section |= {"offload_parameters": "cpu"} if section["zero"] == 3 else {}
        translation.give("distributed", section)
        translation.look(
            f"deepspeed: {deepspeed} is told by its name: look at the section distributed, and start with --devices N."
        )
    elif fsdp:
        translation.give("distributed", {"engine": "fsdp2", "zero": 3})
        translation.look("FSDP: written as distributed={engine: fsdp2, zero: 3}. Start with --devices N.")
        if offload:
            translation.look(
                "FSDP's offload of weights: distributed={zero: 3, offload_parameters: cpu} does it, by DeepSpeed."
            )


def trust(translation: Translation) -> None:
    """Code that comes with a backbone, which runs only where a person says so here."""
    if translation.take("trust_remote_code"):
        translation.look(
            "trust_remote_code is not taken over: write model.trust_remote_code=true where you trust the authors."
        )


def sources(translation: Translation, named: Mapping[str, Mapping[str, Any]]) -> None:
    """One source as data.train, several as data.sources; one that is named twice gets twice the weight."""
    merged: dict[str, dict[str, Any]] = {}
    for name, source in named.items():
        same = next((each for each in merged.values() if each["path"] == source["path"]), None)
        if same is None:
            merged[name] = {key: value for key, value in source.items() if value}
        else:
            same["weight"] = same.get("weight", 1) + 1
    if len(merged) > 1:
        translation.give("data.sources", merged)
        return
    only = next(iter(merged.values()), {"path": PLACEHOLDER})
    for key, place in (("path", "train"), ("columns", "columns"), ("limit", "limit")):
        translation.give(f"data.{place}", only.get(key))
    if only["path"] == PLACEHOLDER:
        translation.look(f"The file names no rows to train on: write them in place of {PLACEHOLDER}.")


TRACKERS: tuple[str, ...] = get_args(Tracker)


def trackers(translation: Translation, names: Container[str]) -> None:
    """Where metrics go besides metrics.jsonl."""
    translation.give("trackers", [name for name in TRACKERS if name in names] or None)


def weights(translation: Translation, *, bits: int | None) -> None:
    """How the backbone is stored, and in which precision products are."""
    translation.give("model.weights", {4: "nf4", 8: "int8"}.get(bits or 0))
    if translation.take("fp16") is True:
        translation.give("model.compute", "float16")
    if translation.take("bf16") is True:
        translation.give("model.compute", "bfloat16")


def kernels(translation: Translation, *keys: str) -> None:
    """Kernels of norms, gated activations and rotary positions, which are one setting here."""
    asked = [key for key in keys if translation.left.get(key) is True]
    translation.ignore(*(key for key in keys if key not in asked))
    for key in asked:
        translation.take(key)
    if asked:
        translation.give("train.kernels", "auto")
        translation.look(
            f"{', '.join(asked)}: train.kernels=auto takes all of Liger's kernels together, on a GPU where "
            "liger-kernel is installed, in families whose formulas they compute."
        )


def held_out(translation: Translation, key: str) -> None:
    """The share of the rows that is held out."""
    share = translation.number(key)
    if not share:
        translation.look(
            "No rows were held out there. Here 5 % are (data.held_out), for a run is scored before and after."
        )
    elif share < 1:
        translation.give("data.held_out", share)
    else:
        translation.look(f"{key}={share:g} rows: data.held_out is a share, here 0.05, or a file.")
