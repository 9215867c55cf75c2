"""A router of a fleet: it learns whose prompt is whose, and a server answers through the member that it chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.run_files import write_lines
from tests.workbench.evaluation.serving.conftest import SETTINGS, save_runs
from workbench.config import RunConfig
from workbench.errors import ConfigError, FileError
from workbench.evaluation.serving.app import Server
from workbench.evaluation.serving.prompt_router import FILE, PromptRouter
from workbench.recipes.verbs import serving
from workbench.recipes.verbs.router import router
from workbench.runs import run_directory

THINGS = ("dog", "cat", "big tree", "red bird", "small boat")
PROMPTS = {
    "sums": [f"What comes after {n}?" for n in range(10)],
    "tales": [f"Once upon a time {name} saw a {what}." for name in ("Ada", "Bob") for what in THINGS],
    "names": [f"My name is {name} and I like my {what}" for name in ("Lily", "Ben") for what in THINGS],
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """Three members with prompts of their own, one that all of them have, and adapters of random values."""
    folder, members = tmp_path_factory.mktemp("fleet"), dict[str, Any]()
    saved = save_runs(folder / "run/members", stories, [{"method": "lora", "rank": 2, "alpha": 8}] * 3)
    for run, (name, prompts) in zip(saved, PROMPTS.items(), strict=True):
        rows = write_lines(folder / f"{name}.jsonl", [{"prompt": p, "completion": "!"} for p in [*prompts, "So?"]])
        members[name] = {"data.train": str(rows)}
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("rows.jsonl", str(rows)))
        run.rename(run.with_name(name))
    model = {"id": stories, "weights": "float32", "compute": "float32"}
    sections = {"recipe": "fleet", "model": model, "train": {"steps": 1}, "fleet": {"members": members}}
    run_directory.start(folder / "run", RunConfig.model_validate(sections), resume=False).close()
    return folder / "run"


def test_prompts_go_to_their_member_and_a_server_answers_through_it(fleet: Path, tmp_path: Path) -> None:
    scores = router(fleet)
    assert scores["accuracy"] >= 0.8 > 0.6 >= scores["likeliest"]
    assert (scores["prompts"], scores["shared"]) == (31, 1)
    models = serving.load(serving.named([str(fleet)], trust=False), SETTINGS)
    assert [model.name for model in models][:-1] == [*sorted(PROMPTS), "auto"]
    with TestClient(Server(models, SETTINGS.limits).app, base_url="http://127.0.0.1") as client:
        for name, prompts in PROMPTS.items():
            asked = {"prompt": prompts[3], "max_tokens": 4, "temperature": 0}
            auto, own = (client.post("/v1/completions", json={"model": m, **asked}).json() for m in ("auto", name))
            assert auto["model"] == name and auto["choices"] == own["choices"]
        said = client.post("/v1/chat/completions", json={"model": "auto", "messages": [], "max_tokens": 1})
        assert said.status_code == 400
    again = [each.name for each in serving.named([f"all={fleet}"], trust=False)]
    assert again == [*(f"all/{name}" for name in sorted(PROMPTS)), "all"]
    with pytest.raises(ConfigError, match=r"called 'sums' already. Write NAME="):
        serving.named([f"sums={fleet / 'members' / 'tales'}", str(fleet)], trust=False)
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(FileError, match=r"cannot be read .* workbench router"):
        PromptRouter.read(tmp_path)
    with pytest.raises(ConfigError, match="is no fleet of members"):
        router(fleet / "members" / "sums")


@pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "c"]])
def test_chooses_what_the_probe_predicts_also_when_read_again(names: list[str], tmp_path: Path) -> None:
    from workbench.evaluation.frozen_features import linear_probe

    generator = np.random.default_rng(0)
    features_ND = generator.normal(3, [1, 5, 0.1, 2], (40, 4))
    name_N = generator.choice(names, 40)
    fitted = PromptRouter.fitted(features_ND, name_N.tolist())
    fitted.write(tmp_path)
    predicted = linear_probe(features_ND, name_N).predict(features_ND).tolist()
    assert fitted.chosen(features_ND) == PromptRouter.read(tmp_path).chosen(features_ND) == predicted
