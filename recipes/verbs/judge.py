"""`judge`: how far a judge of pairs can be trusted: whether it follows the order, and how far it agrees with people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from workbench.config import DataConfig, RunConfig
from workbench.config.yaml_text import override
from workbench.data import starter
from workbench.data.text import formats, preference_pairs
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import Answer, answer_to
from workbench.data.text.prompts import without_answer
from workbench.errors import ConfigError
from workbench.evaluation import judges
from workbench.runs import files, units
from workbench.schema import parse


def judge(
    judge: str,
    rows: str,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    timeout: float = 600.0,
    out: Path | str | None = None,
) -> dict[str, float]:
    """Ask a judge about pairs of answers that people have judged, in both orders, and compare.

    Args:
        judge: The address of a server with OpenAI's interface, up to /v1, or a program that reads pairs as JSON lines
            and writes 1, 2 or 0 for each.
        rows: Preference rows: what people chose and rejected, or ties.
        overrides: `key=value` words of section data.
        model: The model's name at an address.
        timeout: Seconds for an answer of an address, or for all verdicts of a program.
        out: A .jsonl file for the pairs, with what people and the judge say.

    Returns:
        `pairs`; `agreement` with people, the share of pairs with the same verdict, and Cohen's `kappa`, each with a
        95 % interval; `decided`, the share of pairs on which both orders prefer one answer, and `agreement_decided`
        with people on those without a tie; `order_agreement` and `first_chosen`, one half for a judge without a bias
        for a position.

    Raises:
        ConfigError: The judge does not answer, or what it says is no verdict.

    Examples:
        >>> import workbench
        >>> found = workbench.judge("sed s/.*/1/", "starter/oasst_pairs_held_out.jsonl")
        >>> found["first_chosen"], found["order_agreement"], found["decided"]
        (1.0, 0.0, 0.0)
    """
    out = None if out is None else Path(out)
    if out is not None:
        if out.suffix != ".jsonl":
            raise ConfigError(f"--out {out}: rows are written as .jsonl. Give the file that ending.")
        files.require_writable(out)
    if other := next((word for word in overrides if not word.startswith("data.")), None):
        raise ConfigError(f"{other}: judge reads data.* of a configuration alone. Leave it out.")
    asks = judges.named(judge, model, timeout=timeout, key="JUDGE", option="--model")
    pairs = _pairs(rows, _data(rows, overrides))
    # People's choice stands in front in about half of the pairs, by their content.
    people = [0 if tie else 1 + _swapped(chosen) for chosen, _, tie in pairs]
    shown = [(rejected, chosen) if _swapped(chosen) else (chosen, rejected) for chosen, rejected, _ in pairs]
    judged = judges.in_both_orders(asks, shown)
    said = [1 if win == 1 else 2 if win == 0 else 0 for win in judged.win_S.tolist()]
    both = [(one, other) for one, other in zip(people, said, strict=True) if one and other]
    found = {"pairs": float(len(pairs)), **judges.agreement(people, said), **judged.bias}
    found["decided"] = sum(each != 0 for each in said) / len(said)
    if both:
        found["agreement_decided"] = sum(one == other for one, other in both) / len(both)
    if out is not None:
        lines = [
            {"place": first.place, "prompt": first.prompt, "first": first.text, "second": second.text}
            | {"people": one, "judge": other, "win": win}
            for (first, second), one, other, win in zip(shown, people, said, judged.win_S.tolist(), strict=True)
        ]
        files.write_bytes(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
    return units.rounded(found)


def _data(rows: str, overrides: Sequence[str]) -> DataConfig:
    values = override({"recipe": "prefer", "data": {"train": rows}}, overrides)
    return parse(RunConfig, values, source="the command line").data


def _pairs(source: str, data: DataConfig) -> list[tuple[Answer, Answer, bool]]:
    """The chosen and the rejected answer of each row, and whether it is a tie."""
    skipped: list[str] = []
    read = formats.read(starter.resolve(source), data, skipped=skipped, conversion=preference_pairs.convert)
    pairs = [(_answer(each), _answer(each.rejected), bool(each.tie)) for each in read if each.rejected is not None]
    if not pairs:
        raise ConfigError(f"{source}: no row has two answers, of which people chose one. Name preference pairs.")
    return pairs


def _answer(example: Example) -> Answer:
    if example.text:
        return answer_to(without_answer(example), "".join(text for text, learnt in example.text if learnt), {})
    return answer_to(without_answer(example), str(example.messages[-1]["content"]), {})


def _swapped(chosen: Answer) -> bool:
    """Whether the chosen answer of a pair is shown second."""
    return bool(hashlib.sha256(f"{chosen.prompt}\0{chosen.text}".encode()).digest()[0] & 1)
