"""The addresses of the page: what they say of runs, and whom they refuse."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from tests.workbench.cli.ui.made_runs import HOSTILE, TOKEN, asked, log, make_run, served, write_layers, write_samples
from workbench.cli.ui import server
from workbench.cli.ui.job_queue import JobQueue, state_folder
from workbench.cli.ui.run_folder import RunFolder
from workbench.cli.ui.server import STATIC, Access, EventSource, Page, Watched
from workbench.errors import ConfigError
from workbench.evaluation import held_out_losses
from workbench.runs import evaluation_request

PERMITTED = {"Authorization": f"Bearer {TOKEN}"}
WRITING = ["form/mistakes", "form/check", "form/plan", "form/start", "runs/first/resume", "runs/first/evaluate"]
WRITING += ["form/data", "form/file", "runs/first/notes"]
WRITING += ["jobs/1/stop", "chat/open", "chat/close", "chat/completions"]


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    """Without its context no command of the queue starts."""
    page = Page(folder, Access(TOKEN))
    yield TestClient(page.app, base_url="http://127.0.0.1:8765")
    page.close()


@pytest.fixture
def events(folder: Path) -> Iterator[Any]:
    queue = JobQueue(folder)

    def opened(curves: list[tuple[str, str]], positions: dict[str, str] | None = None) -> EventSource:
        return EventSource(RunFolder(folder), queue, Watched(curves), lambda: False, positions or {})

    yield opened
    queue.close()


def _read(events: list[str]) -> list[tuple[str, Any, Any]]:
    """Event, data and id."""
    lines = [dict(line.split(": ", 1) for line in each.strip().split("\n")) for each in events]
    return [(each["event"], json.loads(each["data"]), json.loads(each["id"])) for each in lines]


def test_runs_and_their_facts(client: TestClient, folder: Path) -> None:
    found = client.get("/api/runs/first").json()
    assert (found["status"], found["recipe"], found["method"], found["step"]) == ("done", "sft", "lora", 60)
    assert found["scores"]["after"]["loss"] == 2.2 and found["curves"] == [""]
    assert client.get("/api/runs/none").status_code == 404
    differing = client.get("/api/differences?run=first&run=second").json()
    assert differing == [["train.learning_rate", ["0.0006000000000000001", "0.0007"]]]
    assert client.get("/api/runs/first/tables/predictions").json()["of"] == 1
    assert client.get("/api/runs/first/tables/scores").status_code == 404


@pytest.mark.parametrize("tasks,shown", [(None, []), ("x", []), ({"rows": [{"task": "sums"}]}, [{"task": "sums"}])])
def test_tasks_are_no_column_of_the_scores(client: TestClient, folder: Path, tasks: Any, shown: Any) -> None:
    path = folder / "first" / "scores.json"
    path.write_text(json.dumps({"before": {"loss": 2.0}, "after": {"loss": 1.0}, "tasks": tasks}))
    page = client.get("/api/runs/first").json()
    assert [*page["scores"]] == ["before", "after"] and page["tasks"] == shown


@pytest.mark.parametrize("name", ["%2e%2e%2f..", "..%2f..", "first%2f..%2fsecond", ".queue", "%00"])
def test_no_name_leads_out_of_the_folder(client: TestClient, name: str) -> None:
    for path in (f"/api/runs/{name}", f"/runs/{name}/report.html", f"/static/{name}", f"/api/recipes/{name}"):
        assert client.get(path).status_code in (404, 405), path


def test_a_run_whose_process_was_killed_is_interrupted(folder: Path) -> None:
    path = make_run(folder, "third", steps=30, status="running")
    assert RunFolder(folder).summary("third")["status"] == "interrupted"
    with (path / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = RunFolder(folder).summary("third")
    assert found["status"] == "running" and found["left_s"] == pytest.approx((200 - 30) * 0.5)


def test_a_run_that_trains_is_asked_and_one_that_has_ended_gets_a_job(client: TestClient, folder: Path) -> None:
    path = make_run(folder, "living", steps=30, status="running")
    with (path / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert client.post("/api/runs/living/evaluate", headers=PERMITTED).json() == {"asked": True}
        assert evaluation_request.is_open(path)
        (path / "config.yaml").write_text("recipe: crossval\n")
        evaluation_request.withdrawn(path)
        refused = client.post("/api/runs/living/evaluate", headers=PERMITTED)
        assert refused.status_code == 422 and "evaluate.every" in refused.json()["error"]
        assert client.get("/api/runs/living").json()["refuses_request"] == refused.json()["error"]
    assert not evaluation_request.is_open(path)
    ended = client.post("/api/runs/living/evaluate", headers=PERMITTED)
    assert ended.status_code == 422 and "no adapter yet" in ended.json()["error"]


def test_samples_and_layers_are_read_again_where_they_have_changed(folder: Path, events: Any) -> None:
    source = events([("first", "")])
    assert "files" not in [event for event, *_ in _read(source.news())]
    write_samples(folder / "first", steps=[0], prompts=[HOSTILE])
    write_layers(folder / "first", changes=[(0, "111")])
    ((event, data, _),) = _read(source.news())
    assert event == "files" and set(data) == {"run", "samples", "layers"}
    assert source.news() == []
    evaluation_request.ask(folder / "first", {"recipe": "sft"})
    ((_, data, _),) = _read(source.news())
    assert data["asked"]


def test_samples_and_layers_have_addresses(client: TestClient, folder: Path) -> None:
    write_samples(folder / "first", steps=[0], prompts=[HOSTILE])
    write_layers(folder / "first", changes=[(0, "111")])
    assert client.get("/api/runs/first/samples").json()[0]["prompt"] == HOSTILE
    assert client.get("/api/runs/first/layers").json()["changes"] == [[0, "111"]]
    assert client.get("/api/runs/none/samples").status_code == client.get("/api/runs/none/layers").status_code == 404


@pytest.mark.parametrize(
    ("evaluate", "says"),
    [
        ("{every: 0.25, samples: 0}", "evaluate.samples=3"),
        ("{every: null, samples: 3}", "evaluate.every=null"),
        ("{every: 0.25, samples: 3}", None),
        ("{every: 0.25}", None),
    ],
)
def test_a_run_without_sample_answers_says_what_to_write(folder: Path, evaluate: str, says: str | None) -> None:
    with (folder / "first" / "config.yaml").open("a") as file:
        file.write(f"evaluate: {evaluate}\n")
    found = RunFolder(folder).page("first")["no_samples"]
    assert found is None if says is None else says in found


def test_a_list_reads_again_only_what_has_changed(folder: Path) -> None:
    runs = RunFolder(folder)
    before = runs.summaries()
    assert all(one is other for one, other in zip(before, runs.summaries(), strict=True))
    (folder / "first" / "scores.json").write_text(json.dumps({"after": {"loss": 1.25}}))
    changed = {run["name"]: run["after"] for run in runs.summaries()}
    assert changed == {"first": 1.25, "second": 2.2}


def test_members_have_curves_of_their_own(events: Any, folder: Path) -> None:
    path = make_run(folder, "folds", steps=0)
    (path / "metrics.jsonl").unlink()
    for fold, steps in enumerate((30, 50)):
        member = path / "members" / "round-0" / f"fold-{fold}"
        member.mkdir(parents=True)
        log(member, 1, steps)
    curves = [f"members/round-0/fold-{fold}" for fold in range(2)]
    assert RunFolder(folder).curves("folds") == curves and RunFolder(folder).summary("folds")["step"] == 50
    rows = [data for event, data, _ in _read(events([("folds", curve) for curve in curves]).news()) if event == "rows"]
    assert [len(each["columns"]["step"]) for each in rows] == [30, 50]


def test_events_go_on_where_a_page_was_cut_off(events: Any, folder: Path) -> None:
    source = events([("first", "")])
    kinds = [event for event, _, _ in _read(source.news())]
    assert kinds == ["runs", "jobs", "trouble", "rows"] and not source.news()
    log(folder / "first", 61, 63)
    *_, (event, data, position) = _read(source.news())
    assert (event, data["goes_on"], data["columns"]["step"]) == ("rows", True, [61, 62, 63])
    log(folder / "first", 64, 65)
    again = _read(events([("first", "")], position).news())[-1]
    assert again[1]["goes_on"] and again[1]["columns"]["step"] == [64, 65]
    assert events([("first", "../second"), ("..", "")]).news()[3:] == []  # no such curves


@pytest.mark.slow
def test_runs_are_compared_row_by_row_in_a_process_of_their_own(client: TestClient, folder: Path) -> None:
    columns = {"row": ["a", "b", "c"], "tokens": [2, 3, 4], "labels": [1, 2, 3]}
    for name, losses in {"first": [1.0, 2.0, 3.0], "second": [1.5, 2.0, 4.0]}.items():
        table = pa.table({**columns, "loss": losses}, schema=held_out_losses._SCHEMA)
        pq.write_table(table, folder / name / held_out_losses.FILE)
        (folder / name / "predictions.parquet").unlink()
    told = client.get("/api/paired?run=first&run=second").json()
    table, note = told["parts"]
    assert table["head"][1] == "score" and note["text"].startswith("The same held-out rows of both runs")
    assert table["rows"][0][:6] == ["second", "loss", "3", "0.6667", "0.8333", "+0.1667"]
    pq.write_table(pa.table(columns), folder / "second" / held_out_losses.FILE)
    assert "second" in client.get("/api/paired?run=first&run=second").json()["error"]
    assert client.get("/api/paired?run=first").status_code == 400
    assert client.get("/api/paired?run=first&run=..").status_code == 404


def test_the_log_of_a_run_comes_wherever_it_was_started(events: Any, folder: Path) -> None:
    log_file = folder / "first" / "log.txt"
    log_file.write_text("step 1\n")
    assert [RunFolder(folder).summary(name)["log"] for name in ("first", "second")] == [True, False]
    source: EventSource = events([])
    source.watched = Watched(run="first")
    assert _read(source.news())[-1][:2] == ("log", {"text": "step 1\n", "goes_on": False}) and not source.news()
    with log_file.open("a") as file:
        file.write("step 2\n")
    *_, (event, data, position) = _read(source.news())
    assert (event, data) == ("log", {"text": "step 2\n", "goes_on": True})
    log_file.rename(folder / "first" / "aside")
    log_file.write_text("(older lines were dropped)\nstep 2\nstep 3\n")  # longer, and another file
    again: EventSource = events([], position)
    again.watched = Watched(run="first")
    assert _read(again.news())[-1][1] == {"text": log_file.read_text(), "goes_on": False}
    again.watched = Watched(run="..")
    assert not again.news()


def test_only_those_with_the_token_write(client: TestClient) -> None:
    for path in WRITING:
        assert client.post(f"/api/{path}", json={}).status_code == 401, path
        wrong = client.post(f"/api/{path}", json={}, headers={"Authorization": "Bearer x"})
        assert wrong.status_code == 401, path
        assert client.get(f"/api/{path}").status_code in (404, 405), path


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:8765"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "null"},
        {"Host": ""},
    ],
)
def test_other_hosts_and_origins_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    for path in ("/", "/api/runs/first", "/static/main.js"):
        assert client.get(path, headers={**PERMITTED, **headers}).status_code == 403
    own = {**PERMITTED, "Origin": "http://127.0.0.1:8765"}
    assert client.get("/api/runs/first", headers=own).status_code == 200


def test_a_server_for_others_lets_nobody_read_without_the_token(folder: Path) -> None:
    page = Page(folder, Access(TOKEN, "0.0.0.0"))
    client = TestClient(page.app, base_url="http://box:8765")
    for path in ("/api/runs/first", "/api/about", "/api/differences", "/runs/first/report.html"):
        assert client.get(path).status_code == 401
    assert client.get("/").status_code == client.get("/static/main.js").status_code == 200
    ticket = client.get("/api/runs/first", headers=PERMITTED).json()["ticket"]
    assert client.get(f"/runs/first/report.html?ticket={ticket}").status_code == 200
    assert client.get(f"/runs/second/report.html?ticket={ticket}").status_code == 401
    assert client.get(f"/api/about?ticket={ticket}").status_code == 401
    page.close()


def test_nothing_of_another_host_is_asked_for(client: TestClient, folder: Path) -> None:
    make_run(folder, "hostile", steps=1, text=HOSTILE)
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy and "unsafe" not in policy
    report = client.get("/runs/hostile/report.html").headers["content-security-policy"]
    assert report.startswith("sandbox;") and "script" not in report
    for path in STATIC.glob("*.*"):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//cdn" not in text and "http://" not in text and "https://" not in text, path
        assert path.suffix != ".js" or not {"innerHTML", "insertAdjacentHTML", "eval("} & set(text.split()), path


def test_mistakes_of_a_form_come_with_their_place(client: TestClient) -> None:
    answers = {"adapter.rank": "-3", "train.epochs": "many", "batch.sise": "3"}
    body = {"recipe": "sft/quickstart", "answers": answers, "run": "new"}
    found = dict(client.post("/api/form/mistakes", json=body, headers=PERMITTED).json()["mistakes"])
    assert set(found) == set(answers) and "Did you mean `size`?" in found["batch.sise"]
    assert client.post("/api/form/start", json=body, headers=PERMITTED).status_code == 422
    good = {**body, "answers": {"adapter.rank": "3"}}
    assert client.post("/api/form/mistakes", json=good, headers=PERMITTED).json() == {"mistakes": [], "code": {}}


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"recipe": 3},
        {"recipe": "sft/quickstart", "answers": {"seed": 3}},
        {"recipe": "sft/quickstart", "answers": [1]},
        {"recipe": "sft/quickstart", "run": ["x"]},
        {"recipe": "--help", "run": "x"},
        {"recipe": "sft/quickstart", "answers": {"--trust": ""}, "run": "x"},
        {"recipe": "sft/quickstart", "run": "../x"},
        {"recipe": "sft/quickstart", "run": "first"},
        {"recipe": "sft/quickstart", "run": "-x"},
        {"recipe": "sft/none", "run": "x"},
    ],
)
def test_a_malformed_form_starts_nothing(client: TestClient, folder: Path, body: Any) -> None:
    found = client.post("/api/form/start", json=body, headers=PERMITTED)
    assert found.status_code in (400, 422), found.text
    assert not (state_folder(folder) / "jobs.json").exists()


CODE: list[tuple[dict[str, str], list[str]]] = [
    ({"plugins": "[{file}]"}, ["plugins"]),
    ({"plugins=[{file}] #": "1"}, ["plugins"]),
    ({"plugins=[{file}]\nseed": "1"}, ["plugins"]),  # one word, which is no list: the run refuses it
    ({"model": "{{id: starter, trust_remote_code: true}}"}, ["model.trust_remote_code"]),
    ({"model={{id: starter, trust_remote_code: yes please}} #": ""}, ["model.trust_remote_code"]),
    ({"tta": "{{views: [user], function: {file}}}"}, ["tta.function"]),
    ({"data.curriculum": "{{by: function, function: {file}}}"}, ["data.curriculum.function"]),
    ({"data={{train: starter/sst2_train.csv, curriculum: {{function: {file}}}}} #": ""}, ["data.curriculum.function"]),
    ({"rewards": "[{{file: {file}}}]"}, ["rewards.0.file"]),
    ({"rewards": "[{{kind: regex, pattern: a}}, {{kind: model, run: r, trust: true}}]"}, ["rewards.1.trust"]),
    ({"distill.teacher": "{{id: r, trust: true}}"}, ["distill.teacher.trust"]),
    ({"prefer.reference": "r", "prefer.trust": "true"}, ["prefer.trust"]),
    ({"reinforce": "{{start: r, trust: true}}"}, ["reinforce.trust"]),
    ({"data.sampling": "{{by: tokens, reference: r, trust: true}}"}, ["data.sampling.trust"]),
    (
        {"fleet.members": "{{ann: {{data.curriculum.function: {file}}}}}"},
        ["fleet.members.ann.data.curriculum.function"],
    ),
    ({"fleet": "{{members: {{ann: {{plugins: [{file}]}}}}}}"}, ["fleet.members.ann.plugins"]),
    ({"fleet.members": "{folder}"}, ["fleet.members.bob.data.curriculum.function"]),
]


@pytest.mark.parametrize(("answers", "keys"), CODE, ids=range(len(CODE)))
def test_the_form_tells_what_would_be_executed_and_executes_nothing(
    client: TestClient, folder: Path, answers: dict[str, str], keys: list[str]
) -> None:
    plugin, members = folder.parent / "plugin.py", folder.parent / "members"
    members.mkdir()
    (members / "bob.yaml").write_text(f"data: {{curriculum: {{function: {plugin}}}}}")
    plugin.write_text(f"open({str(folder / 'executed')!r}, 'w')")
    places = {"file": plugin, "folder": members}
    filled = {key.format(**places): value.format(**places) for key, value in answers.items()}
    body = {"recipe": "sft/quickstart", "answers": filled, "run": "new"}
    found = client.post("/api/form/mistakes", json=body, headers=PERMITTED).json()
    assert list(found["code"]) == keys and found["mistakes"] == []
    for verb in ("check", "plan", "start"):
        for agreed in ({}, {"code": True}, {"code": keys}, {"code": {**found["code"], keys[0]: "x"}}):
            refused = client.post(f"/api/form/{verb}", json={**body, **agreed}, headers=PERMITTED)
            assert refused.status_code == 422 and refused.json()["code"] == found["code"], verb
    assert not (folder / "executed").exists() and not (state_folder(folder) / "jobs.json").exists()


@pytest.mark.slow
def test_what_a_person_permits_is_executed(client: TestClient, folder: Path) -> None:
    plugin = folder.parent / "plugin.py"
    plugin.write_text(f"open({str(folder / 'executed')!r}, 'w')")
    body = {"recipe": "sft/quickstart", "answers": {"plugins": f"[{plugin}]", "adapter.rank": "-1"}, "run": "new"}
    code = client.post("/api/form/check", json=body, headers=PERMITTED).json()["code"]
    assert code == {"plugins": f'["{plugin}"]'} and not (folder / "executed").exists()
    found = client.post("/api/form/check", json={**body, "code": code}, headers=PERMITTED).json()
    assert (folder / "executed").exists() and dict(found["mistakes"]).keys() == {"adapter.rank"}


def test_a_run_that_names_code_is_not_resumed_by_the_page(client: TestClient, folder: Path) -> None:
    path = make_run(folder, "foreign", steps=5, status="stopped")
    (path / "checkpoints" / "step-5").mkdir(parents=True)
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(text + "prefer: {start: other, trust: true}\nrewards: [{file: x.py}]\n")
    refused = client.post("/api/runs/foreign/resume", headers=PERMITTED)
    assert refused.status_code == 422 and "prefer.trust, rewards.0.file" in refused.json()["error"]
    assert client.get("/api/runs/foreign").json()["code"] == {"prefer.trust": True, "rewards.0.file": "x.py"}


def test_settings_have_their_values_units_papers_and_meaning(client: TestClient) -> None:
    every = client.get("/api/settings").json()
    found = {each["key"]: each for each in every}
    assert [each["closed"] for each in every if each["key"] == "adapter.rank" and "lora" in each["of"]] == [False]
    assert found["adapter.method"]["closed"] and "dora" in found["adapter.method"]["words"]
    assert found["data.max_tokens"]["unit"] == "tokens" and found["seed"]["unit"] == ""
    assert list(found["data.length_warm_up.start"]["papers"]) == ["Li, Zhang and He, NeurIPS 2022, arXiv:2108.06084"]
    assert found["batch.tokens_per_device"]["words"] == ["auto"] and found["seed"]["meaning"]
    assert found["data.on_bad_row"]["why"].startswith("a row that is left out")
    recipes = client.get("/api/recipes").json()
    assert "sft/quickstart" in recipes
    assert client.get("/api/recipes/sft/quickstart").json()["written"]["recipe"] == "sft"


def test_tags_and_a_note_stand_beside_the_run_and_in_the_list(client: TestClient, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in (folder / "first").iterdir() if path.is_file()}
    for wrong in (
        {"tags": "x", "note": ""},
        {"tags": ["a" * 41], "note": ""},
        {"tags": [" "], "note": ""},
        {"tags": []},
    ):
        assert client.post("/api/runs/first/notes", json=wrong, headers=PERMITTED).status_code == 422, wrong
    kept = {"tags": ["keep", HOSTILE[:40]], "note": HOSTILE}
    assert client.post("/api/runs/first/notes", json=kept, headers=PERMITTED).status_code == 200
    found = client.get("/api/runs/first").json()
    assert {key: found[key] for key in kept} == kept
    now = {path.name: path.read_bytes() for path in (folder / "first").iterdir() if path.is_file()}
    assert now.keys() - before.keys() == {"notes.json"} and all(now[name] == before[name] for name in before)
    (folder / "first" / "notes.json").write_text('{"tags": 3, "note": [')
    assert client.get("/api/runs/first").json()["tags"] == []


def test_a_dropped_file_is_kept_for_its_user(client: TestClient, folder: Path) -> None:
    for name, text in (("../x", "aGk="), ("x.jsonl", "no base64"), (3, "aGk=")):
        refused = client.post("/api/form/file", json={"name": name, "base64": text}, headers=PERMITTED)
        assert refused.status_code == 422, (name, text)
    found = client.post("/api/form/file", json={"name": "x.jsonl", "base64": "aGk="}, headers=PERMITTED).json()
    assert Path(found["path"]).read_bytes() == b"hi" and state_folder(folder) in Path(found["path"]).parents


def test_only_one_server_works_in_a_folder(client: TestClient, folder: Path) -> None:
    with pytest.raises(ConfigError, match="another `workbench ui`"):
        JobQueue(folder)


@pytest.mark.slow
def test_the_command_serves_the_page_until_it_is_stopped(folder: Path) -> None:
    with served(folder) as address:
        with urllib.request.urlopen(address.partition("/#")[0]) as page:
            assert b"<title>" in page.read()
        assert asked(address, "/api/runs/first")["status"] == "done"


HOSTILE_BODIES: list[Any] = [
    {"recipe": "a" * 5000, "answers": {}, "run": "x"},
    {"recipe": "sft/quickstart", "answers": {}, "run": "a" * 5000},
    {"recipe": "sft/quickstart", "answers": {"seed": "\ud800"}, "run": "x"},
    {"recipe": "sft/quickstart", "answers": {"\udfff": "1"}, "run": "x"},
    {"recipe": "\ud800", "answers": {}, "run": "x"},
    {"recipe": "a\0b", "answers": {}, "run": "x"},
    {"recipe": "sft/quickstart", "answers": {"data.sources": "{a: {b: 1}}", "plugins": "[1]"}, "run": "x"},
    {"recipe": "sft/quickstart", "answers": {"seed": "[" * 5000}, "run": "x"},
]


@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=range(len(HOSTILE_BODIES)))
@pytest.mark.parametrize("verb", ["mistakes", "start"])
def test_a_hostile_form_is_told(client: TestClient, body: Any, verb: str) -> None:
    found = client.post(f"/api/form/{verb}", content=json.dumps(body), headers=PERMITTED)
    assert found.status_code in (400, 422) or (verb == "mistakes" and found.status_code == 200), found.text


@pytest.mark.parametrize("name", ["a" * 5000, "%ed%a0%80", "%00", "..", "%ff"])
def test_a_hostile_name_of_a_run_is_none(client: TestClient, name: str) -> None:
    for path in (f"/api/runs/{name}", f"/runs/{name}/report.html", f"/api/runs/{name}/samples", f"/api/recipes/{name}"):
        assert client.get(path).status_code in (404, 422), path
    assert client.get(f"/api/differences?run={name}&run={name}").status_code == 404


FILES = ["manifest.json", "config.yaml", "metrics.jsonl", "scores.json", "samples.jsonl", "layers.jsonl", "log.txt"]


@pytest.mark.parametrize("file", [*FILES, "run.lock", "report.html", "predictions.parquet"])
def test_a_pipe_in_a_run_holds_up_nobody(client: TestClient, folder: Path, file: str) -> None:
    (folder / "first" / file).unlink(missing_ok=True)
    os.mkfifo(folder / "first" / file)
    page = RunFolder(folder)
    page.summaries()
    queue = JobQueue(folder.parent)
    source = EventSource(page, queue, Watched([("first", "")], run="first"), lambda: False)
    source.news()
    queue.close()
    for path in ("", "/samples", "/layers", "/tables/predictions"):
        assert client.get(f"/api/runs/first{path}").status_code in (200, 404, 422)
    assert client.get("/runs/first/report.html").status_code in (200, 404)


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"\\ud800"', '{"a": NaN}'])
def test_values_that_json_has_not_are_sent_as_none(client: TestClient, folder: Path, value: str) -> None:
    path = folder / "first" / "manifest.json"
    path.write_text(path.read_text().replace("{", f'{{"odd": {value}, ', 1))
    found = client.get("/api/runs/first")
    assert found.status_code == 200 and "odd" in found.json()["facts"]


def test_a_request_that_does_not_come_is_given_up(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BODY_S", 0.05)

    async def slow() -> tuple[int, bytes]:
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/api/form/start", "query_string": b"", "root_path": ""}
        headers = [(b"host", b"127.0.0.1"), (b"authorization", PERMITTED["Authorization"].encode())]
        await client.app({**scope, "headers": headers, "app": client.app}, receive, send)
        return sent[0]["status"], sent[1]["body"]

    status, told = asyncio.run(asyncio.wait_for(slow(), 20))
    assert status == 408 and b"has not come" in told


def test_streams_of_events_have_a_limit(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get("/api/events?" + "&".join(f"curve=first//{n}" for n in range(300))).status_code == 400
    assert client.get("/api/differences?run=" + "&run=".join(["first"] * 50)).status_code == 200
