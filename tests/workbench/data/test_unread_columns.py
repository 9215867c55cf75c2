"""What rows carry and nothing reads is named, or refused where other tools give it a meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.workbench.data.reading import config, write
from workbench.data import unread_columns
from workbench.data.embedding import pair_records
from workbench.data.text.formats import read
from workbench.errors import DataError

ASKED = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


def noted(folder: Path, row: dict[str, Any], **data: Any) -> list[str]:
    with unread_columns.noting() as found:
        list(read(write(folder, [row]), config(**data), skipped=[]))
    return [name for names in found.values() for name in names]


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"question": "Q", "answer": "A", "id": 7, "source": "web"}, ["id", "source"]),
        ({"text": "T", "id": 0}, ["id"]),  # a value of 0 is one
        ({"messages": ASKED, "images": [], "tools": "", "system": " ", "weight": None, "url": "u"}, ["url"]),
        ({"instruction": "Q", "input": " ", "output": "A", "category": "qa"}, ["category"]),
        ({"prompt": "Q", "chosen": "A", "rejected": "B", "score_chosen": 3.5}, ["score_chosen"]),
        ({"question": "Q", "answer": "A"}, []),
    ],
)
def test_columns_that_nothing_reads_are_named(tmp_path: Path, row: dict[str, Any], names: list[str]) -> None:
    assert noted(tmp_path, row) == names
    assert noted(tmp_path, row, ignore=tuple(names)) == []


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"text": "T", "images": ["a.jpg"]}, "images"),
        ({"messages": ASKED, "videos": ["a.mp4"]}, "videos"),
        ({"question": "Q", "answer": "A", "pixel_values": ["a"]}, "pixel_values"),
        ({"text": "T", "tools": [{"name": "add"}]}, "tools"),
        ({"text": "T", "system": "Be brief."}, "system"),
        ({"text": "T", "loss_mask": [1, 0]}, "loss_mask"),
        ({"messages": ASKED, "weight": 0.5}, "weight"),
        ({"messages": ASKED, "function_call": {"name": "add"}}, "function_call"),
        ({"messages": ASKED, "history": [["a", "b"]]}, "history"),
        ({"question": "Q", "answer": "A", "rejected": "B"}, "rejected"),
        ({"question": "Q", "answers": ["A"], "loss": 0.7}, "loss"),
        ({"instruction": "Q", "output": "A", "sample_weight": 2}, "sample_weight"),
        ({"prompt": "Q", "completion": "A", "input": "I"}, "input"),
        ({"prompt": "Q", "completion": "A", "functions": [{"name": "add"}]}, "functions"),
        ({"prompt": "Q", "chosen": "A", "rejected": "B", "chosen_weights": [1]}, "chosen_weights"),
    ],
)
def test_what_other_tools_give_a_meaning_is_refused_by_name(tmp_path: Path, row: dict[str, Any], name: str) -> None:
    with pytest.raises(DataError, match=f"`{name}`"):
        noted(tmp_path, row)
    assert noted(tmp_path, row, ignore=(name,)) == []
    with pytest.raises(DataError, match="none of its 1 rows"):
        noted(tmp_path, row, on_bad_row="skip")


def test_turns_with_videos_are_refused(tmp_path: Path) -> None:
    row = {"messages": [{**ASKED[0], "videos": ["a"]}, ASKED[1]]}
    with pytest.raises(DataError, match="message 1 of `messages`: `videos`"):
        noted(tmp_path, row)
    assert noted(tmp_path, row, ignore=("videos",)) == []


def test_a_column_of_weights_is_read_for_training_and_left_for_scores(tmp_path: Path) -> None:
    path, weighted = write(tmp_path, [{"text": "T", "weight": 2}]), config(columns={"weight": "weight"})
    assert [
        example.weight for each in (True, False) for example in read(path, weighted, skipped=[], weighted=each)
    ] == [2, 1]


def test_pairs_of_texts_follow_the_same_rule(tmp_path: Path) -> None:
    row = {"anchor": "a", "positive": "b", "id": 1}
    with unread_columns.noting() as found:
        pair_records.read(write(tmp_path, [row]), config())
    assert [*found.values()] == [{"id": None}]
    with pytest.raises(DataError, match="`images`"):
        pair_records.read(write(tmp_path, [{**row, "images": ["a"]}]), config())


RECIPES: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"messages": [{**ASKED[0], "name": "Ann"}, {**ASKED[1], "id": "x"}], "lang": "en"}, "lang, name, id"),
    ("classify", {"text": "T", "label": "a", "lang": "en"}, "lang"),
    ("tag", {"tokens": ["Ann", "sat"], "tags": ["B-PER", "O"], "lang": "en"}, "lang"),
    ("embed", {"anchor": "a b", "positive": "c d", "lang": "en"}, "lang"),
    ("prefer", {"prompt": "Q", "chosen": "A", "rejected": "B", "lang": "en"}, "lang"),
    ("reward", {"prompt": "Q", "chosen": "A", "rejected": "B", "lang": "en"}, "lang"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "row", "names"), RECIPES, ids=[recipe for recipe, *_ in RECIPES])
def test_check_names_what_is_not_read(tmp_path: Path, recipe: str, row: dict[str, Any], names: str) -> None:
    def numbered(value: Any, number: int) -> Any:
        if isinstance(value, list):
            return [numbered(each, number) for each in value]
        if isinstance(value, dict):
            return {**value, "content": f"{value['content']} {number}"}
        return f"{value} {number}" if isinstance(value, str) and value not in ("a", "B-PER", "O", "en") else value

    rows = [{key: numbered(value, number) for key, value in row.items()} for number in range(24)]
    if "label" in row:
        rows = [{**each, "label": "ab"[number % 2]} for number, each in enumerate(rows)]
    path = write(tmp_path, rows)
    words = [f"data.train={path}", "data.held_out=0.2", "data.test=null"]
    for _ in range(2):  # the second time from the cache of tokens
        (line,) = [note for note in workbench.check(f"{recipe}/quickstart", words).notes if "not read" in note]
        assert line.startswith(f"not read: {names} (")
    ignored = workbench.check(f"{recipe}/quickstart", [*words, f"data.ignore=[{names}]"])
    assert not any("not read" in note for note in ignored.notes)


@pytest.mark.slow
def test_the_column_of_folds_is_read(tmp_path: Path) -> None:
    rows = [{"text": f"row {n}", "label": "ab"[n % 2], "part": n // 6, "lang": "en"} for n in range(24)]
    words = [f"data.train={write(tmp_path, rows)}", "data.test=null", "duplicates.on_duplicate=ignore"]
    (line,) = [
        note
        for note in workbench.check("crossval/quickstart", [*words, "folds.column=part"]).notes
        if "not read" in note
    ]
    assert line.startswith("not read: lang (")
