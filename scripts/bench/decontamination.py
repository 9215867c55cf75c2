"""Planted copies of evaluation rows that are found, unrelated rows that are found wrongly, and rows read a second.

    python scripts/bench/decontamination.py EVALUATION [--unrelated FILE] [--rows 10000]

EVALUATION is a file that recipe sft reads, such as GSM8K's test.jsonl. Each of its rows is planted as it is, in other
case, punctuation and spaces, and inside a longer row. Unrelated rows are the first of a file of another origin, such as
the Wikipedia sentences of CLINC150 (all_wiki_sents.txt).
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from measuring import machine

from workbench.config import DataConfig
from workbench.config.sections.cleaning_config import DecontaminateConfig
from workbench.data.text import decontamination, formats
from workbench.data.text.decontamination import EvaluationIndex, TextRow

VARIANTS: dict[str, Callable[[str], str]] = {
    "verbatim": lambda text: text,
    "upper case": str.upper,
    "lower case": str.lower,
    "title case": str.title,
    "no punctuation": lambda text: re.sub(r"[^\w\s]", "", text),
    "punctuation to spaces": lambda text: re.sub(r"[^\w\s]", " ", text),
    "more punctuation": lambda text: re.sub(r"\s", ", ", text) + "!!",
    "white space": lambda text: re.sub(r"\s", " \t\n", text),
    "inside a longer row": lambda text: f"Read this with care before you go on: {text} That is all there was to it.",
}


def main(arguments: argparse.Namespace) -> None:
    print(machine("cpu", ("numpy",)))
    settings = DecontaminateConfig()
    evaluation = list(_read(arguments.evaluation))
    began = time.perf_counter()
    index = EvaluationIndex([(arguments.evaluation, evaluation)], ngram=settings.ngram)
    print(f"n-grams of {settings.ngram}, share {settings.share:g}; {len(evaluation):,} rows indexed in {_since(began)}")
    for name, change in VARIANTS.items():
        planted = [TextRow(row.place, tuple(change(text) for text in row.texts)) for row in evaluation]
        found = sum(1 for _ in index.matches(planted, share=settings.share))
        print(f"{name:24} {found:7,} of {len(planted):,} found  {found / len(planted):8.2%}")
    if arguments.unrelated:
        rows = list(islice(_read(arguments.unrelated), arguments.rows))
        _timed("unrelated", index, rows, settings.share)
    _timed("copies", index, [*evaluation] * 8, settings.share)


def _timed(name: str, index: EvaluationIndex, rows: list[TextRow], share: float) -> None:
    began = time.perf_counter()
    found = list(index.matches(rows, share=share))
    rate = len(rows) / (time.perf_counter() - began)
    print(f"{name:24} {len(found):7,} of {len(rows):,} found  {rate:8,.0f} rows/s")
    if name == "unrelated":
        print("".join(f"  {decontamination.match_text(match)}\n" for match in found[:5]), end="")


def _read(source: str) -> Iterator[TextRow]:
    examples: Iterable[formats.Example] = formats.read(source, DataConfig(train=source), skipped=[])
    return map(decontamination.text_row, examples)


def _since(began: float) -> str:
    return f"{time.perf_counter() - began:.2f} s"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation")
    parser.add_argument("--unrelated")
    parser.add_argument("--rows", type=int, default=10_000)
    main(parser.parse_args())
