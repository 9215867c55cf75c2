"""Rows whose words carry tags (token classification): reading them, encoding them for a model, decoding its output.

Three forms are read: files of columns (CoNLL, IOB, CoNLL-U), rows of `tokens` and `tags`, and texts with `entities`
by character offsets. Whatever scheme a file uses, tags of entities become IOB2 (`B-X` begins an entity, `I-X`
continues it, `O` is outside); other tags, such as parts of speech, stay as they are.

Legend: W words of a row, T its tokens, S its supervised tokens, C tags.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.config import DataConfig
from workbench.config.sections.basic_sections import ID
from workbench.data.rows import RawRow, convert_rows, excerpt, fingerprint, read_columns, read_rows, read_table
from workbench.data.source_files import AS_NAMED, text_lines
from workbench.data.unread_columns import columns_in_file
from workbench.errors import BackboneError, DataError, FileError
from workbench.runs import files
from workbench.schema import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Scheme = Literal["IOB1", "IOB2", "BILOU", "plain"]
"""How tags mark entities. IOBES and BMES are read as BILOU: other letters for the same. `plain`: tags mark none."""
SpanRule = Literal["conlleval", "IOB2", "BILOU", "IOBES"]  # which tags make an entity; see `spans_of`

TAGS = "tags.json"
"""In a folder that a run ships: the tags by their labels, and whether they mark entities."""
OUTSIDE = "O"
IGNORED = -100  # label of a token that carries no loss
TOKEN_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("tags", "ner_tags", "labels", "ner", "upos", "pos_tags", "pos")
SPAN_COLUMNS = ("entities", "spans", "label", "labels")
_LABEL_KEYS = ("label", "type", "entity", "entity_group", "tag")
_TAG = re.compile(r"([BIMLEUS])-(.+)")
_LETTERS = {"E": "L", "S": "U", "M": "I"}  # letters of IOBES and BMES by those of BILOU
_ROWS_AT_ONCE = 1000


class EntitySpan(NamedTuple):
    """An entity: the words from `start` up to, but without, `end`."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class TaggedRow:
    """A sentence or text in words, with a tag per word."""

    raw: RawRow
    """The row as it was read, with all its columns."""
    text: str
    """The text; words that were read without one are joined by spaces."""
    words: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...]
    """First character of each word in `text`, and the one after its last."""
    tags: tuple[str, ...] = ()
    """Tag of each word, IOB2 where tags mark entities; empty where the row was read without tags."""
    read_as_words: bool = False
    """Whether the file gave words: then a model reads them with a space between each two, whatever `text` has there."""

    @property
    def place(self) -> str:
        """File, row and line, for messages."""
        return self.raw.place

    @property
    def spans(self) -> list[EntitySpan]:
        """Its entities; none where its tags mark none."""
        return spans_of(self.tags, rule="IOB2")


@dataclass(frozen=True)
class TaggedRows:
    """The usable rows of a file."""

    name: str
    fingerprint: str
    rows: tuple[TaggedRow, ...]
    scheme: Scheme  # the scheme of the file; the rows' own tags are IOB2 or plain
    skipped: tuple[str, ...] = ()  # place and reason of every row that was left out


def read(
    source: str,
    config: DataConfig = AS_NAMED,
    *,
    labelled: bool = True,
    scheme: Scheme | None = None,
    names: Sequence[str] = (),
    limit: int | None = None,
) -> TaggedRows:
    """Read the rows of a file, a folder of files or a hub data set.

    `.conll`, `.conllu`, `.iob`, `.bio`, `.txt`, and `.tsv` without a header of known names, are files of columns: words
    are in the first and tags in the last column, in CoNLL-U in `form` and `upos`. Raises DataError: the source cannot
    be read; or rows are malformed and `config.on_bad_row` is refuse, as where the numbers of words and tags differ, a
    tag cannot follow the one before it, spans overlap or lie outside of the text.

    Args:
        config: How files are read. Its `columns` say which column of the file stands for `tokens`, `tags`, `text` or
            `entities`. Columns of CoNLL files have numbers from 1, those of CoNLL-U also their names: `{"tags": "4"}`,
            `{"tags": "xpos"}`.
        labelled: Whether rows have tags; tags are ignored otherwise.
        scheme: That of the tags; None: it is recognised from all of them.
        names: Names of the tags where the file holds their numbers, from 0.
        limit: Rows to read; None for all.
    """
    renames = config.columns
    raws = list(itertools.islice(read_rows(source, config, readers=_READERS), limit))
    found = scheme or (_scheme_of(raws, renames, names) if labelled else "plain")

    def converter(first: RawRow) -> Any:
        try:
            for name, in_file in renames.items():
                if in_file not in first.columns and (labelled or name not in ("tags", ID)):
                    near = did_you_mean(in_file, list(first.columns))
                    raise DataError(f"has no column `{in_file}`, which data.columns names.{near}")
            listed = ", ".join(f"`{each[:60]}`" for each in first.columns if each != "lines") or "none"
            columns = _renamed(first, renames)
            tokens, text = _one_of(columns, TOKEN_COLUMNS), columns.get("text")
            if tokens is None and not isinstance(text, str):
                raise DataError(
                    f"has neither `tokens` nor `text` among its columns {listed}. "
                    "Write data.columns='{tokens: NAME}' or data.columns='{text: NAME}' with its name."
                )
            wanted = TAG_COLUMNS if tokens is not None else SPAN_COLUMNS
            if labelled and _one_of(columns, wanted) is None:
                raise DataError(
                    f"has no column `{wanted[0]}` among its columns {listed}. "
                    f"Write data.columns='{{{wanted[0]}: NAME}}' with its name."
                )
        except DataError as error:
            raise DataError(f"{source}: {error}") from None
        return lambda raw: _row(raw, renames, names, found, labelled=labelled)

    skipped: list[str] = []
    named = columns_in_file(config, (*TOKEN_COLUMNS, *TAG_COLUMNS, *SPAN_COLUMNS, "text"))

    def reads(first: RawRow) -> Collection[str]:
        return first.columns if "lines" in first.columns else named  # a file of columns has no names to mistake

    rows = tuple(convert_rows(source, converter, config, skipped=skipped, reader=lambda _: iter(raws), reads=reads))
    return TaggedRows(source, fingerprint(source, config), rows, found, tuple(skipped))


def text_row(text: str, *, place: str = "text") -> TaggedRow:
    """A text without tags, such as one to predict."""
    return _row(RawRow(place, {"text": text}), {}, (), "plain", labelled=False)


def _read_tsv(path: Path, config: DataConfig) -> Iterator[RawRow]:
    """The rows below a header that names columns of tagged rows; without one, the sentences of a file of columns."""
    header = {cell.strip() for cell in next(text_lines(path, config.encoding), "").split("\t")}
    read = read_table if header & {"text", *TOKEN_COLUMNS} else read_columns
    return read(path, config)


_READERS = {"txt": read_columns, "tsv": _read_tsv}


def _renamed(raw: RawRow, renames: Mapping[str, str]) -> dict[str, Any]:
    """The columns under the names that are read here; of a file of columns, with `tokens` and `tags`."""
    columns = dict(raw.columns)
    if "1" in columns and "lines" in columns:
        last = str(sum(name.isdigit() for name in columns))
        columns["tokens"] = columns.get("form", columns["1"])
        if "upos" in columns:
            columns["tags"] = columns.pop("upos")
        elif last != "1":
            columns["tags"] = columns[last]
    chosen = {name: raw.columns[in_file] for name, in_file in renames.items() if in_file in raw.columns}
    return {name: value for name, value in columns.items() if name not in renames.values()} | chosen


def _one_of(columns: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The name of these that `columns` has, the first of them before all others; None where it has none. Raises
    DataError: it has several."""
    found = [name for name in names if columns.get(name) is not None]
    if len(found) > 1 and found[0] != names[0]:
        raise DataError(
            f"has the columns {' and '.join(f'`{name}`' for name in found)}. "
            f"Write data.columns='{{{names[0]}: {found[0]}}}' for one of them."
        )
    return found[0] if found else None


def _list_of(value: Any, name: str, of: str = "one item per word") -> list[Any]:
    """A list, also as a cell of a csv file writes it: as JSON, or with spaces between its items."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.startswith("[") else value.split()
        except (ValueError, RecursionError):
            value = value.split()
    if not isinstance(value, list | tuple):
        raise DataError(f"`{name}` must be a list of {of}, found {excerpt(value)}.")
    return list(value)


def _tags_in(columns: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The tags of a row of tokens, as its file writes them."""
    name = _one_of(columns, TAG_COLUMNS)
    if name is None:
        raise DataError("`tags` is missing or null. Move rows without tags to a file of their own.")
    tags = []
    for number, tag in enumerate(_list_of(columns[name], name), start=1):
        if isinstance(tag, int) and not isinstance(tag, bool) and names:
            if not 0 <= tag < len(names):
                raise DataError(f"`{name}`: tag {number} is {tag}, which is not from 0 to {len(names) - 1}.")
            tag = names[tag]
        if not isinstance(tag, str) or not tag.strip():
            cure = ", a number without a name" if isinstance(tag, int) else ""
            raise DataError(f"`{name}`: tag {number} is {excerpt(tag)}{cure}. Write its name, such as `B-PER`.")
        tags.append(tag.strip())
    return tags


def _row(raw: RawRow, renames: Mapping[str, str], names: Sequence[str], scheme: Scheme, *, labelled: bool) -> TaggedRow:
    """Convert a raw row; raises DataError where it is malformed."""
    columns = _renamed(raw, renames)
    tokens, text = _one_of(columns, TOKEN_COLUMNS), columns.get("text")
    if tokens is None:
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"`text` must be text that is not empty, found {excerpt(text)}.")
        spans = _entities_in(columns, text) if labelled else []
        # Words: runs of letters and digits, and each other sign; cut at the edges of entities too.
        edges = {edge for start, end, _ in spans for edge in (start, end)}
        offsets: list[tuple[int, int]] = []
        before = "space"
        for at, character in enumerate(text):
            kind = _kind(character)
            if kind == before == "letter" and at not in edges:
                offsets[-1] = (offsets[-1][0], at + 1)
            elif kind != "space":
                offsets.append((at, at + 1))
            before = kind
        words = tuple(text[start:end] for start, end in offsets)
        starts = [start for start, _ in offsets]
        word_at = functools.partial(bisect.bisect_left, starts)  # the word that begins at a character, or after it
        by_word = [EntitySpan(word_at(start), word_at(end), label) for start, end, label in spans]
        return TaggedRow(raw, text, words, tuple(offsets), tags_of(by_word, len(words)) if labelled else ())
    words = tuple(_list_of(columns[tokens], tokens))
    for number, word in enumerate(words, start=1):
        if not isinstance(word, str) or not word.strip():
            raise DataError(f"`{tokens}`: word {number} must be text that is not empty, found {excerpt(word)}.")
    if not words:
        raise DataError(f"`{tokens}` is empty: the row has no words. Write or delete it.")
    tags: list[str] = []
    if labelled:
        tags = _tags_in(columns, names)
        if len(tags) != len(words):
            raise DataError(f"has {len(words)} words and {len(tags)} tags. Write one tag for each word.")
        tags = tags if scheme == "plain" else _iob2(tags, words, columns.get("lines"), scheme)
    if not isinstance(text, str) or (aligned := _found_in(text, words)) is None:
        text, aligned = _joined(words)
    return TaggedRow(raw, text, words, tuple(aligned), tuple(tags), read_as_words=True)


def _joined(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The words as a text, with a space between each two, and start and end of each in it."""
    ends = list(itertools.accumulate(len(word) + 1 for word in words))
    return " ".join(words), [(end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True)]


def _found_in(text: str, words: Sequence[str]) -> list[tuple[int, int]] | None:
    """Where the words stand in the text, one after another with nothing but white space between them, if they do."""
    offsets, at = [], 0
    for word in words:
        start = text.find(word, at)
        if start < 0 or text[at:start].strip():
            return None
        at = start + len(word)
        offsets.append((start, at))
    return None if text[at:].strip() else offsets


def _entities_in(columns: Mapping[str, Any], text: str) -> list[EntitySpan]:
    """The entities of a text, in characters and in their order; raises DataError for those that cannot be."""
    name = _one_of(columns, SPAN_COLUMNS)
    if name is None:
        raise DataError("`entities` is missing or null. Write `[]` for a text without any.")
    items = _list_of(columns[name], name, "{start, end, label}")
    spans = []
    for number, item in enumerate(items, start=1):
        if isinstance(item, Mapping):
            item = [item.get("start"), item.get("end"), next((item[key] for key in _LABEL_KEYS if key in item), None)]
        start, end, label = item if isinstance(item, list | tuple) and len(item) == 3 else (None, None, None)
        if type(start) is not int or type(end) is not int or not isinstance(label, str) or not label.strip():
            raise DataError(
                f"`{name}`: item {number} must be {{start, end, label}}, found {excerpt(items[number - 1])}."
            )
        if not 0 <= start < end <= len(text):
            raise DataError(
                f"`{name}`: item {number} ({label}) goes from {start} to {end}, but the text has {len(text)} "
                f"characters. Write 0 <= start < end <= {len(text)}; `end` is the character after its last."
            )
        inside = text[start:end].strip()
        if inside != text[start:end]:
            first = start + len(text[start:end]) - len(text[start:end].lstrip())
            remedy = f"Write start {first}, end {first + len(inside)}." if inside else "Delete it."
            raise DataError(
                f"`{name}`: item {number} ({label}) is {excerpt(text[start:end])}, which "
                f"{'begins or ends with' if inside else 'holds nothing but'} white space. {remedy}"
            )
        spans.append(EntitySpan(start, end, label.strip()))
    spans.sort()
    for before, after in itertools.pairwise(spans):
        if after.start < before.end:
            raise DataError(
                f"`{name}`: {before.label} from {before.start} to {before.end} and {after.label} from {after.start} to "
                f"{after.end} overlap. A word has one tag: keep one of them."
            )
    return spans


@functools.lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    if character.isspace():
        return "space"
    # Chinese, Japanese: no spaces between words, so that each character is one, as in BERT's own splitting.
    ideograph = "\u3040" <= character <= "\u30ff" or "\u3400" <= character <= "\u9fff" or character >= "\U00020000"
    return "sign" if ideograph or unicodedata.category(character)[0] in "PS" else "letter"


def _parsed(tag: str) -> tuple[str, str]:
    """The letter of a tag, as BILOU writes it, and the entity's type; two empty strings where it marks no entity."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    if tag in ("B", "I", "M", "L", "E", "U", "S"):  # entities of one type that has no name
        return _LETTERS.get(tag, tag), "entity"
    match = _TAG.fullmatch(tag)
    return (_LETTERS.get(match[1], match[1]), match[2]) if match else ("", "")


def _scheme_of(raws: Iterable[RawRow], renames: Mapping[str, str], names: Sequence[str]) -> Scheme:
    """The scheme that the tags of all rows follow, or that most of their entities do."""
    tag_lists = []
    for raw in raws:
        columns = _renamed(raw, renames)
        try:
            if not raw.mistake and _one_of(columns, TOKEN_COLUMNS) is not None:
                tag_lists.append(_tags_in(columns, names))
            elif not raw.mistake and "text" in columns:
                tag_lists.append([OUTSIDE])  # of entities by offsets
        except DataError:
            continue  # whoever converts the row says why
    tags = set(itertools.chain.from_iterable(tag_lists))
    prefixed = {tag for tag in tags if _TAG.fullmatch(tag)}
    nameless = {"B", OUTSIDE} <= tags and all(_parsed(tag)[0] for tag in tags)
    if not (prefixed and (OUTSIDE in tags or prefixed == tags)) and not nameless and tags != {OUTSIDE}:
        return "plain"
    if {_parsed(tag)[0] for tag in tags} & {"L", "U"}:
        return "BILOU"
    begun_by_i = begun_by_b = 0  # entities that do not follow one of their type
    for row in tag_lists:
        for (_, kind_before), (letter, kind) in itertools.pairwise(map(_parsed, [OUTSIDE, *row])):
            begun_by_i += letter == "I" and kind != kind_before
            begun_by_b += letter == "B" and kind != kind_before
    return "IOB1" if begun_by_i > begun_by_b else "IOB2"


def _iob2(tags: Sequence[str], words: Sequence[str], lines: Sequence[int] | None, scheme: Scheme) -> list[str]:
    """Convert tags to IOB2; raises DataError with word, line and remedy where one cannot follow the one before it."""
    converted = []
    before, kind_before, tag_before = OUTSIDE, "", "the start of the row"
    for at, tag in enumerate([*tags, OUTSIDE]):
        letter, kind = _parsed(tag)
        inside = at < len(tags)
        allowed = "BIO" if scheme != "BILOU" else "BILOU"
        where = (
            f"`{tag}` of word {at + 1}, {excerpt(words[at])}{f' (line {lines[at]})' if lines else ''},"
            if inside
            else "the end of the row"
        )
        if not letter or letter not in allowed:
            raise DataError(f"{where} is no tag of {scheme}. Write `O`, `B-X` or `I-X`, where X is a type.")
        mistake = ""
        if scheme == "BILOU":
            is_open = before in ("B", "I")
            if letter in ("I", "L") and not (is_open and kind == kind_before):
                mistake = f"Write `B-{kind}`, or `U-{kind}` for an entity of one word, where an entity begins."
            elif letter not in ("I", "L") and is_open:
                last = f"U-{kind_before}" if before == "B" else f"L-{kind_before}"
                mistake = f"Write `{last}` for the last word of the entity before it."
            mistake = mistake and f"the file is BILOU, which ends entities. {mistake} IOBES has E for L and S for U."
        elif scheme == "IOB2" and letter == "I" and kind != kind_before:
            belongs = f", or `I-{kind_before}` if it belongs to the entity before it" if kind_before else ""
            mistake = f"the file is IOB2, where an entity begins with B-. Write `B-{kind}`{belongs}."
        elif scheme == "IOB1" and letter == "B" and kind != kind_before:
            mistake = f"the file is IOB1, where B- stands between two entities of one type only. Write `I-{kind}`."
        if mistake:
            raise DataError(f"{where} follows {tag_before}, but {mistake}")
        continues = letter in ("I", "L") and kind == kind_before
        if inside:
            converted.append(OUTSIDE if letter == OUTSIDE else f"{'I' if continues else 'B'}-{kind}")
        before, kind_before, tag_before = letter, kind, f"`{tag}`"
    return converted


def tags_of(
    spans: Iterable[EntitySpan], words: int, *, scheme: Literal["IOB2", "BILOU", "IOBES"] = "IOB2"
) -> tuple[str, ...]:
    """The tags (W,) of a row with these entities, which do not overlap.

    >>> tags_of([EntitySpan(0, 2, "PER"), EntitySpan(3, 4, "LOC")], 4)
    ('B-PER', 'I-PER', 'O', 'B-LOC')
    """
    last, single = {"IOB2": ("I", "B"), "BILOU": ("L", "U"), "IOBES": ("E", "S")}[scheme]
    tags = [OUTSIDE] * words
    for start, end, label in spans:
        letters = [single] if end - start == 1 else ["B", *"I" * (end - start - 2), last]
        tags[start:end] = [f"{letter}-{label}" for letter in letters]
    return tuple(tags)


def spans_of(tags: Sequence[str], *, rule: SpanRule = "conlleval") -> list[EntitySpan]:
    """The entities that tags mark, in their order.

    Args:
        tags: Tags (W,). An empty one counts as `O`.
        rule: `conlleval` makes the best of any tags, as conlleval.pl and seqeval's default do: `I-X` after `O` or
            after another type begins an entity. The others are seqeval's strict mode for that scheme: an entity begins
            with `B-X`, goes on with `I-X`, and with BILOU and IOBES ends as its scheme says; other tags mark nothing.

    >>> spans_of(["I-PER", "I-PER", "O", "B-LOC"])
    [EntitySpan(start=0, end=2, label='PER'), EntitySpan(start=3, end=4, label='LOC')]
    >>> spans_of(["I-PER", "I-PER", "O", "B-LOC"], rule="IOB2")
    [EntitySpan(start=3, end=4, label='LOC')]
    """
    parts = [(tag[0], tag[1:].split("-", 1)[-1] or "_") if tag else (OUTSIDE, "_") for tag in [*tags, OUTSIDE]]
    spans: list[EntitySpan] = []
    start = 0
    if rule == "conlleval":
        before, kind_before = OUTSIDE, ""
        for at, (letter, kind) in enumerate(parts):
            changes = kind != kind_before
            if before in "ES" or (before in "BI" and letter in "BSO") or (before not in "O." and changes):
                spans.append(EntitySpan(start, at, kind_before))
            if letter in "BS" or (letter in "EI" and before in "EOS") or (letter not in "O." and changes):
                start = at
            before, kind_before = letter, kind
        return spans
    last, single = {"IOB2": ("", ""), "BILOU": ("L", "U"), "IOBES": ("E", "S")}[rule]
    while start < len(tags):
        letter, kind = parts[start]
        end = start + 1
        if letter == "B":
            while parts[end] == ("I", kind):
                end += 1
            closed = not last or parts[end] == (last, kind)
            end += bool(last) and closed
            if closed:
                spans.append(EntitySpan(start, end, kind))
        elif letter == single:
            spans.append(EntitySpan(start, end, kind))
        start = end
    return spans


@dataclass(frozen=True)
class TagSet:
    """The tags that a model tells apart; a tag's label is its number."""

    names: tuple[str, ...]
    entities: bool
    """Whether tags mark entities: then label 0 is `O`, followed by `B-X` and `I-X` of each type, types in order."""

    @classmethod
    def of(cls, rows: Iterable[TaggedRow], scheme: Scheme) -> TagSet:
        """The tags of training rows, which were read as `scheme`. Raises DataError: there are fewer than two."""
        tags = {tag for row in rows for tag in row.tags}
        if scheme == "plain":
            names = tuple(sorted(tags))
        else:
            types = sorted({tag[2:] for tag in tags if tag != OUTSIDE})
            names = (OUTSIDE, *(f"{letter}-{kind}" for kind in types for letter in "BI"))
        if len(names) < 2:
            found = f"all of them are `{names[0]}`" if names else "there are none"
            raise DataError(f"the training rows need two different tags, but {found}. Add rows with other tags.")
        return cls(names, scheme != "plain")

    @classmethod
    def read(cls, folder: Path) -> TagSet:
        """The tags of a model that was saved in `folder`."""
        fields = files.read_json(folder / TAGS)
        try:
            return cls(tuple(fields["names"]), bool(fields["entities"]))
        except (KeyError, TypeError) as error:
            raise FileError(f"{folder}/{TAGS}: damaged ({error}). Restore it, or train again.") from None

    def write(self, folder: Path) -> None:
        """Write the tags into the folder of their model."""
        files.write_json(folder / TAGS, {"names": self.names, "entities": self.entities})

    @property
    def types(self) -> tuple[str, ...]:
        """Types of entities; the tags themselves where they mark none."""
        return tuple(name[2:] for name in self.names[1::2]) if self.entities else self.names

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Label of each tag."""
        return {name: number for number, name in enumerate(self.names)}

    def labels(self, row: TaggedRow) -> Indices:
        """The labels (W,) of a row. Raises DataError: it has a tag that no training row has."""
        for number, tag in enumerate(row.tags, start=1):
            if tag not in self.ids:
                raise DataError(
                    f"{row.place}: `{tag}` of word {number}, {excerpt(row.words[number - 1])}, is no tag of the "
                    f"training rows.{did_you_mean(tag, self.names)} Correct it, or add training rows that have it."
                )
        return np.asarray([self.ids[tag] for tag in row.tags], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class EncodedTags:
    """A row as a model reads it."""

    input_ids: Indices
    """Tokens (T,), special ones included."""
    supervised: Bools
    """Which tokens (T,) carry a word's label: the first of each word."""
    labels: Indices
    """Labels (S,) at the supervised tokens, in their order; empty where the row has no tags."""
    position_W: Indices
    """The token at which each word's tag is predicted; -1 where it has none. Words that share a token share it."""
    words_cut: int = 0
    """Words at the end of the row that max_tokens leaves out."""

    @functools.cached_property
    def words(self) -> Indices:
        """The word (S,) whose label each supervised token carries."""
        positions, first_words = np.unique(self.position_W, return_index=True)
        return first_words[positions >= 0]

    @property
    def labels_T(self) -> Indices:
        """The label of each token, IGNORED (-100) where it carries none."""
        labels_T = np.full(len(self.input_ids), IGNORED, dtype=np.int64)
        if len(self.labels):
            labels_T[self.supervised] = self.labels
        return labels_T


class TagEncoder:
    """Tokenises rows and puts each word's label on its first token.

    Tokens are those of a row's text or, where the file gave words, of the words with spaces between them; the offsets
    of tokens say which are a word's. BERT's tokenizer gives the same with `is_split_into_words`, which byte-level
    tokenizers refuse, or answer with other tokens for the first word. Raises BackboneError: the tokenizer is not a fast
    one.

    Args:
        tokenizer: A fast tokenizer.
        tag_set: Tags that labels number; None for rows without tags.
        max_tokens: Most tokens of a row, special ones included. A longer row is cut where a word begins.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tag_set: TagSet | None, *, max_tokens: int) -> None:
        if not tokenizer.is_fast:
            raise BackboneError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, which finding the tokens of words needs. "
                "Use a backbone with a tokenizer.json."
            )
        self._tokenizer, self._tag_set, self._max_tokens = tokenizer, tag_set, max_tokens

    def encode(self, rows: Iterable[TaggedRow]) -> Iterator[EncodedTags]:
        """Yield the rows as the model reads them. Raises DataError: a tag is unknown, or max_tokens leaves room for
        special tokens only."""
        iterator = iter(rows)
        while chunk := list(itertools.islice(iterator, _ROWS_AT_ONCE)):
            texts = [_joined(row.words) if row.read_as_words else (row.text, row.offsets) for row in chunk]
            encodings = self._tokenizer(
                [text for text, _ in texts],
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            columns = (encodings[name] for name in ("input_ids", "offset_mapping", "special_tokens_mask"))
            for row, (_, words), ids, offsets, special in zip(chunk, texts, *columns, strict=True):
                yield self._encoded(row, ids, words, offsets, special)

    def _encoded(
        self,
        row: TaggedRow,
        ids: Sequence[int],
        words: Sequence[tuple[int, int]],
        tokens: Sequence[tuple[int, int]],
        special: Sequence[int],
    ) -> EncodedTags:
        """A row from its tokens: `words` and `tokens` have start and end of each in the text."""
        # The first token of each word that is not another word's already; that word's where it has no other, or -1.
        position_W = np.full(len(words), -1, dtype=np.int64)
        previous, cursor = -1, 0
        own = [at for at, (start, end) in enumerate(tokens) if end > start and not special[at]]
        for word, (start, end) in enumerate(words):
            while cursor < len(own) and tokens[own[cursor]][1] <= start:
                cursor += 1
            overlapping = [at for at in own[cursor : cursor + 2] if tokens[at][0] < end]
            if overlapping:
                position_W[word] = previous = next((at for at in overlapping if at > previous), previous)
        ids_T = np.asarray(ids, dtype=np.int64)
        words_cut = 0
        if len(ids_T) > self._max_tokens:
            inner = np.flatnonzero(np.asarray(special) == 0)
            before, after = (int(inner[0]), len(ids_T) - 1 - int(inner[-1])) if len(inner) else (len(ids_T), 0)
            limit = self._max_tokens - after
            if limit <= before:
                raise DataError(
                    f"{row.place}: data.max_tokens={self._max_tokens} leaves no token to its words: special tokens "
                    f"take {before + after}. Raise it."
                )
            # Cut before a word that would not be whole, unless it is the only one.
            first = position_W[position_W >= 0].min(initial=limit)
            starts = position_W[(position_W > first) & (position_W <= limit)]
            limit = int(starts.max()) if len(starts) else limit
            words_cut = int((position_W >= limit).sum())
            ids_T = np.concatenate([ids_T[:limit], ids_T[len(ids_T) - after :]])
            position_W = np.where(position_W < limit, position_W, -1)
        supervised = np.zeros(len(ids_T), dtype=bool)
        positions, first_words = np.unique(position_W, return_index=True)
        first_words, positions = first_words[positions >= 0], positions[positions >= 0]
        supervised[positions] = True
        labels = np.zeros(0, dtype=np.int64)
        if row.tags and self._tag_set is not None:
            labels = self._tag_set.labels(row)[first_words]
        return EncodedTags(ids_T, supervised, labels, position_W, words_cut)


class Entity(NamedTuple):
    """A predicted entity, in characters of the text."""

    start: int
    end: int
    label: str
    text: str
    probability: float  # probability of exactly these edges and this type, where the tags of words are independent


def word_probabilities(encoded: EncodedTags, p_SC: Floats, tag_set: TagSet) -> Floats:
    """Probabilities of the tags of all words.

    Args:
        p_SC: Those at the supervised tokens.

    Returns:
        Those of each word, shape (W, C). A word that shares its token with the one before continues its entity. A word
        without a token is outside; where tags mark no entities, all its probabilities are 0.
    """
    p_WC = np.zeros((len(encoded.position_W), len(tag_set.names)))
    row_of_token = np.cumsum(encoded.supervised) - 1
    has_token = encoded.position_W >= 0
    p_WC[has_token] = p_SC[row_of_token[encoded.position_W[has_token]]]
    if tag_set.entities:
        p_WC[~has_token, 0] = 1.0
        shared = has_token & (np.diff(encoded.position_W, prepend=-1) == 0)
        p_WC[shared, 2::2] += p_WC[shared, 1::2]
        p_WC[shared, 1::2] = 0.0
    return p_WC


def predicted_tags(p_WC: Floats, tag_set: TagSet) -> tuple[str, ...]:
    """The likeliest tag (W,) of each word; an empty one for a word without probabilities."""
    labels_W = np.where(p_WC.max(1) > 0, p_WC.argmax(1), -1)
    return tuple(tag_set.names[label] if label >= 0 else "" for label in labels_W.tolist())


def predicted_entities(row: TaggedRow, p_WC: Floats, tag_set: TagSet) -> list[Entity]:
    """The entities that the likeliest tags mark (`spans_of`), each with its probability.

    That is the product of P(B-X) of the first word, or of P(B-X) + P(I-X) where no X stands before it; of P(I-X) of
    those that follow; and of 1 - P(I-X) of the word after it.
    """
    tags = predicted_tags(p_WC, tag_set)
    entities = []
    for start, end, label in spans_of(tags):
        begin, inside = tag_set.ids[f"B-{label}"], tag_set.ids[f"I-{label}"]
        p = float(p_WC[start, begin])
        if start == 0 or tags[start - 1][2:] != label:
            p += float(p_WC[start, inside])
        p *= float(p_WC[start + 1 : end, inside].prod())
        p *= 1.0 - float(p_WC[end, inside]) if end < len(tags) else 1.0
        first, last = row.offsets[start][0], row.offsets[end - 1][1]
        entities.append(Entity(first, last, label, row.text[first:last], min(p, 1.0)))
    return entities
