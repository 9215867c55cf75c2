"""Files for clusters are what their own tools take, and start the command that a person would type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "scripts" / "launch"
IMAGE = re.compile(r"REGISTRY/[\w-]+:[\w.]+")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def jobs() -> dict[str, dict[str, Any]]:
    """The Job of each manifest of Kubernetes, by its file."""
    _, job = documents("kubernetes.yaml")
    (jobset,) = documents("jobset.yaml")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    of_set = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "of-set"}, **replicated["template"]}
    return {"kubernetes.yaml": job, "jobset.yaml": of_set}


def commands() -> dict[str, str]:
    """The shell command that each file starts on each machine, its lines joined."""
    found = {"skypilot.yaml": documents("skypilot.yaml")[0]["run"], "slurm.sh": (FOLDER / "slurm.sh").read_text()}
    for name, job in jobs().items():
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert IMAGE.fullmatch(container["image"])
        (found[name],) = container["args"]
    return {name: re.sub(r"\s*\\\n\s*", " ", text) for name, text in found.items()}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "jobset.yaml", "skypilot.yaml", "slurm.sh"])
def test_each_machine_starts_torchrun_with_the_same_run_which_is_begun_or_gone_on_with(name: str) -> None:
    (line,) = (line for line in commands()[name].splitlines() if "torchrun " in line and not line.startswith("#"))
    words = re.search(r"torchrun (.*) -m workbench\.cli\.verbs run (.*)", line)
    assert words and words[2].endswith('"${resume[@]}"')
    told = {word.partition("=")[0] for word in words[1].split() if word.startswith("--")}
    assert {"--nnodes", "--nproc-per-node", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint"} <= told


def test_pods_of_a_job_find_the_first_one_by_its_name() -> None:
    service, job = documents("kubernetes.yaml")
    spec = job["spec"]["template"]["spec"]
    host = f"{job['metadata']['name']}-0.{spec['subdomain']}"
    assert f"--rdzv-endpoint={host}:29500" in commands()["kubernetes.yaml"]
    assert service["metadata"]["name"] == spec["subdomain"] and service["spec"]["clusterIP"] == "None"
    (jobset,) = documents("jobset.yaml")
    name, own = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert f"--rdzv-endpoint={name}-{own}-0-0.{name}:29500" in commands()["jobset.yaml"]


def test_kubernetes_takes_the_manifests() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for each in (documents("kubernetes.yaml")[0], *jobs().values()):
        validator.validate(each, "1.34", strict=True)


def test_skypilot_takes_the_task() -> None:
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml(str(FOLDER / "skypilot.yaml")).num_nodes == 2
