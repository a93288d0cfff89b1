"""Training runs of tiny models, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from jaxis.host.progress import ProgressDisplay
from jaxis.training.batches import TrainingBatch
from jaxis.training.config import TrainConfig
from jaxis.training.examples import Example
from jaxis.training.objectives import CrossEntropy
from jaxis.training.step import make_gradient
from jaxis.training.trainable import Trainable
from jaxis.training.trainer import Trainer, TrainingResult


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A JSONL file of rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def dialogue(*texts: str) -> dict[str, Any]:
    """A row with a conversation: user and assistant by turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def train_config(
    model: Path | None,
    rows: Path,
    output: Path,
    *,
    peft: Any = None,
    data: Any = None,
    validation: Path | None = None,
    model_kwargs: Any = None,
    fsdp: int = 0,
    **training: Any,
) -> TrainConfig:
    """A run's configuration; `training` holds fields of that section; `fsdp` devices share a layer (0: no FSDP)."""
    held_out = {} if validation is None else {"validation": {"datasets": [{"dataset_path": str(validation)}]}}
    return TrainConfig.of(
        {
            "model": {"model_name": None if model is None else str(model), "model_kwargs": model_kwargs or {}},
            "fsdp": {"enable_fsdp": fsdp > 0, "tensor_parallel_size": max(fsdp, 1)},
            "data": {"train": {"datasets": [{"dataset_path": str(rows)}], **(data or {})}, **held_out},
            "training": {
                "output_dir": str(output),
                "per_device_train_batch_size": 2,
                "max_steps": 3,
                "learning_rate": 1e-2,
                "lr_scheduler_type": "constant",
                "use_peft": peft is not None,
                **training,
            },
            "peft": peft or {},
        }
    )


def run(config: TrainConfig) -> tuple[TrainingResult, list[str]]:
    """Trains; what it ended with, and the lines for the user."""
    lines: list[str] = []
    return Trainer(config, lines.append).run(ProgressDisplay(enabled=False)), lines


SPEED = ("tokens_per_second", "mfu", "peak_memory_bytes")


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what differs from run to run."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in SPEED} for line in lines]


def gradients(
    model: Trainable, batch: TrainingBatch, router_coefficient: float = 0.0
) -> tuple[float, dict[str, np.ndarray], float]:
    """The sum of losses of a batch, the gradient of that, and the number of learned tokens."""
    objective, forward = CrossEntropy(), model.forward(is_training=True)

    differentiate = jax.jit(make_gradient(forward, objective, model.combine, None, router_coefficient))
    total, gradient, _ = differentiate(model.initial, model.frozen, batch, jax.random.key(0))
    return float(total), {name: np.asarray(value) for name, value in gradient.items()}, float(objective.weight(batch))


def torch_loss(model: Any, examples: Sequence[Example]) -> torch.Tensor:
    """The mean loss of a model of transformers over all learned tokens, one example after the other."""
    total, count = torch.zeros(()), 0
    for example in examples:
        logits = model(torch.tensor(example.ids[None]).long(), use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits[:-1], -1)
        chosen = logprobs.gather(1, torch.tensor(example.ids[1:, None]).long())[:, 0]
        total = total - chosen[torch.tensor(example.learned[1:])].sum()
        count += int(example.learned[1:].sum())
    return total / count
