"""The same loss curve and the same weights, however many processes there are and whatever each of them holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import workbench
from tests.conftest import Records, cells, record_cell
from tests.matrix import EXAMPLE, FEW_TOKENS, LAYOUTS, MANY_TOKENS, METHOD_NAMES, WITH_DISK, layout_with_method
from tests.workbench.training.distributed import layouts
from workbench.adapters import METHODS as ADAPTERS
from workbench.config.yaml_text import dump_yaml

pytestmark = pytest.mark.slow

STEPS = 4
LAID_OUT = [tuple(cell.values) for cell in layout_with_method()]
METHODS = {"lora": "{method: lora, rank: 4, alpha: 8}", "full": "{method: full}"}
CUT = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 50_000}
"""A person's own DeepSpeed JSON, which cuts every weight, however small; the head's comes before it is needed."""
NVME = "{{zero: 3, offload_optimizer: nvme, offload_parameters: nvme, nvme: {folder}}}"
CUTTING = ("zero3", "fsdp2_2", "fsdp2_3")
SETTINGS = {
    "trainable-tokens": ", tokens: [5, 6]",
    "boft": ", block: 2",
    "oft": ", block: 4",
    "waveft": ", coefficients: 2048",
}
PACKED = [
    name
    for name in METHOD_NAMES
    if "nf4" in ADAPTERS[name].about[name].weights
    and not ADAPTERS[name].about[name].plain_lora
    and name
    not in ("adalora", "alora", "beft", "bitfit", "lora-ga", "loftq", "vb-lora")  # refused in shares, or off this model
]
EXPERTS = "adapter={method: lora, rank: 4, alpha: 8, experts: true}"
OVER_CUT = {
    "packed": [f"adapter={METHODS['lora']}", "model.weights=nf4"],
    "probe": ["adapter={method: linear-probe}"],
    "experts": ["model.id={}/mixture", EXPERTS],
    "packed experts": ["model.id={}/mixture", EXPERTS, "model.weights=nf4"],
    "packed frozen experts": ["model.id={}/mixture", f"adapter={METHODS['lora']}", "model.weights=nf4"],
    **{
        f"packed {name}": [
            *[f"plugins=[{EXAMPLE}]", f"adapter={{method: {name}{SETTINGS.get(name, '')}}}", "model.weights=nf4"],
        ]
        for name in PACKED
    },
}
"""What is trained besides where weights are cut: over 4-bit ones, by every method, and over blocks that are frozen."""
NOT_BY_DEEPSPEED = [over for over, own in OVER_CUT.items() if EXPERTS in own or over == "packed dora"]
TO_CUT = [
    (over, layout) for over in OVER_CUT for layout in CUTTING if layout != "zero3" or over not in NOT_BY_DEEPSPEED
]
SAMPLED = {
    **{by: ["ddp"] for by in ("infobatch", "importance", "learned mix", "self-paced", "gradient")},
    "selective": ["ddp", "zero3"],
}
"""Rows drawn, ordered or chosen by losses or gradients that other processes have measured."""
CHOSEN = {
    "learned mix": [
        *["data.train=null", "data.mix.by=learned", "data.mix.every=2"],
        *[f"data.sources.{name}.path={{}}/{name}.jsonl" for name in ("rows", "more")],
    ],
    "self-paced": ["data.curriculum={by: self_paced, start: 0.3}"],
    "gradient": [
        *["data.select={by: gradient, rows: 12, warm_up: 0.25}", "data.select.target={}/few.jsonl"],
        *["data.limit=18", "batch.size=6"],  # whose gradients are computed one by one
    ],
}
"""How those are asked for that data.sampling does not name."""
RESUMED = {
    "zero2 to ddp": ("zero2", "ddp"),
    "ddp to zero3": ("ddp", "zero3"),
    "zero3 to zero1": ("zero3", "zero1"),
    "zero3 to fsdp2": ("zero3", "fsdp2_3"),
    "fsdp2 to fsdp2": ("fsdp2_3", "fsdp2_3"),
    "ddp to ddp": ("ddp", "ddp"),
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """The runs of two processes that are asked for, and those of one, in folders of their names."""
    folder = tmp_path_factory.mktemp("layouts")
    model = AutoModelForCausalLM.from_pretrained(short_stories, tie_word_embeddings=False)
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(short_stories).save_pretrained(folder / "model")
    write_recipe(folder, folder / "model")
    jobs: list[tuple[str, list[str], str | None]] = []
    (folder / "cut.json").write_text(json.dumps({"zero_optimization": CUT}))
    sharings = {**LAYOUTS, "json": f"{{deepspeed: {folder / 'cut.json'}}}"}
    if WITH_DISK:
        (folder / "disk").mkdir()
        sharings["nvme"] = NVME.format(folder=folder / "disk")
    for method, section in METHODS.items():
        for budget in (FEW_TOKENS, MANY_TOKENS):
            words = [f"adapter={section}", f"batch.tokens_per_device={budget}"]
            workbench.run(str(folder / "recipe.yaml"), words, out=folder / f"{method} {budget} alone", quiet=True)
            jobs += [
                (f"{method} {budget} {name}", [*words, f"distributed={layout}"], None)
                for name, layout in sharings.items()
                if (name, method, budget) in LAID_OUT
            ]
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    save_model(folder / "mixture", short_stories, "mixtral", **sizes)
    asked_over = {cell["over"] for cell in cells(request, "test_whatever_is_cut")} | {"packed"}
    for over in OVER_CUT.keys() & asked_over:
        words = [*(word.replace("{}", str(folder)) for word in OVER_CUT[over])]
        words.append(f"batch.tokens_per_device={MANY_TOKENS}")
        workbench.run(str(folder / "recipe.yaml"), words, out=folder / f"{over} alone", quiet=True)
        jobs += [(f"{over} {name}", [*words, f"distributed={LAYOUTS[name]}"], None) for name in CUTTING]
    for by, names in SAMPLED.items():
        own = CHOSEN.get(by, [f"data.sampling.by={by}"])
        chosen = [word.replace("{}", str(folder)) for word in own]
        # Rows are left out once the losses of an epoch are known, and looked at in every step.
        steps = STEPS if by == "selective" else 2 * STEPS
        words = [f"adapter={METHODS['lora']}", "batch.size=16", f"train.steps={steps}", "save.every=null", *chosen]
        if any(cell["by"] == by for cell in cells(request, "test_rows_that_losses_choose_are_the_same")):
            workbench.run(str(folder / "recipe.yaml"), words, out=folder / f"{by} alone", quiet=True)
        jobs += [(f"{by} {name}", [*words, f"distributed={LAYOUTS[name]}"], None) for name in names]
    words = [f"adapter={METHODS['full']}", f"batch.tokens_per_device={FEW_TOKENS}"]
    jobs += [
        (name, [*words, f"distributed={LAYOUTS[to]}"], f"full {FEW_TOKENS} {origin}")
        for name, (origin, to) in RESUMED.items()
    ]
    names = asked(request)
    layouts.in_processes(folder, [job for job in jobs if job[0] in names])
    return folder


def asked(request: pytest.FixtureRequest) -> set[str]:
    """Names of the runs of two processes that this session's tests compare, and of those that they go on from."""
    names = set[str]()
    for cell in cells(request, "test_a_layout_changes_nothing"):
        names.add(f"{cell['method']} {cell['budget']} {cell['layout']}")
    names |= {f"{cell['over']} {cell['layout']}" for cell in cells(request, "test_whatever_is_cut")}
    names |= {f"{cell['by']} {cell['layout']}" for cell in cells(request, "test_rows_that_losses_choose_are_the_same")}
    names |= {cell["change"] for cell in cells(request, "test_a_run_goes_on_in_another_layout")}
    same = cells(request, "test_in_the_same_layout_it_goes_on_bit_for_bit")
    names |= {f"{cell['layout']} to {cell['layout']}" for cell in same}
    alone = cells(request, "test_one_process_goes_on_with_what_two_began")
    origins = {cell["origin"] for cell in alone} | {RESUMED[name][0] for name in names & RESUMED.keys()}
    return names | {f"full {FEW_TOKENS} {origin}" for origin in origins}


def save_model(path: Path, stories: str, family: str, **sizes: Any) -> None:
    """A tiny causal model of four heads, with the tokenizer of stories260K."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **sizes}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def write_recipe(folder: Path, model: Path) -> None:
    rows = [{"question": f"How many is {n} and one?", "answer": f"{n + 1}" + " it is" * (n % 7)} for n in range(96)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [{"question": f"Who is {n}?", "answer": "A number."} for n in range(30)]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more[:9]))
    recipe = {
        "recipe": "sft",
        "model": {"id": str(model), "weights": "float32", "compute": "float32"},
        "data": {"train": str(folder / "rows.jsonl"), "held_out": 0.05},
        "batch": {"size": 5},
        "train": {"steps": STEPS, "learning_rate": 2e-3, "weight_decay": 0.01},  # two groups of parameters
        "evaluate": {"every": None, "answers": 0},
        "save": {"every": STEPS // 2, "keep": 2},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))


def curve(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> torch.Tensor:
    (file,) = (run / "adapter").glob("*model.safetensors")
    saved = load_file(file)
    return torch.cat([saved[name].double().flatten() for name in sorted(saved)])


def scores(run: Path) -> dict[str, float]:
    """Losses before and after, of the first process."""
    found = json.loads((run / "scores.json").read_text())
    return {when: found[when]["loss"] for when in ("before", "after")}


def require_same(run: Path, alone: Path) -> None:
    assert curve(run) == pytest.approx(curve(alone), rel=1e-5)
    found, wanted = weights(run), weights(alone)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4
    assert scores(run) == pytest.approx(scores(alone), rel=1e-4)


@pytest.mark.parametrize(("layout", "method", "budget"), layout_with_method())
def test_a_layout_changes_nothing(runs: Path, layout: str, method: str, budget: int, record_property: Records) -> None:
    record_cell(record_property, method=method, recipe="sft", layout=layout)
    require_same(runs / f"{method} {budget} {layout}", runs / f"{method} {budget} alone")


@pytest.mark.nightly(but=["packed-zero3", "probe-fsdp2_2", "packed dora-fsdp2_3", "packed experts-fsdp2_3"])
@pytest.mark.parametrize(("over", "layout"), TO_CUT)
def test_whatever_is_cut(runs: Path, over: str, layout: str, record_property: Records) -> None:
    name = over.rpartition(" ")[2]
    method = "linear-probe" if over == "probe" else name if name in PACKED else "lora"
    record_cell(record_property, method=method, recipe="sft", layout=layout)
    require_same(runs / f"{over} {layout}", runs / f"{over} alone")


@pytest.mark.nightly(but=["selective-zero3"])
@pytest.mark.parametrize(("by", "layout"), [(by, name) for by, names in SAMPLED.items() for name in names])
def test_rows_that_losses_choose_are_the_same(runs: Path, by: str, layout: str) -> None:
    require_same(runs / f"{by} {layout}", runs / f"{by} alone")
    assert curve(runs / f"{by} alone") != curve(runs / f"lora {MANY_TOKENS} alone")


def test_packed_weights_are_others(runs: Path) -> None:
    assert curve(runs / "packed alone") != curve(runs / f"lora {MANY_TOKENS} alone")


@pytest.mark.parametrize("method", METHODS)
def test_it_learns(runs: Path, method: str) -> None:
    losses = curve(runs / f"{method} {FEW_TOKENS} alone")
    assert len(losses) == STEPS and losses[-1] < 0.95 * losses[0]


@pytest.mark.nightly(but=["zero3 to fsdp2"])
@pytest.mark.parametrize("change", RESUMED)
def test_a_run_goes_on_in_another_layout(runs: Path, change: str) -> None:
    require_same(runs / change, runs / f"full {FEW_TOKENS} alone")


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_in_the_same_layout_it_goes_on_bit_for_bit(runs: Path, layout: str) -> None:
    resumed, whole = runs / f"{layout} to {layout}", runs / f"full {FEW_TOKENS} {RESUMED[f'{layout} to {layout}'][0]}"
    assert curve(resumed) == curve(whole)
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("origin", ["ddp", "zero2", "zero3", "fsdp2_2"])
def test_one_process_goes_on_with_what_two_began(runs: Path, origin: str) -> None:
    folder = runs / f"alone from {origin}"
    layouts.halfway(runs / f"full {FEW_TOKENS} {origin}", folder)
    words = [f"adapter={METHODS['full']}", f"batch.tokens_per_device={FEW_TOKENS}"]
    workbench.run(str(runs / "recipe.yaml"), words, out=folder, resume=True, quiet=True)
    require_same(folder, runs / f"full {FEW_TOKENS} alone")
