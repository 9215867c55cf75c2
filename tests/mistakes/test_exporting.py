"""Mistakes with `workbench export` end in status 2 with place and cure, and leave nothing behind."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.mistakes.cases import Case, Prepare, assert_refused, changed, file


def configured(*changes: tuple[str, str]) -> Prepare:
    """A run whose config.yaml says something else."""

    def prepare(folder: Path) -> None:
        path = folder / "one/config.yaml"
        text = path.read_text()
        for pattern, value in changes:
            text, count = re.subn(pattern, value, text, count=1)
            assert count == 1, pattern
        path.write_text(text)

    return prepare


PEFT = "export one --to peft --out x"
SETTINGS = "one/adapter/adapter_config.json"
PLAIN = ((r"new_tokens:\n(  - .*\n)*", "new_tokens: []\n"), (r"chat_template: .*", "chat_template: null"))
"""Settings that recipes of labelled rows leave out."""
CASES = {
    "no target": Case("export one --out x", "Missing option '--to'", "Try 'workbench export -h'"),
    "unknown target": Case("export one --to ggml --out x", "--to ggml", "expected peft, merged, gguf, ollama, vllm"),
    "no folder": Case("export one --to peft", "Missing option '--out'", "--out"),
    "exists": Case("export one --to peft --out stories", "stories exists already", "Name another folder"),
    "below a file": Case("export one --to peft --out my.yaml/x", "my.yaml/x: cannot be written", "name another place"),
    "no run": Case("export stories --to peft --out x", "stories: not a run directory", "`workbench ls runs`"),
    "no adapter": Case(PEFT, "one: no adapter", "Finish the run first", lambda _: shutil.rmtree("one/adapter")),
    "damaged settings": Case(PEFT, SETTINGS, "Restore it", file(SETTINGS, "{")),
    "weights": Case(f"{PEFT} --weights int4", "--weights int4", "expected bfloat16, float32, float16 with --to peft"),
    "onnx in bfloat16": Case(
        "export one --to onnx --weights bfloat16 --out x", "--weights bfloat16", "expected float32, int8, int4"
    ),
    "merged in 4 bits": Case(
        "export one --to merged --weights int4 --out x", "--weights int4", "expected bfloat16, float32, float16"
    ),
    "both forms": Case(f"{PEFT} --normalise --merge", "--normalise writes an adapter and --merge", "Write one of them"),
    "a merge for PEFT": Case(f"{PEFT} --merge", "--to peft writes an adapter", "Write --to merged"),
    "a whole model, normalised": Case(
        "export one --to merged --normalise --out x", "--normalise rewrites an adapter", "Leave it out"
    ),
    "no name": Case(f"{PEFT} --push model", "--push model", "Write OWNER/NAME"),
    "new tokens for vLLM": Case(
        "export one --to vllm --out x", "trainable_token_indices={'embed_tokens': [512, 513]}", "--merge adds"
    ),
    "new tokens, normalised": Case(
        "export one --to sglang --normalise --out x", "--normalise: trainable_token_indices", "--merge adds"
    ),
    "rslora for llama.cpp": Case(
        "export one --to ollama --out x",
        "use_rslora=True: llama.cpp scales by alpha / rank",
        "--normalise writes plain LoRA",
        changed(SETTINGS, use_rslora=True, trainable_token_indices=None),
    ),
    "DoRA for vLLM": Case(
        "export one --to vllm --out x",
        "use_dora=True: vLLM reads updates of linear layers and nothing else",
        "--merge adds the adapter",
        changed(SETTINGS, use_dora=True),
    ),
    "folds": Case(
        "export one --to merged --out x",
        "one: an ensemble of 5 folds is no single model",
        "folds.refit=true",
        configured((r"  held_out: .*\n", ""), ("recipe: sft", "recipe: crossval"), *PLAIN),
    ),
    "a classifier for llama.cpp": Case(
        "export one --to gguf --out x",
        "--to gguf takes language models, and one is of recipe classify",
        "Write --to peft or merged or onnx",
        configured(("recipe: sft", "recipe: classify"), *PLAIN),
    ),
    "a cross-encoder for vLLM": Case(
        "export one --to vllm --out x", "one is of recipe rerank", "Write --to peft or merged.",
        configured(("recipe: sft", "recipe: rerank"), *PLAIN),
    ),
    "a cross-encoder for ONNX": Case(
        "export one --to onnx --out x", "--to onnx does not write recipe rerank", "Write --to peft or merged.",
        configured(("recipe: sft", "recipe: rerank"), *PLAIN),
    ),
    "folds, combined": Case(
        "combine one one --weights 1,1 --out x", "one: an ensemble of 5 folds is no single model", "folds.refit=true",
        configured((r"  held_out: .*\n", ""), ("recipe: sft", "recipe: crossval"), *PLAIN),
    ),
    "a weight too few": Case(
        "combine one one --weights 1 --out x", "--weights has 1 numbers for 2 runs", "Write one for each"
    ),
    "a way to combine that is none": Case(
        "combine one one --by tie --weights 1,1 --out x", "--by tie: there is no such way", "Write one of sum, slerp"
    ),
    "a router of one run": Case("router one", "one: is no fleet of members", "Name a finished run of recipe fleet"),
    "a served router that is damaged": Case(
        "serve one", "router.safetensors cannot be read", "workbench router one", file("one/router.safetensors", "x")
    ),
    "a judge without a model": Case("judge http://h/v1 rows.jsonl", "which model there?", "Write --model NAME"),
    "a judge of rows that nobody judged": Case(
        "judge cat rows.jsonl", "row 1: data.format question_answer judges no answers", "data.columns="
    ),
    "a training server of a setting": Case(
        "serve model.weights=nf4 --train", "name one backbone", "then settings such as model.weights=nf4"
    ),
    "a training server open to all": Case(
        "serve starter --train --host 0.0.0.0", "--host 0.0.0.0 lets others in", "Write --api-key tml-KEY"
    ),
    "no model": Case(
        "export one --to gguf --merge --out x", "model.id: no folder ./gone", "Write model.id=FOLDER",
        configured((r"id: .*", "id: ./gone")),
    ),
    "no rows": Case(
        "export one --to merged --out x", "gone.jsonl", "no such file", configured((r"train: .*", "train: gone.jsonl"))
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one(folder: Path, trained: Path) -> Path:
    """A finished run."""
    return shutil.copytree(trained, folder / "one")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_mistake_is_told(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, folder, monkeypatch, capsys)


@pytest.mark.parametrize("package", ["gguf", "onnxruntime"])
def test_a_package_that_is_missing_is_told(
    package: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = "workbench.recipes.verbs.export.find_spec"
    monkeypatch.setattr(target, lambda name: None if name == package else object())
    to = "gguf --merge" if package == "gguf" else "onnx"
    case = Case(f"export one --to {to} --out x", f"needs {package}", "pip install 'peft-workbench[export]'")
    assert_refused(case, folder, monkeypatch, capsys)
