"""Recipe sft over recordings: the stock model's loss, any micro-batch, resume, merge, transcripts, and mistakes."""

from __future__ import annotations

import itertools
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
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

import workbench
from tests.run_files import read_losses, read_scores
from tests.sound_backbones import record, save_sound, tone
from tests.stopping import stop_after
from workbench.config import model_heads
from workbench.data import starter
from workbench.data.text import tokenized
from workbench.data.text.transcripts import TranscriptEncoder
from workbench.errors import Stopped, WorkbenchError
from workbench.evaluation import transcript_scores
from workbench.models import backbones, output_heads
from workbench.models.sound_processor import FeatureProcessor
from workbench.recipes.load import load
from workbench.recipes.tasks.sft import text_run
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.merge import merge

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


def test_the_loss_is_that_of_the_stock_model_and_processor(rows: Path) -> None:
    train, model, head = read(rows)
    batch = train.batch(np.arange(9))
    found = text_run.next_token_loss(model, head)(batch, 1 / len(batch.labels_N))

    folder = starter.resolve("starter/sound")
    processor, stock = AutoProcessor.from_pretrained(folder), AutoModelForSpeechSeq2Seq.from_pretrained(folder).float()
    numbers = [int(train.place(number).rpartition("row ")[2].split()[0]) - 1 for number in range(9)]
    chosen = pd.read_csv(rows).iloc[numbers]
    waves = [_wave(rows.parent / each) for each in chosen["audio"]]
    features = processor(audio=waves, sampling_rate=16_000, return_tensors="pt").input_features
    text = processor.tokenizer(chosen["text"].tolist(), padding=True, return_tensors="pt")
    labels = text.input_ids.masked_fill(text.attention_mask == 0, -100)[:, 1:]
    labels[:, :3] = -100  # language, task and no timestamps are given
    wanted = stock.eval()(input_features=features, decoder_input_ids=text.input_ids[:, :-1], labels=labels).loss
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


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


def _run(rows: Path, out: Path, *more: str, resume: bool = False) -> Path:
    steps = ["train.epochs=null", "train.steps=4", "data.ignore=[]", "save.every=1"]
    return workbench.run("sft/speech", words(rows, CHANGES, *steps, *more), out=out, resume=resume, quiet=True)


@pytest.mark.slow
def test_a_run_is_resumed_bit_by_bit_and_ships_a_stock_model(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = _run(rows, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            _run(rows, tmp_path / "stopped")
    stopped = _run(rows, tmp_path / "stopped", resume=True)
    assert read_losses(stopped) == read_losses(straight)
    scores = read_scores(straight)
    assert {"loss", "wer", "cer", "wer_low"} <= scores["before"].keys() & scores["after"].keys()
    assert read_scores(stopped)["after"] == scores["after"]
    parts = _run(rows, tmp_path / "parts", "batch.tokens_per_device=120")
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
    with pytest.raises(WorkbenchError, match=r"sees no pictures\. Leave --picture out"):
        workbench.generate(straight, str(rows.parent / "3.wav"), pictures=["a.png"])
    with pytest.raises(WorkbenchError, match=r"asks with texts.*workbench generate .* transcribes one"):
        workbench.load_run(straight)

    merge(straight, out=tmp_path / "whole", weights="float32")
    stock = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "whole").float().eval()
    processor = AutoProcessor.from_pretrained(tmp_path / "whole")
    features = processor(audio=_wave(rows.parent / "3.wav"), sampling_rate=16_000, return_tensors="pt").input_features
    said = processor.batch_decode(stock.generate(features, max_new_tokens=6), skip_special_tokens=True)
    assert [each.strip() for each in said] == one["answer"].tolist()
