"""Several answers of a model to each prompt, scored, as rows to train on: who writes them, and what is kept on disk.

An answer is a function of the teacher, its prompt, `seed`, the number of its row (of several wordings: of that among
all) and its own number.
"""

from __future__ import annotations

import base64
import hashlib
import json
import mimetypes
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import httpx2
import numpy as np

from workbench.config import DataConfig, ModelConfig, RunConfig
from workbench.config.model_heads import TEXT
from workbench.config.sections.distill_config import RequestLimits
from workbench.config.sections.rewards_config import RewardSource
from workbench.data.batching import Indices
from workbench.data.text import generated_answers, media
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import Answer, answer_to
from workbench.data.text.media import Media
from workbench.data.text.messages import Message, split_thoughts
from workbench.data.text.prompts import PROMPT, read_questions, reworded
from workbench.data.text.row_encoder import row_encoder
from workbench.errors import BackboneError, ConfigError, FileError
from workbench.evaluation import comparison, metrics, rewards
from workbench.evaluation.comparison import PairedScore
from workbench.evaluation.generation import AnswerSampler, question_of
from workbench.evaluation.perplexity import answer_likelihoods
from workbench.evaluation.rewards import SPREAD, final_answers
from workbench.models import backbones, output_heads, picture_processor
from workbench.models.exported import ExportedModel
from workbench.runs.openai_client import OpenAIClient, reason

Questions = Sequence[tuple[Example, Mapping[str, Any]]]
"""Prompts with the columns of their rows."""
SCORED = 32
"""Prompts whose answers are scored together."""
UNUSABLE = 32
"""Answers, all of them unusable, after which a server is not asked for more."""


@dataclass(frozen=True)
class SampleSettings:
    """How answers are drawn, and which become rows."""

    to: str = "best"
    """Kind of rows; see `rows_to_write`."""
    n: int = 8
    """Answers to each wording of a prompt."""
    temperature: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    least: float | None = None
    """The lowest reward that is kept."""
    margin: float = 0.0
    """By how much the rewards of a pair differ at least."""
    wordings: tuple[str, ...] = (PROMPT,)
    """Ways to ask, with PROMPT in place of a row's prompt."""
    likelihood: bool = False
    """Whether the writer says how likely each answer is."""


class WrittenAnswer(NamedTuple):
    """An answer as it was written, before it is scored."""

    text: str
    finished: bool
    """Whether it ended by itself, and not because it was as long as answers may be."""
    tokens: tuple[int, int] | None = None
    """Tokens that a server says it read and wrote."""
    problem: str = ""
    """Why it cannot be used; empty where it can."""
    likelihood: float | None = None
    """Mean log-probability of its tokens, in nats, over all wordings of its prompt where a model here writes; None: not
    asked for."""
    messages: Sequence[Message] = ()
    """Of an episode the whole conversation, its last turn included; empty where an answer is one turn."""
    before: int = 0
    """How many of them stand before what `text` says."""
    rewards: Mapping[str, float] | None = None
    """What the environment of an episode gave, by name; None: it gives nothing."""
    counts: Mapping[str, int] | None = None
    """Turns, calls and tool errors of an episode."""


Written = dict[int, dict[int, WrittenAnswer]]
"""Answers by the number of their prompt, of which each wording is one, and their own."""


def questions(
    source: str,
    data: DataConfig,
    config: RunConfig,
    score: Sequence[RewardSource],
    places: Collection[str] | None = None,
    skipped: list[str] | None = None,
) -> Questions:
    """The prompts of a file that `data` reads, with their columns; raises DataError where a reward lacks one.

    Args:
        config: Says how their pictures are found.
        places: Only those of these rows.
        skipped: Reasons of rows that are left out are appended.
    """
    found = [each for each in read_questions(source, data, skipped) if places is None or each[0].place in places]
    told = picture_processor.addressed([question for question, _ in found], config.image, fetch=data.fetch)
    read = [(question, columns) for question, (_, columns) in zip(told, found, strict=True)]
    rewards.require_columns(score, ((question.place, columns) for question, columns in read))
    return read


class AnswerWriter(Protocol):
    """A teacher that writes."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """All of it that its answers depend on."""

    def write(
        self, questions: Sequence[Example], settings: SampleSettings, known: Written, keep: Callable[[Written], None]
    ) -> None:
        """Write the answers that are not in `known`, and hand each to `keep` as soon as it is there. `questions`: the
        wordings of the first prompt, then of the second."""


class SampleProgress:
    """Answers and rewards, written to disk as soon as they are there.

    Args:
        out: The file that is to be written in the end; progress stands beside it.
        identity: All that answers depend on, of which a JSON file keeps the difference apart.

    Raises:
        ConfigError: Answers of another command are there.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.path = self.beside(out)
        self.answers: Written = {}
        self._rewards: dict[str, dict[int, Any]] = {}
        self._identity = json.loads(json.dumps(identity))
        if self.path.exists():
            self._read(self._identity)

    @staticmethod
    def beside(out: Path) -> Path:
        """Where progress with a file stands."""
        return out.with_name(f".{out.name}.unfinished.jsonl")

    def keep_answers(self, answers: Written) -> None:
        """Keep answers that were not known."""
        for row, group in answers.items():
            self.answers.setdefault(row, {}).update(group)
        self._append({"answers": answers})

    def rewards(self, scores: str) -> dict[int, Any]:
        """Rewards by the first prompt of those scored together, given by the reward of this fingerprint."""
        return self._rewards.setdefault(scores, {})

    def keep_rewards(self, scores: str, first: int, rewards: Any) -> None:
        """Keep the rewards of the answers to the prompts from `first` on."""
        self.rewards(scores)[first] = rewards
        self._append({"first": first, "rewards": rewards, "by": scores})

    def done(self) -> None:
        """Delete the file: its result is written."""
        self.path.unlink(missing_ok=True)

    def _read(self, identity: Mapping[str, Any]) -> None:
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:  # a line that was not finished
            os.truncate(self.path, self.path.stat().st_size - len(lines[-1]))
        try:
            first, *others = (json.loads(line) for line in lines[:-1])
        except ValueError:
            raise FileError(f"{self.path}: damaged. Delete it, and begin again.") from None
        changed = sorted(key for key in identity if first["identity"].get(key) != identity[key])
        if changed:
            raise ConfigError(
                f"{self.path}: holds answers of a command that was stopped, with other {', '.join(changed)}. Repeat "
                "that command to go on, name another --out, or delete the file."
            )
        for line in others:
            if "rewards" in line:
                self.rewards(line["by"])[line["first"]] = line["rewards"]
                continue
            for row, group in line["answers"].items():
                read = {int(number): WrittenAnswer(*answer) for number, answer in group.items()}
                self.answers.setdefault(int(row), {}).update(read)

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                if not file.tell():
                    file.write(json.dumps({"identity": self._identity}) + "\n")
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(f"{self.path}: cannot be written ({error.strerror}). Make room there.") from error


@dataclass(frozen=True)
class LocalWriter:
    """A model that is loaded here. `name`: as the user wrote it."""

    name: str
    load: Callable[[], ExportedModel]
    identity: Mapping[str, Any]

    def write(
        self, questions: Sequence[Example], settings: SampleSettings, known: Written, keep: Callable[[Written], None]
    ) -> None:
        """Write the answers to a batch of prompts at a time."""
        if len(known) == len(questions):
            return
        model = self.load()
        if model.model.config.is_encoder_decoder:  # type: ignore[union-attr]
            raise ConfigError(
                f"{self.name}: answers are drawn from causal backbones, and this is an encoder-decoder. Name another "
                "model."
            )
        asked = [question_of(model, question) for question in questions]
        prompts, pictures = [each.ids for each in asked], [each.pictures for each in asked]
        sampler = AnswerSampler(
            model.model,
            known=len(model.tokenizer),
            stop=model.stop,
            temperature=settings.temperature,
            processor=model.template.processor,
        )
        # Answers are known by rows, not by batches, which on an accelerator depend on its memory.
        for whole in sampler.batches(prompts, answers=settings.n, tokens=settings.max_new_tokens):
            batch = [int(row) for row in whole if int(row) not in known]
            if not batch:
                continue
            draws = [
                generated_answers.sampling_numbers(
                    [settings.seed, row], answers=settings.n, tokens=settings.max_new_tokens
                )
                for row in batch
            ]
            shown = [pictures[row] for row in batch]
            written = sampler.answer([prompts[row] for row in batch], draws, shown if any(shown) else ())
            every = [
                (row, number, ids)
                for row, group in zip(batch, written, strict=True)
                for number, ids in enumerate(group)
            ]
            likelihoods: Sequence[float | None] = [None] * len(every)
            if settings.likelihood:
                count = len(settings.wordings)
                told = [each.answered(ids) for row, _, ids in every for each in asked[row - row % count :][:count]]
                each_AW = np.reshape(answer_likelihoods(model, told), (-1, count))
                # Rounded, so that they do not depend on which answers are read together.
                likelihoods = each_AW.mean(1).round(6).tolist()
            groups: Written = {row: {} for row in batch}
            for (row, number, ids), likelihood in zip(every, likelihoods, strict=True):
                groups[row][number] = self._answer(model, ids, questions[row], likelihood)
            keep(groups)

    @staticmethod
    def _answer(model: ExportedModel, ids: Indices, question: Example, likelihood: float | None) -> WrittenAnswer:
        finished = bool(len(ids)) and int(ids[-1]) in model.stop
        # Some tokenizers call the tags of reasoning special, and would leave them out.
        added = model.tokenizer.added_tokens_decoder
        hidden = {number for number, token in added.items() if token.special and "think" not in token.content}
        hidden.update(set(model.tokenizer.all_special_ids) - added.keys())
        text = str(model.tokenizer.decode([int(each) for each in ids if int(each) not in hidden]))
        return WrittenAnswer(as_learnt(text) if question.messages else text, finished, likelihood=likelihood)


def stock(model: ModelConfig, config: RunConfig) -> ExportedModel:
    """A model that no run trained, with its own chat template. `config`: a run over it."""
    tokenizer = backbones.tokenizer(model)
    loaded = backbones.load(model, tokenizer, task=TEXT).model
    own = config.model_copy(update={"model": model})
    template = row_encoder(own, loaded.config, tokenizer, processor=picture_processor.of(own, loaded.config))
    ends: Any = getattr(loaded.generation_config, "eos_token_id", None)
    stop = {*template.stops(), *([ends] if isinstance(ends, int) else ends or ())}  # type: ignore[union-attr]
    return ExportedModel(loaded, output_heads.find(loaded, loaded), tokenizer, template, sorted(stop))


def as_learnt(text: str, reasoning: str = "") -> str:
    """An answer with its reasoning in front, `<think>...</think>`, whether a server sends it apart, or a template opens
    it in the prompt: as chat templates of models that reason, and `data`, read it."""
    apart = split_thoughts({"role": "assistant", "content": text})
    reasoning, text = reasoning or apart.get("reasoning_content", ""), apart["content"]
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{text.strip()}" if reasoning.strip() else text.strip()


@dataclass(frozen=True)
class ServedWriter:
    """A model by its name at an address with OpenAI's interface.

    Each answer is a request with a seed of its own, so that no answer is lost where the others fail.

    Args:
        key: Names the address in errors.
    """

    url: str
    model: str
    key: str = "TEACHER"
    model_key: str = "--model"
    limits: RequestLimits = field(default_factory=RequestLimits)

    @property
    def identity(self) -> Mapping[str, Any]:
        """Address and name."""
        return {"url": self.url, "model": self.model}

    def require(self) -> None:
        """Refuse an address where nobody answers, or a model that it does not list, by one request for its models."""
        with self._server() as server:
            self._require(server)

    def _require(self, server: OpenAIClient) -> None:
        if server.sent("GET", "models", None, patient=False).status_code not in (404, 405):  # not every one lists
            server.require_model(self.model, key=self.model_key)

    def write(
        self, questions: Sequence[Example], settings: SampleSettings, known: Written, keep: Callable[[Written], None]
    ) -> None:
        """Ask for one answer a request, some requests at the same time."""
        rows, numbers = range(len(questions)), range(settings.n)
        lacking = [(row, number) for row in rows for number in numbers if number not in known.get(row, {})]
        if not lacking:
            return
        usable = any(not answer.problem for group in known.values() for answer in group.values())
        waiting: list[tuple[int, int, WrittenAnswer]] = []  # to be kept once one shows that the server writes
        with self._server() as server:
            self._require(server)
            pool = ThreadPoolExecutor(self.limits.at_once)
            asked = {
                pool.submit(self._answer, server, questions[row], settings, row, number): (row, number)
                for row, number in lacking
            }

            def keep_waiting() -> None:
                while usable and waiting:
                    row, number, answer = waiting.pop(0)
                    keep({row: {number: answer}})

            try:
                for done in as_completed(tuple(asked)):
                    waiting.append((*asked.pop(done), done.result()))
                    usable = usable or not waiting[-1][2].problem
                    keep_waiting()
                    if len(waiting) >= UNUSABLE or (waiting and not asked):
                        row, _, answer = min(waiting)
                        raise ConfigError(
                            f"{self.key}={self.url}: none of {len(waiting)} answers can be used. "
                            f"{questions[row].place}: {answer.problem}. Write the address of a server with OpenAI's "
                            "interface up to /v1, and the name of a model that writes text."
                        )
            finally:
                pool.shutdown(cancel_futures=True)
                for done, place in asked.items():  # what is paid for by then
                    if done.done() and not done.cancelled() and done.exception() is None:
                        waiting.append((*place, done.result()))
                keep_waiting()

    def _server(self) -> OpenAIClient:
        kept = "answers that are there by then are kept for the same command"
        limits = self.limits
        return OpenAIClient.of(self.url, key=self.key, kept=kept, seconds=limits.timeout, retries=limits.retries)

    def _answer(
        self, server: OpenAIClient, question: Example, settings: SampleSettings, row: int, number: int
    ) -> WrittenAnswer:
        seed = int(np.random.default_rng([settings.seed, row, number]).integers(2**31))
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "seed": seed,
        }
        messages = [
            {name: value for name, value in each.items() if name != "loss"}
            for each in media.in_parts(question.messages, _for_a_server)
        ]
        body |= {"messages": messages} if messages else {"prompt": question.whole_text}
        body |= {"tools": list(question.tools)} if question.tools else {}
        body |= {"logprobs": True if messages else 1} if settings.likelihood else {}
        path = "chat/completions" if messages else "completions"
        try:
            response = server.sent("POST", path, body)
            if response.status_code == 400 and "max_completion_tokens" in reason(response):  # its newer name
                body["max_completion_tokens"] = body.pop("max_tokens")
                response = server.sent("POST", path, body)
        except BackboneError as error:
            raise BackboneError(f"{error} The last request was for {question.place}.") from None
        if settings.likelihood and response.status_code == 400 and "logprob" in reason(response):
            raise self._without_likelihood(reason(response))
        if response.status_code in (400, 413, 422):  # of this prompt, which may be too long
            return WrittenAnswer("", False, problem=f"status {response.status_code}: {reason(response)}")
        server.require_permitted(response)
        if response.status_code != 200:
            server.json(response)  # which says what is wrong
        answer = _read_answer(response, chat=bool(messages))
        if settings.likelihood and not answer.problem and answer.likelihood is None:
            raise self._without_likelihood("its answer has no log-probabilities")
        return answer

    def _without_likelihood(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.key}={self.url} does not say how likely an answer is: {why}. Name a run or a folder of a model in "
            "its place, which is asked here, or score by vote instead."
        )


def _for_a_server(picture: Media) -> str:
    """The address of a picture, or itself, as a server takes it, which reads no files of this machine."""
    if not (path := Path(address := str(picture.value))).is_absolute():
        return address
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _read_answer(response: httpx2.Response, *, chat: bool) -> WrittenAnswer:
    """The answer in a response, or what is wrong with that."""

    def unusable(why: str) -> WrittenAnswer:
        return WrittenAnswer("", False, tokens, f"the server's answer {why}")

    tokens: tuple[int, int] | None = None
    try:
        payload = response.json()
    except (ValueError, RecursionError):
        return unusable("is no JSON")
    if not isinstance(payload, dict):
        return unusable("is no JSON object")
    usage = payload.get("usage")
    if isinstance(usage, dict):
        read, wrote = (usage.get(f"{kind}_tokens") for kind in ("prompt", "completion"))
        tokens = (read, wrote) if isinstance(read, int) and isinstance(wrote, int) else None
    choices = payload.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return unusable("has no choices")
    message = choice.get("message") if chat else {"content": choice.get("text")}
    if not isinstance(message, dict):
        return unusable("has no message")
    parts = [message.get("content"), message.get("reasoning_content") or message.get("reasoning")]
    if not all(isinstance(each, str | None) for each in parts):
        return unusable("is no text")
    text, reasoning = (str(each or "") for each in parts)
    if any("\ud800" <= letter <= "\udfff" for letter in text + reasoning):  # which no file can hold
        return unusable("is no text")
    if not text.strip():
        return unusable("is empty" + (", and calls a tool" if message.get("tool_calls") else ""))
    finished = choice.get("finish_reason") in ("stop", "eos", "end_turn", None)
    text = as_learnt(text, reasoning) if chat else text
    return WrittenAnswer(text, finished, tokens, likelihood=_likelihood(choice.get("logprobs")))


def _likelihood(scored: Any) -> float | None:
    """Mean log-probability of the tokens that a server says it wrote; None where it does not say all."""
    try:
        content = scored.get("content")
        told = scored["token_logprobs"] if content is None else [each["logprob"] for each in content]
        mean = round(float(np.mean(np.asarray(told, dtype=np.float64))), 6) if told else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return mean if mean is not None and np.isfinite(mean) else None


def written_and_scored(
    writer: AnswerWriter,
    questions: Questions,
    settings: SampleSettings,
    sources: Sequence[RewardSource],
    progress: SampleProgress,
) -> list[AnswerGroup]:
    """The answers to each prompt, in the order of the prompts; those that are on disk are neither written nor scored
    again."""
    worded = [reworded(question, wording) for question, _ in questions for wording in settings.wordings]
    writer.write(worded, settings, progress.answers, progress.keep_answers)
    return _score(sources, questions, settings.wordings, progress)


def _score(
    sources: Sequence[RewardSource], questions: Questions, wordings: tuple[str, ...], progress: SampleProgress
) -> list[AnswerGroup]:
    content = [[source.model_dump(mode="json") for source in sources], rewards.digests(sources)]
    reward, name = rewards.build(sources), hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    known, groups = progress.rewards(name), list[AnswerGroup]()
    for first in range(0, len(questions), SCORED):
        together = questions[first : first + SCORED]
        written = [
            [
                (each, "" if wordings == (PROMPT,) else wording)
                for number, wording in enumerate(wordings, start=(first + row) * len(wordings))
                for _, each in sorted(progress.answers[number].items())
            ]
            for row in range(len(together))
        ]
        usable = [[pair for pair in group if not pair[0].problem] for group in written]
        answers = [
            _with_turns(answer_to(question, each.text, columns, likelihood=each.likelihood), each)
            for (question, columns), group in zip(together, usable, strict=True)
            for each, _ in group
        ]
        if sources and answers and first not in known:
            progress.keep_rewards(name, first, reward.detailed(answers))
        parts = known[first] if sources and answers else {}
        own = [each.rewards or {} for group in usable for each, _ in group]
        sums = reward.total(parts, len(answers)) if parts else [0.0] * len(answers)
        total = iter([by_sources + sum(each.values()) for by_sources, each in zip(sums, own, strict=True)])
        each_part = iter(
            [{name: values[at] for name, values in parts.items()} | dict(own[at]) for at in range(len(own))]
        )
        for (question, _), group, every in zip(together, usable, written, strict=True):
            scored = [
                ScoredAnswer(
                    each.text, each.finished, next(total), next(each_part), wording, each.messages, each.counts or {}
                )
                for each, wording in group
            ]
            problems = [
                f"answer {number + 1}: {each.problem}" for number, (each, _) in enumerate(every) if each.problem
            ]
            counted = [each.tokens for each, _ in every]
            groups.append(AnswerGroup(question, scored, problems, counted))
    return groups


def _with_turns(answer: Answer, written: WrittenAnswer) -> Answer:
    """The same with all turns before it, where it ended an episode."""
    return replace(answer, messages=tuple(written.messages[: written.before])) if written.messages else answer


@dataclass(frozen=True)
class SampledRows:
    """Facts about what was sampled."""

    prompts: int
    answers: int
    finished: float
    """Share of answers that ended by themselves."""
    reward: float | None
    """Mean of all answers; None where nothing scores them."""
    reward_interval: tuple[float, float] | None
    """The 95 % interval of the mean over prompts of the mean of their answers; None of fewer than two prompts."""
    best: float | None
    """Mean of the best finished answer to each prompt."""
    rows: int
    """Written."""
    signals: dict[str, float]
    """Words and repetition of all answers, of the best ones, and the correlation of length and reward."""
    left_out: Sequence[str]
    """Prompts and answers that cannot be used, and why."""
    tokens: tuple[int, int] | None
    """Tokens that a server says it read and wrote; None where it does not say that of every answer."""
    cost: float | None
    """Of these tokens, where a price is given."""
    choice: PairedScore | None
    """What choosing by the rewards is worth on rows that hold an answer; see `worth`."""
    passes: dict[int, tuple[float, tuple[float, float] | None]]
    """pass@k by k, the powers of two up to the number of answers, with its 95 % interval; see `passes`. Empty where
    no reward says what is right: all are 0 or 1, or there is a lowest one of what is accepted."""


def facts(
    groups: Sequence[AnswerGroup],
    written: int,
    skipped: Sequence[str],
    limits: RequestLimits,
    choice: PairedScore | None = None,
    *,
    least: float | None = None,
) -> SampledRows:
    """What came of the answers, `written` rows among it; right are those of a reward of `least`, else of 1."""
    answers = [each for group in groups for each in group.answers]
    top = [each for each in map(lambda group: best(group.answers), groups) if each is not None]
    texts, values = [each.text for each in answers], [each.reward for each in answers]
    signals = generated_answers.answer_lengths(texts)
    signals |= {
        f"best_{name}": value for name, value in generated_answers.answer_lengths([each.text for each in top]).items()
    }
    scored = any(each.parts for each in answers)
    if scored and (correlation := generated_answers.length_correlation(texts, values)) is not None:
        signals["length_correlation"] = correlation
    each_tokens = [counts for group in groups for counts in group.tokens]
    known = [counts for counts in each_tokens if counts is not None]
    tokens = None
    if known and len(known) == len(each_tokens):
        tokens = sum(read for read, _ in known), sum(wrote for _, wrote in known)
    price = limits.price
    means = np.asarray([np.mean([each.reward for each in group.answers]) for group in groups if group.answers])
    told = scored and (least is not None or set(values) <= {0.0, 1.0})
    return SampledRows(
        prompts=len(groups),
        answers=len(answers),
        finished=float(np.mean([each.finished for each in answers])),
        reward=float(np.mean(values)) if scored else None,
        reward_interval=comparison.mean_interval(means) if scored else None,
        best=float(np.mean([each.reward for each in top])) if scored and top else None,
        rows=written,
        signals=signals,
        left_out=[*skipped, *(f"{group.question.place}, {why}" for group in groups for why in group.problems)],
        tokens=tokens,
        cost=None if price is None or tokens is None else (tokens[0] * price[0] + tokens[1] * price[1]) / 1e6,
        choice=choice,
        passes=_passes(groups, 1.0 if least is None else least) if told else {},
    )


def _passes(groups: Sequence[AnswerGroup], least: float) -> dict[int, tuple[float, tuple[float, float] | None]]:
    counts = [(len(group.answers), sum(each.reward >= least for each in group.answers)) for group in groups]
    passed = generated_answers.passes(counts)
    return {k: (float(value_S.mean()), comparison.mean_interval(value_S)) for k, value_S in passed.items()}


def worth(groups: Sequence[AnswerGroup], references: Sequence[str | None]) -> PairedScore | None:
    """The score of one answer to the first wording (the mean of all of them), and of the best to any, over the prompts
    with a reference.

    It is `accuracy` of final answers where every reference is a number, else token `f1`. The best ended by itself,
    where one did. None where fewer than two prompts have answers and a reference.
    """
    known = [(group.answers, text) for group, text in zip(groups, references, strict=True) if text and group.answers]
    right = [final_answers.of_reference(text) for _, text in known]
    exact = all(each is not None and each.number is not None for each in right)

    def score(said: str, number: int) -> float:
        wanted, own = right[number], final_answers.of_answer(said) if exact else None
        if not exact or wanted is None:
            return metrics.token_f1(said, known[number][1])
        return float(own is not None and wanted.equals(own, tolerance=0))

    single, chosen = list[float](), list[float]()
    for number, (answers, _) in enumerate(known):
        first = [each.text for each in answers if each.wording == answers[0].wording]
        single.append(float(np.mean([score(text, number) for text in first])))
        chosen.append(score((best(answers) or max(answers, key=lambda each: each.reward)).text, number))
    if len(known) < 2:
        return None
    return comparison.paired("accuracy" if exact else "f1", np.asarray(single), np.asarray(chosen))


Row = dict[str, Any]


class ScoredAnswer(NamedTuple):
    """An answer with its reward."""

    text: str
    finished: bool
    """Whether it ended by itself, and not because it was as long as answers may be."""
    reward: float
    parts: dict[str, float]
    """Its rewards by name, and how far reward models disagree on it, where there are several."""
    wording: str = ""
    """How its prompt was worded; empty where all are as the rows have them."""
    messages: Sequence[Message] = ()
    """Of an episode the whole conversation; empty where an answer is one turn."""
    counts: Mapping[str, int] = MappingProxyType({})
    """Turns, calls and tool errors of an episode."""

    @property
    def usable(self) -> bool:
        """Whether a row may teach it: it ended by itself, and says or does something."""
        return self.finished and bool(self.text or self.messages)


class AnswerGroup(NamedTuple):
    """The answers to a prompt."""

    question: Example
    answers: Sequence[ScoredAnswer]
    problems: Sequence[str] = ()
    """Why other answers to it cannot be used."""
    tokens: Sequence[tuple[int, int] | None] = ()
    """Tokens that were read and written for each of all, where a server counts them."""


def rows_to_write(groups: Sequence[AnswerGroup], to: str, *, least: float | None, margin: float) -> list[Row]:
    """Rows as recipes sft and prefer read them, in the order of the prompts.

    Args:
        to: best, accepted, pairs or all. Answers that did not end by themselves are left out of all but `all`: a row
            would teach to end where they were cut.
        least: The lowest reward of an answer that is kept; None for every one. In pairs it is for the chosen one.
        margin: By how much the rewards of a pair differ at least; equal ones are never a pair.
    """
    lowest = float("-inf") if least is None else least
    make = _MAKERS[to]
    return [row for group in groups for row in make(group, lowest, margin)]


def best(answers: Sequence[ScoredAnswer]) -> ScoredAnswer | None:
    """The finished answer with the highest reward, of equal ones the first."""
    return max((each for each in answers if each.usable), key=lambda each: each.reward, default=None)


def _best(group: AnswerGroup, least: float, _: float) -> Iterator[Row]:
    top_answer = best(group.answers)
    if top_answer is not None and top_answer.reward >= least:
        yield _answered(group.question, top_answer)


def _accepted(group: AnswerGroup, least: float, _: float) -> Iterator[Row]:
    known: set[str] = set()
    for each in group.answers:
        said = json.dumps(each.messages) if each.messages else each.text
        if each.usable and each.reward >= least and said not in known:
            known.add(said)
            yield _answered(group.question, each)


def _pairs(group: AnswerGroup, least: float, margin: float) -> Iterator[Row]:
    better = best(group.answers)
    worse = min((each for each in group.answers if each.usable), key=lambda each: each.reward, default=None)
    if better is None or worse is None or better.reward < least or not better.reward - worse.reward > 0:
        return
    if better.reward - worse.reward >= margin:
        row = {"chosen": better.text, "rejected": worse.text, "margin": better.reward - worse.reward}
        yield _prompt(group.question) | row | _worded(better) | _worded(worse, "rejected_wording")


def _all(group: AnswerGroup, least: float, _: float) -> Iterator[Row]:
    for number, each in enumerate(group.answers):
        if each.reward >= least:
            named = {name: value for name, value in each.parts.items() if name != SPREAD}
            parts: Row = {"rewards": named} if len(named) > 1 else {}
            parts |= {SPREAD: each.parts[SPREAD]} if SPREAD in each.parts else {}
            facts = {
                "place": group.question.place,
                "answer_number": number,
                "finished": each.finished,
                **parts,
                **each.counts,
            }
            yield _answered(group.question, each) | facts


_MAKERS: dict[str, Callable[[AnswerGroup, float, float], Iterator[Row]]] = {
    "best": _best,
    "accepted": _accepted,
    "pairs": _pairs,
    "all": _all,
}
TO = tuple(_MAKERS)
"""Kinds of rows."""


def _prompt(question: Example) -> Row:
    if not question.messages:
        return {"prompt": question.whole_text}
    messages = media.in_parts(question.messages, lambda each: str(each.value))
    return {"messages": messages, **({"tools": list(question.tools)} if question.tools else {})}


def _worded(answer: ScoredAnswer, name: str = "wording") -> Row:
    return {name: answer.wording} if answer.wording else {}


def _answered(question: Example, answer: ScoredAnswer) -> Row:
    reward = ({"reward": answer.reward} if answer.parts else {}) | _worded(answer)
    if answer.messages:
        return _prompt(question) | {"messages": list(answer.messages), **reward}
    if not question.messages:
        return _prompt(question) | {"completion": answer.text, **reward}
    prompt = _prompt(question)
    turns = [*prompt["messages"], {"role": "assistant", "content": answer.text}]
    return prompt | {"messages": turns, **reward}
