"""A student's backbone is a stock model: another one without some layers, value for value, or its architecture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

import workbench
from tests.conftest import MINILM, T5_SIZES, save_tiny, tiny
from tests.run_files import write_lines
from workbench.adapters import Prompt, anatomy
from workbench.config import ModelConfig, RunConfig, model_heads
from workbench.config.model_heads import ModelHead
from workbench.config.sections.distill_config import TeacherConfig
from workbench.data.starter import FOLDER
from workbench.distillation import students, teacher_sources
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError
from workbench.models import backbones, classifier, exported
from workbench.runs import run_directory

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

BART = {"d_model": 32, "encoder_layers": 4, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_hidden_layers": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("CausalLM", {}),
    "Qwen3": ("CausalLM", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
    "Gemma3Text": ("CausalLM", {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]}),
    "GPT2": ("CausalLM", {}),
    "OPT": ("CausalLM", {}),
    "Mixtral": ("CausalLM", {}),
    "GPTNeo": ("CausalLM", {"attention_types": [[["global", "local"], 2]], "window_size": 3, "num_heads": 4}),
    "SmolLM3": ("CausalLM", {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 0, 1]}),
    "Bert": ("MaskedLM", {}),
    "Roberta": ("MaskedLM", {}),
    "T5": ("Seq2SeqLM", {**T5_SIZES, "num_layers": 4, "num_hidden_layers": 4, "num_decoder_layers": 3}),
    "Bart": ("Seq2SeqLM", BART),
}
"""Of each family its head, and what makes its layers differ from one another."""
IDS_BL = torch.tensor([[1, 43, 12, 7, 30, 9, 21, 2], [1, 5, 5, 60, 33, 8, 17, 2]])


def _config(model: str, *, of: str = "sft", teacher: str = "starter", seed: int = 0, **student: Any) -> RunConfig:
    sections = {
        "recipe": "distill",
        "seed": seed,
        "model": {"id": model},
        "data": {"train": "rows.jsonl"},
        "of": of,
        "distill": {"teacher": {"id": teacher}, "student": student},
    }
    return RunConfig.model_validate(sections)


def _made(folder: Path, config: RunConfig, source: TeacherSource | None = None, *, weights: bool = True) -> Path:
    students.make(config, source, folder, weights=weights)
    return folder


def _source(run: Path) -> TeacherSource:
    return teacher_sources.find(TeacherConfig(id=str(run)), ModelConfig(id="teacher"))


def _stock(folder: Path | str, head: str) -> PreTrainedModel:
    """By plain transformers, which must find every tensor, and no other."""
    auto = transformers.AutoModel if head == "" else getattr(transformers, f"AutoModelFor{head}")
    model, found = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    stock: PreTrainedModel = model.eval()
    return stock


@torch.no_grad()
def _outputs(model: nn.Module, ids_BL: Tensor = IDS_BL) -> Tensor:
    backbone: Any = model
    inputs = {"input_ids": ids_BL} | ({"decoder_input_ids": ids_BL} if backbone.config.is_encoder_decoder else {})
    found: Tensor = model(**inputs)[0]
    return found


@contextmanager
def _skipping(model: PreTrainedModel, kept: list[int]) -> Iterator[PreTrainedModel]:
    """Every layer that is not kept hands on what it was given."""

    def unchanged(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        hidden_BLD = given[0] if given else named["hidden_states"]
        return (hidden_BLD, *output[1:]) if isinstance(output, tuple) else hidden_BLD

    with ExitStack() as hooks:
        for stack in anatomy.blocks(model):
            for number, block in enumerate(stack):
                if number not in kept:
                    layer = model.get_submodule(block)
                    hooks.enter_context(layer.register_forward_hook(unchanged, with_kwargs=True))
        yield model


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stories: str) -> tuple[Path, str]:
    """Folder of a tiny model of four layers, of each family in turn, and its head."""
    folder = tmp_path_factory.mktemp(request.param)
    head, settings = FAMILIES[request.param]
    words = AutoTokenizer.from_pretrained(stories)
    model = tiny(request.param, head=head, **{"vocab_size": len(words), "num_hidden_layers": 4, **settings})
    for number, norm in enumerate(parameter for parameter in model.parameters() if parameter.ndim == 1):
        torch.nn.init.normal_(norm, mean=1 + number % 3, std=0.2)  # each layer's are its own
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder, head


def _of(head: str) -> str:
    return "mlm" if head == "MaskedLM" else "sft"


@pytest.mark.nightly(but=["Bart", "Bert", "Gemma3Text", "Mixtral"])
def test_a_student_is_the_original_without_the_other_layers(family: tuple[Path, str], tmp_path: Path) -> None:
    folder, head = family
    original = _stock(folder, head)
    for kept in ([0, 2], [1, 2]):
        student = _stock(_made(tmp_path / f"{kept}", _config(str(folder), of=_of(head), layers=kept)), head)
        assert [len(stack) for stack in anatomy.blocks(student)] == [2] * (1 + student.config.is_encoder_decoder)
        with _skipping(original, kept) as wanted:
            torch.testing.assert_close(_outputs(student), _outputs(wanted), rtol=1e-5, atol=1e-5)
        assert float((_outputs(student) - _outputs(original)).abs().max()) > 1e-2


@pytest.mark.nightly(but=["GPT2", "T5", "Roberta"])
def test_a_student_with_all_layers_is_the_original(family: tuple[Path, str], tmp_path: Path) -> None:
    folder, head = family
    wanted = _outputs(_stock(folder, head))
    config = _config(str(folder), of=_of(head), layers="every-1")
    assert torch.equal(_outputs(_stock(_made(tmp_path / "student", config), head)), wanted)


@pytest.mark.nightly(but=["Llama", "T5", "Roberta", "Mixtral"])
def test_what_check_writes_describes_the_student(family: tuple[Path, str], tmp_path: Path) -> None:
    folder, head = family
    config = _config(str(folder), of=_of(head), layers="last-3")
    whole, described = (_made(tmp_path / f"{each}", config, weights=each) for each in (True, False))
    assert (whole / "config.json").read_text() == (described / "config.json").read_text()
    assert not list(described.glob("*.safetensors"))
    task = model_heads.MASKED if head == "MaskedLM" else model_heads.TEXT
    skeletons = [backbones.skeleton(ModelConfig(id=str(each)), task=task) for each in (whole, described)]
    first, second = ({name: value.shape for name, value in each.state_dict().items()} for each in skeletons)
    loaded = backbones.load(ModelConfig(id=str(whole), weights="float32"), None, task=task).model
    assert first == second == {name: value.shape for name, value in loaded.state_dict().items()}


@pytest.mark.parametrize(("layers", "kept"), [("first-2", [0, 1]), ("every-2", [0, 2, 4]), ([1, 3, 4], [1, 3, 4])])
def test_real_models_keep_their_precision_and_tokenizer(
    stories: str, layers: Any, kept: list[int], tmp_path: Path
) -> None:
    for name, folder, dtype in (("starter", FOLDER, torch.bfloat16), (stories, Path(stories), torch.float32)):
        made = _made(tmp_path / str(dtype), _config(name, layers=layers))
        found, wanted = load_file(made / "model.safetensors"), load_file(folder / "model.safetensors")
        assert {value.dtype for value in found.values()} == {dtype}
        for key, value in found.items():
            before, layer, after = key.partition("layers.")
            number, _, rest = after.partition(".")
            assert torch.equal(value, wanted[f"{before}layers.{kept[int(number)]}.{rest}" if layer else key])
        written = json.loads((folder / "config.json").read_text())
        changed = {"num_hidden_layers": len(kept), "dtype": str(dtype).removeprefix("torch.")}
        assert (
            json.loads((made / "config.json").read_text()).items()
            >= {
                key: {**written, **changed}[key] for key in ("hidden_size", "vocab_size", "architectures", *changed)
            }.items()
        )
        first, second = (AutoTokenizer.from_pretrained(each) for each in (folder, made))
        assert first.get_vocab() == second.get_vocab() and first.chat_template == second.chat_template
        assert (made / "generation_config.json").is_file()
        _stock(made, "CausalLM")


def test_a_sentence_encoder_keeps_its_pooler(tmp_path: Path) -> None:
    made = _made(tmp_path / "student", _config(MINILM, of="classify", layers="every-2"))
    student, original = _stock(made, ""), _stock(MINILM, "")
    assert student.config.num_hidden_layers == 3 and torch.equal(
        student.pooler.dense.weight, original.pooler.dense.weight
    )
    with _skipping(original, [0, 2, 4]) as wanted:
        torch.testing.assert_close(_outputs(student), _outputs(wanted), rtol=1e-5, atol=1e-5)
    section = ModelConfig(id=str(made), weights="float32")
    backbones.load(
        section, None, task=ModelHead("classes", ("a", "b", "c"))
    )  # a fresh head, and nothing else is missing


def test_a_checkpoint_that_hides_tokens_keeps_its_pooler_for_classes(stories: str, tmp_path: Path) -> None:
    """As BERT is on the hub: its masked language model has none."""
    folder = Path(save_tiny(tmp_path / "original", "Bert", "PreTraining", stories, num_hidden_layers=3))
    made = _made(tmp_path / "student", _config(str(folder), of="classify", layers="last-2"))
    found, wanted = load_file(made / "model.safetensors"), load_file(folder / "model.safetensors")
    assert torch.equal(found["pooler.dense.weight"], wanted["bert.pooler.dense.weight"])
    backbones.load(ModelConfig(id=str(made)), None, task=ModelHead("classes", ("a", "b", "c")))


@pytest.mark.parametrize(("name", "stored"), [("Roberta", "MaskedLM"), ("Llama", "CausalLM")])
def test_a_body_gets_its_fresh_head_later(name: str, stored: str, stories: str, tmp_path: Path) -> None:
    settings = FAMILIES[name][1]
    folder = save_tiny(tmp_path / "original", name, stored, stories, **{**settings, "num_hidden_layers": 3})
    for weights in (True, False):
        made = _made(tmp_path / f"{weights}", _config(folder, of="classify", layers=[0, 2]), weights=weights)
        skeleton = backbones.skeleton(ModelConfig(id=str(made)), task=ModelHead("classes", ("a", "b", "c")))
        assert [len(stack) for stack in anatomy.blocks(skeleton)] == [2] and skeleton.config.num_labels == 3
    made = tmp_path / "True"
    task = ModelHead("classes", ("a", "b", "c"), seed=5)
    student, original = (
        backbones.load(ModelConfig(id=str(each), weights="float32"), None, task=task).model for each in (made, folder)
    )
    assert _outputs(student).shape[-1] == 3
    with _skipping(original, [0, 2]):
        bodies = [_outputs(each.base_model) for each in (student, original)]
    torch.testing.assert_close(*bodies, rtol=1e-5, atol=1e-5)


def test_the_same_student_twice_is_the_same_files(stories: str, tmp_path: Path) -> None:
    for student in ({"layers": "every-2"}, {"layers": "every-2", "weights": "random"}):
        kind = student.get("weights", "pretrained")
        first, second = (_made(tmp_path / f"{kind}-{n}", _config(stories, **student)) for n in (1, 2))
        names = sorted(path.name for path in first.iterdir())
        assert names == sorted(path.name for path in second.iterdir()) and "model.safetensors" in names
        for name in names:
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_finished_student_is_left_alone_and_a_described_one_completed(stories: str, tmp_path: Path) -> None:
    folder = _made(tmp_path / "student", _config(stories, layers="first-2"), weights=False)
    assert not (folder / "model.safetensors").exists()
    _made(folder, _config(stories, layers="first-2"))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    for weights in (True, False):
        _made(folder, _config(stories, layers="first-3"), weights=weights)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["student"]


def test_random_weights_are_those_of_the_seed(stories: str, tmp_path: Path) -> None:
    drawn = torch.random.get_rng_state()
    values = {}
    for name, model, seed in (("one", stories, 1), ("two", stories, 2), ("starter", "starter", 1)):
        made = _made(tmp_path / name, _config(model, seed=seed, layers="first-2", weights="random"))
        values[name] = load_file(made / "model.safetensors")
        assert _stock(made, "CausalLM").config.num_hidden_layers == 2
    assert torch.equal(torch.random.get_rng_state(), drawn), "the global random state has moved"
    pretrained = load_file(Path(stories) / "model.safetensors")
    for name, value in values["one"].items():
        if value.ndim == 2:
            assert not torch.equal(value, values["two"][name]) and not torch.equal(value, pretrained[name])
    assert values["one"].keys() < pretrained.keys()
    assert {value.dtype for value in values["starter"].values()} == {torch.bfloat16}


def test_new_tokens_are_left_to_the_usual_loading(stories: str, tmp_path: Path) -> None:
    config = _config(stories, layers="first-2")
    model = config.model.model_copy(update={"new_tokens": ("<|one|>",)})
    made = _made(tmp_path / "student", config.model_copy(update={"model": model}))
    assert len(AutoTokenizer.from_pretrained(made)) == _stock(made, "CausalLM").config.vocab_size == 512
    later = model.model_copy(update={"id": str(made)})
    assert backbones.load(later, backbones.tokenizer(later)).model.config.vocab_size == 513


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("layers", "message"),
    [([0, 5], "no layer 5; the backbone has 5, the last one being 4"), ("last-6", "layers=last-6: the backbone has 5")],
)
def test_layers_that_are_not_there_are_refused(
    stories: str, weights: bool, layers: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _made(tmp_path / "student", _config(stories, layers=layers), weights=weights)
    assert not list(tmp_path.iterdir())


def test_each_stack_has_its_own_layers_to_choose_from(tmp_path: Path, stories: str) -> None:
    sizes = {**T5_SIZES, "num_layers": 4, "num_hidden_layers": 4, "num_decoder_layers": 2}
    folder = save_tiny(tmp_path / "t5", "T5", "Seq2SeqLM", stories, **sizes)
    made = _made(tmp_path / "student", _config(folder, layers="every-2"), weights=False)
    found = json.loads((made / "config.json").read_text())
    assert (found["num_layers"], found["num_decoder_layers"]) == (2, 1)
    with pytest.raises(ConfigError, match="no layer 3; the backbone has 2"):
        _made(tmp_path / "other", _config(folder, layers=[0, 3]), weights=False)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LED", {**BART, "attention_window": [4, 4, 4, 4]}),
        ("Qwen2Moe", {"mlp_only_layers": [3], "num_experts": 4, "moe_intermediate_size": 16}),
        ("Albert", {"embedding_size": 32}),
    ],
)
def test_layers_that_cannot_be_left_out_are_refused(
    name: str, settings: dict[str, Any], stories: str, tmp_path: Path
) -> None:
    head = {"Albert": "MaskedLM", "LED": "Seq2SeqLM"}.get(name, "CausalLM")
    folder = save_tiny(tmp_path / "tiny", name, head, stories, **{"num_hidden_layers": 4, **settings})
    with pytest.raises(ConfigError, match=f"{name}Config describes its layers .* Write distill.student.layers=all"):
        _made(tmp_path / "student", _config(folder, of=_of(head), layers="last-1"))
    whole = _made(tmp_path / "whole", _config(folder, of=_of(head), weights="random"))
    _stock(whole, head)


@pytest.mark.parametrize("stored", ["float32", "nf4"])
def test_a_student_of_the_teachers_weights_is_the_teacher(trained: Path, stored: str, tmp_path: Path) -> None:
    """LoRA, a template and new tokens are merged; a teacher that is asked in four bits has its own weights still."""
    config = _config("teacher", teacher=str(trained))
    source = teacher_sources.find(TeacherConfig.model_validate({"id": str(trained), "weights": stored}), config.model)
    student = _stock(_made(tmp_path / "student", config, source), "CausalLM")
    teacher = exported.load(trained, run_directory.shipped_config(trained))
    wanted, found = _outputs(teacher.model), _outputs(student)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3
    assert student.dtype == torch.float32 and student.config.vocab_size == 514
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
    assert tokenizer.chat_template == teacher.tokenizer.chat_template and len(tokenizer) == 514
    base = backbones.load(ModelConfig(id=source.model.id, weights="float32"), teacher.tokenizer).model
    assert float((_outputs(base) - wanted).norm() / wanted.norm()) > 1e-2


def test_the_teachers_layers_are_chosen_too(trained: Path, tmp_path: Path) -> None:
    config, source = _config("teacher", teacher=str(trained), layers=[0, 2, 4]), _source(trained)
    whole = _made(tmp_path / "whole", _config("teacher", teacher=str(trained)), source)
    student = _stock(_made(tmp_path / "student", config, source), "CausalLM")
    with _skipping(_stock(whole, "CausalLM"), [0, 2, 4]) as wanted:
        torch.testing.assert_close(_outputs(student), _outputs(wanted), rtol=1e-5, atol=1e-5)
    described = _made(tmp_path / "described", config, source, weights=False)
    assert (described / "config.json").read_text() == (tmp_path / "student" / "config.json").read_text()


def test_a_teacher_that_is_a_plain_backbone(stories: str, tmp_path: Path) -> None:
    source = teacher_sources.find(TeacherConfig(id=stories), ModelConfig(id="teacher"))
    made = _made(tmp_path / "student", _config("teacher", teacher=stories, layers="all"), source)
    assert torch.equal(_outputs(_stock(made, "CausalLM")), _outputs(_stock(stories, "CausalLM")))


@pytest.mark.parametrize("weights", [True, False])
def test_several_adapters_are_no_single_model(trained: Path, weights: bool, tmp_path: Path) -> None:
    teacher = TeacherConfig(id=(str(trained), str(trained)))
    source = teacher_sources.find(teacher, ModelConfig(id="teacher"))
    with pytest.raises(ConfigError, match=f"is 2 models that .* Write model.id={source.model.id}, the teacher's"):
        _made(tmp_path / "student", _config("teacher", layers="first-2"), source, weights=weights)
    random = _made(tmp_path / "random", _config("teacher", layers="first-2", weights="random"), source)
    assert _stock(random, "CausalLM").config.num_hidden_layers == 2


def test_an_adapter_that_cannot_be_merged_is_refused(trained: Path, tmp_path: Path) -> None:
    source = _source(trained)
    assert source.config is not None
    prompted = replace(source, config=source.config.model_copy(update={"adapter": Prompt()}))
    with pytest.raises(ConfigError, match=r"adapter.method=prompt, which cannot be merged: .*Write model.id="):
        _made(tmp_path / "student", _config("teacher"), prompted, weights=False)


@pytest.fixture(scope="module", params=["lora", "full"])
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has taught a tiny BERT a little of three classes."""
    folder = tmp_path_factory.mktemp("taught")
    bert = save_tiny(folder / "bert", "Bert", "SequenceClassification", MINILM, num_hidden_layers=3)
    words = {"sun": "warm and bright", "rain": "cold and wet", "snow": "white all around"}
    rows = [{"text": f"{words[name]} {n}", "label": name} for n in range(12) for name in words]
    write_lines(folder / "rows.jsonl", rows)
    settings = [f"data.train={folder / 'rows.jsonl'}", "data.held_out=0.2", f"model.id={bert}", "train.steps=6"]
    settings += ["model.weights=float32", "train.learning_rate=1e-2", "batch.size=12", "evaluate.every=null"]
    settings += ["save.every=null", f"adapter={{method: {request.param}}}"]
    return workbench.run("classify/quickstart", settings, out=folder / "run", quiet=True)


@pytest.mark.nightly(but=["lora"])
def test_a_classifier_starts_with_its_teachers_head(taught: Path, tmp_path: Path) -> None:
    config, source = _config("teacher", of="classify", teacher=str(taught)), _source(taught)
    student = _stock(_made(tmp_path / "student", config, source), "SequenceClassification")
    teacher = classifier.load(taught, run_directory.shipped_config(taught))
    wanted, found = _outputs(teacher.model), _outputs(student)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3
    assert tuple(student.config.id2label.values()) == teacher.labels.names == ("rain", "snow", "sun")

    fewer = _config("teacher", of="classify", teacher=str(taught), layers=[0, 2])
    shorter = _stock(_made(tmp_path / "shorter", fewer, source), "SequenceClassification")
    with _skipping(student, [0, 2]):
        torch.testing.assert_close(_outputs(shorter), _outputs(student), rtol=1e-5, atol=1e-5)
    described = _made(tmp_path / "described", fewer, source, weights=False)
    assert (described / "config.json").read_text() == (tmp_path / "shorter" / "config.json").read_text()
    # The usual loading finds the head, and draws no other.
    loaded = backbones.load(
        ModelConfig(id=str(tmp_path / "shorter"), weights="float32"), None, task=classifier.task(teacher.labels, seed=9)
    ).model
    torch.testing.assert_close(_outputs(loaded), _outputs(shorter), rtol=1e-5, atol=1e-5)
