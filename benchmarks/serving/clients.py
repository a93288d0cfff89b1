"""Clients that ask at random, leave at random, and check every answer."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from serving.answer_forms import Answer, FailedError
from serving.answers import RefusedError, ask
from serving.request_mix import MixItem

HANG_SECONDS = 120.0
MAX_VIOLATIONS = 20  # that are kept to be printed


@dataclass
class Outcomes:
    """What became of the requests.

    Attributes:
      counts: Of each outcome: "right", "left", "refused 429", ..., "wrong", "failed", "hung".
      violations: What must not happen, in words: the first of them.
      num_violations: All.
      seconds: Each right answer's time.
    """

    counts: Counter = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    num_violations: int = 0
    seconds: list[float] = field(default_factory=list)

    def usual_seconds(self) -> float:
        """The median time of the last answers; 1 before there are any."""
        return statistics.median(self.seconds[-100:] or [1.0])

    def violation(self, kind: str, text: str) -> None:
        """Notes something that must not happen."""
        self.counts[kind] += 1
        self.num_violations += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(f"{kind}: {text}")


def open_session(url: str) -> aiohttp.ClientSession:
    """A session whose paths begin at the URL, with any number of connections."""
    return aiohttp.ClientSession(
        url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=HANG_SECONDS)
    )


async def idle_answers(url: str, mix: Sequence[MixItem]) -> dict[str, Answer]:
    """Each request's answer while there is nothing else to do, by name."""
    async with open_session(url) as session:
        return {item.name: await ask(session, item, stream=False) for item in mix}


async def run_clients(
    url: str,
    mix: Sequence[MixItem],
    expected: Mapping[str, Answer],
    *,
    num_clients: int,
    seconds: float,
    leave_share: float,
    seed: int,
    outcomes: Outcomes,
) -> None:
    """Has clients ask one request after another, half of them streamed, for a while.

    Args:
      url: Of the server.
      mix: What to ask.
      expected: The right answers by name.
      num_clients: How many at once.
      seconds: For how long; what runs then may end.
      leave_share: Share of the requests whose client disconnects before the end.
      seed: Of what is random.
      outcomes: Takes in what becomes of the requests.
    """
    deadline = time.monotonic() + seconds

    async def run_client(number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        async with open_session(url) as session:
            while time.monotonic() < deadline:
                item, stream = rng.choice(mix), rng.random() < 0.5
                leaves = rng.random() < leave_share
                patience = rng.random() * outcomes.usual_seconds() if leaves else None
                await _ask_once(session, item, expected[item.name], outcomes, stream=stream, patience=patience, rng=rng)

    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            group.create_task(run_client(number))


async def _ask_once(
    session: aiohttp.ClientSession,
    item: MixItem,
    expected: Answer,
    outcomes: Outcomes,
    *,
    stream: bool,
    patience: float | None,
    rng: random.Random,
) -> None:
    start = time.monotonic()
    what = f"{item.name}, {'streamed' if stream else 'whole'}"
    try:
        async with asyncio.timeout(patience):  # cancels the request, which closes its connection
            answer = await ask(session, item, stream=stream)
    except RefusedError as refusal:
        outcomes.counts[f"refused {refusal.status}"] += 1
        await asyncio.sleep(refusal.retry_after * (0.5 + rng.random()))
    except TimeoutError:
        if patience is not None and time.monotonic() - start < HANG_SECONDS:
            outcomes.counts["left"] += 1
        else:
            outcomes.violation("hung", f"{what}: no answer in {HANG_SECONDS:g} s")
    except FailedError as error:
        outcomes.violation("failed", f"{what}: {error}")
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        outcomes.violation("failed", f"{what}: {type(error).__name__}: {error}")
    else:
        outcomes.seconds.append(time.monotonic() - start)
        if answer == expected:
            outcomes.counts["right"] += 1
        else:
            outcomes.violation("wrong", f"{what}: {first_difference(expected, answer)}")


def first_difference(expected: Answer, answer: Answer) -> str:
    """Where two answers differ first, in one line."""
    for index, choice in expected["choices"].items():
        got = answer["choices"].get(index, {})
        for name, value in choice.items():
            if got.get(name) != value:
                return f"choice {index}, {name}: expected {str(value)[:300]!r}, got {str(got.get(name))[:300]!r}"
    return f"expected {str(expected)[-80:]}, got {str(answer)[-80:]}"
