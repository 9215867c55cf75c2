"""The same recipe in the workers of Ray Train, which are started again where one is lost.

    python scripts/launch/ray_train.py --workers 16 --gpus sft/quickstart distributed.zero=3 --out /shared/runs/mine

Files must be on a disk that all machines see. Needs: pip install 'ray[train]'
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(words: dict[str, Any]) -> None:
    """What each worker does: its part of one run, which is begun or gone on with."""
    import workbench

    out = Path(words["out"])
    workbench.run(words["recipe"], words["overrides"], out=out, resume=(out / "manifest.json").exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, help="run directory, on a disk that all machines see")
    parser.add_argument("--workers", type=int, default=1, help="processes, each on a device of its own")
    parser.add_argument("--gpus", action="store_true", help="each on a GPU; without it on a core")
    asked = parser.parse_intermixed_args()
    out = asked.out.resolve()
    TorchTrainer(
        train,
        train_loop_config={"recipe": asked.recipe, "overrides": asked.overrides, "out": str(out)},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if asked.gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=asked.workers, use_gpu=asked.gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3), storage_path=str(out.parent)),
    ).fit()


if __name__ == "__main__":
    main()
