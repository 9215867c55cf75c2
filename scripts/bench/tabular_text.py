"""Texts beside numbers and categories: columns in the prompt, columns beside the text's vector, and gradient boosting.

    python scripts/bench/tabular_text.py [--train FILE --test FILE --texts question,answer --categories type,scope
        --numbers section,words,found] [--seeds 3]

Rows have two classes, in the column `label`. For each seed 80 % of the training rows are drawn and everything is fitted
anew to them; prints ROC-AUC and accuracy of the test rows in percent, means and spreads over seeds.

By runs of classify: the prompt has texts, columns, or both. By a loop of its own, with the same adapter and steps: both
in the prompt, to tell the loop from the runs; and columns beside the text's vector before the head (numbers
standardised, categories embedded, concatenated), with a linear head and with a hidden layer of 64. By scikit-learn:
histogram gradient boosting of columns, of 50 singular vectors of TF-IDF of the texts, and of both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from sklearn.compose import make_column_transformer
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder, StandardScaler
from torch import nn

import workbench
from workbench.adapters import Lora
from workbench.config import ModelConfig

EPOCHS, SIZE, RATE, TOKENS = 4, 32, 2e-3, 128
Floats = npt.NDArray[np.float64]
MODEL = ModelConfig(id="starter", weights="float32")


@dataclass(frozen=True)
class Table:
    """Rows to fit to and to test on, and which columns are of which kind."""

    train: pd.DataFrame
    test: pd.DataFrame
    texts: list[str]
    categories: list[str]
    numbers: list[str]

    def prompt(self, *parts: str) -> str:
        """A template of columns, then texts."""
        words = ", ".join(f"{name}: {{{name}}}" for name in [*self.categories, *self.numbers])
        texts = "\n".join(f"{{{name}}}" for name in self.texts)
        return "\n".join({"columns": words, "texts": texts}[part] for part in parts)


def by_run(*parts: str, table: Table, seed: int, folder: Path) -> Floats:
    """Probabilities of the second class by a run of classify over the shipped backbone."""
    out = folder / f"run-{'-'.join(parts)}"
    table.train.to_csv(folder / "train.csv", index=False)
    table.test.to_csv(folder / "test.csv", index=False)
    words = [f"data.train={folder}/train.csv", f"data.held_out={folder}/test.csv", "evaluate.every=null"]
    words += [f"classes.text={json.dumps(table.prompt(*parts))}", f"seed={seed}"]
    words += [
        f"data.max_tokens={TOKENS}",
        f"batch.size={SIZE}",
        f"train.epochs={EPOCHS}",
        f"train.learning_rate={RATE}",
    ]
    words += ["adapter.rank=16", "adapter.alpha=32", "data.overlap=tell", "evaluate.probe=0"]
    run = workbench.run("classify/quickstart", words, out=out)
    said = pd.read_parquet(run / "predictions.parquet")
    return np.asarray(said[f"p_{sorted(table.train.label.unique())[1]}"])


class BesideTexts(nn.Module):
    """The text's vector, standardised numbers and embedded categories, concatenated, then a head."""

    def __init__(self, backbone: nn.Module, width: int, numbers: int, sizes: Sequence[int], hidden: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.embeddings = nn.ModuleList(nn.Embedding(size, 8) for size in sizes)
        total = width + numbers + 8 * len(sizes)
        self.head = (
            nn.Sequential(nn.Linear(total, hidden), nn.GELU(), nn.Linear(hidden, 2)) if hidden else nn.Linear(total, 2)
        )

    def forward(self, texts: dict[str, Any], numbers: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        state = self.backbone(**texts, output_hidden_states=True).hidden_states[-1]
        last = texts["attention_mask"].sum(1) - 1
        parts = [state[torch.arange(len(last)), last], numbers]
        parts += [each(codes[:, place]) for place, each in enumerate(self.embeddings)]
        outputs: torch.Tensor = self.head(torch.cat(parts, 1))
        return outputs


def by_loop(*parts: str, table: Table, seed: int, folder: Path, hidden: int = 0, beside: bool = False) -> Floats:
    """The same by a loop of its own; `beside`: columns go past the backbone."""
    torch.manual_seed(seed)
    tokenizer = workbench.load_tokenizer(MODEL)
    tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
    backbone = workbench.load_backbone(MODEL, tokenizer).model
    width, prompt = backbone.config.hidden_size, table.prompt(*parts)
    scale = StandardScaler().fit(table.train[table.numbers])
    coder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1).fit(table.train[table.categories])
    sizes = [len(each) + 1 for each in coder.categories_] if beside else []
    model = BesideTexts(
        workbench.attach(backbone, Lora(rank=16, alpha=32, targets="all-linear")),
        width,
        len(table.numbers) * beside,
        sizes,
        hidden,
    )

    def inputs(rows: pd.DataFrame) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        texts = [prompt.format(**row) for row in rows.to_dict("records")]
        read = tokenizer(
            texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt", return_token_type_ids=False
        )
        numbers = torch.tensor(scale.transform(rows[table.numbers]), dtype=torch.float32)
        codes = torch.tensor(coder.transform(rows[table.categories]) + 1, dtype=torch.long)
        return dict(read), numbers if beside else numbers[:, :0], codes

    targets = torch.tensor((table.train.label == sorted(table.train.label.unique())[1]).to_numpy(), dtype=torch.long)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    steps = EPOCHS * len(table.train) // SIZE
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / warm, (steps - s) / (steps - warm)))
    model.train()
    for step in range(steps):
        batch = workbench.global_batch(step, rows=len(table.train), size=SIZE, seed=seed)
        loss = nn.functional.cross_entropy(model(*inputs(table.train.iloc[batch])), targets[batch])
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        said = [
            model(*inputs(table.test.iloc[start : start + 100])).softmax(1)[:, 1]
            for start in range(0, len(table.test), 100)
        ]
    return np.asarray(torch.cat(said).double())


def by_boosting(*parts: str, table: Table, seed: int, folder: Path) -> Floats:
    """The same by histogram gradient boosting, with scikit-learn's defaults."""

    def joined(rows: pd.DataFrame) -> list[str]:
        return ["\n".join(map(str, row)) for row in rows[table.texts].to_numpy()]

    features: list[tuple[Any, Any]] = []
    vectors = make_pipeline(TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2)), TruncatedSVD(50, random_state=seed))
    if "columns" in parts:
        coder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan)
        features += [(coder, table.categories), ("passthrough", table.numbers)]
    if "texts" in parts:
        features += [(vectors, "joined")]
    known = list(range(len(table.categories))) if "columns" in parts else None
    model = make_pipeline(
        make_column_transformer(*features),
        HistGradientBoostingClassifier(categorical_features=known, random_state=seed),
    )
    train, test = (rows.assign(joined=joined(rows)) for rows in (table.train, table.test))
    return np.asarray(model.fit(train, train.label).predict_proba(test)[:, 1])


WAYS: dict[str, Callable[..., Floats]] = {
    "boosting: columns": partial(by_boosting, "columns"),
    "boosting: texts": partial(by_boosting, "texts"),
    "boosting: columns and texts": partial(by_boosting, "columns", "texts"),
    "run: texts": partial(by_run, "texts"),
    "run: columns": partial(by_run, "columns"),
    "run: columns and texts": partial(by_run, "columns", "texts"),
    "loop: columns and texts": partial(by_loop, "columns", "texts"),
    "loop: columns beside the vector, linear head": partial(by_loop, "texts", beside=True),
    "loop: columns beside the vector, hidden layer": partial(by_loop, "texts", beside=True, hidden=64),
}


def main(asked: argparse.Namespace) -> None:
    train, test = (pd.read_csv(path) for path in (asked.train, asked.test))
    kinds = [each.split(",") for each in (asked.texts, asked.categories, asked.numbers)]
    for frame in (train, test):
        frame[kinds[0] + kinds[1]] = frame[kinds[0] + kinds[1]].astype(str)
    second = sorted(train.label.unique())[1]
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in asked.only or WAYS}
    for seed in range(asked.seeds):
        folder = asked.out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        table = Table(train.sample(frac=0.8, random_state=seed), test, *kinds)
        for way in found:
            said, true = np.asarray(WAYS[way](table=table, seed=seed, folder=folder)), test.label == second
            found[way].append((100 * roc_auc_score(true, said), 100 * accuracy_score(true, said > 0.5)))
            mean, spread = np.mean(found[way], 0), np.std(found[way], 0, ddof=min(1, seed))
            cells = [f"{a:.1f} (sd {b:.1f})" for a, b in zip(mean, spread, strict=True)]
            print(f"seed {seed}  {way:46} ROC-AUC {cells[0]}  accuracy {cells[1]}", flush=True)


if __name__ == "__main__":
    shipped = Path(workbench.__file__).parent / "data" / "starter"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, default=shipped / "stories_train.csv")
    parser.add_argument("--test", type=Path, default=shipped / "stories_test.csv")
    parser.add_argument("--texts", default="question,answer")
    parser.add_argument("--categories", default="type,scope")
    parser.add_argument("--numbers", default="section,words,found")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WAYS)
    parser.add_argument("--out", type=Path, default=Path("runs/tabular-text"))
    main(parser.parse_args())
