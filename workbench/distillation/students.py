"""The student's backbone where it is made of another one: with fewer layers, fresh weights, or those of the teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.backbone_utils import BackboneConfigMixin

from workbench import adapters
from workbench.adapters import Method, anatomy, stock
from workbench.config import ModelConfig, RunConfig, model_heads
from workbench.config.expansions.distill_expansion import makes_student
from workbench.config.model_heads import ModelHead
from workbench.config.sections.distill_config import TEACHER, StudentConfig
from workbench.data.batching import Examples
from workbench.data.images.picture_reader import PROCESSOR
from workbench.data.tagged_rows import TagSet
from workbench.distillation import layer_importance, student_width
from workbench.distillation.layer_importance import Layers
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError
from workbench.models import backbones, classifier
from workbench.models.backbones import DTYPES
from workbench.runs import files
from workbench.runs.ranks import ALONE
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback


@dataclass(frozen=True)
class _Origin:
    """The model that a student is made of."""

    name: str
    model: ModelConfig  # stored and computed in the checkpoint's own precision
    tokenizer: PreTrainedTokenizerBase | None  # None where it reads pictures
    task: ModelHead
    headed: bool = True  # whether the checkpoint has the head of `task`
    adapter: Path | None = None  # folder of a teacher's adapter, which is merged first
    method: Method | None = None  # method of that adapter

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the checkpoint, and so of the student."""
        return DTYPES[self.model.weights]


def make(
    config: RunConfig,
    source: TeacherSource | None,
    folder: Path,
    *,
    weights: bool,
    rows: Examples | None = None,
    callback: Callback | None = None,
    run: Run | None = None,
) -> None:
    """Write the stock model and the tokenizer that a student starts from into `folder`, atomically.

    Nothing is done where the student is not to be made, or is there already. `model.new_tokens` are left to whoever
    loads the folder. Raises ConfigError: the teacher is no single model, or there are no such layers, or none that
    could be left out; BackboneError: the other backbone cannot be loaded.

    Args:
        config: Of recipe distill.
        source: The teacher, which `model.id=teacher` asks for.
        weights: False writes config and tokenizer alone, without reading or making weights.
        rows: Training rows, by which the important layers are found where the student has these; config.json is that of
            as many others before.
        run: Is told which layers were important. The first of its processes writes, and the others wait.
    """
    ranks = ALONE if run is None else run.ranks
    done = (folder / ("model.safetensors" if weights else "config.json")).is_file()
    if ranks.first and makes_student(config) and not done:
        student = config.distill.student
        origin = _of_teacher(config, source) if config.model.id == TEACHER else _of_backbone(config, config.model)
        if callback is not None:
            callback.say(f"Making the student's backbone of {origin.name} ...")
        # On the skeleton first: layers that are not there are refused before a weight is read.
        model = backbones.skeleton(origin.model, task=origin.task)
        if origin.tokenizer is not None:  # with a vocabulary that holds the tokenizer's
            embedding = model.get_input_embeddings()
            assert isinstance(embedding, nn.Embedding)
            if len(origin.tokenizer) > embedding.num_embeddings:
                model.config.get_text_config().vocab_size = len(origin.tokenizer)
                model = _rebuilt(model)
        _keep_layers(model, student)
        if student.narrower:
            model = student_width.plan(model, student).skeleton
        if weights and student.weights == "random":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)  # the initial values of its family
                model = origin.task.auto_class(model.config).from_config(
                    model.config, dtype=origin.dtype, trust_remote_code=origin.model.trust_remote_code
                )
        elif weights:
            if origin.adapter is None:
                model = backbones.load(origin.model, origin.tokenizer, task=origin.task).model
            else:  # merged in float32
                assert origin.method is not None
                precise = origin.model.model_copy(update={"weights": "float32", "compute": "float32"})
                backbone = backbones.load(precise, origin.tokenizer, task=origin.task).model
                model = adapters.merge(adapters.load(backbone, origin.adapter), origin.method)
                model.to(origin.dtype)  # type: ignore[arg-type]
            important, facts = None, dict[str, Any]()
            if student.by_importance:
                assert rows is not None, "whoever asks for weights has rows"
                found = _important_layers(model, student, rows)
                important = [each.kept for each in found]
                facts = {"layers": important, "changes": [each.changes for each in found]}
                if callback is not None:
                    callback.say(f"Layers that it keeps: {'; '.join(', '.join(map(str, each)) for each in important)}.")
            _keep_layers(model, student, important)
            if student.narrower:
                assert rows is not None, "whoever asks for weights has rows"
                model, kept_by_layer = student_width.narrowed(model, student, student_width.rows_to_read(rows))
                facts = {**facts, **kept_by_layer}
            if run is not None and facts:
                run.note(student=facts)
        # Without a head of its own, what the recipe puts its fresh head on: BERT's body with its pooler.
        kept: Any = model if origin.headed else model.base_model
        with files.new_folder(folder) as aside:
            if weights:
                stock.save(kept, aside)
            else:
                kept.config.architectures = [type(kept).__name__]
                kept.config.dtype = origin.dtype
                kept.config.to_json_file(aside / "config.json")
            if origin.tokenizer is not None:
                origin.tokenizer.save_pretrained(aside)
                backbones.save_processors(origin.model, aside)
            elif processor := classifier.processor(origin.model):
                files.write_json(aside / PROCESSOR, processor)
    ranks.wait()


_WITH_CLASSES = {
    "classes": ("ForSequenceClassification", "ForImageClassification"),
    "tokens": ("ForTokenClassification",),
}
"""How architectures are called whose checkpoints have a classification head, of rows or of tokens."""


def _of_backbone(config: RunConfig, model: ModelConfig) -> _Origin:
    hub = backbones.hub_config(model)
    stored = str(hub.dtype or torch.float32).removeprefix("torch.")
    precision = stored if stored in DTYPES else "float32"
    plain = model.model_copy(update={"weights": precision, "compute": precision, "new_tokens": ()})
    endings = _WITH_CLASSES.get(config.task.head)
    task = model_heads.of(config) if endings is None else ModelHead(config.task.head, seed=config.seed)
    headed = endings is None or any(name.endswith(endings) for name in hub.architectures or ())
    tokenizer = None if config.media else backbones.tokenizer(plain)
    return _Origin(model.id, plain, tokenizer, task, headed)


def _of_teacher(config: RunConfig, source: TeacherSource | None) -> _Origin:
    assert source is not None, "model.id=teacher is refused where no teacher is named"
    if config.distill.student.weights == "pretrained":
        what = "the first one" if source.parts else "the teacher's backbone"
        cure = f"Write model.id={source.model.id}, {what}."
        if source.models > 1:
            raise ConfigError(
                f"model.id=teacher: {source.name} is {source.models} models that teach together, and a student is made "
                f"of one. {cure}"
            )
        if source.adapters and source.config is not None and (reason := source.config.adapter.facts.no_merge):
            raise ConfigError(
                f"model.id=teacher: {source.name} was trained by adapter.method={source.config.adapter.method}, which "
                f"cannot be merged: {reason}. {cure}"
            )
    name = f"the teacher {source.name}"
    tokenizer = None if config.media else source.tokenizer()
    origin = replace(_of_backbone(config, source.model), name=name, tokenizer=tokenizer)
    trained = source.config
    if trained is None or source.parts or len(source.adapters) != 1:
        return origin
    (adapter,) = source.adapters
    if trained.task.labelled:
        task = classifier.task(classifier.read_labels(adapter), seed=config.seed)
    elif trained.task.head == "tokens":
        task = ModelHead("tokens", TagSet.read(adapter).names, config.seed)
    else:
        task = model_heads.of(trained)
    return replace(origin, task=task, headed=True, adapter=adapter, method=trained.adapter)


def _important_layers(model: PreTrainedModel, student: StudentConfig, rows: Examples) -> list[Layers]:
    """The layers of each stack that stay, by what the last hidden states are without the others."""
    model.eval()
    batch, found = layer_importance.rows_to_read(rows), []
    for stack in anatomy.blocks(model):
        lists = [block.rpartition(".")[0] for block in stack]
        ends = [number for number, each in enumerate(lists) if number == 0 or each != lists[number - 1]]
        count = len(student.chosen(len(stack)))
        kept = [*ends, len(stack) - 1] if count > len(ends) else ends
        found.append(layer_importance.known(model, stack, kept, count, batch))
    return found


def _keep_layers(model: PreTrainedModel, student: StudentConfig, important: list[list[int]] | None = None) -> None:
    """Leave only the chosen layers in every stack of `model`, whose configuration counts them. `important`: these.

    What only the first layer of a stack holds, such as T5's relative positions, goes over to the new first one.
    """
    if student.layers == "all":
        return
    stacks = anatomy.blocks(model)
    if len(stacks) != 1 + model.config.is_encoder_decoder:
        raise _immutable(model, f"they stand in {len(stacks)} stacks")
    for number, stack in enumerate(stacks):
        try:
            chosen = student.chosen(len(stack)) if important is None else important[number]
        except ValueError as error:
            raise ConfigError(str(error)) from None
        lists: dict[str, list[int]] = {}  # by the list that they stand in; each stage of a backbone has its own
        for place, block in enumerate(stack):
            lists.setdefault(block.rpartition(".")[0], []).append(place)
        kept = {path: [number for number in numbers if number in chosen] for path, numbers in lists.items()}
        for stage, (path, numbers) in enumerate(lists.items()):
            if not kept[path]:
                raise ConfigError(
                    f"distill.student.layers: leaves no layer in stage {stage} of the backbone ({path}), whose "
                    "features the next stage reads. Keep one of its layers, "
                    f"{', '.join(map(str, numbers))}, too."
                )
        _count(model, lists, kept)
        for path, numbers in lists.items():
            layers: Any = model.get_submodule(path)
            first, new = layers[0], layers[kept[path][0] - numbers[0]]
            known = dict(new.named_modules())
            for name, module in list(first.named_modules()):
                if name not in known:
                    new.set_submodule(name, module)
            for number in reversed(numbers):
                if number not in chosen:
                    del layers[number - numbers[0]]
            for number, layer in enumerate(layers):
                for module in layer.modules():
                    if "layer_idx" in vars(module):  # its place in the cache of keys and values
                        module.layer_idx = number
    # The saved configuration has to build the layers that are left.
    wanted, rebuilt = _described(model), _described(_rebuilt(model))
    odd = next((name for name in {**wanted, **rebuilt} if wanted.get(name) != rebuilt.get(name)), None)
    if odd is not None:
        new, old = (str(each.get(odd, "missing")) for each in (rebuilt, wanted))
        first = [numbers[0] for numbers in lists.values()]
        raise _immutable(
            model,
            f"{odd} would be {new} in its new place, and is {old} as it was trained",
            f"distill.student.layers={first}, the first of each stage" if len(first) > 1 else None,
        )


_COUNTS = {
    "only": ("num_hidden_layers",),
    "encoder": ("encoder_layers", "num_layers", "num_encoder_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers"),
}  # names by which families configure the number of layers; the model that is built shows which one is right


def _count(model: PreTrainedModel, lists: dict[str, list[int]], kept: dict[str, list[int]]) -> None:
    """Write into the model's configuration how many layers of a stack stay. `lists`: the stack's layers. `kept`: those
    that stay."""
    config = model.config if model.config.is_encoder_decoder else anatomy.body_config(model.config)
    values = config.to_dict()
    depths, counts = ([len(each) for each in layer_lists.values()] for layer_lists in (lists, kept))
    if len(depths) > 1:
        if values.get("depths") != depths:
            raise _immutable(model, "no setting counts those of each stage")
        config.update({"depths": counts})
        return
    ((path, numbers),) = lists.items()
    ((count,), (left,)) = depths, counts
    part = ("decoder" if "decoder" in path.split(".") else "encoder") if config.is_encoder_decoder else "only"
    names = [config.attribute_map.get(name, name) for name in _COUNTS[part]]
    counting = [name for name in names if values.get(name) == count]
    if not counting:
        raise _immutable(model, f"no setting says that they are {count}")
    # One entry a layer: layer_types, no_rope_layers.
    listed = {name: each for name, each in values.items() if "layer" in name and isinstance(each, list)}
    chosen = [number - numbers[0] for number in kept[path]]
    per_layer = {name: [each[n] for n in chosen] for name, each in listed.items() if len(each) == count}
    if isinstance(config, BackboneConfigMixin):  # as a part of another model it gives what its last layer does
        config.stage_names = config.stage_names[: left + 1]
        config.set_output_features_output_indices(None, None)
    config.update({counting[0]: left, **(per_layer if part == "only" else {})})


def _rebuilt(model: PreTrainedModel) -> PreTrainedModel:
    """A model without values of the same class, as transformers will build it from the saved configuration."""
    try:
        with torch.device("meta"):
            return type(model)(type(model.config).from_dict(model.config.to_dict()))
    except (ValueError, IndexError, KeyError, TypeError) as error:  # what families find wrong with their settings
        raise _immutable(model, str(error)) from error


def _described(model: PreTrainedModel) -> dict[str, Any]:
    """Shapes of the tensors, and whole numbers that modules inside the layers hold: strides, windows, their shifts.

    But for numbers of layers: they say where one stands now.
    """
    settings = {
        f"{path}.{name}": value
        for block in chain.from_iterable(anatomy.blocks(model))
        for path, module in model.get_submodule(block).named_modules(prefix=block)
        for name, value in vars(module).items()
        if type(value) in (int, tuple) and name[0] != "_" and "layer" not in name and "idx" not in name
    }
    return {**{name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, **settings}


def _immutable(model: PreTrainedModel, reason: str, instead: str | None = None) -> ConfigError:
    return ConfigError(
        f"distill.student.layers: {type(model.config).__name__} describes its layers in a way that does not allow to "
        f"leave some out like this: {reason}. Write {instead or 'distill.student.layers=all'}, or take a backbone of "
        "another family."
    )
