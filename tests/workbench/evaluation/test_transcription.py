"""Transcripts of long recordings: the windows and the words of the stock pipeline, over HTTP, too."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from starlette.testclient import TestClient
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor, WhisperFeatureExtractor
from transformers.pipelines.automatic_speech_recognition import chunk_iter

from workbench.config import RunConfig, model_heads
from workbench.data import starter
from workbench.data.images import picture_sources
from workbench.data.sound.sound_files import SOUND, SoundFile
from workbench.data.text.row_encoder import encoder_of_run
from workbench.errors import DataError
from workbench.evaluation import transcription
from workbench.evaluation.serving.app import Server, ServerLimits
from workbench.models import backbones, exported, output_heads, sound_processor
from workbench.models.exported import ExportedModel
from workbench.models.sound_processor import FeatureProcessor
from workbench.recipes.load import load
from workbench.recipes.tasks.sft.task import TASK


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load("sft/speech", ["model.weights=float32"])


@pytest.fixture(scope="module")
def model(config: RunConfig) -> ExportedModel:
    tokenizer = backbones.tokenizer(config.model)
    backbone = backbones.load(config.model, tokenizer, task=model_heads.of(config)).model.eval()
    template = encoder_of_run(config, backbone.config, tokenizer, processor=sound_processor.of(config, backbone.config))
    return ExportedModel(backbone, output_heads.find(backbone, backbone), tokenizer, template, [356])


def processor_of(model: ExportedModel) -> FeatureProcessor:
    assert isinstance(model.template.processor, FeatureProcessor)
    return model.template.processor


@pytest.fixture(scope="module")
def recording() -> bytes:
    """Nine spoken digits at 8 kHz, with pauses."""
    folder = Path(starter.resolve("starter/spoken_digits_held_out.csv")).parent
    waves: list[Any] = []
    for row in list(picture_sources.read_rows(str(folder / "spoken_digits.zip"), "audio", kind=SOUND))[:270:30]:
        waves += [row.columns["audio"].sound().wave_TC[:, 0], np.zeros(800)]
    buffer = io.BytesIO()
    soundfile.write(buffer, np.concatenate(waves), 8000, format="FLAC")
    return buffer.getvalue()


@pytest.mark.parametrize("samples", [1, 59, 60, 61, 80, 81, 100, 101, 139, 140, 141, 1000])
def test_windows_are_those_of_the_stock_pipeline(samples: int) -> None:
    extractor, wave = WhisperFeatureExtractor(feature_size=4, chunk_length=1), np.arange(samples, dtype=np.float32)
    found = transcription.windows(samples, size=60)
    stock = [each["stride"] for each in chunk_iter(wave, extractor, 60, 10, 10)]
    assert [len(wave[part]) for part in found] == [length for length, _, _ in stock]
    assert [part.start for part in found] == [40 * number for number in range(len(stock))]
    assert found[-1].stop >= samples


def test_a_long_recording_has_the_words_of_the_stock_pipeline(model: ExportedModel, recording: bytes) -> None:
    file, processor = SoundFile("a.flac", content=recording), processor_of(model)
    samples = len(processor.wave(file))
    assert samples > 2 * processor.format.samples
    asked = [(file, samples), (SoundFile("b.flac", content=recording), samples)]
    found = transcription.transcribe(model, processor, asked, max_new_tokens=8)
    assert found[0] == found[1]

    wave, rate = soundfile.read(io.BytesIO(recording), dtype="float32")
    folder = starter.resolve("starter/sound")
    stock, own = AutoModelForSpeechSeq2Seq.from_pretrained(folder).float().eval(), AutoProcessor.from_pretrained(folder)
    chunks = chunk_iter(soxr.resample(wave, rate, 16_000), own.feature_extractor, 32_000, 5333, 5333)
    texts = [
        own.decode(stock.generate(each["input_features"], max_new_tokens=8)[0], skip_special_tokens=True)
        for each in chunks
    ]
    # The shipped model's transcripts begin without a space, which stock joins to one word.
    outputs = [{"tokens": own.tokenizer(f" {text}", return_tensors="pt").input_ids} for text in texts]
    wanted, _ = own.tokenizer._decode_asr(outputs, return_timestamps=False, return_language=False, time_precision=0.02)
    assert len(texts) > 2
    assert found[0] == wanted.strip() != ""


@pytest.fixture
def client(config: RunConfig, model: ExportedModel, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr(exported, "load", lambda *_: model)
    server = Server([TASK.serve(Path("runs/a"), config, "a", 0, queue=1)], ServerLimits())
    return TestClient(server.app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


def _asked(client: TestClient, recording: bytes, **fields: str) -> Any:
    files = {"file": ("a.flac", recording)}
    return client.post("/v1/audio/transcriptions", data={"model": "a", **fields}, files=files)


def test_requests_get_the_same_transcript_in_each_form(
    client: TestClient, model: ExportedModel, recording: bytes
) -> None:
    file, processor = SoundFile("a.flac", content=recording), processor_of(model)
    samples = len(processor.wave(file))
    (said,) = transcription.transcribe(model, processor, [(file, samples)], max_new_tokens=48)
    assert _asked(client, recording).json() == {"text": said}
    assert _asked(client, recording, response_format="text", language="english").text == f"{said}\n"
    facts = {"text": said, "task": "transcribe", "language": "english", "duration": round(samples / 16_000, 3)}
    assert _asked(client, recording, response_format="verbose_json", temperature="0.0").json() == facts


def test_a_file_comes_through_a_form_byte_by_byte(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []

    def sound(self: SoundFile, **_: object) -> Any:
        heard.append(self.read())
        raise DataError("no sound")

    monkeypatch.setattr(SoundFile, "sound", sound)
    draw = random.Random(0)
    sent = [draw.randbytes(3000), b"\r\n", b"--", b"\x1c\x85\r\r\n\n\r", b"", bytes(range(256)) * 200]
    for data in sent:
        assert _asked(client, data).json()["error"]["message"] == "no sound"
    assert heard == sent


@pytest.mark.parametrize(
    ("fields", "data", "param", "message"),
    [
        ({"language": "fr"}, None, "language", r"language: .* has no token for <\|fr\|>. It has: en"),
        ({"response_format": "srt"}, None, "response_format", "json.text.verbose_json"),
        ({"temperature": "0.7"}, None, "temperature", "temperature"),
        ({"stream": "true"}, None, "stream", "stream"),
        ({"prompt": "before"}, None, "prompt", "prompt"),
        ({"timestamp_granularities[]": "word"}, None, "timestamp_granularities[]", "unknown parameter"),
        ({"model": "b"}, None, "model", "No model is called 'b'"),
        ({}, b"", "file", "the file is empty"),
        ({}, b"hello there", "file", "text, not a recording"),
    ],
)
def test_requests_that_are_refused(
    client: TestClient, recording: bytes, fields: dict[str, str], data: bytes | None, param: str, message: str
) -> None:
    response = _asked(client, recording if data is None else data, **fields)
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert error["param"] == param
    assert re.search(message, error["message"])


def test_an_hour_is_refused_before_it_is_decoded(client: TestClient) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(3601 * 100), 100, format="FLAC")
    response = _asked(client, buffer.getvalue())
    assert "takes 3,601 s, and 3,600 s are read at most. Cut it into parts" in response.json()["error"]["message"]


def test_damaged_forms_never_make_it_fail(client: TestClient) -> None:
    draw, seen = random.Random(0), set()
    boundary = "multipart/form-data; boundary=b"
    for _ in range(300):
        body = bytearray(
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n'
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nxyz\r\n--b--\r\n'
        )
        for _ in range(draw.randint(0, 6)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        head = draw.choice(
            [boundary] * 8 + ["", "multipart/form-data", "text/plain", 'multipart/form-data; boundary="']
        )
        response = client.post("/v1/audio/transcriptions", content=bytes(body), headers={"content-type": head})
        assert response.status_code < 500, (bytes(body), head, response.text)
        seen.add(response.json()["error"]["param"])
    assert {None, "file", "model"} <= seen
