"""Pictures and recordings beside text: what a row holds of them, and where in its messages they stand.

The content of a message stays one text, in which MARK stands for each of its parts that is no text; `media` of the
message holds these in their order. Other kinds of parts are one line of KINDS.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from workbench.data.rows import excerpt
from workbench.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, LogitsProcessor

MARK = "\ufffc"
"""Unicode's object replacement character: it stands in a content where a picture does."""
KEY = "media"
"""Key of a message that holds its media."""


class Kind(NamedTuple):
    """How rows, and requests of OpenAI's interface, hold one kind of media."""

    noun: str
    mark: str  # what LLaMA-Factory and LLaVA write into texts
    columns: tuple[str, ...]  # of a row, and keys of a message
    values: tuple[str, ...]  # keys of a part that hold it
    sent: str  # the part of a request


KINDS = {
    "image": Kind(
        "picture",
        "<image>",
        ("images", "image"),
        ("image", "path", "url", "image_url", "bytes", "base64", "data"),
        "{type: image_url, image_url: {url: 'data:image/png;base64,...'}}",
    ),
    "audio": Kind(
        "recording",
        "<audio>",
        ("audios", "audio"),
        ("audio", "path", "url", "audio_url", "input_audio", "bytes", "base64", "data"),
        "{type: input_audio, input_audio: {data: BASE64, format: wav}}",
    ),
}
_NAMES = {"image": "image", "image_url": "image", "input_image": "image"} | dict.fromkeys(
    ("audio", "audio_url", "input_audio"), "audio"
)
"""Kind of each type of part; OpenAI and vLLM have more names."""
NUMBERS = "row_pictures"
"""Input that names the pictures of each row that has some: the bytes of its key (R, 16), uint8."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""Inputs that say of each token (B, L) whether it is one of a picture."""
COLUMNS = tuple(name for kind in KINDS.values() for name in kind.columns)


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or recording as its row has it."""

    kind: str
    value: Any
    """A path, an address, a data URI, base64, the bytes of a file, {bytes, path}, a picture of PIL, or samples as
    `datasets.Audio` has them; None: the row's column holds it."""
    folder: str | None = None
    """Where paths begin; None: nowhere, for rows of a hub data set."""


def part_of(part: Any, where: str) -> Media | None:
    """A part of a message's content that is no text; None for another one.

    Forms: {type: image, image|path|url|bytes: ...}, {type: image_url, image_url: {url: ...}} as OpenAI has it, and
    {type: image} alone, whose picture is in the row's column.
    """
    if not isinstance(part, Mapping) or (name := _NAMES.get(str(part.get("type")))) is None:
        return None
    given = [key for key in KINDS[name].values if part.get(key) is not None]
    if len(given) > 1 and set(given) != {"bytes", "path"}:
        raise DataError(f"{where}: a part of type {part['type']} has {' and '.join(given)}. Leave all but one out.")
    value = part[given[0]] if given else None
    if isinstance(value, Mapping) and (inner := value.keys() & {"url", "data"}):  # OpenAI's
        value = value[inner.pop()]
    if given and not value and not _is_picture(value):
        raise DataError(f"{where}: a part of type {part['type']} has an empty `{given[0]}`. Write a path there.")
    return Media(name, {"bytes": part["bytes"], "path": part["path"]} if len(given) > 1 else value)


def _is_picture(value: Any) -> bool:
    return hasattr(value, "convert")  # of PIL, which is imported where pictures are read


def of_column(value: Any, name: str) -> list[Any]:
    """The pictures of a column: one, or a list of them."""
    if value is None or (isinstance(value, str | list | tuple | dict) and not value):
        return []
    values = list(value) if isinstance(value, list | tuple) else [value]
    if missing := next((number for number, each in enumerate(values, start=1) if each is None or each == ""), None):
        raise DataError(f"`{name}`: entry {missing} is empty. Write a picture there, or take it out with its mark.")
    return values


def placed(messages: Sequence[dict[str, Any]], columns: Mapping[str, Any], where: str = "") -> list[dict[str, Any]]:
    """The messages with what the columns of their row hold: at its marks, in their order; without marks, before the
    text of the first question.

    Args:
        columns: Of the row, or the keys of a message.
        where: Begins the messages of errors.

    Raises:
        DataError: There are more marks than pictures, or fewer.
    """
    placed = list(messages)
    for name, kind in KINDS.items():
        values = [each for column in kind.columns for each in of_column(columns.get(column), column)]
        named = [column for column in kind.columns if column in columns]
        open_parts = sum(each.kind == name and each.value is None for message in placed for each in _media(message))
        if named and not open_parts:
            marked = [_with_marks(message, name, kind.mark) for message in placed]
            open_parts = sum(len(_media(new)) - len(_media(old)) for new, old in zip(marked, placed, strict=True))
            placed = marked if open_parts else placed
        if not open_parts and values:
            first = next((number for number, each in enumerate(placed) if each["role"] == "user"), None)
            if first is None:
                raise DataError(f"{where}has {_counted(len(values), kind.noun)} and no question. Write one before it.")
            own = [Media(name, None)] * len(values)
            content = MARK * len(values) + placed[first]["content"]
            placed[first] = {**placed[first], "content": content, KEY: [*own, *_media(placed[first])]}
            open_parts = len(values)
        if open_parts != len(values):
            source = f" in `{named[0]}`" if named else ""
            raise DataError(
                f"{where}has {_counted(open_parts, f'mark {kind.mark}', f'marks {kind.mark}')} (or parts of type "
                f"{name}) and {_counted(len(values), kind.noun)}{source}. Write a mark for each {kind.noun}, or none: "
                f"then all stand before the first question."
            )
        if values:
            given = iter(values)
            placed = [_filled(message, name, given) for message in placed]
    return placed


def located(messages: Sequence[dict[str, Any]], folder: str | None) -> tuple[dict[str, Any], ...]:
    """The messages with paths that begin in `folder`."""
    return tuple(
        {**message, KEY: [replace(each, folder=folder) for each in message[KEY]]} if KEY in message else message
        for message in messages
    )


def numbers(keys: Sequence[str]) -> Tensor:
    """The keys of the rows that have pictures as bytes (R, 16)."""
    import torch

    return torch.tensor([list(bytes.fromhex(key)) for key in keys if key], dtype=torch.uint8)


def in_parts(messages: Sequence[Mapping[str, Any]], address: Callable[[Media], str]) -> list[dict[str, Any]]:
    """Messages whose pictures stand in parts of their contents, as OpenAI's interface has them. `address`: of each."""
    told = list[dict[str, Any]]()
    for message in messages:
        message = dict(message)
        own = [{"type": "image_url", "image_url": {"url": address(each)}} for each in message.pop(KEY, ())]
        if own:
            texts = [{"type": "text", "text": text} for text in message["content"].split(MARK)]
            pairs = itertools.chain.from_iterable(itertools.zip_longest(texts, own))
            message["content"] = [part for part in pairs if part is not None and part.get("text") != ""]
        told.append(message)
    return told


def of_messages(messages: Sequence[dict[str, Any]]) -> list[Media]:
    """All media of a conversation, in their order."""
    return [each for message in messages for each in _media(message)]


def identity(messages: Sequence[dict[str, Any]]) -> str:
    """Names what a conversation shows, by paths, addresses and bytes as its row has them; empty for nothing."""
    digest, found = hashlib.sha256(), of_messages(messages)
    for each in found:
        value = each.value
        if isinstance(value, Mapping):
            value = value["bytes"] if "bytes" in value else np.asarray(value.get("array"))
        own = value.encode() if isinstance(value, str) else value.tobytes() if hasattr(value, "tobytes") else value
        digest.update(hashlib.sha256(own or b"").digest())
    return digest.hexdigest() if found else ""


def _media(message: Mapping[str, Any]) -> list[Media]:
    return list(message.get(KEY, ()))


def _with_marks(message: dict[str, Any], name: str, mark: str) -> dict[str, Any]:
    """A message whose text has `mark` where pictures stand."""
    texts = message["content"].split(mark)
    if len(texts) == 1:
        return message
    known, own = iter(_media(message)), list[Media]()
    for number, text in enumerate(texts):
        own += [*([Media(name, None)] if number else []), *(next(known) for _ in range(text.count(MARK)))]
    return {**message, "content": MARK.join(texts), KEY: own}


def _filled(message: dict[str, Any], name: str, given: Any) -> dict[str, Any]:
    if KEY not in message:
        return message
    own = [
        replace(each, value=next(given)) if each.kind == name and each.value is None else each for each in message[KEY]
    ]
    return {**message, KEY: own}


def _counted(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def unmarked(content: str, where: str) -> str:
    """A text without MARK. Raises DataError: the row itself has it, so that it could be taken for a picture."""
    if MARK in content:
        raise DataError(f"{where}: holds the sign U+FFFC {excerpt(content)}, which stands for a picture. Take it out.")
    return content


class KeptPictures(NamedTuple):
    """The pictures of a row as the processor made them together: some treat one picture otherwise than several."""

    key: str
    """Names their file: a hash of their contents."""
    texts: tuple[str, ...]
    """What stands in the text in place of each mark: the picture's tokens."""
    stamps: tuple[str, ...] = ()
    """The states of their files, by which changed ones are known; of pictures that stand in the row, none."""


class MediaProcessor(Protocol):
    """Reads the pictures or recordings of rows as a backbone's processor does; it can be pickled."""

    @property
    def kind(self) -> str:
        """The key of KINDS that it reads."""

    @property
    def token(self) -> str:
        """What a chat template writes where a picture stands."""

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the tokens whose embeddings are those of pictures."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Ids that a decoder begins every answer with; empty where each row has its own."""

    @property
    def most(self) -> int | None:
        """Most tokens of a decoder; None where rows say it."""

    @property
    def settings(self) -> list[Any]:
        """All that the tokens of rows with pictures depend on, besides the rows; JSON."""

    @property
    def loaded(self) -> bool:
        """Whether a picture was read, for which the processor had to be there."""

    @property
    def numbered(self) -> bool:
        """Whether batches name the pictures of their rows, for a model that keeps its tower's outputs."""

    @property
    def packs(self) -> bool:
        """Whether rows with pictures can be packed: where the model knows them by their embeddings alone."""

    def kept(self, media: Sequence[Media], where: str) -> KeptPictures:
        """The pictures of a row as the processor makes them, from their file where they were made before. Raises
        DataError: one is not there, or is no picture."""

    def small(self, key: str) -> list[bytes]:
        """The pictures of a row as small JPEG files, for reports; none of recordings."""

    def sounds(self, key: str) -> list[bytes]:
        """The recordings of a row as `listening.kept` writes them, for reports; none of pictures."""

    def knows(self, keys: Iterable[str], stamps: Iterable[str]) -> bool:
        """Whether all pictures of rows are still kept, and their files are what they were."""

    def inputs(self, ids_BL: Tensor, keys: Sequence[str]) -> dict[str, Tensor]:
        """Arguments of the model for the pictures of rows with these tokens; `keys` name those of each row."""

    def rules(self, own: GenerationConfig) -> LogitsProcessor | None:
        """What the tokens of an answer have to keep to, by the backbone's own settings; None: nothing."""
