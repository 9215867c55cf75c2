"""Data sets on the Hugging Face hub, downloaded and cached by `datasets`, and the rows of their Arrow tables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import DataError
from workbench.runs import hub_connection

if TYPE_CHECKING:
    import pyarrow

_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+))?(#(?P<split>[\w.-]+))?")


def is_id(source: str) -> bool:
    """Whether `source` is written as a hub data set: owner/name, owner/name:config, owner/name:config#split."""
    return _ID.fullmatch(source) is not None


def require_reachable(source: str) -> None:
    """Raise DataError where the hub does not answer and nothing of the data set is cached; without importing
    `datasets`."""
    if hub_connection.answers():
        return
    from huggingface_hub import constants

    name = _parts(source)[0]
    datasets_cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    cached = (
        datasets_cache / name.replace("/", "___"),
        Path(constants.HF_HUB_CACHE) / f"datasets--{name}".replace("/", "--"),
    )
    if not any(each.exists() for each in cached):
        raise _unreachable(source)


def _unreachable(source: str) -> DataError:
    reason = "the Hugging Face hub cannot be reached, and it is not cached here. Connect, or name a file."
    if hub_connection.FORBIDDEN:
        reason = "not cached here, and HF_HUB_OFFLINE is set. Unset it, or name a file."
    return DataError(f"{source}: {reason} If you mean a file: there is none at this path.")


def read(source: str) -> Iterator[dict[str, Any]]:
    """The rows of a hub data set; the split is `train` where `source` names none. Class numbers become names. Raises
    DataError: the hub cannot be reached, or has no such data set, configuration or split."""
    repository, config, split = _parts(source)
    with data_errors(source):
        import datasets

        # Arrow tables: rows of `datasets` would decode images and sound, which no format here reads.
        for table in datasets.load_dataset(repository, config, split=split).with_format("arrow").iter(batch_size=1024):
            yield from rows_of(table)


def stream(source: str, paths: Sequence[Path] | None) -> Any:
    """The rows of a hub data set, or of files, as they come from network or disk: an IterableDataset of Arrow tables.

    Of jsonl and txt files a row is a line, in the column `text`. Raises DataError: the hub cannot be reached, or has no
    such data set, configuration or split. `paths`: jsonl, txt or parquet files of one kind; None where `source` is a
    hub data set.
    """
    with data_errors(source):
        import datasets

        if paths is None:
            repository, config, split = _parts(source)
            dataset = datasets.load_dataset(repository, config, split=split, streaming=True)
        else:
            kind = "parquet" if paths[0].suffix.lower() == ".parquet" else "text"
            dataset = datasets.load_dataset(kind, data_files=[*map(str, paths)], split="train", streaming=True)
        return dataset.with_format("arrow")


def fingerprint(source: str) -> str:
    """The data set and its current commit, as id@commit."""
    repository, config, _ = _parts(source)
    with data_errors(source):
        import datasets

        return f"{source}@{datasets.load_dataset_builder(repository, config).hash}"


def _parts(source: str) -> tuple[str, str | None, str]:
    match = _ID.fullmatch(source)
    assert match is not None
    return match["id"], match["config"], match["split"] or "train"


@contextmanager
def data_errors(source: str) -> Iterator[None]:
    """Turn what `datasets` and the network raise into DataErrors."""
    try:
        yield
    except DataError:
        raise
    except ConnectionError as error:
        raise _unreachable(source) from error
    except FileNotFoundError as error:
        page = f"https://huggingface.co/datasets/{_parts(source)[0]}"
        gated = f"Accept the terms on {page}, then run" if "gated" in str(error) else "For a private or gated one run"
        raise DataError(f"{source}: no such file here, and: {_one_line(error)} {gated} `hf auth login`.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 text ({error}). Convert it: iconv -f latin1 -t utf-8.") from error
    except ValueError as error:
        # `datasets` lists the configurations or splits that exist, then shows Python code.
        text = _one_line(error).split("Example of usage")[0].strip()
        raise DataError(f"{source}: {text} Write owner/name:config#split.") from error
    except Exception as error:  # `datasets` and the network may raise anything; the data cannot be read then
        raise DataError(f"{source}: `datasets` cannot read it: {type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def rows_of(table: pyarrow.Table | pyarrow.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, without the nulls that columnar storage adds for keys that only other rows have.

    Columns that `datasets` keeps as JSON text, because their rows differ in shape (such as tool arguments), are parsed.
    Its numbers of classes become their names.
    """
    kinds = {field.name: field.type for field in table.schema}
    classes = _class_names(table.schema.metadata or {})
    for values in table.to_pylist():
        row = {name: _plain(value, kinds[name]) for name, value in values.items() if value is not None}
        for name in classes.keys() & row.keys():
            # -1 marks a withheld class; it stays a number, which the format then refuses.
            numbers = row[name]
            named = [classes[name].get(each, each) for each in (numbers if isinstance(numbers, list) else [numbers])]
            row[name] = named if isinstance(numbers, list) else named[0]
        yield row


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, dict[int, str]]:
    """Names of classes by their numbers, for each column that `datasets` wrote as a ClassLabel or a list of them."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        items = {name: kind.get("feature", kind) if isinstance(kind, dict) else kind for name, kind in features.items()}
        return {
            name: dict(enumerate(kind["names"]))
            for name, kind in items.items()
            if isinstance(kind, dict) and kind.get("_type") == "ClassLabel"
        }
    except (KeyError, TypeError, AttributeError, ValueError):  # no or other metadata
        return {}


def _plain(value: Any, kind: pyarrow.DataType) -> Any:
    import pyarrow

    if value is None:
        return None
    if isinstance(kind, pyarrow.BaseExtensionType):
        return json.loads(value) if kind.extension_name == "arrow.json" else value
    if pyarrow.types.is_decimal(kind):
        return int(value) if value == int(value) else float(value)
    if pyarrow.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value
