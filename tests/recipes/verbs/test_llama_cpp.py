"""llama.cpp answers as the run does, token by token, where llama-cpp-python is installed; else this is skipped."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.conftest import tiny
from workbench import evaluation
from workbench.data.starter import FOLDER
from workbench.models import exported
from workbench.models.exported import ExportedModel
from workbench.models.exporting import gguf_files
from workbench.recipes.verbs.export import export
from workbench.runs import run_directory

llama_cpp = pytest.importorskip("llama_cpp")
# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SaveRun = Callable[..., Path]
QUESTIONS = [
    "What comes after 3?",
    "What comes after 12? Think about it.",
    "Who is Lily?\n\n  A girl é 漢 <|end|>",
    "12345",
]


def _answers(model: ExportedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = evaluation.generation_config(model.stop, max_new_tokens=12)
    found: Any = model.model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
    )
    return [int(number) for number in found[0, len(prompt) :] if int(number) not in model.stop]


def _of_llama(model: Any, prompt: list[int], stop: list[int]) -> list[int]:
    found: list[int] = []
    for number in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        if number in stop or len(found) == 12:
            break
        found.append(int(number))
    return found


def _llama(folder: Path, **more: Any) -> Any:
    return llama_cpp.Llama(str(folder / "model.gguf"), n_ctx=256, n_threads=1, verbose=False, **more)


def _compare(run: Path, model: Any) -> int:
    """Compare prompts and answers; returns the number of answers that ended by themselves."""
    own, ended = exported.load(run, run_directory.read_config(run)), 0
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = own.template.prompt(messages)  # type: ignore[union-attr]
        text = own.tokenizer.apply_chat_template(
            messages,
            chat_template=own.template.source,
            tokenize=False,
            add_generation_prompt=True,  # type: ignore[union-attr]
        )
        bos = prompt[0] == own.tokenizer.bos_token_id
        text = str(text).removeprefix(str(own.tokenizer.bos_token)) if bos else str(text)
        assert model.tokenize(text.encode(), add_bos=bos, special=True) == prompt
        assert all(model.token_eos() == number or llama_cpp.llama_vocab_is_eog(model._model.vocab, number)
                   for number in own.stop)  # fmt: skip
        wanted = _answers(own, prompt)
        assert _of_llama(model, prompt, own.stop) == wanted
        ended += len(wanted) < 12
    return ended


def test_one_model_answers_as_the_run(trained: Path, tmp_path: Path) -> None:
    export(trained, to="gguf", out=tmp_path / "out", whole=True, weights="float32")
    assert _compare(trained, _llama(tmp_path / "out")) > 0


@pytest.mark.parametrize("method", ["lora", "rslora"])
def test_an_adapter_over_its_backbone_answers_as_the_run(method: str, save_run: SaveRun, tmp_path: Path) -> None:
    run = save_run(adapter={"method": method, "rank": 4, "alpha": 8})
    export(run, to="ollama", out=tmp_path / "out", weights="float32", normalise=method == "rslora")
    _compare(run, _llama(tmp_path / "out", lora_path=str(tmp_path / "out" / "adapter.gguf")))


def test_a_byte_level_vocabulary_answers_as_the_run(save_run: SaveRun, tmp_path: Path) -> None:
    run = save_run(model={"id": "starter", "weights": "float32", "compute": "float32"})
    export(run, to="gguf", out=tmp_path / "out", whole=True, weights="float32")
    _compare(run, _llama(tmp_path / "out"))


@pytest.mark.parametrize("rule", gguf_files.WORD_RULES)
def test_words_are_cut_as_the_tokenizer_cuts_them(rule: str, tmp_path: Path) -> None:
    """The starter's vocabulary with the rule of each family that has a name in llama.cpp."""
    content = json.loads((FOLDER / "tokenizer.json").read_text())
    steps = [{"add_prefix_space": False, "trim_offsets": True, **step} if step["type"] == "ByteLevel" else
             {"behavior": "Isolated", "invert": False, **step} if step["type"] == "Split" else step
             for step in gguf_files.WORD_RULES[rule]]  # fmt: skip
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    model = tiny("Llama", vocab_size=6144)
    gguf_files.write_model(
        model, tokenizer, tmp_path / "model.gguf", template="{{ 1 }}", stop=[0], bos=False, name=rule
    )
    found = _llama(tmp_path, vocab_only=True)
    draw = random.Random(0)
    letters = "aeinrstTHE 0123456789  \n\n\t.,!?'\"-_()éß漢字😀"
    texts = ["I'm sure they'LL've 1234 things.\r\n\r\n  ok", "  two  spaces ", "x=1;\n\n\ty"]
    texts += ["".join(draw.choices(letters, k=draw.randrange(1, 80))) for _ in range(300)]
    for text in texts:
        assert found.tokenize(text.encode(), add_bos=False, special=True) == tokenizer(text)["input_ids"], text
