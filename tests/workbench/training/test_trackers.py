"""What services of metrics get, read back through their own packages; none asks the network."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from workbench.config import RunConfig
from workbench.config.yaml_text import load_yaml
from workbench.runs.run_directory import Run
from workbench.training import trackers
from workbench.training.trackers import PROJECT, Trackers

LOSSES = {1: 3.5, 2: 3.25, 7: 2.125}


def _tensorboard(folder: Path) -> dict[int, float]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder / "mine" / PROJECT)).Reload()
    settings = (folder / "mine" / PROJECT).rglob("hparams.yml")
    assert "train.learning_rate: 0.5" in next(settings).read_text()
    return {each.step: each.value for each in found.Scalars("loss")}


def _mlflow(folder: Path) -> dict[int, float]:
    mlflow: Any = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id])
    assert run.info.run_name == "mine" and run.info.status == "FINISHED"
    assert run.data.params["train.learning_rate"] == "0.5"
    return {each.step: each.value for each in client.get_metric_history(run.info.run_id, "loss")}


def _trackio(folder: Path) -> dict[int, float]:
    with sqlite3.connect(folder / f"{PROJECT}.db") as known:
        rows = known.execute("select run_name, step, metrics from metrics").fetchall()
    assert {name for name, _, _ in rows} == {"mine"}
    return {step: json.loads(metrics)["loss"] for _, step, metrics in rows}


def _logged(path: Path) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, behind a head of seven bytes, as wandb writes them offline."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:  # what is left of a block has room for no head
            at += room
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def _wandb(folder: Path) -> dict[int, float]:
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = folder.rglob("*.wandb")
    records = [protocol.Record.FromString(each) for each in _logged(path)]
    (run,) = (each.run for each in records if each.HasField("run"))
    assert (run.project, run.display_name) == (PROJECT, "mine")
    settings = {item.key: item.value_json for each in records for item in each.config.update}
    assert settings["train.learning_rate"] == "0.5"
    steps = [
        {item.nested_key[0]: json.loads(item.value_json) for item in each.history.item}
        for each in records
        if each.HasField("history")
    ]
    return {step["_step"]: step["loss"] for step in steps}


def _swanlab(folder: Path) -> dict[int, float]:
    store = pytest.importorskip("swanlab.sdk.internal.core_python.store")
    protocol = pytest.importorskip("swanlab.proto.swanlab.record.v1.record_pb2")
    (path,), (settings,) = folder.rglob("*.swanlab"), folder.rglob("config.yaml")
    assert load_yaml(settings.read_text())["train.learning_rate"]["value"] == 0.5
    reader = store.DataStoreReader()
    reader.open(path)
    records = [protocol.Record.FromString(each) for each in reader]
    assert (records[0].start.project, records[0].start.name) == (PROJECT, "mine")
    scalars = [each.scalar for each in records if each.HasField("scalar")]
    return {each.step: each.value.number for each in scalars if each.key == "loss"}


READERS: dict[str, Callable[[Path], dict[int, float]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "wandb": _wandb,
    "swanlab": _swanlab,
}


@pytest.mark.filterwarnings("ignore")  # of other people's packages
@pytest.mark.parametrize("name", READERS)
def test_a_service_gets_settings_and_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    if name == "trackio":
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    (tmp_path / "mine").mkdir()
    train = {"steps": 7, "learning_rate": 0.5}
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "x"}, "train": train, "trackers": [name]})
    services = Trackers(config, cast(Run, SimpleNamespace(path=tmp_path / "mine")), cpu=True)
    for step, loss in LOSSES.items():
        services.log({"step": step, "loss": loss, "layers": [1, 2]})
    services.close()
    assert READERS[name](tmp_path) == LOSSES


def test_a_person_names_the_project_as_wandb_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert [trackers.project(names) for names in (("mlflow", "wandb"), ("mlflow",))] == ["mine", PROJECT]


def test_nothing_is_sent_where_nobody_is_named(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "x"}})
    services = Trackers(config, cast(Run, SimpleNamespace(path=tmp_path)), cpu=True)
    services.log({"step": 1, "loss": 1.0})
    services.close()
    assert not list(tmp_path.iterdir())
