"""A mistake in a configuration is told before torch is imported, and an unreachable hub within seconds."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

VERBS = ("check", "plan", "data", "lr", "features", "distill-cache")
MISTAKES = {
    "adapter.rnk=3": "adapter.rnk: unknown key",
    "batch.size=0": "expected greater than 0, found 0",
    "model.batch_norm=trained": "Write model.batch_norm=frozen",
    "model.id=/no/folder": "no folder /no/folder",
    "model.id=lonely": "lonely is an adapter (LORA of PEFT), not a backbone. Write model.id=base",
    "model.id=finished": "finished is a run directory, not a backbone. Write model.id=starter",
    "model.id=finished/adapter": "is the adapter of the run finished, not a backbone. Write model.id=starter",
    "model.id=starter model.revision=v2": "Leave model.revision out",
    "data.train=rws.jsonl": "Did you mean `rows.jsonl`?",
    "data.test=no/rows.jsonl": "the folder no does not exist either",
    "data.held_out.a=rws.jsonl": "Did you mean `rows.jsonl`?",
    "data.sources.a.path=rows.jsonl data.sources.b.path=rws.jsonl": "Did you mean `rows.jsonl`?",
    "data.decontaminate.action=drop data.decontaminate.against=[rws.jsonl]": "Did you mean `rows.jsonl`?",
    "data.train=nobody/nothing": "HF_HUB_OFFLINE is set",
    "model.id=nobody/nothing": "the hub cannot be reached",
}
FORKS = """
import json, os, sys
from importlib.abc import MetaPathFinder
import workbench.cli.verbs as verbs

class Refused(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "peft", "datasets"):
            os.write(2, f"imports {name}".encode())
            os._exit(99)

sys.meta_path.insert(0, Refused())
for words in json.load(sys.stdin):
    reading, writing = os.pipe()
    if not os.fork():
        os.dup2(writing, 2)
        sys.argv = ["workbench", *words]
        try:
            verbs.main()
        except SystemExit as ended:
            sys.stderr.flush()
            os._exit(ended.code)
        os._exit(1)
    os.close(writing)
    with open(reading) as said:
        told = said.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.wait()[1]), told]), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands run: rows, an adapter without its run, and a run."""
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    for name in ("lonely", "finished/adapter"):
        (tmp_path / name).mkdir(parents=True)
        saved = {"peft_type": "LORA", "base_model_name_or_path": "base"}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(saved))
    (tmp_path / "finished/config.yaml").write_text("recipe: sft\nmodel: {id: starter}\n")
    return tmp_path


@pytest.mark.slow
def test_a_mistake_is_told_before_torch_is_imported(folder: Path) -> None:
    """Every verb that reads a recipe; importing torch ends the process."""
    tried = [("run", words) for words in MISTAKES] + [(verb, "batch.size=0") for verb in VERBS]
    commands = [[verb, "sft/quickstart", *words.split()] for verb, words in tried]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], input=json.dumps(commands), cwd=folder, env=environment, **_READ
    )
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(answers) == len(commands), ended.stderr
    for command, (status, told) in zip(commands, answers, strict=True):
        assert status == 2 and MISTAKES[" ".join(command[2:])] in " ".join(told.split()), (command, told)


_READ = {"capture_output": True, "text": True, "timeout": 300}


@pytest.fixture(params=["refuses", "silent", "no such host", "bad gateway"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a hub that cannot be reached, in four ways."""
    if request.param == "no such host":
        yield "http://hub.invalid"
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        if request.param == "bad gateway":
            answer = "HTTP/1.1 502 Bad Gateway\\r\\nContent-Length: 0\\r\\n\\r\\n"
            code = f"while True: c = s.accept()[0]; c.recv(999); c.send(b'{answer}'); c.close()"
            serving = [sys.executable, "-c", f"import socket; s = socket.socket(fileno={listening.fileno()})\n{code}"]
            with subprocess.Popen(serving, pass_fds=[listening.fileno()]) as server:
                yield address
                server.kill()
            return
        if request.param == "refuses":
            listening.close()
        yield address


@pytest.mark.slow
@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("words", ["model.id=nobody/nothing", "data.train=nobody/nothing"])
def test_an_unreachable_hub_is_told_in_ten_seconds(words: str, endpoint: str, folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GOMP"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "workbench.cli.verbs", *shlex.split(f"check sft/quickstart {words}")]
    began = time.monotonic()
    ended = subprocess.run(command, cwd=folder, env=environment, **_READ)
    assert ended.returncode == 2 and "hub cannot be reached" in ended.stderr and ended.stderr.count("\n") == 1
    assert time.monotonic() - began < 10
