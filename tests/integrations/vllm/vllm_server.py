"""A server as `vllm serve` runs it, with jaxis inside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.host_processes import HostProcess, free_port


@contextmanager
def vllm_server(model: str | Path, *options: str, **env: str) -> Iterator[tuple[str, HostProcess]]:
    """A server of a model, once it is ready: its address, and its process.

    Args:
      model: The checkpoint.
      options: Options of the command line.
      env: Variables of the environment.
    """
    port = free_port()
    # The command `vllm` wants a distribution called vllm, which builds for CPU are not.
    process = HostProcess(
        [
            *("-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--dtype=float32"),
            *(f"--port={port}", "--host=127.0.0.1", *options),
        ],
        VLLM_PLUGINS="jaxis",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        **env,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.process.poll() is None, process.output
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield address, process
    finally:
        process.process.terminate()  # ends the engine's process, too
        process.wait(60)
