"""Training rows that hold the text of evaluation rows are found, and kept, dropped or refused."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config.sections.cleaning_config import DecontaminateConfig
from workbench.data import starter
from workbench.data.text import decontamination
from workbench.data.text.decontamination import COMMON, LISTED, EvaluationIndex, TextRow, words
from workbench.data.text.formats import Example
from workbench.errors import DataError

NGRAM = 8


def _stories() -> list[TextRow]:
    lines = Path(starter.resolve("starter/fairytaleqa_held_out.jsonl")).read_text(encoding="utf-8").splitlines()
    return [TextRow(f"row {at}", tuple(map(str, json.loads(line).values()))) for at, line in enumerate(lines)]


def _intents() -> list[TextRow]:
    with Path(starter.resolve("starter/banking77_held_out.csv")).open(encoding="utf-8") as file:
        return [TextRow(f"row {at}", (row["text"],)) for at, row in enumerate(csv.DictReader(file))]


VARIANTS: dict[str, Callable[[str], str]] = {
    "verbatim": lambda text: text,
    "upper case": str.upper,
    "lower case": str.lower,
    "no punctuation": lambda text: re.sub(r"[^\w\s]", "", text),
    "other punctuation": lambda text: re.sub(r"[.,;:!?\"]", " -- ", text) + "!!",
    "white space": lambda text: "\t" + re.sub(r"\s", " \n\u00a0", text),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [_stories, _intents])
def test_planted_copies_are_found(rows: Callable[[], list[TextRow]], variant: str) -> None:
    held_out = rows()
    index = EvaluationIndex([("held-out", held_out)], ngram=NGRAM)
    change = VARIANTS[variant]
    planted = [TextRow(row.place, tuple(map(change, row.texts))) for row in held_out]
    found = {match.row for match in index.matches(planted, share=0.5)}
    assert len(found) >= (1 if variant == "verbatim" else 0.95) * len(held_out)


def test_copies_inside_longer_rows_are_found() -> None:
    held_out = [row for row in _intents() if len(words(row.texts[0])) >= NGRAM]
    index = EvaluationIndex([("test", held_out)], ngram=NGRAM)
    planted = [TextRow("", (f"Zunächst etwas anderes: {row.texts[0].upper()} und noch mehr.",)) for row in held_out]
    assert len(list(index.matches(planted, share=0.5))) == len(held_out)


def test_unrelated_rows_are_not_found() -> None:
    held_out = _stories() + _intents()
    vocabulary = sorted({word for row in held_out for text in row.texts for word in words(text)})
    generator = np.random.default_rng(0)
    rows = [TextRow("", (" ".join(drawn),)) for drawn in generator.choice(vocabulary, size=(10_000, 40))]
    assert not list(EvaluationIndex([("", held_out)], ngram=NGRAM).matches(rows, share=0.5))


@given(
    st.lists(st.sampled_from("abcdefg"), min_size=8, max_size=30), st.lists(st.sampled_from("abcdefgxy"), max_size=60)
)
def test_the_share_is_that_of_words_in_common_ngrams(evaluated: list[str], trained: list[str]) -> None:
    n = 3
    grams = {tuple(trained[at : at + n]) for at in range(len(trained) - n + 1)}
    hit = [tuple(evaluated[at : at + n]) in grams for at in range(len(evaluated) - n + 1)]
    covered = {at + offset for at, yes in enumerate(hit) if yes for offset in range(n)}
    index = EvaluationIndex([("test", [TextRow("e", (" ".join(evaluated),))])], ngram=n)
    found = list(index.matches([TextRow("t", (" ".join(trained),))], share=1e-9))
    assert (found[0].share if found else 0.0) == pytest.approx(len(covered) / len(evaluated), abs=1e-4)


def test_a_template_of_many_rows_is_not_compared() -> None:
    template = "answer the following question as briefly and clearly as you can please"
    texts = [f"{template} {' '.join(f'{letter}{at}' for letter in 'abcdefgh')}" for at in range(COMMON + 1)]
    index = EvaluationIndex([("test", [TextRow(str(at), (text,)) for at, text in enumerate(texts)])], ngram=NGRAM)
    rows = [TextRow("", (f"{template} {at} of my own",)) for at in range(5)]
    assert not list(index.matches(rows, share=0.1))
    assert [found.evaluation for found in index.matches([TextRow("", (texts[3] + " more",))], share=0.5)] == ["3"]


def test_blocks_and_order_change_nothing() -> None:
    held_out = _intents()
    index = EvaluationIndex([("test", held_out)], ngram=NGRAM)
    filler = [TextRow("", ("nothing of it",))] * 1500
    found = list(index.matches([*filler, held_out[0], *filler, held_out[1]], share=0.5))
    assert [match.row for match in found] == [1500, 3001]
    assert [match.evaluation for match in found] == [held_out[0].place, held_out[1].place]


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    text = "床前明月光疑是地上霜举头望明月低头思故乡"
    assert words("床前\uff0c\uff21b c") == ["床", "前", "ab", "c"]
    index = EvaluationIndex([("test", [TextRow("poem", (text,))])], ngram=NGRAM)
    found = list(index.matches([TextRow("", (f"古诗 {text[:5]}\u3002{text[5:]}完",))], share=0.5))
    assert [match.share for match in found] == [1.0]


HELD_OUT = [TextRow("test, row 1", ("one two three four five six seven eight nine",)), TextRow("test, row 2", ("ten",))]
ROWS = [TextRow(f"train, row {at}", (text,)) for at, text in enumerate(["TEN!", "eleven", "(ten)", "twelve"], start=1)]


def _config(action: str) -> DecontaminateConfig:
    return DecontaminateConfig.model_validate({"action": action})


def test_matches_mark_rows_in_their_order() -> None:
    found = decontamination.find_contamination("train", iter(ROWS), {"data.test": iter(HELD_OUT)}, _config("drop"))
    assert found.contaminated_N.tolist() == [True, False, True, False]
    assert found.sets == {"data.test": 2} and found.rows == 4
    assert found.sentences[0] == "Contamination: 2 of 4 training rows hold text of data.test; dropped from training."
    assert found.sentences[1] == '  train, row 1 holds 100% of test, row 2 (data.test): "ten"'


def test_refused_with_every_cure() -> None:
    with pytest.raises(DataError, match=r"2 of 4(.|\n)*row 1 holds 100%(.|\n)*action=drop(.|\n)*keep to list"):
        decontamination.find_contamination("train", ROWS, {"data.test": HELD_OUT}, _config("refuse"))
    assert not decontamination.find_contamination(
        "train", ROWS[1:2], {"data.test": HELD_OUT}, _config("refuse")
    ).matches


def test_nothing_may_be_left_to_train_on() -> None:
    with pytest.raises(DataError, match="nothing is left"):
        decontamination.find_contamination("train", ROWS[:1], {"data.test": HELD_OUT}, _config("drop"))
    assert decontamination.find_contamination("train", ROWS[:1], {"data.test": HELD_OUT}, _config("keep")).matches


def test_facts_are_json_and_bounded() -> None:
    found = decontamination.find_contamination("train", ROWS * 50, {"data.test": HELD_OUT}, _config("keep"))
    facts = json.loads(json.dumps(found.facts()))
    assert facts["contaminated"] == 100 and len(facts["matches"]) == LISTED
    assert facts["matches"][0]["train"] == "train, row 1"


def test_prompt_and_answer_count_and_the_system_prompt_does_not() -> None:
    turns = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    chat = Example("row", tuple({"role": role, "content": text} for role, text in turns))
    assert [text.split() for text in decontamination.text_row(chat).texts] == [["a", "c"], ["b", "d"]]
    assert decontamination.text_row(Example("row", text=(("a ", False), ("b", True)))).texts == ("a b",)
