"""Where a teacher comes from, known before a weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from workbench.adapters import Full
from workbench.config import ModelConfig, RunConfig
from workbench.config.sections.distill_config import BACKBONE, TEACHER, TeacherConfig
from workbench.data.labelled.records import RowReader
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.errors import BackboneError, ConfigError
from workbench.models import backbones, exported, packed_attention, row_readers
from workbench.runs import files, run_directory
from workbench.runs.trust import Trust

_TRUST = "distill.teacher.trust=true"


@dataclass(frozen=True)
class TeacherSource:
    """A teacher: adapters over a backbone, a backbone as it is, or a model that a run trained whole."""

    name: str
    """As the configuration names it."""
    model: ModelConfig
    """The backbone; where a run trained all weights, the folder of what it shipped."""
    adapters: tuple[Path, ...] = ()
    """Folders of adapters over it; several teach together, none: the backbone teaches."""
    run: Path | None = None
    """The run directory, or the first of several."""
    config: RunConfig | None = None
    """Configuration of that run."""
    trusted: Trust = field(default_factory=Trust)
    """Whether the code that its run directories name is executed."""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The teacher's own."""
        if self.run is not None and self.config is not None and self.config.recipe != "crossval":
            return exported.load_tokenizer(self.run, self.config)
        with self.named_in_errors():
            return backbones.tokenizer(self.model)

    def reader(self, config: RunConfig) -> RowReader:
        """Reads labelled rows for the teacher, with the columns of `config` where no run says which."""
        if self.run is not None and self.config is not None and self.config.recipe != "crossval":
            return row_readers.of_run(self.run, self.config)
        with self.named_in_errors():
            return row_readers.of_backbone(config.model_copy(update={"model": self.model}))

    def hub_config(self) -> PretrainedConfig:
        """The backbone's architecture; raises BackboneError where it is not there."""
        with self.named_in_errors():
            return backbones.hub_config(self.model)

    def no_packing(self, *, longest: int) -> str | None:
        """Why the teacher cannot read packed rows, the longest of which has so many tokens; None where it can."""
        for folder in self.adapters:
            method = run_directory.shipped_config(folder.parent, self.trusted).adapter
            if method.facts.no_packing:
                return f"the teacher is {self.name}: with adapter.method={method.method} {method.facts.no_packing}"
        if self.model.attention not in ("auto", "sdpa"):
            return f"the teacher is {self.name}, whose attention is {self.model.attention}, and packed rows need sdpa"
        reason = packed_attention.refusal(self.hub_config(), longest=longest)
        return reason and f"the teacher is {self.name}, and {reason}"

    def template(self, student: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder | MlmEncoder:
        """How the teacher writes rows, with its own chat template."""
        return row_encoder(student, self.hub_config(), tokenizer)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Inside the block, errors of the backbone name the teacher's settings."""
        try:
            yield
        except BackboneError as error:
            if self.name == BACKBONE:
                raise
            if self.run is not None:
                raise BackboneError(f"distill.teacher.id={self.name}, the backbone of this run: {error}") from None
            text = re.sub(r"\bmodel\.(id|revision|weights)\b", r"distill.teacher.\1", str(error))
            raise BackboneError(
                f"distill.teacher: {self.name} is no run directory (no config.yaml), so it is taken as a model. {text}"
            ) from None


def find(teacher: TeacherConfig, student: ModelConfig) -> TeacherSource:
    """The teacher that `teacher.id` names.

    Args:
        student: The student's backbone, as the configuration names it.

    Raises:
        ConfigError: there is none, a run has not ended, or several are not adapters over one backbone.
    """
    if teacher.id is None:
        raise ConfigError("distill.teacher.id: name a teacher. Write a run directory, a folder or a hub id of a model.")
    if teacher.id == BACKBONE:
        if student.id == TEACHER:
            raise ConfigError(
                "distill.teacher.id=backbone and model.id=teacher name each other. Write a model as one of them."
            )
        # Rows of new tokens are the student's: the backbone as it came knows none.
        return TeacherSource(BACKBONE, _stored(student.model_copy(update={"new_tokens": ()}), teacher))
    names = [teacher.id] if isinstance(teacher.id, str) else list(teacher.id)
    sources = [_one(name, teacher) for name in names]
    return sources[0] if len(sources) == 1 else _together(names, sources)


def _one(name: str, teacher: TeacherConfig) -> TeacherSource:
    path = Path(name).expanduser()
    if not (path / "config.yaml").is_file():
        if (path / "adapter_config.json").is_file():
            raise ConfigError(
                f"distill.teacher.id={name} is an adapter without its run. Write the run directory that it stands in."
            )
        return TeacherSource(name, _stored(ModelConfig(id=name, revision=teacher.revision), teacher))
    if teacher.revision is not None:
        raise ConfigError(
            f"distill.teacher.revision={teacher.revision} names a branch, tag or commit on the hub, but {name} is a "
            "run directory. Leave it out."
        )
    trusted = Trust(teacher.trust, _TRUST)
    config = run_directory.shipped_config(path, trusted)
    if config.recipe == "crossval":
        if not (path / "decision.json").exists():
            raise ConfigError(
                f"distill.teacher.id={name}: the cross-validation has not ended. Finish it first: workbench run ... "
                f"--out {name} --resume"
            )
        from workbench.crossval import fold_adapters  # and all that folds need, which few teachers are

        decided = files.read_json(path / "decision.json")
        folders = [
            path / fold_adapters.round_folder(decided["round"]) / member / "adapter" for member in decided["members"]
        ]
        return TeacherSource(name, _stored(config.model, teacher), tuple(folders), path, config, trusted)
    exported.require_saved(path, config, row_readers.file(config))
    if isinstance(config.adapter, Full):
        whole = config.model.model_copy(update={"id": str((path / "adapter").resolve()), "revision": None})
        return TeacherSource(name, _stored(whole, teacher), (), path, config, trusted)
    return TeacherSource(name, _stored(config.model, teacher), (path / "adapter",), path, config, trusted)


def _together(names: Sequence[str], sources: Sequence[TeacherSource]) -> TeacherSource:
    """Several runs as one teacher."""
    first = sources[0]
    if len(first.adapters) != 1:
        raise ConfigError(
            f"distill.teacher.id: {names[0]} is no run that trained one adapter, as each of several teachers must be. "
            "Name one teacher, or such runs."
        )
    for name, each in zip(names, sources, strict=True):
        if len(each.adapters) != 1 or each.model != first.model or _recipe(each) != _recipe(first):
            raise ConfigError(
                f"distill.teacher.id: {name} is no single adapter over {first.model.id} as {names[0]} is. Several "
                "teachers are adapters of one recipe over one backbone that is stored alike; name one teacher, or such "
                "runs."
            )
    folders = tuple(each.adapters[0] for each in sources)
    return TeacherSource(", ".join(names), first.model, folders, first.run, first.config, first.trusted)


def _recipe(source: TeacherSource) -> str | None:
    return None if source.config is None else source.config.recipe


def _stored(model: ModelConfig, teacher: TeacherConfig) -> ModelConfig:
    return model if teacher.weights is None else model.model_copy(update={"weights": teacher.weights})
