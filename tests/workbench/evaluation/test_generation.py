"""A prompt is continued the same alone and in a batch that pads it, whatever stands before it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

import workbench
from tests.conftest import tiny, trains
from workbench import adapters, evaluation
from workbench.adapters import ALora, DeepPrompt, Lora, Method, Prefix, Prompt, PTuning
from workbench.config import ModelConfig
from workbench.data.batching import Indices
from workbench.data.text import generated_answers
from workbench.data.text.generated_answers import Floats
from workbench.data.text.tokenized_set import TokenizedSet, TokenTable
from workbench.errors import Stopped
from workbench.evaluation import GeneratedAnswer, Likelihood, generate
from workbench.evaluation.generation import AnswerSampler, AnswerSamples, picked, write_largest
from workbench.models import output_heads
from workbench.models.output_heads import Head
from workbench.planning.counters import LiveBytes
from workbench.recipes.tasks.sft import text_run
from workbench.recipes.verbs.run import run as run_config
from workbench.runs import evaluation_request, run_directory
from workbench.training import capacity
from workbench.training.callbacks import Silent

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
METHODS: list[Method] = [
    Prompt(virtual_tokens=3),
    PTuning(virtual_tokens=3),
    DeepPrompt(virtual_tokens=3),
    Prefix(virtual_tokens=3, encoder_width=8),
]
NEW = 5
PROMPTS_SAMPLING = [np.asarray(ids) for ids in ([1, 403, 407, 261], [1, 268, 388, 342, 432, 398, 299, 280], [1, 410])]
TOKENS, STOPS, TEMPERATURE = 5, [2, *range(20, 30), *range(400, 420)], 1.5
RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: {train}, held_out: 0.2}}
batch: {{size: 4}}
train: {{steps: 6, learning_rate: 1.0e-2}}
evaluate: {{every: 2, answers: 9, max_new_tokens: 6, samples: 2}}
save: {{every: 2, keep: 9, ship: best}}
"""
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "schedule-free": (
        "optimizer.name=schedule_free",
        "schedule={name: constant}",
    ),
    "averaged": ("average={method: ema, decay: 0.5}",),
    "frozen prefix": ("freeze={policy: static, layers: 1, cache: memory}", "adapter.dropout=0"),
    "prompt": ("adapter={method: prompt, virtual_tokens: 4}",),
}
CELLS = ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "plain")]


@torch.no_grad()
def greedy(model: nn.Module, head: Head, prompt: list[int]) -> list[int]:
    """The most likely token after another, as training computes them: no cache, no mask, no padding."""
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW:
        hidden = head.hidden(model, {"input_ids": torch.tensor([ids])})
        ids.append(int(head.project(hidden)[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.method)
def test_a_padded_batch_writes_what_training_would(family: PreTrainedModel, config: Method) -> None:
    model: Any = adapters.attach(family, config, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    head = output_heads.find(model, family)
    wanted = [greedy(model, head, prompt) for prompt in PROMPTS]
    ids = torch.tensor([PROMPTS[0], [0] * 4 + PROMPTS[1]])
    family.generation_config.eos_token_id = None
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    laid = list[bool]()  # whether rows lie side by side in front of the head, which torch would copy for each else
    family.lm_head.register_forward_hook(lambda _, inputs, output: laid.append(inputs[0].is_contiguous()))
    output = generate(model, {"input_ids": ids, "attention_mask": (ids != 0).long()}, settings)
    assert laid and all(laid)
    assert torch.equal(output[:, : ids.shape[1]], ids)
    assert output[:, ids.shape[1] :].tolist() == wanted


def test_rows_that_stop_early_are_padded_where_a_window_forbids_padding() -> None:
    base = tiny("Mistral")
    model: Any = adapters.attach(base, DeepPrompt(virtual_tokens=3), seed=0).eval()
    head = output_heads.find(model, base)
    first, second = (greedy(model, head, prompt) for prompt in PROMPTS)
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=second[1], pad_token_id=0)
    assert second[1] not in first and second[0] != second[1]
    ids = torch.tensor([PROMPTS[0], [0] * 4 + PROMPTS[1]])
    output = generate(model, {"input_ids": ids, "attention_mask": (ids != 0).long()}, settings)
    assert output[:, 7:].tolist() == [first, [*second[:2], 0, 0, 0]]


def draws(answers: int = 3) -> list[Floats]:
    return [
        generated_answers.sampling_numbers([7, row], answers=answers, tokens=TOKENS)
        for row in range(len(PROMPTS_SAMPLING))
    ]


@torch.no_grad()
def written_out(model: nn.Module, prompt: Indices, draws_T: Floats, *, known: int) -> list[int]:
    """One answer, without a cache, padding or company."""
    ids, answer = prompt.tolist(), list[int]()
    for draw in draws_T:
        logits_V = model(input_ids=torch.tensor([ids + answer])).logits[0, -1, :known].double()
        sums_V = (logits_V / TEMPERATURE).softmax(-1).cumsum(-1)
        answer.append(int((sums_V <= draw * sums_V[-1]).sum()))
        if answer[-1] in STOPS:
            break
    return answer


def sampled(model: nn.Module, prompts: list[Indices], numbers: list[Floats], *, known: int) -> list[list[list[int]]]:
    sampler = AnswerSampler(model, known=known, stop=STOPS, temperature=TEMPERATURE)
    return [[each.tolist() for each in group] for group in sampler.answer(prompts, numbers)]


@pytest.mark.parametrize(
    "method",
    [
        None,
        Lora(rank=4, dropout=0.5),
        Prompt(virtual_tokens=3),
        DeepPrompt(virtual_tokens=3),
        ALora(rank=4, invocation=(407, 261)),  # with which a prompt ends
    ],
)
def test_equals_what_is_written_out_token_by_token(stories: str, method: Method | None) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(stories)
    if method is not None:
        model = adapters.attach(model, method, seed=0)
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
    model.train()
    chosen = [0] if isinstance(method, DeepPrompt) else [0, 1, 2]
    found = sampled(model, [PROMPTS_SAMPLING[row] for row in chosen], [draws()[row] for row in chosen], known=500)
    assert model.training
    model.eval()
    for row, answers in zip(chosen, found, strict=True):
        assert answers == [written_out(model, PROMPTS_SAMPLING[row], each, known=500) for each in draws()[row]]
    lengths = {len(each) for group in found for each in group}
    assert min(lengths) < max(lengths) == TOKENS  # some were ended by a token, some by their length


def test_tells_the_probability_that_each_token_was_drawn_by(stories: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories).eval()
    sampler = AnswerSampler(model, known=500, stop=STOPS, temperature=TEMPERATURE)
    found = sampler.scored(PROMPTS_SAMPLING, draws())
    plain = sampled(model, PROMPTS_SAMPLING, draws(), known=500)
    for prompt, group, answers in zip(PROMPTS_SAMPLING, found, plain, strict=True):
        assert [one.ids.tolist() for one in group] == answers
        for one in group:
            ids = torch.from_numpy(np.concatenate([prompt, one.ids]))
            with torch.no_grad():
                logits_TV = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1, :500].double()
            wanted_T = (logits_TV / TEMPERATURE).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
            assert one.log_probs == pytest.approx(wanted_T.numpy(), abs=1e-4)


@pytest.mark.parametrize("family", ["GPT2", "Gemma2", "Mistral", "OPT", "Falcon"])
def test_prompts_are_read_once_in_every_family(family: str) -> None:
    model = tiny(family).eval()
    prompts = [ids % 60 for ids in PROMPTS_SAMPLING]
    found = sampled(model, prompts, draws(2), known=60)
    for row, prompt in enumerate(prompts):
        assert found[row] == [written_out(model, prompt, each, known=60) for each in draws(2)[row]]


def test_an_answer_depends_on_no_other(stories: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories).eval()
    together = sampled(model, PROMPTS_SAMPLING, draws(), known=512)
    for row, answers in enumerate(together):
        assert sampled(model, [PROMPTS_SAMPLING[row]], [draws()[row]], known=512) == [answers]
        assert sampled(model, [PROMPTS_SAMPLING[row]], [draws()[row][1:2]], known=512) == [answers[1:2]]


def test_a_prompt_is_read_once_for_all_its_answers(stories: str) -> None:
    """No forward pass but the one that reads the prompts has more than a token of each answer."""
    model: Any = AutoModelForCausalLM.from_pretrained(stories)
    shapes: list[tuple[int, ...]] = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    sampled(model, PROMPTS_SAMPLING, draws(4), known=512)
    assert shapes[0] == (3, 7)
    assert set(shapes[1:]) == {(12, 1)}


def test_tokens_come_as_often_as_they_are_likely() -> None:
    """Of evenly spaced random numbers, the share of each token is its probability, exactly up to one of them."""
    logits = torch.randn(17, generator=torch.Generator().manual_seed(1))
    logits[5] = -torch.inf
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens = picked(logits.expand(len(grid), -1), grid, 0.7)
    share = torch.bincount(tokens, minlength=17).double() / len(grid)
    assert (share - (logits.double() / 0.7).softmax(-1)).abs().max() <= 1 / len(grid)
    ends = picked(logits.expand(2, -1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), 1.0)
    assert ends.tolist() == [0, 16]


def test_random_numbers_of_an_answer_do_not_depend_on_how_many_there_are() -> None:
    few, many = (generated_answers.sampling_numbers([3, 1], answers=count, tokens=6) for count in (2, 5))
    assert np.array_equal(few, many[:2]) and len(np.unique(many)) == many.size


def test_a_plan_of_answers_holds_a_cache_of_every_token(stories: str) -> None:
    section = ModelConfig(id=stories, weights="float32")
    tokenizer = workbench.load_tokenizer(section)
    model = workbench.load_backbone(section, tokenizer).model
    rows = workbench.encode_rows([{"question": "Who came?", "answer": "A fox."}] * 3, tokenizer)

    def peak(count: int, new: int) -> int:
        with LiveBytes() as live, torch.no_grad():
            write_largest(model, rows, count=count, max_new_tokens=new, passed=4096)
        return live.peak

    config = model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert peak(3, 120) - peak(3, 20) >= 3 * 100 * token
    assert peak(0, 120) == 0


@pytest.fixture
def run(tmp_path: Path, short_stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


def _lines(path: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().split("\n")[:-1]]


def _losses(path: Path) -> list[tuple[float, float | None]]:
    return [(line["loss"], line.get("held_out_loss")) for line in _lines(path, "metrics.jsonl")]


def _require_same_adapter(one: Path, other: Path) -> None:
    tensors = [load_file(path / "adapter" / "adapter_model.safetensors") for path in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0])


@pytest.mark.nightly(but=["plain", "averaged"])
@pytest.mark.parametrize("name", CELLS)
def test_the_training_is_bit_identical_without_them(name: str, run: Callable[..., Path]) -> None:
    with_, without = run(*VARIANTS[name]), run(*VARIANTS[name], "evaluate.samples=0", name="without")
    assert _losses(with_) == _losses(without) and not (without / "samples.jsonl").exists()
    _require_same_adapter(with_, without)
    lines = _lines(with_)
    assert [line["step"] for line in lines] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert len({line["row"] for line in lines}) == 2
    for line in lines:  # one prompt and one reference for each row
        assert {"prompt", "reference"} <= line.keys()
        same = [other for other in lines if other["row"] == line["row"]]
        assert {(other["prompt"], other["reference"]) for other in same} == {(line["prompt"], line["reference"])}


def test_they_are_what_the_saved_adapter_says_of_these_rows(run: Callable[..., Path]) -> None:
    path = run("save.ship=last", "evaluate.answers=99")
    config = run_directory.read_config(path)
    scores = text_run.TextRun(config, _opened(path), Silent(), *text_run.prepare(config, _opened(path)))
    last = {line["row"]: line["answer"] for line in _lines(path) if line["step"] == 6}
    answers = scores.sampled(scores.load())
    assert {each.place: each.answer for each in answers} == last


def test_those_of_step_0_are_what_the_backbone_says_by_itself(run: Callable[..., Path]) -> None:
    """They come after training, in front of all others, once; a prompt that trains has no part in them."""
    path = run("train.steps=2", "adapter={method: prompt, virtual_tokens: 4}")
    config = run_directory.read_config(path)
    text = text_run.TextRun(config, _opened(path), Silent(), *text_run.prepare(config, _opened(path)))
    start = text.untrained(text.backbone())
    assert start is not None
    wanted = {each.place: each.answer for each in text.sampled(start)}
    lines = _lines(path)
    assert [line["step"] for line in lines] == [0, 0, 2, 2]
    assert {line["row"]: line["answer"] for line in lines[:2]} == wanted
    whole = (path / "samples.jsonl").read_bytes()
    samples = AnswerSamples(_opened(path), text.sampled)
    samples.take_untrained(start)
    assert (path / "samples.jsonl").read_bytes() == whole
    later = b"".join(whole.splitlines(keepends=True)[2:])
    (path / "samples.jsonl").write_bytes(later)
    samples.take_untrained(start)
    assert (path / "samples.jsonl").read_bytes() == whole


def _opened(path: Path) -> run_directory.Run:
    return run_directory.Run(path, None, resumed=True)


def test_rows_are_drawn_by_the_seed_and_more_rows_begin_with_the_fewer(run: Callable[..., Path]) -> None:
    path = run("train.steps=1")
    _, _, data = text_run.prepare(run_directory.read_config(path), _opened(path))
    drawn = [evaluation.drawn_prompts(data.held_out, count, seed=0) for count in (0, 2, 5, 99)]
    assert drawn[0] == [] and drawn[1] == drawn[2][:2] and drawn[2] == drawn[3][:5]
    assert sorted(drawn[3]) == list(range(len(data.held_out)))
    assert len({tuple(evaluation.drawn_prompts(data.held_out, 5, seed=seed)) for seed in range(4)}) == 4
    rows = [line["row"] for line in _lines(path) if line["step"] == 0]
    assert rows == [data.held_out.place(row) for row in drawn[1]]


def test_a_resumed_run_has_no_step_twice(run: Callable[..., Path]) -> None:
    straight = run()
    whole = (straight / "samples.jsonl").read_bytes()
    for name in ("checkpoints/step-00000006", "checkpoints/step-00000004", "adapter"):
        shutil.rmtree(straight / name)
    (straight / "samples.jsonl").write_bytes(whole + b'{"step": 8, "row": "\xe2\x80')
    assert (run(resume=True) / "samples.jsonl").read_bytes() == whole


class Asking(Silent):
    """After some steps asks for an evaluation, or for an end."""

    def __init__(self, path: Path, after: set[int], *, stop: int | None = None) -> None:
        self._path, self._after, self._stop, self._now = path, after, stop, 0

    def step(self, record: dict[str, Any], *, total: int) -> None:
        self._now = record["step"]
        if self._now in self._after:
            evaluation_request.ask(self._path, {"recipe": "sft"})

    def stop_requested(self) -> bool:
        return self._stop is not None and self._now >= self._stop


@pytest.mark.nightly(but=["plain", "frozen prefix"])
@pytest.mark.parametrize("name", CELLS)
def test_an_evaluation_that_is_asked_for_changes_nothing_else(name: str, run: Callable[..., Path]) -> None:
    plateau = () if name == "schedule-free" else ("schedule={name: plateau, patience: 1}",)
    more = (*VARIANTS[name], "evaluate.patience=3", *plateau)
    usual = run(*more)
    path = usual.parent / "asked"
    run_config(run_directory.read_config(usual), out=path, resume=False, callback=Asking(path, {2, 3, 4}))
    found, expected = _lines(path, "metrics.jsonl"), _lines(usual, "metrics.jsonl")
    assert [line["loss"] for line in found] == [line["loss"] for line in expected]
    assert [line["learning_rate"] for line in found] == [line["learning_rate"] for line in expected]
    assert [line["step"] for line in found if "asked" in line] == [3, 5]  # at 4 it was due
    assert all(("held_out_loss" in line) == (line["step"] % 2 == 0 or line["step"] in (3, 5)) for line in found)
    assert {line["step"] for line in _lines(path)} == {0, 2, 3, 4, 5, 6}
    _require_same_adapter(usual, path)
    states = [json.loads((each / "checkpoints/step-00000006/state.json").read_text()) for each in (usual, path)]
    for state in states:
        del state["progress"]["elapsed_s"]
    assert states[0] == states[1]  # neither the best step nor the patience heard of it
    assert not evaluation_request.is_open(path)


RECIPES: dict[str, tuple[str, ...]] = {
    "prefer/quickstart": ("evaluate.answers=2",),
    "reinforce/quickstart": (
        "evaluate={every: 1, answers: 2, samples: 2}",
        "reinforce={max_new_tokens: 4, answers: 2, beta: 0}",
    ),
    "distill/quickstart": ("evaluate.answers=2", "distill.teacher.id=starter"),
}


@pytest.mark.nightly(but=["reinforce/quickstart"])
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_other_recipes_answer_too(name: str, tmp_path: Path) -> None:
    words = ["train.epochs=null", "train.steps=2", "batch.size=4", "data.limit=24", "evaluate.every=1"]
    words += ["evaluate.max_new_tokens=4", "evaluate.samples=2", "save.every=null", "data.max_tokens=128"]
    words += ["data.on_bad_row=skip", *RECIPES[name]]
    lines = _lines(workbench.run(name, words, out=tmp_path / "run", quiet=True))
    assert [line["step"] for line in lines] == [0, 0, 1, 1, 2, 2]
    assert all(line["prompt"] and line["row"] for line in lines)
    assert all(bool(line["reference"]) == (name != "reinforce/quickstart") for line in lines)


def test_a_request_of_a_process_that_ended_is_forgotten(run: Callable[..., Path]) -> None:
    path = run()
    config = run_directory.read_config(path)
    other = path.parent / "other"
    with pytest.raises(Stopped):
        run_config(config, out=other, resume=False, callback=Asking(other, {3}, stop=3))
    assert not evaluation_request.is_open(other), "it was heard with the stop, and the run ends"
    evaluation_request.ask(other, {"recipe": "sft"})  # of nobody that lives
    run_config(config, out=other, resume=True, callback=Silent())
    assert _losses(other) == _losses(path)


@pytest.fixture
def tokenizer(stories: str) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories)
    return found


@pytest.mark.parametrize("budget", [1, 20, 4096])
@torch.no_grad()
def test_likelihood_is_the_labelled_loss_of_each_row(
    llama: PreTrainedModel, rows: TokenizedSet, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", budget)
    found = evaluation.likelihood(llama, output_heads.find(llama, llama), rows)
    total, hits, count = 0.0, 0, 0
    for number in range(len(rows)):
        row = rows[number]
        ids = torch.from_numpy(row.input_ids)[None]
        labels = torch.where(torch.from_numpy(row.supervised)[None], ids, -100)
        output = llama(input_ids=ids, labels=labels)
        supervised = int(row.supervised[1:].sum())
        total += float(output.loss) * supervised
        hits += int(((output.logits[0, :-1].argmax(-1) == ids[0, 1:]) & (labels[0, 1:] != -100)).sum())
        count += supervised
    assert count == rows.supervised.sum()
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.token_accuracy == pytest.approx(hits / count)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)


def test_perplexity_of_a_hopeless_model_is_infinite() -> None:
    assert Likelihood(1000.0, 0.0).perplexity == math.inf


def test_answers_ask_for_the_last_turn_of_evenly_spaced_rows(
    llama: PreTrainedModel, rows: TokenizedSet, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = evaluation.answers(llama, rows, tokenizer, count=99, max_new_tokens=3)
    # Rows 2, 4 and 5 carry loss from their second token on or earlier: nothing asks for them.
    assert [answer.place for answer in found] == ["rows.jsonl, row 1", "rows.jsonl, row 3"]
    first = rows[0].input_ids
    assert found[0].prompt == tokenizer.decode(first[:6], skip_special_tokens=True)
    assert found[0].reference == str(tokenizer.decode(first[6:], skip_special_tokens=True)).strip()
    assert evaluation.answers(llama, rows, tokenizer, count=0, max_new_tokens=3) == []


@torch.no_grad()
def test_completions_in_batches_are_those_of_each_prompt_alone(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng(1)
    prompts = [chance.integers(3, 64, size) for size in (2, 9, 5, 9, 1, 30)]
    stop = int(llama(input_ids=torch.from_numpy(prompts[0])[None]).logits[0, -1].argmax())
    tokenizer.add_special_tokens({"additional_special_tokens": [str(tokenizer.convert_ids_to_tokens(stop))]})
    found = evaluation.complete(llama, prompts, tokenizer, stop=[stop], max_new_tokens=8)
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.from_numpy(prompt)[None]
        for _ in range(8):
            ids = torch.cat([ids, llama(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            if ids[0, -1] == stop:
                break
        written = [int(token) for token in ids[0, len(prompt) :] if token != stop]
        assert text == str(tokenizer.decode(written, skip_special_tokens=True)).strip()
    assert found[0] == "" and any(found)
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", 20)
    assert evaluation.complete(llama, prompts, tokenizer, stop=[stop], max_new_tokens=8) == found


def test_generation_stops_at_eos_and_at_what_ends_a_turn(
    rows: TokenizedSet, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert evaluation.stop_tokens(tokenizer, rows) == [2]
    end, plain = int(rows[1].input_ids[-1]), int(rows[3].input_ids[-1])
    tokenizer.add_special_tokens({"additional_special_tokens": [str(tokenizer.convert_ids_to_tokens(end))]})
    assert evaluation.stop_tokens(tokenizer, rows) == sorted({2, end})
    assert plain not in evaluation.stop_tokens(tokenizer, rows), "an ordinary word ends no turn"


def test_an_end_of_turn_that_was_added_as_a_special_token_stops_generation(
    rows: TokenizedSet, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Such tokens are special, but `all_special_ids` does not list them."""
    tokenizer.add_tokens(["<|end|>"], special_tokens=True)
    number = tokenizer.get_vocab()["<|end|>"]
    assert number not in tokenizer.all_special_ids
    written = [row | {"input_ids": [*row["input_ids"][:-1], number]} for row in rows.table.data.to_pylist()]
    ended = replace(rows, table=TokenTable(pyarrow.Table.from_pylist(written)))
    assert evaluation.stop_tokens(tokenizer, ended) == [2, number]


def test_summary_rounds_and_leaves_out_what_was_not_measured() -> None:
    found = Likelihood(1 / 3, 0.25)
    assert evaluation.summary(found, []) == {"loss": 0.333333, "perplexity": 1.395612, "token_accuracy": 0.25}
    answers = [GeneratedAnswer("a", "p", "a cat", "cat"), GeneratedAnswer("b", "p", "a dog", "cat")]
    assert evaluation.summary(found, answers)["f1"] == evaluation.summary(found, answers)["rouge_l"] == 0.5


def test_predictions_hold_both_answers_and_their_scores() -> None:
    answers = [GeneratedAnswer("x, row 1", "Who?", "the cat", "cat"), GeneratedAnswer("x, row 2", "What?", "猫", "犬")]
    table = evaluation.answer_table(answers, before={"x, row 2": "猫", "x, row 1": "dog"})
    assert list(table["row"]) == ["x, row 1", "x, row 2"]
    assert list(table["before"]) == ["dog", "猫"] and list(table["after"]) == ["cat", "犬"]
    for score in ("f1", "rouge_l"):
        assert list(table[f"{score}_before"]) == [0.0, 1.0] and list(table[f"{score}_after"]) == [1.0, 0.0]
    assert list(evaluation.answer_table(answers, before={})) == [
        "row",
        "prompt",
        "reference",
        "after",
        "f1_after",
        "rouge_l_after",
    ]
