"""Clients of a training server without the SDK, whose messages they write themselves."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.evaluation.serving.training_bank import Datum


def part(number: int, content: bytes | str) -> bytes:
    """A field of bytes."""
    data = content.encode() if isinstance(content, str) else content
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        out.append(value & 127 | (128 if value > 127 else 0))
        value >>= 7
        if not value:
            return bytes(out)


def loss_body(
    model: str,
    number: int,
    data: Sequence[Datum],
    loss: str = "cross_entropy",
    settings: Mapping[str, float] | None = None,
    *,
    forward_only: bool = False,
) -> bytes:
    """A ForwardBackwardRequest."""
    rows = []
    for each in data:
        inputs = b""
        for name, values in each.inputs.items():
            kind, form = (2, "<i8") if name == "target_tokens" else (1, "<f4")
            array = np.asarray(values, dtype=form)
            shape = part(4, b"".join(map(varint, array.shape)))
            tensor = part(1, array.tobytes()) + bytes([3 << 3, kind]) + shape
            inputs += part(2, part(1, name) + part(2, tensor))
        tokens = np.asarray(each.tokens, dtype="<i4").tobytes()
        rows.append(part(3, part(1, part(1, part(1, tokens))) + inputs))
    numbers = [
        part(7, part(1, name) + part(2, bytes([1 << 3 | 1]) + struct.pack("<d", value)))
        for name, value in (settings or {}).items()
    ]
    return b"".join(
        [part(1, model), bytes([2 << 3]), varint(number), *rows, part(4, loss), *numbers, bytes([6 << 3, forward_only])]
    )


@dataclass
class WireClient:
    """One key's view of the server."""

    http: Any
    key: str = "tml-test"
    session: str = ""
    numbers: dict[str, int] = field(default_factory=dict)

    def post(self, path: str, body: Any = None, **more: Any) -> Any:
        """The response to JSON, or to bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        headers = {"X-API-Key": self.key, "Host": "127.0.0.1"}
        return self.http.post(f"/api/v1/{path}", content=content, headers=headers, **more)

    def get(self, path: str) -> Any:
        return self.http.get(f"/api/v1/{path}", headers={"X-API-Key": self.key, "Host": "127.0.0.1"})

    def result(self, response: Any) -> Any:
        """What was promised: JSON, or bytes."""
        assert response.status_code == 200, response.text
        name = response.json()["request_id"]
        while (found := self.post("retrieve_future", {"request_id": name})).status_code == 408:
            pass
        assert found.status_code == 200, found.text
        return found.content if "protobuf" in found.headers["content-type"] else found.json()

    def begin(self) -> str:
        self.session = self.post("create_session", {"tags": [], "sdk_version": "0"}).json()["session_id"]
        return self.session

    def model(self, base: str, *, rank: int = 4, seed: int = 1) -> str:
        """A fresh adapter."""
        if not self.session:
            self.begin()
        lora = {"rank": rank, "seed": seed, "train_unembed": True}
        number = len(self.numbers)
        call = {"session_id": self.session, "model_seq_id": number, "base_model": base, "lora_config": lora}
        name: str = self.result(self.post("create_model", call))["model_id"]
        self.numbers[name] = 0
        return name

    def following(self, model: str) -> int:
        self.numbers[model] += 1
        return self.numbers[model]

    def losses(self, model: str, data: Sequence[Datum], loss: str = "cross_entropy", **more: Any) -> Any:
        return self.post("forward_backward", loss_body(model, self.following(model), data, loss, **more))

    def step(self, model: str, **numbers: float) -> Any:
        return self.post("optim_step", {"model_id": model, "seq_id": self.following(model), "adam_params": numbers})

    def sampler(self, model: str, number: int = 0) -> str:
        call = {"model_id": model, "seq_id": self.following(model), "sampling_session_seq_id": number}
        return str(self.result(self.post("save_weights_for_sampler", call))["sampling_session_id"])

    def sample(self, sampler: str, prompt: Sequence[int], number: int, **settings: Any) -> Any:
        call = {"sampling_session_id": sampler, "seq_id": number, "sampling_params": settings}
        return self.post("asample", {**call, "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}})
