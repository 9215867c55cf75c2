"""A student of a cross-encoder learns its scores of a query's candidates, and says what they were worth."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import workbench
from tests.conftest import MINILM, save_tiny
from tests.mistakes.cases import assert_refused_with
from tests.recipes.tasks.rerank.test_rerank_run import questions, scored
from tests.run_files import read_losses, read_scores, write_lines
from workbench.config.sections.distill_config import DistillConfig
from workbench.distillation import ranking_teachers, teacher_sources
from workbench.distillation.ranking_teachers import PairScores
from workbench.errors import WorkbenchError
from workbench.recipes.load import load
from workbench.recipes.over import distill_rankings
from workbench.recipes.tasks.rerank import task as reranking
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.merge import merge
from workbench.report import run_record, teacher_worth
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Silent

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SHORT = ["evaluate.every=null", "save.every=null", "batch.size=12", "train.learning_rate=5e-3", "data.held_out=0.25"]
SHORT += ["data.columns={}", "rerank.passage_prefix=''", "rerank.candidates=6", "rerank.negatives=2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT and rows."""
    folder = tmp_path_factory.mktemp("rerankers")
    save_tiny(folder / "bert", "Bert", "SequenceClassification", MINILM, num_hidden_layers=3)
    write_lines(folder / "rows.jsonl", questions(48))
    write_lines(folder / "scored.jsonl", scored(48))
    return folder


@pytest.fixture(scope="module")
def teacher(home: Path) -> Path:
    """A trained run, with an instruction before queries. Read only."""
    return trained(home, "teacher", "rerank.query_prefix='find: '", "train.epochs=12")


def words_of(home: Path, *words: str) -> list[str]:
    known = [f"data.train={home / 'rows.jsonl'}", f"model.id={home / 'bert'}", "model.weights=float32"]
    return [*known, *SHORT, *words]


def trained(home: Path, name: str, *words: str) -> Path:
    return workbench.run("rerank/quickstart", words_of(home, *words), out=home / name, quiet=True)


def of(teacher: Path | str, *words: str) -> list[str]:
    return ["recipe=distill", "of=rerank", f"distill.teacher.id={teacher}", *words]


@pytest.mark.parametrize("loss", ["forward_kl", "margin_mse", "mse"])
def test_the_loss_is_that_of_the_labels_and_of_the_scores(home: Path, loss: str, tmp_path: Path) -> None:
    """As published: T^2 KL over the candidates, squared differences of margins, and of scores; written out."""
    heat = 2.0 if loss == "forward_kl" else 1.0
    section = DistillConfig(alpha=0.3, loss=loss, temperature=heat)  # type: ignore[arg-type]
    config = load("rerank/quickstart", words_of(home))
    tokenizer, data, _ = reranking.prepare(config)
    student = reranking.RerankRun(config, Run(tmp_path, None, resumed=False), Silent(), tokenizer, data)
    key_P = np.unique(
        np.concatenate([ranking_teachers.keys(data.train.seen(epoch=e, step=0).all_pairs) for e in (0, 1)])
    )
    said = PairScores(key_P, np.random.default_rng(0).normal(size=len(key_P)))
    live = SimpleNamespace(loss_of=reranking_loss(config), scores=lambda batch: scores_of(batch.rows_B))

    def scores_of(rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.sin(np.arange(3 * len(rows))))

    taught = config.model_copy(update={"distill": section})
    signal = distill_rankings._supervise(taught, student, said, {}, "it")(live, None, lambda: 0.0)  # type: ignore[arg-type]
    rows = np.asarray([4, 0, 7])
    seen = signal.train.seen(epoch=1, step=9)
    found = float(signal.loss(seen.batch(rows, epoch=1), 0.5))
    drawn = data.train.seen(epoch=1, step=9)
    own = scores_of(rows).reshape(3, 3).double()
    wanted = torch.from_numpy(said.of(ranking_teachers.keys(drawn.all_pairs)).reshape(-1, 3)[rows])
    if loss == "forward_kl":
        p, q = (wanted / heat).softmax(1), (own / heat).softmax(1)
        soft = heat**2 * (p * (p / q).log()).sum()
    elif loss == "mse":
        soft = ((own - wanted) ** 2).mean(1).sum()
    else:
        gaps = [each[:, :1] - each[:, 1:] for each in (own, wanted)]
        soft = ((gaps[0] - gaps[1]) ** 2).mean(1).sum()
    hard = -own.log_softmax(1)[:, 0].sum()
    assert found == pytest.approx(0.5 * (0.7 * float(hard) + 0.3 * float(soft)), rel=1e-5)


def reranking_loss(config: workbench.RunConfig) -> object:
    from workbench.models.reranker import Reranker

    return lambda *given: Reranker.loss_of(SimpleNamespace(config=config.rerank), *given)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_teacher_scores_pairs_as_its_run_does(home: Path, teacher: Path) -> None:
    """With its own instructions, over the candidates of every pass."""
    config = load("rerank/quickstart", words_of(home, *of(teacher)))
    source = teacher_sources.find(config.distill.teacher, config.model)
    found = ranking_teachers.find(source, config)
    _, data, _ = reranking.prepare(load("rerank/quickstart", words_of(home)))
    model = found.load()
    said = ranking_teachers.asked(
        model, data.train, ranking_teachers.as_read(data.train, found, model, config.rerank), 2
    )
    texts = data.train.pairs.units.texts
    for pairs in (data.train.seen(epoch=epoch, step=0).all_pairs.take(np.arange(5)) for epoch in (0, 1)):
        own = [([f"find: {texts[q]}"], [texts[p]]) for q, p in zip(pairs.query_P, pairs.passage_P, strict=True)]
        wanted = [float(model.scores(model.joins.batch(*each))) for each in own]
        np.testing.assert_allclose(said.of(ranking_teachers.keys(pairs)), wanted, rtol=1e-4, atol=1e-5)
    assert np.isnan(said.of(np.asarray([-1, 10**9]))).all()


@pytest.mark.slow
def test_half_of_the_layers_learn_from_the_teacher(home: Path, teacher: Path, tmp_path: Path) -> None:
    """The student starts with its teacher's weights and head; its scores are those of what it ships."""
    words = ["distill.student.layers=important-2", "distill.control=true", "adapter={method: full}", "train.epochs=2"]
    run = trained(home, "half", *of(teacher, "model.id=teacher"), *words, "train.learning_rate=1e-4")
    scores = read_scores(run)
    told = " ".join(check(load("rerank/quickstart", words_of(home, *of(teacher, "model.id=teacher"), *words))).notes)
    start, before = (f"{scores[name]['ndcg@10']:.4g}" for name in ("teacher", "before"))
    assert f"nDCG at 10 before training is {before}, on 12 held-out rows; the teacher's is {start}." in told
    assert scores["teacher"]["ndcg@10"] == pytest.approx(read_scores(teacher)["after"]["ndcg@10"], abs=1e-3)
    assert json.loads((run / "manifest.json").read_text())["student"]["layers"] == [[0, 2]]
    assert {"student", "teacher"} <= scores["costs"].keys()
    found = teacher_worth.worth(run_record.read(run))
    assert found is not None and f"held-out ndcg@10 {scores['after']['ndcg@10']:.4g}" in found.sentence
    assert evaluate(run, []) == scores["after"]
    merge(run, out=tmp_path / "merged", weights="float32")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.slow
def test_without_the_teacher_it_is_the_plain_run(home: Path, teacher: Path) -> None:
    plain = trained(home, "plain", "train.steps=3")
    silent = trained(home, "silent", *of(teacher, "distill.alpha=0"), "train.steps=3")
    assert read_losses(silent) == read_losses(plain)
    assert read_scores(silent)["after"] == read_scores(plain)["after"]


@pytest.mark.slow
def test_a_merged_teacher_says_the_same_and_rows_may_have_scores(home: Path, tmp_path: Path) -> None:
    """A stock cross-encoder teaches as the run that it was merged from."""
    words = [
        f"data.train={home / 'scored.jsonl'}",
        "rerank.negatives=4",
        "rerank.candidates=20",
        "rerank.loss=bce",
        "train.epochs=4",
    ]
    plain = trained(home, "stock", *words)
    merge(plain, out=tmp_path / "merged", weights="float32")
    runs = [
        trained(
            home,
            name,
            *words,
            *of(teacher, "distill.loss=mse", "distill.alpha=1", "distill.teacher.weights=float32"),
            "distill.control=true",
        )
        for name, teacher in (("of-run", plain), ("of-folder", tmp_path / "merged"))
    ]
    one, other = (read_scores(run)["teacher"]["spearman"] for run in runs)
    assert one == pytest.approx(other, abs=1e-3)
    assert read_losses(runs[0]) == pytest.approx(read_losses(runs[1]), rel=1e-2)
    assert read_losses(runs[0])[-1] < read_losses(runs[0])[0]


@pytest.fixture(scope="module")
def wrong(home: Path, teacher: Path) -> Path:
    """Models, each another mistake."""
    folder = home / "wrong"
    folder.mkdir()
    save_tiny(folder / "two", "Bert", "SequenceClassification", MINILM)  # with two classes
    save_tiny(folder / "masked", "Bert", "MaskedLM", MINILM)
    (folder / "teacher").symlink_to(teacher)
    (folder / "other").symlink_to(teacher)
    words = [f"data.train={home / 'rows.jsonl'}", f"model.id={folder / 'masked'}", *SHORT[:5], "train.steps=1"]
    workbench.run("embed/quickstart", words, out=folder / "embedder", quiet=True)
    return folder


MISTAKES: dict[str, tuple[str, list[str], str]] = {
    "a classifier": ("two", [], "no head that gives a pair of texts one score. Write a run of recipe rerank, or a"),
    "no head": ("masked", [], "no head that gives a pair of texts one score"),
    "an embedder": ("embedder", [], "a run of recipe embed scores no pairs .* Write one of recipe rerank"),
    "several": ("teacher, {}/other", [], "one teacher scores pairs, and these are 2. Name one of them"),
    "lists of one": (
        "teacher",
        ["data.train=SCORED", "rerank.loss=bce", "rerank.negatives=4", "rerank.candidates=20"],
        "distill.loss=mse",
    ),
    "texts alone": ("teacher", ["distill.unlabelled=some.jsonl"], "distill.unlabelled: .* Leave it out"),
    "a clock": ("teacher", ["budget.time=60"], "budget.time: .* Write train.epochs"),
    "nobody": ("nobody", [], "nobody"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_teach_is_told(name: str, home: Path, wrong: Path) -> None:
    who, words, sentence = MISTAKES[name]
    teacher = f"[{wrong}/{who}]".replace("{}", str(wrong)) if "," in who else wrong / who
    own = [word.replace("SCORED", str(home / "scored.jsonl")) for word in words]
    with pytest.raises(WorkbenchError, match=f"(?s){sentence}"):
        check(load("rerank/quickstart", words_of(home, *of(teacher), *own)))


@pytest.mark.slow
def test_a_mistake_ends_with_status_2(
    home: Path, wrong: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.join(words_of(home, *of(wrong / "two")))
    assert_refused_with(
        ["one score", "Write a run of recipe rerank"], f"run rerank/quickstart {words}", monkeypatch, capsys
    )
