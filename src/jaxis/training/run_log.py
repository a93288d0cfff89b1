"""Logs of a run: metrics.jsonl, answers.jsonl, TensorBoard's events, Weights & Biases, and lines for the user."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.byte_size import human_bytes
from jaxis.host.extras import check_extra
from jaxis.training.config.training import TrainingParams
from jaxis.training.optimizer import Schedule
from jaxis.training.speed import Speedometer

METRICS_FILE = "metrics.jsonl"
ANSWERS_FILE = "answers.jsonl"


class RunLog:
    """The logs of a run that begins, or resumes, after a step; of several hosts, host 0 writes them.

    Entries of later steps are dropped, because those steps run again.

    Args:
      schedule: Learning rate.
      shown: Names of values that printed lines show beside the loss.
      note: Called with lines for the user.

    Raises:
      ConfigError: The library of TensorBoard or of Weights & Biases is not installed, or cannot begin.
      CheckpointError: A file cannot be written.
    """

    def __init__(
        self,
        params: TrainingParams,
        after_step: int,
        num_steps: int,
        schedule: Schedule,
        shown: Sequence[str],
        speedometer: Speedometer,
        note: Callable[[str], None],
    ) -> None:
        output = Path(params.output_dir)
        self._every, self._num_steps, self._schedule, self._shown = params.logging_steps, num_steps, schedule, shown
        self.note = note
        self._speedometer = speedometer
        self._seconds: deque[float] = deque(maxlen=50)
        self._metrics: MetricsFile | None = None
        self._make_answers = functools.partial(MetricsFile, output / ANSWERS_FILE, after_step)
        self._answers: MetricsFile | None = None
        self._events = self._wandb = None
        if jax.process_index() > 0:
            return
        self._metrics = MetricsFile(output / METRICS_FILE, after_step)
        if params.enable_tensorboard:
            self._events = _open_events(Path(params.logging_dir or output / "runs"), after_step)
        if params.enable_wandb:
            self._wandb = _open_wandb(params)

    def write_step(self, step: int, values: Mapping[str, float], num_learned: int, num_tokens: int) -> None:
        """Writes the values of a step, from 1, on so many tokens; prints a line every `logging_steps` steps."""
        line = {"step": step, **values, "learned_tokens": num_learned, "lr": float(self._schedule(step - 1))}
        line |= self._speedometer.measure(num_tokens, num_learned)
        self._seconds.append(self._speedometer.seconds)
        self.write(line)
        if step % self._every == 0 or step == self._num_steps:
            self.note(self._line(line))

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends measurements after a step. Raises CheckpointError."""
        if self._metrics is not None:
            self._metrics.write(values)
        if self._events is not None:
            for name, value in values.items():
                if name != "step":
                    self._events.add_scalar(name, value, values["step"])
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in values.items() if name != "step"}, step=values["step"])

    def write_answer(self, values: Mapping[str, Any]) -> None:
        """Appends an answer of the model. Raises CheckpointError."""
        if self._answers is None:
            self._answers = self._make_answers()
        self._answers.write(values)

    def close(self) -> None:
        for file in (self._metrics, self._answers, self._events):
            if file is not None:
                file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _line(self, values: Mapping[str, Any]) -> str:
        """Returns a line about a step for the user. The remaining time assumes the median time of the last steps."""
        recent = sorted(self._seconds)
        left = recent[len(recent) // 2] * (self._num_steps - values["step"])
        shown = "".join(f"  {name} {values[name]:.4g}" for name in self._shown)
        return (
            f"step {values['step']}/{self._num_steps}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
            f"grad norm {values['grad_norm']:.3f}  {values['tokens_per_second']:.0f} tokens/s  "
            f"MFU {values['mfu']:.1%}  {human_bytes(values['peak_memory_bytes'])}  {_duration(left)} left{shown}"
        )


class MetricsFile:
    """A JSONL file of a run whose lines name a step; lines of steps after `after_step`, which run again, are dropped.

    Raises CheckpointError if the file cannot be written.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = b""
            if after_step and self._path.exists():
                lines = self._path.read_bytes().splitlines(keepends=True)
                kept = b"".join(line for line in lines if _step_of(line) <= after_step)
            partial = self._path.with_name(f".{path.name}.partial")
            partial.write_bytes(kept)
            os.replace(partial, self._path)
            self._file: TextIO = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._fault(error) from None

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends a line. Raises CheckpointError if the file cannot be written."""
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._fault(error) from None

    def close(self) -> None:
        self._file.close()

    def _fault(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be written: {error.strerror}")


def _step_of(line: bytes) -> float:
    """Returns the step of a line. An incomplete line, left by a killed run, gets infinity."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _open_events(folder: Path, after_step: int) -> Any:
    check_extra("tensorboard", "training.enable_tensorboard")
    from tensorboardX import SummaryWriter

    try:
        # TensorBoard hides an interrupted run's entries of steps that run again.
        return SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from None


def _open_wandb(params: TrainingParams) -> Any:
    check_extra("wandb", "training.enable_wandb")
    wandb: Any = importlib.import_module("wandb")
    try:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxis"),
            name=params.run_name,
            dir=params.output_dir,
            config=dataclasses.asdict(params),
        )
    except wandb.Error as error:
        [first, *_] = str(error).splitlines()
        raise ConfigError(f"training.enable_wandb: {first}") from None


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
