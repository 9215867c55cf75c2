"""Faults planted in rows that rules of quality find, untouched rows that they flag, and rows judged a second.

    python scripts/bench/data_quality.py TRAIN [--rows 3000] [--planted 100]

TRAIN is a file that recipe sft reads, such as GSM8K's train.jsonl. Copies of some rows are planted, with each fault.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from itertools import islice

from measuring import machine

from workbench.config import DataConfig
from workbench.config.sections.cleaning_config import CLEAN_RULES
from workbench.data.text import formats
from workbench.data.text.quality import cleaning, rules
from workbench.data.text.quality.rules import SET_RULES, Exchange, RowText

REFUSALS = (
    "I'm sorry, but I can\u2019t help with that.",
    "As an AI language model, I have no opinion of this.",
    "Sorry, I can't assist you with this request.",
    "I am unable to assist you here.",
)
GERMAN = "Der Hund schläft heute nicht im Haus, sondern draußen unter dem alten Baum. Wie viele Hunde schlafen dort?"
FAULTS: dict[str, Callable[[str, str, random.Random], tuple[str, str]]] = {
    "answer_repeats_prompt": lambda asked, answer, _: (asked, f"{asked} {answer}"),
    "refusal": lambda asked, _, generator: (asked, generator.choice(REFUSALS)),
    "empty_turn": lambda asked, *_: (asked, "..."),
    "broken_characters": lambda asked, answer, _: (asked, _misread(answer)),
    "symbols": lambda asked, *_: (asked, "-=-=-" * len(asked)),
    "gopher_duplicate_lines": lambda asked, answer, _: (asked, f"{answer.splitlines()[0]}\n" * 8),
    "c4_lorem_ipsum": lambda asked, *_: (asked, "Lorem ipsum dolor sit amet."),
    "other_language": lambda *given: (GERMAN, f"Dort schlafen {given[2].randint(2, 99)} Hunde, die alle müde sind."),
    "exact_duplicate": lambda asked, answer, _: (asked.upper(), answer.replace(" ", "  ")),
    "near_duplicate": lambda asked, answer, _: (f"{asked} Think about it.", answer),
}
"""Each rule with the fault that it is for, planted in a question and its answer."""


def main(arguments: argparse.Namespace) -> None:
    print(machine("cpu", ("numpy", "py3langid")))
    examples = formats.read(arguments.train, DataConfig(train=arguments.train), skipped=[])
    rows = list(islice(map(rules.row_text_of_example, examples), arguments.rows))
    generator = random.Random(0)
    kinds: list[str] = [""] * len(rows)
    for rule, fault in FAULTS.items():
        for row in generator.sample(rows[: arguments.rows], arguments.planted):
            exchange = Exchange(*fault(*row.exchanges[-1], generator))
            rows.append(RowText(f"{rule} in {row.place}", "\n".join(exchange), turns=exchange, exchanges=(exchange,)))
            kinds.append(rule)
    began = time.perf_counter()
    flags = cleaning.flags_by_row(rows, CLEAN_RULES)
    by_rows = time.perf_counter()
    flags += cleaning.flags_by_comparison(rows, list(SET_RULES))
    ended = time.perf_counter()
    for rule in FAULTS:
        flagged = [kinds[flag.row] for flag in flags if flag.rule == rule]
        print(
            f"{rule:24} {flagged.count(rule):5,} of {kinds.count(rule):,} found, "
            f"{flagged.count(''):5,} of {kinds.count(''):,} untouched rows flagged"
        )
    print(f"{len(rows) / (by_rows - began):,.0f} rows/s by themselves, {len(rows) / (ended - by_rows):,.0f} compared")


def _misread(text: str) -> str:
    """UTF-8 that was read as Latin-1."""
    return f"{text} Voilà, un café.".encode().decode("latin-1")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--planted", type=int, default=100)
    main(parser.parse_args())
