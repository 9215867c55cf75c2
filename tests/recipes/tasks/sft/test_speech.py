"""Recipe sft over recordings: the stock model's loss, any micro-batch, resume, merge, transcripts, and mistakes."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pandas as pd
import pytest
import soundfile
import soxr
import torch
from peft import PeftModel
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer, VoxtralConfig

import workbench
from tests.run_files import read_losses, read_scores
from tests.sound_backbones import record, save_moonshine, save_sound, save_timed_whisper, tone
from tests.stopping import stop_after
from workbench.config import model_heads
from workbench.data import starter
from workbench.data.text import tokenized
from workbench.data.text.transcripts import TranscriptEncoder
from workbench.errors import Stopped, WorkbenchError
from workbench.evaluation import transcript_scores
from workbench.models import backbones, output_heads, sound_processor
from workbench.models.sound_processor import FeatureProcessor
from workbench.recipes.load import load
from workbench.recipes.tasks.sft import text_run
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.merge import merge

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
WORDS = ["model.weights=float32", "adapter.rank=4", "data.held_out=0.25", "evaluate.answers=4", "evaluate.every=null"]
CHANGES = "audio.augment={speed: 0.1, shift: 0.05, time_masks: 1, frequency_masks: 1}"
SAID = ("seven", "two left", "stop go stop")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return transcribed(tmp_path_factory.mktemp("rows"), 24)


def transcribed(folder: Path, count: int) -> Path:
    """A table of recordings whose transcripts differ in length."""
    table = pd.read_csv(record(folder, count)).drop(columns=["label", "speaker"])
    table["text"] = list(itertools.islice(itertools.cycle(SAID), count))
    table.to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv"


def words(rows: Path, *more: str) -> list[str]:
    return [f"data.train={rows}", "data.columns={}", "audio.folder=null", "audio.augment={}", *WORDS, *more]


def read(rows: Path, *more: str) -> tuple[Any, Any, Any]:
    """The training rows, the model and its head."""
    config = load("sft/speech", words(rows, "data.ignore=[]", *more))
    tokenizer = backbones.tokenizer(config.model)
    encoder = text_run.encoder_of(config, tokenizer)
    assert isinstance(encoder, TranscriptEncoder)
    train = replace(tokenized.load(config.data, tokenizer, encoder).train, collate=encoder.augmented)
    model = backbones.load(config.model, tokenizer, task=model_heads.of(config)).model
    return train, model, output_heads.find(model, model)


def _wave(path: Path) -> Any:
    return soxr.resample(soundfile.read(path)[0].astype("float32"), 8000, 16_000)


@pytest.mark.parametrize("family", ["whisper", "moonshine"])
def test_loss_and_gradients_are_those_of_the_stock_model_and_processor(rows: Path, tmp_path: Path, family: str) -> None:
    folder = starter.resolve("starter/sound") if family == "whisper" else save_moonshine(tmp_path)
    train, model, head = read(rows, f"model.id={folder}", *(["audio.max_seconds=1"] if family == "moonshine" else []))
    model.requires_grad_(True)
    batch = train.batch(np.arange(9))
    found = text_run.next_token_loss(model, head)(batch, 1 / len(batch.labels_N))
    found.backward()

    stock = AutoModelForSpeechSeq2Seq.from_pretrained(folder).float().eval()
    numbers = [int(train.place(number).rpartition("row ")[2].split()[0]) - 1 for number in range(9)]
    chosen = pd.read_csv(rows).iloc[numbers]
    waves = [_wave(rows.parent / each) for each in chosen["audio"]]
    filled = {"padding": "max_length", "max_length": 16_000} if family == "moonshine" else {}
    extractor, tokenizer = AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    features = extractor(waves, sampling_rate=16_000, return_tensors="pt", **filled)
    text = tokenizer(chosen["text"].tolist(), padding=True, return_tensors="pt")
    labels, first = text.input_ids.masked_fill(text.attention_mask == 0, -100)[:, 1:], [0, 1, 2, 3]
    labels[:, :3] = -100  # language, task and no timestamps are given
    if family == "moonshine":  # which begins with a start token alone
        first, labels = [0], labels[:, 3:].contiguous()
    given = torch.cat([text.input_ids[:, first], text.input_ids[:, 4:-1]], dim=1)
    wanted = stock(**features, decoder_input_ids=given, labels=labels).loss
    wanted.backward()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    own = dict(model.named_parameters())
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                own[name].grad, parameter.grad, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: n + m
            )


def test_a_row_has_the_same_loss_and_features_whatever_is_beside_it(rows: Path) -> None:
    train, model, head = read(rows, CHANGES)
    loss = text_run.next_token_loss(model, head)
    together = train.batch(np.arange(7), epoch=2)
    alone = [train.batch(np.asarray([number]), epoch=2) for number in range(7)]
    with torch.no_grad():
        torch.testing.assert_close(loss(together, 1.0), sum(loss(each, 1.0) for each in alone), atol=1e-4, rtol=1e-5)
    for number, each in enumerate(alone):
        assert torch.equal(each.inputs["input_features"][0], together.inputs["input_features"][number])
    other = train.batch(np.arange(7), epoch=3).inputs["input_features"]
    assert not torch.equal(other, together.inputs["input_features"])


def test_transcript_and_end_are_learnt_after_language_and_task(rows: Path) -> None:
    train, _, _ = read(rows)
    tokenizer = backbones.tokenizer(load("sft/speech", []).model)
    row = train[0]
    learnt, given = row.input_ids[row.supervised], row.input_ids[row.source :][~row.supervised[row.source :]]
    assert tokenizer.decode(given) == "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    assert tokenizer.decode(learnt) in {f"{said}<|endoftext|>" for said in SAID}
    assert row.source == 50 and train.lengths[0] == 50 + len(given) + len(learnt)


def test_error_rates_are_those_of_jiwer_over_all_rows() -> None:
    references = ["a cat sat", "dogs run far away", "no"]
    transcripts = ["a bat sat", "dogs run", "oh no no"]
    found = transcript_scores.scores(
        [transcript_scores.edits(*each) for each in zip(transcripts, references, strict=True)]
    )
    assert found["wer"] == pytest.approx(jiwer.wer(references, transcripts))
    assert found["cer"] == pytest.approx(jiwer.cer(references, transcripts))
    assert found["wer_low"] < found["wer"] < found["wer_high"]
    assert transcript_scores.edits("", "no").wer == 1


def _emptied(rows: Path) -> None:
    table = pd.read_csv(rows)
    table.loc[3, "text"] = " "
    table.to_csv(rows, index=False)


def _gone(rows: Path) -> None:
    (rows.parent / "3.wav").unlink()


def _long(rows: Path) -> None:
    soundfile.write(rows.parent / "3.wav", tone(400, seconds=2.5), 8000)


def _wordy(rows: Path) -> None:
    table = pd.read_csv(rows)
    table.loc[3, "text"] = "stop and go " * 30
    table.to_csv(rows, index=False)


def _twelve(rows: Path) -> None:
    table = pd.read_csv(rows)
    table.loc[3, "text"] = "stop and go " * 4
    table.to_csv(rows, index=False)


def _unnamed(rows: Path) -> None:
    pd.read_csv(rows).rename(columns={"text": "sentence"}).to_csv(rows, index=False)


def _none(rows: Path) -> None:
    pass


MISTAKES: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "an empty transcript": (_emptied, [], "row 4.*`text` is (empty|missing)"),
    "a missing file": (_gone, [], r"row 4.*3\.wav does not exist"),
    "a long recording": (_long, [], r"2\.50 s, more than the 2 s.*on_long=cut"),
    "a long transcript": (_wordy, [], "row 4.*transcript has .* tokens, and the backbone writes 43 at most"),
    "a short max_tokens": (
        _twelve,
        ["data.max_tokens=8"],
        "row 4.*data.max_tokens=8 would cut. Write data.max_tokens=",
    ),
    "no transcripts": (_unnamed, [], "no column `text`.*data.columns='{text: NAME}'.*`sentence`"),
    "waves without a length": (
        _none,
        ["model.id=MOONSHINE"],
        r"hears recordings of any length, .* Write audio\.max_seconds=1, the longest of the run's files",
    ),
    "a model of text": (_none, ["model.id=starter"], "no model that writes what it hears"),
    "another language": (_none, ["audio.language=fr"], r"audio.language.*no token for <\|fr\|>. It has: en"),
    "another task": (_none, ["audio.task=translate"], "audio.task.*no token for translate"),
    "loss on all": (_none, ["data.loss_on=all"], "data.loss_on says which turns.*recordings"),
    "a chat template": (_none, ["model.chat_template=a.jinja"], "model.chat_template writes conversations"),
    "packing": (_none, ["batch.packing=true"], "data.format=audio have no padding"),
    "preferences": (_none, ["recipe=prefer"], "data.format=audio is for recipe=classify|sft"),
    "folds": (_none, ["recipe=crossval", "of=sft"], "crossval"),
    "a policy of freezing": (_none, ["freeze.policy=linear"], "freeze.policy"),
    "virtual tokens": (_none, ["adapter={method: prefix}"], "(?i)prefix|virtual"),
    "pictures": (_none, ["image.folder=a"], "image reads pictures"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_with_the_cure(mistake: str, tmp_path: Path) -> None:
    spoil, more, message = MISTAKES[mistake]
    rows = transcribed(tmp_path / "rows", 6)
    spoil(rows)
    more = [f"model.id={save_moonshine(tmp_path / 'moonshine')}" if "MOONSHINE" in word else word for word in more]
    with pytest.raises(WorkbenchError, match=f"(?s){message}"):
        workbench.check("sft/speech", words(rows, "data.ignore=[]", *more))


def test_without_jiwer_nothing_trains(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(WorkbenchError, match=r"jiwer.*pip install peft-workbench\[audio\]"):
        workbench.check("sft/speech", words(rows, "data.ignore=[]"))


def test_a_model_that_hears_reads_no_text_and_an_encoder_writes_nothing(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="WhisperConfig has no sequence-to-sequence language model"):
        workbench.check("sft/quickstart", ["model.id=starter/sound"])
    hears = save_sound(tmp_path / "hubert", "hubert")
    with pytest.raises(WorkbenchError, match=r"VoxtralConfig hears recordings within a conversation.*Take a Whisper"):
        sound_processor.of(load("sft/speech", []), VoxtralConfig())
    with pytest.raises(WorkbenchError, match="the folder holds no tokenizer"):
        workbench.check("sft/speech", words(rows, "data.ignore=[]", f"model.id={hears}"))
    with pytest.raises(WorkbenchError, match=r"Write data\.format=audio"):
        workbench.check("sft/quickstart", ["audio.folder=a"])


def test_a_folder_of_words_has_transcripts(tmp_path: Path) -> None:
    for word in ("stop", "go"):
        (tmp_path / "words" / word).mkdir(parents=True)
        for number in range(3):
            soundfile.write(tmp_path / "words" / word / f"{number}.wav", tone(300 + 50 * number, seed=number), 8000)
    found = workbench.check("sft/speech", words(tmp_path / "words", "data.columns={text: label}", "data.ignore=[]"))
    assert len(found.data.train) + len(found.data.held_out) == 6
    assert ("[recording: 50 positions]", False) in [piece for _, example in found.examples for piece in example[:1]]


def test_features_are_kept_and_changed_recordings_are_read_again(tmp_path: Path) -> None:
    rows = transcribed(tmp_path / "rows", 6)
    config = load("sft/speech", words(rows, "data.ignore=[]"))
    tokenizer = backbones.tokenizer(config.model)

    def keys() -> list[str]:
        encoder = text_run.encoder_of(config, tokenizer)
        assert isinstance(encoder, TranscriptEncoder) and isinstance(encoder.processor, FeatureProcessor)
        found = tokenized.read(str(rows), config.data, tokenizer, encoder)
        return [found[number].pictures for number in range(len(found))]

    first = keys()
    assert keys() == first
    soundfile.write(rows.parent / "2.wav", tone(900), 8000)
    again = keys()
    assert [number for number in range(6) if again[number] != first[number]] == [2]


def _segmented(folder: Path, segments: object = None) -> Path:
    """Three recordings of 3 s, whose seconds have a transcript each."""
    lines = []
    for number in range(3):
        wave = np.concatenate([tone(300 + 70 * part, seconds=1, seed=9 * number + part) for part in range(3)])
        soundfile.write(folder / f"{number}.flac", wave, 8000)
        own = [{"start": part, "end": part + 1, "text": f"{number} {part}"} for part in range(3)]
        lines.append(json.dumps({"audio": f"{number}.flac", "segments": own if segments is None else segments}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def test_a_long_recording_is_learnt_by_its_segments(tmp_path: Path) -> None:
    rows = _segmented(tmp_path)
    config = load("sft/speech", words(rows, "data.ignore=[]", "data.held_out=0.3"))
    tokenizer = backbones.tokenizer(config.model)
    encoder = text_run.encoder_of(config, tokenizer)
    train, held_out, _ = tokenized.load(config.data, tokenizer, encoder)
    said = [[tokenizer.decode(row.input_ids[row.supervised][:-1]) for row in each] for each in (train, held_out)]
    assert sorted(said[0] + said[1]) == [f"{number} {part}" for number in range(3) for part in range(3)]
    assert not {each[0] for each in said[0]} & {each[0] for each in said[1]}  # a recording is on one side
    assert isinstance(encoder, TranscriptEncoder) and isinstance(encoder.processor, FeatureProcessor)
    for place, text, row in zip(train.places(), said[0], train, strict=True):
        number, part = map(int, text.split())
        assert place.endswith(f"row {number + 1}, segment {part + 1}")
        wave, rate = soundfile.read(tmp_path / f"{number}.flac", dtype="float32")
        wanted, _ = encoder.processor.format.features(soxr.resample(wave[part * rate :][:rate], rate, 16_000))
        np.testing.assert_array_equal(encoder.processor.read(row.pictures)[0], wanted)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (7, r"row 1.*`segments` must be a list of {start, end, text}"),
        ([{"start": 0, "text": "a"}], r"row 1.*`segments` must be a list"),
        (
            [{"start": 0, "end": 1, "text": "a"}, {"start": 2, "end": 1, "text": "a"}],
            "segment 2: begins at 2 s and ends",
        ),
        ([{"start": 0, "end": 1000, "text": "a"}], r"segment 1.*from 0 to 1000 s, and the recording takes 3\.00 s"),
        ([{"start": 0, "end": 2.8, "text": "a"}], r"segment 1.*takes 2\.80 s, more than the 2 s"),
        ([{"start": 0, "end": 1, "text": " "}], "segment 1.*`text` is empty"),
    ],
)
def test_segments_that_are_refused(tmp_path: Path, segments: object, message: str) -> None:
    with pytest.raises(WorkbenchError, match=f"(?s){message}"):
        workbench.check("sft/speech", words(_segmented(tmp_path, segments), "data.ignore=[]"))


PARTS = [
    {"start": 0.1, "end": 0.4, "text": "go"},
    {"start": 0.5, "end": 0.9, "text": " stop "},
    {"start": 1.611, "end": 2.2, "text": "go left"},
]
"""Segments of which a model that hears a second at once hears the first two together."""


def test_times_are_learnt_as_stock_writes_them(tmp_path: Path) -> None:
    model = save_timed_whisper(tmp_path / "model")
    rows = _segmented(tmp_path, PARTS)
    train, backbone, head = read(rows, f"model.id={model}", "audio.timestamps=true", "data.held_out=0.3")
    wanted = {
        "segments 1 to 2": "<|0.10|> go<|0.40|><|0.50|> stop<|0.90|>",
        "segment 3": "<|0.00|> go left<|0.58|>",  # without the silence in front, with which it would be too long
    }
    stock, tokenizer = (
        AutoModelForSpeechSeq2Seq.from_pretrained(model).float().eval(),
        AutoTokenizer.from_pretrained(model),
    )
    assert len(train) == 4
    for number, place in enumerate(train.places()):
        text = wanted[place.rpartition(", ")[2]]
        start, ids = [357, 358, 359], tokenizer(text, add_special_tokens=False).input_ids
        row = train[number]
        assert row.input_ids[row.source :].tolist() == [*start, *ids, 356]
        assert text.replace(" ", "") == "".join(tokenizer.convert_ids_to_tokens(ids)).replace("Ġ", "")
        batch = train.batch(np.asarray([number]))
        with torch.no_grad():
            found = text_run.next_token_loss(backbone, head)(batch, 1 / len(batch.labels_N))
            given = torch.tensor([[*start, *ids]])
            labels = torch.tensor([[*[-100] * (len(start) - 1), *ids, 356]])
            features = batch.inputs["input_features"]
            torch.testing.assert_close(found, stock(features, decoder_input_ids=given, labels=labels).loss)


@pytest.mark.parametrize(
    ("segments", "more", "message"),
    [
        (PARTS[::-1], [], r"segment 2: begins at 0\.5 s, before the segment in front of it ends, at 2\.2 s"),
        ([{**PARTS[0], "text": " "}], [], "segment 1: its `text` is empty"),
        ([], [], "row 1.*has no `segments`, whose times audio.timestamps=true learns"),
        (PARTS, ["model.id=starter/sound"], "model.id=starter/sound has no tokens of times"),
        ([{**PARTS[0], "end": 2.8}], [], r"segment 1.*takes 2\.70 s, more than the 1 s"),
    ],
)
def test_times_that_cannot_be_learnt(tmp_path: Path, segments: object, more: list[str], message: str) -> None:
    own = [f"model.id={save_timed_whisper(tmp_path / 'model')}", "audio.timestamps=true", "data.ignore=[]", *more]
    with pytest.raises(WorkbenchError, match=f"(?s){message}"):
        workbench.check("sft/speech", words(_segmented(tmp_path, segments), *own))


@pytest.mark.slow
def test_a_run_that_learnt_times_writes_them_as_its_merged_model_does(tmp_path: Path) -> None:
    own = [f"model.id={save_timed_whisper(tmp_path / 'model')}", "audio.timestamps=true", "evaluate.max_new_tokens=12"]
    run = _run(_segmented(tmp_path, PARTS), tmp_path / "run", *own)
    table = predict(run, str(tmp_path / "rows.jsonl"), max_new_tokens=12).table
    answers = pd.read_parquet(run / "predictions.parquet")
    merge(run, out=tmp_path / "whole", weights="float32")
    stock = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "whole").float().eval()
    extractor, tokenizer = (each.from_pretrained(tmp_path / "whole") for each in (AutoFeatureExtractor, AutoTokenizer))
    asked = {"return_timestamps": True, "max_new_tokens": 12}
    for number, found in enumerate(table["segments"]):
        wave = _wave(tmp_path / f"{number}.flac")
        long = extractor(wave, sampling_rate=16_000, return_tensors="pt", truncation=False, padding="longest")
        segments = stock.generate(**long, **asked, return_segments=True)["segments"][0]
        wanted = [
            (float(each["start"]), tokenizer.decode(each["tokens"], skip_special_tokens=True).strip())
            for each in segments
        ]
        wanted = [(start, text) for start, text in wanted if text]
        assert [(part["start"], part["text"]) for part in found] == [
            (pytest.approx(start, abs=0.01), text) for start, text in wanted
        ]
        assert "".join(text for _, text in wanted).replace(" ", "") == table["answer"][number].replace(" ", "")
    for _, answer in answers.iterrows():
        number, part = (int(each.split()[-1 if "row" in each else 1]) for each in answer["row"].split(", ")[1:])
        begin, end = [(0.0, 0.9), (1.611, 2.2)][part > 2]
        cut = soundfile.read(tmp_path / f"{number - 1}.flac", dtype="float32")[0][
            round(begin * 8000) : round(end * 8000)
        ]
        features = extractor(soxr.resample(cut, 8000, 16_000), sampling_rate=16_000, return_tensors="pt")
        once = stock.generate(**features, **asked, force_unique_generate_call=True)
        assert tokenizer.decode(once[0], skip_special_tokens=True).strip() == answer["after"]


def _run(rows: Path, out: Path, *more: str, resume: bool = False) -> Path:
    steps = ["train.epochs=null", "train.steps=4", "data.ignore=[]", "save.every=1"]
    return workbench.run("sft/speech", words(rows, CHANGES, *steps, *more), out=out, resume=resume, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["whisper", "moonshine"])
def test_a_run_is_resumed_bit_by_bit_and_ships_a_stock_model(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    moonshine = family == "moonshine"
    own = [f"model.id={save_moonshine(tmp_path / family)}", "audio.max_seconds=1"] if moonshine else []
    straight = _run(rows, tmp_path / "straight", *own)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            _run(rows, tmp_path / "stopped", *own)
    stopped = _run(rows, tmp_path / "stopped", *own, resume=True)
    assert read_losses(stopped) == read_losses(straight)
    scores = read_scores(straight)
    assert {"loss", "wer", "cer", "wer_low"} <= scores["before"].keys() & scores["after"].keys()
    assert read_scores(stopped)["after"] == scores["after"]
    played = pd.read_parquet(straight / "pictures.parquet")
    assert (straight / "report.html").read_text().count("<audio") == len(played) == 4 == played["row"].nunique()
    assert played["sound"].str.len().gt(300).all() and played["jpeg"].str.len().gt(300).all()
    for tokens in () if moonshine else (120, 350):
        parts = _run(rows, tmp_path / f"parts{tokens}", *own, f"batch.tokens_per_device={tokens}")
        np.testing.assert_allclose(read_losses(parts), read_losses(straight), rtol=1e-4)

    table = predict(straight, str(rows), out=tmp_path / "p.csv", max_new_tokens=6).table
    assert len(table) == 24 and table["answer"].str.len().gt(0).any()
    one = predict(straight, str(rows.parent / "3.wav"), max_new_tokens=6).table
    assert one["answer"].tolist() == table["answer"].tolist()[3:4]
    soundfile.write(tmp_path / "long.wav", tone(500, seconds=5), 8000)
    heard: list[str] = []
    long = workbench.generate(straight, str(tmp_path / "long.wav"), max_new_tokens=6, write=heard.append)
    assert heard == [long] == predict(straight, str(tmp_path / "long.wav"), max_new_tokens=6).table["answer"].tolist()
    assert workbench.generate(straight, str(rows.parent / "3.wav"), max_new_tokens=6) == one["answer"][0]
    for wrong, message in (("hello", "'hello' is no file"), (str(rows.parent), "is a folder.*workbench predict")):
        with pytest.raises(WorkbenchError, match=message):
            workbench.generate(straight, wrong)
    with pytest.raises(WorkbenchError, match=r"in place of a prompt\. Leave --picture out"):
        workbench.generate(straight, str(rows.parent / "3.wav"), pictures=["a.png"])
    with pytest.raises(WorkbenchError, match=r"asks with texts.*workbench generate .* transcribes one"):
        workbench.load_run(straight)

    merge(straight, out=tmp_path / "whole", weights="float32")
    stock = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "whole").float().eval()
    extractor = AutoFeatureExtractor.from_pretrained(tmp_path / "whole")
    filled = {"padding": "max_length", "max_length": 16_000} if moonshine else {}
    features = extractor(_wave(rows.parent / "3.wav"), sampling_rate=16_000, return_tensors="pt", **filled)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    said = tokenizer.batch_decode(stock.generate(**features, max_new_tokens=6), skip_special_tokens=True)
    assert [each.strip() for each in said] == one["answer"].tolist()
    backbone = AutoModelForSpeechSeq2Seq.from_pretrained(own[0][9:] if own else starter.resolve("starter/sound"))
    adapted = PeftModel.from_pretrained(backbone.float().eval(), str(straight / "adapter"))
    given = features | {"decoder_input_ids": torch.tensor([[357, 300, 301]])}
    torch.testing.assert_close(adapted(**given).logits, stock(**given).logits, atol=1e-4, rtol=1e-4)
    with adapted.disable_adapter():
        assert not torch.allclose(adapted(**given).logits, stock(**given).logits, atol=1e-3)
