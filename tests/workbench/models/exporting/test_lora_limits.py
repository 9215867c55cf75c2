"""A program gets an adapter that it would compute as it was trained, or none; what is normalised computes the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import TypeAdapter
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Lora, Method
from workbench.errors import ConfigError
from workbench.models.exporting import gguf_files, lora_limits
from workbench.models.exporting.lora_limits import LLAMA_CPP, LoraLimits

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])
PATTERNS = {"rank_pattern": {"q_proj": 3, "down_proj": 6}, "alpha_pattern": {"k_proj": 5.0}}
LIMITS = {"vLLM": lora_limits.VLLM, "SGLang": lora_limits.SGLANG, "llama.cpp": LLAMA_CPP}


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return tiny("Llama")


def _save(base: PreTrainedModel, folder: Path, **settings: Any) -> Path:
    """An adapter of random values, by PEFT alone."""
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "down_proj"], **settings}
    model = get_peft_model(copy.deepcopy(base), LoraConfig(**given))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(str(folder))
    return folder


@torch.no_grad()
def _logits(base: PreTrainedModel, folder: Path) -> Tensor:
    model: nn.Module = PeftModel.from_pretrained(copy.deepcopy(base), str(folder))
    logits: Tensor = model.eval()(input_ids=IDS).logits
    return logits


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "rslora in GGUF": ("llama.cpp", {"use_rslora": True}, "use_rslora=True: llama.cpp scales by", "--normalise"),
    "rslora in SGLang": ("SGLang", {"use_rslora": True}, "use_rslora=True: SGLang scales by", "--normalise"),
    "alphas in GGUF": (
        "llama.cpp",
        {"alpha_pattern": PATTERNS["alpha_pattern"]},
        "llama.cpp reads one alpha for all layers",
        "--normalise",
    ),
    "alphas in vLLM": ("vLLM", {"alpha_pattern": PATTERNS["alpha_pattern"]}, "vLLM reads one alpha", "--normalise"),
    "ranks in vLLM": ("vLLM", {"rank_pattern": PATTERNS["rank_pattern"]}, "vLLM reads one rank", "--normalise"),
    "ranks in SGLang": ("SGLang", {"rank_pattern": PATTERNS["rank_pattern"]}, "SGLang reads one rank", "--normalise"),
    "DoRA in vLLM": ("vLLM", {"use_dora": True}, "use_dora=True: vLLM reads updates", "--merge"),
    "DoRA in GGUF": ("llama.cpp", {"use_dora": True}, "use_dora=True: llama.cpp reads updates", "--merge"),
    "DoRA of rslora in GGUF": ("llama.cpp", {"use_dora": True, "use_rslora": True}, "use_rslora=True", "--merge"),
    "a whole module in vLLM": ("vLLM", {"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']", "--merge"),
    "a bias in vLLM": ("vLLM", {"bias": "lora_only"}, "bias=lora_only", "--merge"),
    "new tokens in vLLM": ("vLLM", {"trainable_token_indices": [3]}, "trainable_token_indices=[3]", "--merge"),
    "a large rank in vLLM": ("vLLM", {"r": 520}, "rank 520: vLLM takes ranks up to 512", "--merge"),
    "the head in SGLang": ("SGLang", {"target_modules": ["lm_head"]}, "layers lm_head: SGLang changes", "--merge"),
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize(("program", "settings", "words", "cure"), REFUSED.values(), ids=REFUSED)
def test_what_a_program_does_not_read_is_refused_by_name(
    program: str, settings: dict[str, Any], words: str, cure: str, base: PreTrainedModel, tmp_path: Path
) -> None:
    adapter = _save(base, tmp_path / "a", **settings)
    with pytest.raises(ConfigError) as caught:
        lora_limits.require(adapter, Lora(), LIMITS[program])
    assert words in str(caught.value) and cure in str(caught.value).splitlines()[-1]
    assert f"{program} would not compute what was trained" in str(caught.value)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_plain_lora_goes_everywhere(limits: LoraLimits, base: PreTrainedModel, tmp_path: Path) -> None:
    lora_limits.require(_save(base, tmp_path / "a"), Lora(), limits)


def test_rslora_goes_to_vllm_which_scales_by_its_root(base: PreTrainedModel, tmp_path: Path) -> None:
    lora_limits.require(_save(base, tmp_path / "a", use_rslora=True), Lora(), lora_limits.VLLM)


def test_ranks_of_layers_go_to_gguf_which_takes_them_from_the_tensors(base: PreTrainedModel, tmp_path: Path) -> None:
    adapter = _save(base, tmp_path / "a", rank_pattern=PATTERNS["rank_pattern"])
    lora_limits.require(adapter, Lora(), LLAMA_CPP)
    gguf_files.write_adapter(adapter, base.config, tmp_path / "adapter.gguf", name="tiny")
    (tmp_path / "again").mkdir()
    gguf_files.restore_adapter(tmp_path / "adapter.gguf", base.config, tmp_path / "again", like=adapter)
    torch.testing.assert_close(_logits(base, tmp_path / "again"), _logits(base, adapter), rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, PATTERNS, {**PATTERNS, "use_rslora": True}], ids=["rslora", "patterns", "both"]
)
def test_a_normalised_adapter_computes_the_same_and_goes_everywhere(
    settings: dict[str, Any], base: PreTrainedModel, tmp_path: Path
) -> None:
    adapter = _save(base, tmp_path / "a", **settings)
    (tmp_path / "plain").mkdir()
    lora_limits.normalise(adapter, tmp_path / "plain")
    found = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())
    assert found["r"] == found["lora_alpha"] and not found["rank_pattern"] and not found["alpha_pattern"]
    assert not found["use_rslora"]
    for limits in LIMITS.values():
        lora_limits.require(tmp_path / "plain", Lora(), limits)
    wanted = _logits(base, adapter)
    with torch.no_grad():
        assert float((wanted - base(input_ids=IDS).logits).abs().max()) > 0.1
    torch.testing.assert_close(_logits(base, tmp_path / "plain"), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["pissa", "olora", "lora+", "rslora"])
def test_methods_that_ship_lora_are_plain_lora_after_all(method: str, base: PreTrainedModel, tmp_path: Path) -> None:
    """PiSSA and OLoRA ship the difference from their start, so nothing of the backbone changes."""
    section = TypeAdapter(Method).validate_python({"method": method, "rank": 4, "alpha": 8.0})
    model = adapters.attach(copy.deepcopy(base), section, seed=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05
    with torch.no_grad():
        wanted = model.eval()(input_ids=IDS).logits
    adapters.save(model, tmp_path / "a")
    (tmp_path / "plain").mkdir()
    lora_limits.normalise(tmp_path / "a", tmp_path / "plain")
    lora_limits.require(tmp_path / "plain", section, lora_limits.SGLANG)
    torch.testing.assert_close(_logits(base, tmp_path / "plain"), wanted, rtol=1e-3, atol=1e-3)


def test_another_method_is_refused_with_what_remains(base: PreTrainedModel, tmp_path: Path) -> None:
    for method, words in (("ia3", "--merge adds the adapter"), ("prompt", "adapter.method=prompt cannot be merged")):
        section = TypeAdapter(Method).validate_python({"method": method})
        adapters.save(adapters.attach(copy.deepcopy(base), section, seed=0), tmp_path / method)
        with pytest.raises(ConfigError, match=f"loads LoRA and no other adapter(.|\n)*{words}"):
            lora_limits.require(tmp_path / method, section, lora_limits.VLLM)
        with pytest.raises(ConfigError, match=r"--normalise: a .* adapter is no LoRA"):
            lora_limits.normalise(tmp_path / method, tmp_path)


def test_commands_name_what_the_server_needs() -> None:
    assert "--max-lora-rank 32 " in lora_limits.vllm_adapter_command(
        "base", rank=17
    ) and "vllm serve base" in lora_limits.vllm_adapter_command("base", rank=1)
    assert "--max-lora-rank 17" in lora_limits.sglang_adapter_command("base", rank=17)
