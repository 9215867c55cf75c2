"""A teacher at an address: failures that pass, nonsense, reasoning, keys, and a command that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests import forked
from tests.fake_teacher import FakeServer, answered, server
from tests.run_files import read_lines, write_lines
from tests.scripts.shown_commands import ROOT, blocks
from tests.workbench.evaluation.serving.test_openai_client import Process
from workbench.cli.verbs import app
from workbench.config import DataConfig, ModelConfig
from workbench.data.text import formats
from workbench.data.text.chat import ChatEncoder
from workbench.errors import BackboneError, ConfigError, DataError
from workbench.models import backbones
from workbench.recipes.single.sampled_answers import SampledRows, as_learnt
from workbench.recipes.verbs.sample import sample
from workbench.runs import openai_client

__all__ = ["server"]
SECRET = "sk-a+very=secret/key"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(openai_client, "WAITS", (0.0,) * 7)
    return write_lines(tmp_path / "asked.jsonl", ({"question": f"What comes after {n}?"} for n in range(6)))


def write(server: FakeServer, asked: Path, out: str = "out.jsonl", **settings: Any) -> SampledRows:
    given: dict[str, Any] = {"model": "teacher", "n": 2, "to": "accepted", **settings}
    return sample(server.url, str(asked), out=asked.parent / out, **given)


def _dripping(handler: Any) -> Any:
    """Send a piece of a response now and then, so that none is late and there is no end."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(20):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            threading.Event().wait(0.05)
    return handler


def test_a_server_is_sent_the_pictures_of_prompts(server: FakeServer, asked: Path) -> None:
    Image.new("RGB", (9, 9), "red").save(asked.parent / "red.png")
    write_lines(asked, [{"question": "What comes <image> after 3?", "image": "red.png"}])
    write(server, asked, to="all", n=1)
    first, picture, last = server.asked[0]["messages"][0]["content"]
    assert (first["text"], last["text"]) == ("What comes ", " after 3?")
    kind, _, data = picture["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64" and b64decode(data) == (asked.parent / "red.png").read_bytes()
    (row,) = read_lines(asked.parent / "out.jsonl")
    assert row["messages"][0]["content"][1]["image_url"]["url"] == str((asked.parent / "red.png").resolve())
    (asked.parent / "red.png").unlink()
    with pytest.raises(DataError, match=r"asked.jsonl, row 1: .*red.png does not exist"):
        write(server, asked, "again.jsonl", to="all", n=1)


def test_failures_that_pass_leave_the_same_file(
    server: FakeServer, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    whole = write(server, asked, "whole.jsonl", price=(1.0, 10.0))
    assert (whole.rows, whole.answers, whole.finished, whole.reward) == (12, 12, 1.0, None)
    assert whole.tokens == (120, 36) and whole.cost == pytest.approx((120 + 360) / 1e6) and not whole.left_out
    server.asked.clear()

    def behave(number: int, time_: int, handler: Any) -> Any:
        if number == 0 and time_ == 0:
            return handler.say({"error": {"message": "slowly"}}, 429, Retry_After="3")
        if number == 1 and time_ < 3:
            return handler.say(b"<html>", (500, 502, 529)[time_])
        if number == 2 and time_ == 0:
            handler.connection.close()
            return handler
        if number == 3 and time_ == 0:
            threading.Event().wait(0.6)
            return handler
        if number == 4 and time_ == 0:
            return _dripping(handler)
        if number == 5 and "max_tokens" in handler.server.asked[-1] and time_ == 0:
            return handler.say({"error": "max_tokens is unsupported: use max_completion_tokens"}, 400)
        return None

    server.behave = behave
    write(server, asked, timeout=0.3)
    assert (asked.parent / "out.jsonl").read_bytes() == (asked.parent / "whole.jsonl").read_bytes()
    assert 3.0 in waits and len(server.asked) == 12 + 1 + 3 + 1 + 1 + 1 + 1


def test_a_server_that_wants_to_be_left_alone_for_long_ends_the_command(server: FakeServer, asked: Path) -> None:
    server.behave = lambda number, time, handler: (
        handler.say({"error": "no more today"}, 429, Retry_After="7200") if number == 5 else None
    )
    with pytest.raises(BackboneError, match=r"left alone for 7,200 s.*kept for the same command.*asked.jsonl, row 6"):
        write(server, asked, at_once=1)
    count = len(server.asked)
    server.behave = lambda number, time, handler: None
    assert write(server, asked).rows == 12 and len(server.asked) == count + 2  # what was there is not asked for again


def test_dates_of_retry_after_are_read() -> None:
    request = httpx2.Request("GET", "http://a/v1")
    for value, least, most in [
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0, 0),
        ("Fri, 31 Dec 2999 23:59:59 GMT", 1e9, 1e12),
        ("soon", 0, 0),
        ("", 0, 0),
        ("12", 12, 12),
    ]:
        response = httpx2.Response(429, headers={"Retry-After": value}, request=request)
        assert least <= openai_client.seconds_asked(response) <= most, value


NONSENSE = {
    "is no JSON": b"<html>busy</html>",
    "is no JSON object": [1, 2],
    "is no JSON ": b"[" * 200_000,
    "has no choices": {"choices": []},
    "has no choices ": {"choices": "none"},
    "has no choices  ": {"choices": [None], "usage": "many"},
    "has no message": {"choices": [{"message": "hello"}]},
    "is no text": {"choices": [{"message": {"content": 12}, "finish_reason": "stop"}]},
    "is no text ": {"choices": [{"message": {"content": [{"type": "text"}]}}]},
    "is no text  ": {"choices": [{"message": {"content": "\ud800"}, "finish_reason": "stop"}]},
    "is empty": {"choices": [{"message": {"content": None}}]},
    "is empty, and calls a tool": {"choices": [{"message": {"content": "", "tool_calls": [{"id": "1"}]}}]},
}


def test_nonsense_is_named_and_counted_and_never_written(server: FakeServer, asked: Path) -> None:
    bodies = list(NONSENSE.values())
    write_lines(asked, ({"question": f"What comes after {n}?"} for n in range(len(bodies) + 2)))
    said = dict(enumerate(bodies))
    server.behave = lambda number, time, handler: (
        handler.say({"error": "too long"}, 400) if number == len(said) else said.get(number)
    )
    found = write(server, asked, n=1)
    (row,) = read_lines(asked.parent / "out.jsonl")
    assert row["messages"][0]["content"] == f"What comes after {len(bodies) + 1}?" and found.rows == found.answers == 1
    expected = [f"the server's answer {why.rstrip()}" for why in NONSENSE] + ["status 400: too long"]
    assert found.left_out == [f"asked.jsonl, row {n + 1}, answer 1: {why}" for n, why in enumerate(expected)]
    assert found.tokens is None  # not counted of every answer


@pytest.mark.parametrize("body", NONSENSE.values(), ids=NONSENSE)
def test_a_server_that_answers_nothing_but_nonsense_is_refused(server: FakeServer, asked: Path, body: Any) -> None:
    server.behave = lambda number, time, handler: body
    with pytest.raises(ConfigError, match=r"none of \d+ answers can be used. asked.jsonl, row 1: .*Write the address"):
        write(server, asked)
    assert [path.name for path in asked.parent.iterdir()] == ["asked.jsonl"] and len(server.asked) <= 12


def test_answers_that_are_cut_are_left_out(server: FakeServer, asked: Path) -> None:
    def behave(number: int, time: int, handler: Any) -> Any:
        said = answered(number, 0)
        said["choices"][0]["finish_reason"] = "length" if number else "stop"
        return said

    server.behave = behave
    assert write(server, asked).rows == 1  # of two equal ones one


@pytest.mark.parametrize(
    "message",
    [
        {"content": "7", "reasoning_content": "6 and 1"},
        {"content": "7", "reasoning": "6 and 1\n"},
        {"content": "<think>\n6 and 1\n</think>\n\n7"},
        {"content": "6 and 1</think>7"},
    ],
    ids=["reasoning_content", "reasoning", "tags", "opened in the prompt"],
)
def test_reasoning_is_kept_as_templates_write_it(
    server: FakeServer, asked: Path, message: dict[str, str], tmp_path: Path
) -> None:
    server.behave = lambda number, time, handler: answered(number, 0, **message)
    write(server, asked, n=1)
    (example, *_) = formats.read(str(tmp_path / "out.jsonl"), DataConfig(train="x"), skipped=[])
    assert example.messages[-1]["content"] == "<think>\n6 and 1\n</think>\n\n7"
    tokenizer = backbones.tokenizer(ModelConfig(id="starter"))
    (whole,) = ChatEncoder(tokenizer).expanded(example, loss_on="assistant")
    encoded = ChatEncoder(tokenizer).encode(whole, loss_on="assistant")
    pairs = zip(encoded.input_ids, encoded.supervised, strict=True)
    learnt = str(tokenizer.decode([token for token, own in pairs if own]))
    assert learnt.startswith("<think>\n6 and 1\n</think>\n") and "7" in learnt


def test_text_without_reasoning_is_only_stripped() -> None:
    assert as_learnt(" a < b ") == "a < b" and as_learnt("<think>\n\n</think>\n\nb") == "<think>\n\n</think>\n\nb"


def test_likelihoods_are_those_that_the_server_tells(server: FakeServer, asked: Path) -> None:
    def behave(number: int, time: int, handler: Any) -> Any:
        assert handler.server.asked[-1]["logprobs"] is True
        said = answered(number, 0)
        said["choices"][0]["logprobs"] = {"content": [{"logprob": -1.0 - number}, {"logprob": -3.0}]}
        return said

    server.behave = behave
    write(server, asked, n=1, to="all", score=["likelihood"], wording=["{prompt}", "So? {prompt}"])
    rows = read_lines(asked.parent / "out.jsonl")
    assert [row["reward"] for row in rows] == [-2 - number / 2 for number in range(6) for _ in range(2)]
    assert sorted(each["messages"][0]["content"][:4] for each in server.asked) == ["So? "] * 6 + ["What"] * 6
    assert rows[1]["messages"][0]["content"] == "What comes after 0?" and rows[1]["wording"] == "So? {prompt}"
    for logprobs in (None, {}, {"content": []}, {"content": [{}]}, {"token_logprobs": [None]}, [1], {"content": 1}):
        said = answered(0, 0)
        said["choices"][0]["logprobs"] = logprobs
        server.behave = lambda number, time, handler, said=said: said
        with pytest.raises(ConfigError, match=r"does not say how likely an answer is: .*score by vote instead"):
            write(server, asked, "none.jsonl", to="best", score=["likelihood"])
    server.behave = lambda number, time, handler: handler.say({"error": "logprobs are not supported"}, 400)
    with pytest.raises(ConfigError, match=r"not say how likely an answer is: logprobs are not supported"):
        write(server, asked, "none.jsonl", to="best", score=["likelihood"])


def test_the_key_stands_nowhere(server: FakeServer, asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f" {SECRET}\n")
    told: list[str] = []
    for status in (401, 404, 400, 500):

        def behave(number: int, time: int, handler: Any, status: int = status) -> Any:
            return handler.say({"error": {"message": f"bad key: {handler.headers['Authorization']}"}}, status)

        server.behave = behave
        with pytest.raises((ConfigError, BackboneError)) as error:
            write(server, asked, retries=0)
        told.append(str(error.value))
    assert all("***" in each for each in told) and not any(SECRET in each for each in told), told
    assert "Set OPENAI_API_KEY" in told[0]
    server.behave = lambda number, time, handler: None
    write(server, asked)
    assert not any(SECRET in path.read_text() for path in asked.parent.iterdir())
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\nX: y")
    with pytest.raises(ConfigError, match="no request can carry") as error:
        write(server, asked, "other.jsonl")
    assert SECRET not in str(error.value)


def test_servers_that_list_no_models_are_asked(server: FakeServer, asked: Path) -> None:
    for models in ({"data": None}, {}, {"data": ["teacher", {"id": 1}]}):
        server.models = models
        with pytest.raises(ConfigError, match="--model=teacher is no model"):
            write(server, asked)
    assert not server.asked


@pytest.mark.slow
def test_a_served_run_teaches_and_a_killed_command_goes_on_equally(trained: Path, tmp_path: Path) -> None:
    """`workbench serve RUN` answers, and the command is killed with SIGKILL once some answers are on disk."""
    asked = write_lines(tmp_path / "asked.jsonl", ({"question": f"What comes after {n}?"} for n in range(16)))
    served = Process([trained])
    command = [forked.python(), "-m", "workbench.cli", "sample", f"{served.address}/v1", str(asked), "--out"]
    options = ["--model", trained.name, "--n", "3", "--to", "all", "--max-new-tokens", "24"]
    environment = {**os.environ, "OPENAI_API_KEY": "sesame", "OMP_NUM_THREADS": "1"}
    try:
        subprocess.run([*command, tmp_path / "whole.jsonl", *options], check=True, env=environment, capture_output=True)
        killed = subprocess.Popen([*command, tmp_path / "again.jsonl", *options], env=environment)
        progress = tmp_path / ".again.jsonl.unfinished.jsonl"
        while not progress.exists() or progress.read_bytes().count(b"\n") < 12:
            assert killed.poll() is None
            time.sleep(0.01)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert not (tmp_path / "again.jsonl").exists() and progress.read_bytes().count(b"\n") < 48
        subprocess.run([*command, tmp_path / "again.jsonl", *options], check=True, env=environment, capture_output=True)
    finally:
        served.process.kill()
        served.process.communicate()
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(read_lines(tmp_path / "again.jsonl")) == 48 and not progress.exists()


@pytest.mark.slow
def test_the_page_s_commands_run(
    server: FakeServer, asked: Path, short_stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [
        each for each in blocks(ROOT / "recipes" / "verbs" / "sample.md") if each.run_by.endswith(Path(__file__).name)
    ]
    monkeypatch.chdir(asked.parent)
    changes = {"prompts.jsonl": asked.name, "NAME": "teacher", "http://127.0.0.1:8000/v1": server.url}
    tiny = [f"model.id={short_stories}", "train.steps=2", "train.epochs=null", "data.held_out=0.3", "batch.size=2"]
    for line, more in zip(block.text.splitlines(), ([], [*tiny, "evaluate.answers=0"]), strict=True):
        done = CliRunner().invoke(app, [*(changes.get(word, word) for word in line.split()[1:]), *more])
        assert done.exit_code == 0, (done.output, done.exception)
    assert len(read_lines(Path("served.jsonl"))) == 24 and Path("runs/sft-quickstart/scores.json").is_file()


def test_a_stock_model_teaches(asked: Path, tmp_path: Path) -> None:
    found = sample("starter", str(asked), out=tmp_path / "out.jsonl", to="all", n=2, max_new_tokens=3)
    assert found.answers == 12 and len(read_lines(tmp_path / "out.jsonl")) == 12
