"""What a student writes is drawn from its probabilities, whatever is beside it; other rows are as they were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import DeepPrompt, Lora, Method, Prompt
from workbench.config import DataConfig, RunConfig
from workbench.config.model_heads import TEXT
from workbench.config.sections.distill_config import OnPolicyConfig
from workbench.data.batching import Indices
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import on_policy
from workbench.distillation.on_policy import AnswerWriter, OnPolicy, require_causal, require_room, writer
from workbench.errors import ConfigError
from workbench.losses.next_token import NO_LABEL
from workbench.models import backbones

METHODS: list[Method] = [Lora(rank=4, dropout=0.5), Prompt(virtual_tokens=3), DeepPrompt(virtual_tokens=3)]
PROMPTS = [np.asarray(ids) for ids in ([1, 403, 407, 261], [1, 268, 388, 342, 432, 398, 299, 280], [1, 410])]
SEEDS = [11, 2**63 - 1, 5]
STOPS = [2]


@pytest.fixture(scope="module")
def tokenizer(stories: str) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories)
    return found


@pytest.fixture
def model(stories: str) -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(stories)
    return found


@pytest.fixture
def rows(questions: Path, tokenizer: PreTrainedTokenizerBase) -> TokenizedSet:
    return _read(questions, tokenizer)


def _read(path: Path, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> TokenizedSet:
    config = DataConfig.model_validate({"train": str(path), **settings})
    return tokenized.read(str(path), config, tokenizer, ChatEncoder(tokenizer))


def _talk(path: Path) -> Path:
    """A conversation with two answers."""
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "Who?"), ("assistant", "It is me, said the cat.")]
    path.write_text(json.dumps({"messages": [{"role": role, "content": said} for role, said in turns]}) + "\n")
    return path


class Scribe:
    """Writes answers of different lengths, and remembers what it was asked."""

    def __init__(self, longest: int = 64) -> None:
        self.longest = longest
        self.asked: list[list[Indices]] = []

    def __call__(self, prompts: Sequence[Indices], seeds: Sequence[int], *, stop: Sequence[int]) -> list[Indices]:
        assert stop is STOPS
        self.asked.append(list(prompts))
        return [np.arange(3, 3 + seed % (self.longest + 1)) for seed in seeds]


def _on_policy(train: TokenizedSet, write: AnswerWriter, seed: int = 0, **settings: Any) -> OnPolicy:
    return OnPolicy(train, write, OnPolicyConfig(**settings), seed=seed, stop=STOPS)


def test_no_share_is_the_plain_set(rows: TokenizedSet) -> None:
    def never(*_: Any, **__: Any) -> list[Indices]:
        raise AssertionError

    found, draws = _on_policy(rows, never, share=0.0), np.asarray([7, 3, 110, 0])
    before = found.batch(draws)
    assert np.array_equal(found.sample(draws, epoch=1), draws) and len(found) == len(rows)
    assert np.array_equal(found.lengths, rows.lengths) and np.array_equal(found.supervised, rows.supervised)
    wanted = rows.batch(draws)
    for batch in (before, found.batch(draws, epoch=1)):
        assert torch.equal(batch.inputs["input_ids"], wanted.inputs["input_ids"])
        assert torch.equal(batch.positions_N, wanted.positions_N) and torch.equal(batch.labels_N, wanted.labels_N)
        assert batch.rows_B is draws and batch.tokens == wanted.tokens
    assert found.place(3) == rows.place(3)


def test_a_share_of_the_rows_is_written_and_each_row_is_what_was_drawn_for_it(rows: TokenizedSet) -> None:
    scribe = Scribe(9)
    found, draws = _on_policy(rows, scribe, share=0.4, max_new_tokens=9), np.random.default_rng(0).permutation(120)
    found.sample(draws, epoch=2)
    batch = found.batch(draws[:50], epoch=2)
    length = batch.inputs["input_ids"].shape[1]
    of_row = [batch.positions_N // length == number for number in range(50)]
    assert [int(mask.sum()) for mask in of_row] == found.supervised[draws[:50]].tolist()
    assert batch.lengths_B is not None and batch.lengths_B.tolist() == found.lengths[draws[:50]].tolist()
    written = 0
    for number, row in enumerate(draws[:50]):
        labels, own = batch.labels_N[of_row[number]], rows[int(row)]
        if not (labels == NO_LABEL).any():
            assert batch.inputs["input_ids"][number, : len(own.input_ids)].tolist() == own.input_ids.tolist()
            assert labels.tolist() == own.input_ids[own.supervised].tolist()
            continue
        written += 1
        start = int(own.supervised.argmax())
        ids = batch.inputs["input_ids"][number, : found.lengths[row]]
        assert ids[:start].tolist() == own.input_ids[:start].tolist()
        assert ids[start:].tolist() == list(range(3, 3 + len(ids) - start)) and (labels == NO_LABEL).all()
        predicted = batch.positions_N[of_row[number]] - number * length + 1
        assert predicted.tolist() == list(range(start, len(ids)))
    # Forty in a hundred, and one in ten of these wrote nothing.
    assert 10 <= written <= 27 and 36 <= len(scribe.asked[0]) <= 60


def test_an_empty_answer_leaves_a_row_its_labels(rows: TokenizedSet) -> None:
    found, draws = _on_policy(rows, Scribe(0), share=1.0), np.arange(9)
    found.sample(draws, epoch=0)
    assert torch.equal(found.batch(draws).labels_N, rows.batch(draws).labels_N)
    assert np.array_equal(found.lengths[draws], rows.lengths[draws])
    assert np.array_equal(found.supervised, rows.supervised)


def test_which_rows_and_their_dice_depend_on_nothing_but_seed_epoch_and_row(rows: TokenizedSet) -> None:
    def lengths(draws: Indices, epoch: int, seed: int = 0) -> list[int]:
        found = _on_policy(rows, Scribe(50), seed, share=0.5, max_new_tokens=50)
        return [int(found.lengths[row]) for row in np.sort(found.sample(draws, epoch=epoch))]

    whole = lengths(np.arange(120), 0)
    assert lengths(np.arange(120)[::-1].copy(), 0) == whole
    assert lengths(np.arange(40), 0) == whole[:40] and lengths(np.arange(77, 78), 0) == whole[77:78]
    assert lengths(np.arange(120), 1) != whole != lengths(np.arange(120), 0, seed=1)


def test_a_step_is_written_once_however_often_it_is_asked_for(rows: TokenizedSet) -> None:
    scribe = Scribe()
    found, draws = _on_policy(rows, scribe, share=1.0), np.arange(6)
    found.sample(draws, epoch=0)
    first = found.batch(draws)
    found.sample(draws.copy(), epoch=0)
    assert len(scribe.asked) == 1 and len(scribe.asked[0]) == 6
    assert torch.equal(found.batch(draws).inputs["input_ids"], first.inputs["input_ids"])
    found.sample(draws, epoch=1)
    found.sample(draws[:5], epoch=1)
    assert [len(asked) for asked in scribe.asked] == [6, 6, 5]


def test_lengths_bound_what_comes_and_a_trial_is_as_long(rows: TokenizedSet) -> None:
    found = _on_policy(rows, Scribe(12), share=0.7, max_new_tokens=12)
    bound, everything = found.lengths.copy(), np.arange(120)
    starts = np.asarray([int(rows[row].supervised.argmax()) for row in everything])
    assert np.array_equal(bound, np.maximum(rows.lengths, starts + 12))
    trial = found.batch(everything)
    assert trial.lengths_B is not None and trial.lengths_B.tolist() == bound.tolist()
    for epoch in range(3):
        draws = np.arange(epoch, 100)
        found.sample(draws, epoch=epoch)
        assert (found.lengths <= bound).all() and (found.lengths[draws] < bound[draws]).any()
        assert np.array_equal(np.delete(found.lengths, draws), np.delete(bound, draws))


def test_the_last_answer_is_rewritten_and_what_has_no_prompt_is_not(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    talk, scribe = _read(_talk(tmp_path / "talk.jsonl"), tokenizer), Scribe(40)
    found = _on_policy(talk, scribe, share=1.0, max_new_tokens=40)
    found.sample(np.arange(1), epoch=0)
    row = talk[0]
    [prompt] = scribe.asked[0]
    assert tokenizer.decode(prompt).endswith("Who?\n\nAssistant:\n") and "Hello." in tokenizer.decode(prompt)
    assert tokenizer.decode(row.input_ids[len(prompt) :][row.supervised[len(prompt) :]]).startswith("It is me, said")
    assert row.supervised[: len(prompt)].any()
    labels_N = found.batch(np.arange(1)).labels_N
    assert len(labels_N) == found.supervised[0] and (labels_N == NO_LABEL).all()

    whole = _read(tmp_path / "talk.jsonl", tokenizer, loss_on="all")
    assert _on_policy(whole, scribe, share=1.0).batch(np.arange(1)).labels_N.tolist() == row.input_ids[1:].tolist()


@pytest.mark.parametrize("method", [None, *METHODS], ids=lambda method: method.method if method else "backbone")
def test_an_answer_depends_on_prompt_and_seed_alone(
    method: Method | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    trained: Any = model if method is None else adapters.attach(model, method, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in trained.parameters():
        if parameter.requires_grad and method is not None:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    trained.train()
    write = writer(trained, tokenizer, OnPolicyConfig(share=1.0, max_new_tokens=12))
    together = write(PROMPTS, SEEDS, stop=STOPS)
    assert trained.training and all(1 <= len(answer) <= 12 for answer in together)
    assert len({tuple(answer) for answer in together}) == 3
    for number in (2, 0, 1):
        [alone] = write(PROMPTS[number : number + 1], SEEDS[number : number + 1], stop=STOPS)
        assert alone.tolist() == together[number].tolist()
    same = write([PROMPTS[0]] * 3, SEEDS, stop=STOPS)
    assert same[0].tolist() == together[0].tolist() and len({tuple(answer) for answer in same}) == 3


def test_a_window_that_forbids_padding_changes_no_dice(tokenizer: PreTrainedTokenizerBase) -> None:
    model = adapters.attach(tiny("Mistral"), DeepPrompt(virtual_tokens=3), seed=0)
    write = writer(model, tokenizer, OnPolicyConfig(share=1.0, max_new_tokens=6))
    prompts = [prompt % 64 for prompt in PROMPTS]
    together = write(prompts, SEEDS, stop=STOPS)
    alone = [write([prompt], [seed], stop=STOPS)[0] for prompt, seed in zip(prompts, SEEDS, strict=True)]
    assert [answer.tolist() for answer in together] == [answer.tolist() for answer in alone]
    same = write([prompts[0]] * 3, SEEDS, stop=STOPS)
    assert len({tuple(answer) for answer in same}) == 3


@torch.no_grad()
def test_draws_follow_the_probabilities(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model.generation_config.repetition_penalty = 50.0  # no penalty is meant, whatever the backbone came with
    count, config = 6000, OnPolicyConfig(share=1.0, max_new_tokens=1, temperature=1.7)
    written = writer(model, tokenizer, config)([PROMPTS[1]] * count, range(count), stop=[])
    found = np.bincount(np.concatenate(written), minlength=512)
    wanted = torch.softmax(model(torch.from_numpy(PROMPTS[1])[None]).logits[0, -1].double() / 1.7, -1).numpy() * count
    order = np.argsort(-wanted)
    often = order[: int((wanted >= 5).sum())]
    seen = np.append(found[often], count - found[often].sum())
    expected = np.append(wanted[often], count - wanted[often].sum())
    assert len(often) > 50 and stats.chisquare(seen, expected).pvalue > 0.001
    hotter = torch.softmax(model(torch.from_numpy(PROMPTS[1])[None]).logits[0, -1].double(), -1).numpy()[often] * count
    assert stats.chisquare(seen[:-1], hotter * seen[:-1].sum() / hotter.sum()).pvalue < 1e-6
    assert model.generation_config.repetition_penalty == 50.0


def test_each_token_of_an_answer_has_dice_of_its_own(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    config = OnPolicyConfig(share=1.0, max_new_tokens=8)
    written = np.stack(writer(model, tokenizer, config)([PROMPTS[2]] * 500, range(500), stop=[]))
    assert len(np.unique(written)) > 500
    repeated = (written[:, 1:] == written[:, :-1]).mean()
    assert repeated < 0.01  # one in 512 by chance


def test_an_answer_ends_with_its_stop_and_knows_no_token_beyond_the_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    model.resize_token_embeddings(2000)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    stop, config = list(range(0, 512, 8)), OnPolicyConfig(share=1.0, max_new_tokens=20)
    written = writer(model, tokenizer, config)([*PROMPTS] * 60, range(180), stop=stop)
    assert max(int(answer.max()) for answer in written) < 512
    ended = [answer for answer in written if answer[-1] in stop]
    assert all(not np.isin(answer[:-1], stop).any() for answer in written)
    assert all(len(answer) == 20 for answer in written if answer[-1] not in stop)
    assert len(ended) == pytest.approx(180 * (1 - (7 / 8) ** 20), abs=15)
    assert np.mean([len(answer) for answer in written]) == pytest.approx(8 * (1 - (7 / 8) ** 20), abs=1.5)


def test_memory_bounds_what_is_written_at_once(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writer(model, tokenizer, OnPolicyConfig(share=1.0, max_new_tokens=12))
    whole = write(PROMPTS * 4, [seed + n for n in range(4) for seed in (1, 20, 300)], stop=STOPS)
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr(on_policy, "TOKENS", 40)
    parts = write(PROMPTS * 4, [seed + n for n in range(4) for seed in (1, 20, 300)], stop=STOPS)
    hook.remove()
    assert max(sizes) == 2 and [part.tolist() for part in parts] == [each.tolist() for each in whole]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"share": 1.0, "max_new_tokens": 500}, ["max_new_tokens=500", "room for 512", "Lower it by "]),
        ({"share": 1.0, "max_new_tokens": 200}, ["max_new_tokens=200", "above batch.tokens_per_device=128"]),
    ],
)
def test_too_long_an_answer_is_refused(
    settings: dict[str, Any], words: list[str], rows: TokenizedSet, stories: str
) -> None:
    student = backbones.skeleton(_config(stories, **settings).model, task=TEXT)
    with pytest.raises(ConfigError) as refused:
        require_room(_config(stories, **settings), rows, student)
    assert all(word in str(refused.value) for word in words)
    require_room(_config(stories, **{**settings, "share": 0.0}), rows, student)
    require_room(_config(stories, share=0.5, max_new_tokens=20), rows, student)


def test_an_encoder_decoder_is_refused(encoder_decoder: str, stories: str) -> None:
    require_causal(AutoConfig.from_pretrained(stories))
    with pytest.raises(ConfigError, match=r"t5 is an encoder-decoder.*Leave distill\.on_policy out"):
        require_causal(AutoConfig.from_pretrained(encoder_decoder))


def test_a_set_without_prompts_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, stories: str) -> None:
    whole = _read(_talk(tmp_path / "talk.jsonl"), tokenizer, loss_on="all")
    with pytest.raises(ConfigError, match=r"no row .* has a prompt"):
        require_room(_config(stories, share=0.5), whole, AutoConfig.from_pretrained(stories))


def _config(model: str, **settings: Any) -> RunConfig:
    sections = {
        "recipe": "distill",
        "model": {"id": model},
        "data": {"train": "unread.jsonl"},
        "adapter": {"method": "lora"},
        "batch": {"tokens_per_device": 128},
        "distill": {"teacher": {"id": "backbone"}, "on_policy": settings},
    }
    return RunConfig.model_validate(sections)
