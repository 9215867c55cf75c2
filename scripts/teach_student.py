"""A teacher and its student as a script: half of the layers, taught by the whole.

    python scripts/teach_student.py [FOLDER]

Both runs stand in FOLDER. Change the sections to your own model and data; workbench/config/run_config.py and
workbench/config/sections/distill_config.py explain every field.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import workbench
from workbench.adapters import Full
from workbench.config import BatchConfig, DataConfig, EvaluateConfig, ModelConfig, RunConfig, TrainConfig
from workbench.config.sections.distill_config import DistillConfig, StudentConfig, TeacherConfig

shared = RunConfig(
    recipe="sft",
    model=ModelConfig(id="starter"),  # a folder, or a hub id such as Qwen/Qwen3-0.6B
    adapter=Full(),
    data=DataConfig(
        train="starter/fairytaleqa_train.jsonl",  # your.jsonl
        held_out="starter/fairytaleqa_held_out.jsonl",  # or a share of the training rows, such as 0.05
        max_tokens=512,
    ),
    batch=BatchConfig(size=16),
    train=TrainConfig(epochs=0.5, learning_rate=5e-4),
    evaluate=EvaluateConfig(every=0.5, answers=32, max_new_tokens=24),
)


def student_of(teacher: Path) -> RunConfig:
    """The same data and settings, for a model with every second layer of the teacher's."""
    section = DistillConfig(
        teacher=TeacherConfig(id=str(teacher)), student=StudentConfig(layers="every-2"), loss="forward_kl", alpha=0.8
    )
    model = ModelConfig(id="teacher")
    return shared.model_copy(update={"recipe": "distill", "model": model, "distill": section})


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/distilled")
    teacher = workbench.run(shared, out=folder / "teacher")
    student = workbench.run(student_of(teacher), out=folder / "student")
    scores = json.loads((student / "scores.json").read_text())
    print(f"held-out loss: teacher {scores['teacher']['loss']:.3f}, student {scores['after']['loss']:.3f} nats a token")
    print(f"{student}/report.html")
