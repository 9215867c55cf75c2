"""Loops over one backbone: each as if it were alone, whatever the others do."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench
from workbench.adapters import Lora
from workbench.config import ModelConfig
from workbench.errors import ConfigError, FileError, TrainingError
from workbench.evaluation.serving.scheduler import ShuttingDown
from workbench.evaluation.serving.training_bank import BankClient, Datum, TrainingBank
from workbench.models import backbones

PROMPT = [5, 9, 14, 200]


@pytest.fixture(scope="module")
def bank(stories: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingBank]:
    """Small parts and passes, so that requests are cut, and wait for one another."""
    opened = open_bank(stories, tmp_path_factory.mktemp("states"))
    yield opened
    opened.close()


def open_bank(stories: str, folder: Path) -> TrainingBank:
    model = ModelConfig(id=stories, weights="float32", compute="float32")
    return TrainingBank(model, folder=folder, part=60, tokens=150)


@pytest.fixture
def create(bank: TrainingBank) -> Iterator[Callable[..., BankClient]]:
    made: list[BankClient] = []

    def one(**settings: Any) -> BankClient:
        rank, seed = settings.pop("rank", 2), settings.pop("seed", 0)
        made.append(bank.create(Lora(rank=rank, alpha=8), seed=seed, **settings))
        return made[-1]

    yield one
    for each in made:
        each.close()


def rows(seed: int, lengths: Sequence[int] = (23, 5, 31, 12), **inputs: float) -> list[Datum]:
    made = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 * seed + number)
        ids = torch.randint(3, 500, (length,), generator=generator).tolist()
        made.append(Datum.answer(ids[:2], ids[2:], **{key: [value] * (length - 2) for key, value in inputs.items()}))
    return made


def sampled(seed: int, lengths: Sequence[int]) -> list[Datum]:
    """Rows of an answer that was sampled, as losses of policies read them."""
    found = rows(seed, lengths, logprobs=-5.5, advantages=0.5)
    return [
        Datum(each.tokens, {key: value for key, value in each.inputs.items() if key != "weights"}) for each in found
    ]


LOOPS: list[tuple[dict[str, Any], str, list[Datum]]] = [
    ({"rank": 2, "seed": 1}, "cross_entropy", rows(1)),
    ({"rank": 3, "seed": 2}, "ppo", sampled(2, (40, 7))),
    ({"rank": 2, "seed": 3}, "importance_sampling", sampled(3, (9, 9, 9))),
    ({"rank": 2, "seed": 4}, "cross_entropy", rows(4, (100,))),
]


def train(loops: Sequence[tuple[BankClient, str, list[Datum]]], *, steps: int = 2) -> list[list[Any]]:
    """Losses and log-probabilities of each step, then the values, of each loop."""
    asked: list[list[Any]] = [[] for _ in loops]
    updates = []
    for _ in range(steps):
        for (client, loss, data), futures in zip(loops, asked, strict=True):
            futures.append(client.forward_backward(data, loss))
            updates.append(client.optim_step(learning_rate=1e-2, grad_clip_norm=1.0))
    for each in updates:
        each.result()
    return [
        [each for future in futures for each in (future.result().loss, *future.result().logprobs)]
        + [value.detach().clone() for value in client.values]
        for (client, _, _), futures in zip(loops, asked, strict=True)
    ]


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(one, other) if isinstance(one, Tensor) else one == other
        for one, other in zip(first, second, strict=True)
    )


def test_each_loop_has_the_bits_that_it_has_alone(create: Callable[..., BankClient]) -> None:
    """Other ranks, losses, lengths and numbers of parts beside it, in passes that do not hold them all."""
    together = train([(create(**settings), loss, data) for settings, loss, data in LOOPS])
    for (settings, loss, data), found in zip(LOOPS, together, strict=True):
        assert same(train([(create(**settings), loss, data)])[0], found)


def test_a_loop_trains_as_a_plain_adapter_does(stories: str, create: Callable[..., BankClient]) -> None:
    """PEFT's model, torch's AdamW and a cross-entropy written out."""
    data = rows(7)
    losses = train([(create(rank=4, seed=5), "cross_entropy", data)], steps=4)[0]
    model = ModelConfig(id=stories, weights="float32", compute="float32")
    plain = workbench.attach(backbones.load(model, None).model, Lora(rank=4, alpha=8), seed=5)
    values = [each for each in plain.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(values, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    for step in range(4):
        total = torch.zeros(())
        for each in data:
            logits = plain(input_ids=torch.tensor([each.tokens])).logits[0]
            target, weight = torch.tensor(each.inputs["target_tokens"]), torch.tensor(each.inputs["weights"])
            total = total + (torch.nn.functional.cross_entropy(logits, target, reduction="none") * weight).sum()
        assert losses[step * (1 + len(data))] == pytest.approx(total.item(), rel=1e-5)
        total.backward()
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_a_loss_of_ones_own_gets_the_log_probabilities(create: Callable[..., BankClient]) -> None:
    """The same bits as the loss of that name, over several parts; its metrics come back."""

    def negative(data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weights = [each.inputs["weights"] for each in data]
        loss = -sum(((p * w).sum() for p, w in zip(logprobs, weights, strict=True)), torch.zeros(()))
        return loss, {"rows": float(len(data))}

    own, named = create(seed=3), create(seed=3)
    first, second = own.forward_backward(rows(1), negative), named.forward_backward(rows(1))
    for client in (own, named):
        client.optim_step(learning_rate=1e-2).result()
    assert first.result().metrics == {"rows": 4.0}
    assert first.result().loss == pytest.approx(second.result().loss)
    assert all(map(torch.equal, own.values, named.values))
    before = [each.clone() for each in own.values]
    assert own.forward(rows(1), negative).result().loss < first.result().loss
    with pytest.raises(TrainingError, match="there are no gradients"):
        own.optim_step().result()
    assert all(map(torch.equal, own.values, before))


def test_several_targets_in_a_place(create: Callable[..., BankClient]) -> None:
    """The log-probabilities of all tokens add up to 1."""
    every = torch.arange(512).expand(3, -1)
    found = create().forward([Datum([4, 5, 6], {"target_tokens": every})]).result().logprobs[0]
    torch.testing.assert_close(found.exp().sum(1), torch.ones(3))


def test_gradients_add_up_until_a_step(create: Callable[..., BankClient]) -> None:
    one, two = create(seed=3), create(seed=3)
    one.forward_backward(rows(1, (20, 30)))
    for data in (rows(1, (20, 30))[:1], rows(1, (20, 30))[1:]):
        two.forward_backward(data)
    norms = [each.optim_step().result()["grad_norm"] for each in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_errors_stay_with_their_loop(create: Callable[..., BankClient]) -> None:
    """NaN in a loss, a function that fails: others keep their bits, and the loop itself its adapter."""

    def broken(*_: Any) -> Any:
        raise ValueError("oh")

    alone = train([(create(seed=1), "cross_entropy", rows(1))], steps=1)[0]
    bad, worse, good = create(seed=2), create(seed=3), create(seed=1)
    before = [each.detach().clone() for each in bad.values]
    nan = bad.forward_backward(rows(1, weights=math.nan))
    failing, step = worse.forward_backward(rows(1), broken), bad.optim_step()
    assert same(train([(good, "cross_entropy", rows(1))], steps=1)[0], alone)
    assert math.isnan(nan.result().loss)
    with pytest.raises(TrainingError, match="not finite"):
        step.result()
    with pytest.raises(TrainingError, match="ValueError: oh"):
        failing.result()
    assert all(map(torch.equal, bad.values, before))
    assert bad.forward_backward(rows(1)).result().loss > 0


def test_memory_that_runs_out_stays_with_its_loop(
    bank: TrainingBank, create: Callable[..., BankClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bank._pass

    def short(chosen: Any) -> Any:
        if any(len(each.tokens) > 50 for _, _, rows_ in chosen for each in rows_):
            raise torch.OutOfMemoryError("out of memory")
        return whole(chosen)

    monkeypatch.setattr(bank, "_pass", short)
    large, small = create().forward_backward(rows(1, (60,))), create().forward_backward(rows(1, (10,)))
    assert small.result().loss > 0
    with pytest.raises(TrainingError, match="Send fewer or shorter rows"):
        large.result()


def test_everyone_is_served_in_turn(bank: TrainingBank, create: Callable[..., BankClient]) -> None:
    """A loop with much to do waits for those with little, not they for it."""
    greedy = create().forward(rows(1, (60,) * 12))
    small = [create().forward(rows(each, (30,))) for each in range(3)]
    for _ in range(3):
        bank.work()
    assert all(each.done() for each in small)
    assert not greedy.done()
    assert greedy.result().loss > 0


def test_states_continue_to_the_same_bits(stories: str, tmp_path: Path, bank: TrainingBank) -> None:
    """In another bank, with its optimizer; a state that was not written whole is none."""
    first = bank.create(Lora(rank=2, alpha=8), seed=1, key="kept")
    train([(first, "cross_entropy", rows(1))])
    folder = first.save_state("after").result()
    wanted = train([(first, "cross_entropy", rows(1))])[0]
    first.close()
    other = open_bank(stories, tmp_path)
    second = other.create(Lora(rank=2, alpha=8), seed=9)
    second.load_state(folder)
    assert same(train([(second, "cross_entropy", rows(1))])[0], wanted)
    assert second.steps == 4
    with pytest.raises(ConfigError, match="its adapter is another one"):
        other.create(Lora(rank=3, alpha=8)).load_state(folder).result()
    with pytest.raises(FileError, match="no state stands here"):
        second.load_state(folder / "there").result()
    with pytest.raises(ConfigError, match="has this name already"):
        [second.save_state("twice") for _ in range(2)][1].result()
    with pytest.raises(ConfigError, match="a name has"):
        second.save_state("../out")
    other.close()
    with pytest.raises(ShuttingDown):
        other.create()


WRITER = """
import sys, workbench
from workbench.adapters import Lora
from workbench.config import ModelConfig
bank = workbench.TrainingBank(ModelConfig(id=sys.argv[1], weights="float32", compute="float32"), folder=sys.argv[2])
loop = bank.create(Lora(rank=2, alpha=8), seed=1, key="killed")
while True:
    loop.forward_backward([workbench.Datum.answer([5, 6], [7, 8, 9])])
    loop.optim_step(learning_rate=1e-3)
    loop.save_state("latest", overwrite=True).result()
    print(loop.steps, flush=True)
"""


@pytest.mark.slow
def test_a_kill_leaves_whole_states(stories: str, tmp_path: Path) -> None:
    """A process that writes one state over the other is killed at any moment: the one that stands there is whole."""
    command = [sys.executable, "-c", WRITER, stories, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(5)][-1]
        process.kill()
    bank = open_bank(stories, tmp_path)
    loop = bank.create(Lora(rank=2, alpha=8), seed=2)
    loop.load_state(tmp_path / "killed" / "weights" / "latest").result()
    assert loop.steps >= told
    row = [Datum.answer([5, 6], [7, 8, 9])]
    wanted = bank.create(Lora(rank=2, alpha=8), seed=1)
    for _ in range(loop.steps):
        wanted.forward_backward(row)
        wanted.optim_step(learning_rate=1e-3)
    assert wanted.forward(row).result().loss == loop.forward(row).result().loss
    assert [each.name for each in (tmp_path / "killed" / "weights").iterdir()] == ["latest"]


def test_samplers_keep_their_weights(bank: TrainingBank, create: Callable[..., BankClient]) -> None:
    """Answers of a sampler do not change as its loop trains on; its scores are those of the loop at that time."""
    client = create(seed=1)
    train([(client, "cross_entropy", rows(1))])
    sampler = client.save_weights_for_sampler().result()

    def answers() -> Any:
        return sampler.sample(PROMPT, samples=2, max_tokens=6, seed=3, stop=[], prompt_logprobs=True).result()

    first = answers()
    ids = [*PROMPT, *first.answers[0].tokens]
    scored = client.forward([Datum(ids[:-1], {"target_tokens": ids[1:]})]).result().logprobs[0]
    mine = [each.logprob for each in first.prompt[1:]] + first.answers[0].logprobs
    torch.testing.assert_close(torch.tensor(mine), scored, rtol=1e-4, atol=1e-4)
    train([(client, "cross_entropy", rows(1))])
    assert answers() == first
    later = client.save_weights_for_sampler().result().sample(PROMPT, max_tokens=6, seed=3, stop=[]).result()
    assert later.answers[0].logprobs != first.answers[0].logprobs
    folder = client.save_adapter("sampler").result()
    again = bank.load_sampler(folder).sample(PROMPT, max_tokens=6, seed=3, stop=[]).result()
    assert again == later
    base = [bank.base().sample(PROMPT, max_tokens=6, temperature=0).result() for _ in range(2)]
    assert base[0] == base[1]
    assert bank.base().sample(PROMPT, max_tokens=6, top_k=1).result().answers[0].tokens == base[0].answers[0].tokens


def test_an_adapter_of_nan_stops_no_sampler(stories: str, tmp_path: Path) -> None:
    """Also where it is there before anybody has sampled."""
    bank = open_bank(stories, tmp_path)
    bad, good = (bank.create(Lora(rank=2, alpha=8), seed=seed) for seed in range(2))
    with torch.no_grad():
        bad.values[0].fill_(math.nan)
    samplers = [each.save_weights_for_sampler().result() for each in (bad, good)]
    asked = [each.sample(PROMPT, max_tokens=5, stop=[]) for each in samplers]
    assert len(asked[1].result().answers[0].tokens) == 5
    with pytest.raises(TrainingError, match="interrupted"):
        asked[0].result()
    later = bank.create(Lora(rank=3, alpha=8)).save_weights_for_sampler().result()
    assert len(later.sample(PROMPT, max_tokens=5, stop=[]).result().answers[0].tokens) == 5
    bank.close()


BAD: list[tuple[Any, str]] = [
    (lambda c: c.forward([]), "there is no row"),
    (lambda c: c.forward(rows(1), "hinge"), "'hinge' is none of"),
    (lambda c: c.forward(rows(1), "ppo"), "logprobs, advantages: missing"),
    (lambda c: c.forward(sampled(1, (9,))), "advantages, logprobs: the loss reads no such input"),
    (lambda c: c.forward(rows(1), beta=1.0), "beta=1.0: this loss has the numbers: none"),
    (lambda c: c.forward([Datum([], {"target_tokens": []})]), "it has 0 tokens"),
    (lambda c: c.forward([Datum([1, 2], {"target_tokens": [1]})]), "target_tokens has shape"),
    (lambda c: c.forward([Datum([1, 2], {"target_tokens": [1, 512]})]), "whole numbers from 0 to 511"),
    (lambda c: c.forward([Datum([1, -2], {"target_tokens": [1, 2]})]), "whole numbers from 0 to 511"),
    (lambda c: c.forward([Datum([1, 2], {"target_tokens": [1, 2], "weights": [1.0]})]), "weights has shape"),
    (lambda c: c.forward([Datum([1, 2], {"target_tokens": ["a", "b"]})]), "target_tokens: "),
    (lambda c: c.optim_step(learning_rate=-1.0), "learning_rate=-1.0: write a number from 0 on"),
    (lambda c: c.optim_step(eps=math.nan), "eps=nan"),
    (lambda c: c.optim_step(beta1=1.0), "beta1=1.0"),
    (lambda c: c.bank.create(Lora(dropout=0.1)), "Write adapter.dropout=0"),
    (lambda c: c.bank.create(Lora(targets=["nothing"])), "adapter"),
    (lambda c: c.bank.base().sample([]), "prompt: 1 to"),
    (lambda c: c.bank.base().sample([1], max_tokens=0), "max_tokens=0"),
    (lambda c: c.bank.base().sample([1], max_tokens=10**6), "max_tokens=1000000"),
    (lambda c: c.bank.base().sample([1], temperature=-1.0), "temperature=-1.0"),
    (lambda c: c.bank.base().sample([1], top_p=0.0), "top_p=0.0"),
    (lambda c: c.bank.base().sample([1], samples=0), "samples=0"),
]


def test_bad_requests_are_refused_at_once(create: Callable[..., BankClient]) -> None:
    client = create()
    for ask, said in BAD:
        with pytest.raises(ConfigError, match=said):
            ask(client)


def test_a_removed_loop_answers_no_more(create: Callable[..., BankClient]) -> None:
    client = create()
    waiting = client.forward(rows(1))
    client.close()
    with pytest.raises(TrainingError, match="was removed"):
        waiting.result()
    with pytest.raises(ConfigError, match="was removed"):
        client.forward(rows(1))
