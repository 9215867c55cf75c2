"""A finished run answers as it was trained: same scores again, same prompts, the same end of turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import BartConfig, LlamaConfig

from tests.conftest import tiny
from tests.run_files import read_lines, read_scores, write_lines
from workbench import evaluation
from workbench.config import ModelConfig
from workbench.data.rows import read_rows
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.errors import ConfigError, DataError
from workbench.evaluation.generation import question_of
from workbench.models import backbones, exported
from workbench.recipes.load import load
from workbench.recipes.task import PredictionTable
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import _beside_input, generate, predict
from workbench.runs import run_directory

SaveRun = Callable[..., Path]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Prompts of very unequal length, some with an answer and some without."""
    rows = [
        {"question": f"What comes after {n}?" + " Think about it." * (7 * n % 5), "answer": f"{n + 1}"}
        for n in range(7)
    ]
    for row in rows[::2]:
        del row["answer"]
    path = tmp_path / "asked.jsonl"
    return write_lines(path, rows)


def _single(run: Path, question: str, *, max_new_tokens: int) -> str:
    """The answer of the saved model to one prompt alone, without padding."""
    model = exported.load(run, run_directory.read_config(run))
    ids = torch.tensor([model.template.prompt([{"role": "user", "content": question}])])
    output = model.model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=evaluation.generation_config(model.stop, max_new_tokens=max_new_tokens),
    )
    return str(model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def test_evaluate_finds_the_scores_again(trained: Path) -> None:
    written = read_scores(trained)
    assert evaluate(trained, []) == written["after"]
    assert written["after"]["loss"] < 0.5 * written["before"]["loss"]
    answered = {f"{name}{end}" for name in ("f1", "rouge_l") for end in ("", "_low", "_high")}
    assert set(written["after"]) == {"loss", "perplexity", "token_accuracy", *answered}


def test_evaluate_scores_another_file(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"question": "What comes after 200?", "answer": "It is 201."}) + "\n")
    found = evaluate(trained, [f"data.test={path}", "evaluate.answers=0"])
    assert set(found) == {"loss", "perplexity", "token_accuracy"}
    assert found["loss"] != read_scores(trained)["after"]["loss"]


@pytest.mark.parametrize("word", ["model.weights=bfloat16", "adapter.rank=2"])
def test_evaluate_does_not_change_what_was_trained(trained: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluate cannot change {word.split('.')[0]}"):
        evaluate(trained, [word])
    with pytest.raises(ConfigError, match="Did you mean `test`"):
        evaluate(trained, ["data.tset=x.jsonl"])


@pytest.mark.parametrize(
    ("suffix", "read"),
    [
        (".jsonl", lambda path: pd.read_json(path, lines=True, dtype=False)),
        (".csv", pd.read_csv),
        (".parquet", pd.read_parquet),
    ],
)
def test_predict_writes_every_row_in_order(
    trained: Path, asked: Path, tmp_path: Path, suffix: str, read: Callable[[Path], pd.DataFrame]
) -> None:
    out = tmp_path / "new" / f"answers{suffix}"
    done = predict(trained, str(asked), out=out, max_new_tokens=12)
    assert (done.rows, done.left_out) == (7, [])
    table = read(out)
    assert list(table.columns) == ["index", "row", "question", "input_answer", "prompt", "answer"]
    assert list(table["index"]) == list(range(7)) and table["input_answer"].isna().tolist() == [
        n % 2 == 0 for n in range(7)
    ]
    assert list(table["row"]) == [f"asked.jsonl, row {n}" for n in range(1, 8)]
    for n, prompt in enumerate(table["prompt"]):
        assert f"What comes after {n}?" in prompt and prompt.endswith("assistant\n")
        assert prompt.count("Think") == 7 * n % 5
    assert all(answer.startswith("It is") and answer.endswith(".") for answer in table["answer"])


def test_predict_in_batches_answers_as_for_each_prompt_alone(trained: Path, asked: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.parquet"
    predict(trained, str(asked), out=out, max_new_tokens=12)
    questions = [each["question"] for each in read_lines(asked)]
    alone = [_single(trained, question, max_new_tokens=12) for question in questions]
    assert list(pd.read_parquet(out)["answer"]) == alone


def test_predict_refuses_what_it_cannot_write_or_read(trained: Path, asked: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a name that ends in .csv, .jsonl, .parquet"):
        predict(trained, str(asked), out=tmp_path / "answers.txt", max_new_tokens=4)
    with pytest.raises(DataError, match="neither a file or folder nor a hub data set"):
        predict(trained, str(tmp_path / "nothing.jsonl"), out=tmp_path / "answers.csv", max_new_tokens=4)
    assert not (tmp_path / "answers.csv").exists()


def test_generate_streams_and_stops_at_the_templates_end_of_turn(trained: Path) -> None:
    pieces: list[str] = []
    text = generate(trained, "What comes after 12?", max_new_tokens=40, write=pieces.append)
    assert text.strip() == _single(trained, "What comes after 12?", max_new_tokens=40)
    assert text.startswith("It is") and text.endswith(".") and len(text) < 20
    assert text == "".join(pieces)
    assert len([piece for piece in pieces if piece.strip()]) >= 2, "it must be written while it is generated"
    assert exported.load(trained, run_directory.read_config(trained)).stop == [2, 513]


@pytest.mark.parametrize("column", ["prompt", "text"])
def test_a_run_on_raw_text_is_prompted_raw(save_run: SaveRun, tmp_path: Path, column: str) -> None:
    rows = [{"prompt": f"Once {n} cats", "completion": " sat down."} for n in range(30)]
    if column == "text":
        rows = [{"text": row["prompt"] + row["completion"]} for row in rows]
    path = tmp_path / "raw.jsonl"
    write_lines(path, rows)
    run = save_run(data={"train": str(path), "held_out": 0.1})

    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({column: "Once 99 cats"}) + "\n")
    predict(run, str(asked), out=tmp_path / "answers.parquet", max_new_tokens=10)
    table = pd.read_parquet(tmp_path / "answers.parquet")
    assert list(table["prompt"]) == ["Once 99 cats"]

    model = exported.load(run, run_directory.read_config(run))
    ids = torch.tensor([model.tokenizer("Once 99 cats")["input_ids"]])
    output = model.model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, pad_token_id=0
    )
    wanted = str(model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
    assert list(table["answer"]) == [wanted]
    assert generate(run, "Once 99 cats", max_new_tokens=10).strip() == wanted
    with pytest.raises(DataError, match=r"the prompt has [\d,]+ tokens, and the model reads prompts of"):
        generate(run, "cats " * 2000, max_new_tokens=10)


def test_a_prompt_of_no_tokens_is_told() -> None:
    """The starter's tokenizer puts none before raw text."""
    template = ChatEncoder(backbones.tokenizer(ModelConfig()))
    model: Any = SimpleNamespace(template=template, model=SimpleNamespace(config=LlamaConfig()))
    with pytest.raises(DataError, match="the prompt is empty"):
        question_of(model, Example("the prompt", text=(("", False),)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's use of it
def test_the_longest_prompt_leaves_a_position_for_the_answer_and_those_of_virtual_tokens() -> None:
    """An encoder-decoder writes at positions of its own."""
    template, question = ChatEncoder(backbones.tokenizer(ModelConfig())), Example("it", text=(("a cat " * 9, False),))
    count = len(template.question(question))

    def asked(model: Any) -> int:
        return len(question_of(cast(Any, SimpleNamespace(template=template, model=model)), question).ids)

    assert asked(SimpleNamespace(config=BartConfig(max_position_embeddings=count))) == count
    plain = tiny("Llama", max_position_embeddings=count + 1)
    assert asked(plain) == count
    with pytest.raises(DataError, match=f"it has {count} tokens, and the model reads prompts of {count - 3} at most"):
        asked(get_peft_model(plain, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)))


def test_a_run_without_an_adapter_is_told_how_to_get_one(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    for verb in (lambda: evaluate(tmp_path, []), lambda: generate(tmp_path, "Hello", max_new_tokens=2)):
        with pytest.raises(ConfigError, match=r"no adapter there yet. Finish the run first: .* --resume"):
            verb()


def test_a_member_without_an_adapter_is_trained_with_the_others(trained: Path, tmp_path: Path) -> None:
    member = tmp_path / "members" / "one"
    member.mkdir(parents=True)
    for folder in (tmp_path, member):
        (folder / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    with pytest.raises(ConfigError, match=f"Finish the run first: .* --out {tmp_path} --resume"):
        evaluate(member, [])


COLUMNS = {"id": [7, 9], "text": ["a, b", "c"], "answer": ["x", "y"], "label": ["k", "m"]}


def _written(path: Path) -> None:
    table = pd.DataFrame(COLUMNS)
    if path.suffix in (".csv", ".tsv"):
        table.to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, orient="records", lines=path.suffix == ".jsonl")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".jsonl", ".json"])
def test_predictions_stand_beside_all_columns_of_the_input(suffix: str, tmp_path: Path) -> None:
    """Also where a row has several lines, or was left out; names that are taken are told apart."""
    path = tmp_path / f"rows{suffix}"
    _written(path)
    places = [row.place for row in read_rows(str(path))]
    said = {"row": [places[1], f"{places[1]}, step 2"], "text": ["c", "c"], "answer": ["p", "q"]}
    config = load("sft/quickstart", [])
    table = _beside_input(PredictionTable(pd.DataFrame(said)), str(path), config)
    assert list(table) == ["index", "row", "id", "input_answer", "label", "text", "answer"]
    assert [int(each) for each in table["index"]] == [1, 1] and [int(each) for each in table["id"]] == [9, 9]
    assert list(table["input_answer"]) == ["y", "y"] and list(table["answer"]) == ["p", "q"]
    table.to_parquet(tmp_path / "out.parquet")


def test_nested_and_mixed_columns_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": [{"role": "user"}], "more": 1}, {"messages": "none", "more": "two"}, {"messages": {"a": 1}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = pd.DataFrame({"row": [row.place for row in read_rows(str(path))], "answer": list("abc")})
    table = _beside_input(PredictionTable(said), str(path), load("sft/quickstart", []))
    table.to_parquet(tmp_path / "out.parquet")
    assert table["messages"].tolist() == ['[{"role": "user"}]', "none", '{"a": 1}']
    assert table["more"].tolist()[:2] == ["1", "two"] and table["more"].isna().tolist() == [False, False, True]
