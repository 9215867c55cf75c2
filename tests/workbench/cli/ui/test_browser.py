"""The page in a real browser: while a run grows, through a restart of the server, with whatever rows hold."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import workbench
from tests.run_files import write_lines
from tests.vision_families import save
from tests.workbench.cli.ui.made_runs import HOSTILE, log, make_run, row, served, write_layers, write_samples
from workbench.cli.ui.job_queue import state_folder
from workbench.runs import evaluation_request

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `browser`")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium on the path")]

DRAWN = """async () => {
    const began = performance.now();
    location.hash = "#/run/long";
    while (!document.querySelector(".u-over") && performance.now() - began < 30_000)
        await new Promise(requestAnimationFrame);
    return performance.now() - began;
}"""
"""Opens the page of a run; returns the milliseconds until its curve is drawn, or those after which nobody waits."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A page that fails the test where it asks another host, logs an error or breaks its policy."""
    found = chromium.new_page(viewport={"width": 1280, "height": 900})
    found.set_default_timeout(60_000)
    wrong: list[str] = []
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("console", lambda line: wrong.append(line.text) if "ontent Security Policy" in line.text else None)
    found.on(
        "request",
        lambda request: None if request.url.startswith("http://127.0.0.1:") else wrong.append(request.url),
    )
    yield found
    found.close()
    assert not wrong


def _open(page: Any, address: str, path: str) -> None:
    page.goto(address)
    page.wait_for_selector("h1")
    page.goto(address.partition("#")[0] + path)
    page.wait_for_selector("h1")


def _until(page: Any, holds: str, *, seconds: float = 60) -> None:
    """Wait until an expression is true; the page's policy forbids Playwright's own way, which evaluates text in it."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(holds):
        assert time.monotonic() < deadline, holds
        page.wait_for_timeout(50)


def _last_step(page: Any) -> int:
    """The last step of the plot of the loss, as the page describes it for those who do not see it."""
    facts = page.inner_text(".facts")
    found = re.search(r"(\d[\d,]*) of", facts)
    return int(found[1].replace(",", "")) if found else 0


def test_a_run_grows_on_the_page_and_a_restarted_server_goes_on(page: Any, folder: Path) -> None:
    path = make_run(folder, "living", steps=40, status="running")
    with (path / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with served(folder) as address:
            port = int(re.findall(r":(\d+)/", address)[0])
            _open(page, address, "#/run/living")
            page.wait_for_selector(".u-over")
            assert _last_step(page) == 40
            before = page.get_attribute(".plot", "aria-label")
            log(path, 41, 60)
            _until(page, "document.querySelector('.facts').textContent.includes('60 of')")
            _until(page, f"document.querySelector('.plot').ariaLabel !== {json.dumps(before)}")
        _until(page, "document.getElementById('connection').textContent !== ''")
        log(path, 61, 90)
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.headers.get("last-event-id", "")))
        with served(folder, port=port):
            _until(page, "document.querySelector('.facts').textContent.includes('90 of')")
            _until(page, "document.getElementById('connection').textContent === ''")
    assert any("living/" in each for each in sent)  # it asks for what it has not seen


def test_every_page_meets_wcag_aa_in_light_and_dark(chromium: Any, folder: Path) -> None:
    """By axe-core, which asks about contrast, names, roles, order of headings and labels."""
    axe = pytest.importorskip("axe_playwright_python", reason="the extra `browser`")
    source = (Path(axe.__file__).parent / "axe.min.js").read_text()
    write_samples(folder / "first", steps=[0, 20], prompts=["What is it?", "What\n[call] add(1)\n[tool] 3"])
    write_layers(folder / "first", changes=[(0, "111111"), (9, "010001")])
    (folder / "first" / "notes.json").write_text('{"tags": ["keep"], "note": "the best"}')
    (folder / "first" / "adapter").mkdir()
    (folder / "first" / "log.txt").write_text("a line")
    shown = {"#/": "table", "#/run/first": ".u-over", "#/compare?run=first&run=second": ".u-over", "#/new": "mark"}
    shown |= {"#/chat": "select", "#/jobs": "main a[href='#/new']", "#/log/first": "pre"}
    with served(folder) as address:
        for scheme in ("light", "dark"):
            page = chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme, bypass_csp=True)
            page.set_default_timeout(60_000)
            _open(page, address, "#/")
            page.evaluate(source)
            for path, selector in shown.items():
                page.goto(address.partition("#")[0] + path)
                page.wait_for_selector(selector)
                page.wait_for_timeout(400)
                rules = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']}"
                found = page.evaluate(f"axe.run(document, {rules}).then(found => found.violations)")
                told = [(each["id"], each["nodes"][0]["html"], each["nodes"][0]["failureSummary"]) for each in found]
                assert not told, (path, scheme, told)
            page.close()


def test_runs_are_sorted_by_a_click_and_by_keyboard(page: Any, folder: Path) -> None:
    make_run(folder, "third", steps=3)
    with served(folder) as address:
        _open(page, address, "#/")
        page.get_by_role("button", name="Sort by run").click()
        names = "[...document.querySelectorAll('td.name a')].map(each => each.textContent).join()"
        assert page.evaluate(names) == "first,second,third"
        page.keyboard.press("Enter")  # the button keeps the focus
        assert page.evaluate(names) == "third,second,first"
        assert page.get_attribute("th[aria-sort]", "aria-sort") == "descending"
        assert page.evaluate(
            "document.querySelector('.wide').scrollWidth <= document.querySelector('.wide').clientWidth"
        )


def test_a_dropped_file_shows_what_it_holds(page: Any, folder: Path, tmp_path: Path) -> None:
    rows = [{"question": f"Which number is {n}?", "answer": f"It is number {n}."} for n in range(40)]
    write_lines(tmp_path / "own rows.jsonl", rows)
    with served(folder) as address:
        _open(page, address, "#/new")
        page.set_input_files("input[type=file]", tmp_path / "own rows.jsonl")
        page.wait_for_selector("h2:has-text('What the file holds')")
        assert "It is number" in page.inner_text("mark >> nth=0")
        assert "own-rows.jsonl" in page.inner_text(".command >> nth=0")
        assert "rows" in page.inner_text(".stay pre:has-text('longest')")
        groups = page.eval_on_selector_all("#recipe optgroup", "groups => groups.map(({ label }) => label)")
        assert {"sft", "crossval", "models"} <= {*groups}


def test_hostile_rows_are_text(chromium: Any, page: Any, folder: Path) -> None:
    path = make_run(folder, "hostile", steps=20, text=HOSTILE)
    facts = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**facts, "status": "failed", "reason": HOSTILE}))
    with served(folder) as address:
        _open(page, address, "#/run/hostile")
        page.click("summary:has-text('predictions')")
        page.wait_for_selector("td.words")
        assert page.inner_text("td.words >> nth=1") == HOSTILE
        assert HOSTILE in page.inner_text("main") and page.query_selector("main script, main img") is None
        report = chromium.new_page()  # which says that it executes nothing
        report.goto(address.partition("#")[0] + "runs/hostile/report.html")
        assert report.title() == "report"
        report.close()


def test_the_report_and_the_last_log_stand_on_the_page_of_a_run(page: Any, folder: Path) -> None:
    make_run(folder, "over", steps=20, text="<script>document.title = 1</script><b>a table</b>")
    job = {"number": 7, "verb": "run", "words": ["sft/quickstart"], "run": "over", "state": "failed"}
    (state_folder(folder) / "jobs.json").write_text(json.dumps([job]))
    (state_folder(folder) / "7.log").write_text("Error: no room on the disk.\n")
    with served(folder) as address:
        _open(page, address, "#/run/over")
        assert page.locator("iframe").count() == 0, "it is read when somebody wants it"
        page.click("summary:has-text('Report')")
        frame = page.frame_locator("iframe")
        frame.locator("p").wait_for()
        assert page.get_attribute("iframe", "sandbox") == "" and page.title() == "over - Workbench"
        assert frame.locator("b").inner_text() == "a table", "in its frame, where no script runs"
        page.get_by_role("link", name="Log").click()
        page.wait_for_selector("pre:has-text('no room on the disk')")


def test_the_log_of_a_run_that_a_terminal_started_grows_on_its_page(page: Any, folder: Path) -> None:
    path = make_run(folder, "elsewhere", steps=20)
    (path / "log.txt").write_text(f"Run directory: {HOSTILE}\n")
    with served(folder) as address:
        _open(page, address, "#/run/elsewhere")
        page.get_by_role("link", name="Log", exact=True).click()
        page.wait_for_selector("pre[role=log]:has-text('Run directory')")
        with (path / "log.txt").open("a") as file:
            file.write("step 2/20\n")
        page.wait_for_selector("pre[role=log]:has-text('step 2/20')")
        assert page.inner_text("pre[role=log]").splitlines()[0] == f"Run directory: {HOSTILE}"
        page.click("h1 a")
        page.wait_for_selector("h2:has-text('Settings')")


def test_sample_answers_come_while_a_run_trains(page: Any, folder: Path) -> None:
    path = make_run(folder, "living", steps=40, status="running")
    write_samples(path, steps=range(0, 140, 20), prompts=["What is it?", HOSTILE + " why " * 200], name=HOSTILE)
    with (path / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with served(folder) as address:
            _open(page, address, "#/run/living")
            page.wait_for_selector(".sample")
            shown = page.locator(".sample").first
            assert shown.locator("dt").all_inner_texts() == [
                *(f"step {n}" for n in (120, 100, 80, 60)),
                "before",
                "reference",
            ]
            assert shown.locator("dd").first.inner_text() == "answer of step 120 to What is it?"
            assert shown.locator("h3").inner_text() == f"{HOSTILE} 1"
            shown.get_by_role("button", name="All 7 steps").click()
            assert shown.locator("dt").all_inner_texts()[3:6] == ["step 60", "step 40", "step 20"]
            write_samples(path, steps=[140], prompts=["What is it?", HOSTILE], name=HOSTILE)
            _until(page, "document.querySelector('.sample dt').textContent === 'step 140'")
            assert len(shown.locator("dt").all_inner_texts()) == 9  # it stays open
            assert page.query_selector("main script, main img") is None and page.title() != "executed"


def test_layers_that_train_are_shown_and_change_with_the_run(page: Any, folder: Path) -> None:
    path = make_run(folder, "living", steps=40, status="running")
    write_layers(path, changes=[(0, "111111"), (21, "010001")], kinds=("q", HOSTILE, "k"))
    with (path / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with served(folder) as address:
            _open(page, address, "#/run/living")
            page.wait_for_selector("table.parts")
            rows = page.locator("table.parts tbody tr").all_inner_texts()
            assert [row.split("\t")[0] for row in rows] == [
                "before the blocks",
                "block 1",
                "blocks 2 to 4",
                "after the blocks",
            ]
            assert page.locator("td.trains").all_inner_texts() == ["512", "64"]
            assert page.locator("td.waits").all_inner_texts() == ["512 each, frozen now"]
            assert "since step 21" in page.inner_text("section[aria-label='Layers that train']")
            assert page.locator("svg.strip rect").count() == 5  # nothing before the blocks ever trains
            assert page.query_selector("main script, main img") is None
            with (path / "layers.jsonl").open("a") as file:
                file.write('{"step": 41, "trains": "001001"}\n')
            _until(page, "document.querySelectorAll('.strip rect').length === 6")
            assert page.locator("table.parts tbody th").all_inner_texts()[2:4] == ["block 2", "blocks 3 to 4"]


def test_evaluate_now_asks_the_run_that_trains(page: Any, folder: Path) -> None:
    path = make_run(folder, "living", steps=41, status="running")
    with (path / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with served(folder) as address:
            _open(page, address, "#/run/living")
            page.get_by_role("button", name="Evaluate now").click()
            page.wait_for_selector("button:has-text('Evaluates after this step'):disabled")
            assert evaluation_request.withdrawn(path)  # as the run does, which then logs what it found
            with (path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({**row(42), "held_out_loss": 7.25, "asked": 1}) + "\n")
            page.wait_for_selector("button:has-text('Evaluate now'):not(:disabled)")
            _until(page, "document.querySelector('.plot').ariaLabel.includes(' 7.25')")
            assert page.locator("h3", has_text="asked").count() == 0  # the mark is no curve


def test_a_hundred_thousand_steps_are_drawn_in_a_second(page: Any, folder: Path) -> None:
    make_run(folder, "long", steps=100_000)
    with served(folder) as address:
        _open(page, address, "#/")
        page.wait_for_selector("text=100,000 steps")
        took = []
        for _ in range(3):  # the first time the server reads the file
            took.append(page.evaluate(DRAWN))
            page.goto(address.partition("#")[0] + "#/")
            page.wait_for_selector("text=100,000 steps")
    assert min(took) < 1000, took


def test_a_form_says_what_is_wrong_at_the_field_and_shows_the_mask(page: Any, folder: Path) -> None:
    with served(folder) as address:
        _open(page, address, "#/new")
        rate = page.get_by_label("train.learning_rate")
        rate.fill("-1")
        page.wait_for_selector("[aria-invalid=true]")
        assert rate.get_attribute("aria-invalid") == "true"
        described = (rate.get_attribute("aria-describedby") or "").split()[1]
        assert "greater than 0" in page.inner_text(f'[id="{described}"]')
        assert page.get_by_role("button", name="Start").is_disabled()
        page.get_by_label("Find a setting").fill("data.limit")
        page.get_by_label("data.limit").fill("40")
        assert "unit: rows" in page.inner_text('[id="field-data.limit-help"]')
        page.get_by_label("Find a setting").fill("")
        page.get_by_label("train.learning_rate").fill("0.001")
        page.wait_for_selector("mark")
        assert "data.limit=40" in page.inner_text(".command")
        marked = page.inner_text("mark >> nth=0")
        assert marked and page.get_by_role("button", name="Start").is_enabled()


def test_it_is_used_with_a_keyboard_and_fits_a_telephone(chromium: Any, folder: Path) -> None:
    write_samples(folder / "first", steps=[0, 20], prompts=["a_long_word_" * 30, HOSTILE])
    write_layers(folder / "first", changes=[(0, "1" * 14), (9, "1" + "10" * 6 + "1")])
    with served(folder) as address:
        page = chromium.new_page(viewport={"width": 400, "height": 800}, color_scheme="dark")
        page.set_default_timeout(60_000)
        _open(page, address, "#/")
        page.wait_for_selector("table")
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "first":
                break
        page.keyboard.press("Enter")
        page.wait_for_selector(".u-over")
        for path in ("#/", "#/run/first", "#/compare?run=first&run=second", "#/new", "#/jobs", "#/chat"):
            page.goto(address.partition("#")[0] + path)
            page.wait_for_selector("h1")
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, path
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, re.findall(r"\d+", paper))) < 60
        page.close()


def test_without_the_token_a_page_only_looks(page: Any, folder: Path) -> None:
    with served(folder) as address:
        page.goto(address.partition("#")[0])
        page.wait_for_selector("text=Only looking")
        page.goto(address.partition("#")[0] + "#/new")
        page.wait_for_selector("button:text-is('Start')")  # the list has a column that is called started
        assert page.get_by_role("button", name="Start", exact=True).is_disabled()
        page.get_by_label("Token").fill(address.partition("token=")[2])
        page.get_by_role("button", name="Use it").click()
        _until(page, "[...document.querySelectorAll('button')].some(e => e.textContent === 'Start' && !e.disabled)")


def test_runs_are_compared_over_each_other_with_the_settings_that_differ(page: Any, folder: Path) -> None:
    with served(folder) as address:
        _open(page, address, "#/")
        page.get_by_label("Choose first").check()
        page.get_by_label("Choose second").check()
        page.get_by_role("link", name="Compare 2 runs").click()
        page.wait_for_selector(".u-over")
        described = page.get_attribute(".plot", "aria-label")
        assert "first" in described and "second" in described
        differing = page.locator("table:has(th:has-text('setting')) tbody tr").all_inner_texts()
        assert [each.split("\t")[0] for each in differing] == ["train.learning_rate"]
        page.select_option("#x", label="tokens")
        _until(page, "document.querySelector('.plot').ariaLabel.includes('against tokens')")


@pytest.mark.nightly
def test_two_runs_and_their_backbone_answer_side_by_side(page: Any, folder: Path, trained: Path) -> None:
    for name in ("one", "other"):
        shutil.copytree(trained, folder / name)
    with served(folder) as address:
        _open(page, address, "#/chat?run=one")
        page.wait_for_selector("select option[value=other]", state="attached")
        page.get_by_label("Second run").select_option("other")
        page.get_by_role("button", name="Load").click()
        page.wait_for_selector("text=one and other ready.")
        page.get_by_label("beside the backbone without adapter").check()
        columns = page.locator(".talk .card")
        assert [text.split("\n")[0] for text in columns.all_inner_texts()][:2] == ["one", "other"]
        assert columns.count() == 3 and "without adapter" in columns.nth(2).inner_text()
        page.get_by_label("Most tokens").fill("12")
        page.get_by_label("Message", exact=True).fill("What is it?")
        page.keyboard.press("Control+Enter")
        _until(page, "document.querySelectorAll('.talk .card p.soft').length === 3")
        assert page.locator(".talk p.bad").count() == 0
        one, other, bare = page.locator(".turn.assistant").all_inner_texts()
        assert one and one == other and bare != one, "a copy answers alike, the backbone otherwise"
        page.get_by_role("button", name="Free the memory").click()
        page.wait_for_selector("text=No run is loaded.")


@pytest.mark.nightly
def test_a_chat_shows_its_run_a_picture(page: Any, folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (40, 40), "red").save(tmp_path / "red.png")
    Image.effect_noise((3000, 3000), 90).save(tmp_path / "huge.png")
    rows = [{"question": f"Which colour has {n}?", "answer": "red", "image": "red.png"} for n in range(10)]
    write_lines(tmp_path / "rows.jsonl", rows[2:])
    write_lines(tmp_path / "held.jsonl", rows[:2])
    words = [f"model.id={save('llava', tmp_path / 'llava', mixed=True)}", f"data.train={tmp_path / 'rows.jsonl'}"]
    words += [f"data.held_out={tmp_path / 'held.jsonl'}", "train.steps=1", "evaluate.answers=0", "evaluate.every=null"]
    workbench.run("sft/quickstart", words, out=folder / "seeing", quiet=True)
    with served(folder) as address:
        _open(page, address, "#/chat?run=seeing")
        page.wait_for_selector("select option[value=seeing]", state="attached")
        page.get_by_role("button", name="Load").click()
        page.wait_for_selector("text=seeing ready.")
        page.get_by_label("Most tokens").fill("3")
        page.set_input_files("input[type=file]", [tmp_path / "huge.png", tmp_path / "red.png", tmp_path / "red.png"])
        page.wait_for_selector("text=huge.png: the pictures of a conversation have at most 5 MB")
        _until(page, "document.querySelectorAll('.thumb').length === 2")
        with page.expect_file_chooser():
            page.get_by_role("button", name="Add a picture").press("Enter")
        page.get_by_role("button", name="Remove red.png").first.press("Enter")
        _until(page, "document.querySelectorAll('.thumb').length === 1")
        page.get_by_label("Message", exact=True).fill("Which colour?")
        page.keyboard.press("Control+Enter")
        _until(page, "document.querySelectorAll('.talk .card p.soft').length === 1")
        assert page.locator(".talk p.bad").count() == 0 and page.locator(".turn.user img").count() == 1
        wanted = workbench.generate(
            folder / "seeing", "Which colour?", pictures=[tmp_path / "red.png"], max_new_tokens=3
        )
        assert page.locator(".turn.assistant").inner_text().strip() == wanted.strip()


def test_a_form_plans_and_starts_a_run_that_the_page_follows(page: Any, folder: Path) -> None:
    settings = {"data.limit": "24", "train.steps": "2", "evaluate.answers": "1", "data.max_tokens": "64"}
    settings |= {"evaluate.every": "null", "evaluate.samples": "0"}
    with served(folder) as address:
        _open(page, address, "#/new")
        for key, value in settings.items():
            page.get_by_label("Find a setting").fill(key)
            page.get_by_label(key, exact=True).fill(value)
        page.get_by_label("Find a setting").fill("")
        page.get_by_role("button", name="Plan").click()
        page.wait_for_selector("h2:has-text('What the run will take')")
        page.get_by_role("button", name="Start").click()
        page.wait_for_selector("h2:has-text('What job')")
        _until(
            page, "[...document.querySelectorAll('td .status')].some(each => each.textContent === 'done')", seconds=240
        )
        assert "Report: " in page.inner_text("pre[role=log]")
        page.locator("td a[href^='#/run/']").first.click()
        page.wait_for_selector("h2:has-text('Scores')")


def test_a_run_is_stopped_and_goes_on(page: Any, folder: Path) -> None:
    words = ["data.limit=24", "train.epochs=null", "train.steps=400", "batch.size=4", "data.max_tokens=64"]
    words += ["evaluate.every=null", "evaluate.answers=0", "evaluate.samples=0"]
    status = "document.querySelector('h1 .status')?.textContent"
    with served(folder) as address:
        _open(page, address, "#/new")
        page.get_by_label("Name of the run").fill("stopped")
        for key, _, value in (word.partition("=") for word in words):
            page.get_by_label("Find a setting").fill(key)
            page.get_by_label(key, exact=True).fill(value)
        page.get_by_role("button", name="Start").click()
        page.wait_for_selector("h2:has-text('What job')")
        _until(page, "document.querySelector('pre[role=log]').textContent.includes('/400')", seconds=240)
        page.goto(address.partition("#")[0] + "#/run/stopped")
        page.get_by_role("button", name="Stop and save").click()
        _until(page, f"{status} === 'stopped'", seconds=120)
        steps = len((folder / "stopped" / "metrics.jsonl").read_text().splitlines())
        assert 1 <= steps < 400 and list((folder / "stopped" / "checkpoints").iterdir())
        page.get_by_role("button", name="Resume", exact=True).click()  # not the command of that name, to copy
        page.wait_for_selector("h2:has-text('What job')")
        page.goto(address.partition("#")[0] + "#/run/stopped")
        _until(page, f"{status} === 'done'", seconds=240)
    numbers = [json.loads(line)["step"] for line in (folder / "stopped" / "metrics.jsonl").read_text().splitlines()]
    assert numbers == list(range(1, 401))


def test_an_answer_that_was_cut_off_is_no_answer(page: Any, folder: Path) -> None:
    """As where the next key is typed while the mistakes of the last one arrive, which is then given up."""
    with served(folder) as address:
        _open(page, address, "#/")
        told = page.evaluate(
            """async () => {
                const { post } = await import("/static/server.js");
                const real = window.fetch;
                window.fetch = async () => new Response('{"mistakes": [', { status: 200 });
                try { await post("/api/form/mistakes"); return "answered"; }
                catch (error) { return error.name; }
                finally { window.fetch = real; }
            }"""
        )
    assert told == "SyntaxError"
