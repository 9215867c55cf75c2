"""Rows of tagged words: three forms of files, schemes of tags, labels at tokens, and entities out of probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import BILOU, IOB1, IOB2, IOBES, Entities
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.conftest import FILES, MINILM, STORIES
from workbench.config import DataConfig
from workbench.data import tagged_rows
from workbench.data.starter import FOLDER
from workbench.data.tagged_rows import EntitySpan, TagEncoder, TaggedRow, TaggedRows, TagSet, spans_of, tags_of
from workbench.errors import DataError

TAGGED = FILES / "tagged"


def read(tmp_path: Path, content: str, name: str = "a.conll", **options: Any) -> TaggedRows:
    (tmp_path / name).write_text(content, encoding="utf-8")
    config = DataConfig(train="-", **{key: options.pop(key) for key in ("columns", "on_bad_row") if key in options})
    return tagged_rows.read(str(tmp_path / name), config, **options)


def rows_of(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> TaggedRows:
    return read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "a.jsonl", **options)


def column(*tags: str) -> str:
    return "".join(f"w{number}\t{tag}\n" for number, tag in enumerate(tags))


@pytest.fixture(scope="module")
def minilm() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MINILM)


def test_named_entities_of_wnut() -> None:
    found = tagged_rows.read(str(TAGGED / "wnut17.conll"))
    assert (len(found.rows), found.scheme, found.skipped) == (60, "IOB2", ())
    row = found.rows[0]
    assert row.place == "wnut17.conll, row 1" and row.words[14:17] == ("Empire", "State", "Building")
    assert row.spans == [EntitySpan(14, 17, "location"), EntitySpan(18, 19, "location")]
    assert all(row.text[a:b] == word for row in found.rows for word, (a, b) in zip(row.words, row.offsets, strict=True))
    assert found.rows[1].place == "wnut17.conll, row 2 (line 29)"


def test_parts_of_speech_of_ewt() -> None:
    found = tagged_rows.read(str(TAGGED / "ewt.conllu"))
    assert (len(found.rows), found.scheme) == (40, "plain")
    assert found.rows[0].tags == ("ADP", "DET", "PROPN", "VERB", "DET", "NOUN", "PUNCT")
    assert found.rows[2].text.startswith("Bush nominated Jennifer M. Anderson for a 15-year term"), "as it was written"
    assert found.rows[2].words[7:10] == ("15", "-", "year")
    assert all(row.text[a:b] == word for row in found.rows for word, (a, b) in zip(row.words, row.offsets, strict=True))
    assert not any("'t" in word and len(word) > 3 for row in found.rows for word in row.words), "no ranges of words"
    by_name, by_number = (
        tagged_rows.read(str(TAGGED / "ewt.conllu"), DataConfig(train="-", columns={"tags": name}))
        for name in ("xpos", "5")
    )
    assert by_name.rows[0].tags == by_number.rows[0].tags == ("IN", "DT", "NNP", "VBZ", "DT", "NN", ":")


def test_columns_between_spaces_with_document_starts_and_comments(tmp_path: Path) -> None:
    content = "-DOCSTART- -X- O O\n\n# id 12 domain=en\nEU NNP B-NP B-ORG\n# NN I-NP O\nno\u00a0one NN I-NP O\n \n"
    found = read(tmp_path, content)
    assert [row.words for row in found.rows] == [("EU", "#", "no\u00a0one")]
    assert found.rows[0].tags == ("B-ORG", "O", "O")
    assert read(tmp_path, content, columns={"tags": "2"}).rows[0].tags == ("NNP", "NN", "NN")
    assert read(tmp_path, content, "a.txt").rows[0].words == ("EU", "#", "no\u00a0one")
    assert read(tmp_path, content.split("\n\n# id 12 domain=en\n")[1].replace(" ", "\t"), "a.tsv").rows[0].tags == (
        "B-ORG",
        "O",
        "O",
    )
    assert read(tmp_path, "tokens\ttags\nEU wins\tB-ORG O\n", "a.tsv").rows[0].tags == ("B-ORG", "O")


def test_a_hash_may_be_a_word(tmp_path: Path) -> None:
    assert read(tmp_path, "# text\n#\tO\n#tag\tB-X\n").rows[0].words == ("#", "#tag")
    assert read(tmp_path, "# SYM\nx NN\n").rows[0].words == ("#", "x")


def test_universal_dependencies_skip_ranges_and_empty_nodes(tmp_path: Path) -> None:
    rest = "\t_\t_\t_\t_\t_\t_"
    lines = ["1-2\tzum\t_\t_", "1\tzu\tzu\tADP", "2\tdem\tder\tDET", "2.1\tx\tx\tNOUN", "3\tHaus\tHaus\tNOUN"]
    row = read(tmp_path, "# text = zum Haus\n" + "".join(line + rest + "\n" for line in lines), "a.conllu").rows[0]
    assert row.words == ("zu", "dem", "Haus") and row.tags == ("ADP", "DET", "NOUN")
    assert row.text == "zu dem Haus", "words that do not stand in the text are joined"


def test_rows_of_tokens_under_several_names(tmp_path: Path) -> None:
    for name in ("tags", "ner_tags", "labels", "upos", "pos_tags"):
        row = rows_of(tmp_path, {"tokens": ["New", "York", "!"], name: ["B-LOC", "I-LOC", "O"]}).rows[0]
        assert row.spans == [EntitySpan(0, 2, "LOC")] and row.text == "New York !" and row.offsets[2] == (9, 10)
    row = rows_of(tmp_path, {"words": ["Hi", "!"], "text": "Hi!", "pos": ["UH", "."]}).rows[0]
    assert row.text == "Hi!" and row.offsets == ((0, 2), (2, 3))
    numbered = rows_of(tmp_path, {"tokens": ["a"], "tags": [1]}, {"tokens": ["a"], "tags": [0]}, names=["O", "B-X"])
    assert [row.tags for row in numbered.rows] == [("B-X",), ("O",)]
    both = {"tokens": ["a"], "ner_tags": ["B-X"], "pos_tags": ["NN"]}
    with pytest.raises(DataError, match=r"`ner_tags` and `pos_tags`\. Write data\.columns='\{tags: ner_tags\}'"):
        rows_of(tmp_path, both)
    assert rows_of(tmp_path, both, columns={"tags": "pos_tags"}).rows[0].tags == ("NN",)


def test_parquet_names_numbers_of_tags(tmp_path: Path) -> None:
    import datasets

    tags = datasets.Features(
        tokens=datasets.List(datasets.Value("string")), ner_tags=datasets.List(datasets.ClassLabel(names=["O", "B-X"]))
    )
    data = datasets.Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[1, 0]]}, features=tags)
    data.to_parquet(tmp_path / "a.parquet")
    assert tagged_rows.read(str(tmp_path / "a.parquet")).rows[0].tags == ("B-X", "O")


def test_texts_with_entities(tmp_path: Path) -> None:
    text = "Ada's iPhone6 (Köln), 東京へ"
    entities = [{"start": 6, "end": 12, "label": "THING"}, {"start": 0, "end": 3, "label": "PER"}, [22, 24, "LOC"]]
    for name in ("entities", "spans", "label"):
        found = rows_of(tmp_path, {"text": text, name: entities})
        row = found.rows[0]
        assert found.scheme == "IOB2"
        assert row.words == ("Ada", "'", "s", "iPhone", "6", "(", "Köln", ")", ",", "東", "京", "へ")
        assert row.spans == [EntitySpan(0, 1, "PER"), EntitySpan(3, 4, "THING"), EntitySpan(9, 11, "LOC")]
    assert rows_of(tmp_path, {"text": "no entity", "entities": []}).rows[0].tags == ("O", "O")
    unlabelled = rows_of(tmp_path, {"text": text}, labelled=False).rows[0]
    assert unlabelled.tags == () and unlabelled.words == tagged_rows.text_row(text).words


def test_hindi_words_keep_their_vowel_signs() -> None:
    assert tagged_rows.text_row("नई दिल्ली में").words == ("नई", "दिल्ली", "में")


SPANS = {
    "overlap": ([[0, 5, "A"], [4, 7, "B"]], "A from 0 to 5 and B from 4 to 7 overlap. A word has one tag: keep one"),
    "beyond": ([[0, 50, "A"]], r"goes from 0 to 50, but the text has 11 characters. Write 0 <= start < end <= 11"),
    "empty": ([[3, 3, "A"]], "goes from 3 to 3"),
    "spaces": ([[5, 6, "A"]], r"holds nothing but white space. Delete it\."),
    "edge": ([[0, 6, "A"]], r"begins or ends with white space\. Write start 0, end 5\."),
    "no label": ([{"start": 0, "end": 5}], r"must be \{start, end, label\}"),
    "no numbers": ([["0", 5, "A"]], r"must be \{start, end, label\}"),
    "no list": ("x", r"item 1 must be \{start, end, label\}"),
}


@pytest.mark.parametrize("name", SPANS)
def test_spans_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    spans, message = SPANS[name]
    with pytest.raises(DataError, match=f"a.jsonl, row 1: .*{message}"):
        rows_of(tmp_path, {"text": "hello world", "entities": spans})
    good = {"text": "hello world", "entities": []}
    found = rows_of(tmp_path, {"text": "hello world", "entities": spans}, good, on_bad_row="skip")
    assert len(found.rows) == 1 and found.skipped[0].startswith("a.jsonl, row 1: ")


def test_schemes_become_one(tmp_path: Path) -> None:
    expected = ("B-A", "I-A", "B-A", "B-B", "O", "B-B", "I-B", "I-B")
    files = {
        "IOB2": expected,
        "IOB1": ("I-A", "I-A", "B-A", "I-B", "O", "I-B", "I-B", "I-B"),
        "BILOU": ("B-A", "L-A", "U-A", "U-B", "O", "B-B", "I-B", "L-B"),
        "IOBES": ("B-A", "E-A", "S-A", "S-B", "O", "B-B", "I-B", "E-B"),
    }
    for scheme, tags in files.items():
        found = read(tmp_path, column(*tags))
        assert found.rows[0].tags == expected
        assert found.scheme == ("BILOU" if scheme == "IOBES" else scheme)
    assert read(tmp_path, column("B", "I", "O")).rows[0].tags == ("B-entity", "I-entity", "O")
    assert read(tmp_path, column("NOUN", "X", "-LRB-")).scheme == "plain"
    assert read(tmp_path, column("O", "O")).scheme == "IOB2"
    assert read(tmp_path, column("B-NP", "I-NP"), scheme="plain").rows[0].tags == ("B-NP", "I-NP")


CONFLICTS = {
    "other type": (
        column("B-PER", "O", "B-LOC", "I-PER"),
        r"`I-PER` of word 4, 'w3' \(line 4\), follows `B-LOC`, but the file is IOB2, where an entity begins with B-\. "
        r"Write `B-PER`, or `I-LOC` if it belongs",
    ),
    "after outside": (
        column("B-PER", "O", "I-PER"),
        r"`I-PER` of word 3, 'w2' \(line 3\), follows `O`.*Write `B-PER`\.",
    ),
    "not IOB1": (column("I-A", "O", "I-A", "O", "B-A"), r"`B-A` of word 5.*file is IOB1.*Write `I-A`"),
    "not closed": (column("U-A", "B-A"), r"the end of the row follows `B-A`, but.*Write `U-A` for the last word"),
    "not closed before": (column("U-A", "B-A", "I-A", "O"), r"`O` of word 4.*Write `L-A`"),
    "not open": (column("U-A", "L-A"), r"`L-A` of word 2.*Write `B-A`, or `U-A`"),
    "no tag": (column("B-A", "O", "CITY"), r"`CITY` of word 3.*is no tag of IOB2"),
    "columns": (
        "a\tO\nb\n",
        r"line 2 has 1 columns, the first word of the file has 2\. Write 2 for every word, with a tab",
    ),
    "no word": ("a\tO\n\tO\n", "line 2 has no word"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts_are_refused_by_line(tmp_path: Path, name: str) -> None:
    content, message = CONFLICTS[name]
    with pytest.raises(DataError, match=f"a.conll, row 1: .*{message}"):
        read(tmp_path, content)


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer tags": ({"tokens": ["a", "b"], "tags": ["O"]}, "has 2 words and 1 tags. Write one tag for each word"),
    "numbers": ({"tokens": ["a"], "tags": [3]}, "tag 1 is 3, a number without a name. Write its name"),
    "no word": ({"tokens": [""], "tags": ["O"]}, "word 1 must be text that is not empty"),
    "no words": ({"tokens": [], "tags": []}, "the row has no words"),
    "no list": ({"tokens": 3, "tags": ["O"]}, "`tokens` must be a list of one item per word, found 3"),
}


@pytest.mark.parametrize("name", ROWS)
def test_malformed_rows_of_tokens_are_refused(tmp_path: Path, name: str) -> None:
    row, message = ROWS[name]
    with pytest.raises(DataError, match=f"a.jsonl, row 1: .*{message}"):
        rows_of(tmp_path, row)


def test_lacking_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has neither `tokens` nor `text` among its columns `a`"):
        rows_of(tmp_path, {"a": 1})
    with pytest.raises(DataError, match=r"has no column `tags` among its columns `tokens`"):
        rows_of(tmp_path, {"tokens": ["a"]})
    with pytest.raises(DataError, match=r"has no column `entities`"):
        rows_of(tmp_path, {"text": "a"})
    with pytest.raises(DataError, match=r"no column `ner`, which data.columns names"):
        rows_of(tmp_path, {"tokens": ["a"], "nor": ["O"]}, columns={"tags": "ner"})
    with pytest.raises(DataError, match=r"no column `tags`"):
        read(tmp_path, "one\nword\n")


TYPES = st.sampled_from(["A", "B-C", "_"])


def random_tags(letters: str) -> st.SearchStrategy[list[str]]:
    tag = st.one_of(st.just("O"), st.builds("{}-{}".format, st.sampled_from(letters), TYPES))
    return st.lists(tag, max_size=12)


@given(random_tags("BIES"))
def test_spans_are_those_of_seqeval(tags: list[str]) -> None:
    assert spans_of(tags) == [EntitySpan(start, end + 1, label) for label, start, end in get_entities(tags)]


@given(random_tags("BI"), random_tags("BILU"), random_tags("BIES"))
def test_strict_spans_are_those_of_seqeval(iob2: list[str], bilou: list[str], iobes: list[str]) -> None:
    for tags, rule, scheme in ((iob2, "IOB2", IOB2), (bilou, "BILOU", BILOU), (iobes, "IOBES", IOBES)):
        entities = Entities([tags], scheme).entities[0]
        assert spans_of(tags, rule=rule) == [EntitySpan(each.start, each.end, each.tag) for each in entities]  # type: ignore[arg-type]


@st.composite
def random_spans(draw: st.DrawFn) -> tuple[list[EntitySpan], int]:
    spans, at = [], 0
    for gap, length, label in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), TYPES), max_size=5)):
        spans.append(EntitySpan(at + gap, at + gap + length, label))
        at += gap + length
    return spans, at + draw(st.integers(0, 2))


@given(random_spans())
def test_spans_become_tags_and_spans_again(row: tuple[list[EntitySpan], int]) -> None:
    spans, words = row
    assert spans_of(tags_of(spans, words)) == spans_of(tags_of(spans, words), rule="IOB2") == spans
    assert spans_of(tags_of(spans, words, scheme="BILOU"), rule="BILOU") == spans
    assert spans_of(tags_of(spans, words, scheme="IOBES"), rule="IOBES") == spans


@given(st.lists(random_spans(), min_size=1, max_size=4))
def test_files_of_all_schemes_hold_the_same_entities(rows: list[tuple[list[EntitySpan], int]]) -> None:
    """IOB2, BILOU and IOBES as `tags_of` writes them, read as raw rows."""
    for scheme in ("IOB2", "BILOU", "IOBES"):
        for spans, words in rows:
            tags = tags_of(spans, words, scheme=scheme)
            read_as = "IOB2" if scheme == "IOB2" else "BILOU"
            assert spans_of(tagged_rows._iob2(tags, ["w"] * words, None, read_as)) == spans  # type: ignore[arg-type]


@given(random_tags("BI"))
def test_iob1_is_that_of_seqeval(tags: list[str]) -> None:
    """A valid IOB1 file has the entities that seqeval's strict IOB1 finds."""
    try:
        converted = tagged_rows._iob2(tags, ["w"] * len(tags), None, "IOB1")
    except DataError:
        return
    assert spans_of(converted, rule="IOB2") == [
        EntitySpan(each.start, each.end, each.tag) for each in Entities([tags], IOB1).entities[0]
    ]


# Encoding


def first_tokens(tokenizer: PreTrainedTokenizerBase, row: TaggedRow) -> tuple[list[int], list[int]]:
    """Tokens and labels as `run_ner.py` of transformers makes them: `word_ids`, -100 after the first of each word."""
    encoding = tokenizer(list(row.words), is_split_into_words=True)
    words = encoding.word_ids()
    first = [word is not None and word not in words[:at] for at, word in enumerate(words)]
    return encoding["input_ids"], [number if own else -1 for number, own in zip(words, first, strict=True)]


@pytest.mark.parametrize("name", ["wnut17.conll", "ewt.conllu"])
def test_labels_stand_where_word_ids_put_them(minilm: PreTrainedTokenizerBase, name: str) -> None:
    source = tagged_rows.read(str(TAGGED / name))
    tag_set = TagSet.of(source.rows, source.scheme)
    for row, encoded in zip(source.rows, TagEncoder(minilm, tag_set, max_tokens=512).encode(source.rows), strict=True):
        ids, word_T = first_tokens(minilm, row)
        assert encoded.input_ids.tolist() == ids
        labels = [tag_set.ids[row.tags[word]] if word >= 0 else -100 for word in word_T]
        assert encoded.labels_T.tolist() == labels
        assert encoded.supervised.tolist() == [label != -100 for label in labels]


@pytest.mark.parametrize("folder", [STORIES, FOLDER, MINILM], ids=["sentencepiece", "byte-level", "wordpiece"])
def test_every_word_has_a_token_that_begins_it(folder: str | Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = tagged_rows.read(str(TAGGED / "ewt.conllu"))
    tag_set = TagSet.of(source.rows, source.scheme)
    for row, encoded in zip(
        source.rows, TagEncoder(tokenizer, tag_set, max_tokens=512).encode(source.rows), strict=True
    ):
        assert len(encoded.labels) == encoded.supervised.sum() and encoded.words_cut == 0
        offsets = tokenizer(" ".join(row.words), return_offsets_mapping=True)["offset_mapping"]
        ends = np.cumsum([len(word) + 1 for word in row.words]) - 1
        for token, end, word in zip(encoded.position_W, ends, row.words, strict=True):
            start = end - len(word)
            assert token >= 0 and offsets[token][0] < end and offsets[token][1] > start
        p_SC = np.eye(len(tag_set.names))[encoded.labels]
        found = tagged_rows.predicted_tags(tagged_rows.word_probabilities(encoded, p_SC, tag_set), tag_set)
        shared = np.diff(encoded.position_W, prepend=-1) == 0
        assert all(own == other for own, other, same in zip(found, row.tags, shared, strict=True) if not same)


@pytest.mark.parametrize("max_tokens", range(3, 24))
def test_long_rows_are_cut_where_a_word_begins(minilm: PreTrainedTokenizerBase, max_tokens: int) -> None:
    row = tagged_rows.text_row("Antidisestablishmentarianism is unbelievably long, isn't it, Rumpelstiltskin?")
    [whole] = TagEncoder(minilm, None, max_tokens=512).encode([row])
    [encoded] = TagEncoder(minilm, None, max_tokens=max_tokens).encode([row])
    assert len(encoded.input_ids) <= max_tokens
    kept = len(encoded.input_ids) - 1
    assert encoded.input_ids[:kept].tolist() == whole.input_ids[:kept].tolist()
    assert encoded.input_ids[-1] == whole.input_ids[-1], "the last special token stays"
    words = int((encoded.position_W >= 0).sum())
    assert words >= 1 and encoded.words_cut == len(row.words) - words and encoded.supervised.sum() == words
    if words > 1:
        assert kept == len(whole.input_ids) - 1 or kept in whole.position_W, "no word is cut in two"
    assert encoded.labels.shape == (0,), "no tags, no labels"
    with pytest.raises(DataError, match=r"data.max_tokens=2 leaves no token to its words"):
        list(TagEncoder(minilm, None, max_tokens=2).encode([row]))


def test_tag_sets_name_types_and_refuse_unknown_tags(tmp_path: Path) -> None:
    source = read(tmp_path, column("B-PER", "O", "B-LOC"))
    tag_set = TagSet.of(source.rows, source.scheme)
    assert tag_set.names == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER") and tag_set.types == ("LOC", "PER")
    other = read(tmp_path, column("O", "B-PERS"), "b.conll").rows[0]
    with pytest.raises(DataError, match=r"b.conll, row 1: `B-PERS` of word 2, 'w1', is no tag.*Did you mean `B-PER`"):
        tag_set.labels(other)
    with pytest.raises(DataError, match="need two different tags, but all of them are `O`"):
        TagSet.of(read(tmp_path, column("O", "O")).rows, "IOB2")
    plain = read(tmp_path, column("NOUN", "VERB"))
    assert TagSet.of(plain.rows, plain.scheme).types == ("NOUN", "VERB")


def test_entities_have_probabilities(minilm: PreTrainedTokenizerBase) -> None:
    row = tagged_rows.text_row("Ada went to New York, today")
    tag_set = TagSet(("O", "B-LOC", "I-LOC", "B-PER", "I-PER"), entities=True)
    [encoded] = TagEncoder(minilm, tag_set, max_tokens=64).encode([row])
    p_SC = np.tile([0.9, 0.1, 0.0, 0.0, 0.0], (len(row.words), 1))
    p_SC[0] = [0.1, 0.0, 0.1, 0.6, 0.2]
    p_SC[3] = [0.0, 0.7, 0.1, 0.2, 0.0]
    p_SC[4] = [0.1, 0.0, 0.8, 0.1, 0.0]
    p_SC[5] = [0.7, 0.0, 0.3, 0.0, 0.0]
    p_WC = tagged_rows.word_probabilities(encoded, p_SC, tag_set)
    first, second = tagged_rows.predicted_entities(row, p_WC, tag_set)
    assert first[:4] == (0, 3, "PER", "Ada") and first.probability == pytest.approx(0.8)
    assert second[:4] == (12, 20, "LOC", "New York") and second.probability == pytest.approx(0.8 * 0.8 * 0.7)


def test_words_without_a_token_of_their_own() -> None:
    """The second word shares the first one's token, the fourth has none."""
    encoded = tagged_rows.EncodedTags(
        np.arange(3), np.asarray([True, True, False]), np.zeros(0, dtype=np.int64), np.asarray([0, 0, 1, -1])
    )
    tag_set = TagSet(("O", "B-X", "I-X"), entities=True)
    p_SC = np.asarray([[0.1, 0.8, 0.1], [0.2, 0.1, 0.7]])
    p_WC = tagged_rows.word_probabilities(encoded, p_SC, tag_set)
    assert p_WC == pytest.approx(np.asarray([[0.1, 0.8, 0.1], [0.1, 0.0, 0.9], [0.2, 0.1, 0.7], [1, 0, 0]]))
    assert tagged_rows.predicted_tags(p_WC, tag_set) == ("B-X", "I-X", "I-X", "O")
    plain = TagSet(("A", "B", "C"), entities=False)
    assert tagged_rows.predicted_tags(tagged_rows.word_probabilities(encoded, p_SC, plain), plain)[-1] == ""
