"""`sample`: several answers of a teacher to each prompt, scored, as rows to train on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.config import ModelConfig, RunConfig, reward_words
from workbench.config.sections.basic_sections import an_address
from workbench.config.sections.distill_config import RequestLimits
from workbench.config.yaml_text import override
from workbench.data.rows import RawRow, fingerprint
from workbench.data.text.prompts import PROMPT, own_answer
from workbench.errors import BackboneError, ConfigError
from workbench.evaluation import rewards
from workbench.evaluation.tools.toolbox import toolbox
from workbench.models import backbones, exported
from workbench.recipes.load import load
from workbench.recipes.single import sampled_answers
from workbench.recipes.single.sampled_answers import (
    TO,
    AnswerGroup,
    AnswerWriter,
    LocalWriter,
    SampledRows,
    SampleProgress,
    SampleSettings,
    ServedWriter,
    rows_to_write,
)
from workbench.recipes.single.sampled_episodes import EpisodeWriter
from workbench.recipes.verbs import generate
from workbench.recipes.verbs.asked_config import asked_config
from workbench.runs import files, provenance, run_directory
from workbench.runs.trust import Trust
from workbench.schema import parse


def sample(
    teacher: Path | str,
    prompts: str,
    overrides: Sequence[str] = (),
    *,
    score: Sequence[str] = (),
    out: Path | str,
    model: str | None = None,
    at_once: int = 4,
    retries: int = 7,
    timeout: float = 600.0,
    price: Sequence[float | str] | None = None,
    to: str = "best",
    n: int = 8,
    wording: Sequence[str] = (),
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    least: float | None = None,
    margin: float = 0.0,
    seed: int = 0,
    trust: bool = False,
) -> SampledRows:
    """Answer every prompt several times, score the answers, and write rows to train on.

    The same call goes on where an earlier one was interrupted.

    Args:
        teacher: A run directory, a folder or hub id of a model, or the address of a server with OpenAI's interface up
            to /v1, which is sent the prompts and the key in OPENAI_API_KEY.
        prompts: Rows to answer; answers that they hold are ignored.
        overrides: `key=value` words of sections data, image and evaluate; of a model also of section model.
        score: Rewards that are added up: `number`, `unit_tests`, `vote`, `likelihood`, `my.py:function`, a reward
            run, `{kind: ...}`.
        out: A .jsonl file to write.
        model: The model's name at an address.
        at_once: Requests to an address that run at the same time.
        retries: How often a request is sent again after a failure that may pass.
        timeout: Longest wait for an answer of an address, in seconds.
        price: Of a million tokens that an address reads, and of a million that it writes.
        to: Rows to write: `best` answers, `accepted` ones, `pairs` of a better and a worse one, or `all`.
        n: Answers to each prompt, in each wording.
        wording: Ways to ask, each with `{prompt}` in place of a row's prompt; none: the prompt as it is.
        temperature: Logits are divided by it; above 0.
        max_new_tokens: Of an answer.
        least: Lowest reward of an answer that is kept.
        margin: By how much the rewards of a pair differ at least.
        seed: An answer depends on the teacher, its prompt, this number, the number of its row and its own; at an
            address, as far as the server heeds a seed.
        trust: Execute the Python code that the run's config.yaml names.

    Returns:
        How many `prompts`, `answers` and `rows` there are, the mean `reward` of all answers, `passes` (pass@k by k)
        where rewards say what is right, and what their `choice` is worth on rows that hold an answer, where no reward
        reads it.

    Raises:
        WorkbenchError: A setting, a prompt or a reward is wrong, or a server does not answer; answers that there are by
            then are kept for the same call.

    Examples:
        >>> import workbench
        >>> asked, score = "starter/arithmetic_held_out.jsonl", ["number"]
        >>> settings = dict(out="all.jsonl", to="all", n=2, max_new_tokens=2)
        >>> sampled = workbench.sample("runs/short", asked, score=score, **settings)
        >>> sampled.prompts, sampled.answers
        (26, 52)
    """
    out = Path(out)
    settings = SampleSettings(to, n, temperature, max_new_tokens, seed, least, margin, tuple(wording) or (PROMPT,))
    _require_sensible(settings, out)
    sources = reward_words.read(score)
    settings = replace(settings, likelihood=any(source.reads_likelihood for source in sources))
    if len(settings.wordings) * n < 2 and (alone := [source.kind for source in sources if source.compares]):
        raise ConfigError(f"--score {alone[0]} compares answers to a prompt, and --n 1 gives one. Write --n 2 or more.")
    requests = {"at_once": at_once, "retries": retries, "timeout": timeout, "price": price}
    limits = parse(RequestLimits, requests, source="the command line")
    config, writer = _writer(str(teacher), overrides, model, limits, trust=trust)
    skipped: list[str] = []
    questions = sampled_answers.questions(prompts, config.data, config, (), skipped=skipped)
    rewarded = False
    if isinstance(writer, EpisodeWriter):
        writer.require(settings, sources)
        questions = writer.offered(questions)
        writer = replace(writer, columns=[columns for _, columns in questions])
        rewarded = writer.tools.rewards
    _require_scored(settings, scored=bool(score) or rewarded)
    files.require_writable(out)
    rewards.require_columns(sources, ((question.place, columns) for question, columns in questions))
    progress = SampleProgress(
        out,
        {
            **writer.identity,
            "prompts": fingerprint(prompts, config.data),
            "overrides": list(overrides),
            "n": settings.n,
            "wording": settings.wordings,
            "likelihood": settings.likelihood,
            "temperature": settings.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
        },
    )
    groups = sampled_answers.written_and_scored(writer, questions, settings, sources, progress)
    output_rows = rows_to_write(groups, settings.to, least=settings.least, margin=settings.margin)
    if not output_rows:
        raise ConfigError(nothing_kept(groups, settings))
    files.write_bytes(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in output_rows).encode())
    progress.done()
    choice = None
    if sources and not any(source.columns for source in sources):
        own = [own_answer(RawRow(question.place, dict(columns)), config.data) for question, columns in questions]
        choice = sampled_answers.worth(groups, own)
    return sampled_answers.facts(groups, len(output_rows), skipped, limits, choice, least=settings.least)


def _require_sensible(settings: SampleSettings, out: Path) -> None:
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: rows are written as .jsonl. Give the file that ending.")
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another file, or delete it first.")
    if settings.to not in TO:
        raise ConfigError(f"--to {settings.to}: expected one of {', '.join(TO)}.")
    if settings.n < 1:
        raise ConfigError(f"--n {settings.n}: expected at least 1 answer to a prompt. Write --n 8.")
    _require_wordings(settings.wordings)
    if settings.to == "pairs" and len(settings.wordings) * settings.n < 2:
        raise ConfigError("--to pairs compares answers to a prompt, and --n 1 gives one. Write --n 2 or more.")
    if settings.margin and settings.to != "pairs":
        raise ConfigError(f"--margin is for --to pairs, not for {settings.to}. Leave it out.")
    if not settings.temperature > 0:
        raise ConfigError(f"--temperature {settings.temperature:g}: expected a number above 0, such as 1.")


def _require_scored(settings: SampleSettings, *, scored: bool) -> None:
    if not scored and (settings.to == "pairs" or settings.least is not None):
        asked = "--to pairs" if settings.to == "pairs" else f"--least {settings.least:g}"
        raise ConfigError(f"{asked} compares rewards, and nothing scores the answers. Write --score number.")
    if scored and settings.to == "accepted" and settings.least is None:
        raise ConfigError("--to accepted keeps answers with a reward of --least, which is not given. Write --least 1.")


def _require_wordings(wordings: Sequence[str]) -> None:
    for number, wording in enumerate(wordings):
        if PROMPT not in wording:
            raise ConfigError(
                f"--wording {wording!r}: {PROMPT} does not stand in it, so that every row would be asked the same. "
                f"Write it where the prompt belongs, such as --wording '{PROMPT} Think step by step.'"
            )
        if other := next((each for each in re.findall(r"\{\s*\w*\s*\}", wording) if each != PROMPT), None):
            raise ConfigError(
                f"--wording {wording!r}: {other} names nothing; {PROMPT} alone is replaced. Leave the braces out."
            )
        if wording in wordings[:number]:
            raise ConfigError(f"--wording {wording!r} is given twice. Leave one out, or write a higher --n.")


def is_address(teacher: str) -> bool:
    """Whether a teacher is named by an address."""
    return teacher.startswith(("http://", "https://"))


def _writer(
    teacher: str, overrides: Sequence[str], model: str | None, limits: RequestLimits, *, trust: bool
) -> tuple[RunConfig, AnswerWriter]:
    """Who writes, and a configuration that says how prompts are read."""
    run = Path(teacher).expanduser()
    served = is_address(teacher)
    if served != (model is not None):
        raise ConfigError(
            f"{teacher}: which model there? Write --model NAME."
            if served
            else f"--model {model}: is for an address, such as http://localhost:8000/v1. Leave it out."
        )
    if not served and limits != RequestLimits():
        raise ConfigError(f"{teacher}: answers here, where --at-once, --retries, --timeout and --price ask nobody.")
    if (run / "config.yaml").is_file():
        config = asked_config(run, overrides, verb="sample", trust=trust)
        generate.require_text(config, run)
        identity: dict[str, Any] = {
            "run": provenance.digests(run / "adapter", title="adapter") if (run / "adapter").is_dir() else {},
            "backbone": backbones.file_digests(config.model),
        }
        tools = toolbox(config.reinforce.tools, read_from=(run, Trust(trust)))
        if tools is None:
            return config, LocalWriter(teacher, lambda: exported.load(run, config), identity)
        identity["tools"] = tools.identity
        return config, EpisodeWriter(teacher, lambda: exported.load(run, config), identity, tools=tools)
    known = ("data.", "evaluate.", "image.", *(() if served else ("model.",)))
    if other := next((word for word in overrides if not word.startswith(known)), None):
        raise ConfigError(f"{other}: sample reads {', '.join(f'{each}*' for each in known)} of a configuration alone.")
    values = load("sft/quickstart").model_dump(mode="json")
    values = values if served else {**values, "model": ModelConfig(id=teacher).model_dump(mode="json")}
    config = parse(RunConfig, override(values, overrides), source="the command line")
    if model is not None:
        try:
            url = an_address(teacher)
        except ValueError as error:
            raise ConfigError(f"TEACHER: {error}") from None
        return config, ServedWriter(url, model, limits=limits)
    if cure := run_directory.instead(run):
        raise ConfigError(f"{teacher} is no run directory.{cure}")
    try:
        identity = {"backbone": backbones.file_digests(config.model)}
        backbones.hub_config(config.model)
    except BackboneError as error:
        text = re.sub(r"\bmodel\.id\b", "TEACHER", str(error))
        raise BackboneError(
            f"{teacher}: not a run directory (no config.yaml), so it is taken as a model. {text}"
        ) from None
    return config, LocalWriter(teacher, lambda: sampled_answers.stock(config.model, config), identity)


def nothing_kept(groups: Sequence[AnswerGroup], settings: SampleSettings) -> str:
    answers = [each for group in groups for each in group.answers]
    if settings.to != "all" and not any(each.usable for each in answers):
        return (
            f"None of {len(answers):,} answers ended within --max-new-tokens {settings.max_new_tokens}. Write a higher "
            "one, or --to all, which keeps unfinished ones. What is sampled is not kept for other lengths."
        )
    highest = max(each.reward for each in answers)
    wanted = "two answers to a prompt that differ in reward" if settings.to == "pairs" else "an answer that is kept"
    return (
        f"No prompt has {wanted}: the highest of {len(answers):,} rewards is {highest:g}. Lower --least or --margin, "
        "write a higher --n or --temperature, or another --score; answers are kept until --out is written."
    )
