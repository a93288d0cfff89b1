"""Starts an engine large enough for a benchmark, and measures its startup."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from jaxis.bench.limits import Limits, measure_device_limits, measure_limits
from jaxis.bench.run import Load, run_batch
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine import LLMEngine
from jaxis.engine.engine_config import CPU_DEFAULT_MAX_NUM_BATCHED_TOKENS
from jaxis.engine.setup import build_engine
from jaxis.host.machine import cpu_model, peak_memory_bytes, usable_cores
from jaxis.host.progress import ProgressDisplay
from jaxis.version import __version__

# Facts about the process and machine of a benchmark.


COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
LOADED_EVENT = "/jax/compilation_cache/cache_hits"


def seconds_since_start() -> float:
    """Seconds since this process was started, the interpreter's own start included."""
    if sys.platform == "linux":
        # psutil adds the boot time, which the system reports in whole seconds.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - psutil.Process().create_time()


class CompileStats:
    """Programs that JAX has compiled or loaded since counting began.

    Attributes:
      seconds: Time spent compiling or loading, summed over threads.
      num_programs: Number of programs.
      num_loaded: How many of them were loaded from disk.
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
    """The environment of a measurement: processor or accelerator, cores, memory, versions."""
    import jax

    return {
        "device": jax.local_devices()[0].device_kind,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": f"{platform.system()} {platform.machine()}",
        "jaxis": __version__,
        "jax": jax.__version__,
    }


BLOCK_SIZE = EngineArgs.block_size


@dataclass(frozen=True)
class Session:
    """A running engine.

    Attributes:
      engine: The engine, which has just generated its first token.
      seconds_to_first_token: Time from the start of this process to that token.
      start_peak_memory_bytes: Peak memory of the process until then.
      start_compile: Programs compiled or loaded until then.
    """

    engine: LLMEngine
    seconds_to_first_token: float
    start_peak_memory_bytes: int
    start_compile: CompileStats

    def report(self, limits: Limits, results: Sequence[Any]) -> dict[str, Any]:
        """The whole benchmark as JSON values; each of `results` has a `to_json`."""
        config = self.engine.vllm_config.model_config
        return {
            "model": config.model,
            "dtype": np.dtype(config.dtype).name,
            "machine": describe_machine(),
            "limits": limits.to_json(),
            "start": {
                "seconds_to_first_token": self.seconds_to_first_token,
                "peak_memory_bytes": self.start_peak_memory_bytes,
                "compile_seconds": self.start_compile.seconds,
                "num_programs": self.start_compile.num_programs,
                "num_programs_from_disk": self.start_compile.num_loaded,
            },
            "results": [result.to_json() for result in results],
            "peak_memory_bytes": peak_memory_bytes(),
        }


@contextmanager
def open_session(
    model: str | None,
    arguments: dict[str, Any],
    *,
    max_num_seqs: int,
    max_model_len: int,
    input_len: int,
    rng: np.random.Generator,
    progress: ProgressDisplay,
) -> Iterator[Session]:
    """Starts an engine and has it generate one token.

    Args:
      model: Folder or Hub id; None is the embedded model.
      arguments: Arguments of `LLM`; they take precedence over the sizes given here.
      max_num_seqs: Sequences that the KV cache must hold.
      max_model_len: Tokens of each of them.
      input_len: Tokens of the first prompt.
      rng: Draws that prompt.
      progress: Shows loading and compiling.

    Raises:
      ConfigError, CheckpointError, RequestError, EngineError: See `LLM` and its `generate`.
    """
    with compile_stats() as compiled:
        engine = build_sized_engine(
            model, arguments, max_num_seqs=max_num_seqs, max_model_len=max_model_len, progress=progress
        )
        try:
            run_batch(engine, Load(1, input_len, 1), rng)
        except BaseException:
            engine.close()
            raise
    try:
        yield Session(engine, seconds_since_start(), peak_memory_bytes(), compiled)
    finally:
        engine.close()


def build_sized_engine(
    model: str | None, arguments: dict[str, Any], *, max_num_seqs: int, max_model_len: int, progress: ProgressDisplay
) -> LLMEngine:
    """Builds an engine with a KV cache of exactly the given size; for the arguments see `open_session`."""
    sizes: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    if _is_on_cpu():
        # The default is sized for a shared machine. The engine takes only what it can use of this.
        sizes["kv_cache_memory"] = psutil.virtual_memory().available
    return build_engine(EngineArgs(model=model, **(sizes | arguments)), progress).engine


def longest_sequence(loads: Sequence[Load], arguments: dict[str, Any]) -> int:
    """The `max_model_len` with which an engine with these arguments can run each of the loads."""
    default = max(CPU_DEFAULT_MAX_NUM_BATCHED_TOKENS, *(load.batch_size for load in loads))
    length = max(load.max_len(arguments.get("max_num_batched_tokens", default)) for load in loads)
    # Rounded up to whole blocks: the cache is sized in tokens, and each sequence leaves its last block partly empty.
    return -(-length // BLOCK_SIZE) * BLOCK_SIZE


def limits_of_device() -> Limits:
    """The limits of the device that JAX runs on."""
    return measure_limits(usable_cores()) if _is_on_cpu() else measure_device_limits()


def _is_on_cpu() -> bool:
    """Whether an engine of this process runs on CPU: `make_mesh` takes the first of these devices."""
    return jax.local_devices()[0].platform == "cpu"
