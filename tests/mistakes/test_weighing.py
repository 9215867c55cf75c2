"""Mistakes with rows and tokens that count by their losses end in status 2 with place and cure, before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import MINILM
from tests.mistakes.cases import AssertRefused, Case, file

PLACE = "data.sampling"
TILTED, TOKENS = f"{PLACE}.by=tilted", f"{PLACE}.by=tokens {PLACE}.reference=backbone"
OF = f"check my.yaml {PLACE}.by=tokens {PLACE}.reference="
CHECK = "check my.yaml"
TWO = "data.train=null data.sources.a.path=rows.jsonl data.sources.b.path=more.jsonl data.mix.by=learned"
CLASSES = """
recipe: classify
data: {train: rows.jsonl}
"""


def of_classes(folder: Path) -> None:
    """A run of another recipe, as far as it is looked at."""
    for name in ("labels", "labels/adapter"):
        (folder / name).mkdir()
    file("labels/config.yaml", CLASSES)(folder)
    for name in ("adapter_config.json", "adapter_model.safetensors", "labels.json", "tokenizer.json"):
        file(f"labels/adapter/{name}", "{}")(folder)


def alone(folder: Path) -> None:
    """An adapter without its run."""
    (folder / "adapter").mkdir()
    file("adapter/adapter_config.json", "{}")(folder)


def unfinished(folder: Path) -> None:
    """A run that has saved nothing."""
    (folder / "begun").mkdir()
    file("begun/config.yaml", (folder / "my.yaml").read_text())(folder)


CASES = {
    "no reference": Case(f"{CHECK} {PLACE}.by=tokens", "by=tokens compares with a model", f"{PLACE}.reference=RUN"),
    "all tokens": Case(f"{CHECK} {TOKENS} {PLACE}.keep=1", f"{PLACE}.keep", "less than 1"),
    "in percent": Case(f"{CHECK} {TOKENS} {PLACE}.keep=60", f"{PLACE}.keep", "less than 1"),
    "keep of rows": Case(f"{CHECK} {TILTED} {PLACE}.keep=0.5", "keep is for by=tokens", "Leave keep out"),
    "reference of rows": Case(
        f"{CHECK} {TILTED} {PLACE}.reference=backbone", "reference is for by=tokens", "Leave reference out"
    ),
    "tilt of tokens": Case(f"{CHECK} {TOKENS} {PLACE}.tilt=2", "tilt is for by=tilted", "Leave tilt out"),
    "no tilt": Case(f"{CHECK} {TILTED} {PLACE}.tilt=0", "tilt=0 lets all rows count alike", "data.sampling.by=all"),
    "too much tilt": Case(f"{CHECK} {TILTED} {PLACE}.tilt=1000", f"{PLACE}.tilt", "100"),
    "misspelt": Case(f"{CHECK} {PLACE}.by=token", f"{PLACE}.by", "'tokens'"),
    "a pool": Case(f"{CHECK} {TILTED} {PLACE}.pool=4", "pool is for by=importance|selective", "Leave pool out"),
    "no such reference": Case(
        f"{OF}runs/clean", f"{PLACE}.reference=runs/clean: there is no such run", "Train it first"
    ),
    "an adapter alone": Case(
        f"{OF}adapter", f"{PLACE}.reference=adapter is no run directory", "workbench adopt adapter", alone
    ),
    "a run that has not ended": Case(f"{OF}begun", "begun", "Finish the run first", unfinished),
    "a run of classes": Case(
        f"{OF}labels",
        f"{PLACE}.reference=labels: its run is of recipe=classify",
        "Name a run of recipe=sft",
        of_classes,
    ),
    "another tokenizer": Case(
        f"{OF}{MINILM}", "it has another tokenizer. Token", "Name a model with the tokenizer of model.id"
    ),
    "an encoder-decoder": Case(
        f"{OF}t5",
        "one has a decoder beside its encoder and one has none",
        "Name a model of the same kind",
    ),
    "on a run": Case(
        f"run my.yaml {PLACE}.by=tokens {PLACE}.reference={MINILM}", "it has another tokenizer", "model.id"
    ),
    "hidden tokens": Case(
        f"{CHECK} recipe=mlm {TOKENS}", "recipe=mlm hides other tokens in each epoch", f"Write {TILTED}"
    ),
    "tokens of classes": Case(f"{CHECK} recipe=classify {TOKENS}", "learns labels of whole rows", f"Write {TILTED}"),
    "a sweep": Case(f"{CHECK} recipe=sweep {TILTED}", "members of a sweep train on the same rows", "Leave it out"),
    "a student": Case(
        f"{CHECK} recipe=distill distill.teacher.id=backbone {TOKENS}", "measures no losses of rows", "Leave it out"
    ),
    "noise of even batches": Case(
        f"{CHECK} {TILTED} optimizer.noise_scale=5", "rows that are drawn evenly", "Leave it or data.sampling out"
    ),
    "cut weights": Case(
        f"{CHECK} {TOKENS} distributed.zero=3", "a whole reference on each device", "distributed.zero=0"
    ),
    "a pace of its own": Case(
        f"{CHECK} {TILTED} data.curriculum.by=self_paced", "rows that count alike", "Write data.curriculum.by=length"
    ),
    "a learned mixture": Case(
        f"{CHECK} {TILTED} {TWO}",
        "data.mix.by=learned follows losses of rows drawn evenly",
        "Leave it or data.sampling",
    ),
    "a learned mixture of weighed rows": Case(
        f"{CHECK} 'data.columns={{weight: w}}' {TWO}", "data.columns.weight says otherwise", "Leave one of them out"
    ),
}


@pytest.fixture(autouse=True)
def t5(folder: Path, encoder_decoder: str) -> None:
    (folder / "t5").symlink_to(encoder_decoder)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
