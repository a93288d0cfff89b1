"""Distillation beside fine-tuning, on a task made here: the embedded model describes boats.

    python examples/training/distillation.py

A teacher learns from 500 rows, written by four people who answer in different ways. Students have 96 other rows, and
learn them as they are, or the teacher's distributions there.

The setting was chosen after others had lost: where all rows are right, fine-tuning wins, and by `beta: 0.5` next to
nothing is learned in 60 steps.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

from jaxis.host.progress import ProgressDisplay
from jaxis.training.config import TrainConfig
from jaxis.training.trainer import Trainer

FOLDER = Path("distillation")
FORMS = (
    "The {name} is a {colour} {kind}.",
    "That {kind} is {colour}, and her name is {name}.",
    "She is the {name}, a {kind} painted {colour}.",
    "A {colour} {kind} called {name}.",
)
NAMES = ("Anna", "Bella", "Clara", "Dora", "Emma", "Flora", "Greta", "Hilda", "Ida", "Julia", "Karla", "Lena", "Maria")
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "golden", "silver")
KINDS = ("ship", "boat", "ferry", "barge", "raft", "yacht")


def draw_boats(count: int, seed: int) -> list[dict[str, str]]:
    """Draws different boats."""
    every = itertools.product(NAMES, COLOURS, KINDS)
    boats = [{"name": name, "colour": colour, "kind": kind} for name, colour, kind in every]
    return random.Random(seed).sample(boats, count)


def write(name: str, boats: list[dict[str, str]], wrong: float = 0.0) -> Path:
    """Writes rows, each answered in one of the forms; in a share of them, the colour is drawn."""
    drawn = random.Random(name)
    path = FOLDER / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for boat in boats:
            said = {**boat, "colour": drawn.choice(COLOURS)} if drawn.random() < wrong else boat
            messages = [
                {"role": "user", "content": "Describe {name}: {kind}, {colour}.".format(**boat)},
                {"role": "assistant", "content": drawn.choice(FORMS).format(**said)},
            ]
            file.write(json.dumps({"messages": messages, "right": [form.format(**boat) for form in FORMS]}) + "\n")
    return path


def right(completions: list[Any], right: list[list[str]], **_: object) -> list[float]:
    """Scores an answer: 1 if it is right in one of the forms."""
    return [float(each[-1]["content"].strip() in wanted) for each, wanted in zip(completions, right, strict=True)]


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
        "metrics_function": "distillation:right",
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
    tested = write("held_out", held_out)
    train("teacher", write("many", boats[196:]), tested, max_steps=90)
    for name, wrong in {"96 rows": 0.0, "96 rows, half of them wrong": 0.5}.items():
        rows = write(name, few, wrong)
        train(f"{name}, fine-tuned", rows, tested)
        distillation = {"teacher_model_name_or_path": str(FOLDER / "teacher"), "lmbda": 0, "beta": 0}
        given = {"trainer_type": "TRL_DISTILLATION", "distillation": distillation}
        train(f"{name}, distilled", rows, tested, **given)


if __name__ == "__main__":
    main()
