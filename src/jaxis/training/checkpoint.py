"""Checkpoints of a training run: all state that the next step depends on.

A checkpoint is a folder with arrays in Orbax's format, of which each host writes and reads its shards, and a JSON file
of everything else. It is written to a folder beside its place, synced to the disk and renamed, so a folder with a
checkpoint's name is always complete.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxis.errors import CheckpointError, ConfigError, EngineError
from jaxis.host.cores import usable_cores
from jaxis.host.json_object import read_json_object
from jaxis.parallel.distributed import text_of_first, wait_for_all
from jaxis.training.config import TrainConfig
from jaxis.training.config.training import TrainingParams
from jaxis.training.data import BatchSource
from jaxis.training.stored_arrays import Arrays, describe_arrays, read_arrays, write_arrays
from jaxis.training.written_folder import writing_into, written_beside

_STATE, ARRAYS = "trainer_state.json", "state"
_NAME = re.compile(r"checkpoint-(\d+)")
_MAX_STATE_BYTES = 16 << 20


@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
      step: Number of steps done.
      trained: Trained arrays, float32, by name.
      moments: State of the optimizer.
    """

    step: int
    trained: dict[str, jax.Array]
    moments: Any


@dataclass(frozen=True)
class RunState:
    """The part of a checkpoint that is not arrays.

    Attributes:
      step: Number of steps done.
      settings: Settings that must not change when the run resumes, by name.
      software: Versions that may change, which then changes the last bits of results.
      best: Step and value of the best step so far; empty if none is tracked.
      place: Place in the files of streamed rows; see `BatchSource.place`.
    """

    step: int
    settings: Mapping[str, Any]
    software: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] = field(default_factory=dict)
    place: Mapping[str, Any] = field(default_factory=dict)

    def check_settings(self, settings: Mapping[str, Any], source: Path) -> None:
        """Raises ConfigError, which names the first setting, unless a run resumes with the settings it began with.

        Raises CheckpointError if only one of two versions of jaxis has a setting.
        """
        of_data = ("data.train.datasets", "the contents of")
        of_version = sorted(name for name in self.settings.keys() ^ settings.keys() if not name.startswith(of_data))
        if of_version:
            raise CheckpointError(
                f"{source} is of a version of jaxis with{'' if of_version[0] in self.settings else 'out'} "
                f"{of_version[0]}: go on with that version, or train into another training.output_dir"
            )
        for name in sorted({*self.settings, *settings}, key=lambda name: (" " in name, name)):  # fields first
            before, now = self.settings.get(name), settings.get(name)
            if before != now:
                raise ConfigError(
                    f"{source} was made with {name}={before!r}, and this run has {now!r}: set it back, or train into "
                    "another training.output_dir"
                )


@dataclass
class BestStep:
    """The best step so far, by a metric of metrics.jsonl; None before anything has been measured.

    If `is_greater`, larger values are better.
    """

    metric: str
    is_greater: bool
    step: int | None = None
    value: float | None = None

    def improves(self, step: int, measured: Mapping[str, float]) -> bool:
        """Records a step's measurements; returns whether the step is better than all before it.

        Raises ConfigError if the metric was not measured.
        """
        if self.metric not in measured:
            raise ConfigError(
                f"training.trainer_kwargs.metric_for_best_model={self.metric!r} is not measured; known: "
                f"{', '.join(sorted(measured))}"
            )
        value = measured[self.metric]
        if self.value is not None and not (value > self.value if self.is_greater else value < self.value):
            return False
        self.step, self.value = step, value
        return True


# Settings that do not change the results of a step.
_FREE_TO_CHANGE = frozenset(
    {
        *("output_dir", "save_steps", "save_final_model", "logging_steps", "eval_strategy", "eval_steps"),
        *("per_device_eval_batch_size", "resume_from_checkpoint", "try_resume_from_last_checkpoint"),
        *("enable_gradient_checkpointing", "enable_tensorboard", "logging_dir", "metrics_function"),
        *("enable_wandb", "run_name", "profiler"),
        # The fields of these are sections of their own.
        *("grpo", "distillation", "datasets", "log_completions", "vocab_mismatch_positions", "peft_save_mode"),
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
      source: Source of batches, whose place is saved and restored.
    """

    def __init__(
        self, params: TrainingParams, settings: Mapping[str, Any], best: BestStep | None, source: BatchSource
    ) -> None:
        self._params, self._settings, self._best, self._source = params, settings, best, source
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
        best = {} if self._best is None else {"step": self._best.step, "value": self._best.value}
        run_state = RunState(state.step, self._settings, _software(), best, self._source.place())
        return save_checkpoint(self._output, run_state, _tree(state), self._params.kwargs.save_total_limit)

    def restore(self, source: Path, initial: TrainState, note: Callable[[str], None]) -> TrainState:
        """Reads a checkpoint, with arrays placed as those of the initial state.

        Raises ConfigError, which names the setting, if the run has another one than before.
        """
        run_state = load_state(source)
        run_state.check_settings(self._settings, source)
        if run_state.software != _software():
            note(f"{source} was made with other software or threads: the last bits of the loss may differ")
        if self._best is not None:
            self._best.step, self._best.value = run_state.best.get("step"), run_state.best.get("value")
        if run_state.place:
            self._source.go_to(run_state.place)
        arrays = read_arrays(source / ARRAYS, _tree(initial))
        moments = [arrays["optimizer"][str(i)] for i in range(len(arrays["optimizer"]))]
        return TrainState(
            run_state.step, arrays["weights"], jax.tree.unflatten(jax.tree.structure(initial.moments), moments)
        )

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


def settings_of(config: TrainConfig, num_ranks: int, num_steps: int, digests: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings that must not change when a run resumes, by configuration name.

    `digests` are those of the files of data, by path.
    """
    training, train = config.training, config.data.train
    sections: dict[str, Any] = {
        **{"training": training, "training.grpo": training.grpo, "training.distillation": training.distillation},
        **{"peft": config.peft, "model": config.model, "data.train": train},
        **{f"data.train.datasets[{number}]": dataset for number, dataset in enumerate(train.datasets)},
    }
    found: dict[str, Any] = {
        f"{section}.{each.name}": getattr(group, each.name)
        for section, group in sections.items()
        for each in dataclasses.fields(group)
        if each.name not in _FREE_TO_CHANGE
    }
    found["training.trainer_kwargs"] = {
        name: value for name, value in training.trainer_kwargs.items() if name != "save_total_limit"
    }
    rows = found.pop("training.per_device_train_batch_size") * num_ranks
    found["training.per_device_train_batch_size times the number of data ranks"] = rows
    found["the number of steps (training.max_steps, or training.num_train_epochs and the rows)"] = num_steps
    found |= {f"the contents of {path}": digest for path, digest in digests.items()}
    return json.loads(json.dumps(found))  # as a checkpoint has them


def _tree(state: TrainState) -> dict[str, dict[str, jax.Array]]:
    """Returns the arrays of a state by the names that they have in a checkpoint."""
    moments = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state.moments))}
    return {"weights": state.trained, "optimizer": moments}


def _software() -> dict[str, Any]:
    return {"jax": version("jax"), "jaxlib": version("jaxlib"), "threads": usable_cores()}


def check_is_shared(output: Path) -> None:
    """Checks that all processes see the same folder of a run. Raises ConfigError where it is another one."""
    name = f".{secrets.token_hex(8)}"
    if jax.process_index() == 0:
        output.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    seen = output / text_of_first(name)
    if not seen.exists():
        raise ConfigError(f"training.output_dir={str(output)!r} is not host 0's: give a folder that all hosts share")
    wait_for_all("a look into the folder of the run")
    if jax.process_index() == 0:
        seen.unlink()


def checkpoint_folder(output: Path, step: int) -> Path:
    return output / f"checkpoint-{step}"


def find_checkpoints(output: Path) -> list[tuple[int, Path]]:
    """Returns the complete checkpoints of a run as (step, folder), in order of steps."""
    if not output.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in output.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found)


def save_checkpoint(output: Path, state: RunState, arrays: Arrays, keep: int | None) -> Path:
    """Writes a checkpoint and returns its folder; removes the oldest beyond `keep`, except that of the best step.

    With None as `keep`, all are kept. All processes call it, and each writes its shards of the arrays. Raises
    CheckpointError if the checkpoint cannot be written, for example on a full disk; earlier ones are unchanged.
    """
    folder = checkpoint_folder(output, state.step)
    is_first = jax.process_index() == 0
    with written_beside(folder) if is_first else writing_into(folder) as partial:
        wait_for_all("the folder of a checkpoint")  # before others write into it
        write_arrays(partial / ARRAYS, arrays)
        if is_first:
            describe_arrays(partial / ARRAYS, arrays)
            (partial / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        wait_for_all("the arrays of a checkpoint")
    wait_for_all("a checkpoint")
    if keep is not None and is_first:
        for step, old in find_checkpoints(output)[:-keep]:
            if step == state.best.get("step"):
                continue
            # Renamed first: a run that is killed here must not leave half of a checkpoint under its name.
            doomed = old.with_name(f".{old.name}.removed")
            shutil.rmtree(doomed, ignore_errors=True)
            old.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    return folder


def load_state(folder: Path) -> RunState:
    """Reads a checkpoint without its arrays. Raises CheckpointError if there is no checkpoint, or it is damaged."""
    if not (folder / _STATE).is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint of a training run: give a folder such as output/checkpoint-500"
        )
    values = read_json_object(folder / _STATE, max_bytes=_MAX_STATE_BYTES)
    try:
        return RunState(**values)
    except TypeError as error:
        raise CheckpointError(f"{folder / _STATE} is of another version of jaxis: {error}") from None
