"""Files as people publish them: each is loaded by one command, and what cannot be known is asked for."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import workbench
from workbench.config import DataConfig
from workbench.data.rows import RawRow, convert_rows, fingerprint, read_rows
from workbench.errors import DataError, WorkbenchError

TREC = [b"DESC:manner How did serfdom develop ?", b"HUM:ind Who was the first Ge\xf0 man ?"] * 6
SMS = ["ham\tGo until jurong point, crazy..", 'spam\t"Free entry in 2 a wkly comp', "ham\tNah I don't think\""] * 4
TURNS = "\n\nHuman: What is {}?\n\nAssistant: "
HH = [{"chosen": f"{TURNS.format(n)}This.", "rejected": f"{TURNS.format(n)}That."} for n in range(12)]

FILES: dict[str, bytes] = {
    "train_5500.label": b"\n".join(line[:-1] + b"%d ?" % n for n, line in enumerate(TREC)),
    "sst_train.txt": "".join(f"{n % 5} a film of {n} charms , all told .\n" for n in range(15)).encode(),
    "SST-2/train.tsv": b"sentence\tlabel\n" + b"".join(b'"hide %d secretions \t%d\n' % (n, n % 2) for n in range(12)),
    "train_text.txt": "".join(f"“Worry is a down payment {n}” @user\n" for n in range(16)).encode(),
    "train_labels.txt": b"".join(b"%d\n" % (n % 4) for n in range(16)),
    "val_text.txt": b"".join(b"a tweet %d\n" % n for n in range(8)),
    "val_labels.txt": b"".join(b"%d\n" % (n % 4) for n in range(8)),
    "mapping.txt": b"0\tanger\n1\tjoy\n2\toptimism\n3\tsadness\n",
    "SMSSpamCollection": "".join(f"{line} {n}\n" for n, line in enumerate(SMS)).encode(),
    "train.jsonl.gz": gzip.compress("".join(json.dumps(row) + "\n" for row in HH).encode()),
    "ag.csv": b"".join(b'"%d","Title, %d","A ""quoted"" story"\n' % (n % 4 + 1, n) for n in range(16)),
    "cola.tsv": b"".join(b"gj04\t%d\t%s\tOur friends %d won't.\n" % (n % 2, b"*" * (n % 2), n) for n in range(12)),
    "quotes.tsv": b'label\ttext\nham\thello there one\nspam\t"win a prize\nham\tsecond message\nham\tthird message"\n'
    b"ham\tfourth\nspam\twin again now\nham\tfive\nspam\tsix free\n",
    "fast.txt": b"".join(b"__label__%s how much is %d\n" % (b"ab"[n % 2 :][:1], n) for n in range(12)),
}
NO_TEST = ["data.held_out=0.4", "data.test=null"]
# what is written after `workbench check RECIPE`, rows of training and held out, what the first row is shown as
COMMANDS: dict[str, tuple[str, list[str], int, str]] = {
    "TREC": ("classify", ["train=train_5500.label", "format=label_first", "encoding=latin1"], 12, "DESC:manner"),
    "SST": ("classify", ["train=sst_train.txt", "format=label_first"], 15, "charms , all told ."),
    "SST-2": ("classify", ["train=SST-2/train.tsv", "columns={text: sentence}"], 12, '"hide '),
    "tweets": ("classify", ["train=train_text.txt", "labels=train_labels.txt", "label_names=mapping.txt"], 16, "anger"),
    "SMS spam": (
        "classify",
        ["train=SMSSpamCollection", "format=tsv", "header=false", "columns={label: 1, text: 2}"],
        12,
        "Go until jurong",
    ),
    "quotes": ("classify", ["train=quotes.tsv"], 8, "hello there one"),
    "hh_rlhf": ("prefer", ["train=train.jsonl.gz"], 24, "This."),
}


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all of FILES, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_one_command_loads_what_is_published(published: Path, name: str) -> None:
    recipe, words, count, shown = COMMANDS[name]
    found: Any = workbench.check(f"{recipe}/quickstart", [*(f"data.{word}" for word in words), *NO_TEST])
    assert len(found.data.train) + len(found.data.held_out) == count
    assert shown in str(found.examples[0]), found.examples[0]


def rows(source: str, **settings: Any) -> list[dict[str, Any]]:
    read = list(read_rows(source, DataConfig.model_validate({"train": source, **settings})))
    assert not any(row.mistake for row in read), [row.mistake for row in read]
    return [row.columns for row in read]


@pytest.mark.parametrize(
    ("source", "settings", "first"),
    [
        ("fast.txt", {"format": "label_first"}, {"label": "a", "text": "how much is 0"}),
        ("ag.csv", {"header": False}, {"1": "1", "2": "Title, 0", "3": 'A "quoted" story'}),
        ("cola.tsv", {"header": False}, {"1": "gj04", "2": "0", "3": "", "4": "Our friends 0 won't."}),
        ("SMSSpamCollection", {"format": "label_first"}, {"label": "ham", "text": "Go until jurong point, crazy.. 0"}),
        ("SST-2/train.tsv", {"header": True}, {"sentence": '"hide 0 secretions ', "label": "0"}),
        (
            "train_text.txt",
            {"labels": "train_labels.txt"},
            {"text": "“Worry is a down payment 0” @user", "label": "0"},
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_rows_of_published_files(published: Path, source: str, settings: dict[str, Any], first: dict[str, str]) -> None:
    found = rows(source, **settings)
    assert found[0] == first and len(found) == FILES[source].count(b"\n") - (
        "header" in settings and settings["header"]
    )


def test_held_out_files_have_labels_of_their_own(published: Path) -> None:
    labels = {"train_text.txt": "train_labels.txt", "val_text.txt": "val_labels.txt"}
    config = DataConfig(train="train_text.txt", held_out="val_text.txt", labels=labels, label_names="mapping.txt")
    assert [row.columns["label"] for row in read_rows("val_text.txt", config)][:2] == ["anger", "joy"]
    assert fingerprint("val_text.txt", config) != fingerprint("val_text.txt")
    with pytest.raises(ValueError, match=r"labels: .*vol_text.txt is no file.* Did you mean `val_text.txt`"):
        DataConfig(train="train_text.txt", held_out="val_text.txt", labels={"vol_text.txt": "val_labels.txt"})


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("0\tno\n1\tyes\n", {"0": "no", "1": "yes"}),
        ("0\t❤\t_red_heart_\n1\t😍\t_eyes_\n", {"0": "❤", "1": "😍"}),
        ("1 sci tech\n2 world\n", {"1": "sci tech", "2": "world"}),
        ("0: no\n1: yes\n", {"0": "no", "1": "yes"}),
        ("0,no\n1,yes\n", {"0": "no", "1": "yes"}),
        ("World\nSci/Tech\n", {"0": "World", "1": "Sci/Tech"}),
        ("no\t0\nyes\t1\n", {"0": "no", "1": "yes"}),
        ('{"0": "no", "1": "yes"}', {"0": "no", "1": "yes"}),
        ('{"no": 0,\n "yes": 1}', {"0": "no", "1": "yes"}),
        ('["no", "yes"]', {"0": "no", "1": "yes"}),
        ("LOC\tlocation\nHUM\thuman\n", {"LOC": "location", "HUM": "human"}),
    ],
)
def test_a_mapping_file_names_labels(tmp_path: Path, content: str, wanted: dict[str, str]) -> None:
    names = tmp_path / ("names.json" if content[0] in "[{" else "names.txt")
    names.write_text(content)
    source = tmp_path / "rows.jsonl"
    keys: list[Any] = [int(key) if key.isdigit() else key for key in wanted]
    source.write_text("".join(json.dumps({"label": key}) + "\n" for key in [*keys, *wanted.values()]))
    found = rows(str(source), label_names=str(names))
    assert [row["label"] for row in found] == [*wanted.values()] * 2
    assert [row["label"] for row in rows(str(source), label_names=wanted)] == [*wanted.values()] * 2


def test_a_label_without_a_name_is_told(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("kind,text\n7,a\n1,b\n")
    config = DataConfig.model_validate({"train": "-", "label_names": {0: "no", 1: "yes"}, "columns": {"label": "kind"}})
    first, second = read_rows(str(source), config)
    assert "`kind` is '7', and data.label_names names '0, 1' only" in first.mistake
    assert second.columns == {"kind": "yes", "text": "b"}


@pytest.mark.parametrize(
    ("texts", "labels", "words"),
    [
        ("a\nb\nc\n", "0\n1\n", "a.txt, row 3: .*labels.txt has no label for it, only 2 lines"),
        ("a\nb\n", "0\n1\n2\n", "labels.txt: has 3 labels for 2 rows"),
        ("a\n\nb\n", "0\n1\n", "a.txt, row 3: .*labels.txt has no label"),
        ("a\n", None, "labels.txt: cannot be read"),
    ],
)
def test_labels_must_be_as_many_as_rows(tmp_path: Path, texts: str, labels: str | None, words: str) -> None:
    source, beside = tmp_path / "a.txt", tmp_path / "labels.txt"
    source.write_text(texts)
    if labels is not None:
        beside.write_text(labels)
    with pytest.raises(DataError, match=words):
        rows(str(source), labels=str(beside))


def test_blank_lines_keep_texts_and_labels_together(tmp_path: Path) -> None:
    source, beside = tmp_path / "a.txt", tmp_path / "labels.txt"
    source.write_text("a\n\nc\n\n")
    beside.write_text("0\n1\n2\n\n\n")
    assert [(row["text"], row["label"]) for row in rows(str(source), labels=str(beside))] == [
        ("a", "0"),
        ("", "1"),
        ("c", "2"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "write"),
    [
        ("SMSSpamCollection.tsv", FILES["SMSSpamCollection"], "data.columns='{label: 1, text: 2}'"),
        ("ag.csv", FILES["ag.csv"], "data.columns='{label: 1, text: 3}'"),
        ("cola.tsv", FILES["cola.tsv"], "data.header=false"),
        ("numbers.csv", b"3,good\n1,bad\n", "data.columns='{label: 1, text: 2}'"),
        ("last.tsv", b"Loved this phone a lot!\t1\nThe worst of them all.\t0\n", "data.columns='{label: 2, text: 1}'"),
        ("one.csv", b"a sentence of several words\nb\n", "data.columns='{text: 1}'"),
    ],
)
def test_a_first_line_that_looks_like_a_row_is_told(tmp_path: Path, name: str, content: bytes, write: str) -> None:
    """And what the message says to write is right."""
    source = str(tmp_path / name)
    (tmp_path / name).write_bytes(content)

    def read(**settings: Any) -> list[RawRow]:
        def converter(first: RawRow) -> Any:
            wanted = settings.get("columns", {}).get("text", "text")
            if wanted not in first.columns:
                raise DataError("no such column")
            return lambda row: row

        config = DataConfig.model_validate({"train": source, **settings})
        return list(convert_rows(source, converter, config, skipped=[]))

    with pytest.raises(DataError, match="first line looks like a row, not like names of columns") as caught:
        read()
    assert "Write data.header=false" in str(caught.value) and write in str(caught.value)
    columns = dict(pair.split(": ") for pair in str(caught.value).split("='{")[1].split("}'")[0].split(", "))
    assert len(read(header=False, columns=columns)) == content.count(b"\n")
    with pytest.raises(DataError, match="no such column"):
        read(header=True)


def test_a_header_of_other_names_is_no_row(tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_text("headline,kind\nA long story of a fox and more,x\n")
    with pytest.raises(WorkbenchError, match="has no column `text`"):
        workbench.check("classify/quickstart", [f"data.train={source}", *NO_TEST])


@pytest.mark.parametrize(
    ("name", "form", "content"),
    [
        ("rows.dat", "tsv", b"label\ttext\nx\ta\n"),
        ("rows.data", "csv", b"label,text\nx,a\n"),
        ("rows.txt", "tsv", b"label\ttext\nx\ta\n"),
        ("rows.jsonlines", "jsonl", b'{"label": "x", "text": "a"}\n'),
        ("rows", "text_label", b'{"label": "x", "text": "a"}\n'),
        ("rows.tab", "text_label", b"label\ttext\nx\ta\n"),
        ("rows.1", "text_label", b"label,text\nx,a\n"),
        ("rows.fasttext.gz", "label_first", gzip.compress(b"__label__x a\n", mtime=0)),
        ("rows.ndjson", "auto", b'{"label": "x", "text": "a"}\n'),
    ],
)
def test_other_suffixes(tmp_path: Path, name: str, form: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert rows(str(tmp_path / name), format=form) == [{"label": "x", "text": "a"}]


def test_raw_text_of_any_suffix(tmp_path: Path) -> None:
    (tmp_path / "book.text").write_text("One, two.\n\nThree.\n")
    assert rows(str(tmp_path / "book.text"), format="text") == [{"text": "One, two."}, {"text": "Three."}]


@pytest.mark.parametrize("encoding", ["latin1", "cp1252", "utf-16", "utf-16-le", "gb18030", "shift_jis"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    text = {"gb18030": "汉字", "shift_jis": "日本"}.get(encoding, "café")
    (tmp_path / "a.tsv").write_bytes(f"label\ttext\nx\t{text}\n".encode(encoding))
    assert rows(str(tmp_path / "a.tsv"), encoding=encoding) == [{"label": "x", "text": text}]


def test_several_labels_of_fasttext(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("__label__a __label__b one\n__label__c two\n")
    assert [row["label"] for row in rows(str(tmp_path / "a.txt"), format="label_first")] == [["a", "b"], "c"]


def test_a_line_without_a_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x one\nalone\n")
    (_, row) = read_rows(str(tmp_path / "a.txt"), DataConfig(train="-", format="label_first"))
    assert "holds no label and text with white space between them, only 'alone'" in row.mistake


@pytest.mark.parametrize("kind", ["decimal128(3, 0)", "decimal128(38, 18)", "decimal256(50, 2)"])
def test_decimal_labels_are_numbers(tmp_path: Path, kind: str) -> None:
    precision, scale = (int(each) for each in kind.split("(")[1].rstrip(")").split(","))
    make = pyarrow.decimal128 if kind.startswith("decimal128") else pyarrow.decimal256
    values = [Decimal(0), Decimal(2), None, Decimal("1.5") if scale else Decimal(3)]
    labels = pyarrow.array(values, make(precision, scale))
    listed = pyarrow.array([[each] for each in values], pyarrow.list_(make(precision, scale)))
    pyarrow.parquet.write_table(pyarrow.table({"label": labels, "listed": listed}), tmp_path / "a.parquet")
    wanted = [0, 2, None, 1.5 if scale else 3]
    found = rows(str(tmp_path / "a.parquet"))
    assert [row.get("label") for row in found] == wanted and [row["listed"][0] for row in found] == wanted
    assert all(type(each) in (int, float, type(None)) for each in (row.get("label") for row in found))


def saved(folder: Path) -> Path:
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
    parts = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {n}" for n in range(4)], "label": [0, 1, 1, 0]}, features)
        for name in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(folder / "both")
    datasets.DatasetDict({"test": parts["test"]}).save_to_disk(folder / "tests")
    parts["train"].save_to_disk(folder / "one", num_shards=2)
    parts["train"].filter(lambda row: row["label"] == 1).save_to_disk(folder / "chosen")
    return folder


def test_data_sets_that_were_saved_to_disk(tmp_path: Path) -> None:
    saved(tmp_path)
    whole = [{"text": f"train {n}", "label": label} for n, label in enumerate(["no", "yes", "yes", "no"])]
    assert rows(str(tmp_path / "one")) == rows(str(tmp_path / "both")) == rows(str(tmp_path / "both/train")) == whole
    assert [row["text"] for row in rows(str(tmp_path / "both/test"))] == [f"test {n}" for n in range(4)]
    assert rows(str(tmp_path / "chosen")) == whole[1:3]
    assert len({fingerprint(str(tmp_path / name)) for name in ("one", "both", "both/test", "chosen")}) == 4
    (part,) = (tmp_path / "chosen").glob("*.arrow")
    assert rows(str(part)) == whole[1:3]
    with pytest.raises(DataError, match=rf"DatasetDict of the splits test. Write {tmp_path}/tests/test for one"):
        rows(str(tmp_path / "tests"))
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(DataError, match="one: not a data set that can be read"):
        rows(str(tmp_path / "one"))
    part.write_bytes(part.read_bytes()[:200])
    with pytest.raises(DataError, match="not an Arrow file that can be read"):
        rows(str(part))


def test_an_arrow_file_with_a_footer(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b"]})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert rows(str(tmp_path / "a.arrow")) == [{"text": "a"}, {"text": "b"}]
