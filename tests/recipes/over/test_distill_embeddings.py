"""A student of an embedder learns its vectors, whatever their size, and says what they were worth."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import workbench
from tests.conftest import MINILM, save_tiny
from tests.mistakes.cases import assert_refused_with
from tests.recipes.tasks.embed.test_embed_run import classes, pairs, scored
from tests.run_files import read_losses, read_scores, write_lines
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import Indices
from workbench.distillation import embedding_teachers, teacher_sources
from workbench.errors import WorkbenchError
from workbench.losses.ranking_losses import leading
from workbench.models.embedder import EmbeddingLoss
from workbench.recipes.load import load
from workbench.recipes.over.distill_embeddings import TaughtEmbeddings
from workbench.recipes.tasks.embed import embed_run
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.merge import merge
from workbench.recipes.verbs.plans.plan import plan
from workbench.report import run_record, teacher_worth

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SHORT = ["evaluate.every=null", "save.every=null", "batch.size=12", "train.learning_rate=1e-2", "data.held_out=0.25"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT, a wider one, and rows."""
    folder = tmp_path_factory.mktemp("embedders")
    save_tiny(folder / "bert", "Bert", "SequenceClassification", MINILM)
    save_tiny(folder / "wide", "Bert", "MaskedLM", MINILM, hidden_size=64, num_hidden_layers=3)
    for name, rows in {"pairs": pairs(48), "scored": scored(48), "classes": classes(48)}.items():
        write_lines(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def teacher(home: Path) -> Path:
    """A trained run over the wide backbone, with an instruction before queries. Read only."""
    return trained(home, "teacher", f"model.id={home / 'wide'}", "embed.query_prefix='find: '", "train.steps=30")


def words_of(home: Path, *words: str) -> list[str]:
    known = [f"data.train={home / 'pairs.jsonl'}", f"model.id={home / 'bert'}", "model.weights=float32"]
    return [*known, *SHORT, *words]


def trained(home: Path, name: str, *words: str) -> Path:
    return workbench.run("embed/quickstart", words_of(home, *words), out=home / name, quiet=True)


def of(teacher: Path | str, *words: str) -> list[str]:
    return ["recipe=distill", "of=embed", f"distill.teacher.id={teacher}", *words]


def test_the_loss_is_that_of_the_labels_and_of_the_vectors(home: Path) -> None:
    """Of rows with labels and without, for each distance, written out."""
    config = load("embed/quickstart", words_of(home))
    tokenizer, data, _ = embed_run.prepare(config)
    rows = data.train.with_texts([SimpleNamespace(place="", text="a new one")], "", tokenizer, max_tokens=64)  # type: ignore[list-item]
    live = SimpleNamespace(config=config.embed, sizes=(8,), width=8)
    vectors = torch.randn(len(rows.units.texts), 8, generator=torch.Generator().manual_seed(0))
    batch: Indices = np.asarray([3, len(rows) - 1, 0])
    for loss, distance in {
        "mse": lambda s, t: ((s - t) ** 2).mean(),
        "cosine": lambda s, t: (1 - (s * torch.nn.functional.normalize(t, dim=1)).sum(1)).mean(),
    }.items():
        section = DistillConfig(alpha=0.3, loss=loss)  # type: ignore[arg-type]
        labels = EmbeddingLoss(live)  # type: ignore[arg-type]
        taught = TaughtEmbeddings(labels, vectors, section, lambda: 0.0, len(data.train))
        units, every, terms = taught.of(rows, batch)
        assert units.texts[-1] == "a new one" and len(units.texts) - 1 in every
        outputs = torch.randn(len(every), 8, generator=torch.Generator().manual_seed(1))
        _, own, own_terms = labels.of(rows, batch[[0, 2]])
        hard = sum(float(term(outputs[np.isin(every, own)])) for term in own_terms())
        soft = float(distance(leading(outputs, 8, normalise=True), vectors[torch.from_numpy(every)]))
        found = sum(float(term(outputs)) for term in terms())
        assert found == pytest.approx(0.7 * 2 / 3 * hard + 0.3 * soft, rel=1e-5)


@pytest.mark.slow
def test_without_the_teacher_it_is_the_plain_run(home: Path, teacher: Path) -> None:
    plain = trained(home, "plain", "train.steps=3")
    silent = trained(home, "silent", *of(teacher, "distill.alpha=0"), "train.steps=3")
    assert read_losses(silent) == read_losses(plain)
    assert read_scores(silent)["after"] == read_scores(plain)["after"]


@pytest.mark.slow
def test_a_student_learns_the_vectors_of_a_wider_teacher(home: Path, teacher: Path, tmp_path: Path) -> None:
    """Without a label, by principal components, and from texts of a file; its scores are those of what it ships."""
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": f"{each['positive']} Or so."} for each in pairs(48)])
    words = ["distill.alpha=1", "distill.loss=mse", "distill.control=true", "train.epochs=6", "adapter={method: full}"]
    run = trained(home, "mse", *of(teacher), *words, f"distill.unlabelled={texts}")
    scores = read_scores(run)
    assert scores["teacher"] == pytest.approx(read_scores(teacher)["after"], rel=1e-3)
    assert np.mean(read_losses(run)[-5:]) < 0.5 * np.mean(read_losses(run)[:5])
    assert len(read_losses(run)) == len(read_losses(run / "control")) == 6 * 7, "texts count as rows of the control"
    facts = json.loads((run / "manifest.json").read_text())
    assert 0.5 < facts["distill"]["kept"] <= 1 and facts["data"]["unlabelled"]["rows"] > 0
    assert {"student", "teacher"} <= scores["costs"].keys()
    found = teacher_worth.worth(run_record.read(run))
    assert found is not None and "held-out ndcg@10" in found.sentence
    assert evaluate(run, []) == scores["after"]
    assert merge(run, out=tmp_path / "merged", weights="float32").agreement.cosine > 1 - 1e-5


@pytest.mark.slow
def test_half_of_the_layers_by_importance(home: Path, teacher: Path) -> None:
    """The student starts with its teacher's weights, and similarities need no projection."""
    words = ["distill.student.layers=important-2", "distill.loss=relation", "embed.sizes=[8]", "adapter={method: full}"]
    run = trained(home, "half", *of(teacher, "model.id=teacher"), *words, "train.steps=2", "train.learning_rate=1e-4")
    told = " ".join(check(load("embed/quickstart", words_of(home, *of(teacher, "model.id=teacher"), *words))).notes)
    start = f"nDCG at 10 before training is {read_scores(run)['before']['ndcg@10']:.4g}, on "
    assert start in told and f"the teacher's is {read_scores(run)['teacher']['ndcg@10']:.4g}." in told
    facts = json.loads((run / "manifest.json").read_text())
    assert facts["student"]["layers"] == [[0, 2]] and "kept" not in facts["distill"]
    assert json.loads((run / "adapter" / "config.json").read_text())["num_hidden_layers"] == 2
    assert evaluate(run, []) == read_scores(run)["after"]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["scored", "classes"])
def test_rows_of_every_form_have_a_verdict(home: Path, teacher: Path, rows: str) -> None:
    words = ["distill.control=true", "train.steps=4", f"data.train={home / rows}.jsonl"]
    record = run_record.read(trained(home, rows, *of(teacher), *words))
    found = teacher_worth.worth(record)
    name = "spearman" if rows == "scored" else "ndcg@10"
    assert found is not None and f"held-out {name} {record.scores['after'][name]:.4g}" in found.sentence
    assert f"on labels alone {record.scores['control'][name]:.4g}" in found.sentence


@pytest.mark.slow
def test_a_folder_of_sentence_transformers_teaches_as_it_embeds(home: Path, teacher: Path, tmp_path: Path) -> None:
    """MiniLM as it was published: pooling, length and normalisation are read from its files."""
    from sentence_transformers import SentenceTransformer

    config = load("embed/quickstart", words_of(home, *of(MINILM, "distill.teacher.weights=float32")))
    rows = embed_run.prepare(load("embed/quickstart", words_of(home)))[1].train
    source = teacher_sources.find(config.distill.teacher, config.model)
    found = embedding_teachers.vectors(embedding_teachers.find(source, config), rows, config)
    theirs = SentenceTransformer(MINILM, device="cpu", local_files_only=True)
    np.testing.assert_allclose(found, theirs.encode(list(rows.units.texts)), atol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_hub_id_teaches_as_its_folder(home: Path, tmp_path: Path) -> None:
    """Its files are found in the hub's cache, pooling and the rest among them."""
    kept = tmp_path / "hub" / "models--somebody--embedder"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    shutil.copytree(MINILM, kept / "snapshots" / "abc")
    words = words_of(home, *of("somebody/embedder"))
    asking = "import sys, workbench as w; print(w.check(w.load_recipe('embed/quickstart', sys.argv[1:])).notes)"
    known = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", asking, *words], env=known, capture_output=True, text=True)
    assert "Vectors of 384 numbers, of the student 32, by principal components." in found.stdout, found.stderr


@pytest.mark.slow
def test_several_teachers_say_the_mean_of_their_similarities(home: Path, teacher: Path) -> None:
    other = home / "other"
    if not other.exists():
        trained(home, "other", f"model.id={home / 'wide'}", "seed=1", "train.steps=2")
    config = load("embed/quickstart", words_of(home, *of(teacher)))
    rows = embed_run.prepare(load("embed/quickstart", words_of(home)))[1].train
    alike = []
    # Of one backbone, and of several.
    for names in (str(teacher), str(other), MINILM, [str(teacher), str(other)], [str(teacher), MINILM]):
        section = DistillConfig.model_validate({"teacher": {"id": names}})
        source = teacher_sources.find(section.teacher, config.model)
        vectors = embedding_teachers.vectors(embedding_teachers.find(source, config), rows, config)
        alike.append(vectors @ vectors.T)
    np.testing.assert_allclose(alike[3], (alike[0] + alike[1]) / 2, atol=1e-6)
    np.testing.assert_allclose(alike[4], (alike[0] + alike[2]) / 2, atol=1e-6)


def test_principal_directions_keep_what_can_be_kept() -> None:
    """As much of the dot products as any plane can: that of the largest singular values."""
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(40, 3)) @ draw.normal(size=(3, 12))
    directions, kept = embedding_teachers.principal_directions(vectors, 3)
    np.testing.assert_allclose((vectors @ directions) @ (vectors @ directions).T, vectors @ vectors.T, atol=1e-4)
    assert kept == pytest.approx(1)
    _, values, _ = np.linalg.svd(vectors)
    assert embedding_teachers.principal_directions(vectors, 1)[1] == pytest.approx(values[0] ** 2 / (values**2).sum())


MISTAKES: dict[str, tuple[str, list[str], str]] = {
    "no pooling": ("wide", [], r"it does not say how .* \(no modules.json\).*Write a run of recipe embed, or a folder"),
    "a classifier": ("classes", [], "a run of recipe classify embeds no texts. Write one of recipe embed"),
    "other modules": ("dense", [], "a module Dense, which recipe embed has not. Write a run"),
    "another pooling": ("max", [], r"pools tokens by max, and recipe embed by mean\|first"),
    "a student that pools otherwise": (
        "first",
        ["model.id=teacher"],
        "pools the tokens of a text by `first`, .* by `mean`. Write embed.pooling=first",
    ),
    "fewer numbers": ("narrow", [], "32 numbers, the student's 64. Write distill.loss=relation"),
    "shorter embeddings": ("teacher", ["embed.sizes=[8]"], "whole embeddings alone.* Write distill.loss=relation"),
    "texts that are there": (
        "teacher",
        ["distill.unlabelled=texts.jsonl"],
        "have every text of .* already. Give other",
    ),
    "no column of texts": (
        "teacher",
        ["distill.unlabelled=columns.jsonl"],
        "none of the columns .* Write data.columns=",
    ),
    "no such texts": ("teacher", ["distill.unlabelled=nowhere.jsonl"], "nowhere.jsonl"),
    "nobody": ("nobody", [], "nobody"),
}


@pytest.fixture(scope="module")
def wrong(home: Path, teacher: Path) -> Path:
    """Folders, runs and files, each another mistake."""
    folder = home / "wrong"
    folder.mkdir()
    narrow = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    narrow.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    for name, more, pooling in (
        ("narrow", [], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}),
        ("first", [], {"pooling_mode": "cls"}),
        ("max", [], {"pooling_mode_max_tokens": True}),
        ("dense", [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], {"pooling_mode": "mean"}),
    ):
        shutil.copytree(home / "bert", folder / name)
        (folder / name / "modules.json").write_text(json.dumps([*narrow, *more]))
        (folder / name / "1_Pooling").mkdir()
        (folder / name / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "wide").symlink_to(home / "wide")
    (folder / "teacher").symlink_to(teacher)
    write_lines(folder / "texts.jsonl", [{"text": each["anchor"].upper()} for each in pairs(9)])
    write_lines(folder / "columns.jsonl", [{"words": "a", "more": "b"}])
    words = [f"data.train={home / 'classes.jsonl'}", f"model.id={home / 'bert'}", "train.steps=1", *SHORT]
    workbench.run("classify/quickstart", [*words, "data.columns={}"], out=folder / "classes", quiet=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_teach_is_told(name: str, home: Path, wrong: Path) -> None:
    who, words, sentence = MISTAKES[name]
    own = [word.replace("unlabelled=", f"unlabelled={wrong}/") for word in words]
    student = home / ("wide" if name == "fewer numbers" else "bert")
    with pytest.raises(WorkbenchError, match=f"(?s){sentence}"):
        check(load("embed/quickstart", words_of(home, f"model.id={student}", *of(wrong / who), *own)))


@pytest.mark.slow
def test_a_mistake_ends_with_status_2(
    home: Path, wrong: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.join(words_of(home, *of(wrong / "max")))
    assert_refused_with(
        ["pools tokens by max", "Write a run of recipe embed"], f"run embed/quickstart {words}", monkeypatch, capsys
    )


@pytest.mark.slow
def test_a_plan_of_a_student_is_one_of_its_task(home: Path, teacher: Path) -> None:
    """The teacher is gone by the time that the student trains."""
    student, plain = (plan(load("embed/quickstart", words_of(home, *words))) for words in (of(teacher), []))
    assert student.peak == plain.peak
