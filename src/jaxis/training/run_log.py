"""Logs of a run: metrics.jsonl, lines for the user, TensorBoard, Weights & Biases, its speed, and traces."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.byte_size import human_bytes
from jaxis.host.extras import check_extra
from jaxis.host.machine import peak_memory_bytes
from jaxis.kernels.platform import target_platform
from jaxis.training.config.training import TrainingParams
from jaxis.training.optimizer import Schedule
from jaxis.training.trainable import TrainingCost

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


_LEAST_SECONDS, _NUM_PRODUCTS = 0.01, 5


def product_rate(dtype: DTypeLike, num_devices: int) -> float:
    """Measures the operations per second of a large product in JAX, on so many devices together."""
    product, size, seconds = jax.jit(jnp.matmul), 512, 0.0
    while seconds < _LEAST_SECONDS:
        size *= 2
        matrix = jnp.ones((size, size), dtype)
        product(matrix, matrix).block_until_ready()
        times = []
        for _ in range(_NUM_PRODUCTS):
            start = time.perf_counter()
            product(matrix, matrix).block_until_ready()
            times.append(time.perf_counter() - start)
        seconds = min(times)
    # Several devices on a CPU share its cores.
    return 2 * size**3 / seconds * (1 if target_platform() == "cpu" else num_devices)


def peak_bytes() -> int:
    """Returns the most memory that a device had in use; on CPU, that this process had."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((each.get("peak_bytes_in_use", 0) for each in stats), default=0) or peak_memory_bytes()


class Speedometer:
    """Measures steps.

    Args:
      cost: Operations of the training.
      limit: Operations per second that the devices could compute.
    """

    def __init__(self, cost: TrainingCost, limit: float) -> None:
        self._cost, self._limit = cost, limit
        self._last = time.perf_counter()
        self.seconds = 0.0

    def measure(self, num_tokens: int, num_learned: int) -> dict[str, float]:
        """Counts a step; returns its values for metrics.jsonl."""
        now = time.perf_counter()
        self.seconds, self._last = now - self._last, now
        flops = num_tokens * self._cost.of_token + num_learned * self._cost.of_target
        return {
            "tokens_per_second": round(num_tokens / self.seconds, 1),
            "mfu": round(flops / self.seconds / self._limit, 4),
            "peak_memory_bytes": peak_bytes(),
        }


class StepProfiler:
    """Records traces of a run's steps by `jax.profiler`, as `training.profiler` says."""

    def __init__(self, params: TrainingParams) -> None:
        self._params = params.profiler
        self._folder = Path(params.profiler.save_dir or Path(params.output_dir) / "profiler")
        self._number = -1
        self._is_recording = False

    def before_step(self) -> None:
        """Begins or ends a trace, as the next step needs it."""
        self._number += 1
        self._record(self._params.is_on and self._params.schedule.records(self._number))

    def close(self) -> None:
        self._record(False)

    def _record(self, is_wanted: bool) -> None:
        if is_wanted and not self._is_recording:
            jax.profiler.start_trace(self._folder)
        elif self._is_recording and not is_wanted:
            jax.profiler.stop_trace()
        self._is_recording = is_wanted
