"""The section `training.profiler`: the steps whose trace is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused
from jaxis.training.config.unused import PROFILER


@dataclass(frozen=True, kw_only=True)
class ScheduleParams(ParameterGroup):
    """Recorded steps: after `skip_first` steps, the last `active` of each cycle of `wait`, `warmup` and `active` steps.

    Attributes:
      enable_schedule: True to record the `active` steps of each cycle; False for all steps.
      repeat: Number of cycles; 0: to the end.
    """

    enable_schedule: bool = False
    wait: int = 0
    warmup: int = 1
    active: int = 3
    repeat: int = 1
    skip_first: int = 1

    @classmethod
    def section(cls) -> str:
        return "training.profiler.schedule"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("enable_schedule", bool, "true or false")
        for name in ("wait", "warmup", "repeat", "skip_first"):
            self.check_number(name, 0, whole=True)
        self.check_number("active", 1, whole=True)

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

    save_dir: str | None = None
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
        self.check("save_dir", str, "the path of a folder", optional=True)
        for name in ("enable_cpu_profiling", "enable_cuda_profiling"):
            self.check(name, bool, "true or false")

    @property
    def is_on(self) -> bool:
        return self.enable_cpu_profiling or self.enable_cuda_profiling
