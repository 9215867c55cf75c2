"""Texts as token ids with the characters that each token stands for, and the chat template that writes them."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from workbench.data.text.template_segments import InstrumentedTemplate, instrumented
from workbench.errors import BackboneError


class TokenSpans:
    """Token ids of a text with the characters that each stands for; a token belongs to where it starts."""

    def __init__(self, text: str, ids: list[int], offsets: Sequence[tuple[int, int]]) -> None:
        self.text = text
        self.ids = ids
        # Tokenizers may trim a leading space off the offsets, which leaves a gap: a token starts where the one before
        # it ended. The bytes of one character have the same offsets each: there a token starts earlier than that.
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        before = [0, *ends[:-1]]
        if starts != before:
            ends = list(accumulate(ends, max))
            before = [0, *ends[:-1]]
            starts = list(map(min, starts, before))
        self.starts, self.ends = starts, ends

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """First and last (exclusive) token that starts in these characters."""
        return bisect_left(self.starts, start), bisect_left(self.starts, stop)

    def straddles(self, character: int) -> bool:
        """Whether a token starts before `character` and reaches beyond it."""
        number = bisect_left(self.starts, character) - 1
        return number >= 0 and self.ends[number] > character

    def visible(self, numbers: Iterable[int]) -> int | None:
        """The first of these tokens that is more than blank text."""
        return next((n for n in numbers if self.text[self.starts[n] : self.ends[n]].strip()), None)


class ChatTokenizer:
    """A tokenizer with the chat template in use.

    Attributes:
        name: What error messages call the template.
        special: Ids that can end a turn.
        special_tokens: The tokenizer's special tokens by name, which templates may write.
        eos: The id that ends every text; None in vocabularies without one.
        instrumented: The template, compiled so that it tells its turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.name = f"the chat template of {os.path.basename(tokenizer.name_or_path) or 'the tokenizer'}"
        self.eos: int | None = tokenizer.eos_token_id
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        special.update(tokenizer.all_special_ids)
        # A beginning of a sequence ends no turn, except in vocabularies that use one token for both.
        self.special = (special - {tokenizer.bos_token_id}) | ({self.eos} - {None})
        self.special_tokens: dict[str, Any] = tokenizer.special_tokens_map
        self._known: dict[str, tuple[list[int], Any]] = {}
        self._known_ids: dict[str, list[int]] = {}
        try:
            self.instrumented: InstrumentedTemplate = instrumented(source)
        except TemplateSyntaxError as error:
            raise BackboneError(
                f"{self.name}, line {error.lineno}: {error.message}\n"
                "  Correct it, or give another one with model.chat_template=FILE."
            ) from None

    def tokenise(self, text: str, answers: Iterable[int] = ()) -> TokenSpans:
        """`text` as it stands, without the special tokens that the tokenizer would add.

        Args:
            text: What is tokenised, as one string wherever that is what generation sees.
            answers: Characters at which generation takes over. A token that reaches across one is right for neither
                side: after the prompt's own tokens, generation cannot produce it. There the text is tokenised in two.
        """
        tokens = TokenSpans(text, *self._encode(text))
        edges = [answer for answer in answers if tokens.straddles(answer)]
        if not edges:
            return tokens
        ids, offsets = self._encode(text[: edges[0]])
        for start, stop in pairwise([*edges, len(text)]):
            more_ids, more_offsets = self._encode_continued(text[start:stop])
            ids += more_ids
            offsets += [(left + start, right + start) for left, right in more_offsets]
        return TokenSpans(text, ids, offsets)

    def ids(self, text: str) -> list[int]:
        """Ids of `text` as it stands, without the characters that they stand for."""
        return list(self._known_ids[text] if text in self._known_ids else self._encoding(text)[0])

    @contextmanager
    def tokenised(self, texts: Sequence[str], *, without_offsets: Sequence[str] = ()) -> Iterator[None]:
        """Inside the block these texts are known: one call of the tokenizer for many takes less time.

        Args:
            without_offsets: Texts of which only `ids` are asked for, which takes a fifth less.
        """
        try:
            self._known = dict(zip(texts, self._encodings(texts), strict=True))
            self._known_ids = dict(zip(without_offsets, self._ids(without_offsets), strict=True))
            yield
        finally:
            self._known, self._known_ids = {}, {}

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        self._encodings(texts[:1])  # sets what the library below is asked for: all of each text, special tokens read
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, encoding = self._encoding(text)
        return list(ids), encoding.offsets

    def _encoding(self, text: str) -> tuple[list[int], Any]:
        return self._known[text] if text in self._known else self._encodings([text])[0]

    def _encodings(self, texts: Sequence[str]) -> list[tuple[list[int], Any]]:
        """The ids of each text, and the encoding of the library behind the tokenizer: its `offsets` are made late."""
        if not texts:
            return []
        batch = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(zip(batch["input_ids"], batch.encodings or [], strict=True))

    def _encode_continued(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`text` as it follows other text: after a line break, because some vocabularies open a text with a space."""
        breaks = len(self._encode("\n")[0])
        ids, offsets = self._encode("\n" + text)
        if offsets[breaks - 1][1] != 1:  # the line break is one token with what follows
            return self._encode(text)
        return ids[breaks:], [(left - 1, right - 1) for left, right in offsets[breaks:]]

    def refusal(self, why: str) -> BackboneError:
        """The error for a template whose answers cannot be told from the rest."""
        return BackboneError(
            f"{self.name} {why}, so the answers cannot be told from the rest.\n"
            "  Give another one with model.chat_template=FILE, such as one that writes what the model generates\n"
            "  between {% generation %} and {% endgeneration %}."
        )
