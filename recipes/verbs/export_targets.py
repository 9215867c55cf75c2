"""Writers of `workbench export`, one for each target, and how far its outputs, read again, are from the run's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from workbench import adapters
from workbench.adapters import model_card
from workbench.config import RunConfig
from workbench.data.text.chat import ChatEncoder
from workbench.errors import ConfigError
from workbench.models import backbones, exported
from workbench.models.backbones import DTYPES
from workbench.models.exporting import lora_limits, ollama, onnx_model, onnx_quantisers
from workbench.models.exporting.lora_limits import LoraLimits
from workbench.models.exporting.onnx_model import OnnxModel
from workbench.recipes.task import OutputError, RunOutputs
from workbench.recipes.tasks.classify.task import ClassReference
from workbench.recipes.tasks.sft.task import TextReference
from workbench.recipes.verbs import merge, quantised_export
from workbench.recipes.verbs.quantised_export import PairedModels

Form = Literal["trained", "normalised", "whole"]
"""An adapter as it was trained, as plain LoRA, or one whole model."""


@dataclass(frozen=True)
class Source:
    """A run, and the form in which it is exported."""

    run: Path
    config: RunConfig
    reference: RunOutputs
    form: Form
    weights: str
    """Precision of a whole model, or of the backbone over which an adapter is checked."""
    quantised: str | None = None
    """Format into which a whole model is quantised."""

    @property
    def stop(self) -> list[int]:
        """Tokens at which the run's answers end."""
        assert isinstance(self.reference, TextReference)
        return self.reference.unmerged.stop

    @property
    def template(self) -> ChatEncoder:
        """How the run writes conversations."""
        assert isinstance(self.reference, TextReference)
        encoder = self.reference.unmerged.template
        assert isinstance(encoder, ChatEncoder)
        return encoder

    @property
    def begins(self) -> bool:
        """Whether the run's prompts begin with the token for that."""
        begin = self.reference.tokenizer and self.reference.tokenizer.bos_token_id
        return self.template.prompt([{"role": "user", "content": "a"}])[0] == begin


@dataclass(frozen=True)
class WrittenExport:
    """Files of an export, checked."""

    error: OutputError
    checked: str
    """How its outputs were computed, for a sentence."""
    usage: str
    """Lines that load it, in Python or for a shell; DIR stands for the folder."""
    limits: tuple[str, ...] = ()
    costs: tuple[tuple[str, str, str, str], ...] = ()
    """Rows of a table beside the model that was not quantised."""
    notes: tuple[str, ...] = ()
    """Sentences on that table, and on what quantising changed."""


Writer = Callable[[Source, Path], WrittenExport]


def peft_adapter(source: Source, folder: Path) -> WrittenExport:
    """The adapter in PEFT's format, over the backbone as the run stores it."""
    _copy_adapter(source, folder)
    backbone = exported.load_backbone(
        source.config, source.run / "adapter", source.reference.tokenizer, task=source.reference.task
    ).model
    source.reference.settle(backbone)
    error = source.reference.error(adapters.load(backbone, folder), backbone)
    usage = model_card.loading(backbone, folder, place="DIR")
    return WrittenExport(error, "loaded by PEFT over its backbone", usage)


def merged_model(source: Source, folder: Path) -> WrittenExport:
    """A stock model of transformers."""
    stock = _whole(source, folder)
    name = type(stock).__name__
    usage = f"from transformers import {name}\n\nmodel = {name}.from_pretrained('DIR')"
    return WrittenExport(source.reference.error(stock, stock), "loaded by transformers", usage, _sentences(source))


def onnx(source: Source, folder: Path) -> WrittenExport:
    """An ONNX file beside the tokenizer or picture format and the configuration."""
    stock = _whole(source, folder)
    (folder / "model.safetensors").unlink(missing_ok=True)
    output, reference = onnx_model.OUTPUTS[source.reference.task.head], source.reference
    inputs = onnx_model.text_inputs()
    if reference.tokenizer is None:
        assert isinstance(reference, ClassReference)
        pictures = reference.rows.batch(np.zeros(2, dtype=np.int64)).inputs
        inputs = {name: tensor.cpu() for name, tensor in pictures.items()}
    path = folder / onnx_model.FILE

    def write(path: Path) -> OnnxModel:
        onnx_model.write(stock, path, {name: each.to(stock.device) for name, each in inputs.items()}, output)
        return OnnxModel(path, stock, output)

    def error(model: nn.Module) -> OutputError:
        if isinstance(reference, TextReference):
            return reference.error_of_head(model, onnx_model.logits_head(stock))
        return reference.error(model, stock)

    usage = (
        f"import onnxruntime\n\nsession = onnxruntime.InferenceSession('DIR/{onnx_model.FILE}')\n"
        f"session.run(['{output}'], {{{', '.join(f'{name!r}: {name}' for name in inputs)}}})"
    )
    limits = [*_sentences(source), "No cache: each pass computes the whole text."] if output == "logits" else []
    checked = "computed by onnxruntime on the CPU"
    if source.quantised is None:
        return WrittenExport(error(write(path)), checked, usage, tuple(limits))
    quantiser = onnx_quantisers.QUANTISERS[source.quantised]
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        plain = write(Path(name) / onnx_model.FILE)
        onnx_quantisers.quantise(Path(name) / onnx_model.FILE, path, source.quantised)
        pair = PairedModels(OnnxModel(path, stock, output), plain)
        found = error(pair)
        rows, measured = quantised_export.costs(pair, (Path(name) / onnx_model.FILE, path))
        notes = (f"Before it was quantised: {error(plain).sentence}", pair.sentence, measured)
    limits += [quantiser.sentence, *quantiser.limits]
    return WrittenExport(found, checked, usage, tuple(limits), tuple(rows), notes)


def gguf(source: Source, folder: Path) -> WrittenExport:
    """One GGUF file: a whole model, or an adapter."""
    return _gguf_model(source, folder) if source.form == "whole" else _gguf_adapter(source, folder)


def _gguf_model(source: Source, folder: Path) -> WrittenExport:
    model = merge.merged_model(source.run, source.config, source.reference, weights=source.weights)
    error = _write_gguf(source, model, folder / "model.gguf")
    return WrittenExport(error, _READ, "llama-cli -m DIR/model.gguf --jinja", _nfc())


_READ = "read back by transformers' own reader of GGUF, all tensors equal"


def _nfc() -> tuple[str, ...]:
    return ("llama.cpp does not compose letters (NFC) where the tokenizer does: text that is not composed may differ.",)


def _gguf_adapter(source: Source, folder: Path) -> WrittenExport:
    error, _ = _write_gguf_adapter(source, folder / "adapter.gguf")
    base = source.config.model.id
    usage = f"llama-cli -m BASE.gguf --lora DIR/adapter.gguf  # BASE.gguf: {base}, without its own training"
    limits = (
        "The file holds no tokenizer and no chat template: the run's template is that of its base model.",
        *_over_other_weights(source),
    )
    return WrittenExport(error, "read back from GGUF, over the backbone in " + source.weights, usage, limits)


def _write_gguf_adapter(source: Source, path: Path) -> tuple[OutputError, PreTrainedModel]:
    from workbench.models.exporting import gguf_files

    with tempfile.TemporaryDirectory() as name:
        adapter, again = Path(name) / "adapter", Path(name) / "again"
        again.mkdir()
        _copy_adapter(source, adapter)
        backbone = merge.as_loaded(_base(source))
        gguf_files.write_adapter(adapter, backbone.config, path, name=source.run.name)
        gguf_files.restore_adapter(path, backbone.config, again, like=adapter)
        error = source.reference.error(adapters.load(backbone, again), backbone)
    return error, backbone


def _write_gguf(source: Source, model: PreTrainedModel, path: Path) -> OutputError:
    from workbench.models.exporting import gguf_files

    tokenizer = source.reference.tokenizer
    assert tokenizer is not None, "only models of text become GGUF"
    name = source.run.resolve().name
    template, stop = source.template.source, source.stop
    gguf_files.write_model(model, tokenizer, path, template=template, stop=stop, bos=source.begins, name=name)
    stock = gguf_files.load_model(path)
    return source.reference.error(stock, stock)


def ollama_folder(source: Source, folder: Path) -> WrittenExport:
    """A Modelfile beside the GGUF files of a whole model, or of backbone and adapter."""
    tokenizer = source.reference.tokenizer
    assert tokenizer is not None, "only models of text go to Ollama"
    begin = str(tokenizer.bos_token) if source.begins else ""
    parts = ollama.take_apart(ollama.renderer(tokenizer, source.template.source), begin=begin)
    words = [str(tokenizer.decode([number])) for number in source.stop]
    hub = backbones.hub_config(exported.model_under(source.config, source.run / "adapter"))
    most: int = hub.get_text_config().max_position_embeddings
    whole, tokens = source.form == "whole", min(source.config.data.max_tokens, most)
    text = ollama.modelfile(
        parts, words, weights="model.gguf", adapter=None if whole else "adapter.gguf", tokens=tokens
    )
    (folder / "Modelfile").write_text(text, encoding="utf-8")
    if whole:
        written = _gguf_model(source, folder)
    else:
        _write_gguf(source, _base(source), folder / "model.gguf")
        error, _ = _write_gguf_adapter(source, folder / "adapter.gguf")
        written = WrittenExport(error, "read back from GGUF, over the backbone in " + source.weights, "", _nfc())
    usage = "ollama create NAME -f DIR/Modelfile && ollama run NAME"
    limits = (
        "The Modelfile writes system, user and assistant messages; it has no tools and no reasoning.",
        f"num_ctx is the length of the run's rows ({tokens}), and answers are greedy, as they were scored.",
        *written.limits,
    )
    return WrittenExport(written.error, written.checked, usage, limits)


def vllm_folder(source: Source, folder: Path) -> WrittenExport:
    """An adapter or a whole model for vLLM."""
    return _served(source, folder, "vllm serve DIR", lora_limits.vllm_adapter_command)


def sglang_folder(source: Source, folder: Path) -> WrittenExport:
    """An adapter or a whole model for SGLang."""
    command = "python -m sglang.launch_server --model-path DIR"
    return _served(source, folder, command, lora_limits.sglang_adapter_command)


def _served(source: Source, folder: Path, model_command: str, adapter_command: Callable[..., str]) -> WrittenExport:
    if source.form == "whole":
        return WrittenExport(merged_model(source, folder).error, "loaded by transformers", model_command)
    _copy_adapter(source, folder)
    backbone = merge.as_loaded(_base(source))
    error = source.reference.error(adapters.load(backbone, folder), backbone)
    rank = lora_limits.settings(folder)["r"]
    template = " --chat-template DIR/chat_template.jinja" if (folder / "chat_template.jinja").exists() else ""
    limits = (
        f"Answers end at stop_token_ids={source.stop}: name them in each request, as the base model may end elsewhere.",
        *_over_other_weights(source),
    )
    checked = f"loaded by PEFT over the backbone in {source.weights}"
    return WrittenExport(error, checked, adapter_command(source.config.model.id, rank=rank) + template, limits)


def _copy_adapter(source: Source, folder: Path) -> None:
    """Adapter and tokenizer of a run, the adapter in the form that is asked for."""
    shutil.copytree(source.run / "adapter", folder, dirs_exist_ok=True)
    if source.form == "normalised":
        lora_limits.normalise(source.run / "adapter", folder)
    (folder / "README.md").unlink(missing_ok=True)


def _whole(source: Source, folder: Path) -> PreTrainedModel:
    """The merged model as it is loaded again from `folder`."""
    model = merge.merged_model(source.run, source.config, source.reference, weights=source.weights)
    merge.write(model, source.config, source.reference, folder)
    del model
    return merge.reload(folder, source.reference, weights=source.weights)


def _base(source: Source) -> PreTrainedModel:
    """The backbone without the adapter, from unquantised weights, as who serves an adapter loads it."""
    model: Any = merge.base_model(source.run, source.config, source.reference)
    model.to(DTYPES[source.weights])
    model.config.dtype = DTYPES[source.weights]
    return source.reference.settle(model)


def _sentences(source: Source) -> tuple[str, ...]:
    return (source.reference.note.strip(),) if source.reference.note else ()


def _over_other_weights(source: Source) -> tuple[str, ...]:
    weights = source.config.model.weights
    if weights == source.weights:
        return ()
    return (f"Trained over {weights} weights of the backbone, checked over {source.weights}.",)


def require_base_template(run: Path, config: RunConfig) -> None:
    """Raise ConfigError where a run's chat template is not its backbone's: an adapter in GGUF has no place for one."""
    own = exported.load_tokenizer(run, config).chat_template
    base = backbones.tokenizer(config.model.model_copy(update={"new_tokens": ()})).chat_template
    if own != base:
        raise ConfigError(
            f"{run}: its chat template is not that of {config.model.id}, and an adapter in GGUF has no place for one, "
            "so that llama.cpp would write prompts otherwise. Write --merge for one whole model, which holds it, or "
            "--to ollama, whose Modelfile does."
        )


LIMITS: dict[str, LoraLimits] = {
    "vllm": lora_limits.VLLM,
    "sglang": lora_limits.SGLANG,
    "gguf": lora_limits.LLAMA_CPP,
    "ollama": lora_limits.LLAMA_CPP,
}
"""Limits of the programs that load the adapter of a target."""
