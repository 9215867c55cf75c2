"""Where a teacher comes from, and whether its tokens compare with the student's: known before its weights are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from workbench.adapters import Full
from workbench.config import DataConfig, ModelConfig, RunConfig
from workbench.config.sections.distill_config import BACKBONE, TEACHER, DistillConfig, TeacherConfig
from workbench.data.batching import evenly_spaced
from workbench.data.labelled.records import RowReader
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.media import MediaProcessor
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import BackboneError, ConfigError, DataError
from workbench.models import attention_backend, backbones, classifier, exported, picture_processor
from workbench.models.picture_processor import PictureProcessor
from workbench.models.sound_processor import FeatureProcessor
from workbench.runs import provenance, run_directory
from workbench.runs.resume_command import finish
from workbench.runs.trust import Trust

ROWS, RENDERED = 1000, 8
"""Training rows whose tokens are looked up in the teacher's vocabulary, and those that its template writes again."""
AROUND = 8  # tokens that are shown on either side of a difference


@dataclass(frozen=True)
class TeacherSource:
    """A teacher: adapters over a backbone, a backbone as it is, or a model that a run trained whole."""

    name: str  # as the configuration names it
    model: ModelConfig  # the backbone; where a run trained all weights, the folder of what it shipped
    adapters: tuple[Path, ...] = ()  # folders of adapters over it; several teach together, none: the backbone teaches
    run: Path | None = None  # the run directory, or the first of several
    config: RunConfig | None = None  # configuration of that run
    trusted: Trust = field(default_factory=Trust)  # whether the code that its run directories name is executed
    parts: tuple[TeacherSource, ...] = ()  # whose mean it is, where backbones differ; the first is also described above

    @property
    def each(self) -> tuple[TeacherSource, ...]:
        """One after another, those that need a backbone of their own."""
        return self.parts or (self,)

    @property
    def models(self) -> int:
        """Models that teach together."""
        return sum(max(1, len(each.adapters)) for each in self.each)

    @property
    def runs(self) -> list[Path]:
        """Run directories that trained it; those of a cross-validation's members are parts of one."""
        if self.run is None or self.config is None:
            return []
        several = not self.config.crossvalidates and self.adapters
        return [adapter.parent for adapter in self.adapters] if several else [self.run]

    @property
    def facts(self) -> dict[str, Any]:
        """Its name, and how weights are stored, for the manifest."""
        stored = dict.fromkeys(backbones.stored_weights(each.model) for each in self.each)
        return {"teacher": self.name, "weights": ", ".join(stored)}

    @property
    def files(self) -> dict[str, str]:
        """Digests of all files that what it says depends on."""
        if self.parts:
            return {path: digest for each in self.parts for path, digest in each.files.items()}
        file_digests = backbones.file_digests(self.model)
        for adapter in self.adapters:
            file_digests |= provenance.digests(adapter, title=str(adapter))
        names = ("config.yaml", "decision.json", "neighbours.safetensors", "out_of_fold.parquet")
        for path in () if self.run is None else map(self.run.joinpath, names):
            file_digests |= {str(path): provenance.digest(path)} if path.is_file() else {}
        return file_digests

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The teacher's own."""
        if self.run is not None and self.config is not None and not self.config.crossvalidates:
            return exported.load_tokenizer(self.run, self.config)
        with self.named_in_errors():
            return backbones.tokenizer(self.model)

    def reader(self, config: RunConfig) -> RowReader:
        """Reads labelled rows for the teacher, with the columns of `config` where no run says which."""
        if self.run is not None and self.config is not None and not self.config.crossvalidates:
            return classifier.reader_of_run(self.run, self.config)
        with self.named_in_errors():
            return classifier.reader_of_backbone(config.model_copy(update={"model": self.model}))

    def hub_config(self) -> PretrainedConfig:
        """The backbone's architecture; raises BackboneError where it is not there."""
        with self.named_in_errors():
            return backbones.hub_config(self.model)

    def config_of(self, run: Path) -> RunConfig:
        """The configuration of one of its runs, the backbone stored as `distill.teacher` asks."""
        own = run == self.run and self.config is not None
        run_config = self.config if own else run_directory.shipped_config(run, self.trusted)
        assert run_config is not None
        return run_config.model_copy(update={"model": self.model})

    def no_packing(self, *, longest: int) -> str | None:
        """Why the teacher cannot read packed rows of up to `longest` tokens; None where it can."""
        if self.parts:
            return next((reason for each in self.parts if (reason := each.no_packing(longest=longest))), None)
        for folder in self.adapters:
            method = run_directory.shipped_config(folder.parent, self.trusted).adapter
            if method.facts.no_packing:
                return f"the teacher is {self.name}: with adapter.method={method.method} {method.facts.no_packing}"
        if self.model.attention not in ("auto", "sdpa"):
            return f"the teacher is {self.name}, whose attention is {self.model.attention}, and packed rows need sdpa"
        reason = attention_backend.packing_refusal(self.hub_config(), longest=longest)
        return reason and f"the teacher is {self.name}, and {reason}"

    def template(self, student: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder | MlmEncoder:
        """Encoder of rows with the teacher's own chat template."""
        return row_encoder(student, self.hub_config(), tokenizer, processor=self.eyes(student))

    def eyes(self, student: RunConfig) -> PictureProcessor | str | None:
        """What reads pictures for the teacher; or why it reads none; None where the task has none."""
        found = picture_processor.of(student.model_copy(update={"model": self.model}), self.hub_config())
        assert not isinstance(found, FeatureProcessor), "checks refuse recordings"
        return found

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
    """The teacher that `teacher.id` names. Raises ConfigError: there is none, or a run has not ended. `student`: the
    student's backbone, as the configuration names it."""
    if teacher.id is None:
        raise ConfigError("distill.teacher.id: name a teacher. Write a run directory, a folder or a hub id of a model.")
    if teacher.id == BACKBONE:
        if student.id == TEACHER:
            raise ConfigError(
                "distill.teacher.id=backbone and model.id=teacher name each other. Write a model as one of them."
            )
        # Rows of new tokens are the student's: the backbone as it came knows none.
        return TeacherSource(BACKBONE, _stored(student.model_copy(update={"new_tokens": ()}), teacher, student))
    names = [teacher.id] if isinstance(teacher.id, str) else list(teacher.id)
    sources = [_one(name, teacher, student) for name in names]
    return sources[0] if len(sources) == 1 else _together(names, sources)


def _one(name: str, teacher: TeacherConfig, student: ModelConfig) -> TeacherSource:
    path = Path(name).expanduser()
    if not (path / "config.yaml").is_file():
        if cure := run_directory.instead(path):
            raise ConfigError(f"distill.teacher.id={name} is no run directory.{cure}")
        if path.parts[:1] == ("runs",) and not path.exists():
            recipe = path.name.replace("-", "/", 1)  # of which a run without --out has this name
            shipped = resources.files("workbench").joinpath(f"recipes/configs/{recipe}.yaml").is_file()
            how = f"`workbench run {recipe}`" if shipped else "the command in the first lines of a shipped recipe"
            raise ConfigError(
                f"distill.teacher.id={name}: there is no such run. Train it first, by {how}, or write another run, a "
                "folder, or a hub id."
            )
        plain = ModelConfig(id=name, revision=teacher.revision, attention=student.attention)
        return TeacherSource(name, _stored(plain, teacher, student))
    if teacher.revision is not None:
        raise ConfigError(
            f"distill.teacher.revision={teacher.revision} names a branch, tag or commit on the hub, but {name} is a "
            "run directory. Leave it out."
        )
    trusted = Trust(teacher.trust, "distill.teacher.trust=true")
    config = run_directory.shipped_config(path, trusted)
    if config.crossvalidates:
        if not (path / "decision.json").exists():
            raise ConfigError(
                f"distill.teacher.id={name}: the cross-validation has not ended. Finish it first: {finish(path)}"
            )
        from workbench.crossval import prediction  # and all that folds need, which few teachers are

        folders = prediction.adapter_folders(path)
        return TeacherSource(name, _stored(config.model, teacher, student), tuple(folders), path, config, trusted)
    exported.require_saved(path, config, classifier.reader_file(config))
    if isinstance(config.adapter, Full):
        whole = config.model.model_copy(update={"id": str((path / "adapter").resolve()), "revision": None})
        return TeacherSource(name, _stored(whole, teacher, student), (), path, config, trusted)
    return TeacherSource(name, _stored(config.model, teacher, student), (path / "adapter",), path, config, trusted)


def _together(names: Sequence[str], sources: Sequence[TeacherSource]) -> TeacherSource:
    """Several as one teacher: adapters over one backbone share it, others have each their own."""
    first, name = sources[0], ", ".join(names)
    for each in sources:
        if each.config is not None and each.config.crossvalidates:
            raise ConfigError(
                f"distill.teacher.id: {each.name} is a cross-validation, whose adapters teach together already. "
                "Name it alone, or runs of one model each."
            )
    shared = all(
        len(each.adapters) == 1 and each.model == first.model and _recipe(each) == _recipe(first) for each in sources
    )
    if shared:
        return replace(first, name=name, adapters=tuple(each.adapters[0] for each in sources))
    return replace(first, name=name, parts=tuple(sources))


def _recipe(source: TeacherSource) -> str | None:
    return None if source.config is None else source.config.recipe


def _stored(model: ModelConfig, teacher: TeacherConfig, student: ModelConfig) -> ModelConfig:
    """The model as `distill.teacher.weights` stores it; null: as the student, but quantised where it was trained so."""
    if teacher.weights is not None:
        return model.model_copy(update={"weights": teacher.weights})
    if model.weights in backbones.QUANTISED or (student.weights, student.compute) == ("auto", "auto"):
        return model
    return model.model_copy(update={"weights": student.weights, "compute": student.compute})


def require_comparable(
    config: DistillConfig,
    source: TeacherSource,
    student: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatEncoder | MlmEncoder,
    train: TokenizedSet,
) -> None:
    """Refuse a teacher that predicts other things than the student, in other tokens, or from other renderings of a row.
    Raises ConfigError: it does; the message shows where, and what to write instead.

    Args:
        student: The student as a plain run.
        tokenizer: The student's.
        template: How the student's rows are written.
        train: Those rows.
    """
    name = f"distill.teacher.id={source.name}"
    single = "distill.match" if config.match else f"distill.loss={config.loss}" if config.across else None
    if single and source.models > 1:
        raise ConfigError(
            f"{name}: {single} compares with one teacher, and these are {source.models} models. Name one of them, or "
            f"leave {single} out."
        )
    for each in source.parts:
        require_comparable(config, each, student, tokenizer, template, train)
    if source.parts:
        return
    if source.config is not None and source.config.task != student.task:
        raise ConfigError(
            f"{name}: its run is of recipe={source.config.recipe}, and the student's is of={student.task.name}. "
            "Name a teacher that was trained for the same, or change `of`."
        )
    teacher, pupil = source.hub_config(), backbones.hub_config(student.model)
    if teacher.is_encoder_decoder != pupil.is_encoder_decoder:
        kinds = ["reads and writes in one sequence", "has a decoder beside its encoder"]
        raise ConfigError(
            f"{name}: {type(teacher).__name__} {kinds[teacher.is_encoder_decoder]}, and the student, "
            f"{type(pupil).__name__}, {kinds[pupil.is_encoder_decoder]}: they do not read the same rows. Name a "
            "teacher of the student's kind."
        )
    if train.pictured and isinstance(source.eyes(student), str):
        raise ConfigError(f"{name}: it reads text alone, and rows here have pictures. Name a teacher that sees.")
    if config.across:
        return
    own = source.tokenizer()
    # Heads may be larger than a vocabulary, and a vocabulary may go on after the other ends, where no row is.
    mine, theirs = ({number: token for token, number in each.get_vocab().items()} for each in (tokenizer, own))
    sizes = f"the student's tokenizer has {len(tokenizer)} tokens, the teacher's {len(own)}"
    cure = (
        "Write distill.loss=gold, which compares models of different vocabularies, or name a teacher with the "
        "student's tokenizer."
    ) + (" Or leave model.new_tokens out." if student.model.new_tokens else "")
    different = next((number for number in sorted(mine) if theirs.get(number, mine[number]) != mine[number]), None)
    if different is not None:
        raise ConfigError(
            f"{name}: {sizes}, and token {different} is {mine[different]!r} to the one and {theirs[different]!r} to "
            f"the other, so that their probabilities are not of the same things. {cure}"
        )
    for index in evenly_spaced(len(train), ROWS):
        for number in train[int(index)].input_ids:
            if int(number) not in theirs:
                raise ConfigError(
                    f"{name}: {sizes}, and it does not know {mine.get(int(number))!r} (token {number}), which "
                    f"{train.place(int(index))} holds. {cure}"
                )
    if train.chat and isinstance(template, ChatEncoder) and own.chat_template is not None:
        chats = source.template(student, own)
        assert isinstance(chats, ChatEncoder), "only recipe mlm masks, and its rows are no chat"
        if train.pictured:
            _require_same_pictures(name, template.processor, chats.processor)
        _require_same_rendering(name, source, student.data, (template, tokenizer), (chats, own))


def _require_same_pictures(name: str, mine: MediaProcessor | None, theirs: MediaProcessor | None) -> None:
    """Refuse a teacher that reads other numbers in a picture than the student does."""
    cure = "Name a teacher with the student's image processor, or write distill.loss=gold, for which each has its own."
    assert isinstance(mine, PictureProcessor) and isinstance(theirs, PictureProcessor), "both have read rows"
    own, others = (each.processor.image_processor.to_dict() for each in (mine, theirs))
    for key in sorted(own.keys() | others.keys()):
        if own.get(key) != others.get(key):
            raise ConfigError(
                f"{name}: {key} of its image processor is {others.get(key)}, and that of the student's {own.get(key)}, "
                f"so that they see other numbers in a picture. {cure}"
            )


def _require_same_rendering(
    name: str,
    source: TeacherSource,
    data: DataConfig,
    mine: tuple[ChatEncoder, PreTrainedTokenizerBase],
    theirs: tuple[ChatEncoder, PreTrainedTokenizerBase],
) -> None:
    # The setting that gives the student its teacher's template.
    saved = None if source.run is None else source.run / "adapter" / "chat_template.jinja"
    words = f" model.new_tokens='[{', '.join(source.model.new_tokens)}]'" if source.model.new_tokens else ""
    cure = f"Write the teacher's into a file, and name it to the student: model.chat_template=FILE{words}"
    if saved is not None and saved.is_file():
        cure = f"Give the student the teacher's: model.chat_template={saved}{words}"
    for example in tokenized.first_examples(data, RENDERED):
        try:
            wanted = mine[0].encode(example, loss_on=data.loss_on).input_ids
        except DataError:
            continue  # the row was left out when the data were read
        try:
            found = theirs[0].encode(example, loss_on=data.loss_on).input_ids
        except DataError as error:
            raise ConfigError(f"{name}: its chat template refuses a row. {error}\n  {cure}") from None
        if wanted == found:
            continue
        pairs = enumerate(zip(wanted, found, strict=False))
        first = next((place for place, (a, b) in pairs if a != b), min(len(wanted), len(found)))
        around = slice(max(0, first - AROUND), first + AROUND)
        raise ConfigError(
            f"{name}: its chat template writes rows otherwise than the student's, so that it would be asked about "
            f"texts that it has not learnt to go on from. {example.place}, from token {first} on:\n"
            f"  student: ... {mine[1].decode(wanted[around])!r}\n"
            f"  teacher: ... {theirs[1].decode(found[around])!r}\n"
            f"  {cure}"
        )
