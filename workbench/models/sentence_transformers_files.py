"""Files by which sentence-transformers loads what a run saved: a backbone, pooling, and scaling to length 1."""

from __future__ import annotations

from pathlib import Path

from workbench.config.sections.embed_config import EmbedConfig
from workbench.runs import files

MODULES = "modules.json"
_MODES = {"mean": "mean", "first": "cls", "last": "lasttoken"}
_MODELS = "sentence_transformers.models"


def write(folder: Path, config: EmbedConfig, *, width: int, max_tokens: int) -> None:
    """Write modules, pooling and prompts into `folder`, beside a model or an adapter and its tokenizer.

    Args:
        width: Numbers of an embedding.
        max_tokens: Of a text; longer ones are cut.
    """
    names = ["Transformer", "Pooling", *(["Normalize"] if config.normalise else [])]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": "" if number == 0 else f"{number}_{name}",
            "type": f"{_MODELS}.{name}",
        }
        for number, name in enumerate(names)
    ]
    pooling = {"embedding_dimension": width, "pooling_mode": _MODES[config.pooling], "include_prompt": True}
    files.write_json(folder / MODULES, modules)
    files.write_json(folder / "1_Pooling" / "config.json", pooling)
    if config.normalise:
        (folder / "2_Normalize").mkdir()
    files.write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    files.write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": config.query_prefix, "document": config.passage_prefix},
            "default_prompt_name": "query" if config.query_prefix else None,
            "similarity_fn_name": "cosine" if config.normalise else "dot",
        },
    )
