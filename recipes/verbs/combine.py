"""`workbench combine`: the LoRA adapters of several runs added up, as a run that evaluate, generate and merge take."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from workbench.adapters import Full, Lora, combine, soups
from workbench.adapters.combine import CombinationError, Saved, Updates
from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.recipes.verbs import held_out_judge, merge
from workbench.recipes.verbs.asked_config import asked_config
from workbench.recipes.verbs.held_out_judge import HeldOutJudge, WeightChoice
from workbench.runs import files, run_directory
from workbench.runs.trust import Trust
from workbench.training.callbacks import SILENT, Callback

EXACT = {"sum": combine.weighted_sum, "slerp": combine.along_the_arc}
"""Ways to combine that give a sum, whose ranks add up."""
DENSITY = 0.5
TRIALS = 32
WEIGHT_FILES = ("adapter_config.json", "adapter_model.safetensors")
READING_FILES = (
    *("tokenizer.json", "chat_template.jinja"),
    *("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"),
)
"""Files that say how a text is read, those of embedders too."""
ROWS = ("data.held_out=", "data.test=")
"""What may be said of the rows on which soups and searches are scored."""


@dataclass(frozen=True)
class Combined:
    """Adapter that was written, and its distance from what the way to combine gives."""

    error: CombinationError
    ranks: tuple[int, int]
    """Lowest and highest of a layer."""
    parameters: int
    choice: WeightChoice | None = None
    """How scores on held-out rows chose the weights; None where they are those that were given."""


def combine_runs(
    runs: Sequence[Path | str],
    overrides: Sequence[str] = (),
    *,
    weights: Sequence[float] | str | None = None,
    out: Path | str,
    rank: int | None = None,
    by: str = "sum",
    density: float | None = None,
    trials: int | None = None,
    trust: bool = False,
    callback: Callback = SILENT,
) -> Combined:
    """Write the updates of several LoRA runs over one backbone as one run: their weighted sum, or a merge.

    Data, template and tokenizer are those of the first; the new run ends its answers where any of them does. Trained
    heads, as of classifiers, are averaged by the weights where their labels are the same.

    Args:
        runs: Run directories.
        overrides: `model.id=FOLDER`, where the backbone has moved since. For soups and searches also
            `data.held_out=FILE` and `data.test=FILE`: rows to score on other than those of the runs.
        weights: One factor for each run; `search`: those of a sum that score best on the held-out rows; None for soups.
        out: Run directory to write; it must not exist.
        rank: Keep no more ranks of a layer; None keeps as many as the runs have together, so that a sum is exact.
        by: `sum`; `slerp`: between two runs, along the arc; `ties`, `dare`, `dare_ties`: value by value
            (`workbench.adapters.combine.by_value`), of which a rank is an approximation; `soup`: the mean of all
            updates; `greedy-soup`: the mean of the best run and each next best with which the held-out score does not
            fall (Wortsman et al. 2022).
        density: Share of the values of each update that ties and dare keep; None: 0.5.
        trials: Most weights that a search scores; None: 32.
        trust: Execute the Python code that the runs' config.yaml name, and name it in the new one.
        callback: Shows what is scored.

    Returns:
        The `error` against that sum or merge, the lowest and highest of the `ranks`, the number of `parameters`, and
        the `choice` of weights by scores.

    Raises:
        ConfigError: The sum would not be exact, or what the runs read differs.

    Examples:
        >>> import workbench
        >>> combined = workbench.combine(["runs/short", "runs/short"], weights=[0.5, 0.5], out="runs/sum")
        >>> combined.ranks, combined.error.overall < 1e-6
        ((32, 32), True)
    """
    sources, out = [Path(run) for run in runs], Path(out)
    if by not in (ways := (*EXACT, *combine.BY_VALUE, *soups.BY_SCORE)):
        raise ConfigError(f"--by {by}: there is no such way to combine. Write one of {', '.join(ways)}.")
    searches = weights == soups.SEARCH and by == "sum"
    chooser = soups.searched if searches else soups.BY_SCORE.get(by)
    if chooser is None:
        if weights is None or isinstance(weights, str):
            raise ConfigError(
                f"--by {by} takes a factor for each run. Write --weights {','.join(['0.5'] * len(sources))}; "
                "--weights search finds those of --by sum, and --by greedy-soup takes none."
            )
        if len(weights) != len(sources):
            raise ConfigError(f"--weights has {len(weights)} numbers for {len(sources)} runs. Write one for each.")
    elif weights is not None and not searches:
        raise ConfigError(f"--by {by} weighs runs alike. Leave --weights out, or write --by sum.")
    elif len({source.resolve() for source in sources}) < max(2, len(sources)):
        raise ConfigError(
            f"{'--weights search' if searches else f'--by {by}'} takes two runs or more, each of them once, and here "
            f"are {', '.join(map(str, sources))}. Name another run beside it."
        )
    if trials is not None and (not searches or trials <= len(sources)):
        raise ConfigError(
            f"--trials {trials}: a search of --weights search scores each run alone and their mean first. Write it "
            f"with --weights search, and at least {len(sources) + 1}."
        )
    if density is not None and (by not in combine.BY_VALUE or not 0 < density < 1):
        raise ConfigError(
            f"--density {density:g}: it is the share of values, above 0 and below 1, that ties, dare and dare_ties "
            f"keep, and this is by {by}. Leave it out, or write --by ties --density 0.5."
        )
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another folder, or delete it first.")
    others = [word for word in overrides if word.startswith(ROWS) and chooser is not None]
    moved = [word for word in overrides if word not in others]
    configs = [run_directory.shipped_config(run, Trust(trust), moved) for run in sources]
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
    lost, choice = None, None
    heads = combine.mean_heads(saved, [1.0] * len(saved) if weights is None or isinstance(weights, str) else weights)
    if chooser is not None:
        judged = asked_config(sources[0], overrides, verb="combine", trust=trust)
        if judged.over is not None:
            raise ConfigError(
                f"{sources[0]} is of recipe={judged.recipe}, whose one adapter learnt all rows and has none held out. "
                "Combine runs of its task, or write --by sum and --weights."
            )
        for source, config in zip(sources, configs, strict=True):
            if config.task != judged.task:
                raise ConfigError(
                    f"{source} is of recipe {config.recipe}, and {sources[0]} of {judged.recipe}, which score rows in "
                    "other ways. Choose weights among runs of one recipe, or write them: --by sum --weights 0.5,0.5."
                )
        if any(word.startswith(ROWS[0]) for word in others):
            held_out_judge.require_unseen(sources, configs, str(judged.data.held_out), callback)
        else:
            held_out_judge.require_same_rows(sources, configs, callback)
        choice = _chosen(chooser, judged, sources, saved, rank=rank, trials=trials or TRIALS, callback=callback)
        updates, total, weights, heads = choice.updates, choice.total, choice.kept, choice.heads
    elif by in EXACT:
        assert not isinstance(weights, str) and weights is not None
        total = EXACT[by](saved, weights)
        updates = total if rank is None else combine.nearest(total, rank)
    else:
        assert not isinstance(weights, str) and weights is not None
        updates, lost = combine.by_value(
            saved, weights, by, density=density or DENSITY, rank=rank, seed=configs[0].seed
        )

    ranks = [len(each.down_RI) for each in updates.values()]
    run = run_directory.start(out, _of_sum(configs[0], updates), resume=False)
    try:
        with files.new_folder(run.adapter) as folder:
            written = combine.write(updates, folder, like=saved[0], heads=heads)
            _copy_beside([source / "adapter" for source in sources], folder)
        combination = Combined(
            lost or combine.error(written, total),
            (min(ranks), max(ranks)),
            sum(tensor.numel() for update in written.values() for tensor in update),
            choice,
        )
        data = files.read_json(sources[0] / "manifest.json").get("data")
        parts = [{"run": str(run), "weight": weight} for run, weight in zip(sources, weights, strict=True)]
        noted = {"of": parts, "by": by, "rank": rank, "error": combination.error.overall}
        run.note(status="done", data=data, combined=noted | ({} if choice is None else choice.facts()))
    finally:
        run.close()
    return combination


def _chosen(
    chooser: soups.Chooser,
    config: RunConfig,
    sources: Sequence[Path],
    saved: Sequence[Saved],
    *,
    rank: int | None,
    trials: int,
    callback: Callback,
) -> WeightChoice:
    """Weights by scores: the sum of all adapters is loaded once, and each trial takes its place."""
    equal = [1.0] * len(saved)
    whole, heads = combine.weighted_sum(saved, equal), combine.mean_heads(saved, equal)
    with TemporaryDirectory() as aside:
        adapter = Path(aside) / "adapter"
        adapter.mkdir()
        combine.write(whole, adapter, like=saved[0], heads=heads)
        _copy_beside([source / "adapter" for source in sources], adapter)
        judge = HeldOutJudge(_of_sum(config, whole), Path(aside), callback)
        return held_out_judge.choose(chooser, judge, saved, rank=rank, trials=trials, callback=callback)


def _of_sum(config: RunConfig, updates: Updates) -> RunConfig:
    rank = max(len(each.down_RI) for each in updates.values())
    return config.model_copy(update={"adapter": Lora(rank=rank, alpha=rank, targets=tuple(sorted(updates)))})


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
