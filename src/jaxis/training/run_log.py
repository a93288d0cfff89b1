from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import CheckpointError
from jaxis.host.extras import check_extra
from jaxis.training.config import TrainingParams
from jaxis.training.metrics import ANSWERS_FILE, METRICS_FILE, MetricsFile


class RunLog:
    """The logs of a run that begins, or resumes, after a step: metrics.jsonl, answers.jsonl, and TensorBoard's events.

    Entries of later steps are dropped, because those steps run again.

    Raises:
      ConfigError: TensorBoard's writer is not installed.
      CheckpointError: A file cannot be written.
    """

    def __init__(self, params: TrainingParams, after_step: int) -> None:
        output = Path(params.output_dir)
        self._metrics = MetricsFile(output / METRICS_FILE, after_step)
        self._make_answers = functools.partial(MetricsFile, output / ANSWERS_FILE, after_step)
        self._answers: MetricsFile | None = None
        self._events = None
        if params.enable_tensorboard:
            self._events = _open_events(Path(params.logging_dir or output / "runs"), after_step)

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends a step's measurements. Raises CheckpointError."""
        self._metrics.write(values)
        if self._events is not None:
            for name, value in values.items():
                if name != "step":
                    self._events.add_scalar(name, value, values["step"])

    def write_answer(self, values: Mapping[str, Any]) -> None:
        """Appends an answer of the model. Raises CheckpointError."""
        if self._answers is None:
            self._answers = self._make_answers()
        self._answers.write(values)

    def close(self) -> None:
        for file in (self._metrics, self._answers, self._events):
            if file is not None:
                file.close()


def _open_events(folder: Path, after_step: int) -> Any:
    check_extra("tensorboard", "training.enable_tensorboard")
    from tensorboardX import SummaryWriter

    try:
        # TensorBoard hides an interrupted run's entries of steps that run again.
        return SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from None
