"""Gains of students from their teachers: tables over seeds, as Markdown and JSON. Finished runs are not run again.

    python scripts/bench/distill_tables.py causal --train train.jsonl --held-out held_out.jsonl --out runs/causal
    python scripts/bench/distill_tables.py encoder --model FOLDER --train train.csv --test test.csv --out runs/encoder
    python scripts/bench/distill_tables.py embedder --model FOLDER --train train.csv --test test.csv --out runs/embedder
    python scripts/bench/distill_tables.py ensemble --run runs/crossval-quickstart --out runs/ensemble
    python scripts/bench/distill_tables.py vocabularies --model FOLDER --out runs/vocabularies

causal    students with some layers of a fine-tuned language model: on labels alone, and with each divergence
encoder   the same of an encoder that classifies
embedder  students with some layers of sentence-transformers' model, by each distance from its vectors; and as cut
ensemble  one adapter taught by all adapters of a cross-validation, by what they say of rows that they trained on and
          out of fold, beside one on labels alone; and what predicting costs
vocabularies
          the starter taught by a language model of other tokens, by each loss that compares them

All students of a table take the same steps over the same rows; seeds change their order. --students and --taught
change the recipe: of all students, and of those alone that have a teacher.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import measuring
import pandas as pd
from measuring import Spread, Wanted

from workbench.config.yaml_text import load_yaml, read_yaml
from workbench.data import starter
from workbench.data.rows import RawRow, read_rows

LOSSES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation")
LABELS = "labels alone"
TEXT_SCORES = {"loss": "loss", "f1": "token F1", "rouge_l": "ROUGE-L"}
CLASS_SCORES = {"accuracy": "accuracy", "loss": "log-loss", "calibration_error": "calibration error"}
EMBEDDING_SCORES = {"ndcg@10": "nDCG at 10", "accuracy": "accuracy of the nearest"}
"""As scores.json calls them, and the tables."""
Recipe = dict[str, Any]
Rows = list[list[object]]


def main() -> None:
    arguments = _arguments()
    tables = {"causal": _causal, "encoder": _encoder, "embedder": _embedder, "ensemble": _ensemble}
    found = (tables | {"vocabularies": _vocabularies})[arguments.table](arguments)
    machine = measuring.machine(arguments.device, ("torch", "transformers", "peft"))
    measuring.write_report(arguments, machine=machine, **found)


def _causal(arguments: argparse.Namespace) -> Recipe:
    """Held-out loss and answer scores of students of a language model."""
    shared = {
        "adapter": {"method": "full"},
        "data": {"train": arguments.train, "held_out": arguments.held_out, "max_tokens": 512},
        "batch": {"size": 16},
        "train": {"epochs": 1.0, "learning_rate": 5e-4, "weight_decay": 0.01},
        "schedule": {"name": "cosine", "warmup": 0.1},
        "evaluate": {"every": None, "answers": 200, "max_new_tokens": 24},
        "save": {"every": None},
    }
    teacher = _teacher({"recipe": "sft", "model": {"id": arguments.model}, **shared}, arguments)
    arms: dict[str, Recipe] = {LABELS: {"alpha": 0.0}}
    arms |= {name: {"loss": name, "alpha": arguments.alpha} for name in arguments.losses}
    if match := load_yaml(arguments.match):
        arms[f"forward_kl, {match['what']}"] = {"loss": "forward_kl", "alpha": arguments.alpha, "match": [match]}
    return _students(teacher, arms, shared, "sft", TEXT_SCORES, arguments)


def _vocabularies(arguments: argparse.Namespace) -> Recipe:
    """Held-out loss of the starter, taught by a model of other tokens."""
    shared: Recipe = {
        "data": {"train": arguments.train, "held_out": arguments.held_out, "max_tokens": 512},
        "batch": {"size": 16},
        "schedule": {"name": "cosine", "warmup": 0.1},
        "evaluate": {"every": None, "answers": 0},
        "save": {"every": None},
    }
    rates = {"learning_rate": 5e-4, "weight_decay": 0.01}
    lora: Recipe = {"recipe": "sft", "model": {"id": arguments.model}, **shared, "train": {"steps": 50, **rates}}
    teacher = _teacher(lora, arguments)
    arms: dict[str, Recipe] = {LABELS: {"alpha": 0.0}}
    for loss, temperature in arguments.losses:
        kept = {} if loss == "universal" else {"cache": {"folder": str(arguments.out / f"kept-{loss}-{temperature:g}")}}
        arm = {"loss": loss, "temperature": temperature, "alpha": arguments.alpha, "control": False, **kept}
        arms[f"{loss}, temperature {temperature:g}"] = arm
    shared |= {"adapter": {"method": "full"}, "train": {"epochs": 2.0, **rates}}
    shared["data"] |= {"limit": arguments.rows}
    return _students(teacher, arms, shared, "sft", {"loss": "loss"}, arguments, model="starter")


def _loss_and_temperature(text: str) -> tuple[str, float]:
    loss, _, temperature = text.partition("@")
    return loss, float(temperature or 1)


def _encoder(arguments: argparse.Namespace) -> Recipe:
    """Test scores of students of a classifier."""
    columns = {} if arguments.label == "label" else {"label": arguments.label}
    data = {"train": arguments.train, "held_out": arguments.test, "columns": columns, "max_tokens": 128}
    shared = {
        "adapter": {"method": "full"},
        "data": {**data, "overlap": "drop"},
        "batch": {"size": 32},
        "train": {"epochs": 5.0, "learning_rate": 3e-4},
        "schedule": {"name": "linear", "warmup": 0.05},
        "evaluate": {"every": None},
        "save": {"every": None},
    }
    teacher = _teacher({"recipe": "classify", "model": {"id": arguments.model}, **shared}, arguments)
    arms = {LABELS: {"alpha": 0.0}, "teacher": {"alpha": arguments.alpha, "temperature": arguments.temperature}}
    return _students(teacher, arms, shared, "classify", CLASS_SCORES, arguments)


def _embedder(arguments: argparse.Namespace) -> Recipe:
    """Test scores of students of a sentence encoder, which no run trained."""
    shared: Recipe = {
        "adapter": {"method": "full"},
        "data": {
            "train": arguments.train,
            "held_out": arguments.test,
            "columns": {"label": arguments.label},
            "max_tokens": 64,
            "overlap": "drop",
        },
        "batch": {"size": 64},
        "train": {"epochs": arguments.epochs, "learning_rate": arguments.rate},
        "schedule": {"name": "linear", "warmup": 0.1},
        "evaluate": {"every": None},
        "save": {"every": None},
    }
    arms: dict[str, Recipe] = {LABELS: {"alpha": 0.0}}
    for loss in ("cosine", "mse", "relation"):
        arms |= {f"{loss}, alpha {alpha:g}": {"loss": loss, "alpha": alpha} for alpha in (arguments.alpha, 1.0)}
    measured: Recipe = {}
    for layers in arguments.layers:
        recipes = {
            f"{layers}/{arm}": {
                "recipe": "distill",
                "of": "embed",
                "model": {"id": "teacher"},
                "distill": {"teacher": {"id": arguments.model}, "student": {"layers": layers}, **settings},
                **shared,
            }
            for arm, settings in arms.items()
        }
        found = {name.split("/")[1]: runs for name, runs in _over_seeds(recipes, arguments).items()}
        taught = measuring.scores(found["cosine, alpha 1"][0])
        measured[layers] = {arm: _spreads(runs, EMBEDDING_SCORES) for arm, runs in found.items()}
        table: Rows = [[f"{layers} of {Path(arguments.model).name}", *EMBEDDING_SCORES.values()]]
        table += [
            [name, *(f"{taught[when][key]:.3f}" for key in EMBEDDING_SCORES)]
            for name, when in (("teacher", "teacher"), ("as cut", "before"))
        ]
        table += [[arm, *values.values()] for arm, values in measured[layers].items()]
        print(measuring.markdown(table), end="\n\n", flush=True)
    return measured


def _ensemble(arguments: argparse.Namespace) -> Recipe:
    """Test scores of one adapter beside the ensemble that teaches it, and the seconds that both predict in."""
    run: Path = arguments.run
    config = read_yaml(run / "config.yaml")
    if config["recipe"] != "crossval" or config["data"]["test"] is None:
        sys.exit(f"--run {run}: no cross-validation with data.test, on which all are compared.")
    shared = {name: config[name] for name in ("model", "adapter", "classes", "batch", "train", "schedule")}
    data = {name: config["data"][name] for name in ("columns", "max_tokens")}
    data |= {"train": str(_known_rows(run, config, arguments.out)), "held_out": config["data"]["test"]}
    shared |= {"data": data, "evaluate": {"every": None}, "save": {"every": None}}
    soft = {"alpha": arguments.alpha, "temperature": arguments.temperature}
    recipes: dict[str, Recipe] = {LABELS: {"recipe": "classify", **shared}}
    for name, out_of_fold in (("ensemble", False), ("ensemble, out of fold", True)):
        teacher = {"id": str(run), "out_of_fold": out_of_fold}
        recipes[name] = {"recipe": "distill", "of": "classify", "distill": {**soft, "teacher": teacher}, **shared}
    found = _over_seeds(recipes, arguments)
    rows = [row.columns for row in _read(config["data"]["test"])]
    models = {"ensemble": run, "one": found["ensemble"][0]}
    costs = measuring.predict(models, rows, arguments.out, repeats=arguments.repeats, device=arguments.device)
    members = len(json.loads((run / "decision.json").read_text(encoding="utf-8"))["members"])
    table: Rows = [["test scores", *CLASS_SCORES.values(), "seconds for 1,000 rows (of processor)"]]
    test = measuring.scores(run)["test"]
    ensemble = [f"{test[key]:.3f}" for key in CLASS_SCORES]
    table.append([f"ensemble of {members}", *ensemble, costs["ensemble"]])
    spreads = {arm: _spreads(runs, CLASS_SCORES) for arm, runs in found.items()}
    for arm, values in spreads.items():
        table.append([f"one adapter, {_from(arm)}", *values.values(), costs["one"]])
    print(measuring.markdown(table))
    return {"ensemble": test, "students": spreads, "predicting": costs}


def _teacher(recipe: Recipe, arguments: argparse.Namespace) -> Path:
    """The run that teaches: one that is there, or one of this recipe."""
    if arguments.teacher is not None:
        found: Path = arguments.teacher
        return found
    wanted = {"teacher": Wanted({"seed": 0, **recipe}, arguments.teachers)}
    return measuring.finish(wanted, arguments.out, jobs=1, device=arguments.device)["teacher"]


def _students(
    teacher: Path,
    arms: Mapping[str, Recipe],
    shared: Recipe,
    of: str,
    columns: Mapping[str, str],
    arguments: argparse.Namespace,
    *,
    model: str = "teacher",
) -> Recipe:
    """A table for each choice of layers of the model that a student starts as: the teacher, then each arm over the
    seeds."""
    best = measuring.scores(teacher)["after"]
    measured: Recipe = {"teacher": best, "students": {}}
    for layers in arguments.layers:
        student = {"layers": [int(layer) for layer in layers.split(",")] if layers[0].isdigit() else layers}
        recipes = {
            f"{layers}/{arm}": {
                "recipe": "distill",
                "model": {"id": model},
                "of": of,
                "distill": {"teacher": {"id": str(teacher)}, "student": student, **settings},
                **shared,
            }
            for arm, settings in arms.items()
        }
        found = {name.split("/")[1]: runs for name, runs in _over_seeds(recipes, arguments).items()}
        spreads = {arm: _spreads(runs, columns) for arm, runs in found.items()}
        first = next(iter(columns))
        plain = spreads[LABELS][first].values
        title = f"{len(student['layers'])} layers ({layers})" if layers[0].isdigit() else f"{layers} layers of {model}"
        table: Rows = [[title, *columns.values(), f"{columns[first]}, against {LABELS}", "of the teacher's"]]
        table.append(["teacher", *(f"{best[key]:.3f}" for key in columns), "", ""])
        for arm, values in spreads.items():
            gain = Spread.of([mine - theirs for mine, theirs in zip(values[first].values, plain, strict=True)])
            share = f"{values[first].mean / best[first]:.1%}"
            table.append([_from(arm), *values.values(), "" if arm == LABELS else gain, share])
        print(measuring.markdown(table), end="\n\n", flush=True)
        measured["students"][layers] = spreads
    return measured


def _over_seeds(recipes: Mapping[str, Recipe], arguments: argparse.Namespace) -> dict[str, list[Path]]:
    """The runs of each recipe, one a seed."""
    wanted = {}
    for seed in range(arguments.seeds):
        for name, recipe in recipes.items():
            words = [*arguments.students, *([] if name.endswith(LABELS) else arguments.taught)]
            wanted[f"{name}/seed-{seed}".replace(", ", "+").replace(" ", "-")] = Wanted({"seed": seed, **recipe}, words)
    runs = list(measuring.finish(wanted, arguments.out, jobs=arguments.jobs, device=arguments.device).values())
    return {name: runs[number :: len(recipes)] for number, name in enumerate(recipes)}


def _spreads(runs: Sequence[Path], columns: Mapping[str, str]) -> dict[str, Spread]:
    found = [measuring.scores(run)["after"] for run in runs]
    return {key: Spread.of([each[key] for each in found]) for key in columns}


def _from(arm: str) -> str:
    return arm if arm == LABELS else f"labels and {arm}"


def _known_rows(run: Path, config: Recipe, out: Path) -> Path:
    """The rows that the cross-validation trained on: it leaves out those that are near to a test row."""
    known = set(pd.read_parquet(run / "out_of_fold.parquet")["row"])
    rows = [row.columns for row in _read(config["data"]["train"]) if row.place in known]
    if len(rows) != len(known):
        sys.exit(f"{config['data']['train']} has {len(rows)} of the {len(known)} rows in {run}/out_of_fold.parquet.")
    return measuring.write_rows(rows, out / "train.jsonl")


def _read(source: str) -> Iterable[RawRow]:
    return read_rows(starter.resolve(source))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = parser.add_subparsers(dest="table", required=True)
    causal, encoder, embedder, ensemble, vocabularies = (
        tables.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for name in ("causal", "encoder", "embedder", "ensemble", "vocabularies")
    )
    for each in (causal, encoder, embedder, ensemble, vocabularies):
        each.add_argument("--out", type=Path, required=True, help="where the runs stand")
        each.add_argument("--alpha", type=float, default=0.5, help="share of the teacher in the loss")
        each.add_argument("--seeds", type=int, default=3, help="from 0 on")
        each.add_argument("--jobs", type=int, default=1, help="runs at a time")
        each.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        each.add_argument("--json", type=Path, help="write everything that was measured to this file")
        each.add_argument("--students", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of all students")
        each.add_argument("--taught", nargs="*", default=[], metavar="KEY=VALUE", help="of those with a teacher")
    for each, layers in ((causal, ["0,2,4", "0,4"]), (encoder, ["1,3,5"]), (vocabularies, ["all"])):
        if each is not vocabularies:
            each.add_argument("--train", required=True, help="file of rows")
        each.add_argument("--teacher", type=Path, help="a finished run that teaches; by default one is trained")
        each.add_argument("--teachers", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the teacher")
        each.add_argument("--layers", nargs="+", default=layers, help="of the teacher, that a student has")
    for each in (encoder, ensemble):
        each.add_argument("--temperature", type=float, default=2.0, help="of teacher and student")
    causal.add_argument("--model", default="starter", help="backbone of the teacher")
    causal.add_argument("--held-out", required=True, help="file of rows that are scored")
    causal.add_argument(
        "--match", default="{what: hidden_mse, layers: uniform}", help="of the last arm, as YAML; null: no such arm"
    )
    causal.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES, help="divergences, an arm for each")
    vocabularies.add_argument("--model", required=True, help="backbone of the teacher: a folder or hub id")
    vocabularies.add_argument("--train", default="starter/fairytaleqa_train.jsonl", help="file of rows")
    vocabularies.add_argument("--held-out", default="starter/fairytaleqa_held_out.jsonl", help="rows that are scored")
    vocabularies.add_argument("--rows", type=int, default=320, help="that a student reads, twice")
    vocabularies.add_argument(
        "--losses",
        nargs="+",
        type=_loss_and_temperature,
        default=[(loss, 1.0) for loss in ("gold", "alm", "universal")] + [("alm", 2.0), ("alm", 5.0)],
        metavar="LOSS@TEMPERATURE",
        help="an arm for each",
    )
    encoder.add_argument("--model", required=True, help="backbone of the teacher: a folder or hub id")
    encoder.add_argument("--test", required=True, help="file of rows that are scored")
    encoder.add_argument("--label", default="category", help="column with the class")
    embedder.add_argument("--model", required=True, help="folder of sentence-transformers")
    embedder.add_argument("--train", required=True, help="file of rows")
    embedder.add_argument("--test", required=True, help="file of rows that are scored")
    embedder.add_argument("--label", default="category", help="column with the class")
    embedder.add_argument("--layers", nargs="+", default=["important-50%"], help="of the teacher, that a student has")
    embedder.add_argument("--epochs", type=float, default=2.0)
    embedder.add_argument("--rate", type=float, default=3e-4)
    ensemble.add_argument("--run", type=Path, required=True, help="a finished cross-validation with data.test")
    ensemble.add_argument("--repeats", type=int, default=3, help="of predicting")
    return parser.parse_args()


if __name__ == "__main__":
    main()
