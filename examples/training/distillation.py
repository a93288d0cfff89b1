"""Distillation beside fine-tuning, on a task made here: the embedded model describes boats.

    python examples/training/distillation.py

A teacher learns from 500 rows, written by four people who answer in different ways. Students have 96 other rows, and
learn them as they are, or the teacher's distributions there.

The setting was chosen after others had lost: where all rows are right, fine-tuning wins, and by `beta: 0.5` next to
nothing is learned in 60 steps.
"""

import json
from pathlib import Path

from boats import draw_boats, write

from jaxis.host.progress import ProgressDisplay
from jaxis.training.config import TrainConfig
from jaxis.training.trainer import Trainer

FOLDER = Path("distillation")


def train(name: str, rows: Path, held_out: Path, **training: object) -> None:
    """Trains the embedded model, and prints how many held-out boats it describes rightly at the end."""
    settings = {
        "output_dir": str(FOLDER / name),
        "per_device_train_batch_size": 16,
        "max_steps": 60,
        "learning_rate": 1e-3,
        "warmup_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 60,
        "metrics_function": "boats:right",
        "save_steps": 0,
        "trainer_kwargs": {"max_completion_length": 24},
        **training,
    }
    files = {"train": rows, "validation": held_out}
    data = {key: {"datasets": [{"dataset_path": str(path)}]} for key, path in files.items()}
    Trainer(TrainConfig.of({"data": data, "training": settings}), lambda _: None).run(ProgressDisplay(enabled=False))
    last = json.loads((FOLDER / name / "metrics.jsonl").read_text().splitlines()[-1])
    print(f"{name:40} {last['eval_right']:4.0%} right", flush=True)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    boats = draw_boats(696, seed=0)
    held_out, few = boats[:100], boats[100:196]
    tested = write(FOLDER / "held_out.jsonl", held_out)
    train("teacher", write(FOLDER / "many.jsonl", boats[196:]), tested, max_steps=90)
    for name, wrong in {"96 rows": 0.0, "96 rows, half of them wrong": 0.5}.items():
        rows = write(FOLDER / f"{name}.jsonl", few, wrong=wrong)
        train(f"{name}, fine-tuned", rows, tested)
        distillation = {"teacher_model_name_or_path": str(FOLDER / "teacher"), "lmbda": 0, "beta": 0}
        given = {"trainer_type": "TRL_DISTILLATION", "distillation": distillation}
        train(f"{name}, distilled", rows, tested, **given)


if __name__ == "__main__":
    main()
