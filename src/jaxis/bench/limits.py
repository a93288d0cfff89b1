"""Measures the machine's limits: the speed of reading and copying memory, of float32 arithmetic, and of barriers.

    python -m jaxis.bench.limits 4

Each figure is the best of several passes, since a limit is a maximum: a busy machine does less.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.errors import EngineError
from jaxis.kernels import native

# For all threads together; far more than any cache holds.
ARRAY_BYTES = 1 << 30
MATRIX_SIZE = 2048
PASSES = 10
BARRIERS = 2000
# One of these is the variable that numpy's BLAS library reads.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class Limits:
    """Measured limits of a machine.

    Attributes:
      num_threads: Threads measured together; None on an accelerator.
      read_bytes_per_second: Speed of a plain read; None on an accelerator, where no plain read is as fast as a copy.
      copy_bytes_per_second: Speed of a plain copy, counting both bytes read and bytes written.
      flops_per_second: Speed of a large matrix product, float32 on CPU, bfloat16 on an accelerator.
      barrier_seconds: Time in which the threads of the native kernels meet once; 0 without such kernels.
    """

    num_threads: int | None
    read_bytes_per_second: float | None
    copy_bytes_per_second: float
    flops_per_second: float
    barrier_seconds: float = 0.0

    @property
    def memory_bytes_per_second(self) -> float:
        """Limit for a step's bytes: the read speed if it was measured, since steps read, else the copy speed."""
        return self.read_bytes_per_second or self.copy_bytes_per_second

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def measure_limits(num_threads: int) -> Limits:
    """Measures the host's limits with this many threads, in a separate process. Takes a few seconds.

    Raises EngineError if the process failed, for example for lack of memory.
    """
    environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(num_threads))}
    command = [sys.executable, "-m", "jaxis.bench.limits", str(num_threads)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        reason = child.stderr.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
        raise EngineError(f"the machine's limits could not be measured with {num_threads} threads: {reason}")
    return Limits(**json.loads(child.stdout))


def measure_device_limits() -> Limits:
    """Measures the limits of JAX's first device, an accelerator."""
    import jax
    import jax.numpy as jnp

    # In place: fresh memory would first have to be mapped.
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = add(jnp.zeros(ARRAY_BYTES // 4, jnp.float32))

    def copy() -> None:
        nonlocal array
        array = add(array).block_until_ready()

    matrix = jnp.ones((4 * MATRIX_SIZE, 4 * MATRIX_SIZE), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    return Limits(
        num_threads=None,
        read_bytes_per_second=None,
        copy_bytes_per_second=2 * ARRAY_BYTES / _best_seconds(copy),
        flops_per_second=2
        * (4 * MATRIX_SIZE) ** 3
        / _best_seconds(lambda: multiply(matrix, matrix).block_until_ready()),
    )


def measure_host(num_threads: int) -> Limits:
    size = ARRAY_BYTES // 8 // num_threads
    sources = [np.ones(size, np.int32) for _ in range(num_threads)]
    targets = [np.ones(size, np.int32) for _ in range(num_threads)]
    num_bytes = num_threads * sources[0].nbytes
    matrix = np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32)
    with ThreadPoolExecutor(num_threads) as pool:
        # numpy's fastest pass over every byte: an integer maximum has no NaN checks and no dependent sum.
        read = _best_seconds(lambda: list(pool.map(np.max, sources)))
        copy = _best_seconds(lambda: list(pool.map(np.copyto, targets, sources)))
    product = _best_seconds(lambda: matrix @ matrix)
    library = native.library()
    barrier = 0.0 if library is None else max(0.0, library.jaxis_barrier_seconds(num_threads, BARRIERS))
    return Limits(num_threads, num_bytes / read, 2 * num_bytes / copy, 2 * MATRIX_SIZE**3 / product, barrier)


def _best_seconds(function: Callable[[], object]) -> float:
    seconds = []
    for _ in range(PASSES):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps(measure_host(int(sys.argv[1])).to_json()))
