"""Episodes: what is drawn is what is learnt from, whatever template writes the turns between."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.conftest import tiny
from tests.run_files import write_lines
from tests.workbench.data.conftest import DEEPSEEK, PLAIN, SPECIAL
from workbench.config import DataConfig
from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.config.sections.rewards_config import NumberReward
from workbench.data.batching import Indices
from workbench.data.starter import FOLDER
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.generated_answers import Floats, SampledAnswer
from workbench.data.text.prompts import PromptEncoder
from workbench.evaluation import rewards
from workbench.evaluation.generation import AnswerSampler
from workbench.evaluation.rewards.reward_sum import RowJudge
from workbench.evaluation.tools.episodes import EpisodePlayer
from workbench.evaluation.tools.toolbox import Toolbox
from workbench.losses import policy_losses
from workbench.models import output_heads
from workbench.recipes.tasks.reinforce.reinforce_run import RowPlayer
from workbench.training.reinforcement import objective
from workbench.training.reinforcement.rollouts import Rollout, Rollouts

FILE = '''
def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return f"{len(city)} degrees"


class Quiz:
    """Asks for a city twice."""

    def reset(self, row):
        self.said, self.right = [], row["answer"]
        return None

    def step(self, said):
        self.said.append(said)
        return "Why?", len(self.said) == 2

    def reward(self):
        return {"turns": len(self.said)}
'''
SEP = "<\uff5ctool\u2581sep\uff5c>"
CALL, END = (f"<\uff5ctool\u2581call\u2581{word}\uff5c>" for word in ("begin", "end"))
MISTRAL = """\
{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %} {{ message.content }}
{%- for call in message.tool_calls or [] %}[TOOL_CALLS]
{{- call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}"""
DEEPSEEK_V31 = f"""\
{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}
{{%- for message in messages %}}{{% if message.role == 'user' %}}<\uff5cUser\uff5c>{{{{ message.content }}}}
{{%- elif message.role == 'tool' %}}{{{{ message.content }}}}
{{%- else %}}<\uff5cAssistant\uff5c>{{{{ message.content }}}}{{% for call in message.tool_calls or [] %}}{CALL}
{{{{- call.function.name }}}}{SEP}{{{{ call.function.arguments | tojson }}}}{END}{{% endfor %}}{{{{ eos_token }}}}
{{%- endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<\uff5cAssistant\uff5c>{{% endif %}}"""
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
FAMILIES = {
    "qwen2_5": (HERMES + "<|im_end|>", "4<|im_end|>"),
    "qwen3": ("<think>\nHm.\n</think>\n\n" + HERMES + "<|im_end|>", "4<|im_end|>"),
    "qwen3_5_nothink": (XML + "<|im_end|>", "4<|im_end|>"),
    "llama3_1": ('{"name":"weather", "parameters": {"city": "Oslo"}}<|eot_id|>', "4<|eot_id|>"),
    "gptoss": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        "<|channel|>final<|message|>4<|return|>",
    ),
    "glm4moe": (
        "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
        "<|observation|>",
        "\n<think></think>\n4<|endoftext|>",
    ),
    "mistral": ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}<|endoftext|>', "4<|endoftext|>"),
    "deepseek": (f'{CALL}weather{SEP}{{"city": "Oslo"}}{END}<|endoftext|>', "4<|endoftext|>"),
    "default": (
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|endoftext|>',
        "4<|endoftext|>",
    ),
}
"""A call and an answer as models of each family write them; not always as their templates do."""
OWN = {"mistral": MISTRAL, "deepseek": DEEPSEEK_V31, "default": None}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(FOLDER)
    found.add_special_tokens({"additional_special_tokens": SPECIAL.split() + DEEPSEEK})
    found.add_tokens(PLAIN)
    return found


def template_of(name: str) -> str | None:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return OWN[name] if name in OWN else (folder / f"{name}.jinja").read_text()


class Scripted(AnswerSampler):
    """Draws with random numbers that pick the tokens of a script, from what a prompt ends with."""

    script: Any
    model: Any
    tokenizer: Any

    def scored(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[SampledAnswer]]:
        return super().scored(prompts, [self._picking(*each) for each in zip(prompts, draws, strict=True)], pictures)

    @torch.no_grad()
    def _picking(self, prompt: Indices, draws_GT: Floats) -> Floats:
        found = draws_GT.copy()
        for answer in range(len(found)):
            text = self.script(self.tokenizer.decode(prompt), answer)
            ids = self.tokenizer.encode(text, add_special_tokens=False)[: draws_GT.shape[1]]
            logits = self.model(input_ids=torch.tensor([[*prompt.tolist(), *ids]])).logits[0, len(prompt) - 1 :]
            sums = logits[:, : len(self.tokenizer)].double().softmax(-1).cumsum(-1)
            for place, token in enumerate(ids):
                low = float(sums[place, token - 1]) if token else 0.0
                found[answer, place] = (low + float(sums[place, token])) / 2
        return found


def episodes(
    folder: Path, tokenizer: PreTrainedTokenizerBase, template: str | None, script: Any, **settings: Any
) -> Rollouts:
    """Rollouts over two prompts, whose turns the script says; their log-probabilities are read twice."""
    (folder / "tools.py").write_text(FILE)
    tools = {"file": folder / "tools.py", "functions": ["weather"], **settings.pop("tools", {})}
    config = ReinforceConfig.model_validate(
        {"answers": 2, "max_new_tokens": 200, "beta": 0, "updates": 2, "importance_cap": 2, "tools": tools, **settings}
    )
    torch.manual_seed(0)
    model = tiny("Llama", vocab_size=len(tokenizer), max_position_embeddings=2048).eval().float()
    encoder = ChatEncoder(tokenizer, template)
    assert config.tools is not None
    toolbox = Toolbox(config.tools)
    path = folder / "rows.jsonl"
    write_lines(path, [{"question": f"How warm is it in Oslo, {n}?", "answer": "4"} for n in range(2)])
    data = DataConfig(train=str(path), max_tokens=1024)
    prompts = tokenized.read(str(path), data, tokenizer, PromptEncoder(encoder, toolbox.schemas))
    judge = RowJudge(rewards.build([NumberReward()]), prompts, {"": data}, tokenizer, toolbox.schemas)
    stop = encoder.stops()
    player = EpisodePlayer(toolbox, encoder, tokenizer, stop=stop, limit=config.max_new_tokens)
    sampler = Scripted(model, known=len(tokenizer), stop=player.stop, temperature=1.0)
    sampler.script, sampler.model, sampler.tokenizer = script, model, tokenizer
    head = output_heads.find(model, model)
    reader = objective.own_reader(model, head, 1.0, device=torch.device("cpu"))
    row_player = RowPlayer(player, judge)
    found = Rollouts(
        prompts, config, sampler, judge, own=reader, reference=reader, seed=0, stop=stop, player=row_player
    )
    found.sample(np.arange(2), epoch=0)
    toolbox.close()
    return found


def drawn(found: Rollouts, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """The stretches of each row that carry loss."""
    now, stretches = found.now, list[list[str]]()
    labels_N = found.batch(found._of_rows(now)).labels_N
    for slot in range(len(now.counts_S)):
        ids = now.answer(slot)
        mask = np.ones(len(ids), bool) if now.drawn_ST is None else now.drawn_ST[slot, : len(ids)].numpy()
        assert labels_N[labels_N[:, 1] == slot, 0].tolist() == ids[mask].tolist()
        edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
        stretches.append([str(tokenizer.decode(ids[start:stop])) for start, stop in edges])
    return stretches


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_drawn_is_learnt_and_its_likelihood_is_replayed(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    call, answer = FAMILIES[name]

    def script(context: str, _: int) -> str:
        return answer if "4 degrees" in context else call

    found = episodes(tmp_path, tokenizer, template_of(name), script)
    rows = drawn(found, tokenizer)
    assert [turn for row in rows[: len(rows) // 4] for turn in row] == [call, answer]
    now = found.now
    assert now.old_ST is not None and now.sampled_ST is not None and now.mask_ST.sum() > 8
    torch.testing.assert_close(now.old_ST[now.mask_ST], now.sampled_ST[now.mask_ST], atol=1e-5, rtol=0)
    assert now.total_E.tolist() == [1.0] * 4 and now.played["calls"].tolist() == [1] * 4
    assert not now.played["errors"].any() and now.played["turns"].tolist() == [2] * 4


def test_the_model_reads_what_its_template_writes_of_the_same_conversation(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Where the model writes a call as the template does, all tokens are those of the whole conversation."""
    call, answer = FAMILIES["qwen2_5"]
    source = template_of("qwen2_5")
    found = episodes(tmp_path, tokenizer, source, lambda text, _: answer if "4 degrees" in text else call)
    encoder = ChatEncoder(tokenizer, source)
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert found.config.tools is not None
    turns = [
        {"role": "user", "content": "How warm is it in Oslo, 0?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "weather", "content": "4 degrees"},
    ]
    whole = [*encoder.prompt(turns, Toolbox(found.config.tools).schemas), *tokenizer.encode(answer)]
    row = found._row(0, 0)
    assert row.input_ids.tolist() == whole


def test_turns_that_a_template_rewrites_are_rows_of_their_own(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Qwen 3 drops the reasoning of earlier turns once a user speaks again."""

    def script(context: str, _: int) -> str:
        return ("<think>\nB\n</think>\n\nLima" if "Why?" in context else "<think>\nA\n</think>\n\nRome") + "<|im_end|>"

    tools = {"environment": "Quiz", "turns": 3}
    found = episodes(tmp_path, tokenizer, template_of("qwen3"), script, tools=tools)
    rows = drawn(found, tokenizer)
    assert rows == [["<think>\nA\n</think>\n\nRome<|im_end|>"], ["<think>\nB\n</think>\n\nLima<|im_end|>"]] * 4
    assert found.now.episode_S.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and found.now.kept_S is not None
    second = tokenizer.decode(found._row(0, 1).input_ids)
    assert "Rome" in second and "A\n</think>" not in second and "Why?" in second
    now = found.now
    assert now.old_ST is not None and now.sampled_ST is not None
    torch.testing.assert_close(now.old_ST[now.mask_ST], now.sampled_ST[now.mask_ST], atol=1e-5, rtol=0)
    assert now.rewards["turns"].tolist() == [2.0] * 4 and now.total_E.tolist() == [2.0] * 4


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
def test_a_turn_is_learnt_by_what_the_reward_rose_by(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    """One of two episodes goes on for a turn more, also where the template writes turns as rows of their own."""

    def script(context: str, answer: int) -> str:
        thought = "<think>\nHm.\n</think>\n\n" if template == "qwen3" else ""
        return f"{thought}4<|im_end|>" if answer == 0 or "Why?" not in context else "4" * 300

    tools = {"environment": "Quiz", "turns": 3, "credit": "turn"}
    now = episodes(tmp_path, tokenizer, template_of(template), script, tools=tools).now
    assert now.turn_ST is not None and now.turn_rewards_EK is not None and now.advantage_ST is not None
    assert len(now.episode_S) == (8 if template == "qwen3" else 4)
    assert now.turn_rewards_EK.shape[1] == 2 and now.played["turns"].tolist() == [2] * 4
    torch.testing.assert_close(now.turn_rewards_EK.nansum(1), now.total_E)
    assert now.turn_rewards_EK[:, 0].tolist() == [1.0] * 4  # an observation each
    value_EK = torch.cat([policy_losses.turn_advantages(each, scaled=True) for each in now.turn_rewards_EK.split(2)])
    assert value_EK.abs().min() > 0
    for slot, episode in enumerate(now.episode_S.tolist()):
        own = now.advantage_ST[slot][now.mask_ST[slot]].tolist()
        assert own == [float(value_EK[episode, turn]) for turn in now.turn_ST[slot][now.mask_ST[slot]]]
    turns = [now.turn_ST[slot][now.mask_ST[slot]] for slot in range(len(now.episode_S))]
    assert all(
        {*torch.cat([own for own, e in zip(turns, now.episode_S, strict=True) if e == n]).tolist()} == {0, 1}
        for n in range(4)
    )
    again = Rollout.from_state(now.state())
    assert again.turn_rewards_EK is now.turn_rewards_EK and again.turn_ST is now.turn_ST


def test_gigpo_compares_turns_that_read_the_same(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tools alone: a call is compared with the others to its prompt, an answer with those that read the same."""
    call, answer = FAMILIES["default"]

    def script(context: str, number: int) -> str:
        wrong = call.replace("Oslo", "Bergen") if number else call
        return ("5<|endoftext|>" if "6 degrees" in context else answer) if "degrees" in context else wrong

    now = episodes(tmp_path, tokenizer, None, script, tools={"credit": "gigpo"}).now
    assert now.state_EK is not None and now.turn_rewards_EK is not None and now.advantage_ST is not None
    first, second = now.state_EK.T.tolist()
    assert first[0] == first[1] != first[2] == first[3] and second == [second[0], second[1]] * 2
    assert second[0] != second[1] and now.turn_rewards_EK.tolist() == [[0.0, 1.0], [0.0, 0.0]] * 2
    good = now.advantage_ST[0][now.mask_ST[0]]
    begin = now.turn_ST[0][now.mask_ST[0]] if now.turn_ST is not None else good
    assert (good[begin == 0] > good[begin == 1].max()).all() and good.min() > 0  # in its state it was alone
    assert Rollout.from_state(now.state()).state_EK is now.state_EK


def test_mistakes_of_the_model_are_answered(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    wrong = [
        '<tool_call>{"name": "wether", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": 3}}</tool_call>',
    ]

    def script(context: str, number: int) -> str:
        return ("4" if "error:" in context else wrong[number]) + "<|endoftext|>"

    found = episodes(tmp_path, tokenizer, None, script)
    assert found.now.played["errors"].tolist() == [1] * 4 and found.now.total_E.tolist() == [1.0] * 4
    texts = [tokenizer.decode(found.now.answer(slot)) for slot in range(2)]
    assert "there is no tool 'wether'" in texts[0] and "3 is not of type 'string'" in texts[1]


def test_an_episode_that_is_too_long_or_has_too_many_turns_is_cut(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    call = FAMILIES["default"][0]
    found = episodes(tmp_path, tokenizer, None, lambda *_: call, tools={"turns": 2})
    assert found.now.cut_S.all() and found.now.played["turns"].tolist() == [2] * 4
    short = episodes(tmp_path, tokenizer, None, lambda *_: call, max_new_tokens=20)
    assert short.now.cut_S.all() and short.now.counts_S.tolist() == [20] * 4


def test_goes_on_from_a_checkpoint(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    call, answer = FAMILIES["default"]
    found = episodes(tmp_path, tokenizer, None, lambda text, _: answer if "4 degrees" in text else call)
    state, examples, figures = found.state(), found.sample(np.arange(2), epoch=0), found.figures
    found.load({name: value.clone() for name, value in state.items()})
    assert np.array_equal(found.sample(np.arange(2), epoch=0), examples) and found.figures == figures
    assert found.now.state().keys() == state.keys()
