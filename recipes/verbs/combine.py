"""`workbench combine`: the LoRA adapters of several runs added up, as a run that evaluate, generate and merge take."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from workbench.adapters import Full, Lora, combine
from workbench.adapters.combine import CombinationError
from workbench.errors import ConfigError
from workbench.recipes.verbs import merge
from workbench.runs import files, run_directory
from workbench.runs.trust import Trust

EXACT = {"sum": combine.weighted_sum, "slerp": combine.along_the_arc}
"""Ways to combine that give a sum, whose ranks add up."""
DENSITY = 0.5
WEIGHT_FILES = ("adapter_config.json", "adapter_model.safetensors")
READING_FILES = (
    *("tokenizer.json", "chat_template.jinja"),
    *("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"),
)
"""Files that say how a text is read, those of embedders too."""


@dataclass(frozen=True)
class Combined:
    """Adapter that was written, and its distance from what the way to combine gives."""

    error: CombinationError
    ranks: tuple[int, int]
    """Lowest and highest of a layer."""
    parameters: int


def combine_runs(
    runs: Sequence[Path | str],
    overrides: Sequence[str] = (),
    *,
    weights: Sequence[float],
    out: Path | str,
    rank: int | None = None,
    by: str = "sum",
    density: float | None = None,
    trust: bool = False,
) -> Combined:
    """Write the updates of several LoRA runs over one backbone as one run: their weighted sum, or a merge.

    Data, template and tokenizer are those of the first; the new run ends its answers where any of them does.

    Args:
        runs: Run directories.
        overrides: `model.id=FOLDER`, where the backbone has moved since.
        weights: One factor for each run.
        out: Run directory to write; it must not exist.
        rank: Keep no more ranks of a layer; None keeps as many as the runs have together, so that a sum is exact.
        by: `sum`; `slerp`: between two runs, along the arc; `ties`, `dare`, `dare_ties`: value by value
            (`workbench.adapters.combine.by_value`), of which a rank is an approximation.
        density: Share of the values of each update that ties and dare keep; None: 0.5.
        trust: Execute the Python code that the runs' config.yaml name, and name it in the new one.

    Returns:
        The `error` against that sum or merge, the lowest and highest of the `ranks`, and the number of `parameters`.

    Raises:
        ConfigError: The sum would not be exact, or what the runs read differs.

    Examples:
        >>> import workbench
        >>> combined = workbench.combine(["runs/short", "runs/short"], weights=[0.5, 0.5], out="runs/sum")
        >>> combined.ranks, combined.error.overall < 1e-6
        ((32, 32), True)
    """
    sources, out = [Path(run) for run in runs], Path(out)
    if len(weights) != len(sources):
        raise ConfigError(f"--weights has {len(weights)} numbers for {len(sources)} runs. Write one for each.")
    if by not in (ways := (*EXACT, *combine.BY_VALUE)):
        raise ConfigError(f"--by {by}: there is no such way to combine. Write one of {', '.join(ways)}.")
    if density is not None and (by in EXACT or not 0 < density < 1):
        raise ConfigError(
            f"--density {density:g}: it is the share of values, above 0 and below 1, that ties, dare and dare_ties "
            f"keep, and this is by {by}. Leave it out, or write --by ties --density 0.5."
        )
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another folder, or delete it first.")
    configs = [run_directory.shipped_config(run, Trust(trust), overrides) for run in sources]
    for source, config in zip(sources, configs, strict=True):
        if isinstance(config.adapter, Full):
            raise ConfigError(f"{source} is fully trained: it has no adapter. Combine LoRA runs.")
        merge.require_one_model(source, config)
        if not (source / "adapter").is_dir():
            raise ConfigError(f"{source}: no adapter there yet. Finish the run first.")
        if config.task.head != configs[0].task.head:
            raise ConfigError(
                f"{source} is of recipe {config.recipe}, and {sources[0]} of {configs[0].recipe}, whose models have "
                "another head. Combine runs of one recipe."
            )
        for key in ("id", "revision", "sparsity"):
            if getattr(config.model, key) != getattr(configs[0].model, key):
                raise ConfigError(
                    f"{source} has model.{key}={getattr(config.model, key)}, and {sources[0]} "
                    f"{getattr(configs[0].model, key)}. Combine runs over one backbone."
                )
        for name in READING_FILES:
            if _content(source / "adapter" / name) != _content(sources[0] / "adapter" / name):
                raise ConfigError(
                    f"{source} and {sources[0]} differ in adapter/{name}, so that they read the same text "
                    "differently. Combine runs with one tokenizer and one chat template, or one pooling and prefixes."
                )
    saved = [combine.read(run / "adapter") for run in sources]
    lost: CombinationError | None = None
    if by in EXACT:
        total = EXACT[by](saved, weights)
        updates = total if rank is None else combine.nearest(total, rank)
    else:
        updates, lost = combine.by_value(
            saved, weights, by, density=density or DENSITY, rank=rank, seed=configs[0].seed
        )

    ranks = [len(each.down_RI) for each in updates.values()]
    section = Lora(rank=max(ranks), alpha=max(ranks), targets=tuple(sorted(updates)))
    run = run_directory.start(out, configs[0].model_copy(update={"adapter": section}), resume=False)
    try:
        with files.new_folder(run.adapter) as folder:
            written = combine.write(updates, folder, like=saved[0])
            _copy_beside([source / "adapter" for source in sources], folder)
        combination = Combined(
            lost or combine.error(written, total),
            (min(ranks), max(ranks)),
            sum(tensor.numel() for update in written.values() for tensor in update),
        )
        data = files.read_json(sources[0] / "manifest.json").get("data")
        parts = [{"run": str(run), "weight": weight} for run, weight in zip(sources, weights, strict=True)]
        run.note(
            status="done", data=data, combined={"of": parts, "by": by, "rank": rank, "error": combination.error.overall}
        )
    finally:
        run.close()
    return combination


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _copy_beside(adapters: Sequence[Path], folder: Path) -> None:
    """Tokenizer, template and pooling of the first, and the stop tokens of all where they write answers."""
    for path in sorted(adapters[0].rglob("*")):  # a folder stands before what it holds
        beside = folder / path.relative_to(adapters[0])
        if path.is_dir():
            beside.mkdir()
        elif path.name not in WEIGHT_FILES:
            shutil.copyfile(path, beside)  # without its mode: that of a shared run may forbid to write
    if not (adapters[0] / GENERATION_CONFIG_NAME).exists():
        return
    generation = GenerationConfig.from_pretrained(adapters[0])
    stops: set[int] = set()
    for adapter in adapters:
        eos_ids = GenerationConfig.from_pretrained(adapter).eos_token_id or []
        stops |= {eos_ids} if isinstance(eos_ids, int) else set(eos_ids)
    generation.eos_token_id = sorted(stops)
    generation.save_pretrained(folder)
