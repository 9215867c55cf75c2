"""Requests, responses and errors in the form of OpenAI's interface, and some of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.parser import BytesParser
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from workbench.data.rows import excerpt
from workbench.evaluation.serving.scheduler import (
    Interrupted,
    Overfull,
    QueueFull,
    Reason,
    ShuttingDown,
    TimedOut,
    TokenScore,
    Unloaded,
)
from workbench.evaluation.transcription import TranscriptSegment
from workbench.schema import did_you_mean

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

RETRY_S = 1  # seconds after which a refused client may ask again
MOST_ANSWERS = 128  # answers that one request may ask for
MOST_TEXTS = 2048  # texts that one request may send to be embedded or classified
_ANYTHING = object()
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0,),
    "metadata": (_ANYTHING,),
    "modalities": (["text"],),
    "parallel_tool_calls": (_ANYTHING,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "user": (_ANYTHING,),
}  # parameters of OpenAI and vLLM that are not implemented, with the values that, like null, ask for nothing
RequestT = TypeVar("RequestT", bound="Request")
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Refusal(Exception):
    """A request that is refused, as an error in OpenAI's form.

    Args:
        message: What is wrong and what to write.
        param: The parameter at fault.
        code: The error's name for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, object]:
        """The error as OpenAI writes it."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        named = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = named.get(self.status, other)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The answer to a client."""
        from starlette.responses import JSONResponse  # tasks have served models, whoever trains has no server

        headers = {"Retry-After": str(RETRY_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


_INTERRUPTIONS: dict[type[Exception], tuple[str, int, str]] = {
    QueueFull: ("Too many requests wait already. Ask again later.", 429, "queue_full"),
    TimedOut: ("The answer took longer than the server allows.", 504, "timeout"),
    Overfull: ("The server ran out of memory. Ask again later, or for less.", 503, "memory"),
    Unloaded: ("The adapter was unloaded. Load it again.", 404, "model_not_found"),
    ShuttingDown: ("The server is shutting down. Ask again later.", 503, "shutting_down"),
    Interrupted: ("The server failed; its log says why.", 500, "failed"),
}  # message, status and code by exception


def refusal_of(error: QueueFull | Interrupted) -> Refusal:
    """The refusal of a request that was interrupted or not taken."""
    message, status, code = _INTERRUPTIONS[type(error)]
    return Refusal(message, status=status, code=code, param="model" if isinstance(error, Unloaded) else None)


class Request(BaseModel):
    """Base of every request."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    neutral: ClassVar[bool] = True
    """Whether the parameters of _NEUTRAL are accepted with neutral values."""

    model: str
    """Name of a run, or of a backbone."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = {name: value for name, value in values.items() if value is not None}
        for name, permitted in _NEUTRAL.items() if cls.neutral else ():
            if name in known:
                value = known.pop(name)
                if _ANYTHING not in permitted and value not in permitted:
                    raise Refusal(f"{name} is not supported here. Leave it out.", param=name)
        return known


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    include_usage: bool = False
    """Send a last chunk with the number of tokens."""


class Generation(Request):
    """Parameters that requests for answers share."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of an answer."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """Logits are divided by it; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability."""
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    """Answers to each prompt."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Decides the random numbers: the same seed gives the same answer."""
    stop: str | Annotated[list[str], Field(max_length=16)] = Field(default_factory=list)
    """Texts before which an answer ends."""
    stop_token_ids: Annotated[list[int], Field(max_length=256)] = Field(default_factory=list)
    """Further tokens that end an answer, as in vLLM."""
    stream: bool = False
    """Send the answer while it is generated, as server-sent events."""
    stream_options: StreamOptions = StreamOptions()

    @property
    def most(self) -> int | None:
        """Most tokens of an answer; None: as many as the context can hold."""
        return self.max_tokens

    @property
    def scores(self) -> int | None:
        """Number of likeliest tokens to send with each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts before which an answer ends."""
        return tuple(each for each in ((self.stop,) if isinstance(self.stop, str) else self.stop) if each)


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[Any] = Field(min_length=1)
    """The conversation, in the form of training rows."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    """Send the log-probability of each token."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """Send those of so many likeliest tokens in its place too."""

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def scores(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MOST_ANSWERS)]
    """Raw text to continue, or its tokens; or several of them."""
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Send the log-probability of each token and of so many likeliest ones in its place."""
    echo: bool = False
    """Begin the answer with the prompt, and the log-probabilities with those of the prompt."""
    return_tokens_as_token_ids: bool = False
    """Write tokens of the log-probabilities as token_id:NUMBER, as vLLM does, since several may have the same text."""

    @model_validator(mode="after")
    def _bounded(self) -> CompletionRequest:
        if self.echo and self.stream:
            raise Refusal("An answer with echo is sent whole. Leave stream out, or echo.", param="echo")
        if self.n * len(self.prompts) > MOST_ANSWERS:
            raise Refusal(f"One request asks for at most {MOST_ANSWERS} answers. Send several.", param="n")
        return self

    @property
    def scores(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class LoadAdapterRequest(Request):
    """POST /v1/load_lora_adapter, in vLLM's form."""

    neutral = False

    model: str = ""
    """Ignored: there is one backbone."""
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    """The model's name in requests."""
    lora_path: Annotated[str, Field(min_length=1)]
    """Folder of the adapter in PEFT's format, on the server."""


class UnloadAdapterRequest(Request):
    """POST /v1/unload_lora_adapter, in vLLM's form."""

    neutral = False

    model: str = ""
    """Ignored: there is one backbone."""
    lora_name: str
    """Name of a loaded adapter."""


class EmbeddingRequest(Request):
    """POST /v1/embeddings."""

    neutral = False

    input: str | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
    """Text or texts."""
    encoding_format: str = Field(default="float", pattern="^(float|base64)$")
    """Numbers, or little-endian float32 numbers in base64."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Send the first numbers of each embedding alone: one of the sizes that the run was trained for."""
    input_type: str = Field(default="query", pattern="^(query|passage)$")
    """Which instruction of the run precedes each text: `embed.query_prefix` or `embed.passage_prefix`."""
    user: str | None = None
    """Ignored."""

    @property
    def texts(self) -> Sequence[str]:
        """Each text."""
        return [self.input] if isinstance(self.input, str) else self.input


class ClassifyRequest(Request):
    """POST /classify, in vLLM's form."""

    neutral = False

    input: (
        str | dict[str, str] | Annotated[list[str] | list[dict[str, str]], Field(min_length=1, max_length=MOST_TEXTS)]
    )
    """Text or texts; where a run reads several columns, objects with these columns."""
    user: str | None = None
    """Ignored."""

    @property
    def rows(self) -> Sequence[str | dict[str, str]]:
        """Each row."""
        return [self.input] if isinstance(self.input, (str, dict)) else self.input


class TranscriptionRequest(Request):
    """POST /v1/audio/transcriptions, a form whose fields are bytes of text, or of the file."""

    neutral = False

    file: bytes
    """The recording: wav, flac, mp3, ogg, ..."""
    language: str | None = None
    """Language of the recording, such as en; null: the run's."""
    response_format: str = Field(default="json", pattern="^(json|text|verbose_json|srt|vtt)$")
    """`text`: the transcript alone; `verbose_json`: with language, duration and, where the backbone has tokens of
    times, segments; `srt`, `vtt`: subtitles."""
    granularities: str = Field(default="segment", alias="timestamp_granularities[]", pattern="^segment$")
    """Words have no times here."""
    prompt: str = Field(default="", max_length=0)
    """Not supported: the text before."""
    temperature: str = Field(default="0", pattern=r"^0*(\.0*)?$")
    """Transcripts are greedy."""
    stream: str = Field(default="false", pattern="^(?i:false|0)$")
    """A transcript is sent whole."""


def _clock(seconds: float, comma: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}{comma}{thousandths:03d}"


def _srt(segments: Sequence[TranscriptSegment]) -> str:
    """Segments as SubRip has them: numbered, with commas in their times."""
    return "".join(
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{each.text.strip()}\n\n"
        for number, each in enumerate(segments, start=1)
    )


def _vtt(segments: Sequence[TranscriptSegment]) -> str:
    """Segments as WebVTT."""
    cues = (f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{each.text.strip()}\n\n" for each in segments)
    return "".join(["WEBVTT\n\n", *cues])


SUBTITLES: Mapping[str, Callable[[Sequence[TranscriptSegment]], str]] = {"srt": _srt, "vtt": _vtt}
"""Forms of subtitles, by `response_format`."""


def read_request(kind: type[RequestT], body: bytes) -> RequestT:
    """The request in a body; raises Refusal, which names the parameter and the reason, where it is malformed."""
    return _checked(kind, lambda: kind.model_validate_json(body))


def read_form(kind: type[RequestT], content_type: str, body: bytes) -> RequestT:
    """The request in a form of HTML, whose header `content_type` has its boundary; raises Refusal as `read_request`."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    parsed = BytesParser().parsebytes(head + body)
    if parsed.get_content_type() != "multipart/form-data" or not parsed.is_multipart():
        raise Refusal("Send a form, multipart/form-data, with the fields `model` and `file`.")
    fields: dict[str, Any] = {}
    for part in parsed.walk():
        name = part.get_param("name", header="content-disposition")
        if part.is_multipart() or not isinstance(name, str):
            continue
        if name in fields:
            raise Refusal(f"{excerpt(name)} stands there twice. Send it once.", param=excerpt(name))
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes), "it has no parts"
        fields[name] = content if name == "file" else content.decode(errors="replace").strip()
    return _checked(kind, lambda: kind.model_validate(fields))


def _checked(kind: type[RequestT], read: Callable[[], RequestT]) -> RequestT:
    try:
        return read()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"]
        if first["type"] == "extra_forbidden":
            message = f"unknown parameter.{did_you_mean(str(first['loc'][-1]), list(kind.model_fields))}"
        param = str(first["loc"][0]) if first["loc"] else None
        raise Refusal(f"{place}: {message}" if place else message, param=param) from None
    except RecursionError:
        raise Refusal("The JSON is nested too deeply.") from None


@dataclass
class Written:
    """One answer as far as it is generated."""

    text: str = ""
    tokens: int = 0
    scores: list[TokenScore] = field(default_factory=list)
    reason: Reason | None = None


class AnswerForm(Protocol):
    """How one address writes its answers."""

    prefix: str  # beginning of an answer's id
    whole: str  # type name of a whole answer
    part: str  # type name of a chunk

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, which has no text; None: there is no such chunk."""

    def choice(self, index: int, written: Written, *, chunk: bool) -> dict[str, Any]:
        """A choice, whole or as a chunk."""


class ChatForm:
    """/v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, scored: bool) -> None:
        self._tokenizer, self._scored = tokenizer, scored

    def opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, written: Written, *, chunk: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": written.text, "refusal": None}
        if chunk:
            message = {"content": written.text} if written.text else {}
        tokens = [
            _named(self._tokenizer, each.token, each.logprob)
            | {"top_logprobs": [_named(self._tokenizer, *pair) for pair in each.top]}
            for each in written.scores
        ]
        scores = {"content": tokens, "refusal": None} if self._scored else None
        name = "delta" if chunk else "message"
        return {"index": index, name: message, "logprobs": scores, "finish_reason": written.reason}


class CompletionForm:
    """/v1/completions."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, scored: bool, numbered: bool = False) -> None:
        self._tokenizer, self._scored, self._numbered = tokenizer, scored, numbered

    def opening(self, index: int) -> None:
        return None

    def choice(self, index: int, written: Written, *, chunk: bool) -> dict[str, Any]:
        scores = self._scores(written.scores) if self._scored else None
        return {"index": index, "text": written.text, "logprobs": scores, "finish_reason": written.reason}

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        tokens, offset = [self._text(each.token) for each in scores], [0]
        for token in tokens:
            offset.append(offset[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in scores],
            "top_logprobs": [
                None if each.logprob is None else {self._text(token): logprob for token, logprob in each.top}
                for each in scores
            ],
            "text_offset": offset[:-1],
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._numbered else str(self._tokenizer.decode([token]))


def _named(tokenizer: PreTrainedTokenizerBase, token: int, logprob: float | None) -> dict[str, Any]:
    text = str(tokenizer.decode([token]))
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
