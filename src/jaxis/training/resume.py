"""Checkpoints of one run: where it resumes, what must not have changed, and when the next one is saved."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxis.errors import ConfigError, EngineError
from jaxis.parallel.mesh import put
from jaxis.training.checkpoint import RunState, TrainState, find_checkpoints, load_checkpoint, save_checkpoint
from jaxis.training.config import TrainConfig
from jaxis.training.config.training import TrainingParams
from jaxis.training.evaluation import BestStep

# Settings that do not change the results of a step.
_FREE_TO_CHANGE = frozenset(
    {
        *("output_dir", "save_steps", "save_final_model", "logging_steps", "eval_strategy", "eval_steps"),
        *("per_device_eval_batch_size", "resume_from_checkpoint", "try_resume_from_last_checkpoint"),
        *("enable_gradient_checkpointing", "enable_tensorboard", "logging_dir", "metrics_function"),
        *("enable_wandb", "run_name", "profiler"),
        # The fields of grpo and distillation are sections of their own.
        *("grpo", "distillation", "log_completions", "vocab_mismatch_positions", "peft_save_mode"),
    }
)


def find_resumed(params: TrainingParams) -> Path | None:
    """Returns the checkpoint that a run resumes from; None: it starts. Raises ConfigError if the user must choose."""
    if params.resume_from_checkpoint is not None:
        return Path(params.resume_from_checkpoint)
    found = find_checkpoints(Path(params.output_dir))
    if not found:
        return None
    if not params.try_resume_from_last_checkpoint:
        raise ConfigError(
            f"{params.output_dir} has {found[-1][1].name} of an earlier run: set "
            "training.try_resume_from_last_checkpoint=true to go on from it, or another training.output_dir"
        )
    return found[-1][1]


class Checkpoints:
    """The checkpoints of a run.

    Args:
      params: Arguments of the training.
      settings: Settings that must not change when the run resumes; see `settings_of`.
      best: Best step so far; None: none is tracked.
    """

    def __init__(self, params: TrainingParams, settings: Mapping[str, Any], best: BestStep | None) -> None:
        self._params, self._settings, self._best = params, settings, best
        self._output = Path(params.output_dir)

    def can_resume_at(self, step: int) -> bool:
        """Returns whether a run can resume after so many steps: not between steps that share a batch."""
        return step % self._params.steps_per_batch == 0

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is saved after so many steps, the first where a run can resume."""
        every, last = self._params.save_steps, step - self._params.steps_per_batch
        return bool(every) and self.can_resume_at(step) and step // every > last // every

    def save(self, state: TrainState) -> Path:
        """Writes a checkpoint and returns its folder. Raises CheckpointError if it cannot be written."""
        arrays = {f"weights.{name}": np.asarray(value) for name, value in state.trained.items()}
        arrays |= {f"optimizer.{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state.moments))}
        best = {} if self._best is None else {"step": self._best.step, "value": self._best.value}
        run_state = RunState(state.step, self._settings, _software(), best)
        return save_checkpoint(self._output, run_state, arrays, self._params.save_total_limit)

    def restore(self, source: Path, initial: TrainState, note: Callable[[str], None]) -> TrainState:
        """Reads a checkpoint, with arrays placed as those of the initial state.

        Raises ConfigError, which names the setting, if the run has another one than before.
        """
        run_state, arrays = load_checkpoint(source)
        run_state.check_settings(self._settings, source)
        if run_state.software != _software():
            note(f"{source} was made with other software or threads: the last bits of the loss may differ")
        if self._best is not None:
            self._best.step, self._best.value = run_state.best.get("step"), run_state.best.get("value")
        trained = {name: _placed_as(array, arrays[f"weights.{name}"]) for name, array in initial.trained.items()}
        leaves, treedef = jax.tree.flatten(initial.moments)
        moments = [_placed_as(leaf, arrays[f"optimizer.{i}"]) for i, leaf in enumerate(leaves)]
        return TrainState(run_state.step, trained, jax.tree.unflatten(treedef, moments))

    def check_finite(self, step: int, values: Mapping[str, float]) -> None:
        """Raises EngineError, which names the last good checkpoint, if a step's loss or gradient is not finite."""
        if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            return
        last = find_checkpoints(self._output)
        good = f"the last good checkpoint is {last[-1][1]}" if last else "there is no checkpoint yet"
        raise EngineError(
            f"step {step}: the loss is {values['loss']}, and the norm of its gradient {values['grad_norm']}; {good}: "
            "lower training.learning_rate, or look at the rows of this step"
        )


def settings_of(config: TrainConfig, num_devices: int, num_steps: int, digests: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings that must not change when a run resumes, by configuration name.

    `digests` are those of the files of data, by path.
    """
    training, train = config.training, config.data.train
    found: dict[str, Any] = {}
    sections = {
        **{"training": training, "training.grpo": training.grpo, "training.distillation": training.distillation},
        **{"peft": config.peft, "model": config.model},
    }
    for section, group in sections.items():
        found |= {
            f"{section}.{field.name}": getattr(group, field.name)
            for field in dataclasses.fields(group)
            if field.name not in _FREE_TO_CHANGE
        }
    found["training.trainer_kwargs"] = {
        name: value for name, value in training.trainer_kwargs.items() if name != "save_total_limit"
    }
    rows = found.pop("training.per_device_train_batch_size") * num_devices
    found["training.per_device_train_batch_size times the number of devices"] = rows
    for field in dataclasses.fields(train):
        if field.name != "datasets":
            found[f"data.train.{field.name}"] = getattr(train, field.name)
    for number, dataset in enumerate(train.datasets):
        for field in dataclasses.fields(dataset):
            found[f"data.train.datasets[{number}].{field.name}"] = getattr(dataset, field.name)
    found["the number of steps (training.max_steps, or training.num_train_epochs and the rows)"] = num_steps
    found |= {f"the contents of {path}": digest for path, digest in digests.items()}
    return {name: _plain(value) for name, value in found.items()}


def _placed_as(like: jax.Array, array: np.ndarray) -> jax.Array:
    return put(array, like.sharding) if isinstance(like.sharding, NamedSharding) else jnp.asarray(array)


def _plain(value: Any) -> Any:
    """Returns a value as it is after a round trip through JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _software() -> dict[str, Any]:
    return {"jax": version("jax"), "jaxlib": version("jaxlib"), "threads": len(os.sched_getaffinity(0))}
