"""Loads a server with many clients, some of which leave, and checks every answer.

    python benchmarks/load_test.py --clients 200 --seconds 300
    python benchmarks/load_test.py --seconds 60 -- ./Qwen3-0.6B --max-num-seqs 32

First it asks an idle server each request of a mix; then clients ask them all at once, in random order, whole and
streamed. Each request must end in the very answer of the idle server, in a refusal (429, 503), or because its client
left. At the end no request may run or wait, every cache block must be free, and the server's memory must have stopped
growing. Exit code 1 says that something of that was not so. What stands after `--` goes to `jaxis serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from serving.answer_forms import Answer
from serving.answers import ask
from serving.clients import Outcomes, first_difference, idle_answers, open_session, run_clients
from serving.request_mix import MixItem, request_mix
from serving.server_process import read_metrics, server_process

# Small enough that requests wait, are refused and lose their cache blocks to each other. The prompts of some have
# opened Qwen3's reasoning, which ends by a budget.
SERVER_ARGUMENTS = ("--kv-cache-memory", "16MiB", "--max-queued", "112", "--model-alias", "*")
SERVER_ARGUMENTS += ("--reasoning-parser", "qwen3")
IDLE_SECONDS = 15.0
SAMPLE_SECONDS = 1.0
MIB = 2**20
METRICS_OF_MEMORY = ("process_resident_memory_bytes", "jaxis:engine_process_memory_bytes")


@dataclass(frozen=True)
class Sample:
    """The server at a moment: seconds from the start, resident bytes, sequences that run and wait."""

    seconds: float
    memory_bytes: float
    num_running: float
    num_waiting: float


async def sample_server(url: str, samples: list[Sample]) -> None:
    """Adds a sample a second until it is cancelled."""
    start = time.monotonic()
    async with open_session(url) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                values = await read_metrics(session)
                memory = sum(values.get(name, 0.0) for name in METRICS_OF_MEMORY)
                running, waiting = values["jaxis:num_requests_running"], values["jaxis:num_requests_waiting"]
                samples.append(Sample(time.monotonic() - start, memory, running, waiting))
            await asyncio.sleep(SAMPLE_SECONDS)


async def check_idle(url: str, outcomes: Outcomes) -> dict[str, float]:
    """Waits until nothing runs; what is left then is a violation. Returns the metrics."""
    names = ("jaxis:num_requests_running", "jaxis:num_requests_waiting", "jaxis:kv_cache_usage_perc")
    deadline = time.monotonic() + IDLE_SECONDS
    async with open_session(url) as session:
        while True:
            values = await read_metrics(session)
            left = {name: values[name] for name in names if values[name]}
            if not left or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
    if left:
        outcomes.violation("leaked", f"{IDLE_SECONDS:g} s after the last request: {left}")
    return values


async def check_answers(url: str, mix: Sequence[MixItem], expected: dict[str, Answer], outcomes: Outcomes) -> None:
    """Asks everything once more, streamed."""
    async with open_session(url) as session:
        for item in mix:
            answer = await ask(session, item, stream=True)
            if answer != expected[item.name]:
                outcomes.violation("wrong", f"{item.name}, idle again: {first_difference(expected[item.name], answer)}")


def memory_growth(samples: Sequence[Sample]) -> float | None:
    """Growth of memory from the second quarter of the time to the last, as a share; None of too few samples."""
    if len(samples) < 12 or not samples[0].memory_bytes:
        return None
    quarter = len(samples) // 4
    early = statistics.median(sample.memory_bytes for sample in samples[quarter : 2 * quarter])
    late = statistics.median(sample.memory_bytes for sample in samples[-quarter:])
    return late / early - 1


def print_report(outcomes: Outcomes, samples: Sequence[Sample], metrics: dict[str, float], seconds: float) -> None:
    """The table."""
    total = outcomes.counts.total()
    num_refused = sum(count for name, count in outcomes.counts.items() if name.startswith("refused"))
    rows = [("requests", f"{total} in {seconds:.0f} s, {total - num_refused} of them taken")]
    for name, count in sorted(outcomes.counts.items()):
        share = "" if name.startswith("refused") else f" ({100 * count / (total - num_refused):.1f}% of those taken)"
        rows.append((name, f"{count}{share}"))
    if outcomes.seconds:
        times = sorted(outcomes.seconds)
        rows.append(("seconds an answer", f"{statistics.median(times):.2f} median, {times[-1]:.2f} longest"))
    rows.append(("generated tokens", f"{metrics['jaxis:generation_tokens_total']:.0f}"))
    rows.append(("preemptions", f"{metrics['jaxis:num_preemptions_total']:.0f}"))
    if samples:
        most_running, most_waiting = (max(getattr(s, n) for s in samples) for n in ("num_running", "num_waiting"))
        rows.append(("sequences at once", f"{most_running:.0f} running, {most_waiting:.0f} waiting at most"))
        places = [samples[round(part * (len(samples) - 1) / 8)] for part in range(9)]
        memory = " ".join(f"{place.memory_bytes / MIB:.0f}" for place in places)
        rows.append(("memory, MiB", f"{memory} at every eighth of the time"))
    growth = memory_growth(samples)
    rows.append(
        ("memory growth", "not measured" if growth is None else f"{100 * growth:+.1f}%, second to last quarter")
    )
    print("\n".join(f"{name + ':':<20}{text}" for name, text in rows))
    for text in outcomes.violations:
        print(f"VIOLATION {text}")


async def load_test(url: str, arguments: argparse.Namespace) -> bool:
    """Runs the whole test against a server; prints the report. Returns whether all was well."""
    mix = request_mix()
    expected = await idle_answers(url, mix)
    samples: list[Sample] = []
    outcomes = Outcomes()
    load = {"num_clients": arguments.clients, "leave_share": arguments.leave, "outcomes": outcomes}
    start = time.monotonic()
    # Programs compile for every size of a step, and memory grows with them.
    await run_clients(url, mix, expected, seconds=arguments.warmup, seed=arguments.seed, **load)
    sampling = asyncio.create_task(sample_server(url, samples))
    await run_clients(url, mix, expected, seconds=arguments.seconds, seed=arguments.seed + 1, **load)
    sampling.cancel()
    seconds = time.monotonic() - start
    metrics = await check_idle(url, outcomes)
    await check_answers(url, mix, expected, outcomes)
    growth = memory_growth(samples)
    if growth is not None and growth > arguments.max_growth:
        outcomes.violation("memory", f"grew by {100 * growth:.1f}% from the second quarter of the time to the last")
    print_report(outcomes, samples, metrics, seconds)
    print(f"\n{'all is well' if not outcomes.num_violations else f'{outcomes.num_violations} violations'}")
    return not outcomes.num_violations


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the test; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    own, of_server = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, help="how many ask at once")
    parser.add_argument("--seconds", type=float, default=300.0, help="for how long")
    parser.add_argument("--warmup", type=float, default=30.0, help="seconds of load before memory is watched")
    parser.add_argument("--leave", type=float, default=0.25, help="share of requests whose client loses patience")
    parser.add_argument("--max-growth", type=float, default=0.05, help="of memory, after a quarter of the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-url", help="a server that runs already (default: one is started)")
    parsed = parser.parse_args(own)
    with contextlib.ExitStack() as stack:
        url = parsed.base_url or stack.enter_context(server_process([*SERVER_ARGUMENTS, *of_server]))
        return 0 if asyncio.run(load_test(url, parsed)) else 1


if __name__ == "__main__":
    sys.exit(main())
