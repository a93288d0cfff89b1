"""The section `training.profiler`: the steps whose trace is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused, text, whole
from jaxis.training.config.unused import PROFILER


@dataclass(frozen=True, kw_only=True)
class ScheduleParams(ParameterGroup):
    """Recorded steps: after `skip_first` steps, the last `active` of each cycle of `wait`, `warmup` and `active` steps.

    Attributes:
      enable_schedule: True to record the `active` steps of each cycle; False for all steps.
      repeat: Number of cycles; 0: to the end.
    """

    enable_schedule: bool = False
    wait: int = whole(0, 0)
    warmup: int = whole(1, 0)
    active: int = whole(3, 1)
    repeat: int = whole(1, 0)
    skip_first: int = whole(1, 0)

    @classmethod
    def section(cls) -> str:
        return "training.profiler.schedule"

    def records(self, number: int) -> bool:
        """Returns whether a step is recorded, by its number in this run, from 0."""
        if not self.enable_schedule:
            return True
        cycle, place = divmod(number - self.skip_first, self.wait + self.warmup + self.active)
        return cycle >= 0 and place >= self.wait + self.warmup and (not self.repeat or cycle < self.repeat)


@dataclass(frozen=True, kw_only=True)
class ProfilerParams(ParameterGroup):
    """Recording of traces by `jax.profiler`.

    Attributes:
      enable_cpu_profiling, enable_cuda_profiling: True, either of them, to record; a trace has hosts and devices.
      save_dir: Folder of the traces; None: `profiler` in `training.output_dir`.
      schedule: Steps that are recorded.
    """

    save_dir: str | None = text(None, "the path of a folder")
    enable_cpu_profiling: bool = False
    enable_cuda_profiling: bool = False
    schedule: ScheduleParams = field(default_factory=ScheduleParams)

    UNUSED: ClassVar[Mapping[str, Unused]] = PROFILER

    @classmethod
    def section(cls) -> str:
        return "training.profiler"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "schedule", ScheduleParams.of(self.schedule or {}))

    @property
    def is_on(self) -> bool:
        return self.enable_cpu_profiling or self.enable_cuda_profiling
