"""`workbench serve`: runs by name, LoRA adapters over one backbone in one batch, behind OpenAI's interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from peft import LoraConfig, PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.adapters import ALora, Full
from workbench.adapters.banks import bank
from workbench.adapters.multi_adapter import BARE
from workbench.config import RunConfig
from workbench.config.task_facts import names
from workbench.data.text.chat import ChatEncoder
from workbench.errors import ConfigError
from workbench.evaluation.serving import prompt_router
from workbench.evaluation.serving.app import Server, ServerLimits
from workbench.evaluation.serving.engine import OWN, AdapterRoutes, BankRoutes, Engine, SingleRoutes
from workbench.evaluation.serving.prompt_router import PromptRouter
from workbench.evaluation.serving.scheduler import Scheduler
from workbench.evaluation.serving.served_models import AdapterLoader, ServedModel, TextModel
from workbench.evaluation.serving.training_bank import TrainingBank
from workbench.evaluation.serving.training_server import TrainingLimits, TrainingServer
from workbench.models import backbones, exported, output_heads, picture_processor
from workbench.models.picture_processor import PictureProcessor
from workbench.recipes import load as load_recipe
from workbench.recipes.task import implementation
from workbench.recipes.verbs import generate
from workbench.runs import files, run_directory
from workbench.runs.http_server import LOOPBACK, Address, serve
from workbench.runs.trust import Trust
from workbench.training import capacity

_CONTEXT = 4096
"""Most tokens of a prompt and its answer where a backbone names no limit."""
AUTO = "auto"
"""The name by which requests leave the choice of a member to the router of a fleet."""
_HEADS = ("lm_head", "embed_out", "output")
"""Names of output heads, whose rows a bank does not route."""


@dataclass(frozen=True)
class ServeSettings:
    """Settings of a server."""

    address: Address
    limits: ServerLimits
    rows: int
    """Answers that are written at the same time by one backbone."""
    queue: int
    """Requests or answers that may wait for that."""
    context: int | None
    """Most tokens of a prompt and its answer; None: what the backbone was made for."""
    grace: int
    """Seconds that begun answers have once the server is asked to stop."""


@dataclass(frozen=True)
class NamedRun:
    """A run and the name by which requests ask for it."""

    name: str
    path: Path
    config: RunConfig
    router: PromptRouter | None = field(default=None, compare=False)
    """Of a fleet: chooses among its members, by their names in requests."""

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        created = files.read_json(self.path / "manifest.json").get("created")
        return int(datetime.fromisoformat(created).timestamp()) if isinstance(created, str) else 0


def serve_runs(
    sources: Sequence[str], settings: ServeSettings, *, trust: bool, ready: Callable[[str, Sequence[ServedModel]], None]
) -> None:
    """Serve runs until the process is asked to stop.

    Args:
        sources: Run directories, or NAME=DIRECTORY; `model.id=FOLDER` where their backbone has moved since.
        trust: Execute the Python code that the run directories name.
        ready: Is told the address and the models once they answer.
    """
    if settings.limits.api_key is None and settings.address.host not in (*LOOPBACK, "::1"):
        raise ConfigError(
            f"--host {settings.address.host} lets others in. Set WORKBENCH_API_KEY (or write --api-key), which they "
            "then have to send."
        )
    runs = named(sources, trust=trust)
    with settings.address.bound() as listening:
        loaders: list[AdapterLoader] = []
        models = load(runs, settings, loaders)
        app = Server(models, settings.limits, loaders).app
        serve(app, listening, grace=settings.grace, ready=lambda address: ready(address, models))


def serve_training(
    words: Sequence[str],
    address: Address,
    limits: TrainingLimits,
    *,
    folder: Path,
    rows: int,
    queue: int,
    grace: int,
    ready: Callable[[str, str], None],
) -> None:
    """Train adapters of many clients over one backbone until the process is asked to stop.

    Args:
        words: A backbone's id or folder, and settings of it such as `model.weights=nf4`.
        folder: Where states are saved.
        rows: Answers that are sampled at the same time.
        queue: Answers that may wait for that.
        ready: Is told the address and the model once it answers.
    """
    model, *more = words
    if any(not word.startswith("model.") for word in more) or "=" in model:
        raise ConfigError(
            f"serve --train {' '.join(words)}: name one backbone, then settings such as model.weights=nf4."
        )
    if not limits.api_keys and address.host not in (*LOOPBACK, "::1"):
        raise ConfigError(f"--host {address.host} lets others in. Write --api-key tml-KEY, or several with commas.")
    section = load_recipe.load("sft/quickstart", [f"model.id={model}", *more]).model
    with address.bound() as listening:
        app = TrainingServer(TrainingBank(section, folder=folder, rows=rows, queue=queue), limits).app
        serve(app, listening, grace=grace, ready=lambda where: ready(where, section.id))


def named(sources: Sequence[str], *, trust: bool) -> list[NamedRun]:
    """The runs by name; raises ConfigError where two have the same, or one answers nothing."""
    by_name: dict[str, NamedRun] = {}
    moved = [source for source in sources if source.startswith("model.id=")]
    for source in sources:
        if source in moved:
            continue
        for run, name, router in _with_members(source):
            if name in by_name:
                raise ConfigError(
                    f"{source}: a run is called {name!r} already. Write NAME={source.rpartition('=')[2]}."
                )
            own = Trust(trust)
            config = (
                run_directory.shipped_config(run, own, moved) if router is None else run_directory.read_config(run, own)
            )
            if not config.task.serves:
                raise ConfigError(
                    f"{run}: recipe {config.recipe} is not served. Runs of {names(lambda task: task.serves)} are; "
                    "`workbench evaluate` and `predict` ask the others."
                )
            if _writes_answers(config):
                generate.require_text(config, run)
            by_name[name] = NamedRun(name, run, config, router)
    for each in by_name.values():
        if _writes_answers(each.config) and each.config.model.id in by_name:
            raise ConfigError(f"{each.config.model.id} names a backbone and a run. Write NAME={each.path}.")
    return list(by_name.values())


def _with_members(source: str) -> Iterator[tuple[Path, str, PromptRouter | None]]:
    """A run and its name; of a fleet with a router the members before that."""
    name, given, path = source.rpartition("=")
    run = Path(path)
    if (given and not name) or not run.resolve().name or not path:
        raise ConfigError(f"{source}: expected a run directory, or NAME=DIRECTORY.")
    if not (run / prompt_router.FILE).is_file():
        yield run, name or run.resolve().name, None
        return
    router = PromptRouter.read(run)
    served = [f"{name}{'/' * bool(name)}{member}" for member in router.names]
    yield from ((run / "members" / member, each, None) for member, each in zip(router.names, served, strict=True))
    yield run, name or AUTO, router._replace(names=served)


def _writes_answers(config: RunConfig) -> bool:
    """Whether a run answers texts, in one engine with others over its backbone; its task serves other runs alone."""
    return config.task.writes_text and not config.reads_sound


def load(
    runs: Sequence[NamedRun], settings: ServeSettings, loaders: list[AdapterLoader] | None = None
) -> list[ServedModel]:
    """All models, with one engine for all LoRA adapters over the same backbone, and one for each other adapter.

    Args:
        loaders: Where those go that load more adapters over such a backbone.
    """
    loaders = [] if loaders is None else loaders
    routed = [run for run in runs if run.router is not None]
    texts = [run for run in runs if _writes_answers(run.config) and run not in routed]
    shared: dict[str, list[NamedRun]] = {}
    for run in texts:
        shared.setdefault(_backbone_key(run), []).append(run)
    models: list[ServedModel] = []
    known: set[str] = set()
    for group in sorted(shared.values(), key=len, reverse=True):
        models += _texts(group, settings, loaders, bare=group[0].config.model.id not in known)
        known.add(group[0].config.model.id)
    for run in runs:
        if run not in [*texts, *routed]:
            task = implementation(run.config)
            models.append(task.serve(run.path, run.config, run.name, run.created, queue=settings.queue))
    answering = {model.name: model for model in models if isinstance(model, TextModel)}
    for run in routed:
        assert run.router is not None
        bare = answering[answering[run.router.names[0]].root]
        models.append(replace(bare, name=run.name, created=run.created, router=run.router, members=answering))
    places = {run.name: place for place, run in enumerate(runs)}
    return sorted(models, key=lambda model: places.get(model.name, len(runs)))


def _backbone_key(run: NamedRun) -> str:
    """Runs with the same one go over the same backbone, in one bank."""
    if not _in_bank(run):
        return f"alone {run.name}"
    model = run.config.model
    return model.model_copy(update={"chat_template": None, "dropout": False}).model_dump_json()


def _in_bank(run: NamedRun) -> bool:
    """Whether a run's adapter is LoRA and nothing more, on layers inside the backbone."""
    exported.require_saved(run.path, run.config, "tokenizer.json", "generation_config.json")
    if isinstance(run.config.adapter, Full):
        return False
    config = PeftConfig.from_pretrained(str(run.path / "adapter"))
    if not isinstance(config, LoraConfig) or type(config) is not LoraConfig:
        return False
    more = (
        config.use_dora,
        config.alora_invocation_tokens,
        config.modules_to_save,
        config.trainable_token_indices,
        config.lora_bias,
    )
    targets = config.target_modules if not isinstance(config.target_modules, str) else [config.target_modules]
    heads = {str(target).rsplit(".", 1)[-1] for target in targets or ()} & set(_HEADS)
    return not any(more) and config.bias == "none" and not heads and not config.target_parameters


def _template(run: RunConfig, backbone: PreTrainedModel, words: PreTrainedTokenizerBase) -> ChatEncoder:
    """How conversations with a model are written, pictures of requests included where the engine can show them."""
    found = picture_processor.of(run, backbone.config)
    if isinstance(found, PictureProcessor):
        found = replace(found, forgets=True)
        if not found.embedded:
            name = type(backbone).__name__
            found = f"`workbench serve` shows none to {name}. `workbench generate RUN PROMPT --picture FILE` answers"
    return ChatEncoder(words, processor=found if isinstance(found, str | PictureProcessor) else _BLIND)


_BLIND = "its recipe reads text alone. Serve a run of recipe sft or prefer"


def _texts(
    group: Sequence[NamedRun], settings: ServeSettings, loaders: list[AdapterLoader], *, bare: bool
) -> Iterator[TextModel]:
    """The text models of runs that share a backbone, and the backbone itself if `bare`."""
    first = group[0]
    routes, backbone, members = _banked(group) if _in_bank(first) else _single(first, bare=bare)
    engine = Engine(routes, backbone, output_heads.known(backbone))
    tokens = capacity.available(backbone.device) // 2 // engine.token_bytes
    scheduler = Scheduler(engine, rows=settings.rows, tokens=tokens, queue=settings.queue)
    own: int = getattr(backbone.config.get_text_config(), "max_position_embeddings", None) or _CONTEXT
    context = min(own, settings.context or own, tokens)
    for run, member in zip(group, members, strict=True):
        words, root = exported.load_tokenizer(run.path, run.config), run.config.model.id
        about = (run.name, root, run.created, words, _template(run.config, backbone, words))
        yield TextModel(*about, frozenset(exported.stop_tokens(run.path)), scheduler, member, context)
    if bare and BARE in routes.members:  # as it was before any run: its own template, or the one that training takes
        config = first.config.model.model_copy(update={"new_tokens": (), "chat_template": None})
        words = backbones.tokenizer(config)
        template = _template(first.config, backbone, words)
        about = (config.id, config.id, 0, words, template)
        backbone_model = TextModel(*about, frozenset(template.stops()), scheduler, BARE, context)
        if isinstance(routes, BankRoutes):
            loaders.append(AdapterLoader(routes, engine, backbone_model))
        yield backbone_model


def _banked(group: Sequence[NamedRun]) -> tuple[AdapterRoutes, PreTrainedModel, Sequence[str]]:
    first = group[0]
    backbone = backbones.load(first.config.model, exported.load_tokenizer(first.path, first.config)).model
    adapter_bank = bank.load(backbone, [run.path / "adapter" for run in group])
    return BankRoutes(adapter_bank), backbone, adapter_bank.members


def _single(run: NamedRun, *, bare: bool) -> tuple[AdapterRoutes, PreTrainedModel, Sequence[str]]:
    model = exported.load(run.path, run.config).model
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        raise ConfigError(
            f"{run.path}: {run.config.adapter.method} puts virtual tokens in front of a prompt, which `serve` does "
            "not. `workbench generate` and `predict` answer one after the other."
        )
    if isinstance(run.config.adapter, ALora):
        raise ConfigError(
            f"{run.path}: alora acts from an invocation on, which `serve` does not look for. `workbench generate` and "
            "`predict` do."
        )
    backbone = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(backbone, PreTrainedModel)
    routes: AdapterRoutes = SingleRoutes(model, bare=bare and isinstance(model, PeftModel))
    return routes, backbone, [OWN]
