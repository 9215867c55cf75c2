"""Settings that Axolotl and LLaMA-Factory name alike, as transformers' Trainer does, and how they are translated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import get_args

from workbench.config.foreign.translation import EMPTY, Rule, Translation, no_effect, to, told
from workbench.config.sections.optimizer_config import KNOWN
from workbench.config.sections.run_sections import Tracker
from workbench.errors import ConfigError

NO_SIDE = "pictures, films and sound beside text have no equivalent here."
TABLE: dict[str, Rule] = {
    "save_total_limit": to("save.keep", Translation.whole),
    "weight_decay": to("train.weight_decay", Translation.number),
    "seed": to("seed", Translation.whole),
    "neftune_noise_alpha": to("regularise.neftune", Translation.number),
    "label_smoothing_factor": to("regularise.label_smoothing", Translation.number),
    "trust_remote_code": told(
        "not taken over: write model.trust_remote_code=true where you trust the authors.", but=(False,)
    ),
    "group_by_length": told("here the rows of a step are drawn at random, whatever their length.", but=(False,)),
    "torch_compile": told("train.compile=true compiles layers.", but=(False, "auto")),
    "resume_from_checkpoint": told("a checkpoint of another tool has no equivalent; `run --resume` is for own ones."),
    **no_effect(
        "logging_steps logging_first_step logging_dir logging_strategy output_dir overwrite_output_dir run_name debug "
        "ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers local_rank tf32 strict "
        "save_only_model save_strategy save_safetensors save_first_step eval_strategy evaluation_strategy "
        "eval_batch_size per_device_eval_batch_size eval_accumulation_steps eval_delay eval_on_start "
        "gradient_checkpointing gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode "
        "dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory remove_unused_columns "
        "include_tokens_per_second include_num_input_tokens_seen low_cpu_mem_usage ray_num_workers use_ray"
    ),
}
"""Settings that both tools have. Those without effect are about speed, memory, logs and folders."""


VARIANTS = {
    "dora": ("use_dora", "peft_use_dora"),
    "rslora": ("use_rslora", "peft_use_rslora"),
    "pissa": ("pissa_init",),
    "lora+": ("loraplus_lr_ratio",),
}
"""Kinds of LoRA that are methods of their own here, and the settings that ask for them."""


def low_rank(translation: Translation, *, rank: str) -> None:
    """LoRA with its variants; a scale that the file leaves out is twice the rank, as in LLaMA-Factory."""
    chosen = dict[str, str]()
    for name, keys in VARIANTS.items():
        for key in keys:
            if translation.number(key) if name == "lora+" else translation.flag(key):
                chosen.setdefault(name, key)
            else:
                translation.ignore(key)
    method, *others = chosen or ["lora"]
    translation.give("adapter.method", method, *[key for name, key in chosen.items() if name == method])
    translation.look(f"here each is a method of its own, and {method} is written.", *[chosen[name] for name in others])
    if method == "lora+":
        translation.give("adapter.rate_ratio", translation.number("loraplus_lr_ratio"))
    translation.default(rank, 8, "adapter.rank")
    translation.move(rank, "adapter.rank", Translation.whole)
    translation.default("lora_alpha", 2 * translation.recipe["adapter"].get("rank", 8), "adapter.alpha")
    translation.move("lora_alpha", "adapter.alpha", Translation.number)
    translation.move("lora_dropout", "adapter.dropout", Translation.number)


def place(translation: Translation, key: str) -> None:
    """Layers that are changed: a role, or names."""
    names = translation.texts(key)
    if names in (["all"], ["all-linear"]):
        translation.give("adapter.targets", "all-linear", key)
    elif isinstance(translation.value(key), str) and any(sign in "".join(names) for sign in "*[(\\|"):
        translation.look("layers by a pattern: write a role or names to adapter.targets; here all-linear.", key)
    elif names:
        translation.give("adapter.targets", names, key)


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


def length_and_rate(translation: Translation, *, passes: str, epochs: float, warmup: float) -> None:
    """Length of the run, learning rate, its warm-up, clipping, and which adapter ships.

    Args:
        passes: The key of the passes over the rows.
        epochs: These where the file names neither them nor steps.
        warmup: Share of the run where the file says nothing.
    """
    steps = translation.whole("max_steps")
    if steps is not None and steps > 0:
        translation.give("train.steps", steps, "max_steps")
        translation.ignore(passes)
    else:
        translation.ignore("max_steps")
        translation.default(passes, epochs, "train.epochs")
        translation.move(passes, "train.epochs", Translation.number)
    translation.move("learning_rate", "train.learning_rate", Translation.number)
    norm = translation.number("max_grad_norm")
    if norm is not None:
        translation.give("train.max_grad_norm", norm or 1e9, "max_grad_norm")  # 0 there: gradients are not clipped
    share, first = translation.number("warmup_ratio"), translation.number("warmup_steps")
    if first and first >= 1 and not steps:
        translation.look(
            f"schedule.warmup is a share of the run, here 0.05. Write {first:g} / the number of steps, which "
            "`workbench check` says.",
            "warmup_steps",
        )
        translation.ignore("warmup_ratio")
    elif first is not None and not (first == 0 and share):  # below 1 it is a share, as in transformers 5
        translation.give("schedule.warmup", first if first < 1 or not steps else first / steps, "warmup_steps")
        translation.ignore("warmup_ratio")
    elif share is not None:
        translation.give("schedule.warmup", share, "warmup_ratio")
        translation.ignore("warmup_steps")
    else:
        translation.default("warmup_ratio", warmup, "schedule.warmup")
    best = translation.flag("load_best_model_at_end") or translation.whole("early_stopping_patience") is not None
    if best:
        translation.give("save.ship", "best", "load_best_model_at_end")
    translation.move("early_stopping_patience", "evaluate.patience", Translation.whole)
    translation.ignore("load_best_model_at_end")


def schedule(translation: Translation, key: str, *, default: str) -> None:
    """The course of the learning rate."""
    theirs = str(translation.value(key) or default)
    translation.default(key, SCHEDULES[default], "schedule.name")
    translation.choose(key, SCHEDULES, "schedule.name")
    section = translation.recipe.get("schedule", {})
    name, floor = section.get("name"), translation.number("cosine_min_lr_ratio")
    if name == "cosine" and floor is not None and floor < 1:
        translation.give("schedule.floor", floor, "cosine_min_lr_ratio")
    elif name == "cosine" and floor is not None:
        translation.give("schedule.name", "constant", "cosine_min_lr_ratio")
    own = translation.at("lr_scheduler_kwargs")
    if name == "cosine":
        own.move("min_lr_rate", "schedule.floor", Translation.number)
    if theirs == "cosine_with_restarts":
        own.move("num_cycles", "schedule.cycles", Translation.whole)
    if name == "polynomial":  # transformers' exponent is 1
        translation.give("schedule.power", own.number("power") or 1.0, "lr_scheduler_kwargs.power")
    translation.look("the section schedule has its settings (`workbench explain schedule`).", "lr_scheduler_kwargs")
    if name in ("inverse_sqrt", "one_cycle") and not section.get("warmup"):
        section.pop("warmup", None)
        translation.remark(f"schedule.name={name} begins with a warm-up here, of 5 % of the run (schedule.warmup).")


def optimizer(translation: Translation, key: str) -> None:
    """The optimizer, and its memory."""
    translation.choose(key, OPTIMIZERS, "optimizer.name")
    name = translation.recipe.get("optimizer", {}).get("name", "adamw")
    first, second = translation.number("adam_beta1"), translation.number("adam_beta2")
    if "betas" in KNOWN[name] and (first is not None or second is not None):
        betas = [0.9 if first is None else first, 0.999 if second is None else second]
        translation.give("optimizer.betas", betas, "adam_beta1", "adam_beta2")
    if "eps" in KNOWN[name]:
        translation.move("adam_epsilon", "optimizer.eps", Translation.number)
    translation.ignore("adam_beta1", "adam_beta2", "adam_epsilon")  # of optimizers that have none
    if name == "schedule_free":
        translation.give("schedule.name", "constant")
        translation.remark(
            "optimizer.name=schedule_free averages instead of lowering its rate, so schedule.name=constant."
        )


def batch(translation: Translation, micro: str, *packing: str, default: int) -> None:
    """Rows of a step, on one device, and the settings that pack them."""
    keys = (micro, "gradient_accumulation_steps")
    parts = [translation.whole(key) for key in keys]
    rows = prod(usual if part is None else part for part, usual in zip(parts, (default, 1), strict=True))
    if default != 1:
        translation.default(micro, rows, "batch.size", theirs=default)
    translation.give("batch.size", rows, *keys)
    translation.remark(
        f"batch.size={rows} are the rows of a step on one device there. Here it is the global batch, the same on any "
        "number of devices: multiply it by how many you had."
    )
    translation.look(
        "there a row of the batch is a sequence filled with several examples; here batch.size counts examples, and "
        f"packs them where that is faster. Write {rows} times the examples that fill a sequence (`workbench check` "
        "says the mean length).",
        *(key for key in packing if translation.flag(key)),
    )
    translation.ignore(*packing)


def often(translation: Translation, place: str, *, steps: str, per_epoch: str = "") -> None:
    """Steps, or times in an epoch, between evaluations or checkpoints."""
    every, times = translation.number(steps), translation.number(per_epoch)
    epochs = translation.recipe.get("train", {}).get("epochs")
    if every:
        translation.give(place, every if every < 1 else translation.whole(steps), steps)
    elif times and epochs and (share := round(1 / (times * epochs), 6)) < 1:
        translation.give(place, share, per_epoch)
    translation.ignore(steps, per_epoch)  # once in a run, and never: our default is oftener


def sharing(translation: Translation) -> None:
    """Layout of several devices; a DeepSpeed file is told by its name."""
    name, recipe = translation.value("deepspeed"), translation.recipe["recipe"]
    fsdp = translation.value("fsdp") or translation.value("fsdp_config")
    if not name and not fsdp:
        return
    stage = re.search(r"z(?:ero)?_?([0-3])", str(name).lower()) if isinstance(name, str) else None
    if recipe != "sft":
        translation.look(f"recipe {recipe} keeps whole models on each device.", "deepspeed", "fsdp")
    elif name and stage is None:
        translation.look("write its stage to distributed.zero, or a file of it to distributed.deepspeed.", "deepspeed")
    elif stage is not None:
        section: dict[str, object] = {"zero": int(stage[1])}
        if "offload" in name.lower() and section["zero"] in (1, 2, 3):
            section["offload_optimizer"] = "cpu"
            section |= {"offload_parameters": "cpu"} if section["zero"] == 3 else {}
        translation.recipe["distributed"] = section
        translation.look("told by its name: look at the section distributed, and start with --devices N.", "deepspeed")
    else:
        translation.give("distributed", {"engine": "fsdp2", "zero": 3})
        translation.look(
            "written as distributed={engine: fsdp2, zero: 3}. Start with --devices N.", "fsdp", "fsdp_version"
        )


@dataclass
class RowSource:
    """A data set of another tool's file, as `data.sources` has them."""

    path: str
    columns: dict[str, str] = field(default_factory=dict)
    limit: int | None = None
    format: str | None = None
    keys: dict[str, str] = field(default_factory=dict)
    """Settings that told it, and which of the above they told."""

    def rename(self, settings: Translation, columns: Mapping[str, str]) -> None:
        """Read the names of columns: settings, and the column of ours that each names."""
        for key, ours in columns.items():
            if (theirs := settings.text(key)) not in (None, ours):
                self.columns[ours] = str(theirs)
                self.keys[settings.path(key)] = "columns"
            elif theirs:
                settings.ignore(key)


def rows_of(settings: Translation, source: RowSource, *, split: str, config: str) -> None:
    """Add the configuration, split and first rows of a hub data set to the path and limit of a source.

    Args:
        split: Key of the split, such as `test` or `train[:100]`.
        config: Key of the configuration.
    """
    if name := settings.text(config):
        source.path += f":{name}"
        source.keys[settings.path(config)] = "path"
    whole, _, part = (settings.text(split) or "train").partition("[")
    rows = re.fullmatch(r":(\d+)\]", part)
    if (part and rows is None) or not re.fullmatch(r"[\w.-]+", whole):
        settings.look("here a whole split is read (OWNER/NAME#SPLIT), or its first rows (data.limit).", split)
        return
    if whole != "train":
        source.path += f"#{whole}"
    if rows and int(rows[1]):
        source.limit = int(rows[1])
    if whole == "train" and not rows:
        settings.ignore(split)
    else:
        source.keys[settings.path(split)] = "limit" if rows else "path"


def sources(translation: Translation, named: Mapping[str, RowSource]) -> None:
    """One source as data.train, several as data.sources; one that is named twice gets twice the weight."""
    merged: dict[str, tuple[RowSource, list[RowSource]]] = {}
    for name, source in zip(_names(named), named.values(), strict=True):
        first, same = next((each for each in merged.values() if each[0].path == source.path), (source, []))
        if (first.columns, first.limit) == (source.columns, source.limit):
            same.append(source)
        else:
            translation.look(f"{source.path} is read once here, with the columns and rows said first.", *source.keys)
        if first is source:
            merged[name] = source, same
    single = len(merged) < 2
    for name, (source, equal) in merged.items():
        at = "data." if single else f"data.sources.{name}."
        weight = None if single or len(equal) < 2 else len(equal)
        values = {"path": source.path, "columns": source.columns, "limit": source.limit, "weight": weight}
        for key, value in values.items():
            keys = [setting for each in equal for setting, of in each.keys.items() if of == key]
            if value:
                translation.give(f"{at}{'train' if single and key == 'path' else key}", value, *keys)
    if not merged:
        translation.give("data.train", PLACEHOLDER)
    if not merged or any(source.path == PLACEHOLDER for source in named.values()):
        translation.remark(f"The file names no rows to train on: write them in place of {PLACEHOLDER}.")
    formats = {source.format for source in named.values()}
    keys = [key for source in named.values() for key, of in source.keys.items() if of == "format"]
    if len(formats) == 1 and translation.recipe["recipe"] == "sft" and (only := formats.pop()) is not None:
        translation.give("data.format", only, *keys)
    translation.ignore(*keys)  # columns tell it


def _names(named: Iterable[str]) -> list[str]:
    """Names as data.sources takes them, each once."""
    names = list[str]()
    for name in named:
        name = re.sub(r"[^\w-]", "_", name)
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def held_out_files(translation: Translation, named: Mapping[str, RowSource]) -> None:
    """Sets of their own that are held out, each with scores of its own where there are several."""
    files = dict(zip(_names(named), (source.path for source in named.values()), strict=True))
    own = translation.recipe["data"].get("columns", {})
    for name, source in zip(files, named.values(), strict=True):
        kinds = ("path", "columns", "limit", "format")
        of = {kind: [key for key, each in source.keys.items() if each == kind] for kind in kinds}
        translation.ignore(*of["format"])
        translation.give("data.held_out", source.path if len(files) == 1 else files, *of["path"])
        if own and source.columns == own:
            translation.give("data.columns", own, *of["columns"])
        elif source.columns != own:
            translation.look(
                f"held-out rows {name}: data.columns is that of the training rows, {own}, and theirs are "
                f"{source.columns}. Rename the columns in one of the files.",
                *of["columns"],
            )
        translation.look(f"held-out rows {name}: here all are used.", *of["limit"])


TRACKERS: tuple[str, ...] = get_args(Tracker)


def trackers(translation: Translation, named: Mapping[str, Iterable[str]]) -> None:
    """Where metrics go besides metrics.jsonl: services, and the settings that ask for them."""
    known = [name for name in TRACKERS if name in named]
    if known:
        keys = [key for name in known for key in named[name]]
        projects = [key for key in keys if translation.value(key) is not True and key != "report_to"]
        translation.look("an environment variable names it here, such as WANDB_PROJECT.", *projects)
        translation.give("trackers", known, *keys)


def weights(translation: Translation, *, bits: int | None, keys: Iterable[str], four: str = "nf4") -> None:
    """How the backbone is stored, and in which precision products are."""
    if bits in (4, 8):
        translation.give("model.weights", four if bits == 4 else "int8", *keys)
    for key, name in (("fp16", "float16"), ("bf16", "bfloat16")):
        if translation.value(key) in ("auto", False):
            translation.ignore(key)
        elif translation.value(key) == "full" or translation.flag(key):
            translation.give("model.compute", name, key)


def kernels(translation: Translation, *keys: str) -> None:
    """Kernels of norms, gated activations and rotary positions, which are one setting here."""
    asked = [key for key in keys if translation.flag(key)]
    translation.ignore(*(key for key in keys if key not in asked))
    if asked:
        translation.give("train.kernels", "auto")
        translation.look(
            "train.kernels=auto takes all of Liger's kernels together, on a GPU where liger-kernel is installed, in "
            "families whose formulas they compute.",
            *asked,
        )


def held_out(translation: Translation, key: str) -> None:
    """The share of the rows that is held out."""
    share = translation.number(key)
    if not share:
        translation.ignore(key)
        translation.remark(
            "No rows were held out there. Here 5 % are (data.held_out), for a run is scored before and after."
        )
    elif share < 1:
        translation.give("data.held_out", share, key)
    else:
        translation.look("a number of rows: data.held_out is a share, here 0.05, or a file.", key)


def mappings(settings: Mapping[str, object], *keys: str) -> dict[str, object]:
    """The settings with lists of mappings with a path under `keys`, where the file has a path or a list of paths.

    Raises:
        ConfigError: Something else stands there.
    """
    found = dict(settings)
    for key in keys:
        value = settings.get(key)
        listed = value if isinstance(value, list) else [] if value in EMPTY else [value]
        if not all(isinstance(each, (str, dict)) and each for each in listed):
            raise ConfigError(f"{key}: expected a list of data sets, each with a path, found {value!r:.60}.")
        if listed:
            found[key] = [{"path": each} if isinstance(each, str) else each for each in listed]
    return found
