"""How long a sequence each kind of backbone was made for."""

from __future__ import annotations

import pytest
from transformers import FalconMambaConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from workbench.training.preflight import longest_sequence

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=4096), 4096),
        (GPT2Config(n_positions=64), 64),
        (Gemma3TextConfig(max_position_embeddings=131072), 131072),
        (FalconMambaConfig(), None),
        # Its maximum already is the stretched one.
        (
            LlamaConfig(
                max_position_embeddings=131072, rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192}
            ),
            131072,
        ),
        # Its maximum is the one before stretching, as the model card tells to write it.
        (
            Qwen2Config(
                max_position_embeddings=32768,
                rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            ),
            131072,
        ),
        (LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_type": "linear", "factor": 4.0}), 16384),
    ],
)
def test_the_longest_sequence(config: PretrainedConfig, expected: int | None) -> None:
    assert longest_sequence(config) == expected
