"""How long a short request takes while another client's long prompts wait, by whose request it is.

    python benchmarks/fairness.py
    python benchmarks/fairness.py --long 60 --rounds 5 -- ./Qwen3-0.6B

The other client, an API key, sends its long prompts all at once, or one after another. The short request comes from a
key of its own, where clients share the tokens of steps, or from the same key, where it waits its turn: without fairness
every client would wait like that. What stands after `--` goes to `jaxis serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from serving.server_process import server_process

# Let the other client's prompts arrive, and the engine be in the midst of them.
HEAD_START_SECONDS = 0.3


async def ask(session: aiohttp.ClientSession, key: str, num_words: int, max_tokens: int) -> float:
    """Seconds that a completion of a random prompt takes."""
    start = time.perf_counter()
    prompt = " ".join(random.choices(["Lily", "saw", "a", "big", "dog", "in", "the", "park"], k=num_words))
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    async with session.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        response.raise_for_status()
        await response.read()
    return time.perf_counter() - start


async def one_after_another(session: aiohttp.ClientSession, arguments: argparse.Namespace, key: str) -> None:
    """Sends long prompts until it is cancelled, each when the one before has its answer."""
    while True:
        await ask(session, key, arguments.words, arguments.output_len)


async def measure(url: str, keys: list[str], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of the short request in each situation, a round each."""
    many, one = keys
    seconds: dict[str, list[float]] = {}
    limits = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(url, timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
        await ask(session, one, arguments.words, arguments.output_len)
        for number in range(arguments.rounds + 1):  # the first compiles what it needs
            found: dict[str, float] = {}
            found["the server is idle"] = await ask(session, one, 8, 8)
            other = asyncio.create_task(one_after_another(session, arguments, many))
            await asyncio.sleep(HEAD_START_SECONDS)
            found["one long prompt of another at a time"] = await ask(session, one, 8, 8)
            other.cancel()
            await asyncio.wait([other])
            for key, name in ((one, "another's"), (many, "its own")):
                async with asyncio.TaskGroup() as group:
                    for _ in range(arguments.long):
                        group.create_task(ask(session, many, arguments.words, arguments.output_len))
                    await asyncio.sleep(HEAD_START_SECONDS)
                    found[f"{arguments.long} long prompts, {name}"] = await ask(session, key, 8, 8)
            for name, value in found.items() if number else ():
                seconds.setdefault(name, []).append(value)
    return seconds


def new_key(name: str, path: Path) -> str:
    """Adds an API key to a file of keys; returns it."""
    command = [sys.executable, "-c", "from jaxis.cli.main import main; main()", "new-key", name]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    with path.open("a") as file:
        file.write(made.stdout)
    return made.stderr.split()[-1]


def main() -> None:
    """Prints a line for each situation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=60, help="prompts that wait at once (default: %(default)s)")
    parser.add_argument("--words", type=int, default=900, help="words of a long prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=16, help="tokens of its answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("server", nargs="*", help="arguments of jaxis serve")
    arguments = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.yaml"
        keys = [new_key(name, path) for name in ("many", "one")]
        with server_process(["--api-key-file", str(path), *arguments.server]) as url:
            seconds = asyncio.run(measure(url, keys, arguments))
    for name, values in seconds.items():
        print(f"{name:45} {statistics.median(values):8.3f} s   ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
