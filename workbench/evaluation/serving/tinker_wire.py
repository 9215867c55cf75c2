"""The messages of the Tinker interface (SDK 0.38): protocol buffers for rows and results, JSON for the rest.

Only what a bank computes is read; a request that asks for more is refused, never answered by halves.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from torch import Tensor

from workbench.errors import ConfigError
from workbench.evaluation.serving.training_bank import Datum, LossResult, Samples

_TYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
"""numpy's names of the tensor types, by number."""
_ELEMENTS = 2**24
"""Most elements of a tensor that arrives sparse."""
_MASKED = -99999.0
"""Log-probability where the SDK reads that there is none."""
Id = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9:_-]+$")]
Seq = Annotated[int, Field(ge=0, le=2**53)]


# Protocol buffers: https://protobuf.dev/programming-guides/encoding


def _number(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if at >= len(message):
            raise ValueError("the message ends within a number")
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    raise ValueError("a number has more than ten bytes")


def fields(message: bytes) -> dict[int, list[Any]]:
    """Values of a message by the numbers of its fields: numbers, or bytes; raises ValueError."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        kind = key & 7
        value: int | bytes
        if kind == 0:
            value, at = _number(message, at)
        elif kind in (1, 5):
            value, at = message[at : at + (8 if kind == 1 else 4)], at + (8 if kind == 1 else 4)
        elif kind == 2:
            size, at = _number(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise ValueError(f"field {key >> 3} has the unknown type {kind}")
        if at > len(message):
            raise ValueError("the message ends within a field")
        found.setdefault(key >> 3, []).append(value)
    return found


def _last(found: Mapping[int, list[Any]], number: int, kind: type, default: Any) -> Any:
    value = found.get(number, [default])[-1]
    if not isinstance(value, kind):
        raise ValueError(f"field {number} has another type")
    return value


def _written(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def written(*pairs: tuple[int, int | float | bytes | str]) -> bytes:
    """A message of fields, by their numbers."""
    out = []
    for number, value in pairs:
        if isinstance(value, int):
            out += [_written(number << 3), _written(value)]
        elif isinstance(value, float):
            out += [_written(number << 3 | 1), struct.pack("<d", value)]
        else:
            content = value.encode() if isinstance(value, str) else value
            out += [_written(number << 3 | 2), _written(len(content)), content]
    return b"".join(out)


class LossCall(BaseModel):
    """A call of forward or forward_backward."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model_id: Id
    seq_id: Seq
    data: list[Datum]
    loss: str
    settings: dict[str, float]
    forward_only: bool


def loss_call(body: bytes) -> LossCall:
    """The call in a ForwardBackwardRequest; raises ValueError, or ConfigError for what a bank does not compute."""
    found = fields(body)
    settings: dict[str, float] = {}
    for entry in found.get(5, []):
        pair = fields(entry)
        settings[_last(pair, 1, bytes, b"").decode()] = struct.unpack("<d", _last(pair, 2, bytes, bytes(8)))[0]
    for entry in found.get(7, []):
        pair = fields(entry)
        name, value = _last(pair, 1, bytes, b"").decode(), fields(_last(pair, 2, bytes, b""))
        if 2 in value:
            raise ConfigError(f"loss_fn_config.{name}: this server's losses have numbers alone.")
        settings[name] = struct.unpack("<d", _last(value, 1, bytes, bytes(8)))[0]
    return LossCall(
        model_id=_last(found, 1, bytes, b"").decode(),
        seq_id=_last(found, 2, int, 0),
        data=[_datum(each) for each in found.get(3, [])],
        loss=_last(found, 4, bytes, b"").decode(),
        settings=settings,
        forward_only=bool(_last(found, 6, int, 0)),
    )


def _datum(message: bytes) -> Datum:
    found = fields(message)
    tokens: list[int] = []
    for chunk in found.get(1, []):
        text = fields(chunk)
        if 1 not in text:
            raise ConfigError("model_input: this server reads text alone.")
        tokens += np.frombuffer(_last(fields(_last(text, 1, bytes, b"")), 1, bytes, b""), dtype="<i4").tolist()
    inputs = {}
    for entry in found.get(2, []):
        pair = fields(entry)
        inputs[_last(pair, 1, bytes, b"").decode()] = _tensor(_last(pair, 2, bytes, b""))
    return Datum(tokens, inputs)


def _tensor(message: bytes) -> Tensor:
    found = fields(message)
    if (kind := _last(found, 3, int, 0)) not in _TYPES:
        raise ValueError(f"a tensor has the unknown type {kind}")
    shape: list[int] = []
    for value in found.get(4, []):
        packed, at = (value, 0) if isinstance(value, bytes) else (_written(value), 0)
        while at < len(packed):
            size, at = _number(packed, at)
            shape.append(size)
    if 2 not in found:
        values = np.frombuffer(_last(found, 1, bytes, b""), dtype=_TYPES[kind])
        return torch.tensor(values.reshape(shape) if shape else values)
    sparse = fields(_last(found, 2, bytes, b""))
    values = np.frombuffer(_last(sparse, 1, bytes, b""), dtype=_TYPES[kind])
    rows, columns = (np.frombuffer(_last(sparse, number, bytes, b""), dtype="<i8") for number in (2, 3))
    if len(shape) != 2 or shape[0] * shape[1] > _ELEMENTS or len(rows) != shape[0] + 1 or len(columns) != len(values):
        raise ValueError("a sparse tensor has another shape than its values")
    counts = np.diff(rows)
    if rows[0] != 0 or (counts < 0).any() or rows[-1] != len(columns) or ((columns < 0) | (columns >= shape[1])).any():
        raise ValueError("a sparse tensor has places outside of its shape")
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return torch.tensor(dense)


def loss_response(result: LossResult) -> bytes:
    """A ForwardBackwardOutput: a record with the log-probabilities of each row, and summed losses."""
    records = []
    for each in result.logprobs:
        data = each.numpy().astype("<f4").tobytes()
        offsets = np.array([0, len(data)], dtype="<i8").tobytes()
        trailing = b"".join(_written(size) for size in each.shape[1:])
        batched = written((1, data), (2, offsets), (3, 1), *([(4, trailing)] if trailing else []))
        records.append(written((1, "ArrayRecord"), (2, written((1, "logprobs"), (2, batched))), (3, 1)))
    metrics = {**{f"{name}:sum": float(value) for name, value in result.metrics.items()}, "loss:sum": result.loss}
    return written(
        (1, "ArrayRecord"),
        *((2, record) for record in records),
        *((3, written((1, name), (2, float(value)))) for name, value in metrics.items()),
    )


def samples_response(found: Samples, *, prompt: int, top: int, prompt_top: int, last: int | None) -> bytes:
    """A SampleResponse.

    Args:
        prompt: Tokens of the prompt that were scored; 0: none.
        top: Likeliest tokens that are told in each place of an answer.
        prompt_top: The same of the prompt.
        last: Only so many of the prompt's last tokens have scores; None: all.
    """
    message: list[tuple[int, bytes | int]] = []
    for each in found.answers:
        tokens, logprobs = np.array(each.tokens, dtype="<i4"), np.array(each.logprobs, dtype="<f4")
        ranked = [(4, _ranked([places[:top] for places in each.top], top))] if top else []
        reason = int(each.reason == "length")
        message.append((1, written((1, reason), (2, tokens.tobytes()), (3, logprobs.tobytes()), *ranked)))
    if prompt:
        first = 1 if last is None else max(1, prompt - last)
        scores = [np.nan if place < first else each.logprob for place, each in enumerate(found.prompt)]
        message.append((2, np.array(scores, dtype="<f4").tobytes()))
        if prompt_top:
            tops = [() if place < first else each.top[:prompt_top] for place, each in enumerate(found.prompt)]
            message.append((3, _ranked(tops, prompt_top)))
    return written(*message)


def _ranked(places: Sequence[Sequence[tuple[int, float]]], top: int) -> bytes:
    ids, logprobs = np.zeros((len(places), top), "<i4"), np.full((len(places), top), _MASKED, "<f4")
    for row, place in enumerate(places):
        for column, (token, logprob) in enumerate(place):
            ids[row, column], logprobs[row, column] = token, logprob
    return written((1, ids.tobytes()), (2, logprobs.tobytes()), (3, top), (4, len(places)))


# JSON


class WireRequest(BaseModel):
    """A request; fields of later SDKs are read over."""

    model_config = ConfigDict(protected_namespaces=())


class SessionCall(WireRequest):
    """Addresses a session."""

    session_id: Id


class ModelCall(WireRequest):
    """Addresses a model."""

    model_id: Id


class LoraSettings(WireRequest):
    """An adapter."""

    rank: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(WireRequest):
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class CreateCall(SessionCall):
    """Create an adapter."""

    model_seq_id: Seq
    base_model: str
    lora_config: LoraSettings | None = None
    optimizer_config: Optimizer = Optimizer()


class AdamSettings(BaseModel):
    """Of one update."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimCall(ModelCall):
    """An update."""

    seq_id: Seq
    params: Annotated[AdamSettings, Field(validation_alias=AliasChoices("adam_params", "optim_params"))]


class SaveCall(ModelCall):
    """Save a state, or weights to sample from."""

    seq_id: Seq
    path: str | None = None
    overwrite: bool = False
    sampling_session_seq_id: Seq | None = None
    ttl_seconds: float | None = None


class LoadCall(WireRequest):
    """Load a state into a model, or into one that is created for it."""

    path: str
    optimizer: bool
    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None


class SamplerCall(SessionCall):
    """Sample from the backbone, or from saved weights."""

    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(WireRequest):
    """Tokens of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class PromptTokens(WireRequest):
    """A prompt."""

    chunks: list[PromptChunk]


class SamplingSettings(BaseModel):
    """How answers are sampled."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleCall(WireRequest):
    """Sample answers."""

    sampling_session_id: Id
    seq_id: Seq
    prompt: PromptTokens
    sampling_params: SamplingSettings
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=64)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=64)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0


class FutureCall(WireRequest):
    """Wait for a result."""

    request_id: Annotated[str, Field(max_length=300)]
