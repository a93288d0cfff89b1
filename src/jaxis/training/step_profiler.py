from __future__ import annotations

from pathlib import Path

import jax

from jaxis.training.config import TrainingParams


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
