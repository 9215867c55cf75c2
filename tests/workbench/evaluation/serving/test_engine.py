"""Passes hold every token once, in sizes that were found to change nothing."""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from tests.conftest import FAMILIES, tiny
from workbench import evaluation
from workbench.adapters.banks import bank
from workbench.adapters.multi_adapter import BARE
from workbench.config import ModelConfig
from workbench.errors import BackboneError
from workbench.evaluation.serving.engine import OWN, BankRoutes, Chunk, Engine, Sharing, SingleRoutes, laid_out
from workbench.models import attention_backend, backbones, exported, output_heads
from workbench.models.attention_backend import RowCache
from workbench.runs import run_directory

SIZES = st.sets(st.sampled_from([1, 2, 4, 8, 16, 32]), max_size=5).map(lambda passes: (*sorted(passes), 64))
CHUNKS = st.lists(
    st.builds(
        lambda read, tokens, *rest: Chunk(RowCache(read), list(range(1, tokens + 1)), *rest),
        st.integers(0, 5),
        st.integers(1, 64),
        st.sampled_from("abc"),
        st.booleans(),
        st.booleans(),
    ),
    max_size=9,
)
PROMPTS = [[5, 9, 30, 7], [11] * 3, [3, 60, 5, 61, 8, 9], [40, 41], [17, 3, 3, 9, 250]]


@given(CHUNKS, SIZES, st.sampled_from(["all", "member", "none"]))
def test_every_token_is_once_in_a_pass_of_a_known_size(
    chunks: list[Chunk], sizes: tuple[int, ...], sharing: Sharing
) -> None:
    seen = []
    for laid in laid_out(chunks, sizes, sharing=sharing):
        assert len(laid.ids) == len(laid.positions) == sum(rows.many for rows in laid.rows)
        assert len(laid.ids) in sizes and {rows.many for rows in laid.rows[:-1]} <= set(sizes)
        members = [rows.member for rows in laid.rows for _ in range(rows.many)]
        found = {id(chunk.cache): chunk for chunk in chunks}
        for part in laid.parts:
            chunk = found[id(part.cache)]
            assert laid.ids[part.where] == list(chunk.ids)
            assert laid.positions[part.where] == list(range(chunk.cache.length, chunk.cache.length + len(chunk.ids)))
            assert set(members[part.where]) == {chunk.member}
            seen.append(chunk)
        pairs = [(part.where, found[id(part.cache)]) for part in laid.parts]
        wanted = [range(where.start if each.scored else where.stop - each.ends, where.stop) for where, each in pairs]
        assert laid.wanted == list(chain.from_iterable(wanted)) and len(laid.chunks) == sum(map(bool, wanted))
        assert sharing == "all" or len({found[id(part.cache)].member for part in laid.parts}) == 1
        assert sharing != "none" or len(laid.parts) == 1
    assert sorted(map(id, seen)) == sorted(map(id, chunks))


def _engine(runs: list[Path], stories: str, weights: str) -> Engine:
    config = ModelConfig.model_validate({"id": stories, "weights": weights, "compute": weights})
    backbone = backbones.load(config, None).model
    routes = BankRoutes(bank.load(backbone, [run / "adapter" for run in runs]))
    return Engine(routes, backbone, output_heads.known(backbone))


def _greedy(engine: Engine, prompt: list[int], member: str, tokens: int) -> tuple[list[int], Tensor]:
    """An answer and its logits, alone."""
    cache, ids, answer, seen = RowCache(), prompt, [], []
    for _ in range(tokens):
        ((_, (logits_V,)),) = engine.step([Chunk(cache, ids, member)])
        seen.append(logits_V)
        answer.append(int(logits_V.argmax()))
        ids = answer[-1:]
    return answer, torch.stack(seen)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_rows_that_join_and_leave_change_no_bit_of_the_others(
    lora_runs: list[Path], stories: str, weights: str
) -> None:
    engine = _engine(lora_runs, stories, weights)
    rows = [(PROMPTS[n % 5], engine.members[n % 4], n // 2, 3 + n % 4) for n in range(12)]  # joins, tokens
    alone = [_greedy(engine, prompt, member, tokens) for prompt, member, _, tokens in rows]
    caches, pending = [RowCache() for _ in rows], [list(prompt) for prompt, *_ in rows]
    answers: list[list[int]] = [[] for _ in rows]
    for step in range(12):
        chunks = {}
        for n, (_, member, joins, tokens) in enumerate(rows):
            if joins <= step and len(answers[n]) < tokens:
                chunks[n] = Chunk(caches[n], pending[n], member)
        found = {id(chunk): logits_1V[0] for chunk, logits_1V in engine.step(list(chunks.values()))} if chunks else {}
        for n, chunk in chunks.items():
            logits_V = found[id(chunk)]
            assert torch.equal(logits_V, alone[n][1][len(answers[n])])
            answers[n].append(int(logits_V.argmax()))
            pending[n] = answers[n][-1:]
    assert answers == [answer for answer, _ in alone]
    assert len({tuple(answer[:3]) for answer in answers}) >= 4  # adapters and prompts do differ


def test_a_scored_chunk_has_the_logits_after_each_token_whatever_is_beside_it(
    lora_runs: list[Path], stories: str
) -> None:
    engine = _engine(lora_runs, stories, "float32")
    ids, member = PROMPTS[2], engine.members[1]
    beside = [Chunk(RowCache(), prompt, name) for prompt, name in zip(PROMPTS, engine.members, strict=False)]
    cache = RowCache()
    first, second = Chunk(cache, ids[:4], member, ends=False, scored=True), Chunk(cache, ids[4:], member, scored=True)
    steps = [(first, [beside[0], first, beside[3]]), (second, [second, beside[1]])]
    found = [next(logits for each, logits in engine.step(chunks) if each is mine) for mine, chunks in steps]
    with engine._routes.stock(member):
        whole = engine._routes.model(input_ids=torch.tensor([ids])).logits[0]
    assert torch.allclose(torch.cat(found), whole, atol=1e-4)
    again = RowCache()
    alone = [engine.step([Chunk(again, part, member, scored=True)])[0][1] for part in (ids[:4], ids[4:])]
    assert torch.equal(torch.cat(found), torch.cat(alone))


def test_answers_are_those_that_each_run_generates(lora_runs: list[Path], stories: str) -> None:
    engine = _engine(lora_runs, stories, "float32")
    for run, member in zip(lora_runs, engine.members, strict=False):
        model = exported.load(run, run_directory.read_config(run)).model
        for prompt in PROMPTS[:2]:
            assert _greedy(engine, prompt, member, 8)[0] == _generated(model, prompt, 8)
    bare = backbones.load(ModelConfig.model_validate({"id": stories, "weights": "float32"}), None).model
    assert _greedy(engine, PROMPTS[0], BARE, 8)[0] == _generated(bare, PROMPTS[0], 8)


def _generated(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    config = evaluation.generation_config([], max_new_tokens=tokens)
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [int(each) for each in output[0, len(prompt) :]]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_family_is_served_as_it_generates_or_refused_by_name(name: str) -> None:
    attention_backend.register()
    model = tiny(name)
    head = output_heads.known(model)
    prompt = [3, 60, 5, 61, 8, 9, 33, 21, 4, 19]
    try:
        engine = Engine(SingleRoutes(model, bare=False), model, head)
    except BackboneError as error:
        assert "cannot be served here" in str(error) and "workbench merge" in str(error)
        assert name in ("Falcon", "Gemma2")
        return
    wanted = _generated(model, prompt, 12)  # up to its own end of a text
    assert _greedy(engine, prompt, OWN, 12)[0][: len(wanted)] == wanted


def test_a_model_whose_attention_does_not_know_rows_is_refused(llama: PreTrainedModel) -> None:
    eager = copy.deepcopy(llama)
    eager.set_attn_implementation("eager")
    with pytest.raises(BackboneError, match="its attention is eager, not sdpa"):
        Engine(SingleRoutes(eager, bare=False), eager, output_heads.known(eager))
