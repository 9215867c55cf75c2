"""Rounds: a model answers prompts, rewards judge the answers, and it learns from them; the next round begins there.

Each round is a run of its task in a folder of its own, with its answers, the rows it learns, its adapter and how that
answers held-out prompts. With the best answer to each prompt this is best-of-n, with pairs iterative DPO
(Xiong et al. 2024, arXiv:2312.11456). Whatever is on disk is done: a round that was interrupted goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench import report
from workbench.config import RunConfig, model_heads
from workbench.config.expansions import rounds_expansion
from workbench.config.expansions.member_runs import Trial
from workbench.config.expansions.rounds_expansion import HELD_OUT, ROWS, WARM_UP
from workbench.config.sections.distill_config import RequestLimits
from workbench.data import starter
from workbench.data.batching import evenly_spaced
from workbench.data.held_out_split import Splits
from workbench.data.text import decontamination, tokenized
from workbench.data.text.prompts import PromptEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError, Stopped
from workbench.evaluation import comparison, rewards
from workbench.evaluation.comparison import Floats
from workbench.models import backbones, exported
from workbench.models.exported import ExportedModel
from workbench.recipes.inspection import SHOWN, Inspection, pieces, unread
from workbench.recipes.over import member_results, sweep
from workbench.recipes.single import sampled_answers, start_adapter
from workbench.recipes.single.sampled_answers import (
    AnswerGroup,
    LocalWriter,
    Questions,
    SampleProgress,
    SampleSettings,
    Written,
    rows_to_write,
)
from workbench.recipes.task import MembersAtOnce, Scores, implementation
from workbench.recipes.tasks.sft.text_run import conversations
from workbench.runs import files, provenance, run_directory
from workbench.runs.run_directory import Run
from workbench.runs.trust import Trust
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps

TABLE = "rounds.json"
ANSWERS = "answers.jsonl"
"""Answers to the training prompts, in the folder of the round that learns them."""
JUDGED = "held_out_answers.jsonl"
"""Answers of a round's adapter to held-out prompts, in its folder; those of what rounds begin with in the run's."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of all rounds, with the columns of their rows."""

    train: Questions
    held_out: Questions
    data: Splits[TokenizedSet]
    """The same as token ids, each with the token that ends an answer."""
    tokenizer: PreTrainedTokenizerBase


def read(config: RunConfig) -> Prompts:
    """The prompts that `config` names; refuses rows that a reward cannot judge, and methods no round goes on from."""
    if (
        config.rounds.count > 1 or config.rounds.warm_up is not None
    ) and config.adapter.method not in start_adapter.METHODS:
        raise ConfigError(
            f"adapter.method={config.adapter.method} changes the backbone itself when it starts, and a round begins "
            f"with the adapter of the one before. Write adapter.method={'|'.join(start_adapter.METHODS[:4])}, or "
            "rounds.count=1."
        )
    start_adapter.require(config)
    tokenizer = backbones.tokenizer(config.model)
    encoder = PromptEncoder(conversations(config, tokenizer))
    data = tokenized.load(config.data, tokenizer, encoder, seed=config.seed)

    def asked(split: str, rows: TokenizedSet) -> Questions:
        places = {tokenized.example_of(place) for place in rows.places()}
        share = split == "held_out" and config.data.own_share is not None
        sources = config.data.training_files if share else config.data.files_of(split)  # type: ignore[arg-type]
        wanted = places if share or split == "train" else None
        return [
            each
            for own in sources.values()
            for each in sampled_answers.questions(starter.resolve(own.train), own, config, config.rounds.score, wanted)
        ]

    return Prompts(asked("train", data.train), asked("held_out", data.held_out), data, tokenizer)


def inspect(config: RunConfig) -> Inspection:
    """Findings of `check`: the prompts, and what a round does with them."""
    first, rounds = rounds_expansion.trials(config)[0].config, config.rounds
    prompts, kind = read(config), rounds_expansion.kind(config)
    rewards.build(rounds.score)
    implementation(first).require(first, prompts.data)
    train = prompts.data.train
    shown = [(train.place(row), train[row]) for row in evenly_spaced(len(train), SHOWN).tolist()]
    bare = [(place, row._replace(input_ids=row.input_ids[:-1], supervised=row.supervised[:-1])) for place, row in shown]
    return Inspection(
        config=first,
        data=prompts.data,
        examples=[(place, pieces(row, prompts.tokenizer, train.processor)) for place, row in bare],
        targets=first.adapter.modules(backbones.skeleton(first.model, task=model_heads.of(first))),
        steps=total_steps(first, len(train) * (rounds.n if kind == "accepted" else 1)),
        notes=[
            f"{rounds.count} rounds: each writes {rounds.n} answers to each of {len(prompts.train):,} prompts, learns "
            f"from the {kind} of them, and begins with the adapter of the one before; the steps are those of a round "
            f"that learns from every prompt. Rewards of answers to {len(prompts.held_out):,} held-out prompts say "
            "which round is best.",
            *unread(*prompts.data),
            *(train.contamination.sentences if train.contamination else ()),
        ],
    )


def main(config: RunConfig, run: Run, callback: Callback, at_once: MembersAtOnce) -> Scores:
    """Carry out round after round; returns rewards before and of the best round, as they stand in scores.json."""
    table = run.ranks.agreed(files.read_json(run.home / TABLE) if run.resumed else {})
    if not table.get("ended"):
        table = Rounds.begun(config, run, callback).work()
    if not run.ranks.first:
        return {}
    best = next(row for row in table["members"] if row["member"] == table["best"])
    callback.say(f"Shipping {table['best']}, whose answers to held-out prompts are the best of {_count(table)}.")
    own = (ROWS, HELD_OUT, ANSWERS, JUDGED)
    sweep.ship(run, Run(run.path / "members" / table["best"], None, resumed=True), but=own)
    ends = {"before": table["start"], "after": best}
    scores: Scores = {when: {"reward": each["reward"], **_bounds(each)} for when, each in ends.items()}
    files.write_json(run.path / "scores.json", scores)
    run.note(status="done")
    report.write(run.path)
    return scores


def _bounds(row: dict[str, Any]) -> dict[str, float]:
    return {} if row["interval"] is None else dict(zip(("reward_low", "reward_high"), row["interval"], strict=True))


def _count(table: dict[str, Any]) -> str:
    count = len(table["members"])
    return "one round" if count == 1 else f"{count} rounds"


@dataclass(frozen=True)
class Rounds:
    """The rounds of a run that has begun."""

    config: RunConfig
    run: Run
    callback: Callback
    prompts: Prompts
    trials: Sequence[Trial[RunConfig]]

    @staticmethod
    def begun(config: RunConfig, run: Run, callback: Callback) -> Rounds:
        """The rounds with their prompts, before the first answer; what an earlier run left here is removed."""
        trials, prompts = rounds_expansion.trials(config, run.home), read(config)
        if not run.resumed:
            for folder in ("members", WARM_UP):
                shutil.rmtree(run.path / folder, ignore_errors=True)
            for stale in (run.path / TABLE, run.path / JUDGED, SampleProgress.beside(run.path / JUDGED)):
                stale.unlink(missing_ok=True)
        run.ranks.wait()
        provenance.note_data(run, prompts.data.facts())
        provenance.note_files(run, "rewards", rewards.digests(config.rounds.score))
        decontamination.write_matches(prompts.data.train.contamination, run)
        return Rounds(config, run, callback, prompts, trials)

    def work(self) -> dict[str, Any]:
        """Every round until the last one, one that is worse, or one that finds nothing to learn; returns rounds.json.

        Raises:
            ConfigError: The first round finds nothing to learn.
            Stopped: On request, between two answers or steps.
        """
        run, rounds, kept = self.run, self.config.rounds, list[dict[str, Any]]()
        if rounds.warm_up is not None:
            self._warm_up()
        start = self._judged(0, None)
        best = start
        for trial in self.trials:
            own = run.child(f"members/{trial.name}")
            member_results.opened(own, trial)
            lacking = run.ranks.agreed(self._write_rows(trial) if run.ranks.first else "")
            if lacking:
                if not kept:
                    raise ConfigError(lacking)
                if run.ranks.first:
                    shutil.rmtree(own.home, ignore_errors=True)
                self.callback.say(f"{trial.name} would learn nothing, so that the rounds end. {lacking}")
                break
            if own.manifest.get("status") != "done":
                self.callback.say(f"{trial.name}: training ...")
                implementation(trial.config).main(trial.config, own, self.callback)
            rows = (own.home / ROWS).read_bytes().count(b"\n")
            judged = self._judged(trial.number + 1, best) | {"rows": rows}
            kept.append({**member_results.row(trial, own), **judged})
            self._write_table(start, kept, ended=False)
            self.callback.say(f"{trial.name}: {_in_words(judged)}")
            if judged["worse"] and rounds.on_worse == "stop" and trial is not self.trials[-1]:
                self.callback.say(f"{trial.name} is worse than what was there before, so that the rounds end.")
                break
            best = best if judged["worse"] else judged
        table = self._write_table(start, kept, ended=True)
        if run.ranks.first:
            for path in (run.home / JUDGED, *(each / name for each in self._folders for name in (ANSWERS, JUDGED))):
                SampleProgress.beside(path).unlink(missing_ok=True)
        return table

    def _warm_up(self) -> None:
        """Teach what comes before the first round."""
        config, own = rounds_expansion.warm_up(self.config), self.run.child(WARM_UP)
        member_results.opened(own, Trial(WARM_UP, {}, config, 0))
        if own.manifest.get("status") != "done":
            self.callback.say(f"Warm-up: {config.train.steps} steps on {config.data.train} ...")
            implementation(config).main(config, own, self.callback)

    @property
    def _folders(self) -> list[Path]:
        return [self.run.home / "members" / trial.name for trial in self.trials]

    def _write_table(self, start: dict[str, Any], kept: Sequence[dict[str, Any]], *, ended: bool) -> dict[str, Any]:
        """rounds.json: what came of each round so far, and which is the best."""
        public = [{key: value for key, value in row.items() if key not in ("each", "firsts")} for row in (start, *kept)]
        good = [row for row in kept if not row["worse"]]
        best = (good[-1] if good else max(kept, key=lambda row: row["reward"]))["member"]
        table = {"best": best, "ended": ended, "start": public[0], "members": public[1:]}
        if self.run.ranks.first:
            files.write_json(self.run.path / TABLE, table)
        return table

    def _write_rows(self, trial: Trial[RunConfig]) -> str:
        """Write what a round learns and what it is measured on; returns why there is nothing to learn."""
        folder, kind, rounds = self._folders[trial.number], rounds_expansion.kind(self.config), self.config.rounds
        if (folder / ROWS).exists():
            return ""
        sets = {ROWS: self._answers(trial.number, held_out=False), HELD_OUT: self._answers(trial.number, held_out=True)}
        written = {
            name: rows_to_write(groups, kind, least=rounds.least, margin=rounds.margin) for name, groups in sets.items()
        }
        if not written[HELD_OUT] and trial.number:  # what the round before was measured on is as good
            before = (self._folders[trial.number - 1] / HELD_OUT).read_text(encoding="utf-8").splitlines()
            written[HELD_OUT] = [json.loads(line) for line in before]
        for name, what in {ROWS: "", HELD_OUT: "held-out "}.items():
            if not written[name]:
                return _nothing(sets[name], kind, what)
        for name in (HELD_OUT, ROWS):  # the rows last: where they stand, all does
            files.write_bytes(folder / name, _lines(written[name]))
        self.callback.say(f"{trial.name}: {len(written[ROWS]):,} rows to learn from {_drawn(sets[ROWS])}.")
        return ""

    def _judged(self, number: int, before: dict[str, Any] | None) -> dict[str, Any]:
        """How the policy after `number` rounds answers held-out prompts, beside the best before it."""
        told: dict[str, Any] = {}
        if self.run.ranks.first:
            groups = self._answers(number, held_out=True)
            each_S = np.asarray([np.mean([one.reward for one in group.answers] or [0.0]) for group in groups])
            firsts = [group.answers[0].text if group.answers else "" for group in groups]
            facts = dataclasses.asdict(sampled_answers.facts(groups, 0, [], RequestLimits(), least=None))
            told = {name: facts[name] for name in ("reward", "finished", "passes")}
            told |= {"prompts": len(groups), "each": each_S.tolist(), "firsts": firsts}
            if before is not None:
                before_S = np.asarray(before["each"])
                if any(source.relative for source in self.config.rounds.score):
                    before_S, each_S = self._against(before["firsts"], firsts)
                    told["reward"] = float(each_S.mean())
                paired = comparison.paired("reward", before_S, each_S)
                told |= {"difference": paired.difference, "difference_interval": paired.interval}
                told |= {"worse": paired.difference < 0}
            told |= {"interval": comparison.mean_interval(each_S)}
        judged: dict[str, Any] = self.run.ranks.agreed(told)
        return judged

    def _against(self, before: Sequence[str], now: Sequence[str]) -> tuple[Floats, Floats]:
        """Rewards of the first answers to held-out prompts, which judges compare with those of the best before."""
        reward = rewards.build(self.config.rounds.score)
        both = [
            rewards.answer_to(question, text, columns)
            for (question, columns), *texts in zip(self.prompts.held_out, before, now, strict=True)
            for text in texts
        ]
        given = np.asarray(reward(both), dtype=np.float64)
        return given[::2], given[1::2]

    def _answers(self, number: int, *, held_out: bool) -> list[AnswerGroup]:
        """Answers of the policy after `number` rounds, with their rewards; those on disk are neither drawn nor scored
        again. Training prompts are answered with other random numbers in each round, held-out ones with the same."""
        rounds, asked = self.config.rounds, self.prompts.held_out if held_out else self.prompts.train
        drawn = SampleSettings(
            n=rounds.n,
            temperature=rounds.temperature,
            max_new_tokens=rounds.max_new_tokens,
            seed=self.config.seed if held_out else self.config.seed + number,
            likelihood=any(source.reads_likelihood for source in rounds.score),
        )
        folder = self._folders[number - held_out] if number or not held_out else self.run.home
        path = folder / (JUDGED if held_out else ANSWERS)
        progress = _Stoppable(path, {"round": number}, self.callback.stop_requested)
        if len(progress.answers) < len(asked):
            what = "held-out prompts" if held_out else "prompts"
            self.callback.say(f"Answering {len(asked):,} {what}, {rounds.n} times each ...")
        writer = LocalWriter("the policy", lambda: self._policy(number), {})
        groups = sampled_answers.written_and_scored(writer, asked, drawn, rounds.score, progress)
        if not path.exists():
            files.write_bytes(path, _lines(rows_to_write(groups, "all", least=None, margin=0.0)))
        return groups

    def _policy(self, number: int) -> ExportedModel:
        """What rounds begin with, or what a round saved."""
        if number:
            return exported.load(self._folders[number - 1], self.trials[number - 1].config)
        if self.config.rounds.warm_up is not None:
            return exported.load(self.run.home / WARM_UP, rounds_expansion.warm_up(self.config))
        begins = start_adapter.wanted(self.config)
        if begins.run is None:
            return sampled_answers.stock(self.config.model, self.config)
        path = start_adapter.folder(begins.run)
        return exported.load(path, run_directory.shipped_config(path, Trust(begins.trust)))


class _Stoppable(SampleProgress):
    """Answers on disk, which ask after each batch whether to end."""

    def __init__(self, out: Path, identity: dict[str, Any], stop_requested: Callable[[], bool]) -> None:
        super().__init__(out, identity)
        self._stop_requested = stop_requested

    def keep_answers(self, answers: Written) -> None:
        super().keep_answers(answers)
        if self._stop_requested():
            raise Stopped("Stopped while answers were drawn; those that there are stay on disk.")


def _lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _drawn(groups: Sequence[AnswerGroup]) -> str:
    every = [each for group in groups for each in group.answers]
    mean = np.mean([each.reward for each in every])
    return f"{len(every):,} answers to {len(groups):,} prompts, whose mean reward is {mean:.3f}"


def _nothing(groups: Sequence[AnswerGroup], kind: str, what: str) -> str:
    """Why answers make no rows, and what to write."""
    every = [each for group in groups for each in group.answers]
    if not any(each.usable for each in every):
        return (
            f"rounds.max_new_tokens: none of {len(every):,} answers to {what}prompts ended by itself. Write a higher "
            "one."
        )
    wanted = "two finished answers that differ in reward" if kind == "pairs" else "a finished answer that is kept"
    return (
        f"rounds: none of {len(groups):,} {what}prompts has {wanted}; the highest of {len(every):,} rewards is "
        f"{max(each.reward for each in every):g}. Write a higher rounds.n or rounds.temperature, a lower rounds.least, "
        f"or name more {what}prompts."
    )


def _in_words(judged: dict[str, Any]) -> str:
    """The mean reward of held-out answers, and by how much it differs from the best before."""
    low, high = judged["difference_interval"] or (None, None)
    bounds = "" if low is None else f", 95 % {low:+.3f} to {high:+.3f}"
    return (
        f"mean reward {judged['reward']:.3f} of answers to held-out prompts "
        f"({judged['difference']:+.3f} from the best before{bounds})."
    )
