"""Requests in the form of OpenAI's interface: what is read, what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workbench.evaluation.serving.refusals import Refusal
from workbench.schema import did_you_mean

MOST_ANSWERS = 128
"""Answers that one request may ask for."""
MOST_TEXTS = 2048
"""Texts that one request may have embedded or classified."""
_ANY = object()
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0,),
    "metadata": (_ANY,),
    "modalities": (["text"],),
    "parallel_tool_calls": (_ANY,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "user": (_ANY,),
}
"""Parameters of OpenAI's and vLLM's that are not implemented, with the values that ask for nothing, as null does."""
RequestT = TypeVar("RequestT", bound="Request")
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Request(BaseModel):
    """Base of every request."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    neutral: ClassVar[bool] = True
    """Whether OpenAI's parameters of generation are known by name."""

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
                if _ANY not in permitted and value not in permitted:
                    raise Refusal(f"{name} is not supported here. Leave it out.", param=name)
        return known


class StreamOptions(BaseModel):
    """Parts of a stream besides the answer."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    include_usage: bool = False
    """A last chunk with the number of tokens."""


class Generation(Request):
    """Parameters that requests for answers share."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of an answer."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """Logits are divided by it; 0: the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest tokens that have so much of the probability together."""
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    """Answers to each prompt."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Decides the random numbers: the same seed, the same answer."""
    stop: str | Annotated[list[str], Field(max_length=16)] = Field(default_factory=list)
    """Texts before which an answer ends."""
    stop_token_ids: Annotated[list[int], Field(max_length=256)] = Field(default_factory=list)
    """Tokens that end an answer, beside those of the model, as vLLM knows them."""
    stream: bool = False
    """Send the answer while it is written, as server-sent events."""
    stream_options: StreamOptions = StreamOptions()

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
    """Tell the log-probability of each token."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """And those of the likeliest tokens in its place."""

    @property
    def most(self) -> int | None:
        """Most tokens of an answer; None: as many as the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def scores(self) -> int | None:
        """Likeliest tokens that are told beside each; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | Tokens | Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MOST_ANSWERS)]
    """Raw text to go on with, or its tokens; or several of them."""
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Tell the log-probability of each token and of so many likeliest ones in its place."""
    echo: bool = False
    """Begin the answer with the prompt, and the log-probabilities with those of its tokens."""
    return_tokens_as_token_ids: bool = False
    """Write a token of the log-probabilities as token_id:NUMBER, as vLLM does, since several may have one text."""

    @model_validator(mode="after")
    def _bounded(self) -> CompletionRequest:
        if self.echo and self.stream:
            raise Refusal("An answer with echo is sent whole. Leave stream out, or echo.", param="echo")
        if self.n * len(self.prompts) > MOST_ANSWERS:
            raise Refusal(f"One request asks for at most {MOST_ANSWERS} answers. Send several.", param="n")
        return self

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
    """No account is taken of it: there is one backbone."""
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    """By which requests ask for it."""
    lora_path: Annotated[str, Field(min_length=1)]
    """Folder of the adapter in PEFT's format, on the server."""


class UnloadAdapterRequest(Request):
    """POST /v1/unload_lora_adapter, in vLLM's form."""

    neutral = False

    model: str = ""
    """No account is taken of it: there is one backbone."""
    lora_name: str
    """Name of an adapter that was loaded."""


class EmbeddingRequest(Request):
    """POST /v1/embeddings."""

    neutral = False

    input: str | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
    """Text or texts."""
    encoding_format: str = Field(default="float", pattern="^(float|base64)$")
    """Numbers, or little-endian float32 numbers in base64."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Only the first numbers of each embedding, one of the sizes that the run was trained for."""
    input_type: str = Field(default="query", pattern="^(query|passage)$")
    """Decides which of the run's instructions is written in front: `embed.query_prefix` or `embed.passage_prefix`."""
    user: str | None = None
    """Changes nothing."""

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
    """Text or texts; where a run reads several columns, objects of them."""
    user: str | None = None
    """Changes nothing."""

    @property
    def rows(self) -> Sequence[str | dict[str, str]]:
        """Each row."""
        return [self.input] if isinstance(self.input, (str, dict)) else self.input


def read(kind: type[RequestT], body: bytes) -> RequestT:
    """The request in a body.

    Raises:
        Refusal: It is malformed: says which parameter, and why.
    """
    try:
        return kind.model_validate_json(body)
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
