"""Facts about the process and machine of a benchmark."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import psutil

from jaxis.engine.execution.program_files import COMPILE_EVENT, LOADED_EVENT
from jaxis.host.cores import usable_cores
from jaxis.host.machine import cpu_model
from jaxis.version import __version__


class CompileStats:
    """Numbers of programs that JAX compiled or loaded, and of those from disk (`num_loaded`); seconds are summed over
    threads.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_programs = 0
        self.num_loaded = 0


@contextmanager
def compile_stats() -> Iterator[CompileStats]:
    """Counts the programs that are compiled or loaded inside the block."""
    import jax.monitoring

    stats = CompileStats()

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            stats.seconds += duration_secs
            stats.num_programs += 1

    def on_event(event: str, **_: Any) -> None:
        stats.num_loaded += event == LOADED_EVENT

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    try:
        yield stats
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
        jax.monitoring.unregister_event_listener(on_event)


def describe_machine() -> dict[str, Any]:
    """Describes the environment of a measurement: processor or accelerator, cores, memory, versions."""

    return {
        "device": jax.local_devices()[0].device_kind,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": f"{platform.system()} {platform.machine()}",
        "jaxis": __version__,
        "jax": jax.__version__,
    }
