"""Transcripts of long recordings: the windows and the words of the stock pipeline, over HTTP, too."""

from __future__ import annotations

import io
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from starlette.testclient import TestClient
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoProcessor, WhisperFeatureExtractor
from transformers.pipelines.automatic_speech_recognition import chunk_iter

from tests.sound_backbones import save_timed_whisper
from workbench.config import RunConfig, model_heads
from workbench.data import starter
from workbench.data.images import picture_sources
from workbench.data.sound.sound_files import SOUND, SoundFile
from workbench.data.text.row_encoder import encoder_of_run
from workbench.errors import DataError
from workbench.evaluation import transcription
from workbench.evaluation.serving import app
from workbench.evaluation.serving.app import Server, ServerLimits
from workbench.models import backbones, exported, output_heads, sound_processor
from workbench.models.exported import ExportedModel
from workbench.models.sound_processor import FeatureProcessor
from workbench.recipes.load import load
from workbench.recipes.tasks.sft.task import TASK


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load("sft/speech", ["model.weights=float32"])


def loaded(config: RunConfig) -> ExportedModel:
    """A backbone as a run ships it."""
    tokenizer = backbones.tokenizer(config.model)
    backbone = backbones.load(config.model, tokenizer, task=model_heads.of(config)).model.eval()
    template = encoder_of_run(config, backbone.config, tokenizer, processor=sound_processor.of(config, backbone.config))
    return ExportedModel(backbone, output_heads.find(backbone, backbone), tokenizer, template, [356])


@pytest.fixture(scope="module")
def model(config: RunConfig) -> ExportedModel:
    return loaded(config)


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
    found = [each.text for each in transcription.transcribe(model, processor, asked, max_new_tokens=8)]
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


Serve = Callable[[ExportedModel, RunConfig, ServerLimits], TestClient]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serves a model as the run `a`."""

    def served(model: ExportedModel, config: RunConfig, limits: ServerLimits) -> TestClient:
        monkeypatch.setattr(exported, "load", lambda *_: model)
        server = Server([TASK.serve(Path("runs/a"), config, "a", 0, queue=1)], limits)
        return TestClient(server.app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)

    return served


@pytest.fixture
def client(config: RunConfig, model: ExportedModel, serve: Serve) -> TestClient:
    return serve(model, config, ServerLimits())


def _asked(client: TestClient, recording: bytes, **fields: str) -> Any:
    files = {"file": ("a.flac", recording)}
    return client.post("/v1/audio/transcriptions", data={"model": "a", **fields}, files=files)


def test_requests_get_the_same_transcript_in_each_form(
    client: TestClient, model: ExportedModel, recording: bytes
) -> None:
    file, processor = SoundFile("a.flac", content=recording), processor_of(model)
    samples = len(processor.wave(file))
    (heard,) = transcription.transcribe(model, processor, [(file, samples)], max_new_tokens=48)
    said = heard.text
    assert _asked(client, recording).json() == {"text": said}
    assert _asked(client, recording, response_format="text", language="english").text == f"{said}\n"
    facts = {"text": said, "task": "transcribe", "language": "english", "duration": round(samples / 16_000, 3)}
    assert _asked(client, recording, response_format="verbose_json", temperature="0.0").json() == facts


def test_segments_are_those_of_stock_whisper_in_each_form(tmp_path: Path, serve: Serve, recording: bytes) -> None:
    folder = save_timed_whisper(tmp_path)
    config = load("sft/speech", ["model.weights=float32", f"model.id={folder}", "audio.augment={}"])
    model = loaded(config)
    client = serve(model, config, ServerLimits())
    found = _asked(
        client, recording, **{"response_format": "verbose_json", "timestamp_granularities[]": "segment"}
    ).json()

    stock = AutoModelForSpeechSeq2Seq.from_pretrained(folder).float().eval()
    wave, rate = soundfile.read(io.BytesIO(recording), dtype="float32")
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    features = extractor(
        soxr.resample(wave, rate, 16_000),
        sampling_rate=16_000,
        return_tensors="pt",
        truncation=False,
        padding="longest",
    )
    told = {"language": "en", "task": "transcribe", "max_new_tokens": 28}
    wanted = stock.generate(**features, **told, return_timestamps=True, return_segments=True)["segments"][0]
    wanted = [each for each in wanted if model.tokenizer.decode(each["tokens"], skip_special_tokens=True).strip()]
    segments = found["segments"]
    assert len(segments) > 3 and [each["id"] for each in segments] == list(range(len(segments)))
    assert [each["tokens"] for each in segments] == [each["tokens"].tolist() for each in wanted]
    for key in ("start", "end"):
        np.testing.assert_allclose([each[key] for each in segments], [float(each[key]) for each in wanted], atol=0.006)
    assert found["text"] == "".join(each["text"] for each in segments).strip()

    cues = _asked(client, recording, response_format="srt").text.split("\n\n")[:-1]
    assert len(cues) == len(segments)
    number, times, *text = cues[2].split("\n")
    assert (number, "\n".join(text)) == ("3", segments[2]["text"].strip())
    assert [_seconds(each.replace(",", ".")) for each in times.split(" --> ")] == [
        segments[2]["start"],
        segments[2]["end"],
    ]
    head, *shown = _asked(client, recording, response_format="vtt").text.split("\n\n")[:-1]
    assert head == "WEBVTT" and [each.replace(".", ",") for each in shown] == [
        cue.partition("\n")[2].replace(".", ",") for cue in cues
    ]


def _seconds(clock: str) -> float:
    hours, minutes, seconds = map(float, clock.split(":"))
    return round(3600 * hours + 60 * minutes + seconds, 3)


@pytest.mark.parametrize("form", ["json", "srt"])
def test_a_transcription_ends_when_its_time_is_over(
    tmp_path: Path, serve: Serve, recording: bytes, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(
        "sft/speech", ["model.weights=float32", f"model.id={save_timed_whisper(tmp_path)}", "audio.augment={}"]
    )
    model, looks = loaded(config), iter(range(10**6))
    # Each look at the clock is a second later.
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: next(looks), time=time.time))
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    model.model.get_decoder().register_forward_hook(counted)  # type: ignore[operator]
    response = _asked(serve(model, config, ServerLimits(seconds=12)), recording, response_format=form)
    assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
    assert 0 < count < 20


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
        ({"response_format": "xml"}, None, "response_format", "json.text.verbose_json"),
        ({"response_format": "srt"}, None, "response_format", "no tokens of them. Write json, text or verbose_json"),
        ({"temperature": "0.7"}, None, "temperature", "temperature"),
        ({"stream": "true"}, None, "stream", "stream"),
        ({"prompt": "before"}, None, "prompt", "prompt"),
        ({"timestamp_granularities[]": "word"}, None, "timestamp_granularities[]", "segment"),
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
