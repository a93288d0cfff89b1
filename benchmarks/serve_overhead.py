"""What serving costs: a server's throughput beside that of its engine alone, on the same requests.

    python benchmarks/serve_overhead.py
    python benchmarks/serve_overhead.py --concurrency 16 ./Qwen3-0.6B

Engine and server are processes that take turns, round by round, so that a slow minute of the machine hits both. As many
clients as the engine runs sequences at once each send the next request when their last one has ended, whole or
streamed; the engine alone gets all of a round's requests in one `LLM.generate`. Client and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import aiohttp

from jaxis.bench.serving.client import ServingClient
from jaxis.bench.serving.dataset import ServingRequest
from jaxis.bench.serving.load import run_load
from serving.server_process import server_process

PROMPT = "Once upon a time"
ENGINE = """
import json, sys, time
from jaxis import LLM, SamplingParams
model, concurrency, memory = json.loads(sys.argv[1])
with LLM(model, max_num_seqs=concurrency, kv_cache_memory=memory, show_progress=False) as llm:
    for line in sys.stdin:
        prompt, lengths = json.loads(line)
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        start = time.perf_counter()
        llm.generate([prompt] * len(lengths), params, progress=False)
        print(time.perf_counter() - start, flush=True)
"""


def engine_seconds(process: subprocess.Popen, lengths: Sequence[int]) -> float:
    """Seconds that the engine alone takes for answers of these many tokens."""
    process.stdin.write(json.dumps([PROMPT, lengths]) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


async def streamed_seconds(url: str, lengths: Sequence[int], concurrency: int) -> float:
    """Seconds that the server takes for them, streamed."""
    async with ServingClient(url, "/v1/completions") as client:
        fields = {"temperature": 0.0, "ignore_eos": True}
        bodies = [client.encode(ServingRequest(PROMPT, length), fields) for length in lengths]
        load = await run_load(client, bodies, [0.0] * len(bodies), max_concurrency=concurrency)
    if [result.num_output_tokens for result in load.results] != list(lengths):
        raise SystemExit(f"the server failed: {next(r.error for r in load.results if r.error)}")
    return load.duration_seconds


async def whole_seconds(url: str, lengths: Sequence[int], concurrency: int) -> float:
    """Seconds that the server takes for them, each answered at once."""
    left = list(reversed(lengths))

    async def client(session: aiohttp.ClientSession) -> None:
        while left:
            body = {"prompt": PROMPT, "max_tokens": left.pop(), "temperature": 0.0, "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as response:
                response.raise_for_status()
                await response.read()

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
        return time.perf_counter() - start


def main() -> None:
    """Prints tokens a second of each round, their medians, and the server's share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or hub id; the embedded model if left out")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, help="a round's; four for each client if left out")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer, on average; from half to 1.5 times that")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-memory", default="64MiB")
    options = parser.parse_args()
    num_requests = options.requests or 4 * options.concurrency
    # Answers of one length would all end in one step, and leave the engine without work until the next requests.
    lengths = [random.Random(i).randint(options.tokens // 2, options.tokens * 3 // 2) for i in range(num_requests)]

    settings = json.dumps([options.model, options.concurrency, options.kv_cache_memory])
    arguments = ["--max-num-seqs", str(options.concurrency), "--kv-cache-memory", options.kv_cache_memory]
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with engine, server_process([options.model, *arguments] if options.model else arguments) as url:
        ways: dict[str, Callable[[], float]] = {
            "engine alone": lambda: engine_seconds(engine, lengths),
            "server, whole": lambda: asyncio.run(whole_seconds(url, lengths, options.concurrency)),
            "server, streamed": lambda: asyncio.run(streamed_seconds(url, lengths, options.concurrency)),
        }
        for measure in ways.values():  # programs compile
            measure()
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, measure in ways.items():
                rates[name].append(sum(lengths) / measure())
        engine.stdin.close()
    alone = statistics.median(rates["engine alone"])
    for name, values in rates.items():
        median = statistics.median(values)
        shown = " ".join(f"{value:.0f}" for value in values)
        print(f"{name + ':':<18}{median:>8.0f} tok/s  {100 * median / alone:>4.0f}%   rounds: {shown}")


if __name__ == "__main__":
    main()
