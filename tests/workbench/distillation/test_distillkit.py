"""DistillKit's logits teach here, and a cache is written so that DistillKit reads it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer

import workbench
from tests.run_files import read_losses
from workbench.config.yaml_text import dump_yaml, read_yaml
from workbench.data import starter
from workbench.distillation.distillkit import CONFIG, Compression, pack_bits, unpack_bits
from workbench.errors import ConfigError
from workbench.losses.divergences import log_probs


@pytest.mark.parametrize("bits", [1, 5, 13, 17])
def test_bits_come_back(bits: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**bits, (3, 7))
    packed = pack_bits(numbers, bits)
    assert packed.shape == (3, -(-7 * bits // 8)) and np.array_equal(unpack_bits(packed, bits, 7), numbers)
    written = "".join(f"{number:0{bits}b}" for number in numbers[0]).ljust(8 * packed.shape[1], "0")
    assert "".join(f"{byte:08b}" for byte in packed[0]) == written


def test_polynomials_and_residuals_written_out() -> None:
    bins = [{"scale_dtype": "float16", "element_bits": 3, "num_elements": 2}]
    compression = Compression.model_validate(
        {"d": 100, "k": 5, "exact_k": 2, "polynomial_terms": [0, 1, "sqrt"], "residual_bins": bins}
    )
    factors, levels = [-1.5, -0.25, 0.5], [1, 7]
    coded = b"".join(
        [
            np.asarray([-0.5, -0.75], dtype=np.float32).tobytes(),
            np.asarray(factors, dtype=np.float32).tobytes(),
            np.asarray([0.125], dtype=np.float16).tobytes(),
            bytes([0b00111100]),
        ]
    )
    steps = [a + 0.125 * (b - 4) for a, b in zip([factors[0], sum(factors)], levels, strict=True)]
    steps = [-0.5, -0.75, *steps, factors[0] + 2 * factors[1] + 2**0.5 * factors[2]]
    found = compression.log_probs(np.frombuffer(coded, dtype=np.uint8)[None])
    np.testing.assert_allclose(found[0], np.cumsum(steps), rtol=1e-6)


WORDS = (
    "model.id=starter",
    "distill.student.layers=all",
    "data.limit=24",
    "data.held_out=0.2",
    "data.train=starter/arithmetic_start.jsonl",
    "train.steps=2",
    "evaluate.answers=2",
    "evaluate.every=null",
    "distill.cache.k=16",
    "distill.cache.dtype=float32",
    "distill.control=false",
)


@pytest.mark.slow
def test_what_is_written_is_read_again_and_teaches_alike(tmp_path: Path) -> None:
    ours, there, again = tmp_path / "ours", tmp_path / "there", tmp_path / "again"
    made = [*WORDS, "distill.teacher.id=starter", f"distill.cache.folder={ours}"]
    workbench.distill_cache("distill/quickstart", made, write=there)
    came = [*WORDS, "distill.teacher.id=null", f"distill.cache.folder={again}"]
    facts = workbench.distill_cache("distill/quickstart", came, read=there)
    assert facts["k"] == 16 and facts["mass_beyond_k"] > 0
    losses = [
        read_losses(workbench.run("distill/quickstart", words, out=tmp_path / name, quiet=True))
        for name, words in (("one", made), ("two", came))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    # As DistillKit reads it: what follows each token, the likeliest first.
    row = pyarrow.parquet.read_table(there / "data_0.parquet").slice(0, 1).to_pylist()[0]
    compression = Compression.model_validate(read_yaml(there / CONFIG))
    ids = torch.tensor([row["input_ids"]])
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(starter.FOLDER)
    logp = log_probs(model(input_ids=ids).logits[0].detach(), 1.0)
    coded, named = (np.asarray(row[name], dtype=np.uint8) for name in ("compressed_logprobs", "bytepacked_indices"))
    said, tokens = compression.log_probs(coded), unpack_bits(named, compression.bits, compression.k)
    at = len(ids[0]) - 2  # predicts the last token, which ends the answer
    np.testing.assert_allclose(said[at], logp[at].topk(16).values.numpy(), atol=0.05)
    assert (np.diff(said[at]) <= 0).all() and tokens[at, 0] == int(logp[at].argmax())

    # Of another tokenizer, of other rows, or of fewer tokens.
    fresh = [*WORDS, "distill.teacher.id=null", f"distill.cache.folder={tmp_path / 'fresh'}"]
    with pytest.raises(ConfigError, match=r"has no row with the tokens of .*row"):
        workbench.distill_cache("distill/quickstart", [*fresh, "data.limit=40"], read=there)
    with pytest.raises(ConfigError, match=r"keeps 16 tokens\. Write distill\.cache\.k=16"):
        workbench.distill_cache("distill/quickstart", [*fresh, "distill.cache.k=17"], read=there)
    small = tmp_path / "small"
    shutil.copytree(there, small)
    (small / CONFIG).write_text(dump_yaml({**read_yaml(there / CONFIG), "d": 500}))
    size = len(AutoTokenizer.from_pretrained(starter.FOLDER))
    with pytest.raises(ConfigError, match=rf"vocabulary of 500 tokens, and the student's tokenizer has {size}"):
        workbench.distill_cache("distill/quickstart", fresh, read=small)
