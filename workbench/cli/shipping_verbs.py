"""Verbs that make files for others of a finished run: export."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.arguments import RunFolder, Trusted
from workbench.runs.process_memory import importing


def export(
    run: RunFolder,
    to: Annotated[str, typer.Option(help="peft, merged, gguf, ollama, vllm, sglang or onnx.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    normalise: Annotated[
        bool, typer.Option("--normalise", help="The adapter as plain LoRA of one rank, its scale folded in.")
    ] = False,
    merge: Annotated[bool, typer.Option("--merge", help="One whole model instead of an adapter.")] = False,
    weights: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default bfloat16, for onnx float32.")
    ] = None,
    push: Annotated[str | None, typer.Option(help="OWNER/NAME on the hub to upload it to; private if new.")] = None,
    trust: Trusted = False,
) -> None:
    """Write a run as another program loads it. Checked against the run's own outputs, with a model card."""
    with importing():
        from workbench.cli import render
        from workbench.recipes.shipping.export import export as export_run

    command = shlex.join(["workbench", *sys.argv[1:]])
    exported_run = export_run(
        run, to=to, out=out, normalise=normalise, whole=merge, weights=weights, push=push, trust=trust, command=command
    )
    render.exported(exported_run, out)
