"""A server in a process of its own, and what its metrics say."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp

START_SECONDS = 120.0
_COMMAND = (sys.executable, "-c", "from jaxis.cli.main import main; main()", "serve", "--port", "0")


@contextlib.contextmanager
def server_process(arguments: Sequence[str]) -> Iterator[str]:
    """Runs `jaxis serve` with arguments while the block runs; yields its URL.

    Raises:
      RuntimeError: It did not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen([*_COMMAND, *arguments], stdout=output, stderr=output)
        try:
            yield _wait_for_url(process, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_url(process: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(errors="replace")
        if "try:" in text:
            [url] = [line.split()[1] for line in text.splitlines() if line.startswith("url:")]
            return url.removesuffix("/v1")
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


async def read_metrics(session: aiohttp.ClientSession) -> dict[str, float]:
    """The values of /metrics by name; of those with several labels, the sum."""
    values: dict[str, float] = {}
    async with session.get("/metrics") as response:
        response.raise_for_status()
        for line in (await response.text()).splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
    return values
