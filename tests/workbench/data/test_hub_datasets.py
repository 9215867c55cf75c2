"""Hub data sets, with `datasets` itself over local files, and what it raises when the hub says no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from tests.run_files import write_lines
from workbench.data import hub_datasets
from workbench.data.rows import fingerprint, read_rows
from workbench.errors import DataError
from workbench.runs import hub_connection


@pytest.mark.parametrize("source", ["openai/gsm8k", "openai/gsm8k:main", "a.b/c-d_e:x#test", "openai/gsm8k#test"])
def test_an_id_is_known_by_its_form(source: str) -> None:
    assert hub_datasets.is_id(source)


@pytest.mark.parametrize("source", ["gsm8k", "/data/x", "a/b/c", "a/b#", "a/b:", "a b/c", "", "a/b\n"])
def test_other_words_are_no_id(source: str) -> None:
    assert not hub_datasets.is_id(source)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub id owner/name stands for a local folder with a train split."""
    load, folder = datasets.load_dataset, tmp_path / "data"
    folder.mkdir()

    def from_folder(repository: str, config: str | None, *, split: str) -> Any:
        assert repository == "owner/name"
        return load(str(folder), config, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    return folder


def test_rows_of_a_data_set(local: Path) -> None:
    calls = [{"city": "Rome"}, {"sum": 2}]
    write_lines(local / "train.jsonl", ({"calls": [call]} for call in calls))
    rows = list(read_rows("owner/name"))
    assert [row.columns for row in rows] == [{"calls": [call]} for call in calls]
    assert rows[1].place == "owner/name, row 2"


@pytest.mark.parametrize(("source", "word"), [("owner/name#dev", "train"), ("owner/name:other", "default")])
def test_an_unknown_split_or_configuration_lists_those_that_exist(local: Path, source: str, word: str) -> None:
    (local / "train.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError) as caught:
        list(read_rows(source))
    assert source in str(caught.value)
    assert f"'{word}'" in str(caught.value)
    assert "owner/name:config#split" in str(caught.value)


def test_numbers_of_classes_become_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    assert [row["label"] for row in hub_datasets.read("owner/name")] == ["yes", "no", -1]


def test_the_fingerprint_names_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Builder:
        hash = "0123abc"

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: Builder())
    assert fingerprint("owner/name:main#test") == "owner/name:main#test@0123abc"


REFUSALS: dict[str, tuple[Exception, list[str]]] = {
    "offline": (ConnectionError("Couldn't reach 'owner/name' on the Hub"), ["cannot be reached", "name a file"]),
    "unknown": (
        datasets.exceptions.DatasetNotFoundError(
            "Dataset 'owner/name' doesn't exist on the Hub or cannot be accessed."
        ),
        ["no such file here", "doesn't exist on the Hub", "hf auth login"],
    ),
    "gated": (
        datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' is a gated dataset on the Hub."),
        ["gated", "https://huggingface.co/datasets/owner/name", "hf auth login"],
    ),
    "config": (
        ValueError("Config name is missing.\nPlease pick one among: ['main', 'socratic']\nExample of usage:\n\t`x`"),
        ["pick one among: ['main', 'socratic'] Write owner/name:config#split"],
    ),
    "script": (RuntimeError("Dataset scripts are no longer supported"), ["RuntimeError", "no longer supported"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_hub_refuses_is_told(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    error, words = REFUSALS[case]

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_connection, "FORBIDDEN", False)
    monkeypatch.setattr(hub_connection, "answers", lambda: True)
    for ask in (lambda: list(hub_datasets.read("owner/name")), lambda: hub_datasets.fingerprint("owner/name")):
        with pytest.raises(DataError) as caught:
            ask()
        for word in ["owner/name", *words]:
            assert word in str(caught.value)


def test_the_offline_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        next(read_rows("nobody-is-called-this/none"))
