"""A reranker on FairytaleQA: the section of a tale that answers a question, among the sections of the same tale.

    OMP_NUM_THREADS=1 python scripts/bench/rerank.py --model MODEL --data FAIRYTALEQA --out DIR [--rows 300]

MODEL is an encoder, such as all-MiniLM-L6-v2; FAIRYTALEQA holds fairytaleqa_qa.jsonl and fairytaleqa_stories.jsonl.
Rows to train on are of the training tales, queries of the test tales, each with all other sections of its tale (at most
--most) as given negatives. Told are nDCG at 10 and the reciprocal rank of the same candidates, with 95 % intervals over
queries: by cosines of the model's own mean embeddings, by the fresh head before training, and after it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import workbench
from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN
from workbench.config.sections.embed_config import EmbedConfig
from workbench.data.embedding import pair_set, rerank_candidates
from workbench.evaluation import retrieval_scores
from workbench.losses.ranking_losses import leading
from workbench.models import backbones, reranker
from workbench.models.embedder import Embedder
from workbench.runs import run_directory

RECIPE = {
    "recipe": "rerank",
    "adapter": {"method": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
    "schedule": {"name": "linear", "warmup": 0.1},
    "evaluate": {"every": None},
}
SHOWN = ("ndcg@10", "mrr", "recall@1")


def main() -> None:
    """Write rows, train, and print the scores."""
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = {"train": arguments.rows, "test": arguments.queries}
    files = {split: _write(arguments, split, count) for split, count in rows.items()}
    recipe = arguments.out / "rerank.yaml"
    recipe.write_text(json.dumps({**RECIPE, "data": {"train": str(files["train"]), "held_out": str(files["test"])}}))
    words = [f"model.id={arguments.model}", f"data.max_tokens={arguments.tokens}", "model.weights=float32"]
    words += [f"rerank.negatives={arguments.negatives}", f"rerank.candidates={arguments.most}", "batch.size=8"]
    words += [f"train.epochs={arguments.epochs}", f"train.learning_rate={arguments.rate}"]
    began = time.process_time()
    run = workbench.run(recipe, words, out=arguments.out / "run", quiet=True)
    seconds = time.process_time() - began
    scores = json.loads((run / "scores.json").read_text())
    config = run_directory.read_config(run)
    table = {"cosines of the model": _cosines(config), "fresh head": scores["before"], "after": scores["after"]}
    for title, own in table.items():
        print(f"{title:>22}: " + ", ".join(_shown(name, own) for name in SHOWN))
    print(f"{arguments.rows} rows, {arguments.queries} queries; {seconds:.0f} s of processor time for the run.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of FairytaleQA")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=300, help="questions to train on")
    parser.add_argument("--queries", type=int, default=100, help="questions to rank sections for")
    parser.add_argument("--most", type=int, default=10, help="sections that are ranked for a question")
    parser.add_argument("--negatives", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--rate", type=float, default=1e-3)
    return parser.parse_args()


def _write(arguments: argparse.Namespace, split: str, count: int) -> Path:
    """Rows of questions on one section of a tale, drawn from all over the split."""
    stories = {each["story"]: each["sections"] for each in _lines(arguments.data / "fairytaleqa_stories.jsonl")}
    asked = [
        each
        for each in _lines(arguments.data / "fairytaleqa_qa.jsonl")
        if each["split"] == split and len(each["sections"]) == 1 and len(stories[each["story"]]) > arguments.negatives
    ]
    generator = np.random.default_rng(0)
    rows = []
    for number in generator.permutation(len(asked))[:count]:
        each = asked[number]
        sections = stories[each["story"]]
        own = sections[each["sections"][0]]
        others = sorted({text for text in sections.values() if text != own})
        kept = [others[place] for place in np.sort(generator.permutation(len(others))[: arguments.most - 1])]
        rows.append({"anchor": each["question"], "positive": own, "negatives": kept})
    path = arguments.out / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(path)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _cosines(config: RunConfig) -> dict[str, float]:
    """Scores of the same candidates, ranked by the cosines of mean embeddings of the model as it came."""
    tokenizer = reranker.tokenizer_of(config)
    rows = rerank_candidates.load(config, tokenizer).held_out
    backbone = backbones.load(config.model, tokenizer, task=HIDDEN).model
    bare, texts = Embedder(backbone, backbone, tokenizer, EmbedConfig()), rows.pairs.units.texts
    units = pair_set.units(texts, tokenizer, max_tokens=config.data.max_tokens)
    found_UD = leading(retrieval_scores.embed_texts(bare, units), bare.width, normalise=True).double().numpy()
    order = rerank_candidates.ranking(rows, candidates=config.rerank.candidates)
    cosines = [
        found_UD[passages] @ found_UD[rows.pairs.anchor_N[row]]
        for row, passages in zip(order.row_Q, order.passages, strict=True)
    ]
    return retrieval_scores.mean_query_scores(retrieval_scores.ranked_candidates(rows, order, cosines)[0])


def _shown(name: str, scores: dict[str, float]) -> str:
    return f"{name} {scores[name]:.3f} ({scores[f'{name}_low']:.3f} to {scores[f'{name}_high']:.3f})"


if __name__ == "__main__":
    main()
