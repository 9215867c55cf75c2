"""`workbench export`: a run in the form that another program loads, its outputs checked, with a model card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from workbench.adapters import Full
from workbench.config import RunConfig
from workbench.errors import BackboneError, ConfigError
from workbench.evaluation import held_out_losses
from workbench.evaluation.perplexity import Agreement
from workbench.models import backbones, exported
from workbench.models.backbones import QUANTISED
from workbench.models.exporting import card, lora_limits, onnx_model
from workbench.models.exporting.card import CardFacts
from workbench.models.exporting.lora_limits import MERGE
from workbench.models.exporting.onnx_quantisers import QUANTISERS
from workbench.recipes.task import OutputError, implementation
from workbench.recipes.tasks.classify.task import Gap
from workbench.recipes.tasks.embed.task import Angle
from workbench.recipes.verbs import export_targets, merge
from workbench.recipes.verbs.export_targets import Form, Source, Writer
from workbench.runs import files, run_directory
from workbench.runs.trust import Trust

MOST_KL = 0.1
"""Divergence from the run, in nats, above which an export is another model and is not written."""
LEAST_COSINE, LEAST_COSINE_QUANTISED = 0.99, 0.9
"""The same for embeddings, and for those that were quantised."""
LEAST_SAME = 0.9
"""The same for numbers: share of rows within a hundredth of the labels' spread; quantised ones are only told."""
ALL_HEADS = ("text", "masked", "classes", "tokens", "hidden")


@dataclass(frozen=True)
class Target:
    """A program or format that a run is exported to."""

    write: Writer
    heads: tuple[str, ...]
    """Heads of the models that it takes."""
    forms: tuple[str, ...]
    """`adapter`, `whole` or both."""
    packages: tuple[str, ...] = ()
    """Packages of the extra `export` that it needs."""
    weights: tuple[str, ...] = ("bfloat16", "float32", "float16")
    """Formats of a whole model's weights, the default first."""


_BOTH, _ONNX = ("adapter", "whole"), ("onnx", "onnxruntime", "onnxscript")
TARGETS = {
    "peft": Target(export_targets.peft_adapter, ALL_HEADS, ("adapter",)),
    "merged": Target(export_targets.merged_model, ALL_HEADS, ("whole",)),
    "gguf": Target(export_targets.gguf, ("text",), _BOTH, ("gguf",)),
    "ollama": Target(export_targets.ollama_folder, ("text",), _BOTH, ("gguf",)),
    "vllm": Target(export_targets.vllm_folder, ("text",), _BOTH),
    "sglang": Target(export_targets.sglang_folder, ("text",), _BOTH),
    "onnx": Target(export_targets.onnx, ALL_HEADS, ("whole",), _ONNX, ("float32", *QUANTISERS)),
}


@dataclass(frozen=True)
class Exported:
    """Outcome of an export."""

    sentence: str
    error: str
    """Sentence on the measured error."""
    usage: str
    pushed: str | None
    """Address on the hub."""
    costs: tuple[tuple[str, str, str, str], ...] = ()
    """Rows of a table beside the model that was not quantised: bytes and times."""
    notes: tuple[str, ...] = ()
    """Sentences on what quantising changed."""


def export(
    run: Path | str,
    overrides: Sequence[str] = (),
    *,
    to: str,
    out: Path | str,
    normalise: bool = False,
    whole: bool = False,
    weights: str | None = None,
    push: str | None = None,
    trust: bool = False,
    command: str = "",
) -> Exported:
    """Write what a run shipped as another program loads it, with a model card; its outputs are checked first.

    Args:
        run: A run directory.
        overrides: `model.id=FOLDER`, where the backbone has moved since.
        to: `peft`, `merged`, `gguf`, `ollama`, `vllm`, `sglang` or `onnx`.
        out: Folder to write; it must not exist.
        normalise: Write the adapter as plain LoRA of one rank with scale 1.
        whole: Write one whole model instead of an adapter: `--merge` of the command.
        weights: Precision of a whole model, or of the backbone under an adapter; default bfloat16. For
            ONNX float32 (default), int8 or int4.
        push: Repository OWNER/NAME on the hub to upload it into; nothing is uploaded without one.
        trust: Execute the Python code that the run's config.yaml names.
        command: The command line, for the card.

    Returns:
        Sentences: what was written (`sentence`), its measured `error`, and its `usage`.

    Raises:
        ConfigError: The target would not compute what was trained; nothing is written.

    Examples:
        >>> import workbench
        >>> from pathlib import Path
        >>> exported = workbench.export("runs/short", to="peft", out="adapter")
        >>> exported.sentence
        'Adapter of method lora, as it was trained.'
        >>> (Path("adapter") / "adapter_model.safetensors").exists()
        True
    """
    run, out = Path(run), Path(out)
    if to not in TARGETS:
        raise ConfigError(f"--to {to}: expected {', '.join(TARGETS)}.")
    target = TARGETS[to]
    precision = weights or target.weights[0]
    if precision not in target.weights:
        raise ConfigError(f"--weights {precision}: expected {', '.join(target.weights)} with --to {to}.")
    quantised = precision if precision in QUANTISERS else None
    if normalise and whole:
        raise ConfigError("--normalise writes an adapter and --merge a whole model. Write one of them.")
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another folder, or delete it first.")
    if push is not None:
        card.require_repository_name(push)
    config = run_directory.shipped_config(run, Trust(trust), overrides)
    forms, full = target.forms, isinstance(config.adapter, Full)
    if "whole" not in forms and (whole or full):
        why = "--merge asks for a whole model" if whole else f"{run} is fully trained and has no adapter"
        raise ConfigError(f"--to {to} writes an adapter, and {why}. Write --to merged.")
    if normalise and (full or "adapter" not in forms):
        why = f"{run} is fully trained and has no adapter" if full else f"--to {to} writes a whole model"
        raise ConfigError(f"--normalise rewrites an adapter, and {why}. Leave it out.")
    form: Form = "whole" if whole or full or "adapter" not in forms else ("normalised" if normalise else "trained")
    _require_supported(run, config, to, form)
    if missing := [name for name in target.packages if find_spec(name) is None]:
        raise ConfigError(
            f"--to {to} needs {', '.join(missing)}, not installed here. Write pip install 'peft-workbench[export]'."
        )
    files.require_writable(out)
    source = Source(
        run, config, implementation(config).outputs(run, config), form, "float32" if quantised else precision, quantised
    )
    with files.new_folder(out) as folder:
        written = target.write(source, folder)
        _require_close(source, written.error)
        kept = held_out_losses.read(source.run)
        facts = CardFacts(
            target=to,
            form=_FORMS[source.form](source),
            error=f"Against the run ({written.checked}): {written.error.sentence}",
            usage=written.usage,
            limits=written.limits,
            command=command or f"workbench export {source.run} --to {to}",
            head=source.reference.task.head,
            pictures=source.reference.tokenizer is None,
            intervals={} if kept is None else held_out_losses.intervals(kept),
            quantised=written.costs,
            notes=written.notes,
        )
        values = config.model_dump(mode="json")
        card.write(run, folder, values, facts, out=out)
    pushed = None if push is None else card.push_to_hub(out, push)
    return Exported(
        facts.form, facts.error, written.usage.replace("DIR", str(out)), pushed, written.costs, written.notes
    )


def _require_supported(run: Path, config: RunConfig, to: str, form: Form) -> None:
    """Refuse, before weights are read, what the target could not load, or would load as something else."""
    run_directory.require_read_once(run, config)
    if config.over is not None and config.over.folds and not config.refits:
        merge.require_one_model(run, config)
    head = config.task.head
    unwritten = ("onnx",) if config.task.output is not None else ()
    takes = [name for name, each in TARGETS.items() if head in each.heads and name not in unwritten]
    if to not in takes:
        why = f"does not write recipe {config.recipe}'s models yet"
        if head not in TARGETS[to].heads:
            why = f"takes language models, and {run} is of recipe {config.recipe}"
        raise ConfigError(f"--to {to} {why}. Write --to {' or '.join(takes)}.")
    exported.require_saved(run, config)
    if to not in ("peft", "merged"):
        model = backbones.hub_config(exported.model_under(config, run / "adapter"))
        if model.is_encoder_decoder:
            raise BackboneError(
                f"--to {to}: model.id={config.model.id} is an encoder-decoder, which this target is not written for. "
                "Write --to peft or --to merged."
            )
        if to in ("gguf", "ollama") and find_spec("gguf") is not None:
            from workbench.models.exporting import gguf_files

            gguf_files.require_known_architecture(model)
        if to == "onnx":
            onnx_model.require_writable(model)
    if form == "whole":
        merge.require_one_model(run, config)
        return
    if config.model.sparsity is not None and to not in ("peft", "ollama"):
        raise ConfigError(
            f"--to {to} puts the adapter on {config.model.id} with all its weights, and {run} has "
            f"model.sparsity={config.model.sparsity}. Write --merge."
        )
    adapter = run / "adapter"
    if form == "normalised":
        lora_limits.require_plain(adapter)
    elif to == "peft":
        lora_limits.require_known_to_peft(adapter)
    elif to in export_targets.LIMITS:
        lora_limits.require(adapter, config.adapter, export_targets.LIMITS[to])
    if to == "gguf":
        export_targets.require_base_template(run, config)


def _require_close(source: Source, error: OutputError) -> None:
    """Raise ConfigError where what was written is another model."""
    if isinstance(error, Angle):
        far = error.cosine < (LEAST_COSINE_QUANTISED if source.quantised else LEAST_COSINE)
    elif isinstance(error, Gap) and error.kl is None:
        far = error.same < LEAST_SAME and not source.quantised
    else:
        assert isinstance(error, Gap | Agreement)
        far = error.kl is not None and error.kl > MOST_KL
    if not far:
        return
    weights = source.config.model.weights
    advice = "Write --weights float32." if source.weights != "float32" else "Please report this backbone."
    if source.quantised:
        coarser = list(QUANTISERS)[: list(QUANTISERS).index(source.quantised)]
        advice = f"Write --weights {' or '.join(['float32', *coarser])}."
    elif source.form != "whole" and weights in QUANTISED:
        advice = f"It was trained over {weights} weights, and {MERGE}, with their values."
    raise ConfigError(f"The export computes something else than the run, and is not kept. {error.sentence} {advice}")


_FORMS: dict[Form, Callable[[Source], str]] = {
    "trained": lambda source: f"Adapter of method {source.config.adapter.method}, as it was trained.",
    "normalised": lambda source: f"Adapter of method {source.config.adapter.method}, as plain LoRA with scale 1.",
    "whole": lambda source: merge.added(source.config, source.quantised or source.weights),
}
