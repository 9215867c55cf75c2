"""Episodes: a model writes a turn, its calls are carried out, it reads what they gave, and writes the next one.

The tokens that a model drew stay as they are: what a template writes behind them, up to the next turn, is tokenised by
itself. Where a template writes earlier turns differently from then on, a new row begins, with all that stands before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.data.batching import Indices
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import Episode, EpisodeRow, SampledAnswer, WriteTurns
from workbench.data.text.messages import Message
from workbench.data.text.tool_calls import CallReader, ToolCall, WrittenTurn
from workbench.evaluation.tools.toolbox import Toolbox, opening, rewarded


class EpisodeStart(NamedTuple):
    """What an episode begins with."""

    asked: Indices
    """Tokens of its prompt."""
    question: Example
    """The prompt."""
    row: Mapping[str, Any]
    """The columns of its row."""


class _Episode:
    """An episode that goes on."""

    def __init__(self, number: int, start: EpisodeStart) -> None:
        self.number, self.start = number, start
        self.messages: list[Message] = list(start.question.messages)
        self.counts = {"turns": 0, "calls": 0, "errors": 0}
        self.text, self.failure, self.over, self.cut, self.closed = "", "", False, False, False
        self.rewards: Mapping[str, float] = {}
        self.so_far: list[float] = []
        self.states: list[str] = []
        self._closed: list[EpisodeRow] = []
        self._begin(start.asked)

    def _begin(self, context: Indices) -> None:
        asked = self.start.asked
        shorter = min(len(asked), len(context))
        same = asked[:shorter] == context[:shorter]
        self._kept = shorter if same.all() else int(same.argmin())
        self._ids: list[int] = context[self._kept :].tolist()
        self._drawn = [False] * len(self._ids)
        self._log_probs: list[float] = []
        self._turns: list[int] = []

    @property
    def context(self) -> Indices:
        """All tokens that the next turn follows."""
        return np.concatenate([self.start.asked[: self._kept], np.asarray(self._ids, dtype=np.int64)])

    @property
    def taken(self) -> int:
        """How many of them stand behind the prompt."""
        return len(self._ids)

    @property
    def read(self) -> list[Any]:
        """What the next turn reads since the one before: what tools or the environment answered, or all there is."""
        last = max((n for n, each in enumerate(self.messages) if each["role"] == "assistant"), default=-1)
        return [each["content"] for each in self.messages[last + 1 :]]

    def write(self, answer: SampledAnswer) -> None:
        """Add the tokens of a turn."""
        self._ids += answer.ids.tolist()
        self._drawn += [True] * len(answer.ids)
        self._log_probs += () if answer.log_probs is None else answer.log_probs.tolist()
        self._turns += [self.counts["turns"]] * len(answer.ids)
        self.counts["turns"] += 1

    def go_on(self, ids: Sequence[int], *, appended: bool) -> None:
        """Add what the next turn reads, or begin a row with all of it."""
        if appended:
            self._ids += ids
            self._drawn += [False] * len(ids)
        else:
            self._closed.append(self._row())
            self._begin(np.asarray(ids, dtype=np.int64))

    def fail(self, what: str) -> None:
        """End it for what its environment did."""
        self.failure, self.over = what, True

    def _row(self) -> EpisodeRow:
        drawn = np.asarray(self._drawn, dtype=np.bool_)
        stop = int(drawn.nonzero()[0][-1]) + 1 if drawn.any() else 0
        log_probs = np.asarray(self._log_probs) if self._log_probs else None
        ids, turns = np.asarray(self._ids[:stop], dtype=np.int64), np.asarray(self._turns, dtype=np.int64)
        return EpisodeRow(ids, drawn[:stop], log_probs, self._kept, turns)

    def done(self, *, drop: bool) -> Episode:
        """All of it."""
        dropped = bool(self.failure) and drop
        rows = [row for row in (*self._closed, self._row()) if row.drawn.any()]
        return Episode(
            () if dropped else rows,
            self.cut,
            self.text,
            tuple(self.messages),
            self.counts,
            self.rewards,
            self.so_far,
            self.states,
            self.failure,
            self.closed,
            dropped or not rows,
        )


class EpisodePlayer:
    """Plays episodes with the tools of a file.

    Args:
        stop: Tokens that end a turn.
        limit: Most tokens behind a prompt, those that tools answered included.

    Raises:
        BackboneError: The template writes no tools, or calls that are not read here.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        template: ChatEncoder,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop: Sequence[int],
        limit: int,
    ) -> None:
        self._toolbox, self._template, self._tokenizer = toolbox, template, tokenizer
        self._reader = CallReader(tokenizer, template)
        self.stop = sorted({*stop, *self._reader.stops})
        self._limit = limit
        schemas = toolbox.schemas
        self._first_name = schemas[0]["function"]["name"] if schemas else "step"

    def play(self, starts: Sequence[EpisodeStart], write: WriteTurns) -> list[Episode]:
        """An episode for each start."""
        episodes = [_Episode(number, start) for number, start in enumerate(starts)]
        self._reset(episodes)
        for turn in range(1, self._toolbox.config.turns + 1):
            going = [each for each in episodes if not each.over]
            if not going:
                break
            contexts = [each.context for each in going]
            written = write([each.number for each in going], contexts, [each.taken for each in going])
            said = []
            for each, context, answer in zip(going, contexts, written, strict=True):
                if self._toolbox.config.credit == "gigpo":
                    each.states.append(json.dumps(each.read))
                each.write(answer)
                said.append(self._reader.read(answer.ids, stop=self.stop, prefix=context, name=self._first_name))
                ended = bool(len(answer.ids)) and int(answer.ids[-1]) in self.stop
                steps = bool(said[-1].calls) or self._toolbox.steps
                if not ended or not steps or turn == self._toolbox.config.turns:
                    each.over, each.cut = True, not ended or bool(said[-1].calls)
                    each.text = said[-1].message["content"]
            turns = [(e, t, int(a.ids[-1])) for e, t, a in zip(going, said, written, strict=True) if not e.over]
            self._answer(turns)
            if self._toolbox.config.credit != "episode":
                going = [each for each in going if not each.over]
                if self._toolbox.rewards:
                    self._ask_rewards(going)
                for each in going:
                    each.so_far += [] if each.over else [sum(each.rewards.values())]
        self._reward(episodes)
        return [each.done(drop=self._toolbox.config.failed == "drop") for each in episodes]

    def _carried_out(self, jobs: Sequence[Mapping[str, Any] | str]) -> list[dict[str, Any]]:
        """The answers to requests, of which those that are words are answered by themselves."""
        found = iter(self._toolbox.carried_out([job for job in jobs if not isinstance(job, str)]))
        return [{"text": job, "cut": True} if isinstance(job, str) else next(found) for job in jobs]

    def _reset(self, episodes: Sequence[_Episode]) -> None:
        if self._toolbox.environment is None:
            return
        name = self._toolbox.config.environment
        jobs = [self._toolbox.begun(each.start.row, each.number) for each in episodes]
        for each, answer in zip(episodes, self._toolbox.carried_out(jobs), strict=True):
            try:
                messages = None if "failed" in answer else opening(answer, each.messages)
            except ValueError as error:
                answer, messages = {"failed": str(error)}, None
            if "failed" in answer:
                each.fail(f"{name}.reset: {answer['failed']}")
            elif messages is not None:
                each.messages = messages
                context = self._template.prompt(messages, self._toolbox.schemas)
                each.go_on(context, appended=False)
                each.over = each.cut = each.taken >= self._limit

    def _answer(self, turns: Sequence[tuple[_Episode, WrittenTurn, int]]) -> None:
        """Carry out what the episodes ask for, one call of each at a time, and let them read the answers."""
        following: list[list[Message]] = [[] for _ in turns]
        most = max((max(1, len(turn.calls)) for _, turn, _ in turns), default=0)
        for place in range(most):
            asked = [n for n, (each, turn, _) in enumerate(turns) if place < max(1, len(turn.calls)) and not each.over]
            answers = self._carried_out([self._request(*turns[n][:2], place) for n in asked])
            for n, answer in zip(asked, answers, strict=True):
                each, turn, _ = turns[n]
                call = turn.calls[place] if turn.calls else None
                each.counts["calls"] += call is not None
                text = answer.get("text", f"error: {answer.get('failed')}")
                if "failed" in answer or answer["cut"]:
                    each.counts["errors"] += 1
                at_fault = "failed" in answer and (answer.get("over") or answer.get("step"))
                if at_fault and self._toolbox.environment is not None:
                    each.fail(f"{self._toolbox.config.environment}: {answer['failed']}")
                if answer.get("done"):
                    each.over, each.text = True, turn.message["content"]
                following[n].append(_observation(text, call, len(each.messages) + place))
        known: dict[str, tuple[list[int], bool]] = {}
        for (each, turn, last), after in zip(turns, following, strict=True):
            message = self._message(turn, len(each.messages))
            if each.over:
                if turn.calls:
                    each.messages += [message, *after]
                    each.closed = True
                continue
            each.messages += [message, *after]
            count = len(each.messages) - len(after) - 1
            key = json.dumps([each.messages, last])
            if key not in known:
                schemas = self._toolbox.schemas
                known[key] = self._template.continued(each.messages, count, schemas, self.stop, last)
            ids, appended = known[key]
            each.go_on(ids, appended=appended)
            each.over = each.cut = each.taken >= self._limit

    def _request(self, each: _Episode, turn: WrittenTurn, place: int) -> Mapping[str, Any] | str:
        if turn.calls:
            return self._toolbox.request(turn.calls[place], each.number)
        return self._toolbox.said(turn.message["content"], each.number)

    def _message(self, turn: WrittenTurn, number: int) -> Message:
        message = dict(turn.message)
        thought = message.get("reasoning_content")
        if thought and not self._template.reads_reasoning:
            del message["reasoning_content"]
            message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
        calls = [call.message(number + place) for place, call in enumerate(turn.calls)]
        return message | ({"tool_calls": calls} if calls else {})

    def _reward(self, episodes: Sequence[_Episode]) -> None:
        if self._toolbox.environment is None:
            return
        if self._toolbox.rewards:
            self._ask_rewards([each for each in episodes if not each.failure])
        for each in episodes:
            each.rewards = {} if each.failure else each.rewards
        self._toolbox.carried_out([{"kind": "end", "episode": each.number} for each in episodes])

    def _ask_rewards(self, episodes: Sequence[_Episode]) -> None:
        answers = self._toolbox.carried_out([{"kind": "reward", "episode": each.number} for each in episodes])
        for each, answer in zip(episodes, answers, strict=True):
            try:
                each.rewards = {} if "failed" in answer else rewarded(answer)
            except ValueError as error:
                answer = {"failed": str(error)}
            if "failed" in answer:
                each.fail(f"{self._toolbox.config.environment}.reward: {answer['failed']}")


def _observation(text: str, call: ToolCall | None, number: int) -> Message:
    if call is None:
        return {"role": "user", "content": text}
    return {"role": "tool", "name": call.name, "tool_call_id": call.message(number)["id"], "content": text}
