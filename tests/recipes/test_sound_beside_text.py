"""Recordings within conversations: the loss of the stock model and processor, every form of a row, and mistakes."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
from peft import PeftModel
from starlette.testclient import TestClient
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration, VoxtralConfig

import workbench
from tests.run_files import read_losses
from tests.sound_backbones import save_qwen2_audio, tone
from tests.stopping import stop_after
from tests.workbench.evaluation.serving.conftest import SETTINGS
from workbench.config import ModelConfig, model_heads
from workbench.config.sections.image_config import ImageConfig
from workbench.data.text import tokenized
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import Stopped, WorkbenchError
from workbench.evaluation.serving.app import Server
from workbench.models import backbones, exported, output_heads
from workbench.models.picture_processor import HearingProcessor
from workbench.recipes.load import load
from workbench.recipes.tasks.sft import text_run
from workbench.recipes.verbs import serving
from workbench.recipes.verbs.generate import predict
from workbench.runs import run_directory
from workbench.runs.trust import Trust

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SAID = {"role": "assistant", "content": "Two."}
WORDS = ["data.columns={}", "data.held_out=0.25", "model.weights=float32", "model.compute=float32", "adapter.rank=4"]


@dataclass(frozen=True)
class Folder:
    """A backbone, recordings, and rows about them."""

    model: str
    rows: Path

    def wave(self, name: str) -> Any:
        """A recording at the backbone's rate."""
        return soxr.resample(soundfile.read(self.rows.parent / name, dtype="float32")[0], 8000, 16_000)

    def words(self, *more: str) -> list[str]:
        return [f"model.id={self.model}", f"data.train={self.rows}", *WORDS, *more]

    def write(self, rows: Sequence[Mapping[str, Any]], name: str = "others.jsonl") -> str:
        """A word that names a file of other rows."""
        (self.rows.parent / name).write_text("\n".join(map(json.dumps, rows)))
        return f"data.train={self.rows.parent / name}"


def conversation(*names: str, answer: str = "Two.") -> dict[str, Any]:
    parts = [{"type": "audio", "path": name} for name in names]
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": "How high?"}]}
    return {"messages": [asked, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    home = tmp_path_factory.mktemp("hearing")
    for number in range(12):
        soundfile.write(
            home / f"{number}.wav", tone(300 + 90 * number, seconds=0.3 + 0.1 * (number // 2), seed=number), 8000
        )
    rows = [conversation(f"{number}.wav", answer=f"It is {number}.") for number in range(10)]
    rows += [conversation("10.wav", "11.wav"), conversation()]
    found = Folder(save_qwen2_audio(home / "model"), home / "rows.jsonl")
    found.write(rows, "rows.jsonl")
    return found


def read(folder: Folder, *more: str) -> tuple[TokenizedSet, Any, Any]:
    config = load("sft/quickstart", folder.words(*more))
    tokenizer = backbones.tokenizer(config.model)
    rows = tokenized.read(str(config.data.train), config.data, tokenizer, text_run.encoder_of(config, tokenizer))
    model = backbones.load(config.model, tokenizer, task=model_heads.of(config)).model
    return rows, model, output_heads.find(model, model)


def test_loss_and_gradients_are_those_of_the_stock_model_and_processor(folder: Folder) -> None:
    rows, model, head = read(folder)
    assert isinstance(rows.processor, HearingProcessor)
    model.requires_grad_(True)
    order = [0, 3, 10, 11]
    batch = rows.batch(np.asarray(order))
    found = text_run.next_token_loss(model, head)(batch, 1 / len(batch.labels_N))
    found.backward()

    stock = Qwen2AudioForConditionalGeneration.from_pretrained(folder.model).float().eval()
    processor = AutoProcessor.from_pretrained(folder.model)
    kept = [json.loads(line)["messages"] for line in folder.rows.read_text().splitlines()]
    texts = [processor.apply_chat_template(kept[number], tokenize=False) for number in order]
    waves = [folder.wave(name) for name in ("0.wav", "3.wav", "10.wav", "11.wav")]
    given = processor(text=texts, audio=waves, sampling_rate=16_000, return_tensors="pt", padding=True)
    ids = [torch.tensor(rows[number].input_ids) for number in order]
    for own, stock_ids, mask in zip(ids, given.pop("input_ids"), given.pop("attention_mask"), strict=True):
        stock_own = stock_ids[mask.bool()]  # without the end of a row, which only training writes
        assert torch.equal(own[: len(stock_own)], stock_own) and len(own) <= len(stock_own) + 1
    labels = [each.masked_fill(~torch.tensor(rows[n].supervised), -100) for each, n in zip(ids, order, strict=True)]
    padded = pad_sequence(ids, batch_first=True, padding_value=0)
    mask = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    goals = pad_sequence(labels, batch_first=True, padding_value=-100)
    wanted = stock(**given, input_ids=padded, attention_mask=mask, labels=goals).loss
    wanted.backward()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    own_parameters = dict(model.named_parameters())
    compared = [name for name, each in stock.named_parameters() if each.grad is not None]
    assert any("audio_tower" in name for name in compared) and any("projector" in name for name in compared)
    for name in compared:
        grad = stock.get_parameter(name).grad
        torch.testing.assert_close(own_parameters[name].grad, grad, atol=1e-5, rtol=1e-3)


def test_a_row_has_the_same_loss_whatever_is_beside_it_and_other_sound_another(folder: Folder) -> None:
    rows, model, head = read(folder)
    loss = text_run.next_token_loss(model, head)
    with torch.no_grad():
        alone = [loss(rows.batch(np.asarray([number])), 1.0) for number in range(len(rows))]
        torch.testing.assert_close(loss(rows.batch(np.arange(len(rows))), 1.0), sum(alone), atol=1e-4, rtol=1e-5)
        others = rows.with_other_pictures()
        assert others is not None
        first = {place: number for number, place in enumerate(rows.places())}
        pairs = [(first[place], number) for number, place in enumerate(others.places()) if others[number].pictures]
        assert len(pairs) == 10
        for own, other in pairs:
            assert rows[own].input_ids.tolist() == others[other].input_ids.tolist()
            assert not torch.allclose(loss(others.batch(np.asarray([other])), 1.0), alone[own], atol=1e-4)


def test_every_form_of_a_row_is_the_same_recording(folder: Folder, tmp_path: Path) -> None:
    data = (folder.rows.parent / "3.wav").read_bytes()
    coded = base64.b64encode(data).decode()

    def asked(part: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "How high?"}]}, SAID]}

    wave = soundfile.read(folder.rows.parent / "3.wav", dtype="float32")[0]
    samples = {"array": wave.tolist(), "sampling_rate": 8000}
    forms = [
        conversation("3.wav"),
        asked({"type": "input_audio", "input_audio": {"data": coded, "format": "wav"}}),
        asked({"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{coded}"}}),
        {"messages": [{"role": "user", "content": "<audio>How high?"}, SAID], "audios": ["3.wav"]},
        {"messages": [{"role": "user", "content": "How high?"}, SAID], "audio": "3.wav"},
        {"messages": [{"role": "user", "content": "How high?"}, SAID], "audio": samples},
    ]
    rows, _, _ = read(folder, folder.write(forms))
    ids = [rows[number].input_ids.tolist() for number in range(len(rows))]
    assert len(ids) == len(forms) and all(each == ids[0] for each in ids)
    arrays = [rows.processor.arrays([rows[number].pictures])["input_features"] for number in range(len(rows))]
    assert all(torch.equal(each, arrays[0]) for each in arrays)


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        (conversation("none.wav"), [], r"row 1.*none\.wav does not exist"),
        (conversation("long.wav"), [], r"row 1.*long\.wav: takes 2 s, and 1 s are read at most"),
        (
            {"messages": [{"role": "user", "content": "<audio><audio>How?"}, SAID], "audios": ["0.wav"]},
            [],
            "row 1: has 2 marks <audio> .* and 1 recording in `audios`",
        ),
        (conversation("0.wav"), ["model.id=starter"], "row 1: has a recording, and its backbone hears nothing"),
        (conversation("0.wav"), ["model.id=starter/vision-language"], "row 1: has a recording, and its backbone hears"),
        ({"image": "a.png", **conversation()}, [], "row 1: has a picture, and its backbone sees nothing"),
        (conversation("0.wav"), ["adapter={method: prompt}"], "virtual tokens"),
        (conversation("http://example.org/a.wav"), [], "the recording is at an address.*data.fetch=true"),
    ],
)
def test_mistakes_are_told_with_the_cure(folder: Folder, row: dict[str, Any], more: list[str], message: str) -> None:
    soundfile.write(folder.rows.parent / "long.wav", tone(400, seconds=2), 8000)
    with pytest.raises(WorkbenchError, match=f"(?s){message}"):
        words = folder.words(folder.write([row, *(conversation(f"{n}.wav") for n in range(8))], "wrong.jsonl"), *more)
        workbench.check("sft/quickstart", words)


def test_a_processor_that_writes_no_tokens_of_recordings_is_refused(folder: Folder) -> None:
    """By name, whether or not what it needs is installed: Voxtral's needs mistral-common to be loaded."""
    voxtral = folder.rows.parent / "voxtral"
    VoxtralConfig().save_pretrained(voxtral)
    reader = HearingProcessor(ModelConfig(id=str(voxtral)), VoxtralConfig, ImageConfig())
    with pytest.raises(WorkbenchError, match="VoxtralProcessor, does not say which tokens of a text stand for a rec"):
        _ = reader.processor


def served_answers_are(run: Path, files: Sequence[Path], wanted: Sequence[str]) -> None:
    """Requests that hold recordings get these answers, and others are refused."""
    models = serving.load(serving.named([str(run)], trust=False), SETTINGS)
    client = TestClient(Server(models, SETTINGS.limits).app, base_url="http://127.0.0.1")
    coded = [base64.b64encode(file.read_bytes()).decode() for file in files]

    def asked(*sent: str) -> Any:
        parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}} for data in sent]
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": "How high?"}]}
        settings = {"model": models[0].name, "temperature": 0, "max_tokens": 3, "logprobs": True}
        return client.post("/v1/chat/completions", json={**settings, "messages": [turn]})

    found = [asked(each).json()["choices"][0] for each in coded]
    assert [each["message"]["content"].strip() for each in found] == list(wanted)
    scores = [each["logprobs"]["content"][0]["logprob"] for each in found]
    assert abs(scores[0] - scores[1]) > 1e-5, "each has the recording of its own request"
    assert asked(f"data:audio/wav;base64,{coded[0]}").json()["choices"][0]["message"] == found[0]["message"]
    assert asked(*coded).status_code == 200
    for sent, why in {
        (str(files[0].resolve()),): "files of the server are not read",
        ("http://example.org/a.wav",): "data.fetch=true",
        (base64.b64encode(b"hello there").decode(),): "text, not a recording",
        tuple(coded) * 9: "at most 16 pictures or recordings",
    }.items():
        refused = asked(*sent)
        assert refused.status_code == 400 and why in refused.json()["error"]["message"], refused.text


@pytest.mark.slow
def test_a_run_is_resumed_bit_by_bit_and_ships_a_stock_adapter(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = folder.words("train.epochs=null", "train.steps=3", "batch.size=4", "evaluate.answers=2", "save.every=1")
    words += ["evaluate.max_new_tokens=4"]

    def run(name: str, *more: str, resume: bool = False) -> Path:
        return workbench.run("sft/quickstart", [*words, *more], out=tmp_path / name, resume=resume, quiet=True)

    straight = run("straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stopped):
            run("stopped")
    assert read_losses(run("stopped", resume=True)) == read_losses(straight)
    np.testing.assert_allclose(
        read_losses(run("parts", "batch.tokens_per_device=150")), read_losses(straight), rtol=1e-5
    )
    said = predict(straight, str(folder.rows), max_new_tokens=3).table["answer"]
    assert len(said) == 12
    files = [folder.rows.parent / f"{number}.wav" for number in range(2)]
    for number, file in enumerate(files):
        assert workbench.generate(straight, "How high?", recordings=[file], max_new_tokens=3).strip() == said[number]
    with pytest.raises(WorkbenchError, match="has a picture, and its backbone sees nothing"):
        workbench.generate(straight, "How high?", pictures=["a.png"])
    served_answers_are(straight, files, said[:2].tolist())

    config = run_directory.shipped_config(straight, Trust(False, ""))
    processor = AutoProcessor.from_pretrained(folder.model)
    text = processor.apply_chat_template(conversation("3.wav")["messages"], tokenize=False)
    given = processor(text=[text], audio=[folder.wave("3.wav")], sampling_rate=16_000, return_tensors="pt")
    stock = Qwen2AudioForConditionalGeneration.from_pretrained(folder.model).float().eval()
    bare = stock(**given).logits
    adapted = PeftModel.from_pretrained(stock, str(straight / "adapter"))
    own = exported.load(straight, config).model(**given).logits
    torch.testing.assert_close(adapted(**given).logits, own, atol=1e-4, rtol=1e-4)
    assert (own - bare).abs().max() > 1e-3
