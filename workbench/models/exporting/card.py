"""The model card of an export (content, data, scores, limits, licences, origin), and the upload to the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from workbench.config.yaml_text import dump_yaml, load_yaml
from workbench.data import starter
from workbench.errors import ConfigError, FileError, WorkbenchError
from workbench.runs import cost_table, draft_table, files, score_files, units

UNKNOWN = "unknown"
LIBRARIES = {"peft": "peft", "gguf": "gguf", "ollama": "gguf", "onnx": "onnx"}
"""Libraries by which the hub loads what a target writes; transformers for the others."""
PIPELINES = {"text": "text-generation", "masked": "fill-mask", "classes": "text-classification",
             "tokens": "token-classification", "hidden": "sentence-similarity"}  # fmt: skip
_OF_MEDIA = {"image": "image-classification", "audio": "audio-classification"}
QUANTISED_COLUMNS = ("", "float32", "quantised", "gain")
_ENDS = ("low", "high")


@dataclass(frozen=True)
class CardFacts:
    """Facts of a card that the run directory does not hold."""

    target: str
    form: str
    """Sentence on what was written."""
    error: str
    """Sentence on the measured error."""
    usage: str
    limits: Sequence[str]
    command: str
    """The command line that wrote the export."""
    head: str
    """Head of the model: text, masked, classes or hidden."""
    pictures: bool
    """Whether it reads pictures."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """95 % intervals of scores after training whose bounds do not stand in scores.json."""
    quantised: Sequence[tuple[str, str, str, str]] = ()
    """Costs beside the model that was not quantised: title, plain, quantised, gain."""
    notes: Sequence[str] = ()
    """Sentences on what quantising changed."""


def write(run: Path, folder: Path, values: Mapping[str, Any], facts: CardFacts, *, out: Path) -> None:
    """Write `folder`/README.md. `values`: the run's configuration. `out`: the name that `folder` gets in the end."""
    manifest, scores = files.read_json(run / "manifest.json"), files.read_json(run / "scores.json")
    model, data = values["model"]["id"], manifest.get("data") or {}
    splits = {name: each for name, each in data.items() if isinstance(each, Mapping) and "source" in each}
    sources = dict.fromkeys(str(each["source"]) for each in splits.values())
    licences = [
        f"Base model `{model}`: {licence(model)}",
        *(f"Data `{each}`: {licence(each)}" for each in sources),
    ]
    rows = [
        f"| {name} | `{each['source']}` | {each.get('rows', '')} | `{each.get('fingerprint', '')}` |\n"
        for name, each in splits.items()
    ]
    limits = [*facts.limits, "Scores are of the rows above; nothing says what it does on others."]
    if manifest.get("status") not in (None, "done"):
        limits.append(f"The run is {manifest['status']}.")
    known = manifest.get("versions") or {}
    named = ("peft-workbench", "torch", "transformers", "peft")
    versions = ", ".join(f"{name} {known[name]}" for name in named if name in known) or "versions unknown"
    language = "python" if "import " in facts.usage else "sh"
    parts = [
        f"---\n{dump_yaml(_front_matter(values, scores, facts))}---\n",
        f"# {run.resolve().name}\n",
        f"{facts.form} Base model: `{model}`. {facts.error}\n",
        f"```{language}\n{facts.usage.replace('DIR', str(out))}\n```\n",
        f"## Data\n\n| split | source | rows | fingerprint |\n|---|---|---|---|\n{''.join(rows)}",
        f"## Scores\n\n{_scores(scores, facts.intervals)}",
        *_costs(scores.get(score_files.COSTS)),
        *_quantised(facts),
        *_drafts(scores.get(score_files.DRAFTS)),
        *_tasks(scores.get(score_files.TASKS) or {}),
        *_win_rates(score_files.read_win_rates(run)),
        f"## Limits\n\n{_listed(limits)}",
        f"## Licences\n\n{_listed(licences)}",
        f"## How it was made\n\n```\n{facts.command}\n```\n",
        f"Training: recipe `{values['recipe']}`, {versions}. Its configuration, for `workbench run`:\n",
        f"```yaml\n{dump_yaml(dict(values)).rstrip()}\n```\n",
    ]
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")


def licence(place: str) -> str:
    """Licence of a model or of data, as the README.md or a licence file beside it says; `unknown` where none does."""
    path = Path(starter.resolve(place)).expanduser()
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        return UNKNOWN
    if licence_id := _card_fields(folder).get("license"):
        return str(licence_id)
    names = sorted(each.name for each in folder.glob("LICEN[SC]E*"))
    return f"see {names[0]} beside it" if names else UNKNOWN


def _card_fields(folder: Path) -> dict[str, Any]:
    """Front matter of the README.md in a folder; empty where there is none that can be read."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not text.startswith("---\n"):
        return {}
    try:
        fields = load_yaml(text[4:].partition("\n---")[0])
    except (YAMLError, WorkbenchError):  # somebody else's file, of which nothing is needed
        return {}
    return fields if isinstance(fields, dict) else {}


def _front_matter(values: Mapping[str, Any], scores: Mapping[str, Any], facts: CardFacts) -> dict[str, Any]:
    model = values["model"]["id"]
    front_matter: dict[str, Any] = {
        "library_name": LIBRARIES.get(facts.target, "transformers"),
        "pipeline_tag": _OF_MEDIA.get(values["data"].get("format", "")) or PIPELINES[facts.head],
        "tags": ["peft-workbench", values["recipe"], str(values["adapter"]["method"])],
    }
    if model.count("/") == 1 and not Path(starter.resolve(model)).expanduser().exists():  # on the hub
        front_matter = {"base_model": model, **front_matter}
    known = licence(model)
    if known != UNKNOWN and not known.startswith("see "):
        front_matter["license"] = known
    if metrics := _metrics(scores):
        front_matter["metrics"] = metrics
    return front_matter


def _metrics(scores: Mapping[str, Any]) -> list[str]:
    after = scores.get("after")
    names = after if isinstance(after, Mapping) else {}
    return sorted(name for name in names if not score_files.is_bound(name))


def _listed(sentences: Sequence[str]) -> str:
    return "".join(f"- {each}\n" for each in sentences)


def _scores(scores: Mapping[str, Any], intervals: Mapping[str, tuple[float, float]]) -> str:
    bounds = {f"{name}_{end}": each for name, both in intervals.items() for end, each in zip(_ENDS, both, strict=True)}
    before, after = scores.get("before") or {}, {**bounds, **(scores.get("after") or {})}
    if not scores.get("after"):
        return "The run has no scores.\n"
    rows = [f"| {name} | {_score(before, name)} | {_score(after, name)} |\n" for name in _metrics(scores)]
    head = "On rows that were not trained on; in brackets 95 % intervals.\n\n"
    return "".join([head, "| score | before | after |\n|---|---|---|\n", *rows])


def _score(scores: Mapping[str, Any], name: str) -> str:
    value = scores.get(name)
    if not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    low, high = (scores.get(f"{name}_{end}") for end in _ENDS)
    text = units.number(float(value))
    return text if low is None or high is None else f"{text} ({units.number(low)} to {units.number(high)})"


def _tasks(asked: Mapping[str, Any]) -> list[str]:
    """The section on tasks of lm-eval; none where the run was asked none."""
    if not asked:
        return []
    rows = [
        f"| {row['task']} | {row['metric']} | {'' if row['documents'] is None else row['documents']} | "
        f"{row['before']:.4f} | {row['after']:.4f} | {_difference(row)} |\n"
        for row in asked["rows"]
    ]
    limit = f" The first {asked['limit']:,} documents of each." if asked["limit"] else ""
    head = f"The same documents before and after; in brackets the 95 % interval of their mean difference.{limit}\n\n"
    columns = "| task | metric | documents | before | after | difference |\n|---|---|---|---|---|---|\n"
    return ["".join(["## Tasks of lm-eval\n\n", head, columns, *rows])]


def _costs(costs: Mapping[str, Any] | None) -> list[str]:
    """The section on what a student costs; none of another run."""
    if (found := cost_table.read(costs)) is None:
        return []
    lines = [cost_table.COLUMNS, ("---",) * 4, *found.rows]
    return ["".join(["## Costs\n\n", found.note, "\n\n", *(f"| {' | '.join(each)} |\n" for each in lines)])]


def _drafts(drafts: Mapping[str, Any] | None) -> list[str]:
    """The section on how a student drafts for its teacher; none of another run."""
    if (found := draft_table.read(drafts)) is None:
        return []
    lines = [draft_table.COLUMNS, ("---",) * 4, *found.rows]
    return ["".join(["## Drafts\n\n", found.note, "\n\n", *(f"| {' | '.join(each)} |\n" for each in lines)])]


def _quantised(facts: CardFacts) -> list[str]:
    """The section on what quantising saved and changed; none where nothing was quantised."""
    if not facts.quantised:
        return []
    lines = [QUANTISED_COLUMNS, ("---",) * 4, *facts.quantised]
    table = "".join(f"| {' | '.join(each)} |\n" for each in lines)
    return [f"## Quantised\n\n{' '.join(facts.notes)}\n\n{table}"]


def _win_rates(contests: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section on other runs that this one was compared with; none where it was compared with none."""
    if not contests:
        return []
    rows = [
        f"| `{each['against']}` | {each['by']} | {each['count']:,} of {', '.join(each['prompts'])} | "
        f"{_score(each, 'win_rate')} | {units.number(float(each['ties']))} |\n"
        for each in contests
    ]
    head = "Share of prompts whose answer is better, a tie counting half; in brackets its 95 % interval.\n\n"
    columns = "| against | by | prompts | wins | ties |\n|---|---|---|---|---|\n"
    return ["".join(["## Win rates\n\n", head, columns, *rows])]


def _difference(row: Mapping[str, Any]) -> str:
    bounds = "" if row["low"] is None else f" ({row['low']:+.4f} to {row['high']:+.4f})"
    return f"{row['difference']:+.4f}{bounds}"


def require_repository_name(repository: str) -> None:
    """Raise ConfigError where the hub could have no repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError("an owner and a name are needed")
    except HFValidationError as error:
        raise ConfigError(
            f"--push {repository}: no name of a repository ({error}). Write OWNER/NAME, such as me/my-model."
        ) from None


def push_to_hub(folder: Path, repository: str) -> str:
    """Upload a folder into a repository, which is made private where it is new; returns its address. Raises FileError:
    the hub cannot be reached or refuses. The folder stays as it is."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export of peft-workbench")
    except Exception as error:  # of the hub's client and whichever library it asks: nothing was pushed
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileError(
            f"--push {repository}: nothing was pushed ({first[:200]}). The finished export is kept at {folder}; "
            f"upload it later with `hf auth login` and `hf upload {repository} {folder}`."
        ) from error
    return str(address)
