"""Contaminated rows are kept, dropped or refused as the settings say, and told with place and common text."""

from __future__ import annotations

import json

import pytest

from workbench.config.sections.decontaminate_config import DecontaminateConfig
from workbench.data.text import contamination
from workbench.data.text.contamination import LISTED
from workbench.data.text.decontamination import TextRow
from workbench.data.text.formats import Example
from workbench.errors import DataError

HELD_OUT = [TextRow("test, row 1", ("one two three four five six seven eight nine",)), TextRow("test, row 2", ("ten",))]
ROWS = [TextRow(f"train, row {at}", (text,)) for at, text in enumerate(["TEN!", "eleven", "(ten)", "twelve"], start=1)]


def _config(action: str) -> DecontaminateConfig:
    return DecontaminateConfig.model_validate({"action": action})


def test_matches_mark_rows_in_their_order() -> None:
    found = contamination.find("train", iter(ROWS), {"data.test": iter(HELD_OUT)}, _config("drop"))
    assert found.contaminated_N.tolist() == [True, False, True, False]
    assert found.sets == {"data.test": 2} and found.rows == 4
    assert found.sentences[0] == "Contamination: 2 of 4 training rows hold text of data.test; dropped from training."
    assert found.sentences[1] == '  train, row 1 holds 100% of test, row 2 (data.test): "ten"'


def test_refused_with_every_cure() -> None:
    with pytest.raises(DataError, match=r"2 of 4(.|\n)*row 1 holds 100%(.|\n)*action=drop(.|\n)*keep to list"):
        contamination.find("train", ROWS, {"data.test": HELD_OUT}, _config("refuse"))
    assert not contamination.find("train", ROWS[1:2], {"data.test": HELD_OUT}, _config("refuse")).matches


def test_nothing_may_be_left_to_train_on() -> None:
    with pytest.raises(DataError, match="nothing is left"):
        contamination.find("train", ROWS[:1], {"data.test": HELD_OUT}, _config("drop"))
    assert contamination.find("train", ROWS[:1], {"data.test": HELD_OUT}, _config("keep")).matches


def test_facts_are_json_and_bounded() -> None:
    found = contamination.find("train", ROWS * 50, {"data.test": HELD_OUT}, _config("keep"))
    facts = json.loads(json.dumps(found.facts()))
    assert facts["contaminated"] == 100 and len(facts["matches"]) == LISTED
    assert facts["matches"][0]["train"] == "train, row 1"


def test_prompt_and_answer_count_and_the_system_prompt_does_not() -> None:
    turns = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    chat = Example("row", tuple({"role": role, "content": text} for role, text in turns))
    assert [text.split() for text in contamination.text_row(chat).texts] == [["a", "c"], ["b", "d"]]
    assert contamination.text_row(Example("row", text=(("a ", False), ("b", True)))).texts == ("a b",)
