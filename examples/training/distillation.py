"""Distillation beside fine-tuning, on a task made here: the embedded model describes boats.

    python examples/training/distillation.py

A teacher learns from 484 rows, written by four people who answer in different ways. Students have other rows: 96,
half of them wrong, learned as they are or by the teacher's distributions there; or 32 right ones, learned for twice as
long, or followed by the teacher's distributions on answers of the student's own to 64 other prompts.

Each has the learning rate with which it did best on one half of the held-out rows; the other half is reported.
"""

import json
from pathlib import Path

from boats import draw_boats, write

from jaxis.host.progress import ProgressDisplay
from jaxis.training.config import TrainConfig
from jaxis.training.trainer import Trainer

FOLDER = Path("distillation")
RATES = (5e-4, 1e-3)


def train(name: str, rows: Path, model: Path | None = None, **training: object) -> tuple[float, float]:
    """Trains a model, by default the embedded one; returns the share of either half of held-out boats it describes."""
    settings = {
        "output_dir": str(FOLDER / name),
        "per_device_train_batch_size": 16,
        "max_steps": 60,
        "warmup_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 1000,
        "metrics_function": "boats:right",
        "save_steps": 0,
        "trainer_kwargs": {"max_completion_length": 24},
        **training,
    }
    files = {"train": rows, "validation": FOLDER / "held.jsonl"}
    config = {
        "model": {} if model is None else {"model_name": str(model)},
        "data": {key: {"datasets": [{"dataset_path": str(path)}]} for key, path in files.items()},
        "training": settings,
    }
    Trainer(TrainConfig.of(config), lambda _: None).run(ProgressDisplay(enabled=False))
    scores = [json.loads(line)["score"] for line in (FOLDER / name / "answers.jsonl").read_text().splitlines()]
    half = len(scores) // 2
    return sum(scores[:half]) / half, sum(scores[half:]) / half


def compare(name: str, rows: Path, model: Path | None = None, **training: object) -> Path:
    """Trains at each rate, and prints the result of the best one; returns its folder."""
    shares = {rate: train(f"{name}, {rate:g}", rows, model, learning_rate=rate, **training) for rate in RATES}
    best = max(shares, key=lambda rate: shares[rate][0])
    print(f"{name:32} {shares[best][1]:4.0%} right, at the rate {best:g}", flush=True)
    return FOLDER / f"{name}, {best:g}"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    boats = draw_boats(780, seed=0)
    write(FOLDER / "held.jsonl", boats[:200])
    _, share = train("teacher", write(FOLDER / "many.jsonl", boats[296:]), learning_rate=1e-3, max_steps=150)
    print(f"{'teacher':32} {share:4.0%} right", flush=True)
    teacher = {"teacher_model_name_or_path": str(FOLDER / "teacher"), "max_completion_length": 24}

    def distillation(**given: object) -> dict[str, object]:
        return {"trainer_type": "TRL_DISTILLATION", "distillation": {**teacher, **given}}

    half_wrong = write(FOLDER / "wrong96.jsonl", boats[200:296], wrong=0.5)
    compare("half wrong, fine-tuned", half_wrong)
    compare("half wrong, distilled", half_wrong, **distillation(lmbda=0, beta=0))

    few, prompts = write(FOLDER / "clean32.jsonl", boats[200:232]), write(FOLDER / "prompts64.jsonl", boats[232:296])
    begun = compare("few", few)
    compare("few, for twice as long", few, max_steps=120)
    compare("few, then distilled", prompts, begun, **distillation(lmbda=1, beta=1))


if __name__ == "__main__":
    main()
