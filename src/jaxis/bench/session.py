"""Starts an engine large enough for a benchmark, and measures its startup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import psutil

from jaxis.bench.limits import Limits, measure_device_limits, measure_limits
from jaxis.bench.process_facts import CompileStats, compile_stats, describe_machine
from jaxis.bench.run import Load, run_batch
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine import LLMEngine
from jaxis.engine.engine_config import CPU_DEFAULT_MAX_NUM_BATCHED_TOKENS
from jaxis.engine.setup import build_engine
from jaxis.host.cores import usable_cores
from jaxis.host.machine import peak_memory_bytes, seconds_since_start
from jaxis.host.progress import ProgressDisplay

BLOCK_SIZE = EngineArgs.block_size


@dataclass(frozen=True)
class Session:
    """A running engine, with the time from the start of this process to its first token, and memory and programs until
    then.
    """

    engine: LLMEngine
    seconds_to_first_token: float
    start_peak_memory_bytes: int
    start_compile: CompileStats

    def report(self, limits: Limits, results: Sequence[Any]) -> dict[str, Any]:
        """Returns the whole benchmark as JSON values; each of `results` has a `to_json`."""
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
    """Starts an engine and generates one token; raises as `LLM` and its `generate` do.

    The KV cache holds `max_num_seqs` sequences of `max_model_len` tokens; `arguments` of `LLM` take precedence. A
    `model` of None is the embedded one. `rng` draws the first prompt.
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
    """Builds an engine with a KV cache of exactly the given size; the arguments are those of `open_session`."""
    sizes: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    if _is_on_cpu():
        # The default is sized for a shared machine. The engine takes only what it can use of this.
        sizes["kv_cache_memory"] = psutil.virtual_memory().available
    return build_engine(EngineArgs(model=model, **(sizes | arguments)), progress).engine


def longest_sequence(loads: Sequence[Load], arguments: dict[str, Any]) -> int:
    """Returns the `max_model_len` with which an engine with these arguments can run each of the loads."""
    default = max(CPU_DEFAULT_MAX_NUM_BATCHED_TOKENS, *(load.batch_size for load in loads))
    length = max(load.max_len(arguments.get("max_num_batched_tokens", default)) for load in loads)
    # Rounded up to whole blocks: the cache is sized in tokens, and each sequence leaves its last block partly empty.
    return -(-length // BLOCK_SIZE) * BLOCK_SIZE


def limits_of_device() -> Limits:
    return measure_limits(usable_cores()) if _is_on_cpu() else measure_device_limits()


def _is_on_cpu() -> bool:
    """Returns whether an engine of this process runs on CPU: `make_mesh` takes the first of these devices."""
    return jax.local_devices()[0].platform == "cpu"
