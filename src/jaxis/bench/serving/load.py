"""Sends requests at given times regardless of earlier ones, or as slots become free."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxis.bench.serving.client import RequestResult, ServingClient
from jaxis.engine.drafting.draft_counts import DraftCounts


@dataclass(frozen=True)
class LoadResult:
    """The outcome of a load test.

    Attributes:
      results: One for each request, in the order in which they were due.
      duration_seconds: From when the first request was due to the last byte.
      cpu_seconds: CPU time of this process meanwhile.
      drafts: What became of the server's drafts meanwhile; None if it does not count any.
    """

    results: list[RequestResult]
    duration_seconds: float
    cpu_seconds: float
    drafts: DraftCounts | None = None


async def run_load(
    client: ServingClient,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> LoadResult:
    """Sends each body at its time.

    With `max_concurrency`, a request waits for a free slot. If arrivals are spread out, the wait counts towards its
    latency; if all are due at once, each request becomes due when it gets its slot.

    Args:
      client: Sends them.
      bodies: From `ServingClient.encode`.
      arrivals: Seconds from the start, ascending.
      max_concurrency: Most requests at once; None is no limit.
      progress: Called with the number of requests that have ended and of their tokens.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    closed_loop = max_concurrency is not None and not any(arrivals)
    num_ended = num_tokens = 0
    drafts_before = await client.draft_counts()
    start_cpu, start = time.process_time(), time.perf_counter()

    async def run_one(body: bytes, due: float) -> RequestResult:
        nonlocal num_ended, num_tokens
        async with places:
            result = await client.send(body, time.perf_counter() if closed_loop else due)
        num_ended += 1
        num_tokens += result.num_output_tokens or 0
        progress(num_ended, num_tokens)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, arrival in zip(bodies, arrivals, strict=True):
            due = start + arrival
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(run_one(body, due)))
    results = [task.result() for task in tasks]
    end = max((result.end_time for result in results), default=start)
    cpu_seconds = time.process_time() - start_cpu
    drafts = await client.draft_counts()
    if drafts is not None and drafts_before is not None:
        drafts = drafts.since(drafts_before)
    return LoadResult(results, end - start, cpu_seconds, drafts)


def allow_many_connections() -> None:
    """Raises this process's limit on open files as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
